//! How answers are written: table, CSV, JSON, Parquet; to stdout or to a file.
//!
//! A file is written under a temporary name beside it and takes its own name only when the
//! answer is complete: whoever finds the file finds the whole answer.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use arrow::array::{ArrayRef, RecordBatch, StringArray};
use arrow::csv;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::json;
use arrow::json::writer::{JsonArray, LineDelimited};
use arrow::util::pretty::pretty_format_batches_with_schema;
use parquet::arrow::ArrowWriter;

/// The forms an answer can take.
#[derive(Clone, Copy, PartialEq)]
pub enum Format {
    Table,
    Csv,
    Json,
    Parquet,
}

/// Takes one answer.
pub struct Sink {
    format: Format,
    /// Where the answer goes; taken by the writer in `start`.
    target: Option<Box<dyn Write + Send>>,
    writer: Option<Writer>,
    file: Option<FileTarget>,
    schema: Option<SchemaRef>,
}

enum Writer {
    Table(Vec<RecordBatch>, Box<dyn Write + Send>),
    Csv(Box<csv::Writer<Box<dyn Write + Send>>>),
    Json(Box<json::Writer<Box<dyn Write + Send>, JsonArray>>),
    Parquet(Box<ArrowWriter<Box<dyn Write + Send>>>),
}

/// A file in the making; removed unless it was finished.
struct FileTarget {
    partial: PathBuf,
    wanted: PathBuf,
    finished: bool,
}

impl Drop for FileTarget {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

impl Sink {
    pub fn open(format: Format, output: Option<&Path>) -> anyhow::Result<Sink> {
        let Some(wanted) = output else {
            let target: Box<dyn Write + Send> = Box::new(BufWriter::new(std::io::stdout()));
            return Ok(Sink {
                format,
                target: Some(target),
                writer: None,
                file: None,
                schema: None,
            });
        };
        let mut name = wanted
            .file_name()
            .with_context(|| format!("{wanted:?} is not a file name"))?
            .to_owned();
        name.push(format!(".{}.part", std::process::id()));
        let partial = wanted.with_file_name(name);
        let file =
            File::create(&partial).with_context(|| format!("failed to create {partial:?}"))?;
        let target: Box<dyn Write + Send> = Box::new(BufWriter::new(file));
        let file = FileTarget {
            partial,
            wanted: wanted.to_path_buf(),
            finished: false,
        };
        Ok(Sink {
            format,
            target: Some(target),
            writer: None,
            file: Some(file),
            schema: None,
        })
    }

    /// Called once, before the first row.
    pub fn start(&mut self, schema: SchemaRef) -> anyhow::Result<()> {
        let target = self.target.take().context("an answer was started twice")?;
        self.writer = Some(match self.format {
            Format::Table => Writer::Table(Vec::new(), target),
            Format::Csv => {
                let mut writer = csv::WriterBuilder::new().with_header(true).build(target);
                // The header line is there even if no row is.
                writer.write(&flat(&RecordBatch::new_empty(Arc::clone(&schema)))?)?;
                Writer::Csv(Box::new(writer))
            }
            Format::Json => {
                let writer = json::WriterBuilder::new()
                    .with_explicit_nulls(true)
                    .build(target);
                Writer::Json(Box::new(writer))
            }
            Format::Parquet => Writer::Parquet(Box::new(ArrowWriter::try_new(
                target,
                Arc::clone(&schema),
                None,
            )?)),
        });
        self.schema = Some(schema);
        Ok(())
    }

    pub fn write(&mut self, batch: &RecordBatch) -> anyhow::Result<()> {
        match self.writer.as_mut().context("an answer was not started")? {
            Writer::Table(batches, _) => batches.push(batch.clone()),
            Writer::Csv(writer) => writer.write(&flat(batch)?)?,
            Writer::Json(writer) => writer.write(batch)?,
            Writer::Parquet(writer) => writer.write(batch)?,
        }
        Ok(())
    }

    /// Ends the answer. `elapsed` is shown under a table.
    pub fn finish(&mut self, elapsed: Duration) -> anyhow::Result<()> {
        let mut target = match self.writer.take().context("an answer was not started")? {
            Writer::Table(batches, mut target) => {
                let schema = self
                    .schema
                    .take()
                    .unwrap_or_else(|| Arc::new(Schema::empty()));
                write_table(&mut target, schema, &batches, elapsed)?;
                target
            }
            Writer::Csv(writer) => writer.into_inner(),
            Writer::Json(mut writer) => {
                writer.finish()?;
                let mut target = writer.into_inner();
                target.write_all(b"\n")?;
                target
            }
            Writer::Parquet(writer) => writer.into_inner()?,
        };
        target.flush()?;
        drop(target);
        if let Some(mut file) = self.file.take() {
            std::fs::rename(&file.partial, &file.wanted)
                .with_context(|| format!("failed to write {:?}", file.wanted))?;
            file.finished = true;
        }
        Ok(())
    }
}

fn write_table(
    target: &mut dyn Write,
    schema: SchemaRef,
    batches: &[RecordBatch],
    elapsed: Duration,
) -> anyhow::Result<()> {
    let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
    writeln!(
        target,
        "{}",
        pretty_format_batches_with_schema(schema, batches)?
    )?;
    let plural = if rows == 1 { "" } else { "s" };
    writeln!(
        target,
        "({rows} row{plural}, {:.3} s)",
        elapsed.as_secs_f64()
    )?;
    Ok(())
}

/// Whether an error only means that whoever read our output has gone (`| head`).
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<std::io::Error>();
        io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
            // arrow's CSV writer keeps the text of an I/O error and not the error.
            || cause.to_string().contains("Broken pipe")
    })
}

/// The batch with its lists and structs as JSON text: CSV has no nested values.
fn flat(batch: &RecordBatch) -> anyhow::Result<RecordBatch> {
    let mut fields = Vec::with_capacity(batch.num_columns());
    let mut columns = Vec::with_capacity(batch.num_columns());
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        if field.data_type().is_nested() {
            fields.push(Arc::new(Field::new(field.name(), DataType::Utf8, true)));
            columns.push(json_text(field, column)?);
        } else {
            fields.push(Arc::clone(field));
            columns.push(Arc::clone(column));
        }
    }
    Ok(RecordBatch::try_new(
        Arc::new(Schema::new(fields)),
        columns,
    )?)
}

fn json_text(field: &Field, column: &ArrayRef) -> anyhow::Result<ArrayRef> {
    let single = Schema::new(vec![field.clone()]);
    let mut writer = json::WriterBuilder::new()
        .with_explicit_nulls(true)
        .build::<_, LineDelimited>(Vec::new());
    writer.write(&RecordBatch::try_new(
        Arc::new(single),
        vec![Arc::clone(column)],
    )?)?;
    writer.finish()?;
    let lines = String::from_utf8(writer.into_inner())?;
    // Each line is {"name":value}. The value is cut out as it stands: parsing it would sort its
    // members by name.
    let before_value = "{:".len() + serde_json::to_string(field.name())?.len();
    let value = |line: &str| {
        let text = line.get(before_value..line.len() - 1)?;
        (text != "null").then(|| text.to_string())
    };
    let texts: Vec<Option<String>> = lines.lines().map(value).collect();
    Ok(Arc::new(StringArray::from(texts)))
}
