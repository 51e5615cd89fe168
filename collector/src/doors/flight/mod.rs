//! Arrow Flight SQL on the collector's port: for ADBC, JDBC and `vramscope sql`.
//!
//! Nothing is kept between requests ([`handle`]), but for what is running. A client gets a query's
//! id with its ticket, and cancels by it; one that goes away cancels too.

mod handle;
mod messages;

use std::pin::Pin;
use std::sync::Arc;

use arrow::record_batch::RecordBatch;
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_server::FlightService;
use arrow_flight::sql::server::{FlightSqlService, PeekableFlightDataStream};
use arrow_flight::sql::{
    ActionCancelQueryRequest, ActionCancelQueryResult, ActionClosePreparedStatementRequest,
    ActionCreatePreparedStatementRequest, ActionCreatePreparedStatementResult, CommandGetCatalogs,
    CommandGetDbSchemas, CommandGetSqlInfo, CommandGetTableTypes, CommandGetTables,
    CommandPreparedStatementQuery, CommandStatementQuery, DoPutPreparedStatementResult,
    ProstMessageExt, SqlInfo, TicketStatementQuery,
};
use arrow_flight::{
    Action, ActionType, CancelFlightInfoRequest, CancelFlightInfoResult, CancelStatus,
    FlightDescriptor, FlightInfo, HandshakeRequest, HandshakeResponse, Ticket,
};
use bytes::Bytes;
use datafusion::logical_expr::TableType;
use datafusion::prelude::SessionContext;
use futures::{Stream, StreamExt, TryStreamExt};
use prost::Message;
use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status, Streaming};
use vramscope_queries::quality::{self, Loss};
use vramscope_queries::texts;

use crate::access::{Access, Caller};
use crate::query::Gate;
use handle::Handle;
use messages::{
    announced, caller, fitted, flight, info, one_batch, parameters, schema_bytes, sql_info, status,
};

/// The action of Arrow Flight by which clients cancel.
const CANCEL_FLIGHT_INFO: &str = "CancelFlightInfo";

type Handshake = Pin<Box<dyn Stream<Item = Result<HandshakeResponse, Status>> + Send>>;
type FlightStream = <FlightDoor as FlightService>::DoGetStream;

/// The service. Clones share everything.
#[derive(Clone)]
pub struct FlightDoor {
    gate: Gate,
    access: Access,
}

impl FlightDoor {
    /// A door in front of a gate. It stands behind a guard that says who calls.
    pub fn new(gate: Gate, access: Access) -> FlightDoor {
        FlightDoor { gate, access }
    }

    fn cancel(&self, caller: &Caller, info: &FlightInfo) -> Result<(), Status> {
        let id = handle::query_of(info)?;
        match self.gate.cancel(caller, id) {
            true => Ok(()),
            false => Err(Status::not_found(format!("no query {id} of yours runs"))),
        }
    }

    async fn session<T>(&self, request: &Request<T>) -> Result<SessionContext, Status> {
        let session = self.gate.session(&caller(request)?).await;
        session.map_err(status)
    }

    async fn answer(
        &self,
        handle: &[u8],
        request: &Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        let caller = caller(request)?;
        let time = handle::time_allowed(request.metadata());
        let question = Handle::read(handle)?.question(caller.clone(), time)?;
        let reads_recorded = quality::reads_recorded_data(&question.sql);
        let loss = async {
            match reads_recorded {
                true => self.gate.loss(Some(&caller)).await,
                false => Some(Loss::default()),
            }
        };
        let (rows, loss) = tokio::join!(self.gate.answer(question), loss);
        let rows = rows.map_err(status)?;
        let (schema, id) = (announced(&rows.schema), rows.id.to_string());
        let as_announced = Arc::clone(&schema);
        let rows = rows.into_stream().map(move |batch| {
            let batch = batch.map_err(|error| FlightError::Tonic(Box::new(status(error))))?;
            Ok(fitted(&as_announced, &batch)?)
        });
        let mut response = flight(schema, rows);
        let lossy = loss.as_ref().map(|loss| loss.windows > 0);
        let lossy = lossy.map_or("unknown", |lossy| if lossy { "true" } else { "false" });
        let note = loss.as_ref().and_then(Loss::note);
        let told = [
            ("vramscope-query-id", Some(id)),
            ("vramscope-lossy", Some(lossy.to_string())),
            ("vramscope-note", note),
        ];
        for (name, text) in told {
            // Digits and plain text are what metadata may hold.
            if let Some(value) = text.and_then(|text| MetadataValue::try_from(text).ok()) {
                response.metadata_mut().insert(name, value);
            }
        }
        Ok(response)
    }

    /// Schema and ticket of a query; its id is new.
    async fn info(
        &self,
        handle: Handle,
        ticket: impl FnOnce(Bytes) -> Vec<u8>,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let handle = handle.for_a_query();
        let time = handle::time_allowed(request.metadata());
        let question = handle.question(caller(&request)?, time)?;
        let schema = self.gate.schema(&question).await.map_err(status)?;
        let ticket = ticket(handle.encode_to_vec().into());
        info(&announced(&schema), ticket, request.into_inner())
    }
}

#[tonic::async_trait]
impl FlightSqlService for FlightDoor {
    type FlightService = FlightDoor;

    /// Trades what the `authorization` header shows for a token. The guard has looked at it.
    async fn do_handshake(
        &self,
        request: Request<Streaming<HandshakeRequest>>,
    ) -> Result<Response<Handshake>, Status> {
        let caller = caller(&request)?;
        let token = match self.access.required() {
            true => self.access.open_session(&caller).ok_or_else(|| {
                let name = &caller.name;
                Status::unauthenticated(format!("{name} has no password to trade for a token"))
            })?,
            // Clients insist on one.
            false => "none-needed".to_string(),
        };
        let answer = HandshakeResponse {
            protocol_version: 0,
            payload: token.clone().into(),
        };
        let answer: Handshake = futures::stream::once(async { Ok(answer) }).boxed();
        let mut response = Response::new(answer);
        let header = MetadataValue::try_from(format!("Bearer {token}"))
            .map_err(|_| Status::internal("the token is not text"))?;
        response.metadata_mut().insert("authorization", header);
        Ok(response)
    }

    async fn get_flight_info_statement(
        &self,
        query: CommandStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let ticket = |statement_handle| {
            let ticket = TicketStatementQuery { statement_handle };
            ticket.as_any().encode_to_vec()
        };
        self.info(Handle::of(&query.query), ticket, request).await
    }

    async fn do_get_statement(
        &self,
        ticket: TicketStatementQuery,
        request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        self.answer(&ticket.statement_handle, &request).await
    }

    async fn do_action_create_prepared_statement(
        &self,
        query: ActionCreatePreparedStatementRequest,
        request: Request<Action>,
    ) -> Result<ActionCreatePreparedStatementResult, Status> {
        let handle = Handle::of(&query.query);
        let time = handle::time_allowed(request.metadata());
        let question = handle.question(caller(&request)?, time)?;
        let shape = self.gate.shape(&question).await.map_err(status)?;
        Ok(ActionCreatePreparedStatementResult {
            prepared_statement_handle: handle.encode_to_vec().into(),
            dataset_schema: schema_bytes(&announced(&shape.columns))?,
            parameter_schema: match shape.parameters.is_empty() {
                true => Bytes::new(),
                false => schema_bytes(&parameters(&shape))?,
            },
        })
    }

    async fn do_action_close_prepared_statement(
        &self,
        _query: ActionClosePreparedStatementRequest,
        _request: Request<Action>,
    ) -> Result<(), Status> {
        Ok(())
    }

    /// Values for a prepared statement: they go into the handle that comes back.
    async fn do_put_prepared_statement_query(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<DoPutPreparedStatementResult, Status> {
        let handle = Handle::read(&query.prepared_statement_handle)?;
        let messages = request.into_inner().map_err(FlightError::from);
        let mut batches = FlightRecordBatchStream::new_from_flight_data(messages);
        let mut values: Option<RecordBatch> = None;
        while let Some(batch) = batches.try_next().await? {
            let one_so_far = values.is_none() && batch.num_rows() == 1;
            if !one_so_far && batch.num_rows() > 0 {
                let text = "more than one row of parameters was sent; send one, and ask again for the next";
                return Err(Status::unimplemented(text));
            }
            values = values.or(Some(batch));
        }
        let values = values.ok_or_else(|| Status::invalid_argument("no parameters were sent"))?;
        let bound = handle.bound(&values)?;
        Ok(DoPutPreparedStatementResult {
            prepared_statement_handle: Some(bound.encode_to_vec().into()),
        })
    }

    async fn get_flight_info_prepared_statement(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let ticket = |prepared_statement_handle| {
            let ticket = CommandPreparedStatementQuery {
                prepared_statement_handle,
            };
            ticket.as_any().encode_to_vec()
        };
        let handle = Handle::read(&query.prepared_statement_handle)?;
        self.info(handle, ticket, request).await
    }

    async fn do_get_prepared_statement(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        self.answer(&query.prepared_statement_handle, &request)
            .await
    }

    /// As clients cancelled before Arrow 13.
    async fn do_action_cancel_query(
        &self,
        query: ActionCancelQueryRequest,
        request: Request<Action>,
    ) -> Result<ActionCancelQueryResult, Status> {
        let info = FlightInfo::decode(query.info)
            .map_err(|_| Status::invalid_argument("no FlightInfo in the request"))?;
        self.cancel(&caller(&request)?, &info)?;
        Ok(ActionCancelQueryResult {
            // CANCEL_RESULT_CANCELLING: it ends at its next pause.
            result: 2,
        })
    }

    /// As they do since.
    async fn do_action_fallback(
        &self,
        request: Request<Action>,
    ) -> Result<Response<<FlightDoor as FlightService>::DoActionStream>, Status> {
        let caller = caller(&request)?;
        let action = request.into_inner();
        if action.r#type != CANCEL_FLIGHT_INFO {
            let name: String = action.r#type.chars().take(64).collect();
            return Err(Status::unimplemented(format!(
                "there is no action {name:?}"
            )));
        }
        let wanted = CancelFlightInfoRequest::decode(action.body)
            .map_err(|_| Status::invalid_argument("the body is no CancelFlightInfoRequest"))?;
        let info = wanted
            .info
            .ok_or_else(|| Status::invalid_argument("no FlightInfo in the request"))?;
        self.cancel(&caller, &info)?;
        let result = CancelFlightInfoResult::new(CancelStatus::Cancelling);
        let answer = arrow_flight::Result {
            body: result.encode_to_vec().into(),
        };
        let answer = futures::stream::once(async { Ok(answer) });
        Ok(Response::new(answer.boxed()))
    }

    async fn list_custom_actions(&self) -> Option<Vec<Result<ActionType, Status>>> {
        Some(vec![Ok(ActionType {
            r#type: CANCEL_FLIGHT_INFO.to_string(),
            description: "Cancels a query.\nRequest Message: CancelFlightInfoRequest\nResponse Message: CancelFlightInfoResult".to_string(),
        })])
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
        request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        let mut builder = query.into_builder();
        for catalog in self.session(&request).await?.catalog_names() {
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
        request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        let session = self.session(&request).await?;
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
        request: Request<Ticket>,
    ) -> Result<Response<FlightStream>, Status> {
        let session = self.session(&request).await?;
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
                    let columns = texts::plain_schema(&table.schema());
                    builder
                        .append(&catalog_name, &schema_name, &name, kind, &columns)
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
