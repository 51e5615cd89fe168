//! A collector process, a client, and rows to send.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int32Array, Int64Array, ListArray, RecordBatch,
    StringArray, StructArray, TimestampMicrosecondArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use arrow_flight::sql::client::FlightSqlServiceClient;
use futures::TryStreamExt;
use tonic::transport::Channel;
use vramscope_wire::proto::ingest_client::IngestClient;
use vramscope_wire::proto::{Ack, Batch, Outcome};
use vramscope_wire::{SCHEMA_VERSION, Table, parquet_file};

/// 2026-11-29 13:05:00 UTC, in microseconds since 1970 (from `date -u -d … +%s`).
pub const BASE_TS: i64 = 1_795_957_500_000_000;

const HOUR_US: i64 = 3_600_000_000;

pub fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramscope-collector"));
    for (key, _) in std::env::vars().filter(|(key, _)| key.starts_with("VRAMSCOPE_COLLECTOR_")) {
        command.env_remove(key);
    }
    // Doors that a test wants it opens by a flag: their default ports are one for all.
    command.env("VRAMSCOPE_COLLECTOR_HTTP_LISTEN", "off");
    command.env("VRAMSCOPE_COLLECTOR_POSTGRES_LISTEN", "off");
    command
}

/// A running collector. Killed when dropped.
pub struct Collector {
    child: Child,
    out: BufReader<ChildStdout>,
    pub address: String,
    /// Standard error, if it is kept.
    log: Option<std::thread::JoinHandle<String>>,
}

impl Collector {
    pub fn start(data: &Path, flags: &[&str]) -> Collector {
        Self::start_logging(data, flags, Stdio::inherit())
    }

    /// With variables of the environment.
    pub fn start_with(data: &Path, flags: &[&str], env: &[(&str, String)]) -> Collector {
        Self::start_in(data, flags, env, Stdio::inherit())
    }

    /// The same, its standard error kept for [`Collector::stop_and_read_log`].
    pub fn start_with_log(data: &Path, flags: &[&str], env: &[(&str, String)]) -> Collector {
        Self::start_in(data, flags, env, Stdio::piped())
    }

    pub fn start_logging(data: &Path, flags: &[&str], stderr: Stdio) -> Collector {
        Self::start_in(data, flags, &[], stderr)
    }

    fn start_in(data: &Path, flags: &[&str], env: &[(&str, String)], stderr: Stdio) -> Collector {
        let mut child = binary()
            .envs(env.iter().map(|(key, value)| (key, value)))
            .args(["serve", "--listen", "127.0.0.1:0", "--data"])
            .arg(data)
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        // Read as it comes: a pipe that nobody empties stops whoever writes into it.
        let log = child.stderr.take().map(|mut stderr| {
            std::thread::spawn(move || {
                let mut text = String::new();
                stderr.read_to_string(&mut text).unwrap();
                text
            })
        });
        let mut collector = Collector {
            address: String::new(),
            out,
            child,
            log,
        };
        collector.address = format!("http://{}", collector.announced("listening on "));
        collector
    }

    /// What the next line of standard output that begins so says.
    pub fn announced(&mut self, prefix: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.out.read_line(&mut line).unwrap() > 0, "no {prefix:?}");
            if let Some(rest) = line.trim().strip_prefix(prefix) {
                return rest.to_string();
            }
        }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL: nothing can be cleaned up.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM; waits for the end.
    pub fn stop(mut self) -> ExitStatus {
        let pid = self.child.id().to_string();
        assert!(
            Command::new("kill")
                .args(["-TERM", &pid])
                .status()
                .unwrap()
                .success()
        );
        self.child.wait().unwrap()
    }

    /// SIGTERM; what it wrote to standard error.
    pub fn stop_and_read_log(mut self) -> String {
        let log = self.log.take().unwrap();
        assert!(self.stop().success());
        log.join().unwrap()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Commits at once; or, in effect, only when the collector stops. The rows' times are fixed, so
/// whatever today is, they are believed.
pub const FAST: &[&str] = &[
    "--commit-interval",
    "50ms",
    "--clock-ahead",
    "1000000h",
    "--clock-behind",
    "1000000h",
];
pub const NEVER: &[&str] = &[
    "--commit-interval",
    "1h",
    "--clock-ahead",
    "1000000h",
    "--clock-behind",
    "1000000h",
];

pub async fn ingest_client(address: &str) -> IngestClient<Channel> {
    IngestClient::connect(address.to_string()).await.unwrap()
}

/// Sends batches on one stream; the acknowledgements in order.
pub async fn push(address: &str, batches: Vec<Batch>) -> Vec<Ack> {
    let mut client = ingest_client(address).await;
    let acks = client
        .push(futures::stream::iter(batches))
        .await
        .unwrap()
        .into_inner();
    acks.try_collect().await.unwrap()
}

pub fn outcomes(acks: &[Ack]) -> Vec<Outcome> {
    acks.iter().map(|ack| ack.outcome()).collect()
}

pub async fn sql_client(address: &str) -> FlightSqlServiceClient<Channel> {
    let channel = Channel::from_shared(address.to_string())
        .unwrap()
        .connect()
        .await
        .unwrap();
    FlightSqlServiceClient::new(channel)
}

/// Answers a query over Flight SQL; the error's text if it fails.
pub async fn sql(address: &str, sql: &str) -> Result<Vec<RecordBatch>, String> {
    let mut client = sql_client(address).await;
    let info = client
        .execute(sql.to_string(), None)
        .await
        .map_err(|error| error.to_string())?;
    let mut batches = Vec::new();
    for endpoint in info.endpoint {
        let rows = client
            .do_get(endpoint.ticket.unwrap())
            .await
            .map_err(|error| error.to_string())?;
        batches.extend(
            rows.try_collect::<Vec<_>>()
                .await
                .map_err(|error| error.to_string())?,
        );
    }
    Ok(batches)
}

pub async fn count(address: &str, table: Table) -> i64 {
    let rows = lines(
        &sql(address, &format!("SELECT count(*) FROM {}", table.name()))
            .await
            .unwrap(),
    );
    rows[0].parse().unwrap()
}

/// Asks until a table has so many rows.
pub async fn wait_for_rows(address: &str, table: Table, rows: i64) {
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        let found = count(address, table).await;
        if found == rows {
            return;
        }
        assert!(
            found < rows && Instant::now() < give_up,
            "{} has {found} rows, expected {rows}",
            table.name()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Rows as text, one line each, NULL told from the empty string, sorted: what two row sets are
/// compared by.
pub fn lines(batches: &[RecordBatch]) -> Vec<String> {
    let options = FormatOptions::default().with_null("NULL");
    let mut lines = Vec::new();
    for batch in batches {
        let columns: Vec<_> = batch
            .columns()
            .iter()
            .map(|column| ArrayFormatter::try_new(column, &options).unwrap())
            .collect();
        for row in 0..batch.num_rows() {
            let values: Vec<_> = columns
                .iter()
                .map(|column| column.value(row).to_string())
                .collect();
            lines.push(values.join("|"));
        }
    }
    lines.sort();
    lines
}

/// The table's wire columns, as the collector's SQL door gives them.
pub async fn stored(address: &str, table: Table) -> Vec<String> {
    lines(
        &sql(
            address,
            &format!("SELECT {} FROM {}", wire_columns(table), table.name()),
        )
        .await
        .unwrap(),
    )
}

pub fn wire_columns(table: Table) -> String {
    let names: Vec<_> = table
        .schema()
        .fields()
        .iter()
        .map(|field| format!("\"{}\"", field.name()))
        .collect();
    names.join(", ")
}

/// Rows of a table that differ by agent, batch and row, with NULLs, empty texts, empty lists
/// and nested values, over several hours.
pub fn rows(table: Table, agent: &str, seq: u64, rows: usize) -> RecordBatch {
    let schema = table.schema();
    let columns = schema
        .fields()
        .iter()
        .enumerate()
        .map(|(index, field)| match field.name().as_str() {
            "agent_id" => Arc::new(StringArray::from(vec![agent; rows])) as ArrayRef,
            "batch_seq" => Arc::new(Int64Array::from(vec![seq as i64; rows])),
            "ts" => Arc::new(
                TimestampMicrosecondArray::from_iter_values((0..rows).map(|row| ts(seq, row)))
                    .with_timezone("UTC"),
            ),
            _ => column(field, rows, seq * 1_000_003 + index as u64),
        })
        .collect();
    RecordBatch::try_new(schema, columns).unwrap()
}

/// Four hours in turn, so that batches share partitions.
pub fn ts(seq: u64, row: usize) -> i64 {
    BASE_TS + (row as i64 % 4) * HOUR_US + (seq as i64 * 1000 + row as i64)
}

fn column(field: &Field, rows: usize, salt: u64) -> ArrayRef {
    let value = |row: usize| {
        (salt
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(row as u64 * 7919))
            >> 2
    };
    let known = |row: usize| !field.is_nullable() || value(row) % 3 != 0;
    let each = 0..rows;
    match field.data_type() {
        DataType::Int64 => Arc::new(Int64Array::from_iter(
            each.map(|row| known(row).then(|| value(row) as i64)),
        )),
        DataType::Int32 => Arc::new(Int32Array::from_iter(
            each.map(|row| known(row).then(|| value(row) as i32 % 100_000)),
        )),
        DataType::Float64 => Arc::new(Float64Array::from_iter(
            each.map(|row| known(row).then(|| value(row) as f64 / 3.0)),
        )),
        DataType::Boolean => Arc::new(BooleanArray::from_iter(
            each.map(|row| known(row).then(|| value(row) % 2 == 0)),
        )),
        DataType::Utf8 => {
            Arc::new(StringArray::from_iter(each.map(|row| {
                known(row).then(|| "ä\u{1F600}x".repeat(value(row) as usize % 4))
            })))
        }
        DataType::Timestamp(_, _) => Arc::new(
            TimestampMicrosecondArray::from_iter(
                each.map(|row| known(row).then(|| BASE_TS + row as i64)),
            )
            .with_timezone("UTC"),
        ),
        DataType::List(element) => {
            let lengths: Vec<usize> = each.map(|row| value(row) as usize % 4).collect();
            let total = lengths.iter().sum();
            let DataType::Struct(fields) = element.data_type() else {
                panic!("{element}")
            };
            let children = fields
                .iter()
                .enumerate()
                .map(|(i, child)| column(child, total, salt + 17 * i as u64))
                .collect();
            let elements = StructArray::new(fields.clone(), children, None);
            Arc::new(ListArray::new(
                Arc::clone(element),
                OffsetBuffer::from_lengths(lengths),
                Arc::new(elements),
                None,
            ))
        }
        other => panic!("{other}"),
    }
}

pub fn batch(table: Table, agent: &str, seq: u64, rows: &RecordBatch) -> Batch {
    let parquet = parquet_file::encode(table, std::slice::from_ref(rows)).unwrap();
    Batch {
        agent_id: agent.to_string(),
        host: "host-1".to_string(),
        batch_seq: seq,
        table: table.name().to_string(),
        schema_version: SCHEMA_VERSION,
        crc32: crc32fast::hash(&parquet),
        rows: rows.num_rows() as u64,
        parquet,
    }
}

/// A batch with its rows.
pub fn made(table: Table, agent: &str, seq: u64, n: usize) -> (Batch, RecordBatch) {
    let rows = rows(table, agent, seq, n);
    (batch(table, agent, seq, &rows), rows)
}

/// Segments of the log.
pub fn log_files(data: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(data.join("_wal"))
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "wal"))
        .collect();
    files.sort();
    files
}

/// The ledger of acknowledgements, a line each: agent, batch, table, rows, bytes, CRC-32.
pub async fn ledger(address: &str) -> Vec<String> {
    let question = "SELECT agent_id, batch_seq, table_name, rows, bytes, crc32 FROM batches";
    lines(&sql(address, question).await.unwrap())
}

/// What the ledger has to say of batches, by the sender's own account.
pub fn as_in_ledger<'a>(batches: impl IntoIterator<Item = &'a Batch>) -> Vec<String> {
    let line = |batch: &Batch| {
        format!(
            "{}|{}|{}|{}|{}|{}",
            batch.agent_id,
            batch.batch_seq,
            batch.table,
            batch.rows,
            batch.parquet.len(),
            crc32fast::hash(&batch.parquet)
        )
    };
    let mut lines: Vec<String> = batches.into_iter().map(line).collect();
    lines.sort();
    lines
}

/// Asks until the ledger has so many lines.
pub async fn wait_for_ledger(address: &str, lines: i64) {
    wait_for_rows(address, Table::Batches, lines).await;
}
