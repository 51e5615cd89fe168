//! A day of a fleet as a lake: Delta tables, partitioned, sorted and laid out as a collector's
//! compaction leaves them, for questions to be asked of.
//!
//! Rows come from the same hosts as those of `leak-events`; an hour of all hosts is one file of each
//! table. The tables' logs are written here, by the Delta protocol: whoever asks reads them as any
//! other.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{DataType, Fields, Int64Type};
use clap::Args;
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};
use vramscope_wire::{Table, layout};

use crate::leaks::events::{DAY_NS, Host, WINDOW_NS};
use crate::leaks::tables::{BEGIN, from_json};

/// Options of `query-lake`.
#[derive(Debug, Args)]
pub struct Lake {
    /// Folder to write the tables to; it must not hold any
    #[arg(long)]
    into: PathBuf,
    /// Rows of `alloc_events`
    #[arg(long)]
    rows: usize,
    /// Processes, each on a host of its own
    #[arg(long, default_value_t = 64)]
    hosts: usize,
    /// Call stacks of a process
    #[arg(long, default_value_t = 500)]
    stacks: usize,
}

const HOURS: i64 = 24;
const HOUR_NS: i64 = DAY_NS / HOURS;
const CARD_BYTES: i64 = 192 << 30;

/// What the driver holds besides.
const OTHER_BYTES: i64 = 1 << 30;

/// Writes them.
pub fn write(options: &Lake) -> Result<Value> {
    if options.hosts == 0 || options.rows < options.hosts * HOURS as usize {
        bail!("at least one host, and a row of each for every hour, are needed");
    }
    let date = date()?;
    let mut hosts: Vec<Host> = (0..options.hosts)
        .map(|number| Host::new(number, options.stacks, options.rows / options.hosts))
        .collect();
    hosts.sort_by(|a, b| a.name.cmp(&b.name));
    let mut tables: BTreeMap<Table, TableWriter> = BTreeMap::new();
    for table in Table::ALL {
        tables.insert(table, TableWriter::create(&options.into, table)?);
    }
    let mut write = |table: Table, partition: Option<i64>, rows: &RecordBatch| {
        // Every table was inserted above.
        let writer = tables.get_mut(&table).context("a table is missing")?;
        writer.write(partition.map(|hour| (date.as_str(), hour)), rows)
    };
    for hour in 0..HOURS {
        let end = (hour + 1) * HOUR_NS;
        for host in &mut hosts {
            loop {
                let events = host.until(end);
                if events.is_empty() {
                    break;
                }
                write(Table::AllocEvents, Some(hour), &host.event_rows(&events)?)?;
            }
            let windows = host.windows();
            write(
                Table::StackWindows,
                Some(hour),
                &host.window_rows(&windows)?,
            )?;
            let (bytes, count) = host.live();
            for (table, rows) in minutes(host, hour, bytes, count) {
                write(table, Some(hour), &from_json(table, &rows)?)?;
            }
            if hour == 0 {
                write(
                    Table::Processes,
                    Some(0),
                    &from_json(Table::Processes, &[process(host)])?,
                )?;
            }
        }
    }
    write(
        Table::Stacks,
        None,
        &from_json(Table::Stacks, &stacks(options.stacks))?,
    )?;
    let mut bytes = 0;
    let mut rows = 0;
    for (table, writer) in tables {
        let (of_table, rows_of_table) = writer.finish()?;
        bytes += of_table;
        if table == Table::AllocEvents {
            rows = rows_of_table;
        }
    }
    let somebody = hosts.get(hosts.len() / 2).context("no host")?;
    Ok(json!({
        "rows": rows,
        "bytes": bytes,
        "host": somebody.name,
        "process_id": somebody.process_id,
        // The hour that questions for one are about: of the day's middle, with a past.
        "hour_start_ns": BEGIN * 1_000_000_000 + 13 * HOUR_NS,
        "hour_end_ns": BEGIN * 1_000_000_000 + 14 * HOUR_NS,
        "date": date,
        "hour": 13,
    }))
}

/// The day's name. The years since 1970 are counted by the civil calendar (Howard Hinnant's
/// `civil_from_days`).
fn date() -> Result<String> {
    let days = BEGIN / 86_400 + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    Ok(format!("{year:04}-{month:02}-{day:02}"))
}

/// What an agent writes every minute besides the stacks' windows.
fn minutes(host: &Host, hour: i64, live_bytes: i64, live_count: i64) -> Vec<(Table, Vec<Value>)> {
    let begin = BEGIN * 1_000_000;
    let starts = (0..60).map(|minute| hour * 3_600_000_000 + minute * WINDOW_NS / 1000);
    let (mut windows, mut of_agent, mut samples) = (Vec::new(), Vec::new(), Vec::new());
    for start in starts {
        let (start, end) = (begin + start, begin + start + WINDOW_NS / 1000);
        // One window in an hour lost something.
        let lost = i64::from(start % 3_600_000_000 == 17 * 60_000_000) * 5;
        windows.push(json!({
            "ts": start, "ts_ns": start * 1000, "window_end": end, "host": host.name,
            "boot_id": "boot", "process_id": host.process_id, "pid": host.pid,
            "gpu_uuid": host.card, "device": 0, "memory_kind": "device", "layer": "driver",
            "alloc_bytes": live_bytes / 60, "alloc_count": live_count / 60, "free_bytes": live_bytes / 61,
            "free_count": live_count / 61, "failed_allocations": 0, "failed_frees": 0,
            "live_bytes": live_bytes, "live_count": live_count, "peak_live_bytes": live_bytes + start % 977,
            "process_peak_bytes": live_bytes + 977, "lossy": lost > 0,
            "agent_id": host.agent, "batch_seq": 1,
        }));
        let causes = if lost > 0 {
            json!([{"cause": "ring_full", "count": lost}])
        } else {
            json!([])
        };
        of_agent.push(json!({
            "ts": end, "ts_ns": end * 1000, "host": host.name, "window_start": start, "window_end": end,
            "events": 1000, "events_by_source": [{"source": "uprobe", "count": 1000}], "lost": lost,
            "lost_by_cause": causes, "lossy": lost > 0, "agent_id": host.agent, "batch_seq": 1,
        }));
        let used = (live_bytes + OTHER_BYTES).min(CARD_BYTES);
        samples.push(json!({
            "ts": end, "ts_ns": end * 1000, "host": host.name, "gpu_uuid": host.card, "device": 0,
            "total_bytes": CARD_BYTES, "used_bytes": used, "free_bytes": CARD_BYTES - used,
            "processes": [{"pid": host.pid, "process_id": host.process_id, "used_bytes": used}],
            "agent_id": host.agent, "batch_seq": 1,
        }));
    }
    vec![
        (Table::DeviceWindows, windows),
        (Table::AgentWindows, of_agent),
        (Table::Devices, samples),
    ]
}

fn process(host: &Host) -> Value {
    let at = BEGIN * 1_000_000;
    json!({
        "ts": at, "ts_ns": at * 1000, "host": host.name, "boot_id": "boot",
        "process_id": host.process_id, "pid": host.pid, "exe": "/usr/bin/serve",
        "command": "serve --model model", "started": at, "pod": format!("serve-{}", host.name),
        "namespace": "models", "coverage": [], "agent_id": host.agent, "batch_seq": 1,
    })
}

/// Of every stack the one that allocates and the one that frees, once for the whole fleet.
fn stacks(count: usize) -> Vec<Value> {
    let stack = |number: usize| {
        let id = Host::stack_id(number / 2) + (number % 2) as i64;
        let functions = [
            "main".to_string(),
            format!("serve::step_{}", number / 40),
            format!("model::layer_{}", number / 2),
            ["allocate", "release"][number % 2].to_string(),
        ];
        let frames: Vec<Value> = functions
            .iter()
            .rev()
            .map(|function| json!({"kind": "native", "module": "serve", "function": function, "offset": 4096}))
            .collect();
        json!({
            "stack_id": id, "frames": frames, "folded": functions.join(";"), "agent_id": "agent",
            "batch_seq": 1,
        })
    };
    (0..2 * count).map(stack).collect()
}

/// One table being written.
struct TableWriter {
    table: Table,
    folder: PathBuf,
    open: Option<Open>,
    adds: Vec<Value>,
    bytes: u64,
    rows: u64,
}

/// The file of one partition.
struct Open {
    partition: Option<(String, i64)>,
    path: String,
    writer: ArrowWriter<BufWriter<File>>,
    rows: u64,
    times: Option<(i64, i64)>,
}

impl TableWriter {
    fn create(into: &Path, table: Table) -> Result<Self> {
        let folder = into.join(table.name());
        let log = folder.join("_delta_log");
        std::fs::create_dir_all(&log)
            .with_context(|| format!("failed to create {}", log.display()))?;
        Ok(Self {
            table,
            folder,
            open: None,
            adds: Vec::new(),
            bytes: 0,
            rows: 0,
        })
    }

    fn write(&mut self, partition: Option<(&str, i64)>, rows: &RecordBatch) -> Result<()> {
        let partition = partition.map(|(date, hour)| (date.to_string(), hour));
        if self
            .open
            .as_ref()
            .is_some_and(|open| open.partition != partition)
        {
            self.close()?;
        }
        if self.open.is_none() {
            let path = match &partition {
                Some((date, hour)) => format!("date={date}/hour={hour}/part-00000.zstd.parquet"),
                None => "part-00000.zstd.parquet".to_string(),
            };
            let file = self.folder.join(&path);
            if let Some(dir) = file.parent() {
                std::fs::create_dir_all(dir)?;
            }
            let to = File::create_new(&file)
                .with_context(|| format!("failed to create {}", file.display()))?;
            let properties = layout::properties(self.table, layout::Kind::Settled)?;
            let writer =
                ArrowWriter::try_new(BufWriter::new(to), self.table.schema(), Some(properties))?;
            self.open = Some(Open {
                partition,
                path,
                writer,
                rows: 0,
                times: None,
            });
        }
        let Some(open) = &mut self.open else {
            return Ok(());
        };
        open.writer.write(rows)?;
        open.rows += rows.num_rows() as u64;
        if let Some(times) = rows.column_by_name("ts_ns") {
            let times = times.as_primitive::<Int64Type>();
            for time in times.values() {
                let (min, max) = open.times.unwrap_or((*time, *time));
                open.times = Some((min.min(*time), max.max(*time)));
            }
        }
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else {
            return Ok(());
        };
        open.writer.close()?;
        let file = self.folder.join(&open.path);
        let size = std::fs::metadata(&file)?.len();
        let mut stats =
            json!({"numRecords": open.rows, "minValues": {}, "maxValues": {}, "nullCount": {}});
        if let Some((min, max)) = open.times {
            stats["minValues"]["ts_ns"] = json!(min);
            stats["maxValues"]["ts_ns"] = json!(max);
            stats["nullCount"]["ts_ns"] = json!(0);
        }
        let values = match &open.partition {
            Some((date, hour)) => json!({"date": date, "hour": hour.to_string()}),
            None => json!({}),
        };
        self.adds.push(json!({"add": {
            "path": open.path, "partitionValues": values, "size": size,
            "modificationTime": BEGIN * 1000, "dataChange": true, "stats": stats.to_string(),
        }}));
        self.bytes += size;
        self.rows += open.rows;
        Ok(())
    }

    /// Ends the table; its bytes and rows.
    fn finish(mut self) -> Result<(u64, u64)> {
        self.close()?;
        let mut fields = fields(self.table.schema().fields())?;
        let partitions: &[&str] = if self.table.partitioned_by_time() {
            for (name, kind) in [("date", "date"), ("hour", "integer")] {
                fields.push(json!({"name": name, "type": kind, "nullable": false, "metadata": {}}));
            }
            &["date", "hour"]
        } else {
            &[]
        };
        let schema = json!({"type": "struct", "fields": fields});
        let mut lines = vec![
            json!({"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}),
            json!({"metaData": {
                "id": format!("00000000-0000-4000-8000-{:012}", self.table as u32),
                "format": {"provider": "parquet", "options": {}}, "schemaString": schema.to_string(),
                "partitionColumns": partitions, "configuration": {}, "createdTime": BEGIN * 1000,
            }}),
        ];
        lines.extend(self.adds);
        let text: Vec<String> = lines.iter().map(Value::to_string).collect();
        let log = self.folder.join("_delta_log/00000000000000000000.json");
        std::fs::write(&log, text.join("\n"))
            .with_context(|| format!("failed to write {}", log.display()))?;
        Ok((self.bytes, self.rows))
    }
}

/// Columns as the Delta protocol spells them.
fn fields(fields: &Fields) -> Result<Vec<Value>> {
    let field = |field: &std::sync::Arc<arrow::datatypes::Field>| {
        Ok(json!({
            "name": field.name(), "type": kind(field.data_type())?, "nullable": field.is_nullable(),
            "metadata": {},
        }))
    };
    fields.iter().map(field).collect()
}

fn kind(data_type: &DataType) -> Result<Value> {
    Ok(match data_type {
        DataType::Boolean => json!("boolean"),
        DataType::Int32 => json!("integer"),
        DataType::Int64 => json!("long"),
        DataType::Float64 => json!("double"),
        DataType::Utf8 => json!("string"),
        DataType::Timestamp(..) => json!("timestamp"),
        DataType::List(element) => json!({
            "type": "array", "elementType": kind(element.data_type())?,
            "containsNull": element.is_nullable(),
        }),
        DataType::Struct(inner) => json!({"type": "struct", "fields": fields(inner)?}),
        other => bail!("Delta has no {other}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-02, as the constant's own documentation says.
    #[test]
    fn the_day_has_its_name() {
        assert_eq!(date().unwrap(), "2026-11-02");
    }

    /// Every row lies in the hour of its time, and every file has the rows that the log says.
    #[test]
    fn rows_lie_in_their_hour() {
        let folder = tempfile::tempdir().unwrap();
        let options = Lake {
            into: folder.path().to_path_buf(),
            rows: 24_000,
            hosts: 3,
            stacks: 50,
        };
        let written = write(&options).unwrap();
        assert_eq!(written["rows"], 24_000);
        let log = folder
            .path()
            .join("alloc_events/_delta_log/00000000000000000000.json");
        let log = std::fs::read_to_string(log).unwrap();
        let mut rows = 0;
        for line in log.lines().skip(2) {
            let line: Value = serde_json::from_str(line).unwrap();
            let add = &line["add"];
            let path = folder
                .path()
                .join("alloc_events")
                .join(add["path"].as_str().unwrap());
            let hour: i64 = add["partitionValues"]["hour"]
                .as_str()
                .unwrap()
                .parse()
                .unwrap();
            let file = File::open(path).unwrap();
            let mut last = None;
            for batch in vramscope_wire::parquet_file::decode(Table::AllocEvents, file).unwrap() {
                let times = batch
                    .column_by_name("ts_ns")
                    .unwrap()
                    .as_primitive::<Int64Type>();
                let begin = BEGIN * 1_000_000_000 + hour * HOUR_NS;
                assert!(
                    times
                        .values()
                        .iter()
                        .all(|ts| (begin..begin + HOUR_NS).contains(ts))
                );
                let hosts = batch.column_by_name("host").unwrap().as_string::<i32>();
                for host in hosts.iter().flatten() {
                    assert!(last.as_deref() <= Some(host));
                    last = Some(host.to_string());
                }
                rows += batch.num_rows();
            }
        }
        assert_eq!(rows, 24_000);
    }
}
