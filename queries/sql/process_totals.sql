-- purpose: exact totals of what each process allocated and freed, by device and kind of memory
-- reads: alloc_events (raw, by call_chains), processes (raw, by current_processes), device_windows (windows, by framework_processes)
-- parameters: none
-- columns:
--   host | - | host name
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it; NULL if not known
--   memory_kind | - | kind of memory; NULL on failed frees of unknown addresses
--   allocations | calls | calls that gave memory or addresses
--   allocated_bytes | bytes | bytes they gave
--   frees | calls | calls that gave them back
--   freed_bytes | bytes | bytes they gave back
--   implicit_frees | allocations | allocations that ended without a call of their own: process exit or exec, context, primary context or pool gone, a mapping with others, an address given out again
--   implicit_bytes | bytes | their bytes
--   failed_allocations | calls | call chains that failed to allocate, each counted once
--   failed_frees | calls | call chains that failed to free, each counted once
--   live_count | allocations | allocations that have no free in the data; after a crash of the host this is history, see live_allocations
--   live_bytes | bytes | their bytes: allocated_bytes - freed_bytes - implicit_bytes
--   peak_bytes | bytes | largest live bytes at any moment, over events, not over samples
--   byte_class | - | physical, host, virtual, sub_allocated or ipc; NULL if the kind is not known. Never add up bytes of two classes, nor vmm_virtual and vmm_mapped
-- formulas:
--   framework blocks count where all their events are here: framework_processes.whole
--   what a process held before the agent came is in none of the numbers: see reconciliation
--   peak_bytes is the maximum of the running sum of live_delta_bytes in the order of seq (gpu.peak.used_bytes_global, metric 11)
--   if several agents wrote about one process (an agent's spool folder was lost in between), each one's sum runs for itself and the peak is the largest of them
WITH running AS (
    SELECT
        *,
        op IN ('alloc', 'reserve', 'map', 'register') AS gives,
        SUM(live_delta_bytes) OVER (
            PARTITION BY host, process_id, agent_id, device, memory_kind
            ORDER BY seq
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS live_after
    FROM call_chains
    WHERE layer <> 'framework'
       OR process_id IN (SELECT process_id FROM framework_processes WHERE whole)
),
totals AS (
    SELECT
        host, process_id, device, memory_kind,
        max(pid) AS pid,
        max(gpu_uuid) AS gpu_uuid,
        max(byte_class) AS byte_class,
        count(*) FILTER (WHERE gives AND NOT failed) AS allocations,
        coalesce(sum(bytes) FILTER (WHERE gives AND NOT failed), 0) AS allocated_bytes,
        count(*) FILTER (WHERE NOT gives AND NOT failed AND NOT implicit) AS frees,
        coalesce(sum(bytes) FILTER (WHERE NOT gives AND NOT failed AND NOT implicit), 0) AS freed_bytes,
        count(*) FILTER (WHERE NOT gives AND NOT failed AND implicit) AS implicit_frees,
        coalesce(sum(bytes) FILTER (WHERE NOT gives AND NOT failed AND implicit), 0) AS implicit_bytes,
        count(*) FILTER (WHERE gives AND failed) AS failed_allocations,
        count(*) FILTER (WHERE NOT gives AND failed) AS failed_frees,
        greatest(coalesce(max(live_after), 0), 0) AS peak_bytes
    FROM running
    GROUP BY host, process_id, device, memory_kind
)
SELECT
    t.host, t.process_id, t.pid, p.exe, p.namespace, p.pod, t.gpu_uuid, t.device, t.memory_kind,
    t.allocations, t.allocated_bytes, t.frees, t.freed_bytes, t.implicit_frees, t.implicit_bytes,
    t.failed_allocations, t.failed_frees,
    t.allocations - t.frees - t.implicit_frees AS live_count,
    t.allocated_bytes - t.freed_bytes - t.implicit_bytes AS live_bytes,
    t.peak_bytes,
    t.byte_class
FROM totals AS t
LEFT JOIN current_processes AS p ON p.process_id = t.process_id
