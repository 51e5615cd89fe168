-- purpose: every time memory ran out: who asked for how much, what was free, reserved and stranded then, and what class of failure that is
-- reads: alloc_events (raw, also by call_chains), allocator_samples, devices, traffic (raw), allocator_timeline, processes (raw, by current_processes)
-- parameters: none
-- columns:
--   ts | time | when it failed
--   ts_ns | ns | the same, nanoseconds since 1970
--   host | - | host name; of an import the file's name
--   process_id | - | one process lifetime; of an import the file
--   pid | - | process id in the host's namespace; of an import 0
--   tid | - | thread that asked; NULL if not known
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   gpu_uuid | - | the card; NULL if not certain
--   device | - | device ordinal as the process sees it
--   source | - | uprobe, usdt, cupti, or import
--   layer | - | who reported it last: framework (an out-of-memory error in the program), runtime or driver
--   outcome | - | raised: the framework gave up; recovered: the allocator gave back its cache, tried again and got it; failed: no framework was involved, or none was seen
--   api | - | call or action that failed
--   failed_calls | calls | failed calls to the driver or runtime that this one failure is made of; 0 in an import
--   tried_bytes | bytes | T: what was asked for, by the framework if it reported it
--   driver_free_bytes | bytes | F: free on the card
--   driver_free_basis | - | event (told with the failure), sample (with the allocator's sample), nvml (newest sample before, driver_free_age_seconds old)
--   driver_free_age_seconds | s | how much older than the failure F is; 0 for event
--   reserved_bytes | bytes | the framework allocator's segments
--   allocated_bytes | bytes | its blocks in use
--   stranded_bytes | bytes | S: reserved, free, and held by blocks in use
--   releasable_bytes | bytes | R: reserved, free, and not given back yet
--   allocator_basis | - | where S and R come from. map: the allocator's sample of this failure; flushed: reserved - allocated, since PyTorch gives back what it can before it gives up; earlier: the newest sample before; none: no framework allocator is known in the process, S and R are 0
--   card_bytes | bytes | capacity of the card
--   process_bytes | bytes | what NVML said this process uses; NULL if it does not say
--   others_bytes | bytes | what NVML said other processes use; NULL if it does not say
--   growth_bytes_per_request | bytes | growth of allocated bytes per completed request before the failure; NULL without traffic samples
--   growth_at_least | bytes | lower end of its 95 % confidence interval
--   class | - | external process, driver refused, fragmentation, leak, burst, capacity, or unknown
--   reach_bytes | bytes | F + R + S: all that was free in some way
--   missing_bytes | bytes | T - reach_bytes, not below 0: even one hole of everything free would have been too small by so much
--   stack_id | - | stack that asked; joins stacks
--   folded | - | function names, outermost first, joined by ';'
--   seq | - | seq of the row in alloc_events that reported it
--   lossy | - | events of the process were lost before; NULL if not known
--   residence_seconds | s | how long the engine served a request on average in the ten minutes before; NULL without three traffic samples
--   allocated_before_bytes | bytes | allocated_bytes one residence before the failure (newest point of allocator_timeline, at most two residences old); NULL if not known
--   waiting_before | requests | requests that waited one residence before the failure
--   waiting_at_failure | requests | the same by the newest sample before the failure
-- formulas:
--   classes are decided in this order (oom_class): other processes hold most of the card: external process; F >= T: driver refused; F + R + S >= T: fragmentation; growth_at_least > 0: leak; allocated bytes rose by missing_bytes or more within one residence while the queue rose: burst; else capacity. What is NULL decides nothing; where it would have to, the class is unknown
--   one row per failure: a runtime call over a driver call is one, and so are the calls that a framework's report follows in the same thread within 10 seconds
--   failed calls are those of memory on the card with result 2 (out of memory, of driver and runtime alike); wrong arguments are no shortage
--   growth is the slope of allocated bytes over requests completed so far, over the hour before the failure, less two standard errors for its lower end; fewer than 10 samples give none
--   residence_seconds is Little's law: requests being served on average / requests completed a second
WITH failed_calls AS (
    SELECT
        ts, ts_ns, host, boot_id, agent_id, process_id, pid, tid, gpu_uuid, device, source, layer, api,
        requested_bytes, stack_id, seq
    FROM call_chains
    WHERE failed AND result = 2 AND op = 'alloc' AND residence = 'device' AND layer <> 'framework'
),
reports AS (
    SELECT
        ts, ts_ns, host, boot_id, agent_id, process_id, pid, tid, gpu_uuid, device, source, layer, api,
        requested_bytes, stack_id, seq, device_free_bytes, allocator_reserved_bytes, allocator_allocated_bytes
    FROM alloc_events
    WHERE op = 'oom'
),
-- What the framework did next in the thread whose call failed. Only threads with failures are looked at.
threads AS (
    SELECT DISTINCT host, agent_id, process_id, tid FROM failed_calls WHERE tid IS NOT NULL
),
steps AS (
    SELECT host, agent_id, process_id, tid, seq, ts_ns, 'call' AS step FROM failed_calls
    UNION ALL
    SELECT e.host, e.agent_id, e.process_id, e.tid, e.seq, e.ts_ns, e.op AS step
    FROM alloc_events AS e
    JOIN threads AS t
      ON t.host = e.host AND t.agent_id = e.agent_id AND t.process_id = e.process_id AND t.tid = e.tid
    WHERE e.layer = 'framework' AND (e.op = 'oom' OR (e.op = 'alloc' AND e.memory_kind = 'framework_block'))
),
following AS (
    SELECT
        host, agent_id, process_id, seq, step, ts_ns,
        last_value(CASE WHEN step <> 'call' THEN seq END) IGNORE NULLS OVER later AS next_seq,
        last_value(CASE WHEN step <> 'call' THEN step END) IGNORE NULLS OVER later AS next_step,
        last_value(CASE WHEN step <> 'call' THEN ts_ns END) IGNORE NULLS OVER later AS next_ts_ns
    FROM steps
    WINDOW later AS (
        PARTITION BY host, agent_id, process_id, tid
        ORDER BY seq DESC
        ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    )
),
chained AS (
    SELECT
        c.*,
        CASE WHEN f.next_ts_ns - c.ts_ns <= 10000000000 THEN f.next_seq END AS next_seq,
        CASE WHEN f.next_ts_ns - c.ts_ns <= 10000000000 THEN f.next_step END AS next_step
    FROM failed_calls AS c
    LEFT JOIN following AS f
      ON f.host = c.host AND f.agent_id = c.agent_id AND f.process_id = c.process_id AND f.seq = c.seq AND f.step = 'call'
),
counted AS (
    SELECT
        *,
        count(*) OVER chain AS failed_calls,
        row_number() OVER (
            PARTITION BY host, agent_id, process_id, coalesce(next_seq, seq) ORDER BY seq DESC
        ) AS last_first
    FROM chained
    WINDOW chain AS (PARTITION BY host, agent_id, process_id, coalesce(next_seq, seq))
),
under_reports AS (
    SELECT host, agent_id, process_id, next_seq AS seq, count(*) AS failed_calls
    FROM chained
    WHERE next_step = 'oom'
    GROUP BY host, agent_id, process_id, next_seq
),
failures AS (
    SELECT
        r.ts, r.ts_ns, r.host, r.agent_id, r.process_id, r.pid, r.tid, r.gpu_uuid, r.device, r.source, r.layer,
        'raised' AS outcome, r.api, coalesce(u.failed_calls, 0) AS failed_calls, r.requested_bytes AS tried_bytes,
        r.device_free_bytes, r.allocator_reserved_bytes, r.allocator_allocated_bytes, r.stack_id, r.seq
    FROM reports AS r
    LEFT JOIN under_reports AS u
      ON u.host = r.host AND u.agent_id = r.agent_id AND u.process_id = r.process_id AND u.seq = r.seq
    UNION ALL
    SELECT
        ts, ts_ns, host, agent_id, process_id, pid, tid, gpu_uuid, device, source, layer,
        CASE WHEN next_step = 'alloc' THEN 'recovered' ELSE 'failed' END, api, failed_calls, requested_bytes,
        NULL, NULL, NULL, stack_id, seq
    FROM counted
    WHERE last_first = 1 AND coalesce(next_step, '') <> 'oom'
),
-- The allocator's own sample of the failure, else the newest one before.
candidates AS (
    SELECT
        f.host, f.agent_id, f.process_id, f.seq,
        s.reserved_bytes, s.allocated_bytes, s.stranded_bytes, s.releasable_bytes, s.device_free_bytes, s.lossy,
        s.ts_ns AS sampled_ns, f.ts_ns AS failed_ns,
        s.reason = 'oom' AND abs(s.ts_ns - f.ts_ns) <= 10000000000
            AND coalesce(s.tried_bytes, f.tried_bytes) = f.tried_bytes AS is_own
    FROM failures AS f
    JOIN allocator_samples AS s
      ON s.process_id = f.process_id AND (s.device IS NOT DISTINCT FROM f.device)
    WHERE s.ts_ns <= f.ts_ns OR (s.reason = 'oom' AND s.ts_ns - f.ts_ns <= 10000000000)
),
sampled AS (
    SELECT
        *,
        row_number() OVER (
            PARTITION BY host, agent_id, process_id, seq ORDER BY is_own DESC, sampled_ns DESC
        ) AS best_first
    FROM candidates
    -- A sample from after the failure is only good for the failure it was taken for.
    WHERE is_own OR sampled_ns <= failed_ns
),
timed AS (
    SELECT process_id, seq, max(reserved_bytes) AS reserved_bytes, max(allocated_bytes) AS allocated_bytes
    FROM allocator_timeline
    WHERE point = 'oom'
    GROUP BY process_id, seq
),
cards AS (
    SELECT
        f.host, f.agent_id, f.process_id, f.seq, d.free_bytes, d.total_bytes, d.processes, d.ts_ns AS sampled_ns,
        row_number() OVER (
            PARTITION BY f.host, f.agent_id, f.process_id, f.seq ORDER BY d.ts_ns DESC, d.batch_seq DESC
        ) AS newest_first
    FROM failures AS f
    JOIN devices AS d ON d.host = f.host AND d.gpu_uuid = f.gpu_uuid AND d.ts_ns <= f.ts_ns
),
shares AS (
    SELECT
        host, agent_id, process_id, seq,
        CASE WHEN count(used) = count(*) THEN sum(used) FILTER (WHERE is_own) END AS process_bytes,
        CASE WHEN count(used) = count(*) THEN coalesce(sum(used) FILTER (WHERE NOT is_own), 0) END AS others_bytes
    FROM (
        SELECT
            host, agent_id, process_id, seq, entry['used_bytes'] AS used,
            coalesce(entry['process_id'] = process_id, false) AS is_own
        FROM (
            SELECT host, agent_id, process_id, seq, unnest(processes) AS entry
            FROM cards
            WHERE newest_first = 1
        )
    )
    GROUP BY host, agent_id, process_id, seq
),
-- Allocated bytes against requests completed: at each sample of the allocator the newest count of
-- the process's engine.
loads AS (
    SELECT
        process_id, ts_ns, allocated_bytes,
        last_value(completed_total) IGNORE NULLS OVER (
            PARTITION BY process_id ORDER BY ts_ns ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS completed
    FROM (
        SELECT process_id, ts_ns, CAST(NULL AS BIGINT) AS allocated_bytes, completed_total
        FROM traffic
        WHERE process_id IS NOT NULL
        UNION ALL
        SELECT process_id, ts_ns, sum(allocated_bytes), CAST(NULL AS BIGINT)
        FROM allocator_samples
        GROUP BY process_id, ts_ns
    )
),
growth AS (
    SELECT
        f.host, f.agent_id, f.process_id, f.seq,
        count(*) AS points,
        regr_slope(l.allocated_bytes, l.completed) AS slope,
        regr_r2(l.allocated_bytes, l.completed) AS r2
    FROM failures AS f
    JOIN loads AS l
      ON l.process_id = f.process_id AND l.ts_ns <= f.ts_ns AND l.ts_ns > f.ts_ns - 3600000000000
    WHERE l.allocated_bytes IS NOT NULL AND l.completed IS NOT NULL
    GROUP BY f.host, f.agent_id, f.process_id, f.seq
),
-- What a process's engines say together; one sample names each engine and model once.
engines AS (
    SELECT
        process_id, ts_ns,
        CASE WHEN count(running) = count(*) THEN sum(running) END AS running,
        CASE WHEN count(waiting) = count(*) THEN sum(waiting) END AS waiting,
        CASE WHEN count(completed_total) = count(*) THEN sum(completed_total) END AS completed
    FROM traffic
    WHERE process_id IS NOT NULL
    GROUP BY process_id, ts_ns
),
paces AS (
    SELECT
        f.host, f.agent_id, f.process_id, f.seq, f.device, f.ts_ns,
        avg(e.running) * ((max(e.ts_ns) - min(e.ts_ns)) / 1e9)
            / nullif(CAST(max(e.completed) - min(e.completed) AS DOUBLE), 0) AS residence_seconds
    FROM failures AS f
    JOIN engines AS e
      ON e.process_id = f.process_id AND e.ts_ns <= f.ts_ns AND e.ts_ns > f.ts_ns - 600000000000
    WHERE e.running IS NOT NULL AND e.completed IS NOT NULL
    GROUP BY f.host, f.agent_id, f.process_id, f.seq, f.device, f.ts_ns
    HAVING count(*) >= 3
),
residences AS (
    SELECT *, CAST(residence_seconds * 1e9 AS BIGINT) AS residence_ns
    FROM paces
    WHERE residence_seconds > 0
),
queues AS (
    SELECT
        r.host, r.agent_id, r.process_id, r.seq,
        last_value(e.waiting ORDER BY e.ts_ns) FILTER (WHERE e.ts_ns <= r.ts_ns - r.residence_ns) AS waiting_before,
        last_value(e.waiting ORDER BY e.ts_ns) AS waiting_at_failure
    FROM residences AS r
    JOIN engines AS e
      ON e.process_id = r.process_id AND e.ts_ns <= r.ts_ns AND e.ts_ns > r.ts_ns - 600000000000
    GROUP BY r.host, r.agent_id, r.process_id, r.seq
),
levels AS (
    SELECT
        r.host, r.agent_id, r.process_id, r.seq,
        last_value(t.allocated_bytes ORDER BY t.ts_ns, coalesce(t.seq, 0)) AS allocated_before_bytes
    FROM residences AS r
    JOIN allocator_timeline AS t
      ON t.process_id = r.process_id AND (t.device IS NOT DISTINCT FROM r.device)
        AND t.ts_ns <= r.ts_ns - r.residence_ns AND t.ts_ns > r.ts_ns - 2 * r.residence_ns
    WHERE t.allocated_bytes IS NOT NULL
    GROUP BY r.host, r.agent_id, r.process_id, r.seq
),
stack_names AS (
    SELECT stack_id, min(folded) AS folded FROM stacks GROUP BY stack_id
),
evidence AS (
    SELECT
        f.*, p.exe, p.namespace, p.pod,
        coalesce(f.device_free_bytes, CASE WHEN s.is_own THEN s.device_free_bytes END, c.free_bytes) AS free_bytes,
        CASE
            WHEN f.device_free_bytes IS NOT NULL THEN 'event'
            WHEN s.is_own AND s.device_free_bytes IS NOT NULL THEN 'sample'
            WHEN c.free_bytes IS NOT NULL THEN 'nvml'
        END AS driver_free_basis,
        CASE
            WHEN f.device_free_bytes IS NOT NULL OR (s.is_own AND s.device_free_bytes IS NOT NULL) THEN 0
            WHEN c.free_bytes IS NOT NULL THEN (f.ts_ns - c.sampled_ns) / 1e9
        END AS driver_free_age_seconds,
        coalesce(f.allocator_reserved_bytes, CASE WHEN s.is_own THEN s.reserved_bytes END, t.reserved_bytes, s.reserved_bytes) AS reserved_bytes,
        coalesce(f.allocator_allocated_bytes, CASE WHEN s.is_own THEN s.allocated_bytes END, t.allocated_bytes, s.allocated_bytes) AS allocated_bytes,
        s.stranded_bytes AS sampled_stranded, s.releasable_bytes AS sampled_releasable,
        CASE
            WHEN s.is_own AND s.stranded_bytes IS NOT NULL THEN 'map'
            WHEN f.layer = 'framework' AND coalesce(f.allocator_reserved_bytes, t.reserved_bytes, s.reserved_bytes) IS NOT NULL THEN 'flushed'
            WHEN s.stranded_bytes IS NOT NULL THEN 'earlier'
            WHEN f.layer <> 'framework' AND f.outcome = 'failed' AND s.process_id IS NULL AND p.framework IS NULL THEN 'none'
        END AS allocator_basis,
        c.total_bytes AS card_bytes, h.process_bytes, h.others_bytes,
        CASE WHEN g.points >= 10 THEN g.slope END AS slope,
        -- The slope's standard error, by its share of explained variance.
        CASE WHEN g.points >= 10 AND g.r2 > 0 THEN g.slope - 2 * abs(g.slope) * sqrt((1 / g.r2 - 1) / (g.points - 2)) END AS slope_at_least,
        n.folded, s.lossy, r.residence_seconds, l.allocated_before_bytes, q.waiting_before, q.waiting_at_failure
    FROM failures AS f
    LEFT JOIN current_processes AS p ON p.process_id = f.process_id
    LEFT JOIN sampled AS s
      ON s.host = f.host AND s.agent_id = f.agent_id AND s.process_id = f.process_id AND s.seq = f.seq AND s.best_first = 1
    LEFT JOIN timed AS t ON t.process_id = f.process_id AND t.seq = f.seq AND f.layer = 'framework'
    LEFT JOIN cards AS c
      ON c.host = f.host AND c.agent_id = f.agent_id AND c.process_id = f.process_id AND c.seq = f.seq AND c.newest_first = 1
    LEFT JOIN shares AS h
      ON h.host = f.host AND h.agent_id = f.agent_id AND h.process_id = f.process_id AND h.seq = f.seq
    LEFT JOIN growth AS g
      ON g.host = f.host AND g.agent_id = f.agent_id AND g.process_id = f.process_id AND g.seq = f.seq
    LEFT JOIN residences AS r
      ON r.host = f.host AND r.agent_id = f.agent_id AND r.process_id = f.process_id AND r.seq = f.seq
    LEFT JOIN queues AS q
      ON q.host = f.host AND q.agent_id = f.agent_id AND q.process_id = f.process_id AND q.seq = f.seq
    LEFT JOIN levels AS l
      ON l.host = f.host AND l.agent_id = f.agent_id AND l.process_id = f.process_id AND l.seq = f.seq
    LEFT JOIN stack_names AS n ON n.stack_id = f.stack_id
),
weighed AS (
    SELECT
        *,
        CASE allocator_basis
            WHEN 'flushed' THEN reserved_bytes - allocated_bytes
            WHEN 'none' THEN 0
            ELSE sampled_stranded
        END AS stranded_bytes,
        CASE
            WHEN allocator_basis IN ('flushed', 'none') THEN 0
            ELSE sampled_releasable
        END AS releasable_bytes
    FROM evidence
)
SELECT
    ts, ts_ns, host, process_id, pid, tid, exe, namespace, pod, gpu_uuid, device, source, layer, outcome, api,
    failed_calls, tried_bytes, free_bytes AS driver_free_bytes, driver_free_basis, driver_free_age_seconds,
    reserved_bytes, allocated_bytes, stranded_bytes, releasable_bytes, allocator_basis,
    card_bytes, process_bytes, others_bytes,
    slope AS growth_bytes_per_request, slope_at_least AS growth_at_least,
    oom_class(
        tried_bytes, free_bytes, stranded_bytes, releasable_bytes, card_bytes, process_bytes, others_bytes, slope_at_least,
        allocated_before_bytes, allocated_bytes, waiting_before, waiting_at_failure
    ) AS class,
    free_bytes + releasable_bytes + stranded_bytes AS reach_bytes,
    -- greatest() passes over NULL, and an unknown number is not 0.
    CASE
        WHEN free_bytes + releasable_bytes + stranded_bytes IS NOT NULL
            THEN greatest(tried_bytes - free_bytes - releasable_bytes - stranded_bytes, 0)
    END AS missing_bytes,
    stack_id, folded, seq, lossy, residence_seconds, allocated_before_bytes, waiting_before, waiting_at_failure
FROM weighed
