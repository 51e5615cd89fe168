//! `vramscope import`: what a snapshot becomes, asked in SQL. Expectations are calculated by hand
//! from the snapshots written here, published (the definitions' known answers), or counted with
//! CPython (`pickle.load` and sums).

mod real;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::cli::{stderr, stdout, vramscope};
use crate::dict;
use crate::writer::{HANDS, Hand, Py, json, pickle};

const MIB: i64 = 1 << 20;
const BASE: i64 = 0x7f00_0000_0000;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn import(data: &Path, files: &[&Path]) -> std::process::Output {
    let mut arguments = vec!["import", "--data", text(data)];
    arguments.extend(files.iter().map(|file| text(file)));
    vramscope(&arguments)
}

/// The answer as CSV, without its header.
fn ask(data: &Path, sql: &str) -> String {
    let output = vramscope(&["sql", "--data", text(data), "-c", sql, "--format", "csv"]);
    let answer = stdout(&output);
    assert!(output.status.success(), "{sql}: {}", stderr(&output));
    let (_, rows) = answer.split_once('\n').unwrap();
    rows.trim_end().to_string()
}

/// Every file below a folder, with its content.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push((path.clone(), std::fs::read(path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

fn parquet_files(folder: &Path) -> usize {
    let is_parquet = |(path, _): &&(PathBuf, _)| path.extension().is_some_and(|e| e == "parquet");
    files(folder).iter().filter(is_parquet).count()
}

fn frames(names: &[(&str, &str, i64)]) -> Py {
    let frame = |(name, file, line): &(&str, &str, i64)| {
        dict! {"name" => *name, "filename" => *file, "line" => *line}
    };
    Py::List(names.iter().map(frame).collect())
}

/// Device 0 with a whole trace, device 1 with only a map (expandable, a private pool, a pending
/// block), and pinned memory.
fn small() -> Py {
    let python = || {
        frames(&[
            ("c10::malloc", "??", 0),
            ("step", "train.py", 7),
            ("main", "<stdin>", 1),
        ])
    };
    let entry = |time: i64, action: &str, address: i64, size: i64| {
        dict! {"action" => action, "addr" => address, "size" => size, "stream" => 3,
        "time_us" => 1_700_000_000_000_000 + time, "frames" => python()}
    };
    let trace = vec![
        entry(0, "segment_alloc", BASE, 2 * MIB),
        entry(1, "alloc", BASE, 500),
        entry(2, "alloc", BASE + 512, 1000),
        entry(3, "free_requested", BASE, 500),
        entry(5, "free_completed", BASE, 500),
        entry(6, "alloc", BASE, 100),
        dict! {"action" => "oom", "device_free" => 5_000_000, "size" => 8192 * MIB, "stream" => 3,
        "time_us" => 1_700_000_000_000_007, "frames" => Py::List(vec![])},
        entry(8, "snapshot", 0, 0),
        entry(8, "defragment", 0, 0),
    ];
    let block = |address: i64, size: i64, requested: i64, state: &str| {
        dict! {"address" => address, "size" => size, "requested_size" => requested,
        "state" => state, "frames" => python()}
    };
    let second = BASE + 4096 * MIB;
    dict! {
        "segments" => vec![
            dict! {"device" => 0, "address" => BASE, "total_size" => 2 * MIB, "stream" => 3,
                   "segment_type" => "small", "is_expandable" => false,
                   "segment_pool_id" => Py::Tuple(vec![0.into(), 0.into()]),
                   "frames" => python(),
                   "blocks" => vec![
                       block(BASE, 512, 100, "active_allocated"),
                       block(BASE + 512, 1024, 1000, "active_allocated"),
                       block(BASE + 1536, 2 * MIB - 1536, 0, "inactive"),
                   ]},
            dict! {"device" => 1, "address" => second, "total_size" => 40 * MIB, "stream" => 0,
                   "segment_type" => "large", "is_expandable" => true,
                   "segment_pool_id" => Py::Tuple(vec![0.into(), 1.into()]),
                   "frames" => Py::List(vec![]),
                   "blocks" => vec![
                       block(second, 2 * MIB, 2 * MIB - 1, "active_allocated"),
                       block(second + 2 * MIB, 2 * MIB, 2 * MIB, "active_awaiting_free"),
                       block(second + 4 * MIB, 36 * MIB, 0, "inactive"),
                   ]},
        ],
        "device_traces" => vec![Py::List(trace), Py::List(vec![])],
        "allocator_settings" => dict!{"PYTORCH_CUDA_ALLOC_CONF" => "expandable_segments:True"},
        "host_segments" => vec![dict! {
            "address" => 65536, "total_size" => 4096, "stream" => 0,
            "blocks" => vec![block(65536, 4096, 4000, "active_allocated")],
        }],
        "host_traces" => Py::List(vec![]),
    }
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_snapshot_becomes_rows() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let file = write(
        dir.path(),
        "small.pickle",
        &pickle(&small(), Hand::Python(4)),
    );
    let output = import(&data, &[&file]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let printed = stdout(&output);
    for part in [
        "device 0",
        "1 segments, 2 blocks in use",
        "gives this map, block for block",
        "1 \"defragment\": not known, no rows",
        "none: recording was off",
        "host",
        "expandable_segments:True",
    ] {
        assert!(printed.contains(part), "{part:?} is not in:\n{printed}");
    }

    // Times are 1.7e15 us and what follows; lifetimes 2 us (requested) and 4 us (completed).
    let events = ask(
        &data,
        "SELECT seq, ts_ns - 1700000000000000000 AS ns, api, op, memory_kind, address - 139637976727552, \
         bytes, requested_bytes, counted, alloc_seq, lifetime_ns, segment_address - 139637976727552, \
         result, device_free_bytes, stream, source, layer \
         FROM alloc_events ORDER BY seq",
    );
    assert_eq!(
        events,
        "\
1,0,segment_alloc,alloc,device,0,2097152,2097152,true,,,,0,,3,import,framework
2,1000,alloc,alloc,framework_block,0,512,500,true,,,0,0,,3,import,framework
3,2000,alloc,alloc,framework_block,512,1024,1000,true,,,0,0,,3,import,framework
4,3000,free_requested,free,framework_block,0,512,500,true,2,2000,0,0,,3,import,framework
5,5000,free_completed,free,framework_block,0,512,500,false,2,4000,0,0,,3,import,framework
6,6000,alloc,alloc,framework_block,0,512,100,true,,,0,0,,3,import,framework
7,7000,oom,oom,framework_block,,0,8589934592,false,,,,,5000000,3,import,framework"
    );
    // Device 1: 40 MiB, of which 4 MiB are active and the second chunk of 20 MiB is free.
    let samples = ask(
        &data,
        "SELECT device, allocated_bytes, reserved_bytes, active_bytes, requested_bytes, \
         releasable_bytes, stranded_bytes, largest_free_block_bytes, peak_allocated_bytes, \
         peak_reserved_bytes, segment_count, block_count, ooms, lossy, settings \
         FROM allocator_samples ORDER BY device NULLS LAST",
    );
    assert_eq!(
        samples,
        "\
0,1536,2097152,1536,1100,0,2095616,2095616,1536,2097152,1,2,1,false,expandable_segments:True
1,2097152,41943040,4194304,2097151,20971520,16777216,37748736,,,1,1,,false,expandable_segments:True
,4096,4096,4096,4000,0,0,0,,,1,1,,false,expandable_segments:True"
    );
    let segments = ask(
        &data,
        "SELECT s.device, s.memory_kind, s.pool, s.segment_type, s.expandable, s.bytes, \
         s.active_bytes, s.releasable_bytes, s.stranded_bytes, s.stack_id IS NOT NULL, \
         s.allocated_ts_ns - 1700000000000000000, cardinality(s.blocks), \
         s.snapshot_id = a.snapshot_id AND s.process_id = a.process_id AND s.ts_ns = a.ts_ns \
         FROM segments s JOIN allocator_samples a ON a.device IS NOT DISTINCT FROM s.device \
         ORDER BY s.device NULLS LAST",
    );
    assert_eq!(
        segments,
        "\
0,device,default,small,false,2097152,1536,0,2095616,true,0,3,true
1,vmm_physical,\"(0, 1)\",large,true,41943040,4194304,20971520,16777216,false,,3,true
,pinned_host,default,,false,4096,4096,0,0,false,,1,true"
    );
    let blocks = ask(
        &data,
        "SELECT b['bytes'], b['requested_bytes'], b['state'], b['alloc_seq'], \
         b['allocated_ts_ns'] - 1700000000000000000, b['stack_id'] IS NOT NULL \
         FROM (SELECT unnest(blocks) AS b FROM segments WHERE device = 0) ORDER BY b['address']",
    );
    assert_eq!(
        blocks,
        "\
512,100,active_allocated,6,6000,true
1024,1000,active_allocated,3,2000,true
2095616,,inactive,,,false"
    );
    // One stack: frames innermost first, folded outermost first; the empty one has no row.
    let stacks = ask(
        &data,
        "SELECT folded, f['kind'], f['function'], f['file'], f['line'] \
         FROM (SELECT folded, unnest(frames) AS f FROM stacks)",
    );
    assert_eq!(
        stacks,
        "\
main;step;c10::malloc,native,c10::malloc,,
main;step;c10::malloc,python,step,train.py,7
main;step;c10::malloc,python,main,<stdin>,1"
    );
    let process = ask(&data, "SELECT host, command, framework, pid FROM processes");
    assert_eq!(
        process,
        format!("small.pickle,{},pytorch,0", file.display())
    );
    // What lives by its entries is what the map has allocated, and nothing of it is physical.
    let live = ask(
        &data,
        "SELECT byte_class, sum(bytes) FROM live_allocations GROUP BY 1 ORDER BY 1",
    );
    assert_eq!(live, "physical,2097152\nsub_allocated,1536");
}

/// Whoever wrote the file, and in which form, the rows are the same.
#[test]
fn every_form_gives_the_same_rows() {
    let dir = tempfile::tempdir().unwrap();
    let sql = "SELECT count(*), count(stack_id), sum(bytes), sum(requested_bytes), sum(alloc_seq) FROM alloc_events \
               UNION ALL SELECT count(*), count(stack_id), sum(bytes), sum(active_bytes), sum(stranded_bytes) FROM segments ORDER BY 1";
    let mut answers = Vec::new();
    for hand in HANDS {
        let data = dir.path().join(format!("{hand:?}"));
        let file = write(dir.path(), "s.pickle", &pickle(&small(), hand));
        assert!(import(&data, &[&file]).status.success());
        answers.push(ask(&data, sql));
    }
    let data = dir.path().join("json");
    let file = write(dir.path(), "s.json", json(&small()).as_bytes());
    assert!(import(&data, &[&file]).status.success());
    answers.push(ask(&data, sql));
    assert!(
        answers.iter().all(|answer| *answer == answers[0]),
        "{answers:#?}"
    );
}

/// The same content again, also under another name, changes no row; another file adds its own.
#[test]
fn importing_again_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let first = write(dir.path(), "a.pickle", &pickle(&small(), Hand::Python(4)));
    import(&data, &[&first]);
    let once = files(&data);
    assert!(import(&data, &[&first, &first]).status.success());
    assert!(files(&data) == once, "files differ");
    let copy = dir.path().join("b.pickle");
    std::fs::copy(&first, &copy).unwrap();
    assert!(import(&data, &[&copy]).status.success());
    assert_eq!(ask(&data, "SELECT count(*) FROM alloc_events"), "7");
    let other = write(dir.path(), "c.pickle", &pickle(&small(), Hand::Torch));
    assert!(import(&data, &[&other]).status.success());
    assert_eq!(ask(&data, "SELECT count(*) FROM alloc_events"), "14");
    assert_eq!(
        ask(&data, "SELECT count(DISTINCT process_id) FROM processes"),
        "2"
    );
}

/// One bad file spoils no other, is named with the place, and leaves nothing.
#[test]
fn a_refused_file_leaves_nothing_and_stops_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let good = pickle(&small(), Hand::Python(4));
    let bad = write(dir.path(), "bad.pickle", &good[..good.len() - 40]);
    let code = write(dir.path(), "code.pickle", b"\x80\x04cos\nsystem\n.");
    let overlap = dict! {"segments" => vec![
        dict! {"device" => 0, "address" => 4096, "total_size" => 1024, "segment_type" => "small",
               "blocks" => vec![dict!{"size" => 1024, "state" => "inactive"}]},
        dict! {"device" => 0, "address" => 4608, "total_size" => 512, "segment_type" => "small",
               "blocks" => vec![dict!{"size" => 512, "state" => "inactive"}]},
    ]};
    let overlap = write(dir.path(), "overlap.json", json(&overlap).as_bytes());
    let good = write(dir.path(), "good.pickle", &good);
    let missing = dir.path().join("missing.pickle");
    let output = import(&data, &[&bad, &code, &overlap, &missing, dir.path(), &good]);
    assert_eq!(output.status.code(), Some(1));
    let errors = stderr(&output);
    for part in [
        "bad.pickle\": ",
        "code.pickle\": opcode GLOBAL at byte 2",
        "overlap.json\": segment 0x1200 of device 0 overlaps segment 0x1000",
        "missing.pickle\": No such file",
        "is not a regular file",
        "1 of 6 files",
    ] {
        assert!(errors.contains(part), "{part:?} is not in:\n{errors}");
    }
    assert_eq!(parquet_files(&data), 5);
    assert_eq!(ask(&data, "SELECT host FROM processes"), "good.pickle");

    // As JSON the same.
    let arguments = [
        "import",
        "--json",
        "--data",
        text(&data),
        text(&good),
        text(&code),
    ];
    let output = vramscope(&arguments);
    assert_eq!(output.status.code(), Some(1));
    let summary: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let device = &summary["imported"][0]["memories"][0];
    assert_eq!(device["reserved_bytes"], 2 * MIB);
    assert_eq!(device["events"]["alloc"], 3);
    assert_eq!(device["unknown_actions"]["defragment"], 1);
    assert_eq!(device["trace_is_whole"], true);
    assert_eq!(device["replay_differences"], 0);
    assert_eq!(summary["imported"][0]["rows"]["alloc_events"], 7);
    let refused = &summary["refused"][0];
    assert!(refused["file"].as_str().unwrap().ends_with("code.pickle"));

    let nothing = vramscope(&["import"]);
    assert_eq!(nothing.status.code(), Some(2));
}

/// Folders that are not ours to write to.
#[test]
fn only_traces_and_new_folders_take_rows() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "s.pickle", &pickle(&small(), Hand::Python(4)));
    let refused = |data: &Path, part: &str| {
        let output = import(data, &[&file]);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        assert!(errors.contains(part), "{part:?} is not in:\n{errors}");
    };
    refused(&file, "is a file");
    refused(dir.path(), "is not empty and holds no tables");
    let lake = dir.path().join("lake");
    std::fs::create_dir_all(lake.join("stacks/_delta_log")).unwrap();
    refused(&lake, "is a collector's data folder");
    // An agent's trace takes them, and keeps its own.
    let trace = dir.path().join("trace");
    crate::seed::write_trace(&trace);
    let before = ask(&trace, "SELECT count(*) FROM alloc_events").parse::<u64>();
    assert!(import(&trace, &[&file]).status.success());
    let after = ask(&trace, "SELECT count(*) FROM alloc_events").parse::<u64>();
    assert_eq!(after.unwrap(), before.unwrap() + 7);
}

/// What a killed import leaves behind is nobody's row, and goes away.
#[test]
fn leftovers_do_not_count_and_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let file = write(dir.path(), "s.pickle", &pickle(&small(), Hand::Python(4)));
    assert!(import(&data, &[&file]).status.success());
    let once = files(&data);
    write(
        &data.join("alloc_events"),
        ".import-0000000000000001.tmp",
        b"half",
    );
    assert_eq!(ask(&data, "SELECT count(*) FROM alloc_events"), "7");
    assert!(import(&data, &[&file]).status.success());
    assert!(files(&data) == once);
}

/// A trace of many allocations and frees.
fn long(entries: i64) -> Vec<u8> {
    let entry = |i: i64| {
        let action = ["alloc", "free_requested", "free_completed"][(i % 3) as usize];
        dict! {"action" => action, "addr" => BASE + 512 * (i / 3 % 1000), "size" => 512,
        "stream" => 0, "time_us" => i, "frames" => frames(&[("f", "f.py", i % 50)])}
    };
    let value = dict! {
        "segments" => vec![dict! {
            "device" => 0, "address" => BASE, "total_size" => 2 * MIB, "stream" => 0,
            "segment_type" => "small",
            "blocks" => vec![dict! {"address" => BASE, "size" => 2 * MIB, "state" => "inactive"}],
        }],
        "device_traces" => vec![Py::List((0..entries).map(entry).collect())],
    };
    pickle(&value, Hand::Python(4))
}

fn start(data: &Path, file: &Path) -> std::process::Child {
    Command::new(env!("CARGO_BIN_EXE_vramscope"))
        .args(["import", "--data", text(data), text(file)])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Ctrl-C, as soon as the first file has begun: exit code 130, and the folder is as it was.
#[test]
fn a_cancelled_import_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let file = write(dir.path(), "long.pickle", &long(300_000));
    let child = start(&data, &file);
    let deadline = Instant::now() + Duration::from_secs(120);
    let begun = || {
        let entries = std::fs::read_dir(data.join("alloc_events"));
        entries.is_ok_and(|mut entries| entries.next().is_some())
    };
    while !begun() {
        assert!(Instant::now() < deadline, "the import never began");
        std::thread::sleep(Duration::from_millis(2));
    }
    let id = child.id().to_string();
    let sent = Command::new("kill").args(["-INT", &id]).status().unwrap();
    assert!(sent.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert_eq!(stderr(&output), "cancelled\n");
    let left: Vec<PathBuf> = files(&data).into_iter().map(|(path, _)| path).collect();
    assert_eq!(left, [data.join(".import.lock")]);
}

/// The whole process, as the kernel counts its memory: at most 64 MiB and 8 times the file.
#[test]
fn memory_is_bounded_by_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let bytes = long(60_000);
    let file = write(dir.path(), "long.pickle", &bytes);
    let mut child = start(&data, &file);
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()));
        let line = status.unwrap_or_default();
        let line = line.lines().find(|line| line.starts_with("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok());
        peak = peak.max(kib.unwrap_or(0) * 1024);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(ask(&data, "SELECT count(*) FROM alloc_events"), "60000");
    let limit = (64 << 20) + 8 * bytes.len();
    assert!(peak > 0 && peak <= limit, "{peak} bytes, allowed {limit}");
}
