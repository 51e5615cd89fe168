-- purpose: what leaks are looked for in, from raw events: live bytes of every stack at the end of
--   every half hour, and how they grow
-- columns: process_id, stack, half hours with events, events, bytes allocated, live bytes at the
--   end, at the first half hour's end, at most and at least, growth between first and last; bytes
WITH moves AS (
    SELECT
        process_id,
        CASE WHEN op = 'free' THEN alloc_stack_id ELSE stack_id END AS stack,
        ts_ns - ts_ns % 1800000000000 AS block,
        CASE WHEN op = 'free' THEN -bytes ELSE bytes END AS net
    FROM alloc_events
    WHERE counted AND op IN ('alloc', 'free') AND memory_kind = 'device'
),
blocks AS (
    SELECT
        process_id, stack, block,
        sum(net) AS net,
        sum(CASE WHEN net > 0 THEN net ELSE 0 END) AS allocated,
        count(*) AS events
    FROM moves
    GROUP BY process_id, stack, block
),
levels AS (
    SELECT
        process_id, stack, block, allocated, events,
        sum(net) OVER (PARTITION BY process_id, stack ORDER BY block) AS live,
        row_number() OVER (PARTITION BY process_id, stack ORDER BY block) AS place,
        row_number() OVER (PARTITION BY process_id, stack ORDER BY block DESC) AS from_end
    FROM blocks
)
SELECT
    process_id, stack,
    CAST(count(*) AS BIGINT) AS blocks,
    CAST(sum(events) AS BIGINT) AS events,
    CAST(sum(allocated) AS BIGINT) AS allocated_bytes,
    CAST(sum(CASE WHEN from_end = 1 THEN live ELSE 0 END) AS BIGINT) AS live_bytes,
    CAST(sum(CASE WHEN place = 1 THEN live ELSE 0 END) AS BIGINT) AS first_live_bytes,
    CAST(max(live) AS BIGINT) AS most_live_bytes,
    CAST(min(live) AS BIGINT) AS least_live_bytes,
    CAST(
        sum(CASE WHEN from_end = 1 THEN live ELSE 0 END)
        - sum(CASE WHEN place = 1 THEN live ELSE 0 END) AS BIGINT
    ) AS growth_bytes
FROM levels
GROUP BY process_id, stack
ORDER BY growth_bytes DESC, process_id, stack
LIMIT 200
