-- purpose: when and where calls were lost, so that an answer over that time is known to be incomplete
-- reads: agent_windows (windows)
-- parameters: none
-- columns:
--   host | - | host name
--   agent_id | - | agent that lost them
--   window_start | time | start of the window
--   window_end | time | end of the window
--   events | calls | calls taken in the window
--   lost | calls | calls lost in the window, or kept without their end or stack: losses tells by cause what is missing
--   causes | - | the same by cause, as cause=count, separated by ', '; restart_gap=? for a time that nobody watched
--   lossy | - | true: the view holds only windows that lost something
-- formulas:
--   counts are the agent's own; no row for a time means that nothing was lost, or that no agent ran: agent_windows tells the two apart
WITH lossy_windows AS (
    SELECT host, agent_id, batch_seq, window_start, window_end, events, lost, lossy, lost_by_cause
    FROM agent_windows
    WHERE lossy
),
causes AS (
    SELECT
        host, agent_id, batch_seq, window_start, window_end,
        string_agg(concat(entry['cause'], '=', CASE WHEN entry['count'] > 0 THEN CAST(entry['count'] AS VARCHAR) ELSE '?' END), ', ' ORDER BY entry['cause']) AS causes
    FROM (
        SELECT host, agent_id, batch_seq, window_start, window_end, unnest(lost_by_cause) AS entry
        FROM lossy_windows
    )
    WHERE (entry['count'] > 0 OR entry['cause'] = 'restart_gap')
      -- No event is lost by these.
      AND entry['cause'] NOT IN ('stack_not_copied', 'python_not_read', 'recorder_overwritten', 'recorder_off')
    GROUP BY host, agent_id, batch_seq, window_start, window_end
)
SELECT w.host, w.agent_id, w.window_start, w.window_end, w.events, w.lost, c.causes, w.lossy
FROM lossy_windows AS w
LEFT JOIN causes AS c
  ON c.host = w.host
 AND c.agent_id = w.agent_id
 AND c.batch_seq = w.batch_seq
 AND c.window_start = w.window_start
 AND c.window_end = w.window_end
