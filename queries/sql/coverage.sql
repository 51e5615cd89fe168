-- purpose: which functions are hooked in which library of which process, and why the others are not
-- reads: processes (raw, by current_processes)
-- parameters: none
-- columns:
--   host | - | host name
--   process_id | - | one process lifetime
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   ended | time | when the process ended; NULL while it lives
--   library | - | path of the library
--   symbol | - | function, as exported
--   attached | - | true if its calls are seen
--   reason | - | why not; NULL if attached
-- formulas:
--   from the newest row of each process
SELECT
    host, process_id, pid, exe, namespace, pod, ended,
    entry['library'] AS library,
    entry['symbol'] AS symbol,
    entry['attached'] AS attached,
    entry['reason'] AS reason
FROM (
    SELECT host, process_id, pid, exe, namespace, pod, ended, unnest(coverage) AS entry
    FROM current_processes
)
