//! Batches that are encoded once and sent by many agents: names are put into the finished file.
//!
//! A file is encoded with marks in the place of agent, host and batch number. Each stands in it as
//! it is: in the one entry of its column's dictionary (too short to be compressed) and in the
//! footer's smallest and largest value. Overwriting them costs a copy of the file and its CRC,
//! so that the load hardly takes anything from the collector that it measures. [`Prepared::new`]
//! reads a file back that it has patched, and fails unless every row has the new names.

use anyhow::{Context, Result, bail, ensure};
use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use bytes::Bytes;
use vramscope_wire::proto::Batch;
use vramscope_wire::{SCHEMA_VERSION, Table, parquet_file};

use super::content::{self, Name};

const AGENT_MARK: &str = "5f2b9c1d-7e13-4a96-b8d0-7e3a91c4d86b";
const HOST_MARK: &str = "host-q7x2k9";
const SEQ_MARK: u64 = 0x2F5E_91C3_7AB4_6D08;

/// An agent's names, as long as the marks.
#[derive(Debug, Clone)]
pub struct Identity {
    /// `agent_id`.
    pub agent_id: String,
    /// `host`.
    pub host: String,
}

impl Identity {
    /// The names of agent `number`, below 10^6.
    pub fn new(number: usize) -> Identity {
        Identity {
            agent_id: format!("5f2b9c1d-7e13-4a96-b8d0-{number:012}"),
            host: format!("host-{number:06}"),
        }
    }
}

/// A batch without its names.
#[derive(Debug)]
pub struct Prepared {
    /// Its table.
    pub table: Table,
    /// Its rows.
    pub rows: u64,
    parquet: Vec<u8>,
    agents: Vec<usize>,
    hosts: Vec<usize>,
    seqs: Vec<usize>,
}

impl Prepared {
    /// Encodes rows of a table, from `ts` on (microseconds since 1970); `variant` (below 1024)
    /// makes others of the same kind.
    pub fn new(table: Table, rows: usize, variant: u64, ts: i64) -> Result<Prepared> {
        let name = Name {
            agent_id: AGENT_MARK.to_string(),
            host: HOST_MARK.to_string(),
            agent: variant,
            seq: SEQ_MARK,
            ts,
            forgery: 0,
        };
        let batch = content::rows(table, &name, rows)?;
        let parquet = parquet_file::encode(table, &[batch]).context("failed to encode a batch")?;
        let prepared = Prepared {
            table,
            rows: rows as u64,
            agents: places(&parquet, AGENT_MARK.as_bytes()),
            hosts: places(&parquet, HOST_MARK.as_bytes()),
            seqs: places(&parquet, &SEQ_MARK.to_le_bytes()),
            parquet,
        };
        prepared
            .check()
            .with_context(|| format!("batches of {} cannot be prepared", table.name()))?;
        Ok(prepared)
    }

    /// Size of the file.
    pub fn bytes(&self) -> usize {
        self.parquet.len()
    }

    /// The batch of an agent.
    pub fn of(&self, identity: &Identity, seq: u64) -> Batch {
        let mut parquet = self.parquet.clone();
        let mut put = |places: &[usize], bytes: &[u8]| {
            for place in places {
                parquet[*place..*place + bytes.len()].copy_from_slice(bytes);
            }
        };
        put(&self.agents, identity.agent_id.as_bytes());
        put(&self.hosts, identity.host.as_bytes());
        put(&self.seqs, &seq.to_le_bytes());
        Batch {
            agent_id: identity.agent_id.clone(),
            host: identity.host.clone(),
            batch_seq: seq,
            table: self.table.name().to_string(),
            schema_version: SCHEMA_VERSION,
            crc32: crc32fast::hash(&parquet),
            rows: self.rows,
            parquet,
        }
    }

    /// Reads a patched file back.
    fn check(&self) -> Result<()> {
        let identity = Identity::new(4711);
        let seq = 0x0102_0304_0506;
        let batch = self.of(&identity, seq);
        let pieces = parquet_file::decode(self.table, Bytes::from(batch.parquet))?;
        let mut rows = 0;
        for piece in pieces {
            rows += piece.num_rows() as u64;
            for (column, wanted) in [("agent_id", &identity.agent_id), ("host", &identity.host)] {
                // Stacks belong to no host.
                let Some(column) = piece.column_by_name(column) else {
                    continue;
                };
                let is_patched = column
                    .as_string::<i32>()
                    .iter()
                    .all(|text| text == Some(wanted));
                ensure!(is_patched, "a name is not where it was looked for");
            }
            let column = piece.column_by_name("batch_seq").context("no batch_seq")?;
            let seqs = column.as_primitive::<Int64Type>().values();
            ensure!(
                seqs.iter().all(|found| *found == seq as i64),
                "batch_seq is elsewhere"
            );
        }
        if rows != self.rows {
            bail!("{rows} rows of {}", self.rows);
        }
        Ok(())
    }
}

fn places(of: &[u8], mark: &[u8]) -> Vec<usize> {
    let windows = of.windows(mark.len()).enumerate();
    windows
        .filter(|(_, window)| *window == mark)
        .map(|(place, _)| place)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Patching gives what encoding gives, for every table and from one row to many.
    #[test]
    fn a_patched_file_is_the_one_that_would_have_been_encoded() {
        for table in content::TABLES {
            for rows in [1, 50, 3000] {
                let ts = 1_795_957_500_000_000;
                let prepared = Prepared::new(table, rows, 5, ts).unwrap();
                let batch = prepared.of(&Identity::new(17), 23);
                let name = Name {
                    agent_id: Identity::new(17).agent_id,
                    host: Identity::new(17).host,
                    agent: 5,
                    seq: SEQ_MARK,
                    ts,
                    forgery: 0,
                };
                let expected = content::rows(table, &name, rows).unwrap();
                let decoded = parquet_file::decode(table, Bytes::from(batch.parquet)).unwrap();
                let decoded = arrow::compute::concat_batches(&expected.schema(), &decoded).unwrap();
                for (index, field) in expected.schema().fields().iter().enumerate() {
                    if field.name() == "batch_seq" {
                        let seqs = decoded.column(index).as_primitive::<Int64Type>();
                        assert!(seqs.values().iter().all(|seq| *seq == 23));
                    } else {
                        assert_eq!(decoded.column(index), expected.column(index), "{field}");
                    }
                }
            }
        }
    }
}
