-- purpose: what each call stack of each process did and held, window by window
-- reads: stack_windows (windows), stacks (raw), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   window_start | time | start of the window
--   window_end | time | end of the window
--   host | - | host name
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it; NULL if not certain
--   memory_kind | - | kind of memory
--   byte_class | - | physical, host, virtual or sub_allocated. Never add up bytes of two classes, nor vmm_virtual and vmm_mapped
--   layer | - | layer of the counted rows: driver, runtime or framework
--   stack_id | - | stack that allocated; joins stacks; NULL: no stack was taken
--   folded | - | function names, outermost first, joined by ';'; NULL without a stack
--   alloc_bytes | bytes | bytes of what began in the window
--   alloc_count | allocations | how many
--   free_bytes | bytes | bytes of what ended in the window, charged to the stack that allocated
--   free_count | allocations | how many
--   net_bytes | bytes | alloc_bytes - free_bytes
--   live_bytes | bytes | bytes of the stack that live at the end of the window
--   live_count | allocations | how many
--   oldest_live_age_seconds | s | age of the oldest that lives at the end; NULL when nothing lives
--   peak_live_bytes | bytes | most live bytes of the stack at one moment of the window, over events
--   lossy | - | the window lost something: its numbers may be wrong
--   agent_id | - | agent that wrote the row
-- formulas:
--   one row per row of stack_windows. A stack has a row in the windows in which it was active, one when its process ends, and one every 60th window while it lives: what holds at a given time is the newest row up to then of each (process_id, gpu_uuid, device, memory_kind, layer, stack_id), not the rows of one window
--   peaks of two stacks or processes fall on different moments: their sum is only an upper bound
WITH stack_names AS (
    SELECT stack_id, min(folded) AS folded FROM stacks GROUP BY stack_id
)
SELECT
    w.ts AS window_start, w.window_end, w.host, w.process_id, w.pid, p.exe, p.namespace, p.pod,
    w.gpu_uuid, w.device, w.memory_kind,
    CASE
        WHEN w.memory_kind IN ('device', 'managed', 'array', 'vmm_physical') THEN 'physical'
        WHEN w.memory_kind IN ('pinned_host', 'registered_host') THEN 'host'
        WHEN w.memory_kind IN ('vmm_virtual', 'vmm_mapped') THEN 'virtual'
        WHEN w.memory_kind IN ('pool', 'framework_block') THEN 'sub_allocated'
        WHEN w.memory_kind = 'ipc' THEN 'ipc'
    END AS byte_class,
    w.layer, w.stack_id, s.folded,
    w.alloc_bytes, w.alloc_count, w.free_bytes, w.free_count,
    w.alloc_bytes - w.free_bytes AS net_bytes,
    w.live_bytes, w.live_count,
    w.oldest_live_age_ns / 1e9 AS oldest_live_age_seconds,
    w.peak_live_bytes, w.lossy, w.agent_id
FROM stack_windows AS w
LEFT JOIN current_processes AS p ON p.process_id = w.process_id
LEFT JOIN stack_names AS s ON s.stack_id = w.stack_id
