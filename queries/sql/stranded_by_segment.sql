-- purpose: which blocks in use hold segments hostage: their stacks, their ages, and the free bytes that cannot be given back because of them
-- reads: segments, stacks (raw, by memory_map), segments (raw)
-- parameters: none
-- columns:
--   ts | time | when the map was taken
--   host | - | host name; of an import the file's name
--   process_id | - | one process lifetime; of an import the file
--   pid | - | process id in the host's namespace; of an import 0
--   device | - | device ordinal as the process sees it; NULL for host memory
--   snapshot_id | - | rows of one moment share it
--   is_newest | - | true: no newer map of this process and device is in the data
--   memory_kind | - | device, vmm_physical (expandable segments), or pinned_host
--   pool | - | default, or a private pool's id; NULL: not known
--   segment_type | - | small or large
--   stream | - | the framework's id of the stream the segment belongs to
--   segment_rank | - | 1: the segment with the most stranded bytes of the map's
--   segment_address | - | first address of the segment
--   segment_bytes | bytes | size of the segment
--   segment_stranded_bytes | bytes | free bytes in it that cannot be given back; the same in every row of the segment
--   segment_blocks | blocks | blocks in use in it; 1: the row's block alone holds it
--   address | - | first address of the block
--   offset_bytes | bytes | from the segment's first address to it
--   bytes | bytes | the block's own size
--   held_bytes | bytes | the block's share of segment_stranded_bytes: equal shares, so that sums over blocks, stacks or segments add up to stranded_bytes
--   state | - | active_allocated or active_pending_free
--   age_seconds | s | from the block's allocation to the map; NULL if not known
--   stack_id | - | stack that allocated the block; joins stacks
--   folded | - | function names, outermost first, joined by ';'
-- formulas:
--   one row per block in use of each segment that has stranded bytes; sum(held_bytes) over a map is its stranded_bytes, as fragmentation has it
--   a block that alone holds a large segment is the first to move: allocate it earlier, free it, or give it a pool of its own
--   of an expandable segment whole chunks can be given back between blocks: segment_stranded_bytes is what is left over
WITH hostages AS (
    SELECT
        process_id, device, snapshot_id, address AS segment_address, stranded_bytes,
        row_number() OVER (
            PARTITION BY process_id, device, snapshot_id ORDER BY stranded_bytes DESC, address
        ) AS segment_rank
    FROM segments
    WHERE stranded_bytes > 0
),
holders AS (
    SELECT
        m.ts, m.host, m.process_id, m.pid, m.device, m.snapshot_id, m.is_newest, m.memory_kind, m.pool,
        m.segment_type, m.stream, h.segment_rank, m.segment_address, m.segment_bytes,
        h.stranded_bytes AS segment_stranded_bytes,
        m.address, m.offset_bytes, m.bytes, m.state, m.age_seconds, m.stack_id, m.folded,
        count(*) OVER segment AS segment_blocks,
        row_number() OVER (
            PARTITION BY m.process_id, m.device, m.snapshot_id, m.segment_address ORDER BY m.address
        ) AS position
    FROM memory_map AS m
    JOIN hostages AS h
      ON h.process_id = m.process_id AND h.snapshot_id = m.snapshot_id
     AND h.segment_address = m.segment_address AND (h.device IS NOT DISTINCT FROM m.device)
    WHERE m.state <> 'inactive'
    WINDOW segment AS (PARTITION BY m.process_id, m.device, m.snapshot_id, m.segment_address)
)
SELECT
    ts, host, process_id, pid, device, snapshot_id, is_newest, memory_kind, pool, segment_type, stream,
    segment_rank, segment_address, segment_bytes, segment_stranded_bytes, segment_blocks,
    address, offset_bytes, bytes,
    -- The remainder of the division goes to the first blocks, a byte each.
    segment_stranded_bytes / segment_blocks
        + CASE WHEN position <= segment_stranded_bytes % segment_blocks THEN 1 ELSE 0 END AS held_bytes,
    state, age_seconds, stack_id, folded
FROM holders
