//! What the door's answers are made of: schemas, errors, streams and what the server says of itself.

use std::sync::{Arc, LazyLock};

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::writer::IpcWriteOptions;
use arrow::record_batch::{RecordBatch, RecordBatchOptions};
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::error::FlightError;
use arrow_flight::sql::SqlInfo;
use arrow_flight::sql::metadata::{SqlInfoData, SqlInfoDataBuilder};
use arrow_flight::{FlightDescriptor, FlightEndpoint, FlightInfo, IpcMessage, SchemaAsIpc, Ticket};
use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt};
use tonic::{Request, Response, Status};
use vramscope_queries::Error;

use super::FlightStream;
use crate::access::Caller;
use crate::query::Shape;
use crate::query::failure::Class;

/// A schema that plan and rows agree on. The engine knows more of which columns are never NULL when
/// it runs than when it plans, and ADBC takes only rows whose schema is the announced one.
pub(super) fn announced(schema: &Schema) -> SchemaRef {
    let fields = schema.fields().iter();
    let fields = fields.map(|field| Field::new(field.name(), field.data_type().clone(), true));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

pub(super) fn fitted(schema: &SchemaRef, batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(Arc::clone(schema), batch.columns().to_vec(), &options)
}

/// Who asks, as the guard before the door has found out.
pub(super) fn caller<T>(request: &Request<T>) -> Result<Caller, Status> {
    let caller = request.extensions().get::<Caller>().cloned();
    caller.ok_or_else(|| Status::internal("nobody has looked at who calls"))
}

/// The error as a client sees it: the text says what is wrong with the SQL, the code says whose
/// move it is.
pub(super) fn status(error: Error) -> Status {
    let text = error.to_string();
    match Class::of(&error) {
        Class::Syntax
        | Class::NoTable
        | Class::NoColumn
        | Class::Semantics
        | Class::Value
        | Class::ReadOnly => Status::invalid_argument(text),
        Class::Forbidden => Status::permission_denied(text),
        Class::Time => Status::deadline_exceeded(text),
        Class::Cancelled => Status::cancelled(text),
        Class::Rows | Class::Memory => Status::resource_exhausted(text),
        Class::Busy => Status::unavailable(text),
        Class::Internal => {
            tracing::warn!("a query failed: {text}");
            Status::internal(text)
        }
    }
}

pub(super) fn flight(
    schema: SchemaRef,
    rows: impl Stream<Item = Result<RecordBatch, FlightError>> + Send + 'static,
) -> Response<FlightStream> {
    let stream = FlightDataEncoderBuilder::new()
        .with_schema(schema)
        .build(rows)
        .map_err(Status::from);
    Response::new(stream.boxed())
}

pub(super) fn one_batch(
    schema: SchemaRef,
    batch: Result<RecordBatch, FlightError>,
) -> Response<FlightStream> {
    flight(schema, futures::stream::once(async { batch }))
}

pub(super) fn info(
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

/// A schema as messages carry it; nothing for one without columns.
pub(super) fn schema_bytes(schema: &Schema) -> Result<Bytes, Status> {
    let options = IpcWriteOptions::default();
    let message: Result<IpcMessage, ArrowError> = SchemaAsIpc::new(schema, &options).try_into();
    let IpcMessage(bytes) = message
        .map_err(|error| Status::internal(format!("failed to encode the schema: {error}")))?;
    Ok(bytes)
}

/// The parameters as a schema. A type that nothing says is Null, as ADBC has it.
pub(super) fn parameters(shape: &Shape) -> Schema {
    let field = |(index, data_type): (usize, &Option<DataType>)| {
        let data_type = data_type.clone().unwrap_or(DataType::Null);
        Field::new(format!("${}", index + 1), data_type, true)
    };
    Schema::new(
        shape
            .parameters
            .iter()
            .enumerate()
            .map(field)
            .collect::<Vec<_>>(),
    )
}

static SQL_INFO: LazyLock<Result<SqlInfoData, FlightError>> = LazyLock::new(|| {
    let mut builder = SqlInfoDataBuilder::new();
    builder.append(SqlInfo::FlightSqlServerName, "vramscope-collector");
    builder.append(SqlInfo::FlightSqlServerVersion, env!("CARGO_PKG_VERSION"));
    builder.append(SqlInfo::FlightSqlServerArrowVersion, arrow::ARROW_VERSION);
    builder.append(SqlInfo::FlightSqlServerReadOnly, true);
    builder.append(SqlInfo::FlightSqlServerSql, true);
    builder.append(SqlInfo::FlightSqlServerSubstrait, false);
    builder.append(SqlInfo::FlightSqlServerCancel, true);
    builder.append(SqlInfo::FlightSqlServerBulkIngestion, false);
    // None: there is nothing to roll back.
    builder.append(SqlInfo::FlightSqlServerTransaction, 0_i32);
    builder.build()
});

pub(super) fn sql_info() -> Result<&'static SqlInfoData, Status> {
    SQL_INFO
        .as_ref()
        .map_err(|error| Status::internal(error.to_string()))
}
