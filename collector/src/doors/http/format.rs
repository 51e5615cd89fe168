//! Answers as bytes: JSON, NDJSON, CSV, Arrow. Each is written batch by batch, and each lets a
//! client tell a whole answer from one that broke off:
//!
//! - JSON: the last member is `row_count` of a whole answer, `error` of another;
//! - NDJSON: the last line of another is `{"error":…}` (an answer's own column of that name is
//!   told from it by the transfer, which breaks off after it);
//! - CSV: the transfer breaks off, nothing else can be told;
//! - Arrow: the end-of-stream marker is missing.
//!
//! In all of them the connection (HTTP/2: the stream) is then broken instead of ended.

use std::sync::Arc;

use arrow::array::{ArrayRef, StringArray};
use arrow::csv;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::writer::StreamWriter;
use arrow::json;
use arrow::json::writer::{EncoderOptions, LineDelimited, make_encoder};
use arrow::record_batch::RecordBatch;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;
use utoipa::ToSchema;
use vramscope_queries::quality::Loss;
use vramscope_queries::reference::type_name;

use super::problem::Detail;

/// How an answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// One JSON object: `columns`, `rows`, what was lost.
    Json,
    /// A JSON object per row and line.
    Ndjson,
    /// A header line, then a line per row.
    Csv,
    /// An Arrow IPC stream.
    Arrow,
}

impl Format {
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Json => "application/json",
            Format::Ndjson => "application/x-ndjson",
            Format::Csv => "text/csv; charset=utf-8; header=present",
            Format::Arrow => "application/vnd.apache.arrow.stream",
        }
    }

    /// The first of an `Accept` header's types that there is; without one, JSON. `None` if it
    /// names only others.
    pub fn accepted(accept: Option<&str>) -> Option<Format> {
        let Some(accept) = accept else {
            return Some(Format::Json);
        };
        accept.split(',').find_map(|range| {
            let name = range.split(';').next().unwrap_or("").trim();
            match name.to_ascii_lowercase().as_str() {
                "" | "*/*" | "application/*" | "application/json" => Some(Format::Json),
                "application/x-ndjson" | "application/jsonl" => Some(Format::Ndjson),
                "text/csv" | "text/*" => Some(Format::Csv),
                "application/vnd.apache.arrow.stream" => Some(Format::Arrow),
                _ => None,
            }
        })
    }
}

/// Writes one answer.
pub enum Encoder {
    Json { rows: u64 },
    Ndjson,
    Csv { begun: bool },
    Arrow(Box<StreamWriter<Vec<u8>>>),
}

impl Encoder {
    /// An encoder, and what comes before the first row.
    pub fn start(format: Format, schema: &SchemaRef) -> Result<(Encoder, Bytes), ArrowError> {
        let mut encoder = match format {
            Format::Json => Encoder::Json { rows: 0 },
            Format::Ndjson => Encoder::Ndjson,
            Format::Csv => Encoder::Csv { begun: false },
            Format::Arrow => {
                let writer = StreamWriter::try_new(Vec::new(), schema)?;
                Encoder::Arrow(Box::new(writer))
            }
        };
        let head = match &mut encoder {
            Encoder::Json { .. } => {
                let columns: Vec<_> = schema.fields().iter().map(|field| column(field)).collect();
                let columns = serde_json::Value::from(columns);
                Bytes::from(format!("{{\"columns\":{columns},\"rows\":["))
            }
            Encoder::Ndjson => Bytes::new(),
            // The header line is there even if no row is.
            Encoder::Csv { .. } => encoder.batch(&RecordBatch::new_empty(Arc::clone(schema)))?,
            Encoder::Arrow(writer) => Bytes::from(std::mem::take(writer.get_mut())),
        };
        Ok((encoder, head))
    }

    /// Some rows.
    pub fn batch(&mut self, batch: &RecordBatch) -> Result<Bytes, ArrowError> {
        match self {
            Encoder::Json { rows } => json_rows(batch, rows),
            Encoder::Ndjson => {
                let mut writer = json::WriterBuilder::new()
                    .with_explicit_nulls(true)
                    .build::<_, LineDelimited>(Vec::new());
                writer.write(batch)?;
                writer.finish()?;
                Ok(Bytes::from(writer.into_inner()))
            }
            Encoder::Csv { begun } => {
                let mut writer = csv::WriterBuilder::new()
                    .with_header(!*begun)
                    .build(Vec::new());
                writer.write(&flat(batch)?)?;
                *begun = true;
                Ok(Bytes::from(writer.into_inner()))
            }
            Encoder::Arrow(writer) => {
                writer.write(batch)?;
                Ok(Bytes::from(std::mem::take(writer.get_mut())))
            }
        }
    }

    /// What comes after the last row of a whole answer.
    pub fn end(self, loss: Option<&Loss>) -> Result<Bytes, ArrowError> {
        match self {
            Encoder::Json { rows } => {
                let lossy = serde_json::Value::from(loss.map(|loss| loss.windows > 0));
                let note = match loss.and_then(Loss::note) {
                    Some(note) => format!(",\"note\":{}", serde_json::Value::from(note)),
                    None => String::new(),
                };
                let end = format!("],\"lossy\":{lossy}{note},\"row_count\":{rows}}}\n");
                Ok(Bytes::from(end))
            }
            Encoder::Ndjson | Encoder::Csv { .. } => Ok(Bytes::new()),
            Encoder::Arrow(mut writer) => {
                writer.finish()?;
                Ok(Bytes::from(std::mem::take(writer.get_mut())))
            }
        }
    }

    /// What comes after the last row of one that failed.
    pub fn fail(self, detail: &Detail) -> Bytes {
        let error = json!(detail);
        match self {
            Encoder::Json { .. } => Bytes::from(format!("],\"error\":{error}}}\n")),
            Encoder::Ndjson => Bytes::from(format!("{{\"error\":{error}}}\n")),
            Encoder::Csv { .. } | Encoder::Arrow(_) => Bytes::new(),
        }
    }
}

fn column(field: &Field) -> serde_json::Value {
    json!({
        "name": field.name(),
        "type": type_name(field.data_type()),
        "nullable": field.is_nullable(),
    })
}

/// Rows as arrays, in the order of the columns: names may be there twice.
fn json_rows(batch: &RecordBatch, rows: &mut u64) -> Result<Bytes, ArrowError> {
    let options = EncoderOptions::default().with_explicit_nulls(true);
    let schema = batch.schema();
    let mut encoders = schema
        .fields()
        .iter()
        .zip(batch.columns())
        .map(|(field, column)| make_encoder(field, column.as_ref(), &options))
        .collect::<Result<Vec<_>, _>>()?;
    let mut out = Vec::new();
    for row in 0..batch.num_rows() {
        if *rows > 0 {
            out.push(b',');
        }
        out.extend_from_slice(b"\n[");
        for (index, encoder) in encoders.iter_mut().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            match encoder.is_null(row) {
                true => out.extend_from_slice(b"null"),
                false => encoder.encode(row, &mut out),
            }
        }
        out.push(b']');
        *rows += 1;
    }
    Ok(Bytes::from(out))
}

/// The batch with its lists and structs as JSON text: CSV has no nested values.
fn flat(batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let options = EncoderOptions::default().with_explicit_nulls(true);
    let mut fields = Vec::with_capacity(batch.num_columns());
    let mut columns = Vec::with_capacity(batch.num_columns());
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        if !field.data_type().is_nested() {
            fields.push(Arc::clone(field));
            columns.push(Arc::clone(column));
            continue;
        }
        let mut encoder = make_encoder(field, column.as_ref(), &options)?;
        let texts = (0..column.len()).map(|row| {
            if encoder.is_null(row) {
                return None;
            }
            let mut text = Vec::new();
            encoder.encode(row, &mut text);
            // JSON is text.
            String::from_utf8(text).ok()
        });
        let texts: ArrayRef = Arc::new(StringArray::from_iter(texts));
        fields.push(Arc::new(Field::new(field.name(), DataType::Utf8, true)));
        columns.push(texts);
    }
    let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), columns, &options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_type_that_there_is_counts() {
        let format = |accept| Format::accepted(Some(accept));
        assert_eq!(Format::accepted(None), Some(Format::Json));
        assert_eq!(format("*/*"), Some(Format::Json));
        assert_eq!(format("text/html, text/csv;q=0.5"), Some(Format::Csv));
        assert_eq!(
            format("Application/vnd.apache.arrow.stream"),
            Some(Format::Arrow)
        );
        assert_eq!(format("text/html,image/png"), None);
    }
}
