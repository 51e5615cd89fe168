-- purpose: what was lost since recording began, by host, agent and cause: how many, when, and what it leaves out
-- reads: agent_windows (windows)
-- parameters: none
-- columns:
--   host | - | host name
--   agent_id | - | agent that lost them
--   cause | - | ring_full, threads_full, too_deep, missed_return, missed_entry, read_fault, undecodable, restart_gap, spool_full (and by table spool_full_NAME), live_full, stacks_full, recorder_full; NULL if a lossy window names none
--   missing | - | what the data lacks by it: call (no row at all), row (known to the agent, not written), end (an allocation whose end is not followed: it seems to live on), stack (a row without its stack), time (nobody watched)
--   lost | calls | how many; NULL for restart_gap: not known
--   windows | windows | windows in which the cause occurred
--   first_loss | time | start of the first of them
--   last_loss | time | end of the last of them
--   lossy_windows | windows | windows of this agent that are lossy, by whatever cause
--   all_windows | windows | windows of this agent
-- formulas:
--   not here, since no event is lost by them: stack_not_copied and python_not_read (a row whose stack is less good, as its stack_quality says), recorder_overwritten and recorder_off (raw framework rows let go as configured). agent_windows.lost_by_cause has them
--   counts are the agent's own; no row for an agent means that it lost nothing, or that it never ran: agent_windows tells the two apart
WITH of_agent AS (
    SELECT host, agent_id, count(*) FILTER (WHERE lossy) AS lossy_windows, count(*) AS all_windows
    FROM agent_windows
    GROUP BY host, agent_id
),
entries AS (
    SELECT host, agent_id, window_start, window_end, entry['cause'] AS cause, entry['count'] AS count
    FROM (
        SELECT host, agent_id, window_start, window_end, unnest(lost_by_cause) AS entry
        FROM agent_windows
        WHERE lossy
    )
    WHERE (entry['count'] > 0 OR entry['cause'] = 'restart_gap')
      AND entry['cause'] NOT IN ('stack_not_copied', 'python_not_read', 'recorder_overwritten', 'recorder_off')
    UNION ALL
    SELECT host, agent_id, window_start, window_end, NULL, lost
    FROM agent_windows
    WHERE lossy AND coalesce(cardinality(lost_by_cause), 0) = 0
),
by_cause AS (
    SELECT
        host, agent_id, cause,
        CASE WHEN cause IS DISTINCT FROM 'restart_gap' THEN sum(count) END AS lost,
        count(DISTINCT window_start) AS windows,
        min(window_start) AS first_loss,
        max(window_end) AS last_loss
    FROM entries
    GROUP BY host, agent_id, cause
)
SELECT
    c.host, c.agent_id, c.cause,
    CASE
        WHEN c.cause IN ('ring_full', 'threads_full', 'too_deep', 'missed_return', 'missed_entry', 'read_fault', 'undecodable') THEN 'call'
        WHEN c.cause = 'recorder_full' OR c.cause LIKE 'spool_full%' THEN 'row'
        WHEN c.cause = 'live_full' THEN 'end'
        WHEN c.cause = 'stacks_full' THEN 'stack'
        WHEN c.cause = 'restart_gap' THEN 'time'
    END AS missing,
    c.lost, c.windows, c.first_loss, c.last_loss, a.lossy_windows, a.all_windows
FROM by_cause AS c
JOIN of_agent AS a ON a.host = c.host AND a.agent_id = c.agent_id
