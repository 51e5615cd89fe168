-- purpose: which call stacks hold memory now, and which left it for the process exit to free
-- reads: alloc_events (raw), stacks (raw), processes (raw, by current_processes), device_windows (windows, by framework_processes)
-- parameters: none
-- columns:
--   stack_id | - | stack that made the allocations; NULL: their stacks were not taken
--   folded | - | function names, outermost first, joined by ';'
--   memory_kind | - | kind of memory; kinds are never added up
--   live_bytes | bytes | bytes of allocations that have no free
--   live_count | allocations | how many
--   allocated_bytes | bytes | bytes ever given to this stack
--   allocations | calls | calls that gave them
--   exit_bytes | bytes | bytes that only the end of the program (exit, or exec of another) gave back
--   exit_count | allocations | how many allocations
--   processes | processes | process lifetimes in which the stack allocated
--   share | ratio | live_bytes / live bytes of all stacks of this memory kind; NULL if none is live
--   byte_class | - | physical, host, virtual or sub_allocated. Never add up bytes of two classes, nor vmm_virtual and vmm_mapped
--   implicit_bytes | bytes | bytes that ended without a call of their own: exit_bytes, and what went with its context, its pool or a neighbouring mapping
--   implicit_count | allocations | how many allocations
-- formulas:
--   framework blocks count where all their events are here: framework_processes.whole. Elsewhere stack_history tells of them
--   what a process held before the agent came, or before an imported trace began, has no stack and is not here
--   a free counts for the stack of the allocation it ends (alloc_stack_id), not for its own
--   what was allocated before the host last booted is not live, though its frees were never seen
--   exit_bytes are no proof of a leak: most programs leave their weights and workspaces to the exit. In a finished trace, where nothing is live any more, they are where to look first
WITH calls AS (
    SELECT
        e.memory_kind, e.process_id, e.bytes,
        e.op IN ('alloc', 'reserve', 'map', 'register') AS gives,
        e.implicit AND e.api IN ('process_exit', 'process_exec') AS at_exit,
        e.implicit,
        CASE WHEN e.op IN ('alloc', 'reserve', 'map', 'register') THEN e.stack_id ELSE e.alloc_stack_id END AS stack_id,
        NOT coalesce(p.rebooted, false) AS of_this_boot
    FROM alloc_events AS e
    LEFT JOIN current_processes AS p ON p.process_id = e.process_id
    WHERE e.counted
      AND e.op IN ('alloc', 'reserve', 'map', 'register', 'free', 'release', 'unmap', 'unregister')
      AND coalesce(e.result, 0) = 0
      AND (
        e.layer <> 'framework'
        OR e.process_id IN (SELECT process_id FROM framework_processes WHERE whole)
      )
      AND NOT (e.source = 'import' AND e.op = 'free' AND e.memory_kind = 'framework_block' AND e.alloc_seq IS NULL)
),
by_stack AS (
    SELECT
        stack_id, memory_kind,
        coalesce(sum(CASE WHEN gives THEN bytes ELSE -bytes END) FILTER (WHERE of_this_boot), 0) AS live_bytes,
        coalesce(sum(CASE WHEN gives THEN 1 ELSE -1 END) FILTER (WHERE of_this_boot), 0) AS live_count,
        coalesce(sum(bytes) FILTER (WHERE gives), 0) AS allocated_bytes,
        count(*) FILTER (WHERE gives) AS allocations,
        coalesce(sum(bytes) FILTER (WHERE at_exit), 0) AS exit_bytes,
        count(*) FILTER (WHERE at_exit) AS exit_count,
        coalesce(sum(bytes) FILTER (WHERE implicit), 0) AS implicit_bytes,
        count(*) FILTER (WHERE implicit) AS implicit_count,
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
        / nullif(sum(b.live_bytes) OVER (PARTITION BY b.memory_kind), 0) AS share,
    CASE
        WHEN b.memory_kind IN ('device', 'managed', 'array', 'vmm_physical') THEN 'physical'
        WHEN b.memory_kind IN ('pinned_host', 'registered_host') THEN 'host'
        WHEN b.memory_kind IN ('vmm_virtual', 'vmm_mapped') THEN 'virtual'
        WHEN b.memory_kind IN ('pool', 'framework_block') THEN 'sub_allocated'
        WHEN b.memory_kind = 'ipc' THEN 'ipc'
    END AS byte_class,
    b.implicit_bytes, b.implicit_count
FROM by_stack AS b
LEFT JOIN stack_names AS s ON s.stack_id = b.stack_id
