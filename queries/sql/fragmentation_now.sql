-- purpose: how full and how fragmented the caching allocator of each process and device is now, pools and streams together
-- reads: segments, allocator_samples, alloc_events, processes (raw, by fragmentation)
-- parameters: none
-- columns:
--   ts | time | newest sample or map of the process and device
--   host | - | host name; of an import the file's name
--   process_id | - | one process lifetime; of an import the file
--   pid | - | process id in the host's namespace; of an import 0
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it
--   framework | - | whose allocator: pytorch
--   source | - | usdt (traced) or import
--   reason | - | why the sample was taken: window, oom, request, end, import
--   snapshot_id | - | joins fragmentation and memory_map
--   process_ended | time | when the process ended: the row is history then; NULL while it lives
--   segments | segments | how many
--   reserved_bytes | bytes | taken from the driver
--   allocated_bytes | bytes | in blocks that the program holds, after rounding
--   active_bytes | bytes | allocated_bytes and what is freed but still in use on a stream; NULL if not known
--   requested_bytes | bytes | asked for, before rounding; NULL if not known of every block
--   inactive_bytes | bytes | cached, free for the next request: releasable_bytes + stranded_bytes
--   releasable_bytes | bytes | of the inactive, what could be given back to the driver
--   stranded_bytes | bytes | of the inactive, what blocks in use hold
--   largest_free_block_bytes | bytes | the largest gap of any pool and stream
--   device_free_bytes | bytes | free on the card at that moment; NULL if not known
--   max_contiguous_bytes | bytes | the largest request that would succeed, of any pool and stream (metric 4); NULL if device_free_bytes is not known
--   external_ratio | ratio | 1 - max_contiguous_bytes / (device_free_bytes + inactive_bytes) (metric 6); NULL if device_free_bytes is not known
--   internal_ratio | ratio | (reserved - active) / reserved (metric 7): the same as cache_slack
--   cache_slack | ratio | inactive_bytes / reserved_bytes; high is normal
--   rounding_loss | ratio | 1 - requested_bytes / active_bytes
--   stranded_ratio | ratio | stranded_bytes / reserved_bytes: what alerts look at
--   fragmentation_ratio | ratio | 1 - peak allocated / peak reserved so far (GMLake, STAlloc), for comparison with papers
--   request_headroom_ratio | ratio | (max_contiguous_bytes - largest request) / max_contiguous_bytes; NULL if either is not known
--   unusable_free_index_p99 | ratio | share of inactive_bytes in gaps too small for the p99 request of their own pool and stream; gaps of pools without recorded requests are left out
--   lossy | - | events of the process were lost before; NULL if not known
-- formulas:
--   the rows of fragmentation that are newest, without pinned host memory, added up; definitions are there
--   several processes can share a card: device_free_bytes is the same free memory for all of them
WITH newest AS (
    SELECT * FROM fragmentation WHERE is_newest AND coalesce(memory_kind, '') <> 'pinned_host'
),
totals AS (
    SELECT
        process_id, device, max(ts) AS ts, max(host) AS host, max(pid) AS pid, max(exe) AS exe,
        max(namespace) AS namespace, max(pod) AS pod, max(gpu_uuid) AS gpu_uuid, max(framework) AS framework,
        max(source) AS source, max(reason) AS reason, max(snapshot_id) AS snapshot_id,
        sum(segments) AS segments,
        sum(reserved_bytes) AS reserved_bytes,
        sum(allocated_bytes) AS allocated_bytes,
        CASE WHEN count(active_bytes) = count(*) THEN sum(active_bytes) END AS active_bytes,
        CASE WHEN count(requested_bytes) = count(*) THEN sum(requested_bytes) END AS requested_bytes,
        sum(inactive_bytes) AS inactive_bytes,
        sum(releasable_bytes) AS releasable_bytes,
        sum(stranded_bytes) AS stranded_bytes,
        max(largest_free_block_bytes) AS largest_free_block_bytes,
        max(device_free_bytes) AS device_free_bytes,
        max(max_contiguous_bytes) AS max_contiguous_bytes,
        max(fragmentation_ratio) AS fragmentation_ratio,
        max(demand_max_bytes) AS demand_max_bytes,
        sum(unusable_free_index_p99 * inactive_bytes) AS unusable_bytes,
        sum(inactive_bytes) FILTER (WHERE unusable_free_index_p99 IS NOT NULL) AS measured_inactive_bytes,
        bool_or(lossy) AS lossy
    FROM newest
    GROUP BY process_id, device
)
SELECT
    t.ts, t.host, t.process_id, t.pid, t.exe, t.namespace, t.pod, t.gpu_uuid, t.device, t.framework,
    t.source, t.reason, t.snapshot_id, p.ended AS process_ended, t.segments, t.reserved_bytes,
    t.allocated_bytes, t.active_bytes, t.requested_bytes, t.inactive_bytes, t.releasable_bytes,
    t.stranded_bytes, t.largest_free_block_bytes, t.device_free_bytes, t.max_contiguous_bytes,
    1 - CAST(t.max_contiguous_bytes AS DOUBLE) / nullif(t.device_free_bytes + t.inactive_bytes, 0) AS external_ratio,
    CAST(t.inactive_bytes AS DOUBLE) / nullif(t.reserved_bytes, 0) AS internal_ratio,
    CAST(t.inactive_bytes AS DOUBLE) / nullif(t.reserved_bytes, 0) AS cache_slack,
    1 - CAST(t.requested_bytes AS DOUBLE) / nullif(coalesce(t.active_bytes, t.allocated_bytes), 0) AS rounding_loss,
    CAST(t.stranded_bytes AS DOUBLE) / nullif(t.reserved_bytes, 0) AS stranded_ratio,
    t.fragmentation_ratio,
    CAST(t.max_contiguous_bytes - t.demand_max_bytes AS DOUBLE) / nullif(t.max_contiguous_bytes, 0) AS request_headroom_ratio,
    t.unusable_bytes / nullif(t.measured_inactive_bytes, 0) AS unusable_free_index_p99,
    t.lossy
FROM totals AS t
LEFT JOIN current_processes AS p ON p.process_id = t.process_id
