//! Questions to a collector over Flight SQL.

use anyhow::{Context, Result};
use arrow::array::{Array, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::sql::client::FlightSqlServiceClient;
use futures::TryStreamExt;
use tonic::transport::Channel;
use vramscope_wire::Table;

use super::content::{Digest, TABLES, check_column};
use super::model::Found;

/// Largest message of an answer.
const MESSAGE_BYTES: usize = 64 << 20;

/// A client.
pub struct Sql(FlightSqlServiceClient<Channel>);

impl Sql {
    /// Connects to a collector's gRPC port.
    pub async fn connect(address: &str) -> Result<Sql> {
        let channel = Channel::from_shared(format!("http://{address}"))
            .context("the collector's address is wrong")?
            .connect()
            .await
            .with_context(|| format!("failed to connect to the collector at {address}"))?;
        let inner = FlightServiceClient::new(channel).max_decoding_message_size(MESSAGE_BYTES);
        Ok(Sql(FlightSqlServiceClient::new_from_inner(inner)))
    }

    /// Answers a question.
    pub async fn ask(&mut self, sql: &str) -> Result<Vec<RecordBatch>> {
        let asking = || format!("the collector did not answer {sql:?}");
        let info = self
            .0
            .execute(sql.to_string(), None)
            .await
            .with_context(asking)?;
        let mut batches = Vec::new();
        for endpoint in info.endpoint {
            let ticket = endpoint.ticket.with_context(asking)?;
            let rows = self.0.do_get(ticket).await.with_context(asking)?;
            let rows: Vec<RecordBatch> = rows.try_collect().await.with_context(asking)?;
            batches.extend(rows);
        }
        Ok(batches)
    }

    /// Rows of a table.
    pub async fn count(&mut self, table: Table) -> Result<u64> {
        let answer = self
            .ask(&format!("SELECT count(*) FROM {}", table.name()))
            .await?;
        let mut rows = numbers(&answer, 0)?;
        Ok(rows.next().context("a count has no row")? as u64)
    }

    /// The digest of every batch of every table that is sent here.
    pub async fn digests(&mut self) -> Result<Found> {
        let mut found = Found::new();
        for table in TABLES {
            let check = check_column(table)?;
            let answer = self
                .ask(&format!(
                    "SELECT agent_id, batch_seq, count(*), sum({check}), bit_xor({check}) \
                     FROM {} GROUP BY agent_id, batch_seq",
                    table.name()
                ))
                .await?;
            let agents = texts(&answer, 0)?;
            let (mut seqs, mut rows) = (numbers(&answer, 1)?, numbers(&answer, 2)?);
            let (mut sums, mut xors) = (numbers(&answer, 3)?, numbers(&answer, 4)?);
            for agent in agents {
                let next = |from: &mut dyn Iterator<Item = i64>| from.next().unwrap_or(0);
                let key = (agent, next(&mut seqs) as u64);
                let digest = Digest {
                    rows: next(&mut rows) as u64,
                    sum: next(&mut sums),
                    xor: next(&mut xors),
                };
                found.insert((table, key), digest);
            }
        }
        Ok(found)
    }
}

/// A column of numbers. NULL, of which there is none in what is asked, would read as 0.
pub fn numbers(batches: &[RecordBatch], column: usize) -> Result<std::vec::IntoIter<i64>> {
    let mut values = Vec::new();
    for batch in batches {
        let column = cast(batch.column(column), &DataType::Int64)?;
        let column = column.as_primitive::<Int64Type>();
        values.extend(column.iter().map(Option::unwrap_or_default));
    }
    Ok(values.into_iter())
}

/// A column of texts.
pub fn texts(batches: &[RecordBatch], column: usize) -> Result<Vec<String>> {
    let mut values = Vec::new();
    for batch in batches {
        let column = cast(batch.column(column), &DataType::Utf8)?;
        let column = column.as_string::<i32>();
        values.extend((0..column.len()).map(|row| column.value(row).to_string()));
    }
    Ok(values)
}
