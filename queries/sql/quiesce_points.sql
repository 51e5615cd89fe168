-- purpose: what each process held at moments when its engine served nothing, and how much more than at the moment before
-- reads: traffic (raw), device_windows (windows), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   ts | time | the moment: the last sample of a run at rest of a minute or more
--   resting_since | time | first sample of the run
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
--   layer | - | layer of the counted rows
--   completed_total | requests | completed so far
--   live_bytes | bytes | live then
--   growth_bytes | bytes | more than at the moment before; NULL at the first
--   hours | h | since the moment before
--   requests | requests | completed since the moment before
--   bytes_per_hour | bytes/h | growth_bytes / hours (metric 8, gpu.leak.zero_qps_diff_bytes_per_hour)
--   bytes_per_request | bytes | growth_bytes / requests; NULL if none was served
--   lossy | - | the window that tells what was held lost something
-- formulas:
--   at rest: running and waiting are 0 in every sample for a minute or more; engines whose running is not known have no such moments
--   only processes with traffic of their own are here; leak_by_stack looks at the moments stack by stack (detector quiesce)
--   bytes are those at the end of the newest window that ended before the moment
WITH samples AS (
    SELECT
        host, process_id, endpoint, ts_ns, completed_total,
        running + coalesce(waiting, 0) AS served,
        lag(running + coalesce(waiting, 0)) OVER source AS served_before,
        lead(running + coalesce(waiting, 0)) OVER source AS served_after
    FROM traffic
    WHERE process_id IS NOT NULL
    WINDOW source AS (PARTITION BY host, process_id, endpoint ORDER BY ts_ns)
),
marked AS (
    SELECT
        *,
        max(CASE WHEN served = 0 AND coalesce(served_before, 1) > 0 THEN ts_ns END) OVER (
            PARTITION BY host, process_id, endpoint ORDER BY ts_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS resting_since
    FROM samples
),
moments AS (
    SELECT
        host, process_id, ts_ns, resting_since, completed_total
    FROM marked
    WHERE served = 0 AND ts_ns - resting_since >= 60000000000 AND coalesce(served_after, 1) > 0
),
-- What a process holds, of each card and kind: its windows, and its moments among them.
held AS (
    SELECT
        process_id, device, memory_kind, layer, gpu_uuid, live_bytes, lossy,
        CAST(window_end AS BIGINT) * 1000 AS at_ns, ts_ns AS window_ns, 0 AS is_moment,
        NULL AS host, NULL AS resting_since, NULL AS completed_total
    FROM device_windows
    WHERE process_id IN (SELECT process_id FROM moments)
    UNION ALL
    SELECT
        k.process_id, k.device, k.memory_kind, k.layer, NULL AS gpu_uuid, NULL AS live_bytes, NULL AS lossy,
        m.ts_ns AS at_ns, NULL AS window_ns, 1 AS is_moment,
        m.host, m.resting_since, m.completed_total
    FROM moments AS m
    JOIN (SELECT DISTINCT process_id, device, memory_kind, layer FROM device_windows) AS k
        ON k.process_id = m.process_id
),
-- Each belongs to the newest window that ended before it: numbered in order, so that the months of windows
-- are sorted once instead of compared with every moment.
placed AS (
    SELECT
        *,
        count(window_ns) OVER (
            PARTITION BY process_id, device, memory_kind, layer ORDER BY at_ns, is_moment, window_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS window_number
    FROM held
),
known AS (
    SELECT
        process_id, device, memory_kind, layer, at_ns AS ts_ns, is_moment, window_number,
        host, resting_since, completed_total,
        first_value(gpu_uuid) OVER of_window AS gpu_uuid,
        first_value(live_bytes) OVER of_window AS live_bytes,
        first_value(lossy) OVER of_window AS lossy
    FROM placed
    WINDOW of_window AS (
        PARTITION BY process_id, device, memory_kind, layer, window_number ORDER BY at_ns, is_moment, window_ns
    )
),
steps AS (
    SELECT
        *,
        live_bytes - lag(live_bytes) OVER of_kind AS growth_bytes,
        (ts_ns - lag(ts_ns) OVER of_kind) / 3.6e12 AS hours,
        completed_total - lag(completed_total) OVER of_kind AS requests
    FROM known
    WHERE is_moment = 1 AND window_number > 0
    WINDOW of_kind AS (PARTITION BY process_id, device, memory_kind, layer ORDER BY ts_ns)
)
SELECT
    arrow_cast(s.ts_ns / 1000, 'Timestamp(Microsecond, Some("UTC"))') AS ts,
    arrow_cast(s.resting_since / 1000, 'Timestamp(Microsecond, Some("UTC"))') AS resting_since,
    s.host, s.process_id, p.pid, p.exe, p.namespace, p.pod, s.gpu_uuid, s.device, s.memory_kind,
    CASE
        WHEN s.memory_kind IN ('device', 'managed', 'array', 'vmm_physical') THEN 'physical'
        WHEN s.memory_kind IN ('pinned_host', 'registered_host') THEN 'host'
        WHEN s.memory_kind IN ('vmm_virtual', 'vmm_mapped') THEN 'virtual'
        WHEN s.memory_kind IN ('pool', 'framework_block') THEN 'sub_allocated'
        WHEN s.memory_kind = 'ipc' THEN 'ipc'
    END AS byte_class,
    s.layer, s.completed_total, s.live_bytes, s.growth_bytes, s.hours, s.requests,
    s.growth_bytes / nullif(s.hours, 0) AS bytes_per_hour,
    CAST(s.growth_bytes AS DOUBLE) / nullif(s.requests, 0) AS bytes_per_request,
    s.lossy
FROM steps AS s
LEFT JOIN current_processes AS p ON p.process_id = s.process_id
