-- Stacks by how many of their allocations were never freed by the program. A leak allocates
-- again and again, so the count tells it from weights, which are more bytes.
SELECT
    exit_count AS never_freed,
    exit_bytes AS bytes,
    allocations AS of_allocations,
    memory_kind,
    -- The Rust runtime's frames below main say nothing about the leak.
    replace(regexp_replace(folded, '^.*FnOnce::call_once;', '…;'), 'vramscope_workload::', '') AS stack
FROM top_stacks
WHERE exit_count > 0
ORDER BY exit_count DESC, exit_bytes DESC
LIMIT 5
