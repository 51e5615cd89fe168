//! Which files are found and hooked: late and replaced libraries, other mount namespaces, overlays,
//! runtimes inside programs; and what the search costs.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use vramscope_agent::host::watch::{Sighting, Watch};

use crate::daemon::{Daemon, ledgers};
use crate::program::{Program, Runtime};
use crate::standins::Bench;

/// An interval in which nothing happens in these tests: only the kernel's word is left.
const NEVER: &str = "1h";

/// A program that ran before the agent loads the libraries later, from files that nobody named.
#[test]
fn a_late_dlopen_is_noticed_without_any_search() {
    let Some(bench) = Bench::new() else { return };
    let mut program = Program::start("", &Program::exe(), &bench.libraries(), &bench.books());
    let mut daemon = Daemon::new(&bench, "late", &["--scan-interval", NEVER]);
    daemon.start();
    program.load(Runtime::Shared);
    daemon.wait_hooked(&bench.libraries().to_string_lossy());
    program.tell("alloc 20 4096");
    let pid = program.pid();
    program.end();
    daemon.stop();
    let expected = ledgers(&bench, Some(pid));
    assert_eq!(expected[&(0, "device".into())].0, 20);
    assert_eq!(daemon.totals(Some(pid)), expected);
    assert_eq!(daemon.status()["discovery"]["watching"], true);
}

/// A child shares its parent's mappings: the kernel tells of none.
#[test]
fn a_forked_child_is_known_by_its_first_call() {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::new(&bench, "forked", &["--scan-interval", NEVER]);
    daemon.start();
    let mut program = Program::start("", &Program::exe(), &bench.libraries(), &bench.books());
    program.load(Runtime::Shared);
    daemon.wait_hooked(&bench.libraries().to_string_lossy());
    program.tell("fork 5 8192");
    program.end();
    daemon.stop();
    let expected = ledgers(&bench, None);
    assert_eq!(expected[&(0, "device".into())].0, 5);
    assert_eq!(daemon.totals(None), expected);
}

/// Where the kernel cannot be asked, the interval does it, and status says so.
#[test]
fn without_the_watch_the_interval_finds_it() {
    let Some(bench) = Bench::new() else { return };
    let mut program = Program::start("", &Program::exe(), &bench.libraries(), &bench.books());
    let options = ["--watch", "false", "--scan-interval", "100ms"];
    let mut daemon = Daemon::new(&bench, "interval", &options);
    daemon.start();
    program.load(Runtime::Shared);
    daemon.wait_hooked(&bench.libraries().to_string_lossy());
    program.tell("alloc 4 4096");
    let pid = program.pid();
    program.end();
    daemon.stop();
    assert_eq!(daemon.totals(Some(pid)), ledgers(&bench, Some(pid)));
    let status = daemon.status();
    assert_eq!(status["discovery"]["watching"], false);
    let how = status["discovery"]["watch"].as_str().unwrap();
    assert!(how.contains("watch = false"), "{how}");
}

/// Files that are gone from the disk, as after an upgrade, hooked by an agent that comes later.
#[test]
fn a_library_that_was_deleted_before_the_agent_came() {
    let Some(bench) = Bench::new() else { return };
    let mut program = Program::start("", &Program::exe(), &bench.libraries(), &bench.books());
    program.load(Runtime::Shared);
    for name in ["libcuda.so.1", "libcudart.so.13"] {
        std::fs::remove_file(bench.libraries().join(name)).unwrap();
    }
    let mut daemon = Daemon::new(&bench, "deleted", &["--scan-interval", NEVER]);
    daemon.start();
    daemon.wait_hooked(&bench.libraries().to_string_lossy());
    program.tell("alloc 6 4096");
    let pid = program.pid();
    program.end();
    daemon.stop();
    assert_eq!(daemon.totals(Some(pid)), ledgers(&bench, Some(pid)));
}

/// One file under three names is one file; another version is another.
#[test]
fn links_are_one_file_and_versions_are_two() {
    let Some(bench) = Bench::new() else { return };
    let linked = bench.root().join("linked");
    let other = bench.root().join("other");
    std::fs::create_dir(&linked).unwrap();
    for name in ["libcuda.so.1", "libcudart.so.13"] {
        let file = bench.libraries().join(name);
        std::fs::hard_link(&file, linked.join(name)).unwrap();
        std::os::unix::fs::symlink(&file, linked.join(format!("{name}.2"))).unwrap();
    }
    bench.install(&other);
    let mut daemon = Daemon::new(&bench, "versions", &["--scan-interval", NEVER]);
    daemon.start();
    let folders = [bench.libraries(), linked, other.clone()];
    let mut programs: Vec<Program> = folders
        .iter()
        .map(|folder| {
            let mut program = Program::start("", &Program::exe(), folder, &bench.books());
            program.load(Runtime::Shared);
            program
        })
        .collect();
    daemon.wait_hooked(&other.to_string_lossy());
    for program in &mut programs {
        daemon.wait_for("in the books", |status| {
            status["processes"].as_u64() >= Some(3)
        });
        program.tell("alloc 10 4096");
    }
    programs.into_iter().for_each(Program::end);
    daemon.stop();
    let expected = ledgers(&bench, None);
    assert_eq!(expected[&(0, "device".into())].0, 30);
    assert_eq!(daemon.totals(None), expected);
    let root = bench.root().to_string_lossy().into_owned();
    let hooked = libraries_below(&daemon, &root);
    assert_eq!(hooked.len(), 4, "{hooked:?}");
}

fn libraries_below(daemon: &Daemon<'_>, folder: &str) -> BTreeSet<String> {
    let status = daemon.status();
    let libraries = status["libraries"].as_array().unwrap();
    libraries
        .iter()
        .filter_map(|library| library.as_str())
        .filter(|library| library.contains(folder) && library.contains("/lib"))
        .filter(|library| library.contains(".so"))
        .map(str::to_string)
        .collect()
}

/// Runs a program in each place that `before` makes inside a mount namespace of its own, and
/// compares. Gives the libraries that were hooked.
fn in_namespaces(name: &str, bench: &Bench, places: &[(String, String)]) -> BTreeSet<String> {
    let mut daemon = Daemon::new(bench, name, &["--scan-interval", NEVER]);
    daemon.start();
    let mut programs = Vec::new();
    for (before, folder) in places {
        let line = Program::command_line(&Program::exe());
        let line = format!("exec unshare -m sh -c 'set -e; {before}\nexec {line}'");
        let mut program = Program::start_shell(&line, Path::new(folder), &bench.books());
        program.load(Runtime::Shared);
        let pid = program.pid();
        daemon.wait_for("seen", |_| daemon.coverage(pid).0 >= 2);
        programs.push(program);
    }
    for program in &mut programs {
        program.tell("alloc 10 4096");
    }
    programs.into_iter().for_each(Program::end);
    daemon.stop();
    let expected = ledgers(bench, None);
    assert_eq!(expected[&(0, "device".into())].0, 10 * places.len() as u64);
    assert_eq!(daemon.totals(None), expected);
    let root = bench.root().to_string_lossy().into_owned();
    libraries_below(&daemon, &root)
}

/// The libraries lie on a file system that the agent cannot see.
#[test]
fn a_private_mount() {
    let Some(bench) = Bench::new() else { return };
    let private = bench.root().join("private");
    std::fs::create_dir(&private).unwrap();
    let (from, to) = (bench.libraries(), private.to_string_lossy().into_owned());
    let before = format!("mount -t tmpfs none {to}; cp {}/* {to}", from.display());
    let hooked = in_namespaces("private", &bench, &[(before, to)]);
    assert_eq!(hooked.len(), 2, "{hooked:?}");
    assert!(!private.join("libcuda.so.1").exists());
}

/// What only an ended container could reach holds no file system: the hooks are let go.
#[test]
fn a_container_that_is_gone_is_let_go() {
    let Some(bench) = Bench::new() else { return };
    let private = bench.root().join("private");
    std::fs::create_dir(&private).unwrap();
    let options = ["--scan-interval", "100ms", "--rescan-interval", "500ms"];
    let mut daemon = Daemon::new(&bench, "let-go", &options);
    daemon.start();
    let links = daemon.links();
    let run = Program::command_line(&Program::exe());
    let line = format!(
        "exec unshare -m sh -c 'set -e; mount -t tmpfs none {to}; cp {from}/* {to}\nexec {run}'",
        to = private.display(),
        from = bench.libraries().display(),
    );
    let mut program = Program::start_shell(&line, &private, &bench.books());
    program.load(Runtime::Shared);
    daemon.wait_hooked(&private.to_string_lossy());
    assert!(daemon.links() > links);
    program.end();
    daemon.wait_for("let go", |_| daemon.links() == links);
    daemon.stop();
}

/// Makes an overlay over `lower` at a place of its own.
fn overlay(bench: &Bench, lower: &str, number: u32) -> (String, String) {
    let top = bench.root().join(format!("overlay{number}"));
    for folder in ["upper", "work", "merged"] {
        std::fs::create_dir_all(top.join(folder)).unwrap();
    }
    let top = top.to_string_lossy();
    let mount = format!(
        "mount -t overlay none -o lowerdir={lower},upperdir={top}/upper,workdir={top}/work {top}/merged"
    );
    (mount, format!("{top}/merged"))
}

/// Two containers of one image: two inodes to look at, one to hook.
#[test]
fn one_file_through_two_overlays_is_hooked_once() {
    let Some(bench) = Bench::new() else { return };
    let lower = bench.libraries().to_string_lossy().into_owned();
    let places = [overlay(&bench, &lower, 1), overlay(&bench, &lower, 2)];
    let hooked = in_namespaces("overlay", &bench, &places);
    assert_eq!(hooked.len(), 2, "{hooked:?}");
}

/// As above, with one program in a root folder of its own: its mount points are not the agent's.
#[test]
fn an_overlay_inside_another_root() {
    let Some(bench) = Bench::new() else { return };
    let lower = bench.libraries().to_string_lossy().into_owned();
    let root = bench.root().join("newroot");
    let inside = bench.root().join("inside");
    std::fs::create_dir(&root).unwrap();
    std::fs::create_dir(&inside).unwrap();
    let (root, inside) = (root.display(), inside.to_string_lossy().into_owned());
    let (plain, merged) = overlay(&bench, &lower, 2);
    let (mount, at) = overlay(&bench, &lower, 1);
    let run = Program::command_line(&Program::exe());
    let before = format!(
        "{mount}; mount --rbind / {root}; mount --move {at} {root}{inside}; exec chroot {root} {run}"
    );
    let places = [(before, inside), (plain, merged)];
    let hooked = in_namespaces("newroot", &bench, &places);
    assert_eq!(hooked.len(), 2, "{hooked:?}");
}

/// The layer lies on another file system and was unmounted since: no path leads to it, so that
/// only the kernel can tell that both are one.
#[test]
fn one_file_through_two_overlays_whose_layer_nobody_can_reach() {
    let Some(bench) = Bench::new() else { return };
    let hidden = bench.root().join("hidden");
    std::fs::create_dir(&hidden).unwrap();
    let hidden = hidden.to_string_lossy().into_owned();
    // Both in one namespace, made by the first and entered by the second: the layer is one file.
    let (first, folder) = overlay(&bench, &hidden, 1);
    let (second, other) = overlay(&bench, &hidden, 2);
    let before = format!(
        "mount -t tmpfs none {hidden}; cp {}/* {hidden}; {first}; {second}; umount -l {hidden}",
        bench.libraries().display()
    );
    let mut daemon = Daemon::new(&bench, "hidden", &["--scan-interval", NEVER]);
    daemon.start();
    let run = Program::command_line(&Program::exe());
    let line = format!("exec unshare -m sh -c 'set -e; {before}\nexec {run}'");
    let mut one = Program::start_shell(&line, Path::new(&folder), &bench.books());
    one.load(Runtime::Shared);
    daemon.wait_for("seen", |_| daemon.coverage(one.pid()).0 >= 2);
    let line = format!("exec nsenter -m -t {} {run}", one.pid());
    let mut two = Program::start_shell(&line, Path::new(&other), &bench.books());
    two.load(Runtime::Shared);
    daemon.wait_for("seen", |_| daemon.coverage(two.pid()).0 >= 2);
    two.tell("alloc 10 4096");
    // An agent that comes after it finds hooks under one of the two identities.
    daemon.stop();
    let links = daemon.links();
    daemon.start();
    assert_eq!(daemon.links(), links);
    for program in [&mut one, &mut two] {
        program.tell("alloc 10 4096");
    }
    one.end();
    two.end();
    daemon.stop();
    let expected = ledgers(&bench, None);
    assert_eq!(expected[&(0, "device".into())].0, 30);
    assert_eq!(daemon.totals(None), expected);
    let root = bench.root().to_string_lossy().into_owned();
    let hooked = libraries_below(&daemon, &root);
    assert_eq!(hooked.len(), 2, "{hooked:?}");
}

/// A program with a runtime linked into it: both layers are seen, and a byte counts once.
#[test]
fn a_runtime_inside_a_program() {
    let Some(bench) = Bench::new() else { return };
    let mut daemon = Daemon::new(&bench, "inside", &["--scan-interval", NEVER]);
    daemon.start();
    let exe = Program::copy(&bench, "with-runtime");
    let mut program = Program::start("", &exe, &bench.libraries(), &bench.books());
    program.load(Runtime::Inside);
    let name = exe.to_string_lossy().into_owned();
    daemon.wait_for("hooked the program", |status| {
        let libraries = status["libraries"].as_array();
        libraries.is_some_and(|l| l.iter().any(|l| *l == name.as_str()))
    });
    program.tell("alloc 10 4096");
    let pid = program.pid();
    program.end();
    daemon.stop();
    let expected = ledgers(&bench, Some(pid));
    assert_eq!(expected[&(0, "device".into())].0, 10);
    assert_eq!(daemon.totals(Some(pid)), expected);
    assert_eq!(calls(&daemon, pid, "runtime", "cudaMalloc"), 10);
    assert_eq!(calls(&daemon, pid, "driver", "cuMemAlloc_v2"), 10);
}

fn calls(daemon: &Daemon<'_>, pid: u32, layer: &str, api: &str) -> usize {
    use arrow::array::AsArray;
    use arrow::datatypes::Int32Type;
    let batches = daemon.rows(vramscope_wire::Table::AllocEvents);
    batches
        .iter()
        .map(|batch| {
            let column = |name: &str| batch.column_by_name(name).unwrap();
            (0..batch.num_rows())
                .filter(|row| {
                    column("pid").as_primitive::<Int32Type>().value(*row) as u32 == pid
                        && column("layer").as_string::<i32>().value(*row) == layer
                        && column("api").as_string::<i32>().value(*row) == api
                })
                .count()
        })
        .sum()
}

#[test]
fn a_stripped_program_says_so() {
    let Some(bench) = Bench::new() else { return };
    let stripped = bench.root().join("stripped");
    let made = Command::new("strip")
        .arg("--strip-all")
        .arg("-o")
        .args([&stripped, &Program::exe()])
        .stderr(Stdio::null())
        .status();
    if !made.is_ok_and(|status| status.success()) {
        let _ = std::io::Write::write_all(&mut std::io::stderr(), b"SKIPPED: no strip here\n");
        return;
    }
    let mut daemon = Daemon::new(&bench, "stripped", &["--scan-interval", NEVER]);
    daemon.start();
    let mut program = Program::start("", &stripped, &bench.libraries(), &bench.books());
    program.load(Runtime::Inside);
    let pid = program.pid();
    daemon.wait_for("seen", |_| daemon.coverage(pid).0 > 0);
    program.tell("alloc 10 4096");
    program.end();
    daemon.stop();
    assert_eq!(daemon.totals(Some(pid)), ledgers(&bench, Some(pid)));
    let (_, refused) = daemon.coverage(pid);
    let said = refused.iter().any(|(library, symbol, reason)| {
        *library == stripped.to_string_lossy()
            && symbol == "*"
            && reason.contains("no symbol table")
    });
    assert!(said, "{refused:?}");
}

/// A process that is over at once leaves behind what it ran and what it mapped.
#[test]
fn the_watch_remembers_programs_that_are_over() {
    let Some(bench) = Bench::new() else { return };
    let (tell, told) = std::sync::mpsc::channel();
    let _watch = Watch::start(move |sighting| {
        let _ = tell.send(sighting);
    })
    .unwrap();
    let library = bench.libraries().join("libcuda.so.1");
    let mut child = Command::new("/bin/sh")
        .args(["-c", "exit 0"])
        .env("LD_PRELOAD", &library)
        .spawn()
        .unwrap();
    child.wait().unwrap();
    let path = library.to_string_lossy().into_owned();
    let mapped = loop {
        match told.recv_timeout(Duration::from_secs(60)).unwrap() {
            Sighting::Mapped(mapped) if mapped.pid == child.id() => break mapped,
            _ => {}
        }
    };
    let shell = std::fs::canonicalize("/bin/sh").unwrap();
    assert_eq!(mapped.exe.as_deref(), shell.to_str());
    let found = mapped.mappings.iter().find(|mapping| mapping.path == path);
    assert!(
        found.is_some_and(|mapping| mapping.executable),
        "{mapped:?}"
    );
}

/// While the agent cannot read, the kernel's rings run over: it is counted, and everything is
/// searched.
#[test]
fn mappings_that_were_lost_are_searched_for() {
    let Some(bench) = Bench::new() else { return };
    let mut program = Program::start("", &Program::exe(), &bench.libraries(), &bench.books());
    let mut daemon = Daemon::new(&bench, "overflow", &["--scan-interval", NEVER]);
    daemon.start();
    program.tell("alloc 0 0");
    daemon.signal(libc::SIGSTOP);
    // Some 450 mappings fill a ring, and each program makes several.
    let many = "for i in $(seq 400); do taskset -c 0 true; taskset -c 1 true; done";
    let ran = Command::new("sh")
        .args(["-c", many])
        .stderr(Stdio::null())
        .status();
    assert!(ran.is_ok());
    program.load(Runtime::Shared);
    daemon.signal(libc::SIGCONT);
    let folder = bench.libraries().to_string_lossy().into_owned();
    let status = daemon.wait_for("hooked after the overflow", |status| {
        // The next record carries the number of those that were lost.
        let _ = Command::new("sh")
            .args(["-c", "taskset -c 0 true; taskset -c 1 true"])
            .stderr(Stdio::null())
            .status();
        let libraries = status["libraries"].as_array();
        libraries.is_some_and(|l| {
            l.iter()
                .filter(|l| l.as_str().is_some_and(|l| l.contains(&folder)))
                .count()
                == 2
        })
    });
    assert!(
        status["discovery"]["watch_lost"].as_u64() > Some(0),
        "{status:#}"
    );
    program.tell("alloc 10 4096");
    let pid = program.pid();
    program.end();
    daemon.stop();
    assert_eq!(daemon.totals(Some(pid)), ledgers(&bench, Some(pid)));
}

/// Processes without CUDA are read once, and then in a slow round: not in every interval.
#[test]
fn processes_without_cuda_are_left_alone() {
    const SLEEPERS: usize = 200;
    let Some(bench) = Bench::new() else { return };
    let mut sleepers: Vec<_> = (0..SLEEPERS)
        .map(|_| Command::new("sleep").arg("3600").spawn().unwrap())
        .collect();
    let mut daemon = Daemon::new(&bench, "sleepers", &["--scan-interval", "50ms"]);
    daemon.start();
    let number = |status: &serde_json::Value, name: &str| {
        status["discovery"][name].as_u64().unwrap_or_default()
    };
    let first = daemon.wait_for("searched", |status| number(status, "scans") >= 1);
    let enough = number(&first, "scans") + 20;
    let last = daemon.wait_for("searched", |status| number(status, "scans") >= enough);
    for sleeper in &mut sleepers {
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
    daemon.stop();
    let scans = number(&last, "scans") - number(&first, "scans");
    let read = number(&last, "maps_read") - number(&first, "maps_read");
    // All of them in each search would be this many; other programs of the host come on top of
    // what was read.
    let all = scans * SLEEPERS as u64;
    assert!(
        read < all / 4,
        "{read} of {all} were read in {scans} searches"
    );
    assert_eq!(last["discovery"]["watching"], true);
}
