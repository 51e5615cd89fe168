-- purpose: what is known now about each process lifetime
-- reads: processes (raw)
-- parameters: none
-- columns:
--   host | - | host name
--   process_id | - | one process lifetime; a reused pid is another one
--   pid | - | process id in the host's namespace
--   exe | - | path of the executable
--   command | - | command line, cut at 4096 bytes
--   namespace | - | Kubernetes namespace
--   pod | - | Kubernetes pod
--   container_id | - | container, from the cgroup path
--   started | time | when the process started
--   ended | time | when it ended; NULL while it lives, or if the agent did not see its end
--   updated | time | when this state was written
--   boot_id | - | boot of the host in which it ran
--   rebooted | - | true if the host has booted again since: the process is gone, whether or not its end was seen
--   coverage | - | list of (library, symbol, attached, reason); the view coverage has them as rows
--   pod_uid | - | uid of the Kubernetes pod
--   framework | - | framework whose allocator is traced or imported: pytorch
--   framework_version | - | its version, where it can be read
-- formulas:
--   the row with the newest ts_ns of each process_id
--   rebooted compares boot_id with that of the host's newest row
SELECT
    host, process_id, pid, exe, command, namespace, pod, container_id, started, ended,
    ts AS updated, boot_id, boot_id <> host_boot_id AS rebooted, coverage, pod_uid,
    framework, framework_version
FROM (
    SELECT
        *,
        first_value(boot_id) OVER (
            PARTITION BY host ORDER BY ts_ns DESC, batch_seq DESC
        ) AS host_boot_id,
        row_number() OVER (
            PARTITION BY process_id ORDER BY ts_ns DESC, batch_seq DESC
        ) AS newest_first
    FROM processes
)
WHERE newest_first = 1
