//! The load of serving engines: what a stand-in served against what the agent wrote.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use arrow::array::{Array, AsArray};
use arrow::datatypes::{Float64Type, Int32Type, Int64Type};
use serde_json::Value;
use vramscope_wire::Table;

use crate::daemon::Daemon;
use crate::engine::{Engine, Manner};
use crate::program::{Program, Runtime};
use crate::standins::Bench;

/// A row of `traffic`, without what other tests are about.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    endpoint: String,
    pid: Option<i32>,
    engine: String,
    model: Option<String>,
    /// running, waiting, completed, prompt tokens, generated tokens, preemptions.
    counts: [Option<i64>; 6],
    usage: Option<f64>,
    /// tokens a page, total, used, cached, free.
    pages: [Option<i64>; 5],
}

/// In the order they were written.
fn rows(daemon: &Daemon<'_>) -> Vec<Row> {
    let mut rows = Vec::new();
    for batch in daemon.rows(Table::Traffic) {
        let column = |name: &str| batch.column_by_name(name).unwrap();
        for row in 0..batch.num_rows() {
            let text = |name: &str| {
                let texts = column(name).as_string::<i32>();
                texts.is_valid(row).then(|| texts.value(row).to_string())
            };
            let long = |name: &str| {
                let longs = column(name).as_primitive::<Int64Type>();
                longs.is_valid(row).then(|| longs.value(row))
            };
            let pids = column("pid").as_primitive::<Int32Type>();
            let usage = column("kv_usage_ratio").as_primitive::<Float64Type>();
            assert_eq!(long("process_id").is_some(), pids.is_valid(row));
            rows.push(Row {
                endpoint: text("endpoint").unwrap(),
                pid: pids.is_valid(row).then(|| pids.value(row)),
                engine: text("engine").unwrap(),
                model: text("model"),
                counts: [
                    "running",
                    "waiting",
                    "completed_total",
                    "prompt_tokens_total",
                    "generation_tokens_total",
                    "preemptions_total",
                ]
                .map(long),
                usage: usage.is_valid(row).then(|| usage.value(row)),
                pages: [
                    "kv_page_tokens",
                    "kv_total_pages",
                    "kv_used_pages",
                    "kv_cached_pages",
                    "kv_free_pages",
                ]
                .map(long),
            });
        }
    }
    rows
}

/// The n-th page of a vLLM, among metrics that nobody wants.
fn vllm(n: u64) -> String {
    let buckets: String = (0..500)
        .map(|i| {
            format!("vllm:e2e_request_latency_seconds_bucket{{le=\"{i}\",model_name=\"m\"}} {n}\n")
        })
        .collect();
    format!(
        "# TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"m\"}} {running}.0\n\
         vllm:num_requests_waiting{{engine=\"0\",model_name=\"m\"}} 0.0\n\
         {buckets}\
         vllm:kv_cache_usage_perc{{engine=\"0\",model_name=\"m\"}} {usage}\n\
         vllm:request_success_total{{engine=\"0\",finished_reason=\"stop\",model_name=\"m\"}} {stopped}.0\n\
         vllm:request_success_total{{engine=\"0\",finished_reason=\"length\",model_name=\"m\"}} {n}.0\n\
         vllm:prompt_tokens_total{{engine=\"0\",model_name=\"m\"}} {prompt}\n\
         vllm:generation_tokens_total{{engine=\"0\",model_name=\"m\"}} 7.5e+06\n\
         vllm:cache_config_info{{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"1001\"}} 1.0\n",
        running = n % 7,
        usage = (n % 1000) as f64 / 1000.0,
        stopped = 10 * n,
        prompt = 1000 * n,
    )
}

/// What a person reads in that page.
fn vllm_row(n: i64, endpoint: &str) -> Row {
    Row {
        endpoint: endpoint.to_string(),
        pid: None,
        engine: "vllm".into(),
        model: Some("m".into()),
        counts: [
            Some(n % 7),
            Some(0),
            Some(11 * n),
            Some(1000 * n),
            Some(7_500_000),
            None,
        ],
        usage: Some((n % 1000) as f64 / 1000.0),
        pages: [Some(16), Some(1001), Some(n % 1000), None, None],
    }
}

fn sglang(n: u64) -> String {
    let labels = "engine_type=\"unified\",model_name=\"s\",tp_rank=\"0\"";
    format!(
        "sglang:num_running_reqs{{{labels},priority=\"\"}} 4\n\
         sglang:num_queue_reqs{{{labels}}} {n}\n\
         sglang:max_total_num_tokens{{{labels}}} 8000\n\
         sglang:page_size{{{labels}}} 8\n\
         sglang:kv_used_tokens{{{labels}}} 1600\n\
         sglang:kv_evictable_tokens{{{labels}}} 2400\n\
         sglang:kv_available_tokens{{{labels}}} 4000\n\
         sglang:token_usage{{{labels}}} 0.2\n"
    )
}

fn of_pages(status: &Value, url: &str) -> Value {
    let pages = status["traffic"]["pages"].as_array();
    let found = pages.and_then(|pages| pages.iter().find(|page| page["url"] == url));
    found.cloned().unwrap_or(Value::Null)
}

/// Every page that an engine served is one row with its figures, in its order; the engine had one
/// connection at a time, and no more than one for each answer.
#[test]
fn what_engines_serve_is_in_the_spool() {
    let Some(bench) = Bench::new() else { return };
    let one = Engine::start("127.0.0.1:0", vllm);
    let two = Engine::start("127.0.0.1:0", sglang);
    let urls = format!("{},http://{}", one.url(), two.address);
    let options = ["--traffic", &urls, "--traffic-interval", "250ms"];
    let mut daemon = Daemon::new(&bench, "traffic", &options);
    daemon.start();
    let status = daemon.wait_for("some answers of both", |status| {
        let answers = |url: &str| of_pages(status, url)["scrapes"].as_u64() >= Some(5);
        answers(&one.url()) && answers(&two.url())
    });
    assert_eq!(of_pages(&status, &one.url())["engine"], "vllm");
    let printed = daemon.run("status");
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    assert!(
        printed.contains(&format!("{} (vllm", one.url())),
        "{printed}"
    );
    daemon.stop();

    let rows = rows(&daemon);
    let of_one: Vec<_> = rows
        .iter()
        .filter(|row| row.endpoint == one.url())
        .collect();
    assert!(of_one.len() >= 3, "{rows:?}");
    // An answer may have come too late on a busy machine, and the last may have come too late for
    // the end: rows may be missing, and none may be wrong, doubled or out of order.
    let mut last = 0;
    for row in &of_one {
        let n = row.counts[3].unwrap() / 1000;
        assert!(n > last && n <= one.served() as i64, "{n} after {last}");
        assert_eq!(**row, vllm_row(n, &one.url()));
        last = n;
    }
    let failures = of_pages(&daemon.status(), &one.url())["failures"]
        .as_u64()
        .unwrap();
    assert!(of_one.len() as u64 + failures + 1 >= one.served());
    assert_eq!(one.connections().1, 1, "one connection at a time");

    let of_two = rows.iter().find(|row| row.endpoint == two.url()).unwrap();
    assert_eq!(
        (of_two.engine.as_str(), of_two.counts[0]),
        ("sglang", Some(4))
    );
    assert_eq!(
        of_two.pages,
        [Some(8), Some(1000), Some(200), Some(300), Some(500)]
    );
    assert_eq!(of_two.counts[2], None, "not on the page");
}

/// Whatever comes for an answer: it is counted, the agent goes on, takes no more memory than a page
/// may have, asks more rarely, and reads the engine again once it answers well.
#[test]
fn bad_answers_are_counted_and_do_no_harm() {
    let Some(bench) = Bench::new() else { return };
    let manners = [
        (Manner::NotFound, "404"),
        (Manner::Stranger, "no metrics of a serving engine"),
        (Manner::Slow, "timeout"),
        (Manner::Endless, ""),
        (Manner::Huge, ""),
        (Manner::Broken, ""),
        (Manner::LongHead, ""),
        (Manner::Cut, ""),
        (Manner::Silent, "timeout"),
    ];
    let engines = manners.map(|(manner, _)| {
        let engine = Engine::start("127.0.0.1:0", vllm);
        engine.be(manner);
        engine
    });
    let good = Engine::start("127.0.0.1:0", sglang);
    let mut urls: Vec<_> = engines.iter().map(Engine::url).collect();
    urls.push(good.url());
    // Nobody listens there.
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}/metrics", listener.local_addr().unwrap())
    };
    urls.push(closed.clone());
    let options = ["--traffic", &urls.join(","), "--traffic-interval", "300ms"];
    let mut daemon = Daemon::new(&bench, "traffic-bad", &options);
    daemon.start();
    let status = daemon.wait_for("every page failed, and the good one did not", |status| {
        let failed = |url: &String| of_pages(status, url)["failures"].as_u64() >= Some(1);
        let bad_ones = engines.iter().map(Engine::url).chain([closed.clone()]);
        bad_ones.into_iter().all(|url| failed(&url))
            && of_pages(status, &good.url())["scrapes"].as_u64() >= Some(2)
    });
    for ((manner, part), engine) in manners.iter().zip(&engines) {
        let page = of_pages(&status, &engine.url());
        let error = page["error"].as_str().unwrap_or_default();
        assert!(
            !error.is_empty() && error.contains(part),
            "{manner:?}: {page}"
        );
    }
    let memory = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let peak_kib: u64 = memory
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|text| text.trim().trim_end_matches(" kB").parse().ok())
        .unwrap();
    // Without the limit the endless page would have filled whatever there is.
    assert!(peak_kib < 400 << 10, "{peak_kib} KiB");

    engines.iter().for_each(|engine| engine.be(Manner::Page));
    daemon.wait_for("all answer well", |status| {
        let is_well = |engine: &Engine| {
            let page = of_pages(status, &engine.url());
            page["engine"] == "vllm" && page["error"].is_null()
        };
        engines.iter().all(is_well)
    });
    daemon.stop();
    let rows = rows(&daemon);
    for engine in &engines {
        let first = rows
            .iter()
            .find(|row| row.endpoint == engine.url())
            .unwrap();
        let n = first.counts[3].unwrap() / 1000;
        assert_eq!(*first, vllm_row(n, &engine.url()));
    }
    assert!(rows.iter().any(|row| row.endpoint == good.url()));
}

#[test]
#[ignore = "the engine that other tests run"]
fn serve_as_told() {
    let address = std::env::var("FAKE_ENGINE").unwrap();
    // In a network namespace of its own this is down at first.
    raise_loopback();
    let engine = Engine::start(&address, vllm);
    println!("serving {}", engine.address);
    crate::program::run_as_told();
}

/// What `ip link set lo up` does.
fn raise_loopback() {
    // SAFETY: plain data, and system calls on a socket of our own with a structure that outlives them.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
        assert!(socket >= 0);
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        assert_eq!(libc::ioctl(socket, libc::SIOCGIFFLAGS, &raw mut request), 0);
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
        assert_eq!(libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw mut request), 0);
        libc::close(socket);
    }
}

/// A traced process in a network namespace of its own, on a port that engines serve on: found without
/// any configuration, and its rows are about that process.
#[test]
fn a_traced_engine_in_a_network_namespace_of_its_own_is_found() {
    let Some(bench) = Bench::new() else { return };
    let line = format!(
        "FAKE_ENGINE=127.0.0.1:8000 exec unshare --net {} --ignored --exact traffic::serve_as_told --nocapture",
        Program::exe().display()
    );
    let mut program = Program::start_shell(&line, &bench.libraries(), &bench.books());
    program.load(Runtime::Shared);
    let mut daemon = Daemon::hooking(&bench, "traffic-net", &["--traffic-interval", "250ms"]);
    daemon.start();
    program.tell("alloc 1 4096");
    let pid = program.pid() as i32;
    daemon.wait_for("rows of the engine", |status| {
        let pages = status["traffic"]["pages"].as_array();
        let ours = |page: &Value| page["pid"] == pid && page["scrapes"].as_u64() >= Some(3);
        pages.is_some_and(|pages| pages.iter().any(ours))
    });
    // The way into that namespace and back is for one thread: the agent's others are where they were.
    let namespace = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    assert_eq!(namespace(daemon.pid()), namespace(std::process::id()));
    assert_ne!(namespace(pid as u32), namespace(std::process::id()));
    program.end();
    daemon.stop();
    let rows = rows(&daemon);
    let ours: Vec<_> = rows.iter().filter(|row| row.pid == Some(pid)).collect();
    assert!(ours.len() >= 2, "{rows:?}");
    for row in ours {
        let n = row.counts[3].unwrap() / 1000;
        let expected = Row {
            pid: Some(pid),
            ..vllm_row(n, "http://127.0.0.1:8000/metrics")
        };
        assert_eq!(*row, expected);
    }
}

/// An engine that is known by its command line alone is found on the only port it listens on; with
/// the switch thrown it is not.
#[test]
fn an_engine_is_known_by_its_command_line() {
    let Some(bench) = Bench::new() else { return };
    for (name, options, is_asked) in [
        ("traffic-name", &["--traffic-interval", "250ms"][..], true),
        (
            "traffic-not",
            &["--traffic-interval", "250ms", "--no-traffic"],
            false,
        ),
    ] {
        let mut engine = Command::new(Program::exe())
            .arg0("VLLM::APIServer_0")
            .args([
                "--ignored",
                "--exact",
                "traffic::serve_as_told",
                "--nocapture",
            ])
            .env("FAKE_ENGINE", "127.0.0.1:0")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut daemon = Daemon::new(&bench, name, options);
        daemon.start();
        let pid = engine.id();
        if is_asked {
            daemon.wait_for("rows of the engine", |status| {
                let pages = status["traffic"]["pages"].as_array();
                let ours = |page: &Value| page["pid"] == pid && page["engine"] == "vllm";
                pages.is_some_and(|pages| pages.iter().any(ours))
                    && status["traffic"]["rows"].as_u64() >= Some(1)
            });
        } else {
            std::thread::sleep(Duration::from_millis(600));
        }
        daemon.stop();
        engine.kill().unwrap();
        engine.wait().unwrap();
        let found = rows(&daemon)
            .iter()
            .filter(|row| row.pid == Some(pid as i32))
            .count();
        assert_eq!(found > 0, is_asked);
        if !is_asked {
            assert_eq!(daemon.status()["traffic"], Value::Null);
        }
    }
}
