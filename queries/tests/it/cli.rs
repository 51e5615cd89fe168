//! The `vramscope` command from outside: formats, exit codes, what goes to stdout and stderr.

use std::io::{Read, Write};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::seed;

pub fn vramscope(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramscope"));
    command
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn trace() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    seed::write_trace(dir.path());
    let path = dir.path().to_str().unwrap().to_string();
    (dir, path)
}

const TOTALS: &str = "SELECT process_id, gpu_uuid, live_bytes FROM process_totals \
     WHERE memory_kind = 'device' AND live_bytes > 0 AND process_id < 300 AND process_id <> 200 ORDER BY process_id";
const NOTE: &str = "note: 25 events were lost, 5 events have no stack or no end, nobody \
     watched during 1 gap (losses not known) in 12 windows; see answer_quality\n";

#[test]
fn csv_has_a_header_and_empty_nulls() {
    let (_guard, data) = trace();
    let output = vramscope(&["sql", "--data", &data, "-c", TOTALS, "--format", "csv"]);
    assert_eq!(
        stdout(&output),
        "process_id,gpu_uuid,live_bytes\n101,GPU-A,3000\n201,GPU-C,5000\n202,,64\n"
    );
    assert_eq!(stderr(&output), NOTE);
    assert_eq!(output.status.code(), Some(0));
    let none = vramscope(&[
        "sql",
        "--data",
        &data,
        "-c",
        "SELECT pid FROM coverage WHERE pid = 0",
        "--format",
        "csv",
    ]);
    assert_eq!(stdout(&none), "pid\n");
}

#[test]
fn sql_may_begin_with_a_comment() {
    let (_guard, data) = trace();
    let sql = "-- is anybody there?\nSELECT 1 AS one";
    let output = vramscope(&["sql", "--data", &data, "-c", sql, "--format", "csv"]);
    assert_eq!(stdout(&output), "one\n1\n", "{}", stderr(&output));
}

#[test]
fn csv_writes_nested_values_as_json() {
    let (_guard, data) = trace();
    let sql = "SELECT pid, coverage FROM current_processes WHERE host = 'alpha' ORDER BY pid";
    let output = vramscope(&["sql", "--data", &data, "-c", sql, "--format", "csv"]);
    let text = stdout(&output);
    let expected = "1001,\"[{\"\"library\"\":\"\"/lib/libcuda.so.1\"\",\"\"symbol\"\":\"\"cuMemAlloc_v2\"\",\
                    \"\"attached\"\":true,\"\"reason\"\":null},";
    assert!(text.contains(expected), "{text}");
    assert!(text.ends_with("1002,[]\n"), "{text}");
}

#[test]
fn json_is_one_array_with_nulls() {
    let (_guard, data) = trace();
    let output = vramscope(&["sql", "--data", &data, "-c", TOTALS, "--format", "json"]);
    let rows: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let expected = serde_json::json!([
        {"process_id": 101, "gpu_uuid": "GPU-A", "live_bytes": 3000},
        {"process_id": 201, "gpu_uuid": "GPU-C", "live_bytes": 5000},
        {"process_id": 202, "gpu_uuid": null, "live_bytes": 64},
    ]);
    assert_eq!(rows, expected);
    let none = vramscope(&[
        "sql",
        "--data",
        &data,
        "-c",
        "SELECT 1 AS x WHERE false",
        "--format",
        "json",
    ]);
    assert_eq!(stdout(&none), "[]\n");
}

#[test]
fn tables_show_rows_and_their_number() {
    let (_guard, data) = trace();
    let output = vramscope(&["sql", "--data", &data, "-c", TOTALS]);
    let text = stdout(&output);
    assert!(
        text.contains("| 101        | GPU-A    | 3000       |"),
        "{text}"
    );
    assert!(text.contains("(3 rows, "), "{text}");
    let cut = vramscope(&["sql", "--data", &data, "-c", TOTALS, "--max-rows", "2"]);
    assert!(stdout(&cut).contains("(2 rows, "));
    assert!(
        stderr(&cut).contains("note: cut after 2 rows; there are more"),
        "{}",
        stderr(&cut)
    );
    assert_eq!(cut.status.code(), Some(0));
}

#[test]
fn parquet_files_appear_whole_or_not_at_all() {
    let (guard, data) = trace();
    let file = guard.path().join("answer.parquet");
    let path = file.to_str().unwrap();
    let output = vramscope(&[
        "sql", "--data", &data, "-c", TOTALS, "--format", "parquet", "--output", path,
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let reader =
        ParquetRecordBatchReaderBuilder::try_new(std::fs::File::open(&file).unwrap()).unwrap();
    let batches: Vec<RecordBatch> = reader.build().unwrap().map(Result::unwrap).collect();
    assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), 3);
    std::fs::remove_file(&file).unwrap();
    let failing = "SELECT 1 / (value - 3) FROM generate_series(1, 5)";
    let output = vramscope(&[
        "sql", "--data", &data, "-c", failing, "--format", "csv", "--output", path,
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("Divide by zero"),
        "{}",
        stderr(&output)
    );
    let left: Vec<_> = std::fs::read_dir(guard.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("answer"))
        .collect();
    assert_eq!(left, Vec::<String>::new());
}

#[test]
fn exit_codes_tell_failure_from_wrong_usage() {
    let (_guard, data) = trace();
    let cases: &[(&[&str], i32, &str)] = &[
        (
            &["sql", "--data", &data, "-c", "SELECT nonesuch FROM stacks"],
            1,
            "nonesuch",
        ),
        (
            &["sql", "--data", &data, "-c", "SELECT * FROM alloc_event"],
            1,
            "did you mean alloc_events?",
        ),
        (&["sql", "--data", &data, "-c", "SELEC 1"], 1, "SELEC"),
        (
            &["sql", "--data", &data, "-c", "DROP TABLE stacks"],
            1,
            "DROP TABLE is not allowed",
        ),
        (
            &["sql", "--data", "/nonexistent/data", "-c", "SELECT 1"],
            1,
            "does not exist",
        ),
        (
            &["sql", "--data", &data, "/nonexistent/file.sql"],
            1,
            "/nonexistent/file.sql",
        ),
        (
            &["sql", "--collector", "http://127.0.0.1:1", "-c", "SELECT 1"],
            1,
            "collector http://127.0.0.1:1",
        ),
        (&["sql", "-c", "SELECT 1"], 2, "--data"),
        (
            &[
                "sql",
                "--data",
                &data,
                "--collector",
                "http://127.0.0.1:1",
                "-c",
                "SELECT 1",
            ],
            2,
            "cannot be used with",
        ),
        (
            &[
                "sql", "--data", &data, "-c", "SELECT 1", "--format", "parquet",
            ],
            2,
            "needs --output",
        ),
        (
            &[
                "sql",
                "--data",
                &data,
                "-c",
                "SELECT 1; SELECT 2",
                "--output",
                "x",
            ],
            2,
            "there are 2 statements",
        ),
        (
            &["sql", "--data", &data, "-c", " ; -- nothing"],
            2,
            "no SQL",
        ),
        (
            &["sql", "--data", &data, "-c", "SELECT 1", "--memory", "lots"],
            2,
            "lots",
        ),
        (
            &["sql", "--data", &data, "-c", "SELECT 1", "--format", "xml"],
            2,
            "xml",
        ),
        (&["nonesuch"], 2, "nonesuch"),
        (&["views", "nonesuch"], 1, "nonesuch"),
    ];
    // Stopped although it never pauses.
    let endless = "SELECT count(*) FROM generate_series(1, 1000000) AS a, \
                   generate_series(1, 1000000) AS b WHERE a.value % 7 = b.value % 11";
    let started = Instant::now();
    let stopped = vramscope(&["sql", "--data", &data, "-c", endless, "--timeout", "1"]);
    assert_eq!(stopped.status.code(), Some(1));
    assert!(
        stderr(&stopped).contains("stopped after 1 s"),
        "{}",
        stderr(&stopped)
    );
    assert!(started.elapsed() < Duration::from_secs(30));
    for (arguments, code, text) in cases {
        let output = vramscope(arguments);
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(*code), "{arguments:?}: {error}");
        assert!(error.contains(text), "{arguments:?}: {error}");
        assert_eq!(stdout(&output), "", "{arguments:?}");
    }
}

#[test]
fn statements_come_from_files_and_pipes() {
    let (guard, data) = trace();
    let file = guard.path().join("two.sql");
    std::fs::write(&file, "-- two;\nSELECT 1 AS a;\nSELECT ';' AS b;\n").unwrap();
    let output = vramscope(&[
        "sql",
        "--data",
        &data,
        file.to_str().unwrap(),
        "--format",
        "csv",
    ]);
    assert_eq!(stdout(&output), "a\n1\nb\n;\n");
    // Nothing recorded was read: no note.
    assert_eq!(stderr(&output), "");
    let mut child = Command::new(env!("CARGO_BIN_EXE_vramscope"))
        .args(["sql", "--data", &data, "--format", "csv"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"SELECT count(*) AS n FROM alloc_events")
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(stdout(&output), "n\n97\n");
}

#[test]
fn damaged_files_are_named_and_skipped_aloud() {
    let (guard, data) = trace();
    let bad = guard.path().join("stacks/bad.parquet");
    std::fs::write(&bad, "not parquet").unwrap();
    let sql = "SELECT count(*) AS n FROM stacks";
    let refused = vramscope(&["sql", "--data", &data, "-c", sql]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).contains("stacks/bad.parquet"),
        "{}",
        stderr(&refused)
    );
    let skipped = vramscope(&[
        "sql",
        "--data",
        &data,
        "-c",
        sql,
        "--format",
        "csv",
        "--skip-damaged",
    ]);
    assert_eq!(stdout(&skipped), "n\n17\n");
    let text = stderr(&skipped);
    assert!(
        text.contains("1 damaged file") && text.contains("stacks/bad.parquet"),
        "{text}"
    );
}

#[test]
fn damaged_rows_name_their_file() {
    let (guard, data) = trace();
    let path = guard.path().join("stacks/1.parquet");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4..60].fill(0xff);
    std::fs::write(&path, bytes).unwrap();
    let output = vramscope(&[
        "sql",
        "--data",
        &data,
        "-c",
        "SELECT stack_id, folded FROM stacks",
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("stacks/1.parquet"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let (_guard, data) = trace();
    let mut child = Command::new(env!("CARGO_BIN_EXE_vramscope"))
        .args([
            "sql",
            "--data",
            &data,
            "-c",
            "SELECT * FROM generate_series(1, 3000000)",
            "--format",
            "csv",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_lake_is_asked_like_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    tokio::runtime::Runtime::new()
        .unwrap()
        .block_on(seed::write_lake(dir.path()));
    let data = dir.path().to_str().unwrap();
    let output = vramscope(&["sql", "--data", data, "-c", TOTALS, "--format", "csv"]);
    assert_eq!(
        stdout(&output),
        "process_id,gpu_uuid,live_bytes\n101,GPU-A,3000\n201,GPU-C,5000\n202,,64\n"
    );
    assert_eq!(stderr(&output), NOTE);
    let sql =
        "SELECT date, hour, count(*) AS n FROM alloc_events GROUP BY date, hour ORDER BY hour";
    let output = vramscope(&["sql", "--data", data, "-c", sql, "--format", "csv"]);
    assert_eq!(
        stdout(&output),
        "date,hour,n\n2026-11-29,9,1\n2026-11-29,10,96\n"
    );
}

#[test]
fn help_and_views_explain() {
    let help = stdout(&vramscope(&["sql", "--help"]));
    assert!(
        help.contains("Examples:") && help.contains("--collector") && help.contains("Exit codes"),
        "{help}"
    );
    let list = stdout(&vramscope(&["views"]));
    for name in ["tetrahedron", "answer_quality", "alloc_events"] {
        assert!(
            list.lines().any(|line| line.starts_with(name)),
            "{name} in {list}"
        );
    }
    let one = stdout(&vramscope(&["views", "reconciliation"]));
    assert!(one.contains("difference_bytes"), "{one}");
    let reference = stdout(&vramscope(&["reference"]));
    assert!(reference.starts_with("# SQL reference"), "{reference}");
}

/// Waits until a prompt has shown `text` after `from`; returns where it ends.
fn wait_for(screen: &Mutex<String>, text: &str, from: usize) -> usize {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let found = screen.lock().unwrap()[from..]
            .find(text)
            .map(|at| from + at + text.len());
        match found {
            Some(end) => return end,
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            None => panic!("{text:?} did not appear in {}", screen.lock().unwrap()),
        }
    }
}

/// Driven by `script`, which gives it a terminal.
#[test]
fn the_prompt_answers_describes_and_leaves() {
    if Command::new("script").arg("--version").output().is_err() {
        eprintln!("skipped: the command `script`, which gives a terminal, is not installed");
        return;
    }
    let (guard, data) = trace();
    let state = guard.path().join("state");
    // `exec`: a shell that stays the parent would die of the Ctrl-C that the prompt handles.
    let program = format!("exec {} sql --data {data}", env!("CARGO_BIN_EXE_vramscope"));
    let mut child = Command::new("script")
        .args(["-qec", &program, "/dev/null"])
        .env("SHELL", "/bin/sh")
        .env("XDG_STATE_HOME", &state)
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let screen = Arc::new(Mutex::new(String::new()));
    let shown = Arc::clone(&screen);
    let mut output = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = output.read(&mut buffer) {
            shown
                .lock()
                .unwrap()
                .push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
    });
    let mut keyboard = child.stdin.take().unwrap();
    let mut at = wait_for(&screen, "vramscope> ", 0);
    // 12336 = 500 + 3000 + 5000 + 64 and gamma's 2048 + 1024 + 700, with delta's
    // 39845888 and the import's 20971520: 60829744. A question over two lines; one that is dropped with
    // Ctrl-C; one that runs for ever and is stopped with Ctrl-C.
    for (typed, answer) in [
        ("\\d\r", "tetrahedron"),
        ("\\d coverage\r", "view coverage:"),
        ("\\nonesuch\r", "unknown command"),
        (
            "SELECT sum(bytes) AS total\rFROM live_allocations WHERE byte_class = 'physical';\r",
            "60829744",
        ),
        ("SELECT * FROM stack;\r", "did you mean stacks?"),
        ("SELECT nothing\x03", ""),
        ("SELECT count(*) FROM live_alloc\t;\r", "(1 row, "),
    ] {
        keyboard.write_all(typed.as_bytes()).unwrap();
        at = wait_for(&screen, answer, at);
        at = wait_for(&screen, "vramscope> ", at);
    }
    let endless = "SELECT count(*) FROM generate_series(1, 1000000) AS a, generate_series(1, 1000000) AS b \
                   WHERE a.value % 7 = b.value % 11;\r";
    keyboard.write_all(endless.as_bytes()).unwrap();
    // The end of line editing: the question is being answered from here on.
    at = wait_for(&screen, "\x1b[?2004l", at);
    std::thread::sleep(Duration::from_millis(500));
    keyboard.write_all(b"\x03").unwrap();
    at = wait_for(&screen, "cancelled", at);
    wait_for(&screen, "vramscope> ", at);
    keyboard.write_all(b"\\q\r").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    reader.join().unwrap();
    let text = screen.lock().unwrap().clone();
    assert!(text.contains(NOTE.trim()), "{text}");
    let history = std::fs::read_to_string(state.join("vramscope/history")).unwrap();
    assert!(history.contains("FROM live_allocations;"), "{history}");
}
