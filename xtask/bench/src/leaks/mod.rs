//! Hosts with known leaks, as tables of the product, and what simple tests make of them.
//!
//! The plan says which hosts; the truth goes back to who asked and never into the tables.

mod baselines;
pub mod events;
pub mod tables;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};
use vramscope_leaksim::{Class, Condition, Simulator};

/// Options of `leak-hosts`.
#[derive(Debug, Args)]
pub struct Hosts {
    /// JSON: a list of {"host", "seed", "condition"}
    plan: PathBuf,
    /// Folder to write the tables to; it must not hold any
    #[arg(long)]
    into: PathBuf,
    /// Also judge every stack by the simple tests
    #[arg(long)]
    baselines: bool,
    /// Leave out everything from this hour on
    #[arg(long, value_name = "HOUR")]
    until: Option<f64>,
}

/// One host of a plan.
#[derive(Debug, Deserialize)]
struct Planned {
    host: String,
    seed: u64,
    condition: Condition,
}

/// Writes the hosts of a plan, and gives what is true of them.
pub fn hosts(options: &Hosts) -> Result<Value> {
    let text = std::fs::read(&options.plan)
        .with_context(|| format!("failed to read {}", options.plan.display()))?;
    let plan: Vec<Planned> = serde_json::from_slice(&text)
        .with_context(|| format!("{} is no plan", options.plan.display()))?;
    let simulator = Simulator::find()?;
    let mut tables = tables::Tables::create(&options.into)?;
    let mut hosts = Vec::new();
    let mut rows = 0;
    for planned in &plan {
        let mut run = simulator.run(planned.seed, &planned.condition);
        if let Some(until) = options.until {
            tables::cut(&mut run, until * 3600.0);
        }
        tables.write(&planned.host, &run)?;
        rows += run.windows.len();
        let alarms = options.baselines.then(|| baselines::alarms(&run));
        let stacks = run.stacks.iter().zip(&run.truth.classes);
        let classes: BTreeMap<String, Class> = stacks
            .map(|(stack, class)| (stack.stack_id.to_string(), *class))
            .collect();
        hosts.push(json!({
            "host": planned.host, "begin": tables::begin(&run), "truth": run.truth,
            "classes": classes, "baselines": alarms,
        }));
    }
    tables.finish()?;
    Ok(json!({"real_traces": simulator.has_real_traces(), "rows": rows, "hosts": hosts}))
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::Int64Type;
    use vramscope_leaksim::Kind;
    use vramscope_wire::{Table, parquet_file};

    use super::*;

    /// The files are files of the tables, and the planted stack's live bytes in them end higher than
    /// in the twin's by what was leaked.
    #[test]
    fn what_is_written_are_the_tables_with_the_leak() {
        let folder = tempfile::tempdir().unwrap();
        let condition = Condition {
            hours: 4,
            ..Condition::leaky(Kind::Request, 100_000.0)
        };
        let mut ends = BTreeMap::new();
        let mut leaked = 0.0;
        for (name, condition) in [("leaky", condition), ("clean", condition.clean())] {
            let plan = folder.path().join(format!("{name}.json"));
            let hosts = json!([{"host": "h1", "seed": 5, "condition": condition}]);
            std::fs::write(&plan, hosts.to_string()).unwrap();
            let options = Hosts {
                plan,
                into: folder.path().join(name),
                baselines: false,
                until: None,
            };
            let written = super::hosts(&options).unwrap();
            let truth = &written["hosts"][0]["truth"];
            leaked += truth["leaked_bytes"].as_f64().unwrap();
            let planted = truth["planted_stack_ids"][0].as_i64().unwrap();
            let mut last = BTreeMap::new();
            for table in [Table::StackWindows, Table::Traffic, Table::Stacks] {
                let file = options.into.join(table.name()).join("1.parquet");
                let file = std::fs::File::open(file).unwrap();
                let batches = parquet_file::decode(table, file).unwrap();
                assert!(batches.iter().any(|batch| batch.num_rows() > 0));
                if table != Table::StackWindows {
                    continue;
                }
                for batch in batches {
                    let column = |name: &str| {
                        let column = batch.column_by_name(name).unwrap();
                        column.as_primitive::<Int64Type>().clone()
                    };
                    let (stacks, live) = (column("stack_id"), column("live_bytes"));
                    for row in 0..batch.num_rows() {
                        last.insert(stacks.value(row), live.value(row));
                    }
                }
            }
            ends.insert(name, last.get(&planted).copied().unwrap_or(0));
        }
        let difference = (ends["leaky"] - ends["clean"]) as f64;
        assert!(leaked > 1e8, "{leaked}");
        assert!((difference - leaked).abs() < 1.0, "{difference} {leaked}");
    }
}
