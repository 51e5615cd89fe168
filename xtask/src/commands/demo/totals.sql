SELECT
    (SELECT count(*) FROM alloc_events) AS events,
    (SELECT coalesce(sum(lost), 0) FROM agent_windows) AS lost
