-- purpose: the address map of a framework's caching allocator: every block and gap of every segment, with its age and the stack that made it
-- reads: segments (raw), stacks (raw), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   ts | time | when the map was taken
--   ts_ns | ns | the same, nanoseconds since 1970
--   host | - | host name; of an import the file's name
--   process_id | - | one process lifetime; of an import the file
--   pid | - | process id in the host's namespace; of an import 0
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it; NULL for host memory
--   source | - | usdt (traced) or import
--   reason | - | why the map was taken: window, oom, request, end, import
--   snapshot_id | - | rows of one moment share it; joins allocator_samples and fragmentation
--   is_newest | - | true: no newer map of this process and device is in the data
--   memory_kind | - | device, vmm_physical (expandable segments), or pinned_host
--   pool | - | default, or a private pool's id such as (0, 1); NULL: not known (a traced map does not tell them apart). Blocks of two pools never serve each other's requests
--   segment_type | - | small (requests up to 1 MiB) or large
--   stream | - | the framework's id of the stream the segment belongs to
--   expandable | - | part of an expandable segment
--   segment_address | - | first address of the segment
--   segment_bytes | bytes | size of the segment
--   address | - | first address of the block or gap
--   offset_bytes | bytes | from the segment's first address to it
--   bytes | bytes | its size: of a block after rounding
--   requested_bytes | bytes | as asked for, before rounding; NULL for a gap, or if not known
--   state | - | active_allocated (the program holds it), active_pending_free (given back, a stream may still use it), inactive (a gap)
--   allocated_at_ns | ns | when the block was allocated, nanoseconds since 1970; NULL for a gap, or if not known
--   age_seconds | s | from then to the map
--   stack_id | - | stack that allocated the block; joins stacks
--   folded | - | function names, outermost first, joined by ';'
--   alloc_seq | - | seq of the allocation's row in alloc_events, if it is known
-- formulas:
--   blocks and gaps tile their segment: sum(bytes) over a segment is segment_bytes
--   of a traced map blocks whose end waits for another stream count as gaps, since tracing does not see them; an import tells them apart
--   these bytes lie within physical bytes that tetrahedron and process_totals count: never add up the two
WITH maps AS (
    SELECT
        process_id, device, snapshot_id,
        row_number() OVER (
            PARTITION BY process_id, device ORDER BY ts_ns DESC, snapshot_id DESC
        ) = 1 AS is_newest
    FROM (SELECT DISTINCT process_id, device, snapshot_id, ts_ns FROM segments)
),
cells AS (
    SELECT
        ts, ts_ns, host, process_id, pid, gpu_uuid, device, source, reason, snapshot_id, memory_kind,
        pool, segment_type, stream, expandable, address AS segment_address, bytes AS segment_bytes,
        unnest(blocks) AS block
    FROM segments
),
stack_names AS (
    SELECT stack_id, min(folded) AS folded FROM stacks GROUP BY stack_id
)
SELECT
    c.ts, c.ts_ns, c.host, c.process_id, c.pid, p.exe, p.namespace, p.pod, c.gpu_uuid, c.device,
    c.source, c.reason, c.snapshot_id, m.is_newest, c.memory_kind, c.pool, c.segment_type, c.stream,
    c.expandable, c.segment_address, c.segment_bytes,
    c.block['address'] AS address,
    c.block['address'] - c.segment_address AS offset_bytes,
    c.block['bytes'] AS bytes,
    c.block['requested_bytes'] AS requested_bytes,
    c.block['state'] AS state,
    c.block['allocated_ts_ns'] AS allocated_at_ns,
    (c.ts_ns - c.block['allocated_ts_ns']) / 1e9 AS age_seconds,
    c.block['stack_id'] AS stack_id,
    s.folded,
    c.block['alloc_seq'] AS alloc_seq
FROM cells AS c
JOIN maps AS m
  ON m.process_id = c.process_id AND m.snapshot_id = c.snapshot_id AND (m.device IS NOT DISTINCT FROM c.device)
LEFT JOIN current_processes AS p ON p.process_id = c.process_id
LEFT JOIN stack_names AS s ON s.stack_id = c.block['stack_id']
