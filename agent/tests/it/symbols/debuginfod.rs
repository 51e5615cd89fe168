//! Names that a server of debug files gives.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow::array::{Array, AsArray};
use vramscope_agent::stacks::symbols::debugfile::Facts;
use vramscope_agent::stacks::symbols::debuginfod::{self, Client};
use vramscope_wire::Table;

use super::{Built, run, skipped, text};
use crate::standins::Bench;

/// A server of debug files on loopback; what it was asked.
fn serve(files: BTreeMap<String, Vec<u8>>) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    // It ends with the test's process.
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let path = line.split(' ').nth(1).unwrap_or_default().to_string();
            while line != "\r\n" {
                line.clear();
                if reader.read_line(&mut line).unwrap_or(0) == 0 {
                    break;
                }
            }
            log.lock().unwrap().push(path.clone());
            let (head, body) = match files.get(&path) {
                Some(body) => (
                    format!("200 OK\r\nContent-Length: {}", body.len()),
                    body.as_slice(),
                ),
                None => ("404 Not Found\r\nContent-Length: 0".to_string(), &[][..]),
            };
            // Whoever asked may have had enough.
            let _ = stream
                .write_all(format!("HTTP/1.1 {head}\r\nConnection: close\r\n\r\n").as_bytes())
                .and_then(|()| stream.write_all(body));
        }
    });
    (url, asked)
}

fn path_of(build_id: &str) -> String {
    format!("/buildid/{build_id}/debuginfo")
}

#[test]
fn a_server_of_debug_files() {
    let Some(built) = Built::cpp(&[]) else { return };
    let debug = built.folder.path().join("debug");
    if !built.strip_into(&debug) {
        return;
    }
    let build_id = built.code().build_id.unwrap();
    let bytes = std::fs::read(&debug).unwrap();
    let wrong = "0123456789abcdef0123456789abcdef01234567";
    let files = [
        (path_of(&build_id), bytes.clone()),
        (path_of(wrong), bytes.clone()),
    ];
    let (url, asked) = serve(files.into());
    let (empty, _) = serve(BTreeMap::new());
    let cache = built.folder.path().join("cache");
    let options = |cache_bytes| debuginfod::Options {
        urls: vec![empty.clone(), format!("{url}/")],
        cache: cache.clone(),
        cache_bytes,
        deadline: Duration::from_secs(30),
    };
    let kept = || {
        let entries = std::fs::read_dir(&cache).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries
            .map(|e| e.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let large = 4 * bytes.len() as u64;

    let client = Client::new(options(bytes.len() as u64));
    assert!(
        client.get(&build_id).is_err(),
        "more than half of what there may be"
    );
    assert!(kept().is_empty());

    let client = Client::new(options(large));
    let unknown = "f".repeat(40);
    assert_eq!(client.get(&unknown).unwrap(), None);
    let error = client.get(wrong).unwrap_err().to_string();
    assert!(error.contains("no debug file of that build"), "{error}");
    assert_eq!(client.get("../../etc/passwd").unwrap(), None);
    assert!(kept().is_empty());
    let path = client.get(&build_id).unwrap().unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    let count = asked.lock().unwrap().len();
    assert_eq!(client.get(&build_id).unwrap(), Some(path.clone()));
    assert_eq!(asked.lock().unwrap().len(), count, "it is kept");
    assert!(
        !asked
            .lock()
            .unwrap()
            .iter()
            .any(|path| path.contains("passwd"))
    );

    // What was not used for longest makes room, and so does what was never finished.
    std::fs::remove_file(&path).unwrap();
    let old = cache.join("aa.debug");
    let older = std::time::SystemTime::now() - Duration::from_secs(3600);
    for name in ["aa.debug", "bb.debug", "cc.part"] {
        let file = std::fs::File::create(cache.join(name)).unwrap();
        file.set_len(2 * bytes.len() as u64).unwrap();
    }
    let file = std::fs::File::options().write(true).open(&old).unwrap();
    file.set_modified(older).unwrap();
    client.get(&build_id).unwrap().unwrap();
    let mut expected = [format!("{build_id}.debug"), "bb.debug".to_string()];
    expected.sort();
    assert_eq!(kept(), expected);
}

/// Stacks of a trace: id and folded form, and the functions in frames of one module.
type Traced = (BTreeMap<i64, String>, Vec<Option<String>>);

fn traced(bench: &Bench, options: &[&str], program: &Path, url: &str) -> Traced {
    let _ = std::fs::remove_dir_all(bench.trace());
    let status = bench
        .tracer(&[options, &["--quiet"]].concat())
        .arg(program)
        .args(["churn", "--seconds", "1", "--rate", "100", "--stacks", "4"])
        .env("DEBUGINFOD_URLS", url)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let (mut stacks, mut functions) = (BTreeMap::new(), Vec::new());
    for batch in bench.rows(Table::Stacks) {
        let column = |name: &str| batch.column_by_name(name).unwrap();
        let (ids, folded) = (column("stack_id"), column("folded").as_string::<i32>());
        let ids = ids.as_primitive::<arrow::datatypes::Int64Type>();
        stacks.extend((0..ids.len()).map(|i| (ids.value(i), folded.value(i).to_string())));
        let frames = column("frames").as_list::<i32>().values().as_struct();
        let column = |name: &str| frames.column_by_name(name).unwrap().as_string::<i32>();
        let (modules, names) = (column("module"), column("function"));
        let ours = (0..frames.len())
            .filter(|row| modules.is_valid(*row) && modules.value(*row) == text(program));
        functions.extend(ours.map(|row| names.is_valid(row).then(|| names.value(row).to_string())));
    }
    assert!(!functions.is_empty());
    (stacks, functions)
}

/// The whole way: a stripped program is traced; its functions have names where a server is configured,
/// and modules with offsets where not. The environment alone configures nothing. The ids of its stacks
/// are the same each time, also where the program lies elsewhere, and so are the names.
#[test]
fn a_traced_program_is_named_by_a_server() {
    let Some(bench) = Bench::new() else { return };
    let program = bench.root().join("workload");
    std::fs::copy(Bench::workload(), &program).unwrap();
    let debug = bench.root().join("workload.debug");
    if !run(
        "objcopy",
        &["--only-keep-debug", text(&program), text(&debug)],
    ) || !run("strip", &["--strip-all", text(&program)])
    {
        return;
    }
    let Some(build_id) = Facts::read(&program).unwrap().build_id else {
        return skipped("the linker writes no build ids");
    };
    let (url, asked) = serve([(path_of(&build_id), std::fs::read(&debug).unwrap())].into());
    let cache = bench.root().join("cache");
    let configured = [
        "--debuginfod-urls",
        &url,
        "--debuginfod-cache",
        text(&cache),
    ];
    let is_main = |name: &Option<String>| {
        let name = name.as_ref();
        name.is_some_and(|name| name.contains("vramscope_workload::main"))
    };

    let (nameless, functions) = traced(&bench, &[], &program, &url);
    assert!(functions.iter().all(Option::is_none), "{functions:?}");
    assert!(asked.lock().unwrap().is_empty());
    let (stacks, functions) = traced(&bench, &configured, &program, &url);
    assert!(functions.iter().any(is_main), "{functions:?}");
    let elsewhere = bench.root().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let moved = elsewhere.join("workload");
    std::fs::rename(&program, &moved).unwrap();
    let (again, _) = traced(&bench, &configured, &moved, &url);
    assert_eq!(asked.lock().unwrap().len(), 1, "it is kept");
    assert_eq!(again, stacks);
    assert!(nameless.keys().eq(stacks.keys()));
}
