SELECT *
FROM numa_placement
ORDER BY pid, device, memory_kind, node
