-- purpose: what a framework's caching allocator held after every event, by process and device, with marks where it ran out of memory
-- reads: alloc_events (raw), allocator_samples (raw)
-- parameters: none
-- columns:
--   ts | time | when
--   ts_ns | ns | the same, nanoseconds since 1970
--   host | - | host name; of an import the file's name
--   process_id | - | one process lifetime; of an import the file
--   pid | - | process id in the host's namespace; of an import 0
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it
--   source | - | usdt (traced) or import
--   point | - | alloc, free (a block), free_completed (no stream uses it any more), segment_alloc, segment_free (import only: traced segments are driver calls), oom, or sample (a row of allocator_samples)
--   bytes | bytes | of the block or segment; of oom 0; NULL for a sample
--   allocated_bytes | bytes | in blocks that the program holds, after the event; NULL if not known
--   reserved_bytes | bytes | in segments, after the event; NULL if not known
--   active_bytes | bytes | allocated_bytes and what is freed but still in use on a stream; NULL for traced events, which do not show it
--   is_oom | - | the allocator reported that it ran out of memory
--   tried_bytes | bytes | at an oom: what was asked for
--   device_free_bytes | bytes | at an oom or a sample: free on the card; NULL if not known
--   stack_id | - | stack of the event; joins stacks
--   seq | - | order within host and process; NULL for a sample
--   basis | - | where the totals come from. allocator: as it counted itself; anchored: sums of the trace's events, set so that they end where the snapshot ends; sum: sums of the recorded events alone, which leave out what was allocated before
-- formulas:
--   exact at every event, not sampled. For a curve group by date_bin(INTERVAL '1 second', ts) and take max
--   raw framework events travel only when something asked for them (flight recorder): between such spans only samples are here
WITH events AS (
    SELECT
        ts, ts_ns, host, boot_id, agent_id, process_id, pid, gpu_uuid, device, source, op, api, memory_kind,
        bytes, requested_bytes, stack_id, seq,
        allocator_allocated_bytes, allocator_reserved_bytes, device_free_bytes,
        CASE
            WHEN memory_kind = 'framework_block' AND counted THEN CASE WHEN op = 'alloc' THEN bytes ELSE -bytes END
            ELSE 0
        END AS allocated_delta,
        CASE
            WHEN memory_kind IN ('device', 'vmm_physical') AND counted THEN CASE WHEN op = 'alloc' THEN bytes ELSE -bytes END
            ELSE 0
        END AS reserved_delta,
        CASE
            WHEN memory_kind <> 'framework_block' THEN 0
            WHEN op = 'alloc' AND counted THEN bytes
            WHEN api = 'free_completed' THEN -bytes
            ELSE 0
        END AS active_delta
    FROM alloc_events
    WHERE layer = 'framework'
      AND coalesce(result, 0) = 0
      AND op IN ('alloc', 'free', 'oom')
      AND coalesce(memory_kind, '') <> 'pinned_host'
),
running AS (
    SELECT
        *,
        sum(allocated_delta) OVER so_far AS allocated_sum,
        sum(reserved_delta) OVER so_far AS reserved_sum,
        sum(active_delta) OVER so_far AS active_sum,
        sum(allocated_delta) OVER everything AS allocated_total,
        sum(reserved_delta) OVER everything AS reserved_total,
        sum(active_delta) OVER everything AS active_total
    FROM events
    WINDOW
        so_far AS (
            PARTITION BY host, boot_id, agent_id, process_id, device
            ORDER BY seq
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ),
        everything AS (PARTITION BY host, boot_id, agent_id, process_id, device)
),
-- The state a snapshot's trace ends in.
ends AS (
    SELECT process_id, device, max(allocated_bytes) AS allocated_bytes, max(reserved_bytes) AS reserved_bytes, max(active_bytes) AS active_bytes
    FROM allocator_samples
    WHERE reason = 'import'
    GROUP BY process_id, device
)
SELECT
    r.ts, r.ts_ns, r.host, r.process_id, r.pid, r.gpu_uuid, r.device, r.source,
    CASE
        WHEN r.op = 'oom' THEN 'oom'
        WHEN r.memory_kind IN ('device', 'vmm_physical') THEN concat('segment_', r.op)
        WHEN r.api = 'free_completed' THEN 'free_completed'
        ELSE r.op
    END AS point,
    r.bytes,
    CASE
        WHEN e.process_id IS NOT NULL THEN e.allocated_bytes - r.allocated_total + r.allocated_sum
        ELSE coalesce(r.allocator_allocated_bytes, r.allocated_sum)
    END AS allocated_bytes,
    CASE
        WHEN e.process_id IS NOT NULL THEN e.reserved_bytes - r.reserved_total + r.reserved_sum
        WHEN r.source = 'import' THEN r.reserved_sum
        ELSE r.allocator_reserved_bytes
    END AS reserved_bytes,
    CASE
        WHEN e.process_id IS NOT NULL THEN e.active_bytes - r.active_total + r.active_sum
        WHEN r.source = 'import' THEN r.active_sum
    END AS active_bytes,
    r.op = 'oom' AS is_oom,
    CASE WHEN r.op = 'oom' THEN r.requested_bytes END AS tried_bytes,
    r.device_free_bytes,
    r.stack_id, r.seq,
    CASE
        WHEN e.process_id IS NOT NULL THEN 'anchored'
        WHEN r.allocator_allocated_bytes IS NOT NULL THEN 'allocator'
        ELSE 'sum'
    END AS basis
FROM running AS r
LEFT JOIN ends AS e ON e.process_id = r.process_id AND (e.device IS NOT DISTINCT FROM r.device)
UNION ALL
SELECT
    ts, ts_ns, host, process_id, pid, gpu_uuid, device, source, 'sample', NULL,
    allocated_bytes, reserved_bytes, active_bytes, reason = 'oom', tried_bytes, device_free_bytes, NULL, NULL,
    'allocator'
FROM allocator_samples
WHERE device IS NOT NULL
