-- Failed calls, each chain once, with what was asked for and from where.
SELECT
    c.api, c.result, c.requested_bytes, c.device,
    -- The Rust runtime's frames below main say nothing about the call.
    replace(regexp_replace(s.folded, '^.*FnOnce::call_once;', '…;'), 'vramscope_workload::', '') AS stack
FROM call_chains AS c
LEFT JOIN (SELECT stack_id, min(folded) AS folded FROM stacks GROUP BY stack_id) AS s
  ON s.stack_id = c.stack_id
WHERE c.failed
ORDER BY c.seq
LIMIT 10
