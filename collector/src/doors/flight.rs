//! Arrow Flight SQL on the collector's port.
//!
//! Nothing is kept between requests: a ticket and a prepared statement's handle are the SQL text,
//! so a client may come back after a restart.

use std::sync::{Arc, LazyLock};

use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::writer::IpcWriteOptions;
use arrow::record_batch::RecordBatch;
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_server::FlightService;
use arrow_flight::sql::metadata::{SqlInfoData, SqlInfoDataBuilder};
use arrow_flight::sql::server::FlightSqlService;
use arrow_flight::sql::{
    ActionClosePreparedStatementRequest, ActionCreatePreparedStatementRequest,
    ActionCreatePreparedStatementResult, CommandGetCatalogs, CommandGetDbSchemas,
    CommandGetSqlInfo, CommandGetTableTypes, CommandGetTables, CommandPreparedStatementQuery,
    CommandStatementQuery, ProstMessageExt, SqlInfo, TicketStatementQuery,
};
use arrow_flight::{
    Action, FlightDescriptor, FlightEndpoint, FlightInfo, IpcMessage, SchemaAsIpc, Ticket,
};
use datafusion::error::DataFusionError;
use datafusion::logical_expr::TableType;
use datafusion::prelude::SessionContext;
use futures::{Stream, StreamExt, TryStreamExt};
use prost::Message;
use tonic::{Request, Response, Status};
use vramscope_queries::Error;

use crate::access::Caller;
use crate::query::{Door, Gate, Question};

type FlightStream = <FlightDoor as FlightService>::DoGetStream;

/// The service. Clones share everything.
#[derive(Clone)]
pub struct FlightDoor {
    gate: Gate,
}

impl FlightDoor {
    /// A door in front of a gate.
    pub fn new(gate: Gate) -> FlightDoor {
        FlightDoor { gate }
    }

    fn question(&self, sql: &str) -> Question {
        Question {
            caller: Caller::on_loopback(),
            door: Door::Flight,
            sql: sql.to_string(),
            time: None,
            planner: None,
        }
    }

    async fn session(&self) -> Result<SessionContext, Status> {
        let session = self.gate.session(&Caller::on_loopback()).await;
        session.map_err(status)
    }

    /// The schema of a query's answer.
    async fn schema(&self, sql: &str) -> Result<SchemaRef, Status> {
        self.gate.schema(&self.question(sql)).await.map_err(status)
    }

    async fn answer(&self, sql: &str) -> Result<Response<FlightStream>, Status> {
        let rows = self.gate.answer(self.question(sql)).await.map_err(status)?;
        let schema = Arc::clone(&rows.schema);
        let rows = rows
            .into_stream()
            .map_err(|error| FlightError::Tonic(Box::new(status(error))));
        Ok(flight(schema, rows))
    }

    async fn info(
        &self,
        sql: &str,
        ticket: Vec<u8>,
        descriptor: FlightDescriptor,
    ) -> Result<Response<FlightInfo>, Status> {
        info(self.schema(sql).await?.as_ref(), ticket, descriptor)
    }
}

/// The error as a client sees it: the text says what is wrong with the SQL, the code says whose
/// move it is.
fn status(error: Error) -> Status {
    let text = error.to_string();
    match error {
        Error::TimedOut(_) => Status::deadline_exceeded(text),
        _ if error.is_too_many_rows() => Status::resource_exhausted(text),
        Error::NotAQuery(_) | Error::StatementCount(_) => Status::invalid_argument(text),
        Error::Query(ref inner) => match inner.find_root() {
            DataFusionError::ResourcesExhausted(_) => Status::resource_exhausted(text),
            DataFusionError::External(inner) => match inner.downcast_ref::<Error>() {
                Some(Error::TimedOut(_)) => Status::deadline_exceeded(text),
                _ => Status::internal(text),
            },
            DataFusionError::ObjectStore(_)
            | DataFusionError::IoError(_)
            | DataFusionError::Internal(_) => {
                tracing::warn!("a query failed: {text}");
                Status::internal(text)
            }
            _ => Status::invalid_argument(text),
        },
        _ => {
            tracing::warn!("a query failed: {text}");
            Status::internal(text)
        }
    }
}

fn flight(
    schema: SchemaRef,
    rows: impl Stream<Item = Result<RecordBatch, FlightError>> + Send + 'static,
) -> Response<FlightStream> {
    let stream = FlightDataEncoderBuilder::new()
        .with_schema(schema)
        .build(rows)
        .map_err(Status::from);
    Response::new(stream.boxed())
}

fn one_batch(schema: SchemaRef, batch: Result<RecordBatch, FlightError>) -> Response<FlightStream> {
    flight(schema, futures::stream::once(async { batch }))
}

fn info(
    schema: &Schema,
    ticket: Vec<u8>,
    descriptor: FlightDescriptor,
) -> Result<Response<FlightInfo>, Status> {
    let endpoint = FlightEndpoint::new().with_ticket(Ticket::new(ticket));
    let info = FlightInfo::new()
        .try_with_schema(schema)
        .map_err(|error| Status::internal(format!("failed to encode the schema: {error}")))?
        .with_endpoint(endpoint)
        .with_descriptor(descriptor);
    Ok(Response::new(info))
}

fn sql_of(handle: &[u8]) -> Result<&str, Status> {
    std::str::from_utf8(handle).map_err(|_| Status::invalid_argument("the ticket is not SQL text"))
}

static SQL_INFO: LazyLock<Result<SqlInfoData, FlightError>> = LazyLock::new(|| {
    let mut builder = SqlInfoDataBuilder::new();
    builder.append(SqlInfo::FlightSqlServerName, "vramscope-collector");
    builder.append(SqlInfo::FlightSqlServerVersion, env!("CARGO_PKG_VERSION"));
    builder.append(SqlInfo::FlightSqlServerArrowVersion, arrow::ARROW_VERSION);
    builder.append(SqlInfo::FlightSqlServerReadOnly, true);
    builder.append(SqlInfo::FlightSqlServerSql, true);
    builder.append(SqlInfo::FlightSqlServerSubstrait, false);
    builder.build()
});

fn sql_info() -> Result<&'static SqlInfoData, Status> {
    SQL_INFO
        .as_ref()
        .map_err(|error| Status::internal(error.to_string()))
}

#[tonic::async_trait]
impl FlightSqlService for FlightDoor {
    type FlightService = FlightDoor;

    async fn get_flight_info_statement(
        &self,
        query: CommandStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let ticket = TicketStatementQuery {
            statement_handle: query.query.clone().into(),
        };
        self.info(
            &query.query,
            ticket.as_any().encode_to_vec(),
            request.into_inner(),
        )
        .await
    }

    async fn do_get_statement(
        &self,
        ticket: TicketStatementQuery,
        _request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        self.answer(sql_of(&ticket.statement_handle)?).await
    }

    async fn do_action_create_prepared_statement(
        &self,
        query: ActionCreatePreparedStatementRequest,
        _request: Request<Action>,
    ) -> Result<ActionCreatePreparedStatementResult, Status> {
        let schema = self.schema(&query.query).await?;
        let options = IpcWriteOptions::default();
        let message: Result<IpcMessage, ArrowError> =
            SchemaAsIpc::new(schema.as_ref(), &options).try_into();
        let IpcMessage(dataset_schema) = message
            .map_err(|error| Status::internal(format!("failed to encode the schema: {error}")))?;
        Ok(ActionCreatePreparedStatementResult {
            prepared_statement_handle: query.query.into(),
            dataset_schema,
            parameter_schema: Default::default(),
        })
    }

    async fn do_action_close_prepared_statement(
        &self,
        _query: ActionClosePreparedStatementRequest,
        _request: Request<Action>,
    ) -> Result<(), Status> {
        Ok(())
    }

    async fn get_flight_info_prepared_statement(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let ticket = query.as_any().encode_to_vec();
        self.info(
            sql_of(&query.prepared_statement_handle)?,
            ticket,
            request.into_inner(),
        )
        .await
    }

    async fn do_get_prepared_statement(
        &self,
        query: CommandPreparedStatementQuery,
        _request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        self.answer(sql_of(&query.prepared_statement_handle)?).await
    }

    async fn get_flight_info_catalogs(
        &self,
        query: CommandGetCatalogs,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let ticket = query.as_any().encode_to_vec();
        info(&query.into_builder().schema(), ticket, request.into_inner())
    }

    async fn do_get_catalogs(
        &self,
        query: CommandGetCatalogs,
        _request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        let mut builder = query.into_builder();
        for catalog in self.session().await?.catalog_names() {
            builder.append(catalog);
        }
        Ok(one_batch(builder.schema(), builder.build()))
    }

    async fn get_flight_info_schemas(
        &self,
        query: CommandGetDbSchemas,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let ticket = query.as_any().encode_to_vec();
        info(&query.into_builder().schema(), ticket, request.into_inner())
    }

    async fn do_get_schemas(
        &self,
        query: CommandGetDbSchemas,
        _request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        let session = self.session().await?;
        let mut builder = query.into_builder();
        for name in session.catalog_names() {
            for schema in session
                .catalog(&name)
                .map(|catalog| catalog.schema_names())
                .unwrap_or_default()
            {
                builder.append(&name, &schema);
            }
        }
        Ok(one_batch(builder.schema(), builder.build()))
    }

    async fn get_flight_info_tables(
        &self,
        query: CommandGetTables,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let ticket = query.as_any().encode_to_vec();
        info(&query.into_builder().schema(), ticket, request.into_inner())
    }

    async fn do_get_tables(
        &self,
        query: CommandGetTables,
        _request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        let session = self.session().await?;
        let mut builder = query.into_builder();
        for catalog_name in session.catalog_names() {
            let Some(catalog) = session.catalog(&catalog_name) else {
                continue;
            };
            for schema_name in catalog.schema_names() {
                let Some(schema) = catalog.schema(&schema_name) else {
                    continue;
                };
                for name in schema.table_names() {
                    let table = schema
                        .table(&name)
                        .await
                        .map_err(|error| status(error.into()))?;
                    let Some(table) = table else { continue };
                    let kind = match table.table_type() {
                        TableType::View => "VIEW",
                        _ => "TABLE",
                    };
                    builder
                        .append(&catalog_name, &schema_name, &name, kind, &table.schema())
                        .map_err(Status::from)?;
                }
            }
        }
        Ok(one_batch(builder.schema(), builder.build()))
    }

    async fn get_flight_info_table_types(
        &self,
        query: CommandGetTableTypes,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let ticket = query.as_any().encode_to_vec();
        info(&query.into_builder().schema(), ticket, request.into_inner())
    }

    async fn do_get_table_types(
        &self,
        query: CommandGetTableTypes,
        _request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        let mut builder = query.into_builder();
        builder.append("TABLE");
        builder.append("VIEW");
        Ok(one_batch(builder.schema(), builder.build()))
    }

    async fn get_flight_info_sql_info(
        &self,
        query: CommandGetSqlInfo,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let ticket = query.as_any().encode_to_vec();
        info(
            &query.into_builder(sql_info()?).schema(),
            ticket,
            request.into_inner(),
        )
    }

    async fn do_get_sql_info(
        &self,
        query: CommandGetSqlInfo,
        _request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        let builder = query.into_builder(sql_info()?);
        Ok(one_batch(builder.schema(), builder.build()))
    }

    async fn register_sql_info(&self, _id: i32, _result: &SqlInfo) {}
}
