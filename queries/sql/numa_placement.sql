-- purpose: on which NUMA node pinned and registered host memory lies, against the node of the card it was pinned for
-- reads: host_buffers (raw), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   host | - | host name
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   gpu_uuid | - | the card that was current when the buffers were pinned
--   device | - | its ordinal as the process sees it
--   memory_kind | - | pinned_host or registered_host
--   gpu_node | - | NUMA node of that card; NULL when the platform does not say
--   node | - | NUMA node the bytes lie on; NULL: not resident or not known
--   buffers | buffers | buffers with bytes on this node
--   bytes | bytes | their bytes on this node
--   misplaced_bytes | bytes | bytes on another node than the card's; NULL if either node is unknown
--   unknown_bytes | bytes | bytes whose node, or whose card's node, is unknown
--   misplaced_ratio | ratio | misplaced_bytes / bytes; NULL if either node is unknown
-- formulas:
--   a buffer's bytes are shared out over nodes in proportion to its pages there, rounded to whole bytes
--   every buffer that was measured counts, also those that were freed since: join live_allocations by process_id and seq for those that are live
WITH buffers AS (
    SELECT * FROM (
        SELECT
            *,
            row_number() OVER (
                PARTITION BY host, agent_id, process_id, seq ORDER BY ts_ns DESC, batch_seq DESC
            ) AS newest_first
        FROM host_buffers
    )
    WHERE newest_first = 1
),
by_node AS (
    SELECT
        host, agent_id, process_id, pid, seq, gpu_uuid, device, memory_kind, gpu_node, bytes,
        entry['node'] AS node, entry['pages'] AS pages
    FROM (
        SELECT
            host, agent_id, process_id, pid, seq, gpu_uuid, device, memory_kind, gpu_node, bytes,
            unnest(pages) AS entry
        FROM buffers
    )
    -- A buffer without a single page entry is bytes whose place is unknown, not no bytes.
    UNION ALL
    SELECT
        host, agent_id, process_id, pid, seq, gpu_uuid, device, memory_kind, gpu_node, bytes,
        NULL, 1
    FROM buffers
    WHERE coalesce(cardinality(pages), 0) = 0
),
shares AS (
    SELECT
        *,
        CAST(round(
            CAST(bytes AS DOUBLE) * pages
            / nullif(sum(pages) OVER (PARTITION BY host, agent_id, process_id, seq), 0)
        ) AS BIGINT) AS node_bytes
    FROM by_node
),
placed AS (
    SELECT
        host, process_id, max(pid) AS pid, gpu_uuid, device, memory_kind, gpu_node, node,
        count(*) AS buffers,
        sum(node_bytes) AS bytes
    FROM shares
    WHERE pages > 0
    GROUP BY host, process_id, gpu_uuid, device, memory_kind, gpu_node, node
)
SELECT
    b.host, b.process_id, b.pid, p.exe, p.namespace, p.pod, b.gpu_uuid, b.device, b.memory_kind,
    b.gpu_node, b.node, b.buffers, b.bytes,
    CASE
        WHEN b.node IS NULL OR b.gpu_node IS NULL THEN NULL
        WHEN b.node <> b.gpu_node THEN b.bytes
        ELSE 0
    END AS misplaced_bytes,
    CASE WHEN b.node IS NULL OR b.gpu_node IS NULL THEN b.bytes ELSE 0 END AS unknown_bytes,
    CASE
        WHEN b.node IS NULL OR b.gpu_node IS NULL THEN NULL
        WHEN b.node <> b.gpu_node THEN 1.0
        ELSE 0.0
    END AS misplaced_ratio
FROM placed AS b
LEFT JOIN current_processes AS p ON p.process_id = b.process_id
