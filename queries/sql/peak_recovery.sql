-- purpose: how much of what a peak of the load brought was given back after it
-- reads: traffic (raw), device_windows (windows), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   peak_start | time | start of the peak: a run of ten-minute slots with high load
--   peak_end | time | its end
--   host | - | host name
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   device | - | device ordinal as the process sees it; NULL if not certain
--   memory_kind | - | kind of memory
--   byte_class | - | physical, host, virtual or sub_allocated. Never add up bytes of two classes
--   layer | - | layer of the counted rows
--   peak_running | requests | most requests at once
--   baseline_bytes | bytes | least live bytes in the run of low load before
--   peak_bytes | bytes | most live bytes in the peak, over events
--   trough_bytes | bytes | least live bytes in the run of low load after
--   retained_bytes | bytes | trough_bytes - baseline_bytes
--   recovery_ratio | ratio | (peak - trough) / (peak - baseline), metric 9 (gpu.leak.peak_recovery_ratio): sound from 0.9 up; NULL if the peak brought nothing
--   recovered | - | recovery_ratio >= 0.9
--   lossy | - | a window that was used lost something
-- formulas:
--   load is high in a slot when the mean of running is above the middle between the process's least and most slot
--   a cache that grows once to what a peak needs retains once; a leak retains at every peak: leak_by_stack asks for three (detector peak_recovery)
--   a slot without a window of a card and kind is one in which nothing changed; a run of low load without any has the bytes of the newest window before its end
WITH slots AS (
    SELECT
        host, process_id, ts_ns / 600000000000 AS slot,
        avg(CAST(running AS DOUBLE)) AS running, max(running) AS running_peak
    FROM traffic
    WHERE process_id IS NOT NULL AND running IS NOT NULL
    GROUP BY host, process_id, ts_ns / 600000000000
),
levels AS (
    SELECT
        *,
        CASE
            WHEN running > (min(running) OVER of_process + max(running) OVER of_process) / 2 THEN 1
            ELSE 0
        END AS is_high
    FROM slots
    WINDOW of_process AS (PARTITION BY process_id)
),
turns AS (
    SELECT
        *,
        CASE WHEN is_high <> lag(is_high) OVER (PARTITION BY process_id ORDER BY slot) THEN 1 ELSE 0 END AS turn
    FROM levels
),
numbered AS (
    SELECT
        *,
        sum(turn) OVER (
            PARTITION BY process_id ORDER BY slot ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS run
    FROM turns
),
runs AS (
    SELECT
        host, process_id, run, max(is_high) AS is_high,
        min(slot) AS first_slot, max(slot) AS last_slot, max(running_peak) AS running_peak
    FROM numbered
    GROUP BY host, process_id, run
),
peaks AS (
    SELECT
        p.host, p.process_id, p.run, p.first_slot, p.last_slot, p.running_peak,
        b.first_slot AS before_slot, a.last_slot AS after_slot
    FROM runs AS p
    JOIN runs AS b ON b.process_id = p.process_id AND b.run = p.run - 1
    JOIN runs AS a ON a.process_id = p.process_id AND a.run = p.run + 1
    WHERE p.is_high = 1
),
bytes AS (
    SELECT
        process_id, device, memory_kind, layer, ts_ns / 600000000000 AS slot,
        min(live_bytes) AS least_bytes, max(peak_live_bytes) AS most_bytes,
        last_value(live_bytes ORDER BY ts_ns) AS last_bytes, bool_or(lossy) AS lossy
    FROM device_windows
    GROUP BY process_id, device, memory_kind, layer, ts_ns / 600000000000
),
joined AS (
    SELECT
        p.host, p.process_id, p.run, p.first_slot, p.last_slot, p.running_peak,
        b.device, b.memory_kind, b.layer,
        last_value(b.last_bytes ORDER BY b.slot) FILTER (WHERE b.slot < p.before_slot) AS before_bytes,
        min(b.least_bytes) FILTER (WHERE b.slot >= p.before_slot AND b.slot < p.first_slot) AS baseline_bytes,
        last_value(b.last_bytes ORDER BY b.slot) FILTER (WHERE b.slot < p.first_slot) AS at_start_bytes,
        max(b.most_bytes) FILTER (WHERE b.slot BETWEEN p.first_slot AND p.last_slot) AS peak_bytes,
        last_value(b.last_bytes ORDER BY b.slot) FILTER (WHERE b.slot <= p.last_slot) AS at_end_bytes,
        min(b.least_bytes) FILTER (WHERE b.slot > p.last_slot AND b.slot <= p.after_slot) AS trough_bytes,
        bool_or(b.lossy) FILTER (WHERE b.slot >= p.before_slot) AS lossy
    FROM peaks AS p
    JOIN bytes AS b ON b.process_id = p.process_id AND b.slot <= p.after_slot
    GROUP BY
        p.host, p.process_id, p.run, p.first_slot, p.last_slot, p.running_peak,
        b.device, b.memory_kind, b.layer
),
filled AS (
    SELECT
        host, process_id, run, first_slot, last_slot, running_peak, device, memory_kind, layer, lossy,
        -- Bytes at the start of a run hold into it.
        CASE
            WHEN baseline_bytes IS NULL THEN coalesce(before_bytes, 0)
            ELSE least(baseline_bytes, coalesce(before_bytes, baseline_bytes))
        END AS baseline_bytes,
        greatest(coalesce(peak_bytes, 0), coalesce(at_start_bytes, 0)) AS peak_bytes,
        CASE
            WHEN trough_bytes IS NULL THEN coalesce(at_end_bytes, 0)
            ELSE least(trough_bytes, coalesce(at_end_bytes, trough_bytes))
        END AS trough_bytes
    FROM joined
)
SELECT
    arrow_cast(f.first_slot * 600000000, 'Timestamp(Microsecond, Some("UTC"))') AS peak_start,
    arrow_cast((f.last_slot + 1) * 600000000, 'Timestamp(Microsecond, Some("UTC"))') AS peak_end,
    f.host, f.process_id, p.pid, p.exe, p.namespace, p.pod, f.device, f.memory_kind,
    CASE
        WHEN f.memory_kind IN ('device', 'managed', 'array', 'vmm_physical') THEN 'physical'
        WHEN f.memory_kind IN ('pinned_host', 'registered_host') THEN 'host'
        WHEN f.memory_kind IN ('vmm_virtual', 'vmm_mapped') THEN 'virtual'
        WHEN f.memory_kind IN ('pool', 'framework_block') THEN 'sub_allocated'
        WHEN f.memory_kind = 'ipc' THEN 'ipc'
    END AS byte_class,
    f.layer, f.running_peak AS peak_running, f.baseline_bytes, f.peak_bytes, f.trough_bytes,
    f.trough_bytes - f.baseline_bytes AS retained_bytes,
    CAST(f.peak_bytes - f.trough_bytes AS DOUBLE) / nullif(f.peak_bytes - f.baseline_bytes, 0) AS recovery_ratio,
    CAST(f.peak_bytes - f.trough_bytes AS DOUBLE) / nullif(f.peak_bytes - f.baseline_bytes, 0) >= 0.9 AS recovered,
    coalesce(f.lossy, false) AS lossy
FROM filled AS f
LEFT JOIN current_processes AS p ON p.process_id = f.process_id
