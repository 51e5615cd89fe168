-- purpose: stack_windows added up over all windows and stacks, by process lifetime, device and kind of memory
-- reads: stack_windows (windows), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   pid, process_id, started | - | one process lifetime, and what puts those of one pid in order
--   allocations, allocated_bytes, ends, ended_bytes | - | sums over the windows
--   left_count, left_bytes | - | what lives by the newest row of each stack
WITH ordered AS (
    SELECT
        *,
        row_number() OVER (
            PARTITION BY host, agent_id, process_id, gpu_uuid, device, memory_kind, layer, stack_id
            ORDER BY batch_seq DESC, ts_ns DESC
        ) AS newest_first
    FROM stack_windows
),
places AS (
    SELECT
        host, process_id, device, memory_kind,
        max(pid) AS pid,
        sum(alloc_count) AS allocations,
        sum(alloc_bytes) AS allocated_bytes,
        sum(free_count) AS ends,
        sum(free_bytes) AS ended_bytes,
        coalesce(sum(live_count) FILTER (WHERE newest_first = 1), 0) AS left_count,
        coalesce(sum(live_bytes) FILTER (WHERE newest_first = 1), 0) AS left_bytes
    FROM ordered
    GROUP BY host, process_id, device, memory_kind
)
SELECT w.*, CAST(p.started AS BIGINT) AS started
FROM places AS w
LEFT JOIN current_processes AS p ON p.process_id = w.process_id
