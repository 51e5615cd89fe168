-- purpose: how full and how fragmented a framework's caching allocator is, by process, device, pool and stream, for every recorded moment
-- reads: segments (raw), allocator_samples (raw), alloc_events (raw, for the sizes of requests), processes (raw, by current_processes)
-- parameters: none
-- columns:
--   ts | time | when the sample or map was taken
--   ts_ns | ns | the same, nanoseconds since 1970
--   host | - | host name; of an import the file's name
--   process_id | - | one process lifetime; of an import the file
--   pid | - | process id in the host's namespace; of an import 0
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it; NULL for host memory
--   framework | - | whose allocator: pytorch
--   source | - | usdt (traced) or import
--   reason | - | why the sample was taken: window, oom, request, end, import
--   snapshot_id | - | rows of one moment share it; joins memory_map
--   is_newest | - | true: nothing newer of this process and device is in the data
--   memory_kind | - | device, vmm_physical (expandable segments), or pinned_host; NULL: all of a sample that came without a map
--   pool | - | default, or a private pool's id; NULL: not known (a traced map does not tell them apart), or all of a sample that came without a map
--   segment_type | - | small (requests up to 1 MiB) or large; NULL: all of a sample that came without a map
--   stream | - | the framework's id of the stream; NULL as above
--   segments | segments | how many
--   active_blocks | blocks | blocks that the program or a stream uses; NULL if the sample came without a map
--   free_blocks | blocks | gaps; NULL as above
--   reserved_bytes | bytes | taken from the driver
--   allocated_bytes | bytes | in blocks that the program holds, after rounding
--   active_bytes | bytes | allocated_bytes and what is freed but still in use on a stream; NULL if not known
--   pending_free_bytes | bytes | active_bytes - allocated_bytes
--   inactive_bytes | bytes | cached, free for the next request: releasable_bytes + stranded_bytes
--   requested_bytes | bytes | asked for, before rounding, by the active blocks; NULL if one of them is not known
--   releasable_bytes | bytes | of the inactive, what could be given back to the driver: whole segments, of expandable segments whole chunks
--   stranded_bytes | bytes | of the inactive, what could not: blocks in use hold it (stranded_by_segment says which)
--   largest_free_block_bytes | bytes | the largest gap; not additive: the largest counts
--   device_free_bytes | bytes | free on the card at that moment, as driver or NVML said; of the device, not additive; NULL if not known
--   max_contiguous_bytes | bytes | the largest request that would succeed in this pool and stream: the larger of largest_free_block_bytes and what the driver can give, device_free_bytes and all that can be flushed on the device; not additive; NULL if device_free_bytes is not known
--   external_ratio | ratio | 1 - max_contiguous_bytes / (device_free_bytes + inactive bytes of the whole device); NULL if device_free_bytes is not known
--   internal_ratio | ratio | (reserved - active) / reserved: the same as cache_slack, under the name of metric 7
--   cache_slack | ratio | inactive_bytes / reserved_bytes; high is normal
--   rounding_loss | ratio | 1 - requested_bytes / active_bytes: what rounding and unsplit rests cost
--   stranded_ratio | ratio | stranded_bytes / reserved_bytes: what alerts look at
--   fragmentation_ratio | ratio | 1 - peak allocated / peak reserved so far, of the device (GMLake, STAlloc), for comparison with papers; not additive
--   request_headroom_ratio | ratio | (max_contiguous_bytes - demand_max_bytes) / max_contiguous_bytes: room, not fragmentation; it rises as the largest hole grows
--   demand_requests | requests | recorded requests to this pool and stream, whenever they were made
--   demand_p50_bytes | bytes | half of them asked for no more, after rounding; NULL without recorded requests
--   demand_p99_bytes | bytes | 99 % of them asked for no more
--   demand_max_bytes | bytes | the largest
--   unusable_free_index_p50 | ratio | share of inactive_bytes in gaps too small for demand_p50_bytes: 0 good, 1 bad; NULL if nothing is free or the demand is not known
--   unusable_free_index_p99 | ratio | the same for demand_p99_bytes: what alerts look at
--   unusable_free_index_max | ratio | the same for demand_max_bytes
--   lossy | - | events of the process were lost before; NULL if not known
-- formulas:
--   reserved = active + inactive, active = allocated + pending_free, inactive = releasable + stranded; bytes add up over pools, streams and devices of one snapshot_id
--   at this level holes are real: a request cannot span two segments, and a gap of one pool or stream serves no other. Holes between driver addresses are none: there only the driver's free bytes count
--   what can be flushed are the releasable bytes of the default pool; those of private pools stay with their captured graphs
--   of a traced map blocks whose end waits for another stream count as gaps, since tracing does not see them: active_bytes is NULL then, and inactive_bytes an upper bound
--   percentiles are by nearest rank over the requests in alloc_events, rounded by the allocator's rule (allocator_round); a request is counted to the pool size and stream it asked, private pools share the default pool's demand
--   unusable_free_index is Linux's definition: (free - free in blocks >= the request) / free
WITH maps AS (
    SELECT
        s.process_id, s.device, s.snapshot_id, s.memory_kind, s.pool, s.segment_type, s.stream,
        max(s.ts) AS ts, max(s.ts_ns) AS ts_ns, max(s.host) AS host, max(s.pid) AS pid,
        max(s.gpu_uuid) AS gpu_uuid, max(s.framework) AS framework, max(s.source) AS source,
        max(s.reason) AS reason,
        count(*) AS segments,
        sum(s.bytes) AS reserved_bytes,
        sum(s.allocated_bytes) AS allocated_bytes,
        CASE WHEN count(s.active_bytes) = count(*) THEN sum(s.active_bytes) END AS active_bytes,
        sum(s.releasable_bytes) AS releasable_bytes,
        sum(s.stranded_bytes) AS stranded_bytes,
        max(s.largest_free_block_bytes) AS largest_free_block_bytes
    FROM segments AS s
    GROUP BY s.process_id, s.device, s.snapshot_id, s.memory_kind, s.pool, s.segment_type, s.stream
),
cells AS (
    SELECT process_id, device, snapshot_id, memory_kind, pool, segment_type, stream, unnest(blocks) AS block
    FROM segments
),
-- How many distinct sizes were asked for is small, whatever the number of requests.
sizes AS (
    SELECT
        process_id, device, stream,
        CASE WHEN rounded <= 1048576 THEN 'small' ELSE 'large' END AS segment_type,
        rounded, count(*) AS requests
    FROM (
        SELECT process_id, device, stream, allocator_round(requested_bytes) AS rounded
        FROM alloc_events
        WHERE layer = 'framework' AND op = 'alloc' AND memory_kind = 'framework_block'
          AND requested_bytes IS NOT NULL
    )
    GROUP BY process_id, device, stream, segment_type, rounded
),
ranked AS (
    SELECT
        *,
        sum(requests) OVER (PARTITION BY process_id, device, stream, segment_type) AS all_requests,
        sum(requests) OVER (
            PARTITION BY process_id, device, stream, segment_type ORDER BY rounded
        ) AS up_to
    FROM sizes
),
demand AS (
    SELECT
        process_id, device, stream, segment_type,
        max(all_requests) AS requests,
        min(rounded) FILTER (WHERE up_to >= 0.5 * all_requests) AS p50,
        min(rounded) FILTER (WHERE up_to >= 0.99 * all_requests) AS p99,
        max(rounded) AS largest
    FROM ranked
    GROUP BY process_id, device, stream, segment_type
),
blocks AS (
    SELECT
        c.process_id, c.device, c.snapshot_id, c.memory_kind, c.pool, c.segment_type, c.stream,
        count(*) FILTER (WHERE c.block['state'] <> 'inactive') AS active_blocks,
        count(*) FILTER (WHERE c.block['state'] = 'inactive') AS free_blocks,
        count(*) FILTER (WHERE c.block['state'] <> 'inactive' AND c.block['requested_bytes'] IS NULL) AS unknown_requests,
        sum(c.block['requested_bytes']) FILTER (WHERE c.block['state'] <> 'inactive') AS requested_bytes,
        max(d.requests) AS demand_requests,
        max(d.p50) AS p50, max(d.p99) AS p99, max(d.largest) AS largest,
        unusable_free_index(c.block['bytes'], d.p50) FILTER (WHERE c.block['state'] = 'inactive') AS index_p50,
        unusable_free_index(c.block['bytes'], d.p99) FILTER (WHERE c.block['state'] = 'inactive') AS index_p99,
        unusable_free_index(c.block['bytes'], d.largest) FILTER (WHERE c.block['state'] = 'inactive') AS index_max
    FROM cells AS c
    LEFT JOIN demand AS d
      ON d.process_id = c.process_id AND d.stream = c.stream AND d.segment_type = c.segment_type
     AND (d.device IS NOT DISTINCT FROM c.device)
    GROUP BY c.process_id, c.device, c.snapshot_id, c.memory_kind, c.pool, c.segment_type, c.stream
),
samples AS (
    SELECT
        ts, ts_ns, host, process_id, pid, gpu_uuid, device, framework, source, reason, snapshot_id,
        segment_count, block_count, reserved_bytes, allocated_bytes, active_bytes, requested_bytes,
        releasable_bytes, stranded_bytes, largest_free_block_bytes, peak_allocated_bytes,
        peak_reserved_bytes, device_free_bytes, lossy
    FROM allocator_samples
),
unmapped AS (
    SELECT * FROM samples AS a
    WHERE NOT EXISTS (
        SELECT 1 FROM segments AS s
        WHERE s.process_id = a.process_id AND s.snapshot_id = a.snapshot_id
          AND coalesce(s.device, -1) = coalesce(a.device, -1)
    )
),
rows_of_pools AS (
    SELECT
        m.ts, m.ts_ns, m.host, m.process_id, m.pid, m.gpu_uuid, m.device, m.framework, m.source, m.reason,
        m.snapshot_id, m.memory_kind, m.pool, m.segment_type, m.stream, m.segments,
        b.active_blocks, b.free_blocks, m.reserved_bytes, m.allocated_bytes, m.active_bytes,
        CASE WHEN b.unknown_requests = 0 THEN coalesce(b.requested_bytes, 0) END AS requested_bytes,
        m.releasable_bytes, m.stranded_bytes, m.largest_free_block_bytes,
        a.device_free_bytes, a.peak_allocated_bytes, a.peak_reserved_bytes, a.lossy,
        b.demand_requests, b.p50, b.p99, b.largest, b.index_p50, b.index_p99, b.index_max
    FROM maps AS m
    LEFT JOIN blocks AS b
      ON b.process_id = m.process_id AND b.snapshot_id = m.snapshot_id AND b.memory_kind = m.memory_kind
     AND (b.device IS NOT DISTINCT FROM m.device)
     AND (b.pool IS NOT DISTINCT FROM m.pool)
     AND (b.segment_type IS NOT DISTINCT FROM m.segment_type)
     AND (b.stream IS NOT DISTINCT FROM m.stream)
    LEFT JOIN samples AS a
      ON a.process_id = m.process_id AND a.snapshot_id = m.snapshot_id AND (a.device IS NOT DISTINCT FROM m.device)
    UNION ALL
    SELECT
        ts, ts_ns, host, process_id, pid, gpu_uuid, device, framework, source, reason,
        snapshot_id, NULL, NULL, NULL, NULL, segment_count,
        NULL, NULL, reserved_bytes, allocated_bytes, active_bytes, requested_bytes,
        releasable_bytes, stranded_bytes, largest_free_block_bytes,
        device_free_bytes, peak_allocated_bytes, peak_reserved_bytes, lossy,
        NULL, NULL, NULL, NULL, NULL, NULL, NULL
    FROM unmapped
),
of_device AS (
    SELECT
        *,
        first_value(snapshot_id) OVER (
            PARTITION BY process_id, device ORDER BY ts_ns DESC, snapshot_id DESC
        ) = snapshot_id AS is_newest,
        -- Pinned memory is host memory: no request for device memory finds room in it.
        sum(CASE WHEN memory_kind = 'pinned_host' THEN 0 ELSE releasable_bytes + stranded_bytes END) OVER (
            PARTITION BY process_id, device, snapshot_id
        ) AS device_inactive_bytes,
        -- A sample without a map does not say how much of it lies in private pools.
        sum(CASE WHEN coalesce(pool, 'default') = 'default' AND coalesce(memory_kind, '') <> 'pinned_host' THEN releasable_bytes ELSE 0 END) OVER (
            PARTITION BY process_id, device, snapshot_id
        ) AS device_flushable_bytes
    FROM rows_of_pools
),
measured AS (
    SELECT
        *,
        CASE
            WHEN memory_kind = 'pinned_host' THEN NULL
            ELSE greatest(largest_free_block_bytes, device_free_bytes + device_flushable_bytes)
        END AS reachable_bytes
    FROM of_device
)
SELECT
    m.ts, m.ts_ns, m.host, m.process_id, m.pid, p.exe, p.namespace, p.pod, m.gpu_uuid, m.device,
    m.framework, m.source, m.reason, m.snapshot_id, m.is_newest, m.memory_kind, m.pool, m.segment_type,
    m.stream, m.segments, m.active_blocks, m.free_blocks, m.reserved_bytes, m.allocated_bytes,
    m.active_bytes, m.active_bytes - m.allocated_bytes AS pending_free_bytes,
    m.releasable_bytes + m.stranded_bytes AS inactive_bytes,
    m.requested_bytes, m.releasable_bytes, m.stranded_bytes, m.largest_free_block_bytes, m.device_free_bytes,
    -- greatest() passes over NULL, and a bound is not the value.
    CASE WHEN m.device_free_bytes IS NOT NULL THEN m.reachable_bytes END AS max_contiguous_bytes,
    CASE WHEN m.device_free_bytes IS NOT NULL THEN
        1 - CAST(m.reachable_bytes AS DOUBLE) / nullif(m.device_free_bytes + m.device_inactive_bytes, 0)
    END AS external_ratio,
    CAST(m.releasable_bytes + m.stranded_bytes AS DOUBLE) / nullif(m.reserved_bytes, 0) AS internal_ratio,
    CAST(m.releasable_bytes + m.stranded_bytes AS DOUBLE) / nullif(m.reserved_bytes, 0) AS cache_slack,
    1 - CAST(m.requested_bytes AS DOUBLE) / nullif(coalesce(m.active_bytes, m.allocated_bytes), 0) AS rounding_loss,
    CAST(m.stranded_bytes AS DOUBLE) / nullif(m.reserved_bytes, 0) AS stranded_ratio,
    1 - CAST(m.peak_allocated_bytes AS DOUBLE) / nullif(m.peak_reserved_bytes, 0) AS fragmentation_ratio,
    CASE WHEN m.device_free_bytes IS NOT NULL THEN
        CAST(m.reachable_bytes - m.largest AS DOUBLE) / nullif(m.reachable_bytes, 0)
    END AS request_headroom_ratio,
    m.demand_requests, m.p50 AS demand_p50_bytes, m.p99 AS demand_p99_bytes, m.largest AS demand_max_bytes,
    m.index_p50 AS unusable_free_index_p50, m.index_p99 AS unusable_free_index_p99,
    m.index_max AS unusable_free_index_max, m.lossy
FROM measured AS m
LEFT JOIN current_processes AS p ON p.process_id = m.process_id
