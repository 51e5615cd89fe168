//! A collector by PostgreSQL's protocol. Values come as text and are read into the columns' types.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, StringArray, StringBuilder};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use arrow::error::ArrowError;
use datafusion::error::DataFusionError;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::stream::Fuse;
use futures::{StreamExt, TryStreamExt};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres::config::SslMode;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Config, SimpleQueryMessage, SimpleQueryStream};
use tokio_postgres_rustls::MakeRustlsConnect;
use vramscope_queries::Error;

use super::{CONNECT_TIMEOUT, chain};
use crate::login::{Address, Login};

/// Rows of one batch.
const BATCH_ROWS: usize = 8192;

/// A connection.
pub struct Postgres {
    client: Client,
    url: String,
}

impl Postgres {
    pub async fn connect(address: &Address, login: &Login) -> Result<Postgres, Error> {
        let failed = |detail: String| address.failed(detail);
        let mut config: Config = address
            .url
            .as_str()
            .parse()
            .map_err(|error| failed(format!("not a PostgreSQL URL: {}", chain(&error))))?;
        if let Some(user) = login.user(address) {
            config.user(user);
        } else {
            // Without credentials the name does not matter, but there has to be one.
            config.user("vramscope");
        }
        config.password(login.password(address)?);
        config.connect_timeout(CONNECT_TIMEOUT);
        config.application_name("vramscope");
        let says_ssl_mode = address.url.query_pairs().any(|(key, _)| key == "sslmode");
        if !says_ssl_mode && !address.is_loopback() {
            config.ssl_mode(SslMode::Require);
        }
        let (client, connection) = config
            .connect(MakeRustlsConnect::new(tls(address, login)?))
            .await
            .map_err(|error| failed(format!("failed to connect: {}", told(&error))))?;
        // It ends with the client; what went wrong the client's next request says.
        tokio::spawn(connection);
        Ok(Postgres {
            client,
            url: address.text(),
        })
    }

    pub async fn stream(&mut self, sql: &str) -> Result<SendableRecordBatchStream, Error> {
        let url = self.url.clone();
        let failed = |error: &tokio_postgres::Error| Error::Collector {
            url: url.clone(),
            detail: told(error),
        };
        // Asked first for the types, which a simple query does not tell.
        let prepared = self.client.prepare(sql).await.map_err(|e| failed(&e))?;
        let fields = prepared.columns().iter().map(|column| {
            let data_type = data_type(column.type_());
            Field::new(column.name(), data_type, true)
        });
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        let messages = self.client.simple_query_raw(sql).await;
        let messages = messages.map_err(|e| failed(&e))?;
        let rows = Rows {
            messages: Box::pin(messages.fuse()),
            schema: Arc::clone(&schema),
            url: self.url.clone(),
        };
        let batches = futures::stream::try_unfold(rows, |mut rows| async move {
            let batch = rows.next().await.map_err(DataFusionError::from)?;
            Ok(batch.map(|batch| (batch, rows)))
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(
            schema,
            batches.into_stream().boxed(),
        )))
    }
}

struct Rows {
    /// Fused: once it has ended, it would say that the connection is closed.
    messages: std::pin::Pin<Box<Fuse<SimpleQueryStream>>>,
    schema: SchemaRef,
    url: String,
}

impl Rows {
    async fn next(&mut self) -> Result<Option<RecordBatch>, Error> {
        let columns = self.schema.fields().len();
        let mut texts: Vec<StringBuilder> = (0..columns).map(|_| StringBuilder::new()).collect();
        let mut count = 0;
        while count < BATCH_ROWS {
            let message = self.messages.try_next().await;
            let message = message.map_err(|error| self.failed(told(&error)))?;
            match message {
                None => break,
                Some(SimpleQueryMessage::Row(row)) => {
                    for (index, text) in texts.iter_mut().enumerate() {
                        let value = row.try_get(index);
                        text.append_option(value.map_err(|error| self.failed(told(&error)))?);
                    }
                    count += 1;
                }
                Some(_) => {}
            }
        }
        if count == 0 {
            return Ok(None);
        }
        let mut read = || {
            let columns = texts
                .iter_mut()
                .zip(self.schema.fields())
                .map(|(text, field)| typed(text.finish(), field.data_type()))
                .collect::<Result<Vec<_>, _>>()?;
            let options = RecordBatchOptions::new().with_row_count(Some(count));
            RecordBatch::try_new_with_options(Arc::clone(&self.schema), columns, &options)
        };
        let batch: Result<_, ArrowError> = read();
        let batch = batch.map_err(|error| format!("a value cannot be read: {error}"));
        batch.map(Some).map_err(|detail| self.failed(detail))
    }

    fn failed(&self, detail: String) -> Error {
        Error::Collector {
            url: self.url.clone(),
            detail,
        }
    }
}

/// Texts as values; one that cannot be read is an error, not NULL.
fn typed(texts: StringArray, data_type: &DataType) -> Result<ArrayRef, ArrowError> {
    let options = CastOptions {
        safe: false,
        ..CastOptions::default()
    };
    let texts: ArrayRef = Arc::new(texts);
    if texts.data_type() == data_type {
        return Ok(texts);
    }
    cast_with_options(&texts, data_type, &options)
}

/// What a column is read as; what is not known stays text.
fn data_type(of: &Type) -> DataType {
    match *of {
        Type::BOOL => DataType::Boolean,
        Type::INT2 => DataType::Int16,
        Type::INT4 => DataType::Int32,
        Type::INT8 => DataType::Int64,
        Type::FLOAT4 => DataType::Float32,
        Type::FLOAT8 => DataType::Float64,
        Type::DATE => DataType::Date32,
        Type::TIMESTAMP => DataType::Timestamp(TimeUnit::Microsecond, None),
        Type::TIMESTAMPTZ => DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
        _ => DataType::Utf8,
    }
}

fn tls(address: &Address, login: &Login) -> Result<ClientConfig, Error> {
    let mut roots = RootCertStore::empty();
    if let Some(pem) = login.ca()? {
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let added = certificate
                .map_err(|error| error.to_string())
                .and_then(|certificate| roots.add(certificate).map_err(|e| e.to_string()));
            added.map_err(|error| address.failed(format!("--ca-file: {error}")))?;
        }
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| address.failed(error.to_string()))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

/// The server's own words, if it said some.
fn told(error: &tokio_postgres::Error) -> String {
    let Some(said) = error.as_db_error() else {
        let text = chain(error);
        return match text.contains("UnknownIssuer") {
            true => format!("{text}; give --ca-file"),
            false => text,
        };
    };
    let hint = said
        .hint()
        .map_or(String::new(), |hint| format!(" ({hint})"));
    format!("{}{hint}", said.message())
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::{Int64Type, TimestampMicrosecondType};

    use super::*;

    #[test]
    fn texts_of_postgres_become_values() {
        let read = |texts: Vec<Option<&str>>, of| typed(StringArray::from(texts), &data_type(&of));
        let numbers = read(vec![Some("-9223372036854775808"), None], Type::INT8).unwrap();
        assert_eq!(numbers.as_primitive::<Int64Type>().value(0), i64::MIN);
        assert!(numbers.is_null(1));
        let flags = read(vec![Some("t"), Some("f")], Type::BOOL).unwrap();
        assert!(flags.as_boolean().value(0) && !flags.as_boolean().value(1));
        // date -u -d '2026-11-29 13:05:00' +%s
        for text in [
            "2026-11-29 13:05:00.000001+00",
            "2026-11-29 13:05:00.000001+00:00",
        ] {
            let times = read(vec![Some(text)], Type::TIMESTAMPTZ).unwrap();
            let times = times.as_primitive::<TimestampMicrosecondType>();
            assert_eq!(times.value(0), 1_795_957_500_000_001, "{text}");
        }
        assert!(read(vec![Some("x")], Type::INT4).is_err());
    }
}
