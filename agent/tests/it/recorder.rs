//! The flight recorder of a daemon: framework rows of a stand-in for PyTorch's allocator stay on
//! the host until it runs out of memory. What has travelled is what lies in the spool; what is
//! recorded is asked by the command. Expectations come from the stand-in's own books.

use std::collections::BTreeSet;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use serde_json::Value;
use vramscope_wire::{Table, parquet_file};

use crate::daemon::Daemon;
use crate::framework::{LISTENED, Torch, hooks, wait};
use crate::standins::Bench;

/// `seq` and operation of framework rows that travelled.
fn travelled(daemon: &Daemon<'_>) -> Vec<(i64, String)> {
    let mut found = Vec::new();
    for batch in daemon.rows(Table::AllocEvents) {
        let column = |name: &str| batch.column_by_name(name).unwrap();
        let seqs = column("seq").as_primitive::<Int64Type>();
        for row in 0..batch.num_rows() {
            let text = |name: &str| column(name).as_string::<i32>().value(row).to_string();
            if text("layer") == "framework" {
                found.push((seqs.value(row), text("op")));
            }
        }
    }
    found
}

/// What `recorder …` prints.
fn recorder(daemon: &Daemon<'_>, arguments: &[&str]) -> Value {
    let output = daemon
        .command("recorder")
        .args(arguments)
        .stderr(std::process::Stdio::piped())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Allocations and frees that the stand-in counted, of all devices and streams.
fn calls(books: &Value) -> u64 {
    let sums = books["sums"].as_array().unwrap();
    let figure = |sums: &Value, name: &str| sums[name].as_u64().unwrap();
    sums.iter()
        .map(|sums| figure(sums, "allocations") + figure(sums, "frees"))
        .sum()
}

fn recorded(status: &Value) -> u64 {
    status["recorder"]["rows"].as_u64().unwrap_or(0)
}

/// Blocks come and go, the agent is killed in between, and memory runs out: all rows from before
/// it and from after it travel, each once, though the agent is killed again while they do.
#[test]
fn an_oom_makes_recorded_rows_travel_once_over_kills() {
    let Some(bench) = Bench::new() else { return };
    let mut torch = Torch::start(&bench);
    torch.load();
    let options = ["--framework-events", "triggered"];
    let mut daemon = Daemon::new(&bench, "recorder", &options);
    daemon.start();
    hooks(&daemon, &torch.library);
    wait("listened to", || torch.listeners() == LISTENED);
    torch.call("fake_c10_churn 400 4");
    daemon.kill();
    torch.call("fake_c10_churn 400 4");
    daemon.start();
    let before = calls(&torch.books());
    daemon.wait_for("all recorded", |status| recorded(status) == before);
    assert_eq!(travelled(&daemon), []);
    let listing = recorder(&daemon, &["list", "--json"]);
    assert_eq!(listing["rows"].as_u64(), Some(before));
    assert_eq!(
        listing["processes"][0]["pid"].as_u64(),
        Some(torch.program.pid().into())
    );

    torch.call("fake_c10_out_of_memory 1048576 1");
    torch.call("fake_c10_churn 100 2");
    daemon.wait_for("triggered", |status| status["recorder"]["triggers"] == 1);
    daemon.kill();
    daemon.start();
    let all = calls(&torch.books());
    let done = |status: &Value| {
        let recorder = &status["recorder"];
        recorder["open_spans"] == 0 && recorder["travelled_rows"].as_u64() == Some(all)
    };
    daemon.wait_for("travelled", done);
    let came = travelled(&daemon);
    let once: BTreeSet<_> = came.iter().collect();
    assert_eq!(once.len(), came.len(), "a row came twice");
    let ooms = came.iter().filter(|(_, op)| op == "oom").count();
    assert_eq!((came.len() as u64, ooms), (all + 1, 1));

    // What comes after the span stays again.
    torch.call("fake_c10_churn 50 1");
    let later = calls(&torch.books());
    daemon.wait_for("recorded", |status| recorded(status) == later + 1);
    assert_eq!(travelled(&daemon).len() as u64, all + 1);

    // An export has all rows, and each stack that they refer to.
    let to = bench.root().join("span");
    let pid = format!("pid:{}", torch.program.pid());
    let arguments = ["export", "--json", "--process", &pid, "-o"];
    let exported = recorder(&daemon, &[&arguments[..], &[to.to_str().unwrap()]].concat());
    assert_eq!(exported["rows"].as_u64(), Some(later + 1));
    assert_eq!(exported["stacks_missing"], 0);
    let (mut rows, mut used, mut named) = (0, BTreeSet::new(), BTreeSet::new());
    for table in [Table::AllocEvents, Table::Stacks] {
        for file in std::fs::read_dir(to.join(table.name())).unwrap() {
            let opened = std::fs::File::open(file.unwrap().path()).unwrap();
            for batch in parquet_file::decode(table, opened).unwrap() {
                let ids = batch.column_by_name("stack_id").unwrap();
                let ids = ids.as_primitive::<Int64Type>().iter().flatten();
                if table == Table::Stacks {
                    named.extend(ids);
                } else {
                    rows += batch.num_rows() as u64;
                    used.extend(ids);
                }
            }
        }
    }
    assert_eq!(rows, later + 1);
    assert!(
        !used.is_empty() && used.is_subset(&named),
        "{used:?} {named:?}"
    );
    torch.program.end();
    daemon.stop();
    assert_eq!(daemon.causes(), Vec::<String>::new());
    let listing = daemon.command("recorder").arg("list").output().unwrap();
    let text = String::from_utf8(listing.stdout).unwrap();
    assert!(text.contains("oom") && text.contains("done"), "{text}");
}
