//! Where questions are asked: a data folder opened here, or a collector by one of its protocols.

mod flight;
mod http;
mod postgres;

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use datafusion::execution::SendableRecordBatchStream;
use futures::{StreamExt, TryStreamExt};
use vramscope_queries::folder::Folder;
use vramscope_queries::session::{self, Limits, Options};
use vramscope_queries::{Error, quality};

use crate::login::{Address, Login, Protocol};
use crate::output::Sink;
use crate::rows::Rows;
use crate::threads::QueryThreads;
use flight::Flight;
use http::Http;
use postgres::Postgres;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Something that answers SQL.
pub enum Door {
    /// A folder.
    Folder {
        folder: Box<Folder>,
        threads: QueryThreads,
        /// Damaged files already named to the user.
        named: usize,
    },
    /// A collector.
    Flight(Box<Flight>),
    Http(Box<Http>),
    Postgres(Box<Postgres>),
}

impl Door {
    pub async fn folder(dir: &Path, options: Options) -> Result<Door, Error> {
        let folder = Box::new(Folder::open(dir, options).await?);
        let threads = QueryThreads::start().map_err(|cause| Error::Io {
            path: dir.to_path_buf(),
            cause,
        })?;
        let mut door = Door::Folder {
            folder,
            threads,
            named: 0,
        };
        door.name_skipped_files().await;
        Ok(door)
    }

    pub async fn collector(address: &Address, login: &Login) -> Result<Door, Error> {
        Ok(match address.protocol {
            Protocol::Flight => Door::Flight(Box::new(Flight::connect(address, login).await?)),
            Protocol::Http => Door::Http(Box::new(Http::new(address, login)?)),
            Protocol::Postgres => {
                Door::Postgres(Box::new(Postgres::connect(address, login).await?))
            }
        })
    }

    /// Writes a question's answer into a sink.
    pub async fn answer(
        &mut self,
        sql: &str,
        limits: Limits,
        sink: &mut Sink,
    ) -> anyhow::Result<()> {
        let result = self.write_answer(sql, limits, sink).await;
        self.name_skipped_files().await;
        match result {
            Err(error) => Err(self.explain(error).await),
            Ok(()) => Ok(()),
        }
    }

    /// A question's answer as a whole.
    pub async fn collect(&mut self, sql: &str, limits: Limits) -> anyhow::Result<Rows> {
        let result = match self.stream(sql, limits).await {
            Ok(rows) => rows.try_collect().await.map_err(Error::from),
            Err(error) => Err(error),
        };
        self.name_skipped_files().await;
        match result {
            Ok(batches) => Ok(Rows(batches)),
            Err(error) => Err(self.explain(error.into()).await),
        }
    }

    async fn write_answer(
        &mut self,
        sql: &str,
        limits: Limits,
        sink: &mut Sink,
    ) -> anyhow::Result<()> {
        let mut rows = self.stream(sql, limits).await?;
        sink.start(rows.schema())?;
        while let Some(batch) = rows.next().await {
            sink.write(&batch.map_err(Error::from)?)?;
        }
        Ok(())
    }

    async fn stream(
        &mut self,
        sql: &str,
        limits: Limits,
    ) -> Result<SendableRecordBatchStream, Error> {
        match self {
            Door::Folder {
                folder, threads, ..
            } => {
                let session = folder.session().await?;
                let sql = sql.to_string();
                // The limits are kept on this side, where a busy query cannot hold them up.
                let none = Limits {
                    time: None,
                    rows: None,
                };
                let work = async move { session::query(&session, &sql, none).await };
                let rows = session::within(limits.time, threads.stream(work)).await?;
                Ok(session::limited(rows, limits))
            }
            Door::Flight(flight) => {
                let rows = session::within(limits.time, flight.stream(sql)).await?;
                Ok(session::limited(rows, limits))
            }
            Door::Http(http) => {
                let rows = session::within(limits.time, http.stream(sql, limits.time)).await?;
                Ok(session::limited(rows, limits))
            }
            Door::Postgres(postgres) => {
                let rows = session::within(limits.time, postgres.stream(sql)).await?;
                Ok(session::limited(rows, limits))
            }
        }
    }

    /// Which files are damaged, if that is why the query failed: the engine's text names the
    /// damage, but not always the file.
    async fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let Door::Folder { folder, .. } = self else {
            return error;
        };
        let Some(query_error) = error.downcast_ref::<Error>() else {
            return error;
        };
        if !query_error.may_be_damage() {
            return error;
        }
        let damaged = folder.find_damage().await;
        if damaged.is_empty() {
            error
        } else {
            Error::Damaged(damaged).into()
        }
    }

    async fn name_skipped_files(&mut self) {
        let Door::Folder { folder, named, .. } = self else {
            return;
        };
        let skipped = folder.skipped().await;
        if skipped.len() > *named {
            eprintln!(
                "note: {} damaged files are left out; answers are incomplete",
                skipped.len()
            );
            for file in &skipped {
                eprintln!("note: left out {:?}: {}", file.path, file.reason);
            }
            *named = skipped.len();
        }
    }

    /// One line about lost events behind an answer; `None` if nothing was lost, or if the
    /// question was not about recorded data.
    pub async fn loss_note(&mut self, sql: &str, limits: Limits) -> Option<String> {
        if !quality::reads_recorded_data(sql) {
            return None;
        }
        match self.loss(limits).await {
            Ok(loss) => loss.note(),
            // Unknown is not "nothing was lost".
            Err(error) => Some(format!(
                "note: whether events were lost is not known: {error:#}"
            )),
        }
    }

    async fn loss(&mut self, limits: Limits) -> anyhow::Result<quality::Loss> {
        let rows = self
            .stream(
                quality::LOSS_QUERY,
                Limits {
                    rows: None,
                    ..limits
                },
            )
            .await?;
        let batches: Vec<RecordBatch> = rows.try_collect().await?;
        let batch = batches
            .iter()
            .find(|b| b.num_rows() == 1)
            .context("the loss query gave no row")?;
        let number = |index: usize| -> anyhow::Result<i64> {
            let column = batch.column(index).as_primitive_opt::<Int64Type>();
            Ok(column.context("the loss query gave no numbers")?.value(0))
        };
        Ok(quality::Loss::from_row([
            number(0)?,
            number(1)?,
            number(2)?,
            number(3)?,
        ]))
    }
}

/// An error with what is behind it: tonic's own text is only "transport error".
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.ends_with(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        source = inner.source();
    }
    text
}
