-- purpose: traced device memory of each process on each card against what NVML says the process uses, and what explains the difference
-- reads: devices (raw), alloc_events (raw, also by call_chains), device_windows (windows), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   host | - | host name
--   gpu_uuid | - | the card; NULL if traced calls could not be assigned to one
--   sampled_at | time | newest NVML sample of the card; NULL if there is none
--   process_id | - | one process lifetime; NULL if NVML names a pid the agent does not know
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   traced_bytes | bytes | device memory that the traced calls explain at the sample's time: physical_bytes + pool_bytes; NULL if the process is not traced
--   nvml_bytes | bytes | what NVML says the process uses; NULL if NVML does not say or does not list it
--   difference_bytes | bytes | nvml_bytes - traced_bytes: baseline_bytes and unexplained_bytes; NULL if either is unknown
--   ratio | ratio | traced_bytes / nvml_bytes; NULL if either is unknown
--   physical_bytes | bytes | live traced bytes of the kinds device, managed, array and vmm_physical; NULL if the process is not traced
--   pool_bytes | bytes | physical memory that stream-ordered pools hold, as far as known (pool_basis); NULL if the process is not traced
--   pool_basis | - | where pool_bytes comes from. reserved: the pools' size, as the program itself last read it. slices: the slices in use, a lower bound, since no call shows what a pool takes from the driver. NULL: no pool in use
--   baseline_bytes | bytes | unattributed: what the process used already by NVML when the agent first met it, context included; 0 if the agent was there first; NULL if the process is not traced
--   unexplained_bytes | bytes | nvml_bytes - traced_bytes - baseline_bytes: CUDA context, driver overhead, rounding, pools beyond their slices. Below 0: part of the baseline has been freed since, or managed memory lies in main memory
-- formulas:
--   physical_bytes and slices are sums of live_delta_bytes with ts_ns up to the sample's; a card without a sample counts all events. The bytes of pools are no part of physical_bytes: pool memory is not allocated by any call that could be traced
--   reserved is the value of the newest window of device_windows that began by the sample's time; if the slices in use are more, they are the better bound
--   the baseline is the newest baseline row of the process on the card up to the sample; it never counts as live memory or in a peak
--   host memory, addresses and what ipc opened (the exporter's bytes) are in none of the columns
--   imported snapshots, processes from before the host last booted, and processes that hold nothing and that NVML does not list are left out
WITH newest_sample AS (
    SELECT * FROM (
        SELECT
            host, gpu_uuid, ts, ts_ns, processes,
            row_number() OVER (PARTITION BY host, gpu_uuid ORDER BY ts_ns DESC, batch_seq DESC) AS newest_first
        FROM devices
    )
    WHERE newest_first = 1
),
listed AS (
    SELECT
        host, gpu_uuid, entry['process_id'] AS process_id, entry['pid'] AS pid,
        CASE WHEN count(entry['used_bytes']) = count(*) THEN sum(entry['used_bytes']) END AS nvml_bytes
    FROM (SELECT host, gpu_uuid, unnest(processes) AS entry FROM newest_sample)
    GROUP BY host, gpu_uuid, entry['process_id'], entry['pid']
),
called AS (
    SELECT
        c.host, c.gpu_uuid, c.process_id, max(c.pid) AS pid,
        coalesce(sum(c.live_delta_bytes) FILTER (WHERE c.byte_class = 'physical'), 0) AS physical_bytes,
        coalesce(sum(c.live_delta_bytes) FILTER (WHERE c.memory_kind = 'pool'), 0) AS slice_bytes
    FROM call_chains AS c
    LEFT JOIN newest_sample AS s ON s.host = c.host AND s.gpu_uuid = c.gpu_uuid
    LEFT JOIN current_processes AS p ON p.process_id = c.process_id
    WHERE (c.byte_class = 'physical' OR c.memory_kind = 'pool')
      AND c.source <> 'import'
      AND NOT coalesce(p.rebooted, false)
      AND (s.ts_ns IS NULL OR c.ts_ns <= s.ts_ns)
    GROUP BY c.host, c.gpu_uuid, c.process_id
),
pool_windows AS (
    SELECT
        w.host, w.gpu_uuid, w.process_id, w.pool_reserved_bytes,
        rank() OVER (
            PARTITION BY w.host, w.gpu_uuid, w.process_id ORDER BY w.ts_ns DESC, w.batch_seq DESC
        ) AS newest_first
    FROM device_windows AS w
    JOIN newest_sample AS s ON s.host = w.host AND s.gpu_uuid = w.gpu_uuid
    WHERE w.pool_reserved_bytes IS NOT NULL AND w.ts_ns <= s.ts_ns
),
reserved AS (
    SELECT host, gpu_uuid, process_id, max(pool_reserved_bytes) AS reserved_bytes
    FROM pool_windows
    WHERE newest_first = 1
    GROUP BY host, gpu_uuid, process_id
),
traced AS (
    SELECT
        c.host, c.gpu_uuid, c.process_id, c.pid, c.physical_bytes,
        greatest(c.slice_bytes, coalesce(r.reserved_bytes, 0)) AS pool_bytes,
        CASE
            WHEN r.reserved_bytes >= c.slice_bytes AND r.reserved_bytes > 0 THEN 'reserved'
            WHEN c.slice_bytes > 0 THEN 'slices'
        END AS pool_basis
    FROM called AS c
    LEFT JOIN current_processes AS p ON p.process_id = c.process_id
    -- The pools of a process that has ended went with it, whatever it read last.
    LEFT JOIN reserved AS r
      ON r.host = c.host AND r.gpu_uuid = c.gpu_uuid AND r.process_id = c.process_id AND p.ended IS NULL
),
baseline_rows AS (
    SELECT
        e.host, e.gpu_uuid, e.process_id, e.bytes,
        row_number() OVER (
            PARTITION BY e.host, e.gpu_uuid, e.process_id ORDER BY e.ts_ns DESC, e.batch_seq DESC
        ) AS newest_first
    FROM alloc_events AS e
    LEFT JOIN newest_sample AS s ON s.host = e.host AND s.gpu_uuid = e.gpu_uuid
    WHERE e.api = 'baseline' AND (s.ts_ns IS NULL OR e.ts_ns <= s.ts_ns)
),
baseline AS (
    SELECT host, gpu_uuid, process_id, bytes FROM baseline_rows WHERE newest_first = 1
),
both_sides AS (
    SELECT
        coalesce(l.host, t.host) AS host,
        coalesce(l.gpu_uuid, t.gpu_uuid) AS gpu_uuid,
        coalesce(l.process_id, t.process_id) AS process_id,
        coalesce(l.pid, t.pid) AS pid,
        t.physical_bytes, t.pool_bytes, t.pool_basis,
        l.nvml_bytes,
        l.host IS NOT NULL AS is_listed
    FROM listed AS l
    FULL JOIN traced AS t
      ON t.host = l.host AND t.gpu_uuid = l.gpu_uuid AND t.process_id = l.process_id
),
-- A process the agent follows and that has no call on this card holds 0 traced bytes there;
-- a process it does not follow holds an unknown number.
known AS (
    SELECT
        b.host, b.gpu_uuid, s.ts AS sampled_at, b.process_id, b.pid, p.exe, p.namespace, p.pod,
        CASE WHEN p.process_id IS NOT NULL THEN coalesce(b.physical_bytes, 0) ELSE b.physical_bytes END AS physical_bytes,
        CASE WHEN p.process_id IS NOT NULL THEN coalesce(b.pool_bytes, 0) ELSE b.pool_bytes END AS pool_bytes,
        b.pool_basis,
        -- A baseline row whose bytes NVML did not tell is not a baseline of 0.
        CASE
            WHEN o.process_id IS NOT NULL THEN o.bytes
            WHEN p.process_id IS NOT NULL OR b.physical_bytes IS NOT NULL THEN 0
        END AS baseline_bytes,
        b.nvml_bytes,
        b.is_listed
    FROM both_sides AS b
    LEFT JOIN current_processes AS p ON p.process_id = b.process_id
    LEFT JOIN newest_sample AS s ON s.host = b.host AND s.gpu_uuid = b.gpu_uuid
    LEFT JOIN baseline AS o
      ON o.host = b.host AND o.gpu_uuid = b.gpu_uuid AND o.process_id = b.process_id
)
SELECT
    host, gpu_uuid, sampled_at, process_id, pid, exe, namespace, pod,
    physical_bytes + pool_bytes AS traced_bytes,
    nvml_bytes,
    nvml_bytes - physical_bytes - pool_bytes AS difference_bytes,
    CAST(physical_bytes + pool_bytes AS DOUBLE) / nullif(nvml_bytes, 0) AS ratio,
    physical_bytes, pool_bytes, pool_basis, baseline_bytes,
    nvml_bytes - physical_bytes - pool_bytes - baseline_bytes AS unexplained_bytes
FROM known
WHERE is_listed OR physical_bytes + pool_bytes <> 0
