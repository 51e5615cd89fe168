//! The daemon by itself, without a collector: restarts, locks, `status`.

use crate::daemon::Daemon;
use crate::standins::Bench;

/// With the probes still in the kernel a restart misses nothing; once they were taken out, what
/// happened until the next start was not seen, and the window says so.
#[test]
fn a_restart_without_probes_is_a_gap_and_one_with_them_is_not() {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::hooking(&bench, "gap", &[]);
    daemon.start();
    daemon.stop();
    daemon.start();
    daemon.stop();
    assert_eq!(daemon.causes(), [""; 0]);
    let detached = daemon.run("detach");
    assert!(String::from_utf8_lossy(&detached.stdout).starts_with("took the probes"));
    daemon.start();
    daemon.stop();
    assert_eq!(daemon.causes(), ["restart_gap"]);
}

#[test]
fn a_second_agent_on_the_same_spool_is_refused() {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::hooking(&bench, "second", &[]);
    daemon.start();
    let second = daemon.run("serve");
    let message = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1));
    assert!(message.contains("belongs to a running agent"), "{message}");
    let detach = daemon.run("detach");
    assert_eq!(
        detach.status.code(),
        Some(1),
        "probes in use are not taken out"
    );
    daemon.stop();
}

/// Exit code 1 before any agent ran, 0 while one runs, 3 after it.
#[test]
fn status_tells_whether_it_runs() {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::hooking(&bench, "status", &[]);
    assert_eq!(daemon.run("status").status.code(), Some(1));
    daemon.start();
    // The first flush writes it.
    let mut code = Some(1);
    for _ in 0..100 {
        code = daemon.run("status").status.code();
        if code == Some(0) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert_eq!(code, Some(0));
    let text = String::from_utf8_lossy(&daemon.run("status").stdout).into_owned();
    assert!(
        text.contains(&format!("running, pid {}", daemon.pid())),
        "{text}"
    );
    assert!(text.contains("libcuda.so.1"), "{text}");
    daemon.stop();
    assert_eq!(daemon.run("status").status.code(), Some(3));
}
