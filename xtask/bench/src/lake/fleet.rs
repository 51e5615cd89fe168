//! Ten thousand agents with little to say: each sends a small batch every ten seconds, and now and
//! then all of them lose their connections and come back at once.

use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::collector::{Collector, Starter};
use super::ingest::{batches, runtime, start};
use super::load::{Load, Phase};
use super::progress;
use super::sql::Sql;

/// Agents that share a connection: each has a stream of its own in it. Servers allow 100 to 200.
const SHARING: usize = 100;
const WINDOW: usize = 4;
const DRAIN: Duration = Duration::from_secs(300);

/// Behaves as thousands of agents.
#[derive(Debug, Args)]
pub struct Fleet {
    /// The collector's program
    #[arg(long, value_name = "PATH")]
    collector: PathBuf,
    /// Where its data go; must be empty or missing
    #[arg(long, value_name = "DIR")]
    folder: PathBuf,
    /// Agents, each with a stream
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    agents: usize,
    /// Rows of a batch of events
    #[arg(long, value_name = "N", default_value_t = 60)]
    rows: usize,
    /// Seconds between two batches of an agent
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    every: u64,
    /// How long
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    seconds: u64,
    /// How often all agents drop their connections and come back at once
    #[arg(long, value_name = "N", default_value_t = 3)]
    storms: u64,
    /// A flag of `serve`; can be given several times
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    serve_flag: Vec<String>,
}

/// The command. Gives the figures as JSON.
pub fn run(options: &Fleet) -> Result<Value> {
    runtime()?.block_on(measure(options))
}

/// Memory and files at one moment.
#[derive(Debug, Clone, Copy)]
struct Sample {
    rss: u64,
    /// Data files below the tables' folders.
    on_disk: u64,
    /// Those that the tables consist of, as `status` tells.
    live: Option<u64>,
}

/// On another thread: the agents' is not to stand still meanwhile.
async fn sample(starter: &Starter, collector: &Collector, data: &Path) -> Result<Sample> {
    let rss = collector.memory()?.0;
    let (starter, data) = (starter.clone(), data.to_path_buf());
    let count = move || (data_files(&data), live_files(&starter, &data));
    let (on_disk, live) = tokio::task::spawn_blocking(count).await?;
    Ok(Sample { rss, on_disk, live })
}

async fn measure(options: &Fleet) -> Result<Value> {
    let (starter, collector) = start(&options.collector, &options.folder, &options.serve_flag)?;
    let data = options.folder.join("data");
    let load = Load::new(
        &collector.address,
        batches(options.rows)?,
        options.agents,
        WINDOW,
        SHARING,
    )?;
    let mut tasks = load.start();
    let mut sql = Sql::connect(&collector.address).await?;
    let every = Duration::from_secs(options.every.max(1));
    let began = Instant::now();
    load.enter(Phase::Paced(every, began));
    let mut storms = 0;
    let mut half = None;
    let mut most_live = None;
    for second in 0..options.seconds {
        progress(second, options.seconds, "agents send");
        tokio::time::sleep_until(began + Duration::from_secs(second + 1)).await;
        // The storms are spread evenly, none at the end.
        if storms < options.storms
            && second * (options.storms + 1) >= options.seconds * (storms + 1)
        {
            storms += 1;
            load.storm();
        }
        // Counting files takes a moment from the collector.
        let is_half = second + 1 == options.seconds.div_ceil(2);
        if second % 30 == 29 || is_half {
            let now = sample(&starter, &collector, &data).await?;
            most_live = most_live.max(now.live);
            if is_half {
                half = Some(now);
            }
        }
    }
    load.enter(Phase::Rest);
    let seconds = began.elapsed().as_secs_f64();
    let acknowledged = load.acknowledged.load(Ordering::Relaxed);
    let end = sample(&starter, &collector, &data).await?;
    most_live = most_live.max(end.live);
    let drained = load.drain(&mut sql, DRAIN).await?;
    load.enter(Phase::End);
    let ending = async { while tasks.join_next().await.is_some() {} };
    let ended = tokio::time::timeout(Duration::from_secs(60), ending).await;
    let compared = match (drained, &ended) {
        (Some(_), Ok(())) => Some(load.compare(&mut sql).await?),
        _ => None,
    };
    let (_, peak) = collector.memory()?;
    let status = collector.stop()?;
    if !status.success() {
        bail!("the collector did not stop in order: {status}");
    }
    let half = half.context("too short to have a half")?;
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    Ok(json!({
        "agents": options.agents,
        "batches_per_second": acknowledged as f64 / seconds,
        "offered_batches_per_second": options.agents as f64 / every.as_secs_f64(),
        "ack_p50_ms": load.latencies.quantile_ms(0.5),
        "ack_p99_ms": load.latencies.quantile_ms(0.99),
        "peak_bytes": peak,
        "half_bytes": half.rss,
        "end_bytes": end.rss,
        "files_on_disk_half": half.on_disk,
        "files_on_disk_end": end.on_disk,
        "live_files_half": half.live,
        "live_files_end": end.live,
        "live_files_most": most_live,
        "storms": storms,
        "acknowledged_batches": count(&load.acknowledged),
        "put_off": count(&load.put_off),
        "duplicates": count(&load.duplicates),
        "refused": count(&load.rejected),
        "broken_streams": count(&load.broken),
        "trouble": *load.trouble.lock().unwrap_or_else(PoisonError::into_inner),
        "drain_seconds": drained.map(|took| took.as_secs_f64()),
        "lost": compared.as_ref().map(|compared| compared.lost),
        "doubled": compared.as_ref().map(|compared| compared.doubled),
        "changed": compared.as_ref().map(|compared| compared.changed),
    }))
}

/// Parquet files below a data folder, but for what does not belong to a table.
fn data_files(data: &Path) -> u64 {
    let mut files = 0;
    let mut folders = vec![data.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && !name.starts_with('_') => folders.push(entry.path()),
                Ok(kind) if kind.is_file() && name.ends_with(".parquet") => files += 1,
                _ => {}
            }
        }
    }
    files
}

/// The tables' files, as `vramscope-collector status` tells; `None` if it does not.
fn live_files(starter: &Starter, data: &Path) -> Option<u64> {
    let report = starter.status(data).ok()?;
    let tables = report["tables"].as_array()?;
    tables.iter().map(|table| table["files"].as_u64()).sum()
}
