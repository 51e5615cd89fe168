//! Threads of their own for queries.
//!
//! A query computes for seconds without giving its thread back (a large join does so for
//! minutes), and on shared threads it would hold up agents' streams, commits and the very timer
//! that should end it. So queries run here, and whoever waits for them waits elsewhere.
//!
//! Invariants:
//! - the time limit holds for the client whatever the query does;
//! - a query whose client is gone, or whose time is over, is cancelled at its next pause, and
//!   holds its place until then: stuck queries make others wait in line, never the collector.

use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use arrow::record_batch::RecordBatch;
use datafusion::execution::SendableRecordBatchStream;
use futures::{Stream, StreamExt};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use vramscope_queries::Error;

/// The threads. Dropping it leaves running queries to the end of the process.
#[derive(Debug)]
pub struct Pool {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    shared: Lane,
}

/// A way to run queries on a [`Pool`].
#[derive(Debug, Clone)]
pub struct Lane {
    handle: Handle,
    places: Arc<Semaphore>,
}

impl Pool {
    /// A pool with a thread per processor.
    pub fn new() -> std::io::Result<Pool> {
        let processors = std::thread::available_parallelism().map_or(2, |n| n.get());
        let runtime = Builder::new_multi_thread()
            .worker_threads(processors)
            .thread_name("query")
            .enable_all()
            .build()?;
        // Memory is shared by the queries that run: more at a time would only fail each other.
        let places = Arc::new(Semaphore::new(2 * processors));
        let shared = Lane {
            handle: runtime.handle().clone(),
            places,
        };
        Ok(Pool {
            runtime: Some(runtime),
            shared,
        })
    }

    /// A way to use it.
    pub fn lane(&self) -> Lane {
        self.shared.clone()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Ends a task when nobody waits for it any more.
struct EndOnDrop(AbortHandle);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Rows that are computed on the pool.
pub struct Rows {
    /// Their schema.
    pub schema: SchemaRef,
    batches: mpsc::Receiver<Result<RecordBatch, Error>>,
    deadline: Instant,
    time: Duration,
    _task: EndOnDrop,
}

impl Lane {
    /// Runs work that ends with a value, planning for example.
    pub async fn run<T: Send + 'static>(
        &self,
        time: Duration,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let places = Arc::clone(&self.places);
        let task = self.handle.spawn(async move {
            // The semaphore is never closed.
            let _place = places.acquire_owned().await.ok();
            work.await
        });
        let _task = EndOnDrop(task.abort_handle());
        match tokio::time::timeout(time, task).await {
            Ok(Ok(done)) => done,
            Ok(Err(died)) => Err(internal(died)),
            Err(_) => Err(Error::TimedOut(time)),
        }
    }

    /// Runs work that ends with a stream, and the stream itself. `time` is for both together.
    pub async fn stream(
        &self,
        time: Duration,
        work: impl Future<Output = Result<SendableRecordBatchStream, Error>> + Send + 'static,
    ) -> Result<Rows, Error> {
        let deadline = Instant::now() + time;
        let (send_schema, schema) = oneshot::channel();
        let (send_batch, batches) = mpsc::channel(2);
        let places = Arc::clone(&self.places);
        let task = self.handle.spawn(async move {
            // The semaphore is never closed.
            let _place = places.acquire_owned().await.ok();
            let mut rows = match work.await {
                Ok(rows) => rows,
                Err(error) => {
                    let _ = send_schema.send(Err(error));
                    return;
                }
            };
            let _ = send_schema.send(Ok(rows.schema()));
            while let Some(batch) = rows.next().await {
                if send_batch.send(batch.map_err(Error::from)).await.is_err() {
                    return;
                }
            }
        });
        let _task = EndOnDrop(task.abort_handle());
        let schema = match tokio::time::timeout_at(deadline, schema).await {
            Ok(Ok(schema)) => schema?,
            Ok(Err(_)) => return Err(internal("the query's task died")),
            Err(_) => return Err(Error::TimedOut(time)),
        };
        Ok(Rows {
            schema,
            batches,
            deadline,
            time,
            _task,
        })
    }
}

impl Rows {
    /// The batches. The last item is an error if the query failed or its time was over.
    pub fn into_stream(self) -> impl Stream<Item = Result<RecordBatch, Error>> + Send + 'static {
        futures::stream::unfold(Some(self), |rows| async move {
            let mut rows = rows?;
            match tokio::time::timeout_at(rows.deadline, rows.batches.recv()).await {
                Ok(Some(Ok(batch))) => Some((Ok(batch), Some(rows))),
                Ok(Some(Err(error))) => Some((Err(error), None)),
                Ok(None) => None,
                Err(_) => Some((Err(Error::TimedOut(rows.time)), None)),
            }
        })
    }
}

fn internal(what: impl ToString) -> Error {
    Error::Query(datafusion::error::DataFusionError::Internal(
        what.to_string(),
    ))
}
