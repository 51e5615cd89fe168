//! How many rows a second a collector takes with durable acknowledgements: a burst, its backlog's
//! end, then a pace that has to be kept up.

use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use tokio::time::Instant;
use vramscope_wire::Table;

use super::collector::{Collector, Plant, Starter};
use super::content;
use super::load::{Load, Phase};
use super::prepared::Prepared;
use super::progress;
use super::sql::Sql;

/// How long a backlog may take to be gone.
const DRAIN: Duration = Duration::from_secs(900);
/// Of the sustained phase, what is not looked at.
const WARM_UP: f64 = 0.2;

/// Sends prepared batches from many agents and counts acknowledged rows.
#[derive(Debug, Args)]
pub struct Ingest {
    /// The collector's program
    #[arg(long, value_name = "PATH")]
    collector: PathBuf,
    /// Where its data go; must be empty or missing
    #[arg(long, value_name = "DIR")]
    folder: PathBuf,
    /// Agents, each with a stream and a connection
    #[arg(long, value_name = "N", default_value_t = 100)]
    agents: usize,
    /// Rows of a batch; an agent writes once a second
    #[arg(long, value_name = "N", default_value_t = 4000)]
    rows: usize,
    /// Batches of an agent on the way at once
    #[arg(long, value_name = "N", default_value_t = 2)]
    window: usize,
    /// Length of the burst
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,
    /// Length of the sustained phase
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    sustained_seconds: u64,
    /// Rows a second that are offered in the sustained phase
    #[arg(long, value_name = "N", default_value_t = 260_000)]
    rate: u64,
    /// A flag of `serve`; can be given several times
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    serve_flag: Vec<String>,
}

/// The command. Gives the figures as JSON.
pub fn run(options: &Ingest) -> Result<Value> {
    runtime()?.block_on(measure(options))
}

/// One thread: the load must not take the collector's processors.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("failed to start the async runtime")
}

/// A collector on a folder of its own.
pub(super) fn start(
    binary: &Path,
    folder: &Path,
    flags: &[String],
) -> Result<(Starter, Collector)> {
    let data = folder.join("data");
    std::fs::create_dir_all(folder)
        .with_context(|| format!("failed to create {}", folder.display()))?;
    if data.exists() {
        bail!(
            "{} is there already: remove it, or name another folder",
            data.display()
        );
    }
    let starter = Starter::new(binary, &folder.join("collector.log"), Plant::None)?;
    let collector = starter.start(&data, flags)?;
    Ok((starter, collector))
}

/// Of twenty batches sixteen are events and one each of the other tables, which are small.
pub(super) fn batches(rows: usize) -> Result<Vec<Prepared>> {
    if !(1..=content::MAX_ROWS).contains(&rows) {
        bail!("{rows} rows are not between 1 and {}", content::MAX_ROWS);
    }
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let ts = since.as_micros() as i64;
    let few = rows.div_ceil(20);
    let mut batches = Vec::new();
    for variant in 0..16 {
        batches.push(Prepared::new(Table::AllocEvents, rows, variant, ts)?);
        if let (0, Some(other)) = (variant % 4, content::TABLES.get(1 + variant as usize / 4)) {
            batches.push(Prepared::new(*other, few, variant, ts)?);
        }
    }
    Ok(batches)
}

/// What stands at one moment.
struct Mark {
    at: Instant,
    acknowledged: u64,
    visible: u64,
}

async fn mark(load: &Load, sql: &mut Sql) -> Result<Mark> {
    let visible = load.visible_rows(sql).await?;
    Ok(Mark {
        at: Instant::now(),
        acknowledged: load.rows(),
        visible,
    })
}

async fn measure(options: &Ingest) -> Result<Value> {
    let (_, collector) = start(&options.collector, &options.folder, &options.serve_flag)?;
    let batches = batches(options.rows)?;
    let batch_bytes = batches.iter().map(Prepared::bytes).max().unwrap_or(0);
    let rows_each: u64 = batches.iter().map(|batch| batch.rows).sum();
    let mean_rows = rows_each as f64 / batches.len() as f64;
    let load = Load::new(
        &collector.address,
        batches,
        options.agents,
        options.window,
        1,
    )?;
    let mut tasks = load.start();
    let mut sql = Sql::connect(&collector.address).await?;
    let total = options.seconds + options.sustained_seconds;

    let before = mark(&load, &mut sql).await?;
    load.enter(Phase::Burst);
    wait(options.seconds, 0, total, "burst").await;
    load.enter(Phase::Rest);
    let burst = load.rows() - before.acknowledged;
    let burst_seconds = before.at.elapsed().as_secs_f64();
    let burst_p99 = load.latencies.quantile_ms(0.99);
    let backlog = burst.saturating_sub(load.visible_rows(&mut sql).await?);
    progress(options.seconds, total, "until the backlog is gone");
    let drained = load.drain(&mut sql, DRAIN).await?;

    let interval = mean_rows * options.agents as f64 / options.rate.max(1) as f64;
    load.enter(Phase::Paced(
        Duration::from_secs_f64(interval),
        Instant::now(),
    ));
    let warm = (options.sustained_seconds as f64 * WARM_UP).ceil() as u64;
    wait(warm, options.seconds, total, "sustained").await;
    load.latencies.clear();
    let from = mark(&load, &mut sql).await?;
    let rest = options.sustained_seconds.saturating_sub(warm);
    wait(rest, options.seconds + warm, total, "sustained").await;
    let to = mark(&load, &mut sql).await?;
    let p99 = load.latencies.quantile_ms(0.99);
    let p50 = load.latencies.quantile_ms(0.5);
    load.enter(Phase::Rest);

    let seconds = to.at.duration_since(from.at).as_secs_f64();
    let acknowledged = (to.acknowledged - from.acknowledged) as f64 / seconds;
    let visible = (to.visible - from.visible) as f64 / seconds;
    let settled = load.drain(&mut sql, DRAIN).await?;
    load.enter(Phase::End);
    let ending = async { while tasks.join_next().await.is_some() {} };
    let ended = tokio::time::timeout(Duration::from_secs(60), ending).await;
    let compared = match (settled, &ended) {
        (Some(_), Ok(())) => Some(load.compare(&mut sql).await?),
        _ => None,
    };
    let (_, peak) = collector.memory()?;
    let status = collector.stop()?;
    if !status.success() {
        bail!("the collector did not stop in order: {status}");
    }
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    Ok(json!({
        "rows_per_second": burst as f64 / burst_seconds,
        "burst_ack_p99_ms": burst_p99,
        "backlog_rows": backlog,
        "drain_seconds": drained.map(|took| took.as_secs_f64()),
        // What is acknowledged and what reaches the tables: the smaller is what can be kept up.
        "sustained_rows_per_second": acknowledged.min(visible),
        "backlog_growth": acknowledged - visible,
        "ack_p50_ms": p50,
        "ack_p99_ms": p99,
        "peak_bytes": peak,
        "batch_bytes": batch_bytes,
        "acknowledged_batches": count(&load.acknowledged),
        "put_off": count(&load.put_off),
        "refused": count(&load.rejected),
        "broken_streams": count(&load.broken),
        "trouble": *load.trouble.lock().unwrap_or_else(PoisonError::into_inner),
        "lost": compared.as_ref().map(|compared| compared.lost),
        "doubled": compared.as_ref().map(|compared| compared.doubled),
        "changed": compared.as_ref().map(|compared| compared.changed),
    }))
}

/// Waits, and says how far it is.
pub(super) async fn wait(seconds: u64, done: u64, total: u64, what: &str) {
    for second in 0..seconds {
        progress(done + second, total, what);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
