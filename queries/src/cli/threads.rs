//! Threads of their own for queries. A query may compute for minutes without a pause (a large
//! cross join does), and on shared threads it would hold up the very timer and the very Ctrl-C
//! that should stop it. Whoever waits for it waits elsewhere.
//!
//! A query that nobody waits for any more is cancelled at its next pause.

use datafusion::error::DataFusionError;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::StreamExt;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use vramscope_queries::Error;
use vramscope_queries::complexity::STACK_BYTES;

/// Batches that may wait for their reader.
const BATCHES_AHEAD: usize = 2;

/// The threads. Dropping them leaves running queries to the end of the process.
pub struct QueryThreads {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
}

struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl QueryThreads {
    pub fn start() -> std::io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .thread_name("query")
            .thread_stack_size(STACK_BYTES)
            .enable_all()
            .build()?;
        Ok(QueryThreads {
            runtime: Some(runtime),
        })
    }

    /// Starts a query here, and hands its rows out there.
    pub async fn stream(
        &self,
        work: impl Future<Output = Result<SendableRecordBatchStream, Error>> + Send + 'static,
    ) -> Result<SendableRecordBatchStream, Error> {
        // There until it is dropped.
        let runtime = self.runtime.as_ref().expect("running threads");
        let (send_schema, schema) = oneshot::channel();
        let (send_batch, batches) = mpsc::channel(BATCHES_AHEAD);
        let task = runtime.spawn(async move {
            let mut rows = match work.await {
                Ok(rows) => rows,
                Err(error) => {
                    let _ = send_schema.send(Err(error));
                    return;
                }
            };
            let _ = send_schema.send(Ok(rows.schema()));
            while let Some(batch) = rows.next().await {
                if send_batch.send(batch).await.is_err() {
                    return;
                }
            }
        });
        let guard = AbortOnDrop(task.abort_handle());
        let schema = match schema.await {
            Ok(answer) => answer?,
            Err(_) => return Err(died(task.await.err())),
        };
        let rows = futures::stream::unfold(
            (batches, guard, Some(task)),
            |(mut batches, guard, mut task)| async move {
                if let Some(batch) = batches.recv().await {
                    return Some((batch, (batches, guard, task)));
                }
                // The channel also ends when the task dies: that is no end of the answer.
                let failure = task.take()?.await.err()?;
                let error = DataFusionError::from(died(Some(failure)));
                Some((Err(error), (batches, guard, None)))
            },
        );
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, rows)))
    }
}

impl Drop for QueryThreads {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn died(failure: Option<tokio::task::JoinError>) -> Error {
    let why = failure.map_or("unknown".to_string(), |failure| failure.to_string());
    Error::Query(DataFusionError::Internal(format!(
        "the query's task died: {why}"
    )))
}
