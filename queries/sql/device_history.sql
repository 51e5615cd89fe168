-- purpose: what each process did and held on each device, by kind of memory, window by window
-- reads: device_windows (windows), processes (raw, by current_processes)
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
--   byte_class | - | physical, host, virtual, sub_allocated or ipc. Never add up bytes of two classes, nor vmm_virtual and vmm_mapped
--   layer | - | layer of the counted rows: driver, runtime or framework
--   alloc_bytes | bytes | bytes of what began in the window
--   alloc_count | allocations | how many
--   free_bytes | bytes | bytes of what ended in the window
--   free_count | allocations | how many
--   failed_allocations | calls | call chains that failed to allocate
--   failed_frees | calls | call chains that failed to free
--   live_bytes | bytes | bytes that live at the end of the window
--   live_count | allocations | how many
--   peak_live_bytes | bytes | most live bytes at one moment of the window, over events
--   running_peak_bytes | bytes | most live bytes at one moment up to the end of the window, over events
--   pool_reserved_bytes | bytes | memory that pools of the device hold, as the program itself last read it; NULL when it never asked
--   lossy | - | the window lost something: its numbers may be wrong
--   agent_id | - | agent that wrote the row
-- formulas:
--   one row per row of device_windows. A place has a row in the windows in which it was active, one when its process ends, and one every 60th window while something lives: what holds at a given time is the newest row up to then of each (process_id, gpu_uuid, device, memory_kind, layer), not the rows of one window
--   running_peak_bytes is the largest process_peak_bytes up to the window: an agent that lost its state begins anew, the peak does not
--   peaks of two processes or kinds fall on different moments: their sum is only an upper bound
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
    w.layer, w.alloc_bytes, w.alloc_count, w.free_bytes, w.free_count,
    w.failed_allocations, w.failed_frees, w.live_bytes, w.live_count, w.peak_live_bytes,
    max(greatest(w.process_peak_bytes, w.peak_live_bytes)) OVER (
        PARTITION BY w.host, w.process_id, w.gpu_uuid, w.device, w.memory_kind, w.layer
        ORDER BY w.ts_ns, w.batch_seq
        ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS running_peak_bytes,
    w.pool_reserved_bytes, w.lossy, w.agent_id
FROM device_windows AS w
LEFT JOIN current_processes AS p ON p.process_id = w.process_id
