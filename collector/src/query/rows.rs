//! An answer on its way to a client.

use arrow::datatypes::SchemaRef;
use arrow::record_batch::RecordBatch;
use futures::Stream;
use vramscope_queries::Error;

use super::QueryId;
use super::log::Record;
use super::pool::Running;
use super::running::Registered;

/// Rows that are being computed. Dropping them ends the query.
pub struct Rows {
    /// The question's id.
    pub id: QueryId,
    /// Their schema.
    pub schema: SchemaRef,
    running: Running,
    record: Record,
    _registered: Registered,
}

impl Rows {
    pub(super) fn new(running: Running, record: Record, registered: Registered) -> Rows {
        Rows {
            id: record.id(),
            schema: SchemaRef::clone(&running.schema),
            running,
            record,
            _registered: registered,
        }
    }

    /// The next batch. An error (the query failed, or met a limit) is the last item.
    pub async fn next(&mut self) -> Option<Result<RecordBatch, Error>> {
        let next = self.running.next().await;
        match &next {
            Some(Ok(batch)) => self.record.handed_out(batch.num_rows()),
            Some(Err(error)) => self.record.failed(error),
            None => self.record.answered(),
        }
        next
    }

    /// The batches. The last item is an error if the query failed, met a limit or was cancelled.
    pub fn into_stream(self) -> impl Stream<Item = Result<RecordBatch, Error>> + Send + 'static {
        futures::stream::unfold(Some(self), |rows| async move {
            let mut rows = rows?;
            match rows.next().await? {
                Ok(batch) => Some((Ok(batch), Some(rows))),
                Err(error) => Some((Err(error), None)),
            }
        })
    }
}
