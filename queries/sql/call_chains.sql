-- purpose: the calls that gave or took memory or addresses, and those that failed to, each call chain once
-- reads: alloc_events (raw)
-- parameters: none
-- columns:
--   ts | time | when the call took effect: what gives at its return, what takes at its entry
--   ts_ns | ns | the same, nanoseconds since 1970
--   host | - | host name
--   boot_id | - | the kernel's boot id
--   agent_id | - | agent that wrote the row; seq orders rows within host, boot and agent
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it
--   memory_kind | - | device, managed, array, vmm_physical, pinned_host, registered_host, vmm_virtual, vmm_mapped, pool, framework_block, ipc
--   residence | - | device: on the card (physical memory and pool slices); host: in main memory; other: addresses, another process's memory, or not known
--   op | - | what gives: alloc, reserve, map, register; what takes: free, release, unmap, unregister
--   api | - | function called, as exported; on implicit rows the reason
--   failed | - | true if the call failed
--   implicit | - | true for an end that no call asked for by name
--   address | - | address given or taken
--   bytes | bytes | bytes given or taken; 0 if the call failed; NULL if not known
--   requested_bytes | bytes | bytes asked for
--   live_delta_bytes | bytes | what the call adds to live bytes: positive for what gives, negative for what takes, 0 if it failed
--   result | - | result code of the call; NULL on implicit rows
--   stack_id | - | stack of the call; joins stacks
--   seq | - | order in which calls took effect
--   byte_class | - | physical, host, virtual, sub_allocated or ipc; NULL if the kind is not known. Bytes of two classes are never added up
--   pool | - | memory pool handle; NULL if the call names none
--   alloc_seq | - | on what takes: seq of what it ends
--   layer | - | driver, runtime or framework
--   source | - | uprobe, usdt, cupti, agent (implicit ends), or import (read from a file: of no host's totals)
--   tid | - | thread that called; NULL on implicit rows and in an import
-- formulas:
--   a success is the chain's counted row, so that runtime and driver rows of one call are not added up
--   a failure is the innermost failed row: a failed runtime call over a failed driver call is one failure, the driver's
--   framework blocks lie within physical bytes of driver calls: their rows have a class of their own. In an import segments stand for the driver's calls, and the trace may begin when much was allocated already
--   physical: device, managed, array, vmm_physical; host: pinned_host, registered_host; virtual: vmm_virtual (reserved), vmm_mapped (mapped; lies within the reserved); sub_allocated: pool, framework_block (lie within memory that is counted elsewhere, or in pool memory that no call shows)
--   not here, since they stand for no bytes of this process: successful ipc calls, references taken and dropped, imported handles, baseline rows, frees of memory that was allocated before the agent came, or before an imported trace began. They are in alloc_events
WITH failures AS (
    SELECT *
    FROM alloc_events
    WHERE result <> 0
      AND op IN ('alloc', 'reserve', 'map', 'register', 'free', 'release', 'unmap', 'unregister')
),
-- Two plain scans: one with NOT EXISTS under an OR would hold every row of the table in memory.
chains AS (
    SELECT
        ts, ts_ns, host, boot_id, agent_id, process_id, pid, gpu_uuid, device, memory_kind, op, api,
        false AS failed, implicit, address, bytes, requested_bytes,
        CASE WHEN op IN ('alloc', 'reserve', 'map', 'register') THEN bytes ELSE -bytes END AS live_delta_bytes,
        result, stack_id, seq, pool, alloc_seq, layer, source, tid
    FROM alloc_events
    WHERE counted
      AND coalesce(result, 0) = 0
      -- An import counts the end of a block that is older than its trace: allocator_timeline needs it.
      AND NOT (source = 'import' AND op = 'free' AND memory_kind = 'framework_block' AND alloc_seq IS NULL)
      AND op IN ('alloc', 'reserve', 'map', 'register', 'free', 'release', 'unmap', 'unregister')
    UNION ALL
    SELECT
        ts, ts_ns, host, boot_id, agent_id, process_id, pid, gpu_uuid, device, memory_kind, op, api,
        true AS failed, implicit, address, bytes, requested_bytes,
        CAST(0 AS BIGINT) AS live_delta_bytes,
        result, stack_id, seq, pool, alloc_seq, layer, source, tid
    FROM failures AS e
    WHERE NOT EXISTS (
        SELECT 1
        FROM failures AS inner_call
        WHERE inner_call.host = e.host
          AND inner_call.agent_id = e.agent_id
          AND inner_call.process_id = e.process_id
          AND inner_call.parent_seq = e.seq
    )
)
SELECT
    ts, ts_ns, host, boot_id, agent_id, process_id, pid, gpu_uuid, device, memory_kind,
    CASE
        WHEN memory_kind IN ('device', 'managed', 'array', 'vmm_physical', 'pool') THEN 'device'
        WHEN memory_kind IN ('pinned_host', 'registered_host') THEN 'host'
        ELSE 'other'
    END AS residence,
    op, api, failed, implicit, address, bytes, requested_bytes, live_delta_bytes, result, stack_id, seq,
    CASE
        WHEN memory_kind IN ('device', 'managed', 'array', 'vmm_physical') THEN 'physical'
        WHEN memory_kind IN ('pinned_host', 'registered_host') THEN 'host'
        WHEN memory_kind IN ('vmm_virtual', 'vmm_mapped') THEN 'virtual'
        WHEN memory_kind IN ('pool', 'framework_block') THEN 'sub_allocated'
        WHEN memory_kind = 'ipc' THEN 'ipc'
    END AS byte_class,
    pool, alloc_seq, layer, source, tid
FROM chains
