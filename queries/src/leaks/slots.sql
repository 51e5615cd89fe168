-- What the leak detectors read: sums over slots of SLOT_NS nanoseconds, one group per process.
-- part 1 is load, part 2 a stack. SLOT_NS is put in before the text is planned.
--
-- Everything heavy is a hash aggregation over unsorted windows: no window function runs over
-- stack_windows, which may have tens of millions of rows.
WITH samples AS (
    SELECT
        host, process_id, endpoint, ts_ns, completed_total,
        CAST(running AS DOUBLE) AS running,
        coalesce(kv_usage_ratio, CAST(kv_used_pages AS DOUBLE) / nullif(kv_total_pages, 0)) AS kv,
        running + coalesce(waiting, 0) AS served,
        lag(completed_total) OVER source AS completed_before,
        lag(running + coalesce(waiting, 0)) OVER source AS served_before
    FROM traffic
    WINDOW source AS (PARTITION BY host, process_id, endpoint, engine, model ORDER BY ts_ns)
),
-- resting_since: first sample of the run at rest that holds this one.
marked AS (
    SELECT
        *,
        -- A counter that fell began anew.
        CASE
            WHEN completed_total >= completed_before THEN completed_total - completed_before
            WHEN completed_total < completed_before THEN completed_total
        END AS completed,
        max(CASE WHEN served = 0 AND coalesce(served_before, 1) > 0 THEN ts_ns END) OVER (
            PARTITION BY host, process_id, endpoint ORDER BY ts_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS resting_since
    FROM samples
),
source_slots AS (
    SELECT
        host, process_id, endpoint, ts_ns / SLOT_NS AS slot,
        avg(running) AS running, max(running) AS running_peak, avg(kv) AS kv, max(kv) AS kv_peak,
        sum(completed) AS completed,
        -- A minute at rest: the roll-up of a window is made at its end, and must be at rest too.
        max(CASE WHEN served = 0 AND ts_ns - resting_since >= 60000000000 THEN ts_ns END) AS quiet_ns
    FROM marked
    GROUP BY host, process_id, endpoint, ts_ns / SLOT_NS
),
-- Whose load a process serves: its own engine's; else its pod's, its container's; else, where
-- there are no pods, its host's. An engine's workers hold the memory, its front end the figures.
sources AS (
    SELECT t.host, t.process_id, t.endpoint, p.namespace, p.pod, p.container_id
    FROM (SELECT DISTINCT host, process_id, endpoint FROM traffic) AS t
    LEFT JOIN current_processes AS p ON p.process_id = t.process_id
),
served_by AS (
    SELECT process_id AS holder, host, process_id, endpoint, 1 AS scope
    FROM sources
    WHERE process_id IS NOT NULL
    UNION ALL
    SELECT
        p.process_id, s.host, s.process_id, s.endpoint,
        CASE
            WHEN s.pod = p.pod AND coalesce(s.namespace, '') = coalesce(p.namespace, '') THEN 2
            WHEN s.container_id = p.container_id THEN 3
            WHEN s.pod IS NULL AND p.pod IS NULL THEN 4
        END
    FROM sources AS s
    JOIN current_processes AS p ON p.host = s.host
    WHERE p.process_id IS DISTINCT FROM s.process_id
),
nearest AS (
    SELECT holder, host, process_id, endpoint, scope
    FROM (
        SELECT *, min(scope) OVER (PARTITION BY holder) AS nearest_scope
        FROM served_by
        WHERE scope IS NOT NULL
    )
    WHERE scope = nearest_scope
),
loads AS (
    SELECT
        n.holder AS process_id, l.slot,
        sum(l.running) AS running, sum(l.running_peak) AS running_peak,
        avg(l.kv) AS kv, avg(l.kv_peak) AS kv_peak, sum(l.completed) AS completed,
        CASE WHEN count(l.quiet_ns) = count(*) THEN min(l.quiet_ns) END AS quiet_ns,
        max(n.scope) AS scope
    FROM source_slots AS l
    JOIN nearest AS n
      ON n.host = l.host
     AND (n.process_id IS NOT DISTINCT FROM l.process_id)
     AND (n.endpoint IS NOT DISTINCT FROM l.endpoint)
    GROUP BY n.holder, l.slot
),
quiet AS (
    SELECT process_id, slot, quiet_ns FROM loads WHERE quiet_ns IS NOT NULL
),
held AS (
    SELECT
        w.process_id, w.stack_id, w.device, w.memory_kind, w.layer, w.ts_ns / SLOT_NS AS slot,
        last_value(w.live_bytes ORDER BY w.ts_ns) AS live_bytes,
        -- Live bytes hold from their window's start: the slot's mean is its last value less every
        -- change times the share of the slot before it.
        sum((w.alloc_bytes - w.free_bytes) * (w.ts_ns % SLOT_NS / 1000000)) AS moment,
        sum(w.free_bytes) AS freed_bytes,
        sum(w.alloc_count - w.free_count) AS net_count,
        -- The oldest is only ever replaced by a younger one.
        max(CAST(w.window_end AS BIGINT) * 1000 - w.oldest_live_age_ns) AS born_ns,
        sum(CASE WHEN CAST(w.window_end AS BIGINT) * 1000 > q.quiet_ns THEN w.alloc_bytes - w.free_bytes END) AS after_rest,
        sum(CASE WHEN w.lossy THEN 1 ELSE 0 END) AS lossy
    FROM stack_windows AS w
    LEFT JOIN quiet AS q ON q.process_id = w.process_id AND q.slot = w.ts_ns / SLOT_NS
    GROUP BY w.process_id, w.stack_id, w.device, w.memory_kind, w.layer, w.ts_ns / SLOT_NS
)
SELECT
    process_id, 1 AS part, slot, CAST(NULL AS BIGINT) AS stack_id, CAST(NULL AS INTEGER) AS device,
    CAST(NULL AS VARCHAR) AS memory_kind, CAST(NULL AS VARCHAR) AS layer,
    CAST(NULL AS BIGINT) AS live_bytes, CAST(NULL AS BIGINT) AS moment,
    CAST(NULL AS BIGINT) AS freed_bytes, CAST(NULL AS BIGINT) AS net_count,
    CAST(NULL AS BIGINT) AS born_ns, CAST(NULL AS BIGINT) AS after_rest, CAST(NULL AS BIGINT) AS lossy,
    running, running_peak, kv, kv_peak, CAST(completed AS DOUBLE) AS completed, quiet_ns,
    CAST(scope AS BIGINT) AS scope
FROM loads
UNION ALL
SELECT
    process_id, 2, slot, stack_id, device, memory_kind, layer, live_bytes, moment, freed_bytes, net_count,
    born_ns, after_rest, lossy, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM held
