-- purpose: every allocation, reservation and mapping that succeeded and has no end, with who made it and how old it is
-- reads: alloc_events (raw), stacks (raw), agent_windows (windows), processes (raw, by current_processes), device_windows (windows, by framework_processes)
-- parameters: none
-- columns:
--   host | - | host name
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   process_ended | time | when the process ended; NULL while it lives. An allocation that outlives its process is one whose end was lost
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it
--   memory_kind | - | device, managed, array, vmm_physical, pinned_host, registered_host, vmm_virtual, vmm_mapped, pool, framework_block
--   address | - | address of the allocation; of vmm_physical the handle
--   bytes | bytes | its size
--   allocated_at | time | when it was made
--   age_seconds | s | from then to the newest event or window of the same host in the data, not to the present: an old trace does not age
--   stack_id | - | stack that made it; joins stacks
--   folded | - | function names, outermost first, joined by ';'; NULL without a stack
--   seq | - | seq of the allocation's row in alloc_events
--   byte_class | - | physical, host, virtual or sub_allocated. Never add up bytes of two classes, nor vmm_virtual and vmm_mapped
--   pool | - | memory pool handle; NULL if the call names none
-- formulas:
--   framework blocks are listed where all their events are here: framework_processes.whole. Elsewhere memory_map lists them
--   one row per counted row with op alloc, reserve, map or register that no counted free, release, unmap or unregister, implicit or not, names in alloc_seq, within host, agent_id and process_id; failed frees end nothing
--   what was allocated before the host last booted is gone, though its frees were never seen: it is left out
--   not here, since their bytes are not this process's or not known: what ipc opened, imported handles, and what a process held before the agent came (reconciliation shows that as baseline_bytes)
--   an allocation that the agent could not follow to its end (cause live_full in losses) stays here
WITH newest AS (
    SELECT host, max(ts_ns) AS ts_ns
    FROM (
        SELECT host, ts_ns FROM alloc_events
        UNION ALL
        SELECT host, ts_ns FROM agent_windows
    )
    GROUP BY host
),
-- What lives is found before anything is joined to it: of a million calls few allocations are left.
-- A process_id is of one host, so the host need not be compared.
unended AS (
    SELECT
        a.host, a.process_id, a.pid, a.gpu_uuid, a.device, a.memory_kind, a.address, a.bytes,
        a.ts, a.ts_ns, a.stack_id, a.seq, a.pool
    FROM alloc_events AS a
    WHERE a.counted
      AND a.op IN ('alloc', 'reserve', 'map', 'register')
      AND (a.result IS NULL OR a.result = 0)
      AND (
        a.layer <> 'framework'
        OR a.process_id IN (SELECT process_id FROM framework_processes WHERE whole)
      )
      AND NOT EXISTS (
        SELECT 1
        FROM alloc_events AS f
        WHERE f.process_id = a.process_id
          AND f.agent_id = a.agent_id
          AND f.alloc_seq = a.seq
          AND f.counted
          AND f.op IN ('free', 'release', 'unmap', 'unregister')
          AND (f.result IS NULL OR f.result = 0)
      )
),
-- Every host that ran the code has a row for the same stack: one of them is enough, more would
-- multiply allocations.
stack_names AS (
    SELECT stack_id, min(folded) AS folded FROM stacks GROUP BY stack_id
)
SELECT
    a.host, a.process_id, a.pid, p.exe, p.namespace, p.pod, p.ended AS process_ended,
    a.gpu_uuid, a.device, a.memory_kind, a.address, a.bytes,
    a.ts AS allocated_at,
    (n.ts_ns - a.ts_ns) / 1e9 AS age_seconds,
    a.stack_id, s.folded, a.seq,
    CASE
        WHEN a.memory_kind IN ('device', 'managed', 'array', 'vmm_physical') THEN 'physical'
        WHEN a.memory_kind IN ('pinned_host', 'registered_host') THEN 'host'
        WHEN a.memory_kind IN ('vmm_virtual', 'vmm_mapped') THEN 'virtual'
        WHEN a.memory_kind IN ('pool', 'framework_block') THEN 'sub_allocated'
        WHEN a.memory_kind = 'ipc' THEN 'ipc'
    END AS byte_class,
    a.pool
FROM unended AS a
JOIN newest AS n ON n.host = a.host
LEFT JOIN current_processes AS p ON p.process_id = a.process_id
LEFT JOIN stack_names AS s ON s.stack_id = a.stack_id
WHERE NOT coalesce(p.rebooted, false)
