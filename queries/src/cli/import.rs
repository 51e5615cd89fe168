//! `vramscope import`: what it is asked for, how far it is, what it says at the end.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use vramscope_queries::import::{self, DataFolder, Error, Summary, Watch};

pub const HELP: &str = "\
Examples:
  vramscope import snapshot.pickle
  vramscope import rank0.pickle rank1.pickle --data ./oom
  vramscope import snapshot.json --data ./oom --json | jq .imported[0].memories
  vramscope sql --data ./vramscope-data -c 'SELECT device, reserved_bytes, stranded_bytes FROM allocator_samples'

Files are what torch.cuda.memory._dump_snapshot() writes: pickles of protocols 2 to 5, or the same
dictionary as JSON. A file is read as data: one that would make Python run code is refused.

The data folder is a trace: a folder of Parquet files per table. What is in it stays; the same
content imported again changes nothing. Nothing of a file is there before all of it is.

Exit codes: 0 all files imported, 1 a file was refused (the others are imported), 2 wrong usage,
130 cancelled.";

#[derive(Args)]
pub struct Arguments {
    /// Memory snapshots
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Folder to add the rows to; made if it is not there
    #[arg(long, value_name = "DIR", default_value = "./vramscope-data")]
    data: PathBuf,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
}

/// How long an import may take to stop once it is asked to.
const PATIENCE: Duration = Duration::from_secs(5);

/// A bar, on a terminal.
struct Bar {
    bar: Option<ProgressBar>,
    cancelled: Arc<AtomicBool>,
}

impl Bar {
    fn new(name: &str, cancelled: &Arc<AtomicBool>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(0);
            let template =
                "{spinner} {prefix} [{elapsed}] {bar:30} {percent}% {bytes_per_sec} {eta}";
            // The template is a constant and valid.
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.set_prefix(name.to_string());
            bar
        });
        Self {
            bar,
            cancelled: Arc::clone(cancelled),
        }
    }
}

impl Watch for Bar {
    fn start(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(bytes);
        }
    }

    fn advance(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

pub async fn run(arguments: Arguments) -> u8 {
    let cancelled = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&cancelled);
    let mut work = tokio::task::spawn_blocking(move || all(&arguments, &flag));
    let outcome = tokio::select! {
        outcome = &mut work => outcome,
        _ = tokio::signal::ctrl_c() => {
            cancelled.store(true, Ordering::Relaxed);
            match tokio::time::timeout(PATIENCE, work).await {
                Ok(outcome) => outcome,
                // What it leaves behind does not count, and the next import removes it.
                Err(_) => {
                    eprintln!("cancelled");
                    std::process::exit(130);
                }
            }
        }
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: the import ended early: {error}");
        1
    })
}

/// Imports every file; the exit code.
fn all(arguments: &Arguments, cancelled: &Arc<AtomicBool>) -> u8 {
    let folder = match DataFolder::open(&arguments.data) {
        Ok(folder) => folder,
        Err(error) => {
            eprintln!("error: {error}");
            return 1;
        }
    };
    let mut imported: Vec<Summary> = Vec::new();
    let mut refused = Vec::new();
    for file in &arguments.files {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let bar = Bar::new(&name, cancelled);
        let outcome = import::import(file, &folder, &bar);
        drop(bar);
        match outcome {
            Ok(summary) => {
                if !arguments.json {
                    print(&summary.to_text());
                }
                imported.push(summary);
            }
            Err(Error::Cancelled) => {
                eprintln!("cancelled");
                return 130;
            }
            Err(error) => {
                eprintln!("error: {error}");
                refused.push(json!({
                    "file": file.to_string_lossy(),
                    "error": error.to_string(),
                }));
            }
        }
    }
    let code = u8::from(!refused.is_empty());
    if arguments.json {
        let imported: Vec<_> = imported.iter().map(Summary::to_json).collect();
        let data = folder.path().to_string_lossy().into_owned();
        let all = json!({"data": data, "imported": imported, "refused": refused});
        print(&format!("{all:#}\n"));
    } else if !imported.is_empty() {
        eprintln!(
            "{} of {} files in {}; ask: vramscope sql --data {}",
            imported.len(),
            arguments.files.len(),
            folder.path().display(),
            folder.path().display(),
        );
    }
    code
}

fn print(text: &str) {
    // The reader of the pipe may have seen enough.
    let _ = std::io::stdout().write_all(text.as_bytes());
}
