//! Clocks that are not the host's. The machine's own clock is never touched: a time namespace
//! shifts the monotonic clock of the agent alone, while BPF programs go on stamping the host's.

use std::io::Write;
use std::process::Command;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use vramscope_wire::Table;

use crate::standins::Bench;

fn now_ns() -> i64 {
    let now = std::time::SystemTime::now();
    now.duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_nanos() as i64
}

/// Ten days ahead and an hour behind: stamps are of today all the same.
#[test]
fn a_time_namespace_moves_no_stamp() {
    for offset in ["864000", "-60"] {
        let Some(bench) = Bench::new() else { return };
        let namespace = ["--fork", "--time", "--monotonic", offset, "--"];
        let possible = Command::new("unshare").args(namespace).arg("true").output();
        if !possible.is_ok_and(|output| output.status.success()) {
            let _ = writeln!(std::io::stderr(), "SKIPPED: no time namespaces here");
            return;
        }
        let tracer = bench.tracer(&["--quiet"]);
        let mut command = Command::new("unshare");
        command.args(namespace).arg(tracer.get_program());
        command.args(tracer.get_args());
        for (name, value) in tracer.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        let began = now_ns();
        let output = command
            .arg(Bench::workload())
            .args(["threads", "--threads", "2", "--iterations", "20"])
            .output()
            .unwrap();
        let ended = now_ns();
        assert!(output.status.success(), "{output:?}");
        let mut seen = 0;
        // The agent follows the wall clock to a millisecond.
        let slack = 50_000_000;
        for (table, column) in [
            (Table::AllocEvents, "ts_ns"),
            (Table::Processes, "ts_ns"),
            (Table::AgentWindows, "ts_ns"),
        ] {
            for batch in bench.rows(table) {
                let stamps = batch.column_by_name(column).unwrap();
                for stamp in stamps.as_primitive::<Int64Type>().values() {
                    assert!(
                        (began - slack..ended + slack).contains(stamp),
                        "{table:?}: {} s off",
                        (stamp - began) / 1_000_000_000
                    );
                    seen += 1;
                }
            }
        }
        assert!(seen > 40, "{seen} rows");
    }
}
