//! Container and pod in the rows of `processes`, from a real cgroup and a real environment.

use std::io::Write;
use std::path::{Path, PathBuf};

use arrow::array::{Array, AsArray};
use arrow::datatypes::Int32Type;
use vramscope_wire::Table;

use crate::daemon::Daemon;
use crate::program::{Program, Runtime};
use crate::standins::Bench;

/// A cgroup as Kubernetes makes it, removed in the end.
struct Cgroup {
    /// From the outermost that we made to the innermost.
    made: Vec<PathBuf>,
}

impl Cgroup {
    fn make(parts: &[&str]) -> Option<Self> {
        let hierarchies = [
            "/sys/fs/cgroup",
            "/sys/fs/cgroup/unified",
            "/sys/fs/cgroup/pids",
        ];
        let root = hierarchies
            .iter()
            .find(|root| Path::new(root).join("cgroup.procs").exists())?;
        let mut at = PathBuf::from(root);
        let mut made = Vec::new();
        for part in parts {
            at.push(part);
            if std::fs::create_dir(&at).is_err() {
                made.iter().rev().for_each(|path| {
                    let _ = std::fs::remove_dir(path);
                });
                return None;
            }
            made.push(at.clone());
        }
        Some(Self { made })
    }

    fn processes(&self) -> String {
        let innermost = self.made.last().unwrap().join("cgroup.procs");
        innermost.to_string_lossy().into_owned()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for path in self.made.iter().rev() {
            let _ = std::fs::remove_dir(path);
        }
    }
}

#[test]
fn a_pod_is_in_the_rows_of_its_processes() {
    let Some(bench) = Bench::new() else { return };
    let id = format!("{:064x}", std::process::id());
    let slice = format!("kubepods-test{}.slice", std::process::id());
    let pod = "kubepods-burstable-pod0b3f8b52_9f4e_4d0e_a1c5_6f6e0f8a1234.slice";
    let scope = format!("cri-containerd-{id}.scope");
    let Some(cgroup) = Cgroup::make(&[&slice, pod, &scope]) else {
        let _ = writeln!(std::io::stderr(), "SKIPPED: cgroups cannot be made here");
        return;
    };
    let mut daemon = Daemon::new(&bench, "pod", &["--scan-interval", "1h"]);
    daemon.start();
    let before = format!(
        "echo $$ > {}; export POD_NAME=llama-7 POD_NAMESPACE=inference HOSTNAME=not-this",
        cgroup.processes()
    );
    let mut inside = Program::start(&before, &Program::exe(), &bench.libraries(), &bench.books());
    inside.load(Runtime::Shared);
    let unset = "unset POD_NAME POD_NAMESPACE";
    let mut outside = Program::start(unset, &Program::exe(), &bench.libraries(), &bench.books());
    outside.load(Runtime::Shared);
    for program in [&inside, &outside] {
        daemon.wait_for("seen", |_| daemon.coverage(program.pid()).0 > 0);
    }
    let pids = [inside.pid(), outside.pid()];
    inside.end();
    outside.end();
    daemon.stop();
    let found = pids.map(|pid| columns(&daemon, pid));
    let text = |text: &str| Some(text.to_string());
    assert_eq!(found[0], [Some(id), text("llama-7"), text("inference")]);
    assert_eq!(found[1], [None, None, None], "unknown is NULL");
}

/// What the last row of a process has.
fn columns(daemon: &Daemon<'_>, pid: u32) -> [Option<String>; 3] {
    let mut last = [None, None, None];
    for batch in daemon.rows(Table::Processes) {
        let pids = batch.column_by_name("pid").unwrap();
        for row in 0..batch.num_rows() {
            if pids.as_primitive::<Int32Type>().value(row) as u32 == pid {
                last = ["container_id", "pod", "namespace"].map(|name| {
                    let column = batch.column_by_name(name).unwrap().as_string::<i32>();
                    (!column.is_null(row)).then(|| column.value(row).to_string())
                });
            }
        }
    }
    last
}
