-- Functions by library and whether their calls are seen.
SELECT library, attached, count(DISTINCT symbol) AS functions, reason
FROM coverage
GROUP BY library, attached, reason
ORDER BY library, attached DESC, functions DESC
