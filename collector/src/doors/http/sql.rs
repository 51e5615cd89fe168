//! `POST /api/v1/sql`.

use std::io;
use std::time::Duration;

use arrow::record_batch::RecordBatch;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use datafusion::common::ScalarValue;
use futures::StreamExt;
use serde::Deserialize;
use utoipa::ToSchema;
use vramscope_queries::quality::{self, Loss};

use super::format::{Encoder, Format};
use super::problem::Problem;
use super::{HttpDoor, problem};
use crate::query::bind::Bound;
use crate::query::{Door, MAX_SQL_BYTES, QueryId, Question, Rows};

/// Largest body: the longest statement, escaped, and the rest.
const MAX_BODY_BYTES: usize = MAX_SQL_BYTES + MAX_SQL_BYTES / 2;

/// How long a client that reads has for the last of a broken answer.
const FLUSH: Duration = Duration::from_millis(500);

/// One question.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SqlRequest {
    /// One SQL statement that only reads.
    #[schema(example = "SELECT 1 AS one")]
    sql: String,
    /// Values for `$1`, `$2`, … in the statement: texts, numbers, true, false, null.
    #[serde(default)]
    #[schema(value_type = Vec<Object>)]
    parameters: Vec<serde_json::Value>,
    /// Ends the query after so many milliseconds, if the collector does not before.
    timeout_ms: Option<u64>,
    /// Ends the query with an error after so many rows, if the collector does not before.
    max_rows: Option<u64>,
    /// Names the query, to cancel it by: 32 hexadecimal digits, random. Made up if it is not given.
    query_id: Option<String>,
    /// How the answer is written; wins over `Accept`.
    format: Option<Format>,
}

/// A whole answer as JSON. One that broke off has `error` instead of all from `lossy` on.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "describes what is written piece by piece")]
pub struct Answer {
    /// Name, SQL type and nullability of each column.
    #[schema(value_type = Vec<Object>)]
    columns: Vec<serde_json::Value>,
    /// A row is an array of values in the order of the columns.
    #[schema(value_type = Vec<Vec<Object>>)]
    rows: Vec<Vec<serde_json::Value>>,
    /// Whether events were lost in what was recorded; null if it is not known.
    lossy: Option<bool>,
    /// What was lost, in words; absent if nothing was.
    note: Option<String>,
    /// Number of rows.
    row_count: u64,
}

/// Answers one SQL query.
#[utoipa::path(
    post,
    path = "/api/v1/sql",
    request_body(content(
        (SqlRequest = "application/json", example = json!({"sql": "SELECT count(*) AS events FROM alloc_events WHERE host = $1", "parameters": ["gpu-17"], "timeout_ms": 10000})),
        (String = "text/plain", example = "SELECT 1 AS one")
    )),
    responses(
        (status = 200, description = "The rows. `vramscope-query-id` names the query, `vramscope-lossy` says whether events were lost in what was recorded", content(
            (Answer = "application/json"),
            (String = "application/x-ndjson"),
            (String = "text/csv"),
            (Vec<u8> = "application/vnd.apache.arrow.stream")
        )),
        (status = 400, description = "Not SQL, or SQL that does not fit the tables", body = problem::Body),
        (status = 401, description = "No credentials, or wrong ones", body = problem::Body),
        (status = 403, description = "Not a query, or not allowed", body = problem::Body),
        (status = 406, description = "None of the types in `Accept` is written", body = problem::Body),
        (status = 408, description = "The time was over", body = problem::Body),
        (status = 409, description = "It was cancelled", body = problem::Body),
        (status = 413, description = "The body, the statement or the answer is too long", body = problem::Body),
        (status = 415, description = "The body is neither JSON nor text", body = problem::Body),
        (status = 422, description = "A value that an operation cannot take", body = problem::Body),
        (status = 429, description = "Too many failed attempts to come in", body = problem::Body),
        (status = 503, description = "Too many queries wait", body = problem::Body),
        (status = 507, description = "It needs more memory than a query may have", body = problem::Body)
    )
)]
pub async fn answer(State(door): State<HttpDoor>, request: Request) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let caller = door.reader(&parts).await?;
    let body = read(&parts.headers, body, door.patience).await?;
    let asked = parse(&parts.headers, &body)?;
    let accept = parts.headers.get(header::ACCEPT);
    let format = match asked.format {
        Some(format) => format,
        None => Format::accepted(accept.and_then(|accept| accept.to_str().ok())).ok_or_else(|| {
            let text = "there is JSON (application/json), NDJSON (application/x-ndjson), CSV (text/csv) and Arrow (application/vnd.apache.arrow.stream)";
            Problem::new(StatusCode::NOT_ACCEPTABLE, "accept", text)
        })?,
    };
    let id = match asked.query_id {
        Some(id) => id.parse().map_err(Problem::bad_request)?,
        None => QueryId::new(),
    };
    let question = Question {
        id,
        time: asked.timeout_ms.map(Duration::from_millis),
        rows: asked.max_rows,
        planner: Bound::planner(values(asked.parameters)?),
        ..Question::new(caller.clone(), Door::Http, asked.sql)
    };
    let reads_recorded = quality::reads_recorded_data(&question.sql);
    let failed = |error| Problem::of_query(id, &error);
    let mut rows = door.gate.answer(question).await.map_err(failed)?;
    let loss = async {
        match reads_recorded {
            true => door.gate.loss(Some(&caller)).await,
            false => Some(Loss::default()),
        }
    };
    // Most of what can go wrong has gone wrong before the first row: then there is a status.
    let (first, loss) = tokio::join!(rows.next(), loss);
    let first = first.transpose().map_err(failed)?;
    respond(format, rows, first, loss)
}

async fn read(headers: &HeaderMap, body: Body, patience: Duration) -> Result<Bytes, Problem> {
    let too_long = || {
        let text = format!("the body has more than {MAX_BODY_BYTES} bytes");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body", text)
    };
    let length = headers.get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > MAX_BODY_BYTES as u64) {
        return Err(too_long());
    }
    match tokio::time::timeout(patience, to_bytes(body, MAX_BODY_BYTES)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(error)) if error.to_string().contains("length limit") => Err(too_long()),
        Ok(Err(error)) => Err(Problem::bad_request(format!("the body broke off: {error}"))),
        Err(_) => {
            let text = format!("the body was not there after {} s", patience.as_secs_f64());
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "body", text))
        }
    }
}

/// What is asked: JSON as described, or the statement as it is.
fn parse(headers: &HeaderMap, body: &[u8]) -> Result<SqlRequest, Problem> {
    let content_type = headers.get(header::CONTENT_TYPE);
    let content_type = content_type.map_or("", |kind| kind.to_str().unwrap_or("?"));
    let kind = content_type.split(';').next().unwrap_or("").trim();
    match kind.to_ascii_lowercase().as_str() {
        "application/json" => serde_json::from_slice(body).map_err(|error| {
            Problem::bad_request(format!("the body is not as described: {error}"))
        }),
        "text/plain" | "application/sql" => {
            let sql = std::str::from_utf8(body)
                .map_err(|_| Problem::bad_request("the statement is not UTF-8"))?;
            Ok(SqlRequest {
                sql: sql.to_string(),
                parameters: Vec::new(),
                timeout_ms: None,
                max_rows: None,
                query_id: None,
                format: None,
            })
        }
        _ => Err(Problem::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "content_type",
            format!(
                "the body is {content_type:?}; send application/json, or the statement as text/plain"
            ),
        )),
    }
}

fn values(parameters: Vec<serde_json::Value>) -> Result<Vec<ScalarValue>, Problem> {
    use serde_json::Value;
    let value = |(index, value): (usize, Value)| match value {
        Value::Null => Ok(ScalarValue::Null),
        Value::Bool(value) => Ok(ScalarValue::Boolean(Some(value))),
        Value::String(text) => Ok(ScalarValue::Utf8(Some(text))),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => Ok(ScalarValue::Int64(Some(number))),
            (None, number) => Ok(ScalarValue::Float64(number)),
        },
        Value::Array(_) | Value::Object(_) => Err(Problem::bad_request(format!(
            "parameter ${} is a list or an object; texts, numbers, true, false and null can be given",
            index + 1
        ))),
    };
    parameters.into_iter().enumerate().map(value).collect()
}

fn respond(
    format: Format,
    rows: Rows,
    first: Option<RecordBatch>,
    loss: Option<Loss>,
) -> Result<Response, Problem> {
    let id = rows.id;
    let failed = |error| Problem::internal(format!("failed to write the answer: {error}"));
    let (encoder, head) = Encoder::start(format, &rows.schema).map_err(failed)?;
    let lossy = match &loss {
        None => "unknown",
        Some(loss) if loss.windows > 0 => "true",
        Some(_) => "false",
    };
    let note = loss.as_ref().and_then(Loss::note);
    let body = Body::from_stream(pieces(encoder, head, rows, first, loss));
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static(format.content_type());
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(
        "x-content-type-options",
        HeaderValue::from_static("nosniff"),
    );
    headers.insert("vramscope-lossy", HeaderValue::from_static(lossy));
    // Hexadecimal digits, and the notes' plain text, are what a header may hold.
    for (name, text) in [
        ("vramscope-query-id", Some(id.to_string())),
        ("vramscope-note", note),
    ] {
        if let Some(value) = text.and_then(|text| HeaderValue::from_str(&text).ok()) {
            headers.insert(name, value);
        }
    }
    Ok(response)
}

/// Where the writing of an answer stands.
enum Stage {
    Head(Bytes, Option<RecordBatch>),
    First(Option<RecordBatch>),
    Rows,
    /// The client learns by a broken transfer that this was not all.
    Broken,
    Done,
}

struct Writing {
    stage: Stage,
    /// `None` once it ended.
    encoder: Option<Encoder>,
    rows: Rows,
    loss: Option<Loss>,
    id: QueryId,
}

/// The answer's bytes, made as the client takes them.
fn pieces(
    encoder: Encoder,
    head: Bytes,
    rows: Rows,
    first: Option<RecordBatch>,
    loss: Option<Loss>,
) -> impl futures::Stream<Item = io::Result<Bytes>> + Send + 'static {
    let id = rows.id;
    let writing = Writing {
        stage: Stage::Head(head, first),
        encoder: Some(encoder),
        rows,
        loss,
        id,
    };
    let pieces = futures::stream::unfold(writing, |mut writing| async move {
        let piece = writing.step().await?;
        Some((piece, writing))
    });
    pieces.filter(|piece| {
        let empty = piece.as_ref().is_ok_and(Bytes::is_empty);
        std::future::ready(!empty)
    })
}

impl Writing {
    async fn step(&mut self) -> Option<io::Result<Bytes>> {
        match std::mem::replace(&mut self.stage, Stage::Rows) {
            Stage::Head(head, first) => {
                self.stage = Stage::First(first);
                Some(Ok(head))
            }
            Stage::First(Some(batch)) => Some(Ok(self.batch(&batch))),
            // No row at all: the query has ended.
            Stage::First(None) => Some(Ok(self.end())),
            Stage::Rows => Some(Ok(match self.rows.next().await {
                Some(Ok(batch)) => self.batch(&batch),
                Some(Err(error)) => self.fail(Problem::of_query(self.id, &error)),
                None => self.end(),
            })),
            Stage::Broken => {
                self.stage = Stage::Done;
                // What was written goes out while nothing more comes; a break at once drops it.
                tokio::time::sleep(FLUSH).await;
                Some(Err(io::Error::other("the query failed")))
            }
            Stage::Done => None,
        }
    }

    fn batch(&mut self, batch: &RecordBatch) -> Bytes {
        // It is there until the end.
        match self.encoder.as_mut().map(|encoder| encoder.batch(batch)) {
            Some(Ok(bytes)) => bytes,
            Some(Err(error)) => self.fail(Problem::internal(error.to_string())),
            None => Bytes::new(),
        }
    }

    fn end(&mut self) -> Bytes {
        self.stage = Stage::Done;
        match self
            .encoder
            .take()
            .map(|encoder| encoder.end(self.loss.as_ref()))
        {
            Some(Ok(bytes)) => bytes,
            Some(Err(_)) => {
                self.stage = Stage::Broken;
                Bytes::new()
            }
            None => Bytes::new(),
        }
    }

    fn fail(&mut self, problem: Problem) -> Bytes {
        self.stage = Stage::Broken;
        let encoder = self.encoder.take();
        encoder.map_or(Bytes::new(), |encoder| encoder.fail(&problem.into_detail()))
    }
}
