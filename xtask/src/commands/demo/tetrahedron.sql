-- The view tetrahedron: cards first, then the processes on them.
SELECT *
FROM tetrahedron
WHERE level IN ('device', 'process')
ORDER BY level, pid, device
