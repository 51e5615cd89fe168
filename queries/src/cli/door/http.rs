//! A collector by its HTTP API.

use std::pin::Pin;
use std::time::Duration;

use arrow::array::RecordBatch;
use arrow::buffer::Buffer;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamDecoder;
use bytes::Bytes;
use datafusion::error::DataFusionError;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{Stream, StreamExt};
use reqwest::{Certificate, Client, RequestBuilder, Response};
use serde_json::{Value, json};
use vramscope_queries::Error;

use super::{CONNECT_TIMEOUT, chain};
use crate::login::{Address, Login, Shown};

/// A client; it connects when it asks.
pub struct Http {
    client: Client,
    /// Where questions are posted.
    endpoint: String,
    url: String,
    shown: Shown,
}

impl Http {
    pub fn new(address: &Address, login: &Login) -> Result<Http, Error> {
        // A collector is asked itself, and no answer of it leads elsewhere.
        let mut client = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy();
        if let Some(pem) = login.ca()? {
            let certificates = Certificate::from_pem_bundle(&pem)
                .map_err(|error| address.failed(format!("--ca-file: {}", chain(&error))))?;
            client = client.tls_certs_only(certificates);
        }
        let client = client
            .build()
            .map_err(|error| address.failed(chain(&error)))?;
        let mut endpoint = address.url.clone();
        let _ = endpoint.set_username("");
        let _ = endpoint.set_password(None);
        endpoint.set_path("/api/v1/sql");
        Ok(Http {
            client,
            endpoint: endpoint.to_string(),
            url: address.text(),
            shown: login.shown(address)?,
        })
    }

    pub async fn stream(
        &self,
        sql: &str,
        time: Option<Duration>,
    ) -> Result<SendableRecordBatchStream, Error> {
        let mut question = json!({"sql": sql, "format": "arrow"});
        if let Some(time) = time {
            // No query takes longer than what a u64 holds.
            let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            question["timeout_ms"] = milliseconds.into();
        }
        let request = self.client.post(&self.endpoint).json(&question);
        let answer = self
            .signed(request)
            .send()
            .await
            .map_err(|error| self.failed(chain(&error)))?;
        if !answer.status().is_success() {
            return Err(self.refused(answer).await);
        }
        let url = self.url.clone();
        let mut reading = Reading {
            bytes: Box::pin(answer.bytes_stream()),
            decoder: StreamDecoder::new(),
            rest: Buffer::from(Bytes::new()),
            url,
        };
        // The schema comes first; with it, perhaps, rows.
        let first = reading.next().await.transpose()?;
        let schema = reading.decoder.schema().ok_or_else(|| {
            self.failed("the answer is no Arrow stream; is this a collector's HTTP address?")
        })?;
        Ok(reading.into_rows(schema, first))
    }

    fn signed(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.shown {
            Shown::Nothing => request,
            Shown::Token(token) => request.bearer_auth(token),
            Shown::Password { user, password } => request.basic_auth(user, Some(password)),
        }
    }

    /// The collector's own words.
    async fn refused(&self, answer: Response) -> Error {
        let status = answer.status();
        let body = answer.bytes().await.unwrap_or_default();
        let told = serde_json::from_slice::<Value>(&body).ok();
        let message = told
            .as_ref()
            .and_then(|told| told["error"]["message"].as_str());
        let detail = match message {
            Some(message) => message.to_string(),
            None => format!("answered {status}; is this a collector's HTTP address?"),
        };
        self.failed(detail)
    }

    fn failed(&self, detail: impl Into<String>) -> Error {
        Error::Collector {
            url: self.url.clone(),
            detail: detail.into(),
        }
    }
}

/// An Arrow stream that is being read.
struct Reading {
    bytes: Pin<Box<dyn Stream<Item = reqwest::Result<Bytes>> + Send>>,
    decoder: StreamDecoder,
    /// Bytes that are not decoded yet.
    rest: Buffer,
    url: String,
}

impl Reading {
    async fn next(&mut self) -> Option<Result<RecordBatch, Error>> {
        loop {
            if !self.rest.is_empty() {
                match self.decoder.decode(&mut self.rest) {
                    Ok(Some(batch)) => return Some(Ok(batch)),
                    Ok(None) => {}
                    Err(error) => return Some(Err(self.broken(&error))),
                }
            }
            match self.bytes.next().await {
                Some(Ok(bytes)) => self.rest = Buffer::from(bytes),
                Some(Err(error)) => {
                    let detail = format!(
                        "the answer broke off ({}); what was wrong is in query_log, and --format json or a LIMIT may show it",
                        chain(&error)
                    );
                    return Some(Err(self.failed(detail)));
                }
                None => {
                    let whole = self.decoder.finish();
                    return whole.err().map(|error| Err(self.broken(&error)));
                }
            }
        }
    }

    fn into_rows(self, schema: SchemaRef, first: Option<RecordBatch>) -> SendableRecordBatchStream {
        let first = futures::stream::iter(first.map(Ok));
        let rest = futures::stream::unfold(Some(self), |reading| async move {
            let mut reading = reading?;
            match reading.next().await? {
                Ok(batch) => Some((Ok(batch), Some(reading))),
                Err(error) => Some((Err(DataFusionError::from(error)), None)),
            }
        });
        Box::pin(RecordBatchStreamAdapter::new(schema, first.chain(rest)))
    }

    fn broken(&self, error: &ArrowError) -> Error {
        self.failed(format!("the answer is damaged: {error}"))
    }

    fn failed(&self, detail: String) -> Error {
        Error::Collector {
            url: self.url.clone(),
            detail,
        }
    }
}
