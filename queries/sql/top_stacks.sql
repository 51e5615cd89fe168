-- purpose: which call stacks hold memory now, and which left it for the process exit to free
-- reads: alloc_events (raw), stacks (raw)
-- parameters: none
-- columns:
--   stack_id | - | stack that made the allocations; NULL: their stacks were not taken
--   folded | - | function names, outermost first, joined by ';'
--   memory_kind | - | kind of memory; kinds are never added up
--   live_bytes | bytes | bytes of allocations that have no free
--   live_count | allocations | how many
--   allocated_bytes | bytes | bytes ever given to this stack
--   allocations | calls | calls that gave them
--   exit_bytes | bytes | bytes that only the end of the process gave back
--   exit_count | allocations | how many allocations
--   processes | processes | process lifetimes in which the stack allocated
--   share | ratio | live_bytes / live bytes of all stacks of this memory kind; NULL if none is live
-- formulas:
--   a free counts for the stack of the allocation it ends (alloc_stack_id), not for its own
--   exit_bytes are no proof of a leak: most programs leave their weights and workspaces to the exit. In a finished trace, where nothing is live any more, they are where to look first
WITH calls AS (
    SELECT
        memory_kind, host, process_id, bytes,
        op IN ('alloc', 'register') AS gives,
        implicit AND api = 'process_exit' AS at_exit,
        CASE WHEN op IN ('alloc', 'register') THEN stack_id ELSE alloc_stack_id END AS stack_id
    FROM alloc_events
    WHERE counted
      AND op IN ('alloc', 'register', 'free', 'unregister')
      AND coalesce(result, 0) = 0
),
by_stack AS (
    SELECT
        stack_id, memory_kind,
        coalesce(sum(CASE WHEN gives THEN bytes ELSE -bytes END), 0) AS live_bytes,
        sum(CASE WHEN gives THEN 1 ELSE -1 END) AS live_count,
        coalesce(sum(bytes) FILTER (WHERE gives), 0) AS allocated_bytes,
        count(*) FILTER (WHERE gives) AS allocations,
        coalesce(sum(bytes) FILTER (WHERE at_exit), 0) AS exit_bytes,
        count(*) FILTER (WHERE at_exit) AS exit_count,
        count(DISTINCT process_id) AS processes
    FROM calls
    GROUP BY stack_id, memory_kind
),
stack_names AS (
    SELECT stack_id, min(folded) AS folded FROM stacks GROUP BY stack_id
)
SELECT
    b.stack_id, s.folded, b.memory_kind, b.live_bytes, b.live_count, b.allocated_bytes,
    b.allocations, b.exit_bytes, b.exit_count, b.processes,
    CAST(b.live_bytes AS DOUBLE)
        / nullif(sum(b.live_bytes) OVER (PARTITION BY b.memory_kind), 0) AS share
FROM by_stack AS b
LEFT JOIN stack_names AS s ON s.stack_id = b.stack_id
