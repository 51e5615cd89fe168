-- purpose: which call stacks leak, the surest and largest first: how much per request and per hour, how sure, since when
-- reads: stack_windows (windows), traffic (raw), processes (raw, by current_processes), stacks (raw), device_windows (windows), devices (raw), kv_pool_conservation (raw)
-- parameters: none; as a function it takes settings: leak_by_stack('block_minutes:2,warmup_minutes:2,min_requests:100') for a short recording
-- columns:
--   rank | - | 1 is the first to look at: by tier, then by the lower bound of the growth per hour
--   tier | - | confirmed, suspect, ambiguous (bytes alone cannot tell), insufficient (too little recorded: one row for the process)
--   detector | - | growth (with requests or time), quiesce (from one moment at rest to the next), peak_recovery (what peaks leave), kv_pool (pages that do not add up)
--   host | - | host name
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it; NULL if not certain
--   memory_kind | - | kind of memory
--   byte_class | - | physical, host, virtual or sub_allocated. Never add up bytes of two classes
--   layer | - | driver, runtime or framework
--   stack_id | - | stack that allocated; joins stacks; NULL: no stack was taken
--   folded | - | function names, outermost first, joined by ';'
--   function | - | innermost function that belongs to no driver, runtime or allocator
--   module | - | its library, program or source file
--   bytes_per_request | bytes | growth per completed request; NULL without traffic
--   bytes_per_request_low | bytes | lower bound: three standard errors below, beside the explanation that leaves least
--   bytes_per_request_high | bytes | upper bound: three standard errors above
--   bytes_per_hour | bytes/h | growth per hour
--   bytes_per_hour_low | bytes/h | lower bound, likewise
--   bytes_per_hour_high | bytes/h | upper bound, likewise
--   minimum_detectable_bytes_per_request | bytes | a leak smaller than this would not have been found in this stack
--   live_bytes | bytes | live at the end of the recording
--   live_count | allocations | how many
--   growth_bytes | bytes | how much more than at since
--   growth_share | ratio | share of the growth of all stacks of the process, byte class and layer, since the warm-up or since, as far as it is live at the end; NULL if none grew
--   oldest_live_age_seconds | s | age of its oldest allocation at the end; NULL if not known
--   survivor_bytes | bytes | at least so much is older than a block (30 min) and lives
--   monotonic_share | ratio | share of the steps from block to block (or from one moment at rest to the next) that do not fall, load taken off
--   first_seen | time | when it first was a suspect
--   confirmed_at | time | when it had passed three evaluations in a row; NULL if it has not
--   since | time | when the growth seems to have begun
--   projected_oom_at | time | when the card is full if this stack goes on so and nothing else changes; NULL if the card's free bytes are not known
--   ambiguous_reason | - | why it is ambiguous or insufficient, or what a suspect lacks
--   settled_by | - | what would settle it
--   statistics | - | the figures behind the verdict
--   overlaps | - | said where bytes of one class lie within bytes of another that is reported too: the same leak seen twice
--   same_function_rows | rows | how many more rows of the process, layer and memory_kind have the same function; NULL without one. May be one place whose stack was whole in some calls and cut short in others (docs/stacks.md); leak_by_function adds them up
--   version | - | what tells versions of a program apart: the pod template's hash in the pod's name, else the build id of module, else the framework's version
--   requests | requests | completed after the warm-up; NULL without traffic
--   recorded_until | time | end of what was judged
--   traffic_scope | - | whose traffic it was judged by: process, pod, container, host (where there are no pods); NULL: none
--   lossy | - | windows of the process's stacks lost events: the numbers may be wrong
--   lossy_windows | windows | how many rows of stack_windows
-- formulas:
--   docs/leaks.md tells the method, its limits and the source of each constant; leak_rate has every evaluation
--   a stack that grew in an earlier lifetime of the same program on the same host up to a level and stayed there is ambiguous while it is below that level
--   framework blocks lie within memory that the framework took from the driver: where both grow, the framework's row comes first and names the culprit
--   a pool whose pages do not add up is confirmed after three such samples in a row; its bytes are not known
WITH verdicts AS (
    SELECT
        v.*,
        p.host, p.pid, p.exe, p.namespace, p.pod, p.framework_version,
        CASE
            WHEN v.memory_kind IN ('device', 'managed', 'array', 'vmm_physical') THEN 'physical'
            WHEN v.memory_kind IN ('pinned_host', 'registered_host') THEN 'host'
            WHEN v.memory_kind IN ('vmm_virtual', 'vmm_mapped') THEN 'virtual'
            WHEN v.memory_kind IN ('pool', 'framework_block') THEN 'sub_allocated'
            WHEN v.memory_kind = 'ipc' THEN 'ipc'
        END AS byte_class,
        -- What comes and goes with the load has not grown if it is gone at the end.
        greatest(least(v.growth_bytes, v.live_bytes), 0) AS kept_bytes
    FROM leak_verdicts() AS v
    LEFT JOIN current_processes AS p ON p.process_id = v.process_id
),
compared AS (
    SELECT
        *,
        sum(kept_bytes) OVER (PARTITION BY process_id, byte_class, layer) AS all_kept_bytes,
        max(CASE WHEN tier = 'clear' AND stack_id IS NOT NULL THEN plateau_bytes END) OVER (
            PARTITION BY host, exe, stack_id, memory_kind, layer
        ) AS earlier_level,
        row_number() OVER (PARTITION BY process_id, tier ORDER BY live_bytes DESC, stack_id) AS of_tier
    FROM verdicts
),
judged AS (
    SELECT
        *,
        tier IN ('confirmed', 'suspect')
            AND coalesce(live_bytes <= 1.02 * earlier_level AND live_bytes - growth_bytes < 0.8 * earlier_level, false)
            AS is_below_level
    FROM compared
    WHERE tier IN ('confirmed', 'suspect', 'ambiguous') OR (tier = 'insufficient' AND of_tier = 1)
),
named AS (
    SELECT
        CASE WHEN is_below_level THEN 'ambiguous' ELSE tier END AS tier,
        detector, host, process_id, pid, exe, namespace, pod, framework_version,
        CASE WHEN tier <> 'insufficient' THEN device END AS device,
        CASE WHEN tier <> 'insufficient' THEN memory_kind END AS memory_kind,
        CASE WHEN tier <> 'insufficient' THEN byte_class END AS byte_class,
        CASE WHEN tier <> 'insufficient' THEN layer END AS layer,
        CASE WHEN tier <> 'insufficient' THEN stack_id END AS stack_id,
        bytes_per_request, bytes_per_request_low, bytes_per_request_high,
        bytes_per_hour, bytes_per_hour_low, bytes_per_hour_high,
        minimum_detectable_bytes_per_request,
        CASE WHEN tier <> 'insufficient' THEN live_bytes END AS live_bytes,
        CASE WHEN tier <> 'insufficient' THEN live_count END AS live_count,
        CASE WHEN tier <> 'insufficient' THEN growth_bytes END AS growth_bytes,
        CASE WHEN tier <> 'insufficient' THEN CAST(kept_bytes AS DOUBLE) / nullif(all_kept_bytes, 0) END AS growth_share,
        CASE WHEN tier <> 'insufficient' THEN oldest_live_age_seconds END AS oldest_live_age_seconds,
        CASE WHEN tier <> 'insufficient' THEN survivor_bytes END AS survivor_bytes,
        monotonic_share, first_seen, confirmed_at, since, until, requests,
        CASE
            WHEN is_below_level THEN concat('an earlier lifetime filled to ', CAST(earlier_level AS VARCHAR), ' bytes and stayed there')
            ELSE reason
        END AS ambiguous_reason,
        CASE WHEN is_below_level THEN 'whether it grows past that level' ELSE settled_by END AS settled_by,
        statistics, traffic_scope, lossy_windows
    FROM judged
    UNION ALL
    SELECT
        CASE WHEN k.violations >= 3 THEN 'confirmed' ELSE 'suspect' END AS tier,
        'kv_pool' AS detector, k.host, k.process_id, p.pid, p.exe, p.namespace, p.pod, p.framework_version,
        NULL AS device, NULL AS memory_kind, NULL AS byte_class, NULL AS layer, NULL AS stack_id,
        NULL AS bytes_per_request, NULL AS bytes_per_request_low, NULL AS bytes_per_request_high,
        NULL AS bytes_per_hour, NULL AS bytes_per_hour_low, NULL AS bytes_per_hour_high,
        NULL AS minimum_detectable_bytes_per_request, NULL AS live_bytes, NULL AS live_count,
        NULL AS growth_bytes, NULL AS growth_share, NULL AS oldest_live_age_seconds, NULL AS survivor_bytes,
        NULL AS monotonic_share, k.violated_since AS first_seen,
        CASE WHEN k.violations >= 3 THEN k.ts END AS confirmed_at, k.violated_since AS since, k.ts AS until,
        NULL AS requests,
        CASE WHEN k.violations < 3 THEN 'counters read one after the other can be off for a sample' END AS ambiguous_reason,
        CASE WHEN k.violations < 3 THEN 'a violation that lasts' END AS settled_by,
        concat(
            k.engine, ' ', coalesce(k.endpoint, ''), ' pool of ', CAST(k.total_pages AS VARCHAR), ' pages: used + cached + free is off by ',
            CAST(k.imbalance_pages AS VARCHAR), ' pages (worst ', CAST(k.largest_imbalance_pages AS VARCHAR), ') in ',
            CAST(k.violations AS VARCHAR), ' of ', CAST(k.samples AS VARCHAR), ' samples'
        ) AS statistics,
        'process' AS traffic_scope, NULL AS lossy_windows
    FROM kv_pool_conservation AS k
    LEFT JOIN current_processes AS p ON p.process_id = k.process_id
    WHERE k.violated
),
stack_names AS (
    SELECT
        stack_id,
        min(folded) AS folded,
        min(allocating_frame(frames, 'function')) AS function,
        min(allocating_frame(frames, 'module')) AS module,
        min(allocating_frame(frames, 'build_id')) AS build_id
    FROM stacks
    GROUP BY stack_id
),
cards AS (
    SELECT process_id, device, max(gpu_uuid) AS gpu_uuid
    FROM device_windows
    WHERE device IS NOT NULL
    GROUP BY process_id, device
    HAVING count(DISTINCT gpu_uuid) = 1
),
free_now AS (
    SELECT gpu_uuid, last_value(free_bytes ORDER BY ts_ns) AS free_bytes
    FROM devices
    GROUP BY gpu_uuid
),
facts AS (
    SELECT
        n.*, c.gpu_uuid, s.folded, s.function, s.module, s.build_id, f.free_bytes,
        n.tier IN ('confirmed', 'suspect') AND n.layer = 'framework' AS is_inner,
        n.tier IN ('confirmed', 'suspect') AND n.byte_class = 'physical' AS is_outer
    FROM named AS n
    LEFT JOIN cards AS c ON c.process_id = n.process_id AND c.device = n.device
    LEFT JOIN free_now AS f ON f.gpu_uuid = c.gpu_uuid
    LEFT JOIN stack_names AS s ON s.stack_id = n.stack_id
),
overlapping AS (
    SELECT
        *,
        sum(CASE WHEN is_inner THEN 1 ELSE 0 END) OVER (PARTITION BY process_id) AS inner_rows,
        sum(CASE WHEN is_outer THEN 1 ELSE 0 END) OVER (PARTITION BY process_id) AS outer_rows,
        CASE
            WHEN function IS NOT NULL
            THEN count(*) OVER (PARTITION BY process_id, layer, memory_kind, function, module) - 1
        END AS same_function_rows
    FROM facts
)
SELECT
    row_number() OVER (
        ORDER BY
            CASE tier WHEN 'confirmed' THEN 1 WHEN 'suspect' THEN 2 WHEN 'ambiguous' THEN 3 ELSE 4 END,
            CASE WHEN is_outer AND inner_rows > 0 THEN 1 ELSE 0 END,
            bytes_per_hour_low DESC NULLS LAST,
            host, process_id, stack_id, memory_kind
    ) AS rank,
    tier, detector, host, process_id, pid, exe, namespace, pod, gpu_uuid, device, memory_kind,
    byte_class, layer, stack_id, folded, function, module,
    bytes_per_request, bytes_per_request_low, bytes_per_request_high,
    bytes_per_hour, bytes_per_hour_low, bytes_per_hour_high,
    minimum_detectable_bytes_per_request, live_bytes, live_count, growth_bytes, growth_share,
    oldest_live_age_seconds, survivor_bytes, monotonic_share, first_seen, confirmed_at, since,
    CASE
        WHEN tier IN ('confirmed', 'suspect') AND byte_class IN ('physical', 'sub_allocated')
             AND bytes_per_hour > 0 AND free_bytes / bytes_per_hour < 87600
        THEN arrow_cast(
            CAST(until AS BIGINT) + CAST(3.6e9 * free_bytes / bytes_per_hour AS BIGINT),
            'Timestamp(Microsecond, Some("UTC"))'
        )
    END AS projected_oom_at,
    ambiguous_reason, settled_by, statistics,
    CASE
        WHEN is_inner AND outer_rows > 0
        THEN concat('lies within physical memory that is reported too: ', CAST(outer_rows AS VARCHAR), ' stacks of this process')
        WHEN is_outer AND inner_rows > 0
        THEN concat('holds framework blocks that are reported too: ', CAST(inner_rows AS VARCHAR), ' stacks of this process')
    END AS overlaps,
    same_function_rows,
    coalesce(
        nullif(substring(regexp_match(pod, '-([bcdfghjklmnpqrstvwxz2456789]{8,10})-[bcdfghjklmnpqrstvwxz2456789]{5}$')[1], 1, 10), ''),
        build_id,
        framework_version
    ) AS version,
    requests, until AS recorded_until, traffic_scope,
    lossy_windows > 0 AS lossy, lossy_windows
FROM overlapping
ORDER BY rank
