//! What a ticket and a prepared statement's handle say. Nothing is kept at the collector: the
//! statement, its values and the query's id travel with the client, so it may come back after a
//! restart.

use std::time::Duration;

use arrow::array::RecordBatch;
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;
use arrow_flight::FlightInfo;
use arrow_flight::sql::{Any, CommandPreparedStatementQuery, TicketStatementQuery};
use datafusion::common::ScalarValue;
use prost::Message;
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::access::Caller;
use crate::query::bind::Bound;
use crate::query::{Door, MAX_SQL_BYTES, QueryId, Question};

/// Largest handle that is read: the longest statement, and its values.
const MAX_BYTES: usize = 2 * MAX_SQL_BYTES;

/// The handle. It comes back from clients, and so is believed in nothing.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Handle {
    #[prost(string, tag = "1")]
    pub sql: String,
    /// An Arrow IPC stream of one row, a column per parameter; empty without parameters.
    #[prost(bytes = "vec", tag = "2")]
    pub values: Vec<u8>,
    /// Names the query that a ticket runs; empty in the handle of a prepared statement.
    #[prost(string, tag = "3")]
    pub query_id: String,
}

impl Handle {
    pub fn of(sql: &str) -> Handle {
        Handle {
            sql: sql.to_string(),
            values: Vec::new(),
            query_id: String::new(),
        }
    }

    pub fn read(bytes: &[u8]) -> Result<Handle, Status> {
        if bytes.len() > MAX_BYTES {
            let text = format!("the handle has more than {MAX_BYTES} bytes");
            return Err(Status::invalid_argument(text));
        }
        Handle::decode(bytes)
            .map_err(|_| Status::invalid_argument("the ticket or handle is not of this collector"))
    }

    /// The same with a query of its own.
    pub fn for_a_query(mut self) -> Handle {
        self.query_id = QueryId::new().to_string();
        self
    }

    /// The same with values for its parameters.
    pub fn bound(mut self, values: &RecordBatch) -> Result<Handle, Status> {
        if values.num_rows() != 1 {
            return Err(Status::unimplemented(format!(
                "one row of parameters is expected, {} were sent",
                values.num_rows()
            )));
        }
        let write = || {
            let mut writer = StreamWriter::try_new(Vec::new(), &values.schema())?;
            writer.write(values)?;
            writer.into_inner()
        };
        self.values = write().map_err(|error: arrow::error::ArrowError| {
            Status::invalid_argument(format!("the parameters cannot be used: {error}"))
        })?;
        if self.values.len() > MAX_SQL_BYTES {
            let text = format!("the parameters have more than {MAX_SQL_BYTES} bytes");
            return Err(Status::invalid_argument(text));
        }
        Ok(self)
    }

    /// The question that it stands for.
    pub fn question(&self, caller: Caller, time: Option<Duration>) -> Result<Question, Status> {
        let id = match self.query_id.as_str() {
            "" => QueryId::new(),
            id => id.parse().map_err(Status::invalid_argument)?,
        };
        Ok(Question {
            id,
            time,
            planner: Bound::planner(self.scalars()?),
            ..Question::new(caller, Door::Flight, self.sql.as_str())
        })
    }

    fn scalars(&self) -> Result<Vec<ScalarValue>, Status> {
        if self.values.is_empty() {
            return Ok(Vec::new());
        }
        let wrong = |error: &dyn std::fmt::Display| {
            Status::invalid_argument(format!("the parameters cannot be read: {error}"))
        };
        let mut rows =
            StreamReader::try_new(self.values.as_slice(), None).map_err(|e| wrong(&e))?;
        let row = match rows.next() {
            Some(row) => row.map_err(|error| wrong(&error))?,
            None => return Err(wrong(&"there are none")),
        };
        if row.num_rows() != 1 {
            return Err(wrong(&"there is more than one row"));
        }
        let values = row.columns().iter();
        values
            .map(|column| ScalarValue::try_from_array(column, 0).map_err(|error| wrong(&error)))
            .collect()
    }
}

/// The query that a client got this answer for.
pub(super) fn query_of(info: &FlightInfo) -> Result<QueryId, Status> {
    let ticket = info.endpoint.iter().find_map(|at| at.ticket.as_ref());
    let ticket = ticket.ok_or_else(|| Status::invalid_argument("no ticket in the FlightInfo"))?;
    let unreadable = || Status::invalid_argument("the ticket is not of a query");
    let any = Any::decode(ticket.ticket.as_ref()).map_err(|_| unreadable())?;
    let statement: Option<TicketStatementQuery> = any.unpack().ok().flatten();
    let prepared: Option<CommandPreparedStatementQuery> = any.unpack().ok().flatten();
    let handle = match (statement, prepared) {
        (Some(statement), _) => statement.statement_handle,
        (None, Some(prepared)) => prepared.prepared_statement_handle,
        (None, None) => return Err(unreadable()),
    };
    let id = Handle::read(&handle)?.query_id;
    id.parse().map_err(Status::invalid_argument)
}

/// The client's deadline (`grpc-timeout`: at most eight digits and a unit, by gRPC over HTTP/2).
pub(super) fn time_allowed(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, StringArray};

    use super::*;

    #[test]
    fn values_come_back_as_they_were() {
        let row = RecordBatch::try_from_iter([
            ("0", Arc::new(Int64Array::from(vec![7])) as _),
            ("1", Arc::new(StringArray::from(vec![None::<&str>])) as _),
        ])
        .unwrap();
        let handle = Handle::of("SELECT $1, $2").bound(&row).unwrap();
        let handle = Handle::read(&handle.encode_to_vec()).unwrap();
        assert_eq!(
            handle.scalars().unwrap(),
            [ScalarValue::Int64(Some(7)), ScalarValue::Utf8(None)]
        );
        let two = arrow::compute::concat_batches(&row.schema(), [&row, &row]).unwrap();
        assert!(Handle::of("SELECT $1").bound(&two).is_err());
    }

    #[test]
    fn deadlines_are_read_as_grpc_writes_them() {
        let time = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            time_allowed(&metadata)
        };
        assert_eq!(time("30S"), Some(Duration::from_secs(30)));
        assert_eq!(time("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(time("2H"), Some(Duration::from_secs(7200)));
        for wrong in ["", "S", "30", "x5S", "999999999S"] {
            assert_eq!(time(wrong), None, "{wrong}");
        }
    }
}
