-- purpose: process_totals in the columns of the stand-ins' ledgers: the frees at process exit apart, every other end a free
-- reads: process_totals, alloc_events (raw), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   pid, process_id, started | - | one process lifetime, and what puts those of one pid in order
--   device, memory_kind | - | as in process_totals
--   allocations, allocated_bytes, failed_allocations, failed_frees, peak_bytes | - | as in process_totals
--   frees, freed_bytes | - | what ended before the process did, by whatever call: also a context's end, or exec
--   live_at_exit, live_at_exit_bytes | - | what the end of the process ended
WITH at_exit AS (
    SELECT host, process_id, device, memory_kind, count(*) AS frees, sum(bytes) AS bytes
    FROM alloc_events
    WHERE counted AND implicit AND api = 'process_exit'
    GROUP BY host, process_id, device, memory_kind
)
SELECT
    t.pid, t.process_id, CAST(p.started AS BIGINT) AS started, t.device, t.memory_kind,
    t.allocations, t.allocated_bytes,
    t.frees + t.implicit_frees - coalesce(x.frees, 0) AS frees,
    t.freed_bytes + t.implicit_bytes - coalesce(x.bytes, 0) AS freed_bytes,
    t.failed_allocations, t.failed_frees,
    coalesce(x.frees, 0) AS live_at_exit,
    coalesce(x.bytes, 0) AS live_at_exit_bytes,
    t.peak_bytes
FROM process_totals AS t
LEFT JOIN at_exit AS x
  ON x.host = t.host
 AND x.process_id = t.process_id
 AND (x.device IS NOT DISTINCT FROM t.device)
 AND (x.memory_kind IS NOT DISTINCT FROM t.memory_kind)
LEFT JOIN current_processes AS p ON p.process_id = t.process_id
