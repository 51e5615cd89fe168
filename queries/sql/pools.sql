-- purpose: stream-ordered memory pools: what of each is in use now, was at most, and how much memory the pools of the device hold
-- reads: alloc_events (raw, by call_chains), device_windows (windows), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   host | - | host name
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it; NULL if not certain
--   pool | - | pool handle; NULL: the device's current pool, which the calls do not name
--   used_bytes | bytes | slices in use now: a lower bound of the pool's memory
--   used_slices | slices | how many
--   peak_used_bytes | bytes | largest used_bytes at any moment, over events
--   slices | slices | slices ever given
--   slice_bytes | bytes | their bytes
--   failed_allocations | calls | call chains that failed to get a slice
--   device_used_bytes | bytes | slices in use now of all pools of the process on the device
--   device_reserved_bytes | bytes | memory that these pools hold, as the program itself last read it; NULL when it never asked
--   reserved_at | time | end of the window in which that was known
--   utilization_ratio | ratio | device_used_bytes / device_reserved_bytes; NULL when not known. Above 1: the pools have grown since the program asked
-- formulas:
--   a slice's end counts for the pool that gave the slice (alloc_seq), since the call that frees does not name it; slices of a pool that was destroyed ended with it
--   nothing else shows how much memory a pool holds: device_reserved_bytes comes from the program's own cuMemPoolGetAttribute or cudaMemPoolGetAttribute calls
--   what was allocated before the host last booted is not in use
WITH slices AS (
    SELECT * FROM call_chains WHERE memory_kind = 'pool'
),
given AS (
    SELECT host, agent_id, process_id, seq, gpu_uuid, device, pool
    FROM slices
    WHERE op = 'alloc' AND NOT failed
),
placed AS (
    SELECT
        s.host, s.boot_id, s.agent_id, s.process_id, s.pid, s.seq, s.op, s.failed, s.bytes, s.live_delta_bytes,
        CASE WHEN s.op = 'alloc' OR g.seq IS NULL THEN s.gpu_uuid ELSE g.gpu_uuid END AS gpu_uuid,
        CASE WHEN s.op = 'alloc' OR g.seq IS NULL THEN s.device ELSE g.device END AS device,
        CASE WHEN s.op = 'alloc' OR g.seq IS NULL THEN s.pool ELSE g.pool END AS pool
    FROM slices AS s
    LEFT JOIN given AS g
      ON g.host = s.host AND g.agent_id = s.agent_id AND g.process_id = s.process_id AND g.seq = s.alloc_seq
    -- A free that failed ended no slice of any pool.
    WHERE s.op = 'alloc' OR NOT s.failed
),
running AS (
    SELECT
        *,
        sum(live_delta_bytes) OVER (
            PARTITION BY host, agent_id, process_id, gpu_uuid, device, pool
            ORDER BY seq
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS used_after
    FROM placed
),
totals AS (
    SELECT
        host, process_id, gpu_uuid, device, pool,
        max(pid) AS pid,
        sum(live_delta_bytes) AS used_bytes,
        count(*) FILTER (WHERE op = 'alloc' AND NOT failed) - count(*) FILTER (WHERE op <> 'alloc') AS used_slices,
        greatest(max(used_after), 0) AS peak_used_bytes,
        count(*) FILTER (WHERE op = 'alloc' AND NOT failed) AS slices,
        coalesce(sum(bytes) FILTER (WHERE op = 'alloc' AND NOT failed), 0) AS slice_bytes,
        count(*) FILTER (WHERE failed) AS failed_allocations
    FROM running
    GROUP BY host, process_id, gpu_uuid, device, pool
),
reserved AS (
    SELECT host, process_id, gpu_uuid, device, max(window_end) AS reserved_at, max(pool_reserved_bytes) AS device_reserved_bytes
    FROM (
        SELECT
            *,
            rank() OVER (
                PARTITION BY host, process_id, gpu_uuid, device ORDER BY ts_ns DESC, batch_seq DESC
            ) AS newest_first
        FROM device_windows
        WHERE pool_reserved_bytes IS NOT NULL
    )
    WHERE newest_first = 1
    GROUP BY host, process_id, gpu_uuid, device
),
now AS (
    SELECT
        t.host, t.process_id, t.pid, p.exe, p.namespace, p.pod, t.gpu_uuid, t.device, t.pool,
        CASE WHEN coalesce(p.rebooted, false) THEN 0 ELSE t.used_bytes END AS used_bytes,
        CASE WHEN coalesce(p.rebooted, false) THEN 0 ELSE t.used_slices END AS used_slices,
        t.peak_used_bytes, t.slices, t.slice_bytes, t.failed_allocations
    FROM totals AS t
    LEFT JOIN current_processes AS p ON p.process_id = t.process_id
),
on_device AS (
    SELECT *, sum(used_bytes) OVER (PARTITION BY host, process_id, gpu_uuid, device) AS device_used_bytes
    FROM now
)
SELECT
    n.host, n.process_id, n.pid, n.exe, n.namespace, n.pod, n.gpu_uuid, n.device, n.pool,
    n.used_bytes, n.used_slices, n.peak_used_bytes, n.slices, n.slice_bytes, n.failed_allocations,
    n.device_used_bytes, r.device_reserved_bytes, r.reserved_at,
    CAST(n.device_used_bytes AS DOUBLE) / nullif(r.device_reserved_bytes, 0) AS utilization_ratio
FROM on_device AS n
LEFT JOIN reserved AS r
  ON r.host = n.host
 AND r.process_id = n.process_id
 AND (r.gpu_uuid IS NOT DISTINCT FROM n.gpu_uuid)
 AND (r.device IS NOT DISTINCT FROM n.device)
