SELECT
    host,
    count(*) AS windows,
    count(*) FILTER (WHERE lossy) AS lossy_windows,
    sum(events) AS events,
    sum(lost) AS lost
FROM agent_windows
GROUP BY host
