//! Nobody is hurt: the preflight, refusals, the kill switch, and what `status` says of them.

use std::process::Command;

use serde_json::Value;

use crate::daemon::{Daemon, ledgers};
use crate::program::{Program, Runtime};
use crate::standins::Bench;

fn preflight(forbid: Option<&str>) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramscope-agent"));
    command.arg("preflight");
    if let Some(call) = forbid {
        command.args(["--forbid", call]);
    }
    let output = command.output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The check can fail: a filter against a call that the probed function makes kills the child.
#[test]
fn the_preflight_tells_death_from_survival() {
    let Some(_bench) = Bench::new() else { return };
    // getppid, on x86-64.
    let dead = preflight(Some("110"));
    assert_eq!(dead["survives"], false, "{dead}");
    assert!(
        dead["detail"].as_str().unwrap().contains("signal 31"),
        "{dead}"
    );
    // A system call that no kernel has.
    assert_eq!(preflight(Some("1023"))["survives"], true);
}

/// A library that a denied program maps is hooked for nobody, and hooked again when it is gone.
#[test]
fn a_denied_program_keeps_its_libraries_free() {
    let Some(bench) = Bench::new() else { return };
    let denied = Program::copy(&bench, "stack-switcher");
    let options = [
        "--scan-interval",
        "200ms",
        "--deny-executables",
        "/nonexistent,*/stack-switch?r",
    ];
    let mut daemon = Daemon::new(&bench, "denied", &options);
    daemon.start();
    let folder = bench.libraries().to_string_lossy().into_owned();
    let mut other = Program::start("", &Program::exe(), &bench.libraries(), &bench.books());
    other.load(Runtime::Shared);
    daemon.wait_hooked(&folder);
    let before = daemon.links();
    other.tell("alloc 2 4096");

    let mut program = Program::start("", &denied, &bench.libraries(), &bench.books());
    program.load(Runtime::Shared);
    let pid = program.pid();
    // The two libraries, and the program with its runtime inside.
    let status = daemon.wait_for("refused", |status| {
        Daemon::refused(status, &bench).len() == 3
    });
    let (_, reason) = &Daemon::refused(&status, &bench)[0];
    for part in [
        format!("stack-switcher (pid {pid})"),
        "deny_executables".into(),
    ] {
        assert!(reason.contains(&part), "{reason}");
    }
    assert!(daemon.links() < before, "the hooks are out of the kernel");
    program.tell("alloc 4 4096");
    daemon.wait_for("in the rows", |_| {
        let (hooked, refused) = daemon.coverage(pid);
        hooked == 0 && refused.iter().any(|(_, symbol, _)| symbol == "*")
    });
    program.end();

    daemon.wait_for("hooked again", |status| {
        let refused = Daemon::refused(status, &bench);
        refused.iter().all(|(library, _)| !library.contains(".so")) && daemon.links() >= before
    });
    other.tell("alloc 6 4096");
    let (allowed, denied) = (other.pid(), pid);
    other.end();
    daemon.stop();
    assert_eq!(daemon.totals(Some(denied)).len(), 0);
    assert_eq!(daemon.totals(Some(allowed)), ledgers(&bench, Some(allowed)));
}

/// On a kernel where a filtered process would die (`refuse` says so here), its libraries are not
/// hooked, unless they are on the list.
#[test]
fn a_process_with_a_seccomp_filter() {
    let Some(bench) = Bench::new() else { return };
    let allowed = bench.root().join("allowed");
    bench.install(&allowed);
    let pattern = format!("{}/*", allowed.display());
    let options = [
        "--scan-interval",
        "200ms",
        "--seccomp-processes",
        "refuse",
        "--allow-libraries",
        &pattern,
    ];
    let mut daemon = Daemon::new(&bench, "seccomp", &options);
    daemon.start();
    let mut program = Program::start("", &Program::exe(), &bench.libraries(), &bench.books());
    program.tell("filter");
    program.load(Runtime::Shared);
    let pid = program.pid();
    daemon.wait_for("refused", |status| {
        Daemon::refused(status, &bench).iter().any(|(_, reason)| {
            reason.contains(&format!("(pid {pid}) maps it and has a seccomp filter"))
                && reason.contains("seccomp_processes")
        })
    });
    program.tell("alloc 4 4096");
    program.end();

    let mut program = Program::start("", &Program::exe(), &allowed, &bench.books());
    program.tell("filter");
    program.load(Runtime::Shared);
    let listed = program.pid();
    daemon.wait_hooked(&allowed.to_string_lossy());
    daemon.wait_for("seen", |_| daemon.coverage(listed).0 >= 2);
    program.tell("alloc 4 4096");
    program.end();
    daemon.stop();
    assert_eq!(daemon.totals(Some(pid)).len(), 0);
    assert_eq!(daemon.totals(Some(listed)), ledgers(&bench, Some(listed)));
}

/// Off: everything is out of the kernel and said so; on: it goes on, and the window in between is
/// lossy.
#[test]
fn the_kill_switch_works_on_a_running_agent() {
    switch_off_and_on("switch", &[]);
}

/// Hooks that are perf events, as on kernels before 6.6.
#[test]
fn the_kill_switch_takes_perf_events_out() {
    switch_off_and_on("switch-perf", &["--uprobe-multi", "false"]);
}

fn switch_off_and_on(name: &str, options: &[&str]) {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::new(&bench, name, options);
    daemon.start();
    let mut program = Program::start("", &Program::exe(), &bench.libraries(), &bench.books());
    program.load(Runtime::Shared);
    let folder = bench.libraries().to_string_lossy().into_owned();
    daemon.wait_hooked(&folder);
    program.tell("alloc 2 4096");
    let pid = program.pid();

    let mut off = daemon.command("off");
    let off = off.args(["--reason", "ticket 4711"]).output().unwrap();
    let said = String::from_utf8_lossy(&off.stdout).into_owned();
    assert!(
        off.status.success() && said.contains("has taken its probes out"),
        "{said}"
    );
    assert_eq!(daemon.links(), 0);
    let text = daemon.run("status");
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("ticket 4711"), "{text}");
    program.tell("alloc 8 4096");
    daemon.wait_for("in the rows", |_| {
        let (hooked, refused) = daemon.coverage(pid);
        hooked == 0
            && refused
                .iter()
                .all(|(_, _, why)| why.contains("ticket 4711"))
    });

    assert!(daemon.run("on").status.success());
    daemon.wait_for("on", |status| status["discovery"]["off"].is_null());
    daemon.wait_hooked(&folder);
    daemon.wait_for("in the rows", |_| daemon.coverage(pid).0 > 0);
    program.tell("alloc 1 16384");
    program.end();
    daemon.stop();
    assert!(daemon.causes().contains(&"switched_off".to_string()));
    let totals = daemon.totals(Some(pid));
    let ours = totals[&(0, "device".into())];
    // Two before, one after; what was called in between is not there and not guessed.
    assert_eq!((ours.0, ours.1), (3, 1));
}

/// An agent that starts while the switch is off stays off; `off` without an agent takes out what
/// one has left.
#[test]
fn an_agent_that_starts_while_off_stays_off() {
    let Some(bench) = Bench::new() else { return };
    let libraries = bench.libraries().join("libcuda.so.1");
    let options = ["--libraries", libraries.to_str().unwrap()];
    let mut daemon = Daemon::new(&bench, "stays-off", &options);
    daemon.start();
    daemon.stop();
    assert!(daemon.links() > 0, "the probes stay when it stops");
    let off = daemon.run("off");
    assert!(String::from_utf8_lossy(&off.stdout).contains("took the probes below"));
    assert_eq!(daemon.links(), 0);
    daemon.start();
    let status = daemon.wait_for("off", |status| !status["discovery"]["off"].is_null());
    assert_eq!(status["hooked"], 0);
    assert_eq!(daemon.links(), 0);
    assert!(daemon.run("on").status.success());
    daemon.wait_for("on", |status| {
        status["discovery"]["off"].is_null() && status["hooked"].as_u64() > Some(0)
    });
    assert!(daemon.links() > 0);
    daemon.stop();
    assert!(daemon.causes().contains(&"switched_off".to_string()));
}

#[test]
fn probes_can_be_off_by_configuration() {
    let Some(bench) = Bench::new() else { return };
    let libraries = bench.libraries().join("libcuda.so.1");
    let options = [
        "--probes",
        "false",
        "--libraries",
        libraries.to_str().unwrap(),
    ];
    let mut daemon = Daemon::new(&bench, "no-probes", &options);
    daemon.start();
    let status = daemon.wait_for("off", |status| !status["discovery"]["off"].is_null());
    let reason = status["discovery"]["off"].as_str().unwrap();
    assert!(reason.contains("probes = false"), "{reason}");
    assert_eq!(daemon.links(), 0);
    daemon.stop();
}

/// What this kernel can do, and what was chosen.
#[test]
fn status_shows_the_features() {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::new(&bench, "features", &["--uprobe-multi", "false"]);
    daemon.start();
    let status = daemon.wait_for("written", |status| status.is_object());
    daemon.stop();
    let features = &status["discovery"]["checks"]["features"];
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(features["kernel"], kernel.trim());
    for feature in features["features"].as_array().unwrap() {
        assert!(
            feature["required"] == false || feature["available"] == true,
            "{feature}"
        );
    }
    assert_eq!(status["discovery"]["uprobe_multi"], false);
    let text = String::from_utf8_lossy(&daemon.run("status").stdout).into_owned();
    for part in [
        "a perf event for each function",
        "uprobe_multi = false",
        "attach_cookie",
        "seccomp",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}
