-- purpose: the calls that gave or took memory, and those that failed to, each call chain once
-- reads: alloc_events (raw)
-- parameters: none
-- columns:
--   ts | time | when the call took effect: an allocation at its return, a free at its entry
--   ts_ns | ns | the same, nanoseconds since 1970
--   host | - | host name
--   boot_id | - | the kernel's boot id
--   agent_id | - | agent that wrote the row; seq orders rows within host, boot and agent
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it
--   memory_kind | - | device, managed, pinned_host, registered_host, vmm_physical, pool, array
--   residence | - | device: bytes on the card; host: bytes in main memory; other: neither or not known
--   op | - | alloc, register, free, unregister
--   api | - | function called, as exported
--   failed | - | true if the call failed
--   implicit | - | true for a free that no call asked for
--   address | - | address given or taken
--   bytes | bytes | bytes given or taken; 0 if the call failed; NULL if not known
--   requested_bytes | bytes | bytes asked for
--   live_delta_bytes | bytes | what the call adds to live bytes: positive for an allocation, negative for a free, 0 if it failed
--   result | - | result code of the call; NULL for implicit frees
--   stack_id | - | stack of the call; joins stacks
--   seq | - | order in which calls took effect
-- formulas:
--   a success is the chain's counted row, so that runtime and driver rows of one call are not added up
--   a failure is the innermost failed row: a failed runtime call over a failed driver call is one failure, the driver's
--   calls that move no physical bytes (map, unmap, reserve, release) and frees of memory that was allocated before the agent came are not here: they are in alloc_events
SELECT
    e.ts, e.ts_ns, e.host, e.boot_id, e.agent_id, e.process_id, e.pid, e.gpu_uuid, e.device, e.memory_kind,
    CASE
        WHEN e.memory_kind IN ('device', 'managed', 'vmm_physical', 'pool', 'array') THEN 'device'
        WHEN e.memory_kind IN ('pinned_host', 'registered_host') THEN 'host'
        ELSE 'other'
    END AS residence,
    e.op, e.api,
    coalesce(e.result, 0) <> 0 AS failed,
    e.implicit, e.address, e.bytes, e.requested_bytes,
    CASE
        WHEN coalesce(e.result, 0) <> 0 THEN 0
        WHEN e.op IN ('alloc', 'register') THEN e.bytes
        ELSE -e.bytes
    END AS live_delta_bytes,
    e.result, e.stack_id, e.seq
FROM alloc_events AS e
WHERE e.op IN ('alloc', 'register', 'free', 'unregister')
  AND (
    (e.counted AND coalesce(e.result, 0) = 0)
    OR (
        e.result <> 0
        AND NOT EXISTS (
            SELECT 1
            FROM alloc_events AS inner_call
            WHERE inner_call.host = e.host
              AND inner_call.agent_id = e.agent_id
              AND inner_call.process_id = e.process_id
              AND inner_call.parent_seq = e.seq
              AND inner_call.result <> 0
              AND inner_call.op IN ('alloc', 'register', 'free', 'unregister')
        )
    )
  )
