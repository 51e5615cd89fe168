//! The leak detectors, as users run them, on hosts whose leaks are known.
//!
//! `vramscope-bench leak-hosts` simulates hosts (see its crate `vramscope-leaksim`) and fills the
//! product's own tables; `vramscope sql` asks `leak_by_stack`; the answers are compared with the
//! truth, which never was in the tables. Hosts are made, asked about and deleted in batches, so
//! disk and memory stay bounded. Every leaky host has a clean twin in another folder.

mod plan;
mod report;
mod score;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

pub use self::plan::Seeds;
use self::plan::{Host, Plan};
use self::score::{Alarm, Judged};
use super::measurer::Measurer;
use super::{Bench, Figures};
use crate::children::check_interrupted;
use crate::progress::Step;
use crate::project::Project;

/// Pairs of hosts in a folder.
const BATCH: usize = 10;

/// Detections that are looked at again without what came after them.
const RECHECKED: usize = 6;

/// What is asked of the product. Times as seconds since 1970.
const QUESTION: &str = "SELECT host, rank, tier, detector, stack_id, \
    date_part('epoch', first_seen) AS first_seen, \
    date_part('epoch', confirmed_at) AS confirmed_at, \
    date_part('epoch', projected_oom_at) AS projected_oom_at FROM leak_by_stack";

/// Simulates, asks, compares.
pub fn measure(project: &Project, options: &Bench) -> Result<Figures> {
    let measurer = Measurer::ready(project, options)?;
    let product = super::import::program(project, options)?;
    let folder = project.target.join("bench").join("leaks");
    super::daemon::empty(&folder)?;
    let lab = Lab {
        measurer,
        product,
        folder,
    };
    let plan = Plan::draw(options.runs, options.seeds);
    let judged = lab.run(&plan)?;
    super::daemon::empty(&lab.folder)?;
    let details = report::details(&judged);
    let path = super::write(project, "leaks-cells", &format!("{details:#}\n"))?;
    eprint!("{}", report::table(&judged));
    eprintln!("every cell is in {}", path.display());
    Ok(report::figures(&judged))
}

struct Lab {
    measurer: Measurer,
    product: PathBuf,
    folder: PathBuf,
}

/// What came of a folder of hosts.
struct Answered {
    hosts: Vec<Value>,
    alarms: Vec<Value>,
    real_traces: bool,
    seconds: f64,
    peak_bytes: f64,
    rows: f64,
}

impl Lab {
    fn run(&self, plan: &Plan) -> Result<Judged> {
        let mut step = Step::start("judging the leak detectors on simulated hosts");
        step.set_total(plan.pairs.len() as u64);
        let mut judged = Judged::default();
        for (number, pairs) in plan.pairs.chunks(BATCH).enumerate() {
            step.at(
                (number * BATCH) as u64,
                "pairs of a leaky host and its clean twin",
            );
            let leaky: Vec<Host> = pairs.iter().map(|pair| pair.leaky()).collect();
            let clean: Vec<Host> = pairs.iter().map(|pair| pair.clean()).collect();
            let (leaky, clean) = (self.ask(&leaky, None)?, self.ask(&clean, None)?);
            for (index, pair) in pairs.iter().enumerate() {
                let outcome = score::pair(
                    pair,
                    (&leaky.hosts[index], &alarms(&leaky, &pair.host)?),
                    (&clean.hosts[index], &alarms(&clean, &pair.host)?),
                )?;
                judged.pairs.push(outcome);
            }
            for answered in [&leaky, &clean] {
                judged.note_cost(answered.seconds, answered.peak_bytes, answered.rows);
                judged.real_traces = answered.real_traces;
            }
        }
        for hosts in plan.ambiguous.chunks(2 * BATCH) {
            step.at(plan.pairs.len() as u64, "ambiguous cases");
            let answered = self.ask(hosts, None)?;
            for (host, truth) in hosts.iter().zip(&answered.hosts) {
                let alarms = alarms(&answered, &host.host)?;
                judged
                    .ambiguous
                    .push(score::ambiguous(host, truth, &alarms)?);
            }
        }
        step.at(
            plan.pairs.len() as u64,
            "detections, without what came after them",
        );
        self.recheck(plan, &mut judged)?;
        step.done("");
        if !judged.real_traces {
            eprintln!(
                "  no traces beside the project (VRAMSCOPE_SHARED): made-up requests were replayed"
            );
        }
        Ok(judged)
    }

    /// A confirmation must stand on what was known when it was made: with the tables cut there, it
    /// is there as well.
    fn recheck(&self, plan: &Plan, judged: &mut Judged) -> Result<()> {
        let detected = plan.pairs.iter().zip(&judged.pairs);
        let mut again = Vec::new();
        for (pair, outcome) in detected {
            let Some(hour) = outcome.confirmed_hour else {
                continue;
            };
            again.push((pair, hour));
        }
        let each = (again.len() / RECHECKED).max(1);
        for (pair, hour) in again.into_iter().step_by(each).take(RECHECKED) {
            // The window that made it certain ends some minutes later at most.
            let answered = self.ask(&[pair.leaky()], Some(hour + 0.2))?;
            let alarms = alarms(&answered, &pair.host)?;
            let still = score::names_planted(&answered.hosts[0], &alarms)?;
            judged.rechecked += 1;
            judged.foresight += usize::from(!still);
        }
        Ok(())
    }

    /// Writes the hosts, asks the product, and deletes them.
    fn ask(&self, hosts: &[Host], until: Option<f64>) -> Result<Answered> {
        check_interrupted()?;
        let (plan, data) = (self.folder.join("plan.json"), self.folder.join("data"));
        std::fs::write(
            &plan,
            Value::from_iter(hosts.iter().map(Host::to_json)).to_string(),
        )
        .with_context(|| format!("failed to write {}", plan.display()))?;
        let until = until.map(|hour| hour.to_string());
        let mut arguments = vec![
            "leak-hosts".to_string(),
            plan.to_string_lossy().into_owned(),
            "--into".to_string(),
            data.to_string_lossy().into_owned(),
            "--baselines".to_string(),
        ];
        if let Some(until) = until {
            arguments.extend(["--until".to_string(), until]);
        }
        let written = self.measurer.tell(&arguments)?;
        let (product, folder) = (self.product.to_string_lossy(), data.to_string_lossy());
        let asked = self.measurer.run(&[
            &product, "sql", "--data", &folder, "--format", "json", "-c", QUESTION,
        ]);
        delete(&data)?;
        let asked = asked.context("the product did not answer leak_by_stack")?;
        let alarms: Vec<Value> = serde_json::from_str(&asked.output)
            .with_context(|| format!("the product's answer is no JSON: {:.200}", asked.output))?;
        let number = |value: &Value| value.as_f64().context("a measurement lacks a figure");
        Ok(Answered {
            hosts: written["hosts"].as_array().cloned().unwrap_or_default(),
            alarms,
            real_traces: written["real_traces"] == true,
            seconds: asked.seconds,
            peak_bytes: asked.peak_bytes,
            rows: number(&written["rows"])?,
        })
    }
}

fn delete(folder: &Path) -> Result<()> {
    std::fs::remove_dir_all(folder)
        .with_context(|| format!("failed to delete {}", folder.display()))
}

/// The product's rows of one host.
fn alarms(answered: &Answered, host: &str) -> Result<Vec<Alarm>> {
    let of_host = answered.alarms.iter().filter(|row| row["host"] == host);
    of_host.map(Alarm::read).collect()
}
