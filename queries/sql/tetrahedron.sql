-- purpose: the four vertices of memory pressure (allocation, fragmentation, leak, peak) for every process, pod, device and host
-- reads: alloc_events (raw, by call_chains), segments, allocator_samples (raw, by fragmentation_now), devices (raw), agent_windows (windows), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   level | - | process, pod, device or host: what the row is about
--   host | - | host name
--   namespace | - | Kubernetes namespace (levels process and pod)
--   pod | - | Kubernetes pod (levels process and pod)
--   process_id | - | one process lifetime (level process)
--   pid | - | process id in the host's namespace (level process)
--   exe | - | path of the executable (level process)
--   gpu_uuid | - | the card; NULL if not certain, and on level host, whose rows cover all cards
--   device | - | level process: ordinal as the process sees it; level device: NVML index; otherwise NULL
--   live_bytes | bytes | allocation: traced physical device memory that is allocated now; without pool slices (pool_live_bytes)
--   used_bytes | bytes | allocation: in use by NVML, newest sample; of the card (level device), of the processes on it (process, pod), of all cards (host); NULL if NVML does not say
--   total_bytes | bytes | allocation: capacity of the card, of all cards on level host
--   utilization_ratio | ratio | allocation: used_bytes / total_bytes on levels device and host, live_bytes / total_bytes on levels process and pod
--   max_contiguous_block_bytes | bytes | fragmentation: largest request that would succeed, in the framework allocator of the row's process, of the best of its processes on the other levels; NULL: see fragmentation_reason
--   external_ratio | ratio | fragmentation: 1 - max_contiguous_block_bytes / all that is free, the driver's and the allocators'; NULL on level host, whose rows cover all cards; else see fragmentation_reason
--   internal_ratio | ratio | fragmentation: (reserved - active) / reserved of the framework allocators: cache slack, high is normal; NULL: see fragmentation_reason
--   fragmentation_reason | - | why fragmentation columns are NULL; NULL if none is (but external_ratio on level host)
--   leaked_at_exit_bytes | bytes | leak: physical device memory that only the end of its program (exit, or exec of another) gave back
--   growth_bytes_per_hour | bytes/h | leak: slope of live_bytes over the events; NULL with fewer than two moments
--   peak_live_bytes | bytes | peak: largest live_bytes at any moment, over events
--   peak_ratio | ratio | peak: peak_live_bytes / total_bytes
--   host_live_bytes | bytes | pinned and registered main memory that is live now
--   host_peak_bytes | bytes | largest host_live_bytes at any moment
--   allocations | calls | calls that gave memory: physical, host and pool slices; not addresses
--   frees | calls | calls that gave memory back
--   implicit_frees | allocations | allocations that ended without a call of their own
--   failed_allocations | calls | call chains that failed to allocate
--   failed_frees | calls | call chains that failed to free
--   first_event | time | oldest event behind the row
--   last_event | time | newest event behind the row
--   lost | calls | calls the host's agent lost in windows that touch the row's time; NULL if there are no windows
--   lossy | - | a window of its time is lossy: the numbers of this row may be wrong; NULL if not known
--   pool_live_bytes | bytes | slices of stream-ordered pools that are in use now: a lower bound of the pools' memory, which no call shows; not part of live_bytes
--   pool_peak_bytes | bytes | largest pool_live_bytes at any moment
-- formulas:
--   metrics 1-3, 11 of the metric list; peak is the maximum of the running sum in the order of seq within host, boot and agent
--   what was allocated before the host last booted is not live, though its frees were never seen; it still counts for peaks and calls
--   device figures hold physical bytes (device, managed, array, vmm_physical), host figures pinned_host and registered_host, pool figures the slices of pools; addresses (address_space), ipc and what was there before the agent (reconciliation) are in none of them
--   fragmentation is that of fragmentation_now: it needs a framework allocator's own blocks. Holes between driver addresses are not holes in memory, so nothing is derived from them. Processes that have ended have none
--   framework blocks lie within the physical bytes counted here: their rows are in none of the numbers. Imported snapshots are no processes of a host and not here: see fragmentation_now and allocator_timeline
--   leaked_at_exit_bytes is what was live at the end, not a verdict: programs leave weights and workspaces to the exit
--   growth_bytes_per_hour is the least-squares slope of live_bytes after each event against its time, warm-up included; a short window extrapolates wildly
--   the row's time for lost: a process or pod from its start to its end, a device or host always
WITH facts AS (
    SELECT
        c.host, c.boot_id, c.agent_id,
        -- NULL where the process is not known. Made to true or false only where it is used: DataFusion
        -- plans a NOT NULL computed here and then fails on the union below, where it may be NULL.
        p.rebooted, p.namespace, p.pod, c.process_id, c.pid, p.exe, c.gpu_uuid, c.device,
        c.seq, c.ts, c.ts_ns,
        coalesce(p.started, c.ts) AS since,
        p.ended AS until,
        CASE WHEN c.byte_class = 'physical' THEN c.live_delta_bytes ELSE 0 END AS device_delta,
        CASE WHEN c.byte_class = 'host' THEN c.live_delta_bytes ELSE 0 END AS host_delta,
        CASE WHEN c.memory_kind = 'pool' THEN c.live_delta_bytes ELSE 0 END AS pool_delta,
        CASE WHEN c.byte_class = 'physical' AND c.implicit AND c.api IN ('process_exit', 'process_exec') THEN c.bytes ELSE 0 END AS exit_bytes,
        c.byte_class = 'physical' AND NOT c.failed AS moves_device,
        CAST(NOT c.failed AND c.op IN ('alloc', 'register') AS BIGINT) AS is_allocation,
        CAST(NOT c.failed AND c.op IN ('free', 'unregister') AND NOT c.implicit AS BIGINT) AS is_free,
        CAST(NOT c.failed AND c.op IN ('free', 'unregister') AND c.implicit AS BIGINT) AS is_implicit_free,
        CAST(c.failed AND c.op IN ('alloc', 'register') AS BIGINT) AS is_failed_allocation,
        CAST(c.failed AND c.op IN ('free', 'unregister') AS BIGINT) AS is_failed_free
    FROM call_chains AS c
    LEFT JOIN current_processes AS p ON p.process_id = c.process_id
    WHERE coalesce(c.layer, '') <> 'framework'
),
newest_sample AS (
    SELECT * FROM (
        SELECT
            host, gpu_uuid, device, used_bytes, total_bytes, processes,
            row_number() OVER (PARTITION BY host, gpu_uuid ORDER BY ts_ns DESC, batch_seq DESC) AS newest_first
        FROM devices
    )
    WHERE newest_first = 1
),
levels AS (
    SELECT * FROM (VALUES ('process'), ('pod'), ('device'), ('host')) AS named (level)
),
-- Every fact once per level it counts on, with the columns that name the level's scope.
scoped AS (
    SELECT
        l.level, f.host, f.boot_id, f.agent_id, f.rebooted,
        CASE WHEN l.level IN ('process', 'pod') THEN f.namespace END AS namespace,
        CASE WHEN l.level IN ('process', 'pod') THEN f.pod END AS pod,
        CASE WHEN l.level = 'process' THEN f.process_id END AS process_id,
        CASE WHEN l.level = 'process' THEN f.pid END AS pid,
        CASE WHEN l.level = 'process' THEN f.exe END AS exe,
        CASE WHEN l.level <> 'host' THEN f.gpu_uuid END AS gpu_uuid,
        CASE WHEN l.level = 'process' THEN f.device END AS device,
        f.seq, f.ts, f.ts_ns,
        CASE WHEN l.level IN ('process', 'pod') THEN f.since END AS since,
        CASE WHEN l.level IN ('process', 'pod') THEN f.until END AS until,
        f.device_delta, f.host_delta, f.pool_delta, f.exit_bytes, f.moves_device,
        f.is_allocation, f.is_free, f.is_implicit_free, f.is_failed_allocation, f.is_failed_free
    FROM facts AS f
    CROSS JOIN levels AS l
    WHERE l.level <> 'pod' OR f.pod IS NOT NULL
    -- Cards without a traced event have rows too: an idle card, or one that others use.
    UNION ALL
    SELECT
        l.level, s.host, NULL, NULL, false, NULL, NULL, NULL, NULL, NULL,
        CASE WHEN l.level = 'device' THEN s.gpu_uuid END, NULL,
        NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0, false, 0, 0, 0, 0, 0
    FROM newest_sample AS s
    CROSS JOIN levels AS l
    WHERE l.level IN ('device', 'host')
),
running AS (
    SELECT
        *,
        SUM(device_delta) OVER scope AS device_after,
        SUM(host_delta) OVER scope AS host_after,
        SUM(pool_delta) OVER scope AS pool_after
    FROM scoped
    WINDOW scope AS (
        PARTITION BY level, host, boot_id, agent_id, namespace, pod, process_id, gpu_uuid, device
        ORDER BY seq
        ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    )
),
totals AS (
    SELECT
        level, host, namespace, pod, process_id, gpu_uuid, device,
        max(pid) AS pid,
        max(exe) AS exe,
        coalesce(sum(device_delta) FILTER (WHERE NOT coalesce(rebooted, false)), 0) AS live_bytes,
        sum(exit_bytes) AS leaked_at_exit_bytes,
        regr_slope(device_after, ts_ns / 3.6e12) FILTER (WHERE moves_device) AS growth_bytes_per_hour,
        greatest(coalesce(max(device_after), 0), 0) AS peak_live_bytes,
        coalesce(sum(host_delta) FILTER (WHERE NOT coalesce(rebooted, false)), 0) AS host_live_bytes,
        greatest(coalesce(max(host_after), 0), 0) AS host_peak_bytes,
        coalesce(sum(pool_delta) FILTER (WHERE NOT coalesce(rebooted, false)), 0) AS pool_live_bytes,
        greatest(coalesce(max(pool_after), 0), 0) AS pool_peak_bytes,
        sum(is_allocation) AS allocations,
        sum(is_free) AS frees,
        sum(is_implicit_free) AS implicit_frees,
        sum(is_failed_allocation) AS failed_allocations,
        sum(is_failed_free) AS failed_frees,
        min(ts) AS first_event,
        max(ts) AS last_event,
        min(since) AS since,
        CASE WHEN count(until) = count(*) THEN max(until) END AS until
    FROM running
    GROUP BY level, host, namespace, pod, process_id, gpu_uuid, device
),
lossy_windows AS (
    SELECT host, window_start, window_end, lost FROM agent_windows WHERE lossy
),
-- The totals with what was lost in their time. Grouped by the same columns as the totals, so
-- that every max() here is over equal values.
with_loss AS (
    SELECT
        t.level, t.host, t.namespace, t.pod, t.process_id, t.gpu_uuid, t.device,
        max(t.pid) AS pid, max(t.exe) AS exe, max(t.live_bytes) AS live_bytes,
        max(t.leaked_at_exit_bytes) AS leaked_at_exit_bytes,
        max(t.growth_bytes_per_hour) AS growth_bytes_per_hour,
        max(t.peak_live_bytes) AS peak_live_bytes,
        max(t.host_live_bytes) AS host_live_bytes, max(t.host_peak_bytes) AS host_peak_bytes,
        max(t.pool_live_bytes) AS pool_live_bytes, max(t.pool_peak_bytes) AS pool_peak_bytes,
        max(t.allocations) AS allocations, max(t.frees) AS frees,
        max(t.implicit_frees) AS implicit_frees,
        max(t.failed_allocations) AS failed_allocations, max(t.failed_frees) AS failed_frees,
        max(t.first_event) AS first_event, max(t.last_event) AS last_event,
        coalesce(sum(w.lost), 0) AS lost,
        count(w.host) AS lossy_windows
    FROM totals AS t
    LEFT JOIN lossy_windows AS w
      ON w.host = t.host
     AND (t.since IS NULL OR w.window_end >= t.since)
     AND (t.until IS NULL OR w.window_start <= t.until)
    GROUP BY t.level, t.host, t.namespace, t.pod, t.process_id, t.gpu_uuid, t.device
),
watched_hosts AS (
    SELECT DISTINCT host FROM agent_windows
),
sample_processes AS (
    SELECT host, gpu_uuid, listed['process_id'] AS process_id, listed['used_bytes'] AS used_bytes
    FROM (SELECT host, gpu_uuid, unnest(processes) AS listed FROM newest_sample)
),
capacity AS (
    SELECT 'device' AS level, host, NULL AS namespace, NULL AS pod, NULL AS process_id, gpu_uuid, device,
        used_bytes, total_bytes
    FROM newest_sample
    UNION ALL
    SELECT 'host', host, NULL, NULL, NULL, NULL, NULL,
        CASE WHEN count(used_bytes) = count(*) THEN sum(used_bytes) END,
        CASE WHEN count(total_bytes) = count(*) THEN sum(total_bytes) END
    FROM newest_sample
    GROUP BY host
    UNION ALL
    SELECT 'process', s.host, p.namespace, p.pod, s.process_id, s.gpu_uuid, NULL,
        CASE WHEN count(s.used_bytes) = count(*) THEN sum(s.used_bytes) END, NULL
    FROM sample_processes AS s
    LEFT JOIN current_processes AS p ON p.process_id = s.process_id
    WHERE s.process_id IS NOT NULL
    GROUP BY s.host, p.namespace, p.pod, s.process_id, s.gpu_uuid
    UNION ALL
    SELECT 'pod', s.host, p.namespace, p.pod, NULL, s.gpu_uuid, NULL,
        CASE WHEN count(s.used_bytes) = count(*) THEN sum(s.used_bytes) END, NULL
    FROM sample_processes AS s
    JOIN current_processes AS p ON p.process_id = s.process_id
    WHERE p.pod IS NOT NULL
    GROUP BY s.host, p.namespace, p.pod, s.gpu_uuid
),
-- What the allocators of living processes say, on every level.
allocators AS (
    SELECT
        l.level, f.host,
        CASE WHEN l.level IN ('process', 'pod') THEN f.namespace END AS namespace,
        CASE WHEN l.level IN ('process', 'pod') THEN f.pod END AS pod,
        CASE WHEN l.level = 'process' THEN f.process_id END AS process_id,
        CASE WHEN l.level <> 'host' THEN f.gpu_uuid END AS gpu_uuid,
        CASE WHEN l.level = 'process' THEN f.device END AS device,
        CASE WHEN count(f.max_contiguous_bytes) = count(*) THEN max(f.max_contiguous_bytes) END AS max_contiguous_bytes,
        CASE WHEN l.level <> 'host' AND count(f.device_free_bytes) = count(*) THEN max(f.device_free_bytes) END AS device_free_bytes,
        sum(f.inactive_bytes) AS inactive_bytes,
        sum(f.reserved_bytes) AS reserved_bytes
    FROM fragmentation_now AS f
    CROSS JOIN levels AS l
    LEFT JOIN current_processes AS p ON p.process_id = f.process_id
    WHERE f.source <> 'import' AND f.process_ended IS NULL AND NOT coalesce(p.rebooted, false)
      AND (l.level <> 'pod' OR f.pod IS NOT NULL)
    GROUP BY 1, 2, 3, 4, 5, 6, 7
)
SELECT
    t.level, t.host, t.namespace, t.pod, t.process_id, t.pid, t.exe, t.gpu_uuid,
    CASE WHEN t.level = 'device' THEN c.device ELSE t.device END AS device,
    t.live_bytes,
    c.used_bytes,
    coalesce(c.total_bytes, card.total_bytes) AS total_bytes,
    CASE
        WHEN t.level IN ('device', 'host') THEN CAST(c.used_bytes AS DOUBLE)
        ELSE CAST(t.live_bytes AS DOUBLE)
    END / nullif(coalesce(c.total_bytes, card.total_bytes), 0) AS utilization_ratio,
    a.max_contiguous_bytes AS max_contiguous_block_bytes,
    1 - CAST(a.max_contiguous_bytes AS DOUBLE) / nullif(a.device_free_bytes + a.inactive_bytes, 0) AS external_ratio,
    CAST(a.inactive_bytes AS DOUBLE) / nullif(a.reserved_bytes, 0) AS internal_ratio,
    CASE
        WHEN a.host IS NULL THEN 'no framework allocator events: the driver layer cannot see holes'
        WHEN a.max_contiguous_bytes IS NULL THEN 'the driver''s free bytes are not known'
    END AS fragmentation_reason,
    t.leaked_at_exit_bytes,
    t.growth_bytes_per_hour,
    t.peak_live_bytes,
    CAST(t.peak_live_bytes AS DOUBLE) / nullif(coalesce(c.total_bytes, card.total_bytes), 0) AS peak_ratio,
    t.host_live_bytes,
    t.host_peak_bytes,
    t.allocations, t.frees, t.implicit_frees, t.failed_allocations, t.failed_frees,
    t.first_event, t.last_event,
    CASE WHEN h.host IS NOT NULL THEN t.lost END AS lost,
    CASE WHEN h.host IS NOT NULL THEN t.lossy_windows > 0 END AS lossy,
    t.pool_live_bytes, t.pool_peak_bytes
FROM with_loss AS t
-- The parentheses are needed: without them the parser takes all that follows IS NOT DISTINCT
-- FROM for its right side.
LEFT JOIN capacity AS c
  ON c.level = t.level
 AND c.host = t.host
 AND (c.namespace IS NOT DISTINCT FROM t.namespace)
 AND (c.pod IS NOT DISTINCT FROM t.pod)
 AND (c.process_id IS NOT DISTINCT FROM t.process_id)
 AND (c.gpu_uuid IS NOT DISTINCT FROM t.gpu_uuid)
LEFT JOIN newest_sample AS card
  ON card.host = t.host AND card.gpu_uuid = t.gpu_uuid
LEFT JOIN watched_hosts AS h ON h.host = t.host
LEFT JOIN allocators AS a
  ON a.level = t.level
 AND a.host = t.host
 AND (a.namespace IS NOT DISTINCT FROM t.namespace)
 AND (a.pod IS NOT DISTINCT FROM t.pod)
 AND (a.process_id IS NOT DISTINCT FROM t.process_id)
 AND (a.gpu_uuid IS NOT DISTINCT FROM t.gpu_uuid)
 AND (a.device IS NOT DISTINCT FROM t.device)
