//! Where questions are asked: a data folder opened here, or a collector by Flight SQL.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{Int64Type, SchemaRef};
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::sql::client::FlightSqlServiceClient;
use datafusion::error::DataFusionError;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{StreamExt, TryStreamExt};
use tonic::transport::{Channel, Endpoint};
use vramscope_queries::folder::Folder;
use vramscope_queries::session::{self, Limits, Options};
use vramscope_queries::{Error, quality};

use crate::output::Sink;
use crate::rows::Rows;
use crate::threads::QueryThreads;

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
    Collector {
        client: Box<FlightSqlServiceClient<Channel>>,
        url: String,
    },
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

    pub async fn collector(url: &str) -> Result<Door, Error> {
        let failed = |detail: String| Error::Collector {
            url: url.to_string(),
            detail,
        };
        let endpoint = Endpoint::from_shared(url.to_string())
            .map_err(|_| failed("not a URL; for example http://127.0.0.1:7717".to_string()))?
            .connect_timeout(CONNECT_TIMEOUT);
        let channel = endpoint
            .connect()
            .await
            .map_err(|e| failed(format!("failed to connect: {}", chain(&e))))?;
        // Batches of wide rows pass tonic's 4 MiB; the server decides how large they are.
        let inner = FlightServiceClient::new(channel).max_decoding_message_size(usize::MAX);
        let client = Box::new(FlightSqlServiceClient::new_from_inner(inner));
        Ok(Door::Collector {
            client,
            url: url.to_string(),
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
            Door::Collector { client, url } => {
                let rows = session::within(limits.time, remote_stream(client, url, sql)).await?;
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

async fn remote_stream(
    client: &mut FlightSqlServiceClient<Channel>,
    url: &str,
    sql: &str,
) -> Result<SendableRecordBatchStream, Error> {
    let failed = |detail: String| Error::Collector {
        url: url.to_string(),
        detail,
    };
    let info = client
        .execute(sql.to_string(), None)
        .await
        .map_err(|e| failed(flight_text(&e)))?;
    let announced = info
        .clone()
        .try_decode_schema()
        .ok()
        .filter(|s| !s.fields().is_empty());
    let mut batches = Vec::new();
    let mut schema: Option<SchemaRef> = announced.map(Arc::new);
    for endpoint in info.endpoint {
        let ticket = endpoint
            .ticket
            .ok_or_else(|| failed("an endpoint without a ticket".to_string()))?;
        let mut stream = client
            .do_get(ticket)
            .await
            .map_err(|e| failed(flight_text(&e)))?;
        if schema.is_none() {
            // Not announced: the schema comes with the first message.
            if let Some(first) = stream.next().await {
                batches.push(
                    futures::stream::iter([Ok(first.map_err(|e| failed(flight_text(&e)))?)])
                        .boxed(),
                );
            }
            schema = stream.schema().cloned();
        }
        batches.push(stream.boxed());
    }
    let url = url.to_string();
    let rows = futures::stream::iter(batches)
        .flatten()
        .map_err(move |error| {
            let detail = flight_text(&error);
            DataFusionError::from(Error::Collector {
                url: url.clone(),
                detail,
            })
        });
    let schema = schema.unwrap_or_else(|| Arc::new(arrow::datatypes::Schema::empty()));
    Ok(Box::pin(RecordBatchStreamAdapter::new(schema, rows)))
}

/// The server's own words, without the layers they came through.
fn flight_text(error: &FlightError) -> String {
    match error {
        FlightError::Tonic(status) => status.message().to_string(),
        other => chain(other),
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
