-- purpose: of which processes all events of a framework's allocator are here, and of which only what travelled
-- reads: alloc_events (raw), device_windows (windows)
-- parameters: none
-- columns:
--   host | - | host name
--   process_id | - | one process lifetime
--   raw_allocations | calls | blocks whose allocation is a row of alloc_events
--   rolled_up_allocations | calls | blocks that the roll-ups count; NULL before the first window of the process has ended, and of an import
--   whole | - | true if every allocation that was rolled up is here as a row, and of an import. Where it is false, raw rows are spans that the flight recorder sent, and sums over them mean nothing
-- formulas:
--   raw events of a framework travel on a trigger (docs/flight-recorder.md), roll-ups always. So process_totals, live_allocations and top_stacks take framework blocks of whole processes alone; of the others device_history and stack_history tell, and memory_map what they hold
WITH raw AS (
    SELECT
        process_id,
        min(host) AS host,
        count(*) AS allocations,
        bool_and(source = 'import') AS imported
    FROM alloc_events
    WHERE layer = 'framework' AND memory_kind = 'framework_block' AND op = 'alloc' AND counted
    GROUP BY process_id
),
rolled_up AS (
    SELECT process_id, sum(alloc_count) AS allocations
    FROM device_windows
    WHERE layer = 'framework'
    GROUP BY process_id
)
SELECT
    r.host, r.process_id,
    r.allocations AS raw_allocations,
    w.allocations AS rolled_up_allocations,
    r.imported OR coalesce(r.allocations >= w.allocations, false) AS whole
FROM raw AS r
LEFT JOIN rolled_up AS w ON w.process_id = r.process_id
