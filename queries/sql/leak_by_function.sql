-- purpose: the leaks of leak_by_stack rolled up by function, over all stacks, processes and hosts
-- reads: leak_by_stack (stack_windows, traffic and others)
-- parameters: none
-- columns:
--   tier | - | the surest of its stacks: confirmed, suspect or ambiguous
--   function | - | innermost function that belongs to no driver, runtime or allocator; NULL: not known
--   module | - | its library, program or source file
--   version | - | as in leak_by_stack
--   memory_kind | - | kind of memory
--   byte_class | - | physical, host, virtual or sub_allocated. Never add up bytes of two classes
--   stacks | stacks | distinct stacks through it
--   processes | processes | process lifetimes
--   pods | pods | distinct pods
--   hosts | hosts | distinct hosts
--   bytes_per_hour | bytes/h | sum over its stacks
--   bytes_per_request | bytes | largest of its stacks
--   growth_bytes | bytes | sum over its stacks
--   live_bytes | bytes | sum over its stacks
--   since | time | earliest beginning of the growth
--   first_seen | time | when the first of them was a suspect
--   confirmed_at | time | when the first of them was confirmed; NULL if none is
--   projected_oom_at | time | earliest of its stacks
-- formulas:
--   rows of kv_pool and of too little data have no function and are not here
SELECT
    CASE min(CASE tier WHEN 'confirmed' THEN 1 WHEN 'suspect' THEN 2 ELSE 3 END)
        WHEN 1 THEN 'confirmed'
        WHEN 2 THEN 'suspect'
        ELSE 'ambiguous'
    END AS tier,
    function, module, version, memory_kind, byte_class,
    count(DISTINCT stack_id) AS stacks,
    count(DISTINCT process_id) AS processes,
    count(DISTINCT pod) AS pods,
    count(DISTINCT host) AS hosts,
    sum(bytes_per_hour) AS bytes_per_hour,
    max(bytes_per_request) AS bytes_per_request,
    sum(growth_bytes) AS growth_bytes,
    sum(live_bytes) AS live_bytes,
    min(since) AS since,
    min(first_seen) AS first_seen,
    min(confirmed_at) AS confirmed_at,
    min(projected_oom_at) AS projected_oom_at
FROM leak_by_stack
WHERE tier <> 'insufficient' AND detector <> 'kv_pool'
GROUP BY function, module, version, memory_kind, byte_class
ORDER BY min(rank)
