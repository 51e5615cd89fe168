//! `vramscope diff` over the hour of [`super::recording`], and over a second one by another build.

use serde_json::{Value, json};
use vramscope_wire::Table;

use super::profiles::{Profile, titles};
use super::recording::{self, Minute};
use crate::cli::{stderr, stdout, vramscope};
use crate::seed;

fn run(arguments: &[&str]) -> (i32, String, String) {
    let output = vramscope(&[&["diff"], arguments].concat());
    (
        output.status.code().unwrap(),
        stdout(&output),
        stderr(&output),
    )
}

fn json(arguments: &[&str]) -> Value {
    let (code, out, err) = run(&[arguments, &["--json"]].concat());
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

/// Name, live bytes of a and of b, and how they were matched.
fn rows(answer: &Value) -> Vec<(String, i64, i64, String)> {
    let rows = answer["changed"].as_array().unwrap().iter();
    rows.map(|row| {
        let text = |value: &Value| value.as_str().unwrap().to_string();
        let live = |side: &str| row[side]["live_bytes"].as_i64().unwrap();
        (
            text(&row["name"]),
            live("a"),
            live("b"),
            text(&row["matched"]),
        )
    })
    .collect()
}

fn row(name: &str, a: i64, b: i64, matched: &str) -> (String, i64, i64, String) {
    (name.to_string(), a, b, matched.to_string())
}

const INSERT: &str = "main;serve;insert;cudaMalloc";
const WEIGHTS: &str = "main;load;reserve;cudaMalloc";

#[test]
fn two_pods_and_two_times_of_one_recording() {
    let (_guard, data) = recording::folder();
    let pods = json(&["--data", &data, "pod=server-1", "pod=server-2"]);
    let expected = [
        row(INSERT, 4000, 2000, "same"),
        row(WEIGHTS, 10_000, 0, "only a"),
    ];
    assert_eq!(rows(&pods), expected);
    assert_eq!(pods["a"]["total"]["live_bytes"], 14_000);
    assert_eq!(pods["a"]["hours"], 1.0);
    // Up to 10:30 1500 + 1000, in the end 4000 + 2000; the weights are the same.
    let times = json(&["--data", &data, "..30m", "30m.."]);
    assert_eq!(rows(&times), [row(INSERT, 2500, 6000, "same")]);
    // Given from 10:30 on: 2500 + 1000 in half an hour.
    assert_eq!(times["changed"][0]["b"]["allocated_bytes_per_hour"], 7000.0);
    let (code, text, _) = run(&["--data", &data, "..30m", "30m.."]);
    assert_eq!(code, 0);
    assert!(
        text.contains(
            "+3.42 KiB     2.44 KiB     5.86 KiB  same    main > serve > insert > cudaMalloc"
        ),
        "{text}"
    );
    assert!(text.contains("1 did not change"), "{text}");
}

/// The same program, built anew: other ids, and offsets where there is no name.
fn other_build(dir: &std::path::Path) {
    let call = json!({"kind": "native", "function": "cudaMalloc"});
    let frame = |offset: i64, function: Value| json!({"kind": "native", "module": "/opt/server", "build_id": "cc33", "offset": offset, "function": function});
    let insert = [
        call,
        frame(0x999, json!("insert")),
        frame(0x888, json!("serve")),
        frame(0x777, json!("main")),
    ];
    let minute = Minute {
        process: 9,
        stack: Some(91),
        kind: "device",
        minute: 0,
        given: (9000, 9),
        freed: (0, 0),
        live: (9000, 9),
    };
    let ended = Minute {
        minute: 119,
        given: (0, 0),
        ..minute
    };
    let windows = [recording::window(&minute), recording::window(&ended)];
    seed::write_file(dir, Table::StackWindows, "1.parquet", &windows);
    seed::write_file(
        dir,
        Table::Stacks,
        "1.parquet",
        &[recording::stack(91, INSERT, &insert)],
    );
    let process = recording::process(9, json!({"command": "/opt/server --label v2"}));
    seed::write_file(dir, Table::Processes, "1.parquet", &[process]);
}

#[test]
fn two_recordings_of_two_builds_meet_by_their_functions() {
    let (guard, old) = recording::folder();
    let new = guard.path().join("new");
    other_build(&new);
    let new = new.to_str().unwrap();
    let answer = json(&[&old, new]);
    let expected = [
        row(INSERT, 6000, 9000, "name"),
        row(WEIGHTS, 10_000, 0, "only a"),
    ];
    assert_eq!(rows(&answer), expected);
    let by_module = json(&[&old, new, "--by", "module"]);
    // The cache was a library of its own before; the weights were loaded by the program itself.
    let expected = [
        row("/opt/libcache.so", 6000, 0, "only a"),
        row("/opt/server", 10_000, 9000, "same"),
    ];
    let mut found = rows(&by_module);
    found.sort();
    assert_eq!(found, expected);
    let by_function = json(&[&old, new, "--by", "function"]);
    assert_eq!(rows(&by_function)[0], row("insert", 6000, 9000, "same"));
    // 4000 + 10000 + 2000 given in an hour, 9000 in two.
    let allocated = json(&[&old, new, "--value", "allocated"]);
    assert_eq!(
        allocated["a"]["total"]["allocated_bytes_per_hour"],
        16_000.0
    );
    assert_eq!(allocated["b"]["total"]["allocated_bytes_per_hour"], 4500.0);
    assert_eq!(allocated["changed"][0]["change"], 4500.0 - 6000.0);
    // A build and a command line choose processes.
    let one = json(&[
        &format!("data={old},build=aa1,exe=server-1.2"),
        &format!("data={new},command=label v2"),
    ]);
    assert_eq!(rows(&one), [row(INSERT, 2000, 9000, "name")]);
}

#[test]
fn pictures_and_profiles_hold_the_difference() {
    let (guard, data) = recording::folder();
    let (svg, profile) = (guard.path().join("d.svg"), guard.path().join("d.pb.gz"));
    let (code, _, err) = run(&[
        "--data",
        &data,
        "pod=server-2",
        "pod=server-1",
        "--flamegraph",
        svg.to_str().unwrap(),
        "--pprof",
        profile.to_str().unwrap(),
    ]);
    assert_eq!(code, 0, "{err}");
    let titles = titles(&std::fs::read_to_string(&svg).unwrap());
    let expected = "insert: 3.91 KiB, 28.6 %; before 1.95 KiB, change +1.95 KiB".to_string();
    assert!(titles.contains(&expected), "{titles:?}");
    let mut values: Vec<(String, i64)> = Profile::read(&profile)
        .samples()
        .into_iter()
        .map(|(frames, values, _)| (frames[1].split(' ').next().unwrap().to_string(), values[1]))
        .collect();
    values.sort();
    assert_eq!(
        values,
        [
            ("insert".to_string(), 2000),
            ("reserve".to_string(), 10_000)
        ]
    );
}

#[test]
fn what_is_wrong_is_said() {
    let (_guard, data) = recording::folder();
    let data = data.as_str();
    for (arguments, code, part) in [
        (vec!["pod=a", "pod=b"], 2, "--data"),
        (
            vec!["--data", data, "pods=a", "pod=b"],
            2,
            "unknown key \"pods\"",
        ),
        (
            vec!["--data", data, "pod=server-1", "pod=none"],
            3,
            "\"pod=none\" has no physical memory",
        ),
        (vec![data, "/nonexistent/folder"], 1, "/nonexistent/folder"),
        (vec![data], 2, "<B>"),
    ] {
        let (found, _, err) = run(&arguments);
        assert_eq!(found, code, "{arguments:?}: {err}");
        assert!(err.contains(part), "{arguments:?}: {err}");
    }
}
