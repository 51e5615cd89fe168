-- purpose: virtual memory management: addresses each process has reserved and mapped, against the physical memory it has created
-- reads: alloc_events (raw, also by call_chains), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   host | - | host name
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   reserved_bytes | bytes | addresses reserved now (cuMemAddressReserve)
--   reservations | reservations | how many
--   peak_reserved_bytes | bytes | largest reserved_bytes at any moment, over events
--   mapped_bytes | bytes | addresses mapped now (cuMemMap): they lie within the reserved ones
--   mappings | mappings | how many
--   peak_mapped_bytes | bytes | largest mapped_bytes at any moment, over events
--   physical_bytes | bytes | physical memory created now (cuMemCreate)
--   handles | handles | how many
--   peak_physical_bytes | bytes | largest physical_bytes at any moment, over events
--   mapped_ratio | ratio | mapped_bytes / reserved_bytes; NULL if nothing is reserved
--   unmapped_physical_bytes | bytes | physical bytes that are mapped nowhere, at least: physical_bytes - mapped_bytes, not below 0
--   shared_mapped_bytes | bytes | mapped bytes beyond the physical ones, at least: mapped more than once, or another process's (imported); mapped_bytes - physical_bytes, not below 0
--   imported_handles | handles | handles of other processes' memory ever imported; their bytes are not known and in no other column
--   ipc_open | mappings | other processes' allocations that are opened now by cuIpcOpenMemHandle; their bytes are not known and in no other column
-- formulas:
--   a process is here if it ever used virtual memory management or opened another process's memory
--   each column is of one kind: virtual and physical bytes are compared, never added up
--   what a process had before the host last booted is gone
WITH moves AS (
    SELECT
        host, agent_id, process_id, pid, seq, memory_kind, live_delta_bytes,
        CASE
            WHEN failed THEN 0
            WHEN op IN ('alloc', 'reserve', 'map') THEN 1
            ELSE -1
        END AS live_delta_count
    FROM call_chains
    WHERE memory_kind IN ('vmm_virtual', 'vmm_mapped', 'vmm_physical')
),
running AS (
    SELECT
        *,
        sum(live_delta_bytes) OVER (
            PARTITION BY host, agent_id, process_id, memory_kind
            ORDER BY seq
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS live_after
    FROM moves
),
-- Rows that stand for no bytes of this process. Of a runtime call over a driver call only the
-- driver's row counts here.
foreign_calls AS (
    SELECT host, agent_id, process_id, pid, seq, parent_seq, memory_kind, op, api
    FROM alloc_events
    WHERE NOT counted
      AND coalesce(result, 0) = 0
      AND (memory_kind = 'ipc' OR (memory_kind = 'vmm_physical' AND op = 'alloc' AND bytes IS NULL))
),
foreign_chains AS (
    SELECT *
    FROM foreign_calls AS e
    WHERE NOT EXISTS (
        SELECT 1
        FROM foreign_calls AS inner_call
        WHERE inner_call.host = e.host
          AND inner_call.agent_id = e.agent_id
          AND inner_call.process_id = e.process_id
          AND inner_call.parent_seq = e.seq
    )
),
facts AS (
    SELECT
        host, process_id, pid, memory_kind, live_delta_bytes, live_delta_count, live_after,
        0 AS imported, 0 AS ipc_delta
    FROM running
    UNION ALL
    SELECT
        host, process_id, pid, memory_kind, 0, 0, 0,
        CASE WHEN memory_kind = 'vmm_physical' THEN 1 ELSE 0 END,
        CASE WHEN memory_kind <> 'ipc' THEN 0 WHEN op = 'map' THEN 1 ELSE -1 END
    FROM foreign_chains
),
totals AS (
    SELECT
        host, process_id,
        max(pid) AS pid,
        coalesce(sum(live_delta_bytes) FILTER (WHERE memory_kind = 'vmm_virtual'), 0) AS reserved_bytes,
        coalesce(sum(live_delta_count) FILTER (WHERE memory_kind = 'vmm_virtual'), 0) AS reservations,
        greatest(coalesce(max(live_after) FILTER (WHERE memory_kind = 'vmm_virtual'), 0), 0) AS peak_reserved_bytes,
        coalesce(sum(live_delta_bytes) FILTER (WHERE memory_kind = 'vmm_mapped'), 0) AS mapped_bytes,
        coalesce(sum(live_delta_count) FILTER (WHERE memory_kind = 'vmm_mapped'), 0) AS mappings,
        greatest(coalesce(max(live_after) FILTER (WHERE memory_kind = 'vmm_mapped'), 0), 0) AS peak_mapped_bytes,
        coalesce(sum(live_delta_bytes) FILTER (WHERE memory_kind = 'vmm_physical'), 0) AS physical_bytes,
        coalesce(sum(live_delta_count) FILTER (WHERE memory_kind = 'vmm_physical'), 0) AS handles,
        greatest(coalesce(max(live_after) FILTER (WHERE memory_kind = 'vmm_physical'), 0), 0) AS peak_physical_bytes,
        sum(imported) AS imported_handles,
        sum(ipc_delta) AS ipc_open
    FROM facts
    GROUP BY host, process_id
),
now AS (
    SELECT
        t.host, t.process_id, t.pid, p.exe, p.namespace, p.pod,
        CASE WHEN coalesce(p.rebooted, false) THEN 0 ELSE 1 END AS of_this_boot,
        t.reserved_bytes, t.reservations, t.peak_reserved_bytes,
        t.mapped_bytes, t.mappings, t.peak_mapped_bytes,
        t.physical_bytes, t.handles, t.peak_physical_bytes,
        t.imported_handles,
        -- What it opened went with the process, also where the agent saw no close.
        CASE WHEN p.ended IS NULL THEN t.ipc_open ELSE 0 END AS ipc_open
    FROM totals AS t
    LEFT JOIN current_processes AS p ON p.process_id = t.process_id
)
SELECT
    host, process_id, pid, exe, namespace, pod,
    reserved_bytes * of_this_boot AS reserved_bytes,
    reservations * of_this_boot AS reservations,
    peak_reserved_bytes,
    mapped_bytes * of_this_boot AS mapped_bytes,
    mappings * of_this_boot AS mappings,
    peak_mapped_bytes,
    physical_bytes * of_this_boot AS physical_bytes,
    handles * of_this_boot AS handles,
    peak_physical_bytes,
    CAST(mapped_bytes * of_this_boot AS DOUBLE) / nullif(reserved_bytes * of_this_boot, 0) AS mapped_ratio,
    greatest(physical_bytes - mapped_bytes, 0) * of_this_boot AS unmapped_physical_bytes,
    greatest(mapped_bytes - physical_bytes, 0) * of_this_boot AS shared_mapped_bytes,
    imported_handles,
    ipc_open * of_this_boot AS ipc_open
FROM now
