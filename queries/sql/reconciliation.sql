-- purpose: traced device bytes of each process on each card against what NVML says the process uses
-- reads: devices (raw), alloc_events (raw, by call_chains), processes (raw, by current_processes)
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
--   traced_bytes | bytes | live traced device bytes at the sample's time; NULL if the process is not traced
--   nvml_bytes | bytes | what NVML says the process uses; NULL if NVML does not say or does not list it
--   difference_bytes | bytes | nvml_bytes - traced_bytes: CUDA contexts, driver overhead, rounding, and what was allocated before the agent came; NULL if either is unknown
--   ratio | ratio | traced_bytes / nvml_bytes; NULL if either is unknown
-- formulas:
--   traced_bytes is the sum of live_delta_bytes of device memory with ts_ns up to the sample's; a card without a sample counts all events
--   processes from before the host last booted, and processes that hold nothing and that NVML does not list are left out
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
traced AS (
    SELECT c.host, c.gpu_uuid, c.process_id, max(c.pid) AS pid, sum(c.live_delta_bytes) AS traced_bytes
    FROM call_chains AS c
    LEFT JOIN newest_sample AS s ON s.host = c.host AND s.gpu_uuid = c.gpu_uuid
    LEFT JOIN current_processes AS p ON p.process_id = c.process_id
    WHERE c.residence = 'device'
      AND NOT coalesce(p.rebooted, false)
      AND (s.ts_ns IS NULL OR c.ts_ns <= s.ts_ns)
    GROUP BY c.host, c.gpu_uuid, c.process_id
),
both_sides AS (
    SELECT
        coalesce(l.host, t.host) AS host,
        coalesce(l.gpu_uuid, t.gpu_uuid) AS gpu_uuid,
        coalesce(l.process_id, t.process_id) AS process_id,
        coalesce(l.pid, t.pid) AS pid,
        t.traced_bytes,
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
        CASE WHEN p.process_id IS NOT NULL THEN coalesce(b.traced_bytes, 0) ELSE b.traced_bytes END AS traced_bytes,
        b.nvml_bytes,
        b.is_listed
    FROM both_sides AS b
    LEFT JOIN current_processes AS p ON p.process_id = b.process_id
    LEFT JOIN newest_sample AS s ON s.host = b.host AND s.gpu_uuid = b.gpu_uuid
)
SELECT
    host, gpu_uuid, sampled_at, process_id, pid, exe, namespace, pod, traced_bytes, nvml_bytes,
    nvml_bytes - traced_bytes AS difference_bytes,
    CAST(traced_bytes AS DOUBLE) / nullif(nvml_bytes, 0) AS ratio
FROM known
WHERE is_listed OR traced_bytes <> 0
