//! Threads of their own for queries.
//!
//! A query computes for seconds without giving its thread back (a large join does so for
//! minutes), and on shared threads it would hold up agents' streams, commits and the very timer
//! that should end it. So queries run here, and whoever waits for them waits elsewhere.
//!
//! Invariants:
//! - the time limit and a cancel hold for the client whatever the query does;
//! - a query whose client is gone, whose time is over or that was cancelled is ended at its next
//!   pause, or at the next rule of its planning, and holds its place until then: stuck queries make
//!   others wait in line, never the collector;
//! - planning has places of its own: what takes milliseconds does not wait for what takes minutes.

use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use arrow::record_batch::RecordBatch;
use datafusion::execution::SendableRecordBatchStream;
use futures::StreamExt;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;
use vramscope_queries::Error;
use vramscope_queries::cancel::Cancel;
use vramscope_queries::complexity::STACK_BYTES;

use super::line::Line;

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
    queries: Line,
    plans: Line,
}

impl Pool {
    /// A pool with a thread per processor.
    pub fn new() -> std::io::Result<Pool> {
        let processors = std::thread::available_parallelism().map_or(2, |n| n.get());
        let runtime = Builder::new_multi_thread()
            .worker_threads(processors)
            .thread_name("query")
            .thread_stack_size(STACK_BYTES)
            .enable_all()
            .build()?;
        // Memory is shared by the queries that run: more at a time would only fail each other.
        let shared = Lane {
            handle: runtime.handle().clone(),
            queries: Line::new(2 * processors),
            plans: Line::new(2 * processors),
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

/// Ends a task when nobody waits for it any more: at its next pause, or in the midst of planning.
struct EndOnDrop {
    task: AbortHandle,
    planning: Cancel,
}

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.planning.cancel();
        self.task.abort();
    }
}

/// For how long somebody waits, and for whom.
#[derive(Debug, Clone)]
pub(super) struct Wait {
    /// Whose place in line it is.
    pub who: Arc<str>,
    /// The time limit, for its message.
    pub time: Duration,
    /// When it is over.
    pub deadline: Instant,
    /// Turns true when the query is cancelled.
    pub cancelled: watch::Receiver<bool>,
}

impl Wait {
    /// From now on.
    pub fn new(who: &Arc<str>, time: Duration, cancelled: watch::Receiver<bool>) -> Wait {
        Wait {
            who: Arc::clone(who),
            time,
            deadline: Instant::now() + time,
            cancelled,
        }
    }

    /// Waits for something, but not longer than this.
    async fn bound<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Error> {
        tokio::select! {
            biased;
            // An error means that nobody can cancel it any more.
            Ok(_) = self.cancelled.wait_for(|cancelled| *cancelled) => Err(Error::Cancelled),
            () = tokio::time::sleep_until(self.deadline) => Err(Error::TimedOut(self.time)),
            done = work => Ok(done),
        }
    }
}

/// Rows that are computed on the pool.
pub(super) struct Running {
    pub schema: SchemaRef,
    batches: mpsc::Receiver<Result<RecordBatch, Error>>,
    wait: Wait,
    _task: EndOnDrop,
}

impl Lane {
    /// Queries that run, and questions that wait for a place.
    pub fn counts(&self) -> (usize, usize) {
        self.queries.counts()
    }

    /// Runs work that ends with a value, planning for example.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        mut wait: Wait,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let place = wait.clone().bound(self.plans.enter(&wait.who)).await??;
        let (task, _task) = self.start(async move {
            let _place = place;
            work.await
        });
        match wait.bound(task).await? {
            Ok(done) => done,
            Err(died) => Err(internal(died)),
        }
    }

    /// Runs work that ends with a stream, and the stream itself.
    pub(super) async fn stream(
        &self,
        mut wait: Wait,
        work: impl Future<Output = Result<SendableRecordBatchStream, Error>> + Send + 'static,
    ) -> Result<Running, Error> {
        let place = wait.clone().bound(self.queries.enter(&wait.who)).await??;
        let (send_schema, schema) = oneshot::channel();
        let (send_batch, batches) = mpsc::channel(2);
        let deadline = wait.deadline;
        let (_, task) = self.start(async move {
            let _place = place;
            let mut rows = match work.await {
                Ok(rows) => rows,
                Err(error) => {
                    let _ = send_schema.send(Err(error));
                    return;
                }
            };
            let _ = send_schema.send(Ok(rows.schema()));
            while let Some(batch) = rows.next().await {
                // A client that takes nothing holds no place beyond the time limit.
                let sent = send_batch.send(batch.map_err(Error::from));
                if !matches!(tokio::time::timeout_at(deadline, sent).await, Ok(Ok(()))) {
                    return;
                }
            }
        });
        let schema = match wait.bound(schema).await? {
            Ok(schema) => schema?,
            Err(_) => return Err(internal("the query's task died")),
        };
        Ok(Running {
            schema,
            batches,
            wait,
            _task: task,
        })
    }

    /// Starts a task that ends with whoever waits for it.
    fn start<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> (JoinHandle<T>, EndOnDrop) {
        let planning = Cancel::default();
        let task = self.handle.spawn(planning.clone().scope(work));
        let end = EndOnDrop {
            task: task.abort_handle(),
            planning,
        };
        (task, end)
    }
}

impl Running {
    /// The next batch; an error is the last.
    pub async fn next(&mut self) -> Option<Result<RecordBatch, Error>> {
        match self.wait.bound(self.batches.recv()).await {
            Ok(batch) => batch,
            Err(error) => Some(Err(error)),
        }
    }
}

fn internal(what: impl ToString) -> Error {
    Error::Query(datafusion::error::DataFusionError::Internal(
        what.to_string(),
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use futures::FutureExt;
    use vramscope_queries::session::{self, Limits, Options};

    use super::*;

    /// Plans again and again without a pause, so that no task's end could end it, until it fails.
    fn planning(ended: &Arc<AtomicBool>) -> impl Future<Output = Error> + Send + use<> {
        let ended = Arc::clone(ended);
        async move {
            let session = session::session(&Options::default()).unwrap();
            let give_up = Instant::now() + Duration::from_secs(120);
            let limits = Limits {
                time: None,
                ..Limits::default()
            };
            let sql = "SELECT value FROM range(0, 3)";
            while Instant::now() < give_up {
                let answer = session::query(&session, sql, limits).now_or_never();
                if let Err(error) = answer.expect("planning does not wait").map(|_| ()) {
                    ended.store(true, Ordering::Relaxed);
                    return error;
                }
            }
            Error::Busy("nobody ended it".to_string())
        }
    }

    async fn is_set(ended: &AtomicBool) {
        let give_up = Instant::now() + Duration::from_secs(60);
        while !ended.load(Ordering::Relaxed) {
            assert!(Instant::now() < give_up, "it plans for nobody");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn planning_ends_when_nobody_waits_for_it() {
        let pool = Pool::new().unwrap();
        let lane = pool.lane();
        let (_cancel, cancelled) = watch::channel(false);
        let wait = || {
            Wait::new(
                &Arc::from("a"),
                Duration::from_millis(200),
                cancelled.clone(),
            )
        };
        let ended = Arc::new(AtomicBool::new(false));
        let work = planning(&ended).map(Err::<(), _>);
        let answer = lane.run(wait(), work).await;
        assert!(matches!(answer, Err(Error::TimedOut(_))), "{answer:?}");
        is_set(&ended).await;
        let ended = Arc::new(AtomicBool::new(false));
        let answer = lane.stream(wait(), planning(&ended).map(Err)).await;
        assert!(matches!(answer.map(|_| ()), Err(Error::TimedOut(_))));
        is_set(&ended).await;
    }
}
