//! One collector, one agent and workloads on this machine's loopback: what the demo shows, the
//! end-to-end test checks and the benchmarks measure.
//!
//! Invariants:
//! - everything lies under one folder, listens on loopback only, and is stopped when the value
//!   is dropped: workloads by their own handles, then the agent, its probes in the kernel, the
//!   collector;
//! - a restart keeps folder, port and probes, as a restart on a host would;
//! - a folder belongs to one running system; probes that an earlier one in it left behind (only
//!   SIGKILL leaves any) are taken out before the next begins.

use std::fs::{File, TryLockError};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use vramscope_fakes::ledger::{ProcessLedger, read_ledgers};

use crate::children::{Child, output, sleep, tail};
use crate::compare::{self, Row, Side, Source};
use crate::project::Project;

mod driver;

pub use driver::Driver;

/// How long a program may take from start to being ready: debug builds on a loaded machine.
const READY: Duration = Duration::from_secs(120);

/// A program that says when it is ready, and then runs until it is ended.
#[derive(Debug)]
struct Server {
    child: Child,
    is_ready: bool,
}

impl Server {
    fn start(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let child = Child::start(name, command, log)?;
        Ok(Self {
            child,
            is_ready: false,
        })
    }

    fn wait(&mut self, says_ready: impl Fn(&str) -> bool) -> Result<()> {
        if !self.is_ready {
            let is_it = |line: &str| says_ready(line).then_some(());
            self.child.wait_for_line(READY, is_it)?;
            self.is_ready = true;
        }
        Ok(())
    }

    /// Ends it as a crash would; fails if it has ended by itself.
    fn kill(mut self) -> Result<()> {
        if let Some(status) = self.child.poll()? {
            bail!(
                "it ended by itself ({status}); its log:\n{}",
                tail(self.child.log(), 30)
            );
        }
        self.child.kill()
    }
}

/// The running system.
#[derive(Debug)]
pub struct System {
    project: Project,
    folder: PathBuf,
    driver: Driver,
    port: u16,
    /// Held while the system exists: the folder is ours.
    _lock: File,
    // Dropped in this order: the agent sends what it has while the collector still takes it.
    agent: Option<Server>,
    collector: Option<Server>,
}

impl System {
    /// Prepares a fresh folder; starts nothing. What was there is removed.
    pub fn new(project: &Project, folder: &Path, driver: Driver) -> Result<Self> {
        let lock = lock_folder(folder)?;
        if folder.exists() {
            std::fs::remove_dir_all(folder)
                .with_context(|| format!("failed to empty {}", folder.display()))?;
        }
        for name in ["logs", "ledgers"] {
            let path = folder.join(name);
            std::fs::create_dir_all(&path)
                .with_context(|| format!("failed to create {}", path.display()))?;
        }
        // A port that was free a moment ago: the agent's configuration needs it before a
        // collector runs, and a restarted collector must get the same one.
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .context("failed to find a free port on loopback")?
            .port();
        let system = Self {
            project: project.clone(),
            folder: folder.to_path_buf(),
            driver,
            port,
            _lock: lock,
            agent: None,
            collector: None,
        };
        let config = system.agent_config();
        std::fs::write(&config, system.agent_toml())
            .with_context(|| format!("failed to write {}", config.display()))?;
        system.detach();
        Ok(system)
    }

    /// The collector's data folder.
    pub fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// The collector's address.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Folder of the stand-ins' ledgers.
    pub fn ledgers(&self) -> PathBuf {
        self.folder.join("ledgers")
    }

    /// The agent's configuration file.
    pub fn agent_config(&self) -> PathBuf {
        self.folder.join("agent.toml")
    }

    fn log(&self, name: &str) -> PathBuf {
        self.folder.join("logs").join(format!("{name}.log"))
    }

    fn agent_toml(&self) -> String {
        let text = |value: &str| toml_string(value);
        let path = |value: PathBuf| toml_string(&value.to_string_lossy());
        let (libraries, nvml) = match &self.driver {
            Driver::StandIns { folder } => (
                vec![folder.join("libcuda.so.1"), folder.join("libcudart.so.13")],
                Some(folder.join("libnvidia-ml.so.1")),
            ),
            Driver::Real { libcuda } => (vec![libcuda.clone()], None),
        };
        let libraries: Vec<String> = libraries.into_iter().map(path).collect();
        // The ledgers are of these alone; other programs that use stand-ins, such as another
        // test's, are not this system's business.
        let only = match &self.driver {
            Driver::StandIns { .. } => vec![path(self.project.target.join("*"))],
            Driver::Real { .. } => Vec::new(),
        };
        let mut lines = vec![
            format!("spool = {}", path(self.folder.join("spool"))),
            format!("collector = {}", text(&self.url())),
            format!("libraries = [{}]", libraries.join(", ")),
            format!("only_libraries = [{}]", only.join(", ")),
            format!("pin_path = {}", path(self.pin_path())),
            // Short, so that a demo of seconds has samples and windows to show.
            "sample_interval = \"500ms\"".to_string(),
            "flush_interval = \"200ms\"".to_string(),
            "window = \"2s\"".to_string(),
            // What is compared with a ledger has to be there.
            "framework_events = \"always\"".to_string(),
        ];
        if let Some(nvml) = nvml {
            lines.push(format!("nvml_library = {}", path(nvml)));
        }
        lines.join("\n") + "\n"
    }

    /// Where this system's probes are pinned: its own, so that several systems do not meet, and
    /// the same for the same folder, so that leftovers are found.
    pub fn pin_path(&self) -> PathBuf {
        let mut hasher = DefaultHasher::new();
        self.folder.hash(&mut hasher);
        PathBuf::from(format!("/sys/fs/bpf/vramscope-{:016x}", hasher.finish()))
    }

    /// Starts the collector, or starts it again on the same folder and port.
    pub fn start_collector(&mut self) -> Result<()> {
        self.launch_collector()?;
        self.wait_for_collector()
    }

    /// The same, without waiting until it listens.
    pub fn launch_collector(&mut self) -> Result<()> {
        let mut command = self.program("vramscope-collector");
        command
            .arg("serve")
            .arg("--data")
            .arg(self.data())
            .args(["--listen", &format!("127.0.0.1:{}", self.port)])
            .args(["--http-listen", "off"])
            .args(["--postgres-listen", "off"])
            .args(["--commit-interval", "250ms"]);
        let log = self.log("collector");
        self.collector = Some(Server::start("collector", &mut command, &log)?);
        Ok(())
    }

    /// Waits until the collector listens.
    pub fn wait_for_collector(&mut self) -> Result<()> {
        let collector = self.collector.as_mut().context("no collector runs")?;
        collector.wait(|line| line.starts_with("listening on "))
    }

    /// Starts the agent and waits until its probes are in place.
    pub fn start_agent(&mut self) -> Result<()> {
        self.launch_agent()?;
        self.wait_for_agent()
    }

    /// The same, without waiting.
    pub fn launch_agent(&mut self) -> Result<()> {
        let mut command = self.program("vramscope-agent");
        command
            .arg("serve")
            .arg("--config")
            .arg(self.agent_config());
        let log = self.log("agent");
        self.agent = Some(Server::start("agent", &mut command, &log)?);
        Ok(())
    }

    /// Waits until the agent's probes are in place.
    pub fn wait_for_agent(&mut self) -> Result<()> {
        let agent = self.agent.as_mut().context("no agent runs")?;
        agent.wait(|line| line == "ready")
    }

    /// Starts a workload on this system's driver.
    pub fn start_workload(&self, arguments: &[&str]) -> Result<Child> {
        self.start_workload_with(arguments, &[])
    }

    /// Starts a workload with more environment variables.
    pub fn start_workload_with(
        &self,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Child> {
        self.start_program("vramscope-workload", arguments, environment)
    }

    /// Starts a program of the workspace on this system's driver.
    pub fn start_program(
        &self,
        program: &str,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Child> {
        let mut command = self.program(program);
        command.args(arguments);
        if let Driver::StandIns { folder } = &self.driver {
            command
                .env("LD_LIBRARY_PATH", folder)
                .env("VRAMSCOPE_FAKE_DIR", self.ledgers());
        }
        command.envs(environment.iter().copied());
        let name = format!("workload {}", arguments.join(" "));
        Child::start(&name, &mut command, &self.log("workload"))
    }

    /// A program of the workspace, without the library path that `cargo run` set for us.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.project.binary(name));
        command.env_remove("LD_LIBRARY_PATH");
        command
    }

    /// Stops the agent in order: it drains its probes, writes and sends what it has.
    pub fn stop_agent(&mut self) -> Result<()> {
        match self.agent.take() {
            Some(agent) => agent.child.stop(),
            None => Ok(()),
        }
    }

    /// Stops the collector in order: it commits what its log holds.
    pub fn stop_collector(&mut self) -> Result<()> {
        match self.collector.take() {
            Some(collector) => collector.child.stop(),
            None => Ok(()),
        }
    }

    /// Ends the agent as a crash would.
    pub fn kill_agent(&mut self) -> Result<()> {
        match self.agent.take() {
            Some(agent) => agent.kill().context("failed to kill the agent"),
            None => bail!("no agent runs"),
        }
    }

    /// Ends the collector as a crash would.
    pub fn kill_collector(&mut self) -> Result<()> {
        match self.collector.take() {
            Some(collector) => collector.kill().context("failed to kill the collector"),
            None => bail!("no collector runs"),
        }
    }

    /// Asks SQL of the running collector, or of the data folder if none runs.
    pub fn query(&self, sql: &str) -> Result<Vec<Row>> {
        let mut command = self.program("vramscope");
        command.arg("sql");
        match &self.collector {
            Some(_) => command.args(["--collector", &self.url()]),
            None => command.arg("--data").arg(self.data()),
        };
        // With `=`, since SQL may begin with a comment, which looks like an option.
        command.args(["--format", "json", &format!("--command={sql}")]);
        let output = output(&mut command)?;
        if !output.status.success() {
            bail!(
                "query failed: {}\n{sql}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        parse_rows(&output.stdout)
    }

    /// The books of this system's workloads.
    pub fn read_ledgers(&self) -> Result<Vec<ProcessLedger>> {
        Ok(read_ledgers(&self.ledgers())?)
    }

    /// Processes that have something in their ledger; a pid that two had stands here twice.
    pub fn ledger_pids(&self) -> Result<Vec<u32>> {
        let ledgers = self.read_ledgers()?;
        let lives = compare::lives(&ledgers)?;
        Ok(lives.iter().map(|(life, _)| life.pid).collect())
    }

    /// Waits until the tables know of the end of every one of these processes: their last rows
    /// are on their way then.
    pub fn wait_until_ended(&self, pids: &[u32], limit: Duration) -> Result<()> {
        let list: Vec<String> = pids.iter().map(u32::to_string).collect();
        let sql = format!(
            "SELECT count(*) AS ended FROM current_processes WHERE ended IS NOT NULL AND pid IN ({})",
            list.join(", ")
        );
        let until = Instant::now() + limit;
        loop {
            let rows = self.query(&sql)?;
            let ended = rows.first().map(|row| compare::number(row, "ended"));
            let ended = ended.transpose()?.flatten().unwrap_or(0);
            if ended >= pids.len() as u64 {
                return Ok(());
            }
            if Instant::now() > until {
                bail!(
                    "after {} s the tables know the end of {ended} of {} processes; logs are in {}",
                    limit.as_secs(),
                    pids.len(),
                    self.folder.join("logs").display()
                );
            }
            sleep(Duration::from_millis(300))?;
        }
    }

    /// Compares `process_totals` with the ledgers; every difference as a line.
    pub fn differences(&self) -> Result<Vec<String>> {
        self.differences_in(Source::Totals)
    }

    /// Compares one of the sources with the ledgers.
    pub fn differences_in(&self, source: Source) -> Result<Vec<String>> {
        let (ledger, sql) = self.sides(source)?;
        Ok(compare::differences(&ledger, &sql))
    }

    /// What the ledgers say, and what the SQL says of the same processes.
    pub fn sides(&self, source: Source) -> Result<(Side, Side)> {
        let ledgers = self.read_ledgers()?;
        let ledger = compare::from_ledgers(source, &ledgers)?;
        if ledger.is_empty() {
            bail!(
                "the ledgers in {} are empty: the workload did not reach the stand-ins",
                self.ledgers().display()
            );
        }
        let pids = ledgers.iter().map(|ledger| ledger.pid).collect();
        let sql = compare::from_rows(source, &self.query(source.sql())?, &pids)?;
        Ok((ledger, sql))
    }

    /// Waits until the SQL equals the ledgers; gives the differences that are left at the limit.
    pub fn wait_for_match(&self, limit: Duration) -> Result<Vec<String>> {
        let until = Instant::now() + limit;
        loop {
            let differences = self.differences()?;
            if differences.is_empty() || Instant::now() > until {
                return Ok(differences);
            }
            sleep(Duration::from_millis(500))?;
        }
    }

    /// Takes this system's probes out of the kernel.
    fn detach(&self) {
        if !self.pin_path().exists() {
            return;
        }
        let mut command = self.program("vramscope-agent");
        command
            .arg("detach")
            .arg("--config")
            .arg(self.agent_config());
        // Not by `children::output`, which gives up at once after a Ctrl-C: this is the clean-up.
        if !command.output().is_ok_and(|output| output.status.success()) {
            // The pins are what keeps the probes: without them the kernel drops both.
            let _ = std::fs::remove_dir_all(self.pin_path());
        }
        let _ = std::fs::remove_dir(self.pin_path());
    }
}

impl Drop for System {
    fn drop(&mut self) {
        drop(self.agent.take());
        self.detach();
        drop(self.collector.take());
    }
}

/// Takes a folder for this process; another system in it would be emptied under its feet.
fn lock_folder(folder: &Path) -> Result<File> {
    let path = folder.with_extension("lock");
    let parent = folder.parent().context("the folder has no parent")?;
    std::fs::create_dir_all(parent)
        .with_context(|| format!("failed to create {}", parent.display()))?;
    let lock =
        File::create(&path).with_context(|| format!("failed to create {}", path.display()))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => bail!(
            "{} is in use: wait until the other run has ended",
            folder.display()
        ),
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("failed to lock {}", path.display()))
        }
    }
}

/// Rows as an array, or one object a line.
fn parse_rows(json: &[u8]) -> Result<Vec<Row>> {
    let text = std::str::from_utf8(json).context("the answer is not UTF-8")?;
    if text.trim_start().starts_with('[') {
        return serde_json::from_str(text).context("the answer is not an array of rows");
    }
    text.lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| serde_json::from_str(line).context("the answer is not rows of JSON"))
        .collect()
}

/// A basic string of TOML.
fn toml_string(value: &str) -> String {
    // JSON's escapes are a subset of TOML's.
    serde_json::Value::from(value).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two systems cannot share a folder; a folder is free again once its system is gone.
    #[test]
    fn a_folder_belongs_to_one_system() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("system");
        let first = lock_folder(&folder).unwrap();
        let error = lock_folder(&folder).unwrap_err().to_string();
        assert!(error.contains("in use"), "{error}");
        drop(first);
        lock_folder(&folder).unwrap();
    }

    #[test]
    fn both_spellings_of_rows_are_read() {
        let array = parse_rows(b"[{\"a\":1},{\"a\":2}]").unwrap();
        let lines = parse_rows(b"{\"a\":1}\n{\"a\":2}\n").unwrap();
        assert_eq!(array, lines);
        assert_eq!(array.len(), 2);
        assert!(parse_rows(b"").unwrap().is_empty());
        assert!(parse_rows(b"no rows").is_err());
    }
}
