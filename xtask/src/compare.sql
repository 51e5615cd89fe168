-- purpose: process_totals with the frees at process exit apart, for the comparison with the stand-ins' ledgers
-- reads: process_totals, alloc_events (raw)
-- parameters: none
-- columns:
--   those of process_totals that the ledgers know
--   exit_frees | allocations | allocations that the end of their process ended
--   exit_bytes | bytes | their bytes
WITH at_exit AS (
    SELECT host, process_id, device, memory_kind, count(*) AS frees, sum(bytes) AS bytes
    FROM alloc_events
    WHERE counted AND implicit AND api = 'process_exit'
    GROUP BY host, process_id, device, memory_kind
)
SELECT
    t.pid, t.device, t.memory_kind, t.allocations, t.allocated_bytes, t.frees, t.freed_bytes,
    t.implicit_frees, t.implicit_bytes, t.failed_allocations, t.failed_frees, t.peak_bytes,
    coalesce(x.frees, 0) AS exit_frees,
    coalesce(x.bytes, 0) AS exit_bytes
FROM process_totals AS t
LEFT JOIN at_exit AS x
  ON x.host = t.host
 AND x.process_id = t.process_id
 AND (x.device IS NOT DISTINCT FROM t.device)
 AND (x.memory_kind IS NOT DISTINCT FROM t.memory_kind)
