//! The whole way of a request for recorded events: from the collector's command over the agent's
//! connection to the flight recorder, and as rows back to SQL. How many rows there are is what the
//! recorder itself lists.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use xtask::compare::Row;
use xtask::system::{Driver, System};

use super::{Run, Stops, prepared};
use crate::bench::take_turn;

/// Debug builds on a loaded machine.
const LIMIT: Duration = Duration::from_secs(120);

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < LIMIT, "never: {what}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// The system's configuration, with the allocator's libraries hooked and their events kept back.
fn keep_events_back(system: &System, libraries: &Path) {
    let path = system.agent_config();
    let config = std::fs::read_to_string(&path).unwrap();
    let names = ["libc10.so", "libc10_cuda.so"];
    let hooked = names.map(|name| format!("{:?}", libraries.join(name)));
    let config = config
        .replace(
            "framework_events = \"always\"",
            "framework_events = \"triggered\"",
        )
        .replace(
            "\nlibraries = [",
            &format!("\nlibraries = [{}, ", hooked.join(", ")),
        )
        .replace(
            "only_libraries = [",
            &format!("only_libraries = [{:?}, ", libraries.join("*")),
        );
    assert!(config.contains("triggered") && config.matches("libc10_cuda").count() == 1);
    std::fs::write(&path, config).unwrap();
}

fn number(row: &Row, column: &str) -> i64 {
    row[column].as_i64().unwrap()
}

fn said(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_requested_span_arrives_once() {
    let test = "a_requested_span_arrives_once";
    let Some((project, harness, small)) = prepared(test) else {
        return;
    };
    let _turn = take_turn();
    let program: [&Path; 1] = [&harness];
    let run = Run::new(&project, &program, "", &small.libraries);
    let driver = Driver::stand_ins(&project);
    let mut system = System::new(&project, &run.path("system"), driver).unwrap();
    keep_events_back(&system, &small.libraries);
    system.start_collector().unwrap();
    system.start_agent().unwrap();

    let words = run.words();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    let mut program = Stops::start(&mut command, &run.path("errors"));
    // Before it runs out of memory, which would make them travel by itself.
    program.follow(Duration::ZERO, Some("churn"));

    let recorder = || {
        let mut list = Command::new(project.binary("vramscope-agent"));
        list.args(["recorder", "list", "--json", "--config"]);
        said(list.arg(system.agent_config()))
    };
    // Until what has happened is all recorded: twice the same number, and not none.
    let mut before = 0;
    let recorded = until("recorded", || {
        let now = recorder()["rows"].as_i64().unwrap();
        let is_same = now > 100 && now == before;
        before = now;
        std::thread::sleep(Duration::from_secs(1));
        is_same.then_some(now)
    });
    let events = "SELECT process_id, count(*) AS rows, count(DISTINCT seq) AS seqs FROM alloc_events \
                  WHERE layer = 'framework' GROUP BY process_id";
    assert_eq!(
        system.query(events).unwrap(),
        Vec::<Row>::new(),
        "raw events stay"
    );
    let roll_ups = "SELECT process_id FROM device_windows WHERE layer = 'framework' LIMIT 1";
    let process = until("roll-ups travel", || {
        let rows = system.query(roll_ups).unwrap();
        rows.first().map(|row| number(row, "process_id"))
    });
    let whole = "SELECT whole FROM framework_processes";
    assert_eq!(system.query(whole).unwrap(), Vec::<Row>::new());

    // Twice, since an engineer may ask again: nothing comes twice.
    let agent = "SELECT agent_id FROM agent_windows LIMIT 1";
    let agent = system.query(agent).unwrap()[0]["agent_id"].clone();
    for _ in 0..2 {
        let mut request = Command::new(project.binary("vramscope-collector"));
        request.args([
            "request-span",
            "--json",
            "--wait",
            "2m",
            "--from",
            "1h",
            "--to",
            "now",
        ]);
        request.args(["--agent", agent.as_str().unwrap()]);
        request.args(["--process", &process.to_string(), "--data"]);
        let answer = said(request.arg(system.data()));
        assert_eq!(answer["stage"], "answered", "{answer:#}");
        let told = answer["rows"].as_i64().unwrap() + answer["rows_before"].as_i64().unwrap();
        assert_eq!(told, recorded, "{answer:#}");
        // What is stored is visible after the collector's next commit.
        let all = until("rows are visible", || {
            let rows = system.query(events).unwrap().pop()?;
            (number(&rows, "rows") >= recorded).then_some(rows)
        });
        let counts = (number(&all, "rows"), number(&all, "seqs"));
        assert_eq!(counts, (recorded, recorded), "{answer:#}");
    }
    until("its events are whole", || {
        let rows = system.query(whole).unwrap();
        (rows.len() == 1 && rows[0]["whole"] == true).then_some(())
    });
}
