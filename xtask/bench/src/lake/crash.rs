//! The crash harness: a collector, a handful of agents, and everything that can go wrong, round
//! after round. In the end the tables must hold every acknowledged batch once, and nothing that
//! nobody sent.
//!
//! What happens is drawn from a seed that is printed; a run with the same seed makes the same plan.
//! The moments within it depend on the machine, so a seed that found something may need several
//! runs to find it again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;
use vramscope_wire::Table;

use super::agent::{Agent, Order, Shared};
use super::collector::{Collector, Plant, Starter, end_with_us};
use super::disk::{self, Disk, Reason};
use super::faults::{self, Fault, SIDES, Side};
use super::listing::Listing;
use super::model::{Key, Verdict};
use super::proxy::Proxy;
use super::sql::Sql;
use super::tally::Tally;
use super::{Random, progress};

/// Agents; few, so that each meets many faults.
const AGENTS: u64 = 6;
/// An agent makes a batch so often.
const PACE: Duration = Duration::from_millis(40);
/// Acknowledgements that every round waits for before its fault.
const MEANT: u64 = 20;
/// When no row came for so long, none comes before the collector is stopped. (What is promised is
/// 5 s; a machine that is busy with other work may take longer, which is shown and is no loss.)
const SETTLED: Duration = Duration::from_secs(10);
/// How long the last batches may take to be acknowledged.
const FINISH: Duration = Duration::from_secs(120);
/// Tables whose rows must outlive their time; those of the others have none, or a long one.
const KEPT: [&str; 4] = [
    "alloc_events=forever",
    "device_windows=forever",
    "stack_windows=forever",
    "agent_windows=forever",
];
/// Rounds between two comparisons.
const COMPARE_EVERY: usize = 5;

/// Kills a collector in every way, and compares its tables with what it acknowledged.
#[derive(Debug, Args)]
pub struct Crash {
    /// The collector's program
    #[arg(long, value_name = "PATH")]
    collector: PathBuf,
    /// Where disks and logs are made; removed at the end unless something was found
    #[arg(long, value_name = "DIR")]
    folder: PathBuf,
    /// Rounds, each with one great fault and some small ones
    #[arg(long, value_name = "N", default_value_t = 100)]
    rounds: usize,
    /// Repeat the plan of a run
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Only these faults
    #[arg(long, value_name = "FAULT", value_enum)]
    only: Vec<Fault>,
    /// Let the collector acknowledge before it syncs, to see whether that is found
    #[arg(long)]
    planted_bug: bool,
    /// A flag of `serve`; can be given several times
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    serve_flag: Vec<String>,
}

/// The command. Gives the figures as JSON.
pub fn run(options: &Crash) -> Result<Value> {
    // Before any thread is there.
    let may_mount = disk::leave_the_mounts();
    std::fs::create_dir_all(&options.folder)
        .with_context(|| format!("failed to create {}", options.folder.display()))?;
    let seed = options.seed.unwrap_or_else(|| {
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        since.as_nanos() as u64
    });
    eprintln!("crash: seed {seed}");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("failed to start the async runtime")?;
    let figures = runtime.block_on(measure(options, seed, may_mount));
    runtime.shutdown_background();
    figures
}

async fn measure(options: &Crash, seed: u64, may_mount: Result<(), Reason>) -> Result<Value> {
    let mut random = Random::new(seed);
    let (disk, reason) = Disk::new(&options.folder, may_mount)?;
    if let Some(reason) = &reason {
        eprintln!("SKIPPED power cuts, torn writes and full disks: {reason}");
    }
    let plan = faults::plan(
        options.rounds,
        &options.only,
        disk.is_mounted(),
        &mut random,
    );
    if plan.is_empty() {
        bail!("none of the faults asked for can be made here");
    }
    let plant = if options.planted_bug {
        Plant::LyingSync
    } else {
        Plant::None
    };
    let log = options.folder.join("collector.log");
    let starter = Starter::new(&options.collector, &log, plant)?;
    let mut lab = Lab::new(
        starter,
        disk,
        random,
        options.serve_flag.clone(),
        &options.folder.join("events.log"),
    )
    .await?;
    let total = plan.len() as u64;
    for (round, fault) in plan.into_iter().enumerate() {
        progress(round as u64, total, &format!("{fault:?}"));
        let went = lab.round(fault).await;
        lab.tally.rounds += 1;
        if let Err(error) = went {
            lab.tally
                .faults
                .push(format!("round {}, {fault:?}: {error:#}", round + 1));
            break;
        }
        if (round + 1) % COMPARE_EVERY == 0
            && round + 1 < options.rounds
            && let Err(error) = lab.compare().await
        {
            lab.tally
                .faults
                .push(format!("the comparison failed: {error:#}"));
        }
        if lab.has_findings() {
            lab.tally
                .faults
                .push(format!("found after round {}, {fault:?}", round + 1));
            break;
        }
    }
    if !lab.has_findings() {
        progress(total, total, "the last batches");
        if let Err(error) = lab.finish().await {
            lab.tally.faults.push(format!("the end failed: {error:#}"));
        }
    }
    Ok(lab.tally.report(&lab.shared, seed, &log, reason))
}

struct Lab {
    starter: Starter,
    flags: Vec<String>,
    disk: Disk,
    random: Random,
    proxy: Proxy,
    shared: Arc<Shared>,
    agents: Vec<(UnboundedSender<Order>, JoinHandle<Result<()>>)>,
    collector: Option<Collector>,
    tally: Tally,
}

impl Lab {
    async fn new(
        starter: Starter,
        disk: Disk,
        mut random: Random,
        flags: Vec<String>,
        events: &Path,
    ) -> Result<Lab> {
        let proxy = Proxy::start(random.split()).await?;
        let shared = Arc::new(Shared::new(events)?);
        let agents = (0..AGENTS)
            .map(|number| {
                let random = random.split();
                let (agent, orders) =
                    Agent::new(number, &proxy.address, PACE, random, Arc::clone(&shared));
                (orders, tokio::spawn(agent.run()))
            })
            .collect();
        let mut lab = Lab {
            starter,
            flags,
            disk,
            random,
            proxy,
            shared,
            agents,
            collector: None,
            tally: Tally::default(),
        };
        lab.start()?;
        Ok(lab)
    }

    fn has_findings(&self) -> bool {
        let broken = !self.shared.model().broken.is_empty();
        broken || !self.tally.verdict.is_clean() || !self.tally.faults.is_empty()
    }

    /// Starts the collector, which must come up whatever happened to its data. On this thread: the
    /// kernel ends the child with the thread that made it.
    fn start(&mut self) -> Result<()> {
        let interval = ["50ms", "300ms", "2s"][self.random.below(3) as usize];
        let mut flags = vec!["--commit-interval".to_string(), interval.to_string()];
        if self.starter.takes("--upkeep-interval") {
            let interval = ["200ms", "1s", "15s"][self.random.below(3) as usize];
            flags.extend(["--upkeep-interval", interval].map(str::to_string));
        }
        if self.starter.takes("--retention") {
            // Late rows are not to be taken for lost ones.
            flags.extend(["--retention", &KEPT.join(",")].map(str::to_string));
        }
        let is_given = self.flags.iter().any(|flag| flag.starts_with("--promise"));
        if self.starter.takes("--promise") && !is_given && self.random.once_in(4) {
            flags.extend(["--promise", "store"].map(str::to_string));
        }
        flags.extend_from_slice(&self.flags);
        let collector = self.starter.start(&self.disk.data(), &flags)?;
        self.proxy.lead_to(&collector.address);
        self.shared.event(format_args!("the collector listens"));
        self.collector = Some(collector);
        Ok(())
    }

    fn kill(&mut self) -> Result<()> {
        let Some(mut collector) = self.collector.take() else {
            bail!("the collector is gone");
        };
        if let Some(status) = collector.ended() {
            bail!("the collector ended by itself ({status})");
        }
        self.tally.kills += 1;
        collector.kill()
    }

    /// Waits until agents have read so many acknowledgements, or for a while.
    async fn wait_for_acknowledgements(&self, many: u64) {
        let end = tokio::time::Instant::now() + Duration::from_secs(10);
        for _ in 0..many {
            if tokio::time::timeout_at(end, self.shared.acknowledged.notified())
                .await
                .is_err()
            {
                return;
            }
        }
    }

    async fn pause(&mut self, limit_ms: u64) {
        let pause = Duration::from_millis(self.random.below(limit_ms));
        tokio::time::sleep(pause).await;
    }

    /// One round: work, small faults, the great one, and up again.
    async fn round(&mut self, fault: Fault) -> Result<()> {
        for side in SIDES {
            if self.random.once_in(2) {
                self.pause(250).await;
                self.disturb(side);
            }
        }
        // A round in which nothing was promised would prove nothing.
        self.wait_for_acknowledgements(MEANT).await;
        self.pause(600).await;
        self.shared.event(format_args!("{fault:?}"));
        match fault {
            Fault::Kill => self.kill()?,
            Fault::KillAfterAcknowledgement => {
                // Of several in a row, so that not always the first after a pause is met.
                let many = 1 + self.random.below(20);
                self.wait_for_acknowledgements(many).await;
                self.kill()?;
            }
            Fault::KillInCommit => {
                self.wait_for_change(false);
                self.pause(12).await;
                self.kill()?;
            }
            Fault::KillInCompaction => return self.kill_in_compaction().await,
            Fault::PowerCut | Fault::TornPowerCut => {
                self.kill()?;
                let mixing = (fault == Fault::TornPowerCut).then_some(&mut self.random);
                let mixed = self.disk.cut_power(mixing)?;
                self.tally.power_cuts += 1;
                self.tally.torn_tails += mixed.tails;
                self.tally.moved_names += mixed.names;
            }
            Fault::DiskFull => {
                let ballast = self.disk.fill()?;
                self.tally.disks_filled += 1;
                self.pause(1500).await;
                drop(ballast);
                self.pause(500).await;
                return self.still_runs();
            }
            Fault::KillOnFullDisk => {
                let ballast = self.disk.fill()?;
                self.tally.disks_filled += 1;
                self.pause(1500).await;
                self.kill()?;
                drop(ballast);
            }
            Fault::Stop => self.stop()?,
        }
        // Agents meet a port where nobody listens.
        self.pause(200).await;
        self.start()
    }

    fn still_runs(&mut self) -> Result<()> {
        match self.collector.as_mut().and_then(Collector::ended) {
            Some(status) => bail!("the collector ended by itself ({status})"),
            None => Ok(()),
        }
    }

    fn disturb(&mut self, side: Side) {
        let agent = self.random.below(AGENTS) as usize;
        self.shared.event(format_args!("{side:?}"));
        let order = match side {
            Side::NetworkCut => {
                self.tally.network_cuts += 1;
                return self.proxy.cut();
            }
            Side::LateDelivery => {
                self.tally.network_cuts += 1;
                let delay = Duration::from_millis(self.random.below(400));
                return self.proxy.deliver_late(delay);
            }
            Side::Echo => Order::Echo,
            Side::Forge => Order::Forge,
            Side::AgentKill => {
                self.tally.agent_kills += 1;
                Order::Die
            }
        };
        // An error means that the agent has ended, which `finish` tells.
        let _ = self.agents[agent].0.send(order);
    }

    /// Waits until a table has a new data file or log entry, or a log entry that takes files away.
    /// Whether it came.
    fn wait_for_change(&self, removal: bool) -> bool {
        let data = self.disk.data();
        let before = Listing::of(&data);
        let end = Instant::now() + Duration::from_secs(4);
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
            let now = Listing::of(&data);
            if now != before && (!removal || now.removes_since(&before)) {
                return true;
            }
        }
        false
    }

    async fn kill_in_compaction(&mut self) -> Result<()> {
        if !self.starter.has("compact") {
            self.tally.compactions_met += u64::from(self.wait_for_change(true));
            self.kill()?;
            return self.start();
        }
        // By hand, beside a collector that does the same; one of them or both are killed.
        let compact = self.starter.command("compact", &self.disk.data())?;
        self.run_and_kill(compact, 900).await?;
        if self.random.once_in(3) {
            return Ok(());
        }
        self.kill()?;
        if self.starter.has("vacuum") && self.random.once_in(2) {
            // Nobody reads now: everything that no table needs may go, and nothing else.
            let mut vacuum = self.starter.command("vacuum", &self.disk.data())?;
            vacuum.args(["--after", "0s"]);
            self.run_and_kill(vacuum, 900).await?;
        }
        self.start()
    }

    /// Runs a command for a while, and kills it if it has not ended.
    async fn run_and_kill(&mut self, mut command: Command, limit_ms: u64) -> Result<()> {
        end_with_us(&mut command);
        let mut child = command.spawn().context("failed to start a command")?;
        self.pause(limit_ms).await;
        let ended = child.try_wait().context("failed to wait")?;
        if let Some(status) = ended.filter(|status| !status.success()) {
            bail!("{command:?} ended with {status}");
        }
        self.tally.compactions_met += u64::from(ended.is_none());
        let _ = child.kill();
        child.wait().context("failed to wait for a command")?;
        Ok(())
    }

    /// Compares the tables with what is acknowledged now. What SQL does not show after a while is
    /// looked for again after an orderly stop, which commits everything: only then it is lost.
    async fn compare(&mut self) -> Result<()> {
        let acknowledged = self.shared.model().acknowledged();
        let rows = self.shared.model().acknowledged_rows();
        let began = Instant::now();
        self.tally.verdict = self.look(&acknowledged, &rows).await?;
        let took = began.elapsed().as_secs_f64() * 1e3;
        if self.tally.verdict.lost > 0 {
            self.shared
                .event(format_args!("rows are missing: stop and look again"));
            self.stop()?;
            self.start()?;
            self.tally.verdict = self.look(&acknowledged, &rows).await?;
        }
        self.tally.visible_ms = self.tally.visible_ms.max(took);
        Ok(())
    }

    /// Compares once all rows are there, or when none has come for a while.
    async fn look(&self, acknowledged: &[Key], rows: &BTreeMap<Table, u64>) -> Result<Verdict> {
        let collector = self.collector.as_ref().context("the collector is gone")?;
        let mut sql = Sql::connect(&collector.address).await?;
        let (mut before, mut changed) = (Vec::new(), Instant::now());
        loop {
            let mut counts = Vec::new();
            for (table, rows) in rows {
                counts.push((sql.count(*table).await?, *rows));
            }
            let is_there = counts.iter().all(|(found, rows)| found >= rows);
            if counts != before {
                (before, changed) = (counts, Instant::now());
            }
            let gave_up = changed.elapsed() > SETTLED;
            if is_there || gave_up {
                let found = sql.digests().await?;
                let verdict = self.shared.model().judge(acknowledged, &found);
                // A count can be reached by what was not acknowledged yet.
                if verdict.lost == 0 || gave_up {
                    return Ok(verdict);
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Stops the collector in order.
    fn stop(&mut self) -> Result<()> {
        let collector = self.collector.take().context("the collector is gone")?;
        let status = collector.stop()?;
        if !status.success() {
            bail!("the collector did not stop in order: {status}");
        }
        Ok(())
    }

    /// Lets the agents come to their end, and looks at what is there, twice.
    async fn finish(&mut self) -> Result<()> {
        for (orders, _) in &self.agents {
            let _ = orders.send(Order::Finish);
        }
        let end = tokio::time::Instant::now() + FINISH;
        for (_, agent) in &mut self.agents {
            match tokio::time::timeout_at(end, agent).await {
                Ok(ended) => ended.context("an agent failed")??,
                Err(_) => {
                    let seconds = FINISH.as_secs();
                    let text = format!("the last batches were not acknowledged within {seconds} s");
                    self.tally.faults.push(text);
                    return Ok(());
                }
            }
        }
        self.compare().await?;
        if self.has_findings() {
            return Ok(());
        }
        // What is on disk, and not what is in memory.
        self.stop()?;
        if self.starter.has("fsck") {
            let data = self.disk.data();
            let status = self.starter.command("fsck", &data)?.status();
            let status = status.context("failed to start fsck")?;
            if !status.success() {
                self.tally.faults.push(format!("fsck ended with {status}"));
            }
        }
        self.start()?;
        self.compare().await
    }
}
