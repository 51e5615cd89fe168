//! A collector by Flight SQL.

use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::sql::client::FlightSqlServiceClient;
use datafusion::error::DataFusionError;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{StreamExt, TryStreamExt};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use vramscope_queries::Error;

use super::{CONNECT_TIMEOUT, chain};
use crate::login::{Address, Login, Shown};

/// A connection.
pub struct Flight {
    client: FlightSqlServiceClient<Channel>,
    url: String,
}

impl Flight {
    pub async fn connect(address: &Address, login: &Login) -> Result<Flight, Error> {
        let failed = |detail: String| address.failed(detail);
        let mut plain = address.url.clone();
        // What is shown goes into a header.
        let _ = plain.set_username("");
        let _ = plain.set_password(None);
        let rest = plain
            .as_str()
            .split_once("://")
            .map_or("", |(_, rest)| rest);
        let scheme = if address.tls { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{rest}"))
            .map_err(|_| failed("not a URL; for example grpc://127.0.0.1:7717".to_string()))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_keepalive(Some(Duration::from_secs(30)));
        if address.tls {
            let ca = login.ca()?.ok_or_else(|| {
                failed("which CA to believe is not known; give --ca-file".to_string())
            })?;
            let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca));
            endpoint = endpoint
                .tls_config(tls)
                .map_err(|error| failed(format!("--ca-file: {}", chain(&error))))?;
        }
        let shown = login.shown(address)?;
        let channel = endpoint
            .connect()
            .await
            .map_err(|error| failed(format!("failed to connect: {}", chain(&error))))?;
        // Batches of wide rows pass tonic's 4 MiB; the server decides how large they are.
        let inner = FlightServiceClient::new(channel).max_decoding_message_size(usize::MAX);
        let mut client = FlightSqlServiceClient::new_from_inner(inner);
        match shown {
            Shown::Nothing => {}
            Shown::Token(token) => client.set_token(token),
            Shown::Password { user, password } => {
                let shaken = client.handshake(&user, &password).await;
                shaken.map_err(|error| failed(text(&error)))?;
            }
        }
        Ok(Flight {
            client,
            url: address.text(),
        })
    }

    pub async fn stream(&mut self, sql: &str) -> Result<SendableRecordBatchStream, Error> {
        let url = self.url.clone();
        let failed = |detail: String| Error::Collector {
            url: url.clone(),
            detail,
        };
        let client = &mut self.client;
        let info = client
            .execute(sql.to_string(), None)
            .await
            .map_err(|e| failed(text(&e)))?;
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
            let mut stream = client.do_get(ticket).await.map_err(|e| failed(text(&e)))?;
            if schema.is_none() {
                // Not announced: the schema comes with the first message.
                if let Some(first) = stream.next().await {
                    let first = first.map_err(|e| failed(text(&e)))?;
                    batches.push(futures::stream::iter([Ok(first)]).boxed());
                }
                schema = stream.schema().cloned();
            }
            batches.push(stream.boxed());
        }
        let of_rows = self.url.clone();
        let rows = futures::stream::iter(batches)
            .flatten()
            .map_err(move |error| {
                DataFusionError::from(Error::Collector {
                    url: of_rows.clone(),
                    detail: text(&error),
                })
            });
        let schema = schema.unwrap_or_else(|| Arc::new(arrow::datatypes::Schema::empty()));
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, rows)))
    }
}

/// The server's own words, without the layers they came through.
fn text(error: &FlightError) -> String {
    match error {
        FlightError::Tonic(status) => status.message().to_string(),
        other => chain(other),
    }
}
