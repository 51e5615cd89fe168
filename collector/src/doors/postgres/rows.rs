//! Columns and rows in PostgreSQL's types and formats.
//!
//! What PostgreSQL has no type for travels as JSON (structs, maps, lists of them) or as text.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringBuilder};
use arrow::datatypes::{DataType, FieldRef, Schema};
use arrow::json::writer::{EncoderOptions, make_encoder};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use arrow_pg::datatypes::field_into_pg_type;
use arrow_pg::encoder::{Encoder, encode_value};
use pgwire::api::Type;
use pgwire::api::results::{DataRowEncoder, FieldFormat, FieldInfo};
use pgwire::messages::data::{DataRow, RowDescription};

use super::failure::Failure;
use super::spelling;

/// How a column travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Native,
    Json,
    Text,
}

fn form(kind: &DataType) -> Form {
    match kind {
        DataType::Struct(_) | DataType::Map(_, _) => Form::Json,
        DataType::List(field) | DataType::LargeList(field) | DataType::FixedSizeList(field, _) => {
            match field.data_type() {
                nested if nested.is_nested() => Form::Json,
                DataType::Dictionary(..) | DataType::Interval(_) | DataType::Duration(_) => {
                    Form::Json
                }
                DataType::Time32(_) | DataType::Time64(_) => Form::Json,
                _ => Form::Native,
            }
        }
        DataType::Dictionary(_, value) => match form(value) {
            Form::Native => Form::Native,
            _ => Form::Text,
        },
        DataType::Decimal128(_, scale) if !(0..=28).contains(scale) => Form::Text,
        DataType::Decimal256(_, _)
        | DataType::Decimal32(_, _)
        | DataType::Decimal64(_, _)
        | DataType::Float16
        | DataType::FixedSizeBinary(_)
        | DataType::Union(_, _)
        | DataType::ListView(_)
        | DataType::LargeListView(_)
        | DataType::RunEndEncoded(_, _) => Form::Text,
        _ => Form::Native,
    }
}

/// The PostgreSQL type of a column.
pub fn pg_type(field: &FieldRef) -> Type {
    match form(field.data_type()) {
        Form::Json => Type::JSON,
        Form::Text => Type::TEXT,
        // `SELECT NULL` is text in PostgreSQL.
        Form::Native if field.data_type().is_null() => Type::TEXT,
        Form::Native => field_into_pg_type(field).unwrap_or(Type::TEXT),
    }
}

/// The width of a type's values, as `pg_type.typlen` has it.
fn size(kind: &Type) -> i16 {
    match *kind {
        Type::BOOL | Type::CHAR => 1,
        Type::INT2 => 2,
        Type::INT4
        | Type::FLOAT4
        | Type::OID
        | Type::DATE
        | Type::REGCLASS
        | Type::REGTYPE
        | Type::REGPROC
        | Type::REGNAMESPACE => 4,
        Type::INT8 | Type::FLOAT8 | Type::TIME | Type::TIMESTAMP | Type::TIMESTAMPTZ => 8,
        Type::INTERVAL => 16,
        Type::NAME => 64,
        _ => -1,
    }
}

/// An answer's columns, each in its format: none given is text, one is for all.
#[derive(Debug, Clone)]
pub struct Columns {
    fields: Arc<Vec<FieldInfo>>,
}

impl Columns {
    /// From an answer's schema.
    pub fn new(schema: &Schema, formats: &[i16]) -> Result<Columns, Failure> {
        let count = schema.fields().len();
        if formats.len() > 1 && formats.len() != count {
            return Err(Failure::error(
                "08P01",
                format!(
                    "bind message has {} result formats but query has {count} columns",
                    formats.len()
                ),
            ));
        }
        let fields = schema.fields().iter().enumerate().map(|(index, field)| {
            let kind = pg_type(field);
            let code = match formats {
                [] => 0,
                [one] => *one,
                each => each[index],
            };
            let width = size(&kind);
            FieldInfo::new(
                field.name().clone(),
                None,
                None,
                kind,
                FieldFormat::from(code),
            )
            .with_type_size(width)
        });
        Ok(Columns {
            fields: Arc::new(fields.collect()),
        })
    }

    /// As clients are told.
    pub fn description(&self) -> RowDescription {
        RowDescription::new(self.fields.iter().map(Into::into).collect())
    }

    /// A batch's rows, made one by one.
    pub fn rows(&self, batch: &RecordBatch) -> Result<Rows, Failure> {
        let schema = batch.schema();
        let mut columns = Vec::with_capacity(batch.num_columns());
        let each = schema.fields().iter().zip(batch.columns());
        for ((field, column), info) in each.zip(self.fields.iter()) {
            let as_text = match form(field.data_type()) {
                Form::Json => Some(json(field, column)?),
                Form::Text => Some(text(column)?),
                Form::Native if info.format() == FieldFormat::Text => {
                    spelling::texts(column).map_err(failed)?
                }
                Form::Native => None,
            };
            columns.push(Column {
                field: Arc::clone(field),
                is_text: as_text.is_some(),
                values: as_text.unwrap_or_else(|| Arc::clone(column)),
            });
        }
        Ok(Rows {
            columns,
            fields: Arc::clone(&self.fields),
            encoder: DataRowEncoder::new(Arc::clone(&self.fields)),
            next: 0,
            count: batch.num_rows(),
        })
    }
}

struct Column {
    field: FieldRef,
    values: ArrayRef,
    /// The values are the texts to send already.
    is_text: bool,
}

/// Rows of a batch.
pub struct Rows {
    columns: Vec<Column>,
    fields: Arc<Vec<FieldInfo>>,
    encoder: DataRowEncoder,
    next: usize,
    count: usize,
}

impl Rows {
    /// The next row; `None` after the last.
    pub fn next_row(&mut self) -> Option<Result<DataRow, Failure>> {
        if self.next == self.count {
            return None;
        }
        let row = self.next;
        self.next += 1;
        for (column, info) in self.columns.iter().zip(self.fields.iter()) {
            let values = &column.values;
            let written = if values.is_null(row) {
                self.encoder.encode_field(&None::<&str>)
            } else if column.is_text {
                let text = values.as_string::<i32>().value(row);
                self.encoder.encode_field_with_type_and_format(
                    &text,
                    &Type::TEXT,
                    info.format(),
                    info.format_options(),
                )
            } else {
                encode_value(&mut self.encoder, values, row, &column.field, info)
            };
            if let Err(error) = written {
                return Some(Err(error.into()));
            }
        }
        Some(Ok(Encoder::take_row(&mut self.encoder)))
    }
}

fn failed(error: arrow::error::ArrowError) -> Failure {
    Failure::error("XX000", error.to_string())
}

fn json(field: &FieldRef, column: &ArrayRef) -> Result<ArrayRef, Failure> {
    let options = EncoderOptions::default().with_explicit_nulls(true);
    let mut encoder = make_encoder(field, column.as_ref(), &options).map_err(failed)?;
    let mut texts = StringBuilder::new();
    let mut buffer = Vec::new();
    for row in 0..column.len() {
        if column.is_null(row) {
            texts.append_null();
            continue;
        }
        buffer.clear();
        encoder.encode(row, &mut buffer);
        texts.append_value(String::from_utf8_lossy(&buffer));
    }
    Ok(Arc::new(texts.finish()))
}

fn text(column: &ArrayRef) -> Result<ArrayRef, Failure> {
    let options = FormatOptions::default();
    let formatter = ArrayFormatter::try_new(column, &options).map_err(failed)?;
    let mut texts = StringBuilder::new();
    for row in 0..column.len() {
        match column.is_null(row) {
            true => texts.append_null(),
            false => texts.append_value(formatter.value(row).to_string()),
        }
    }
    Ok(Arc::new(texts.finish()))
}

#[cfg(test)]
mod tests {
    use arrow::array::{
        BooleanArray, Date32Array, Float64Array, Int32Array, Int64Array, IntervalMonthDayNanoArray,
        ListArray, StringArray, StructArray, TimestampMicrosecondArray, UInt64Array,
    };
    use arrow::datatypes::{Field, Int64Type, IntervalMonthDayNano};

    use super::*;

    /// The fields of a row as they travel, NULL as `None`.
    fn sent(array: ArrayRef, format: i16) -> Vec<Option<Vec<u8>>> {
        let field = Field::new("c", array.data_type().clone(), true);
        let schema = Arc::new(Schema::new(vec![field]));
        let columns = Columns::new(&schema, &[format]).unwrap();
        let batch = RecordBatch::try_new(schema, vec![array]).unwrap();
        let mut rows = columns.rows(&batch).unwrap();
        let mut values = Vec::new();
        while let Some(row) = rows.next_row() {
            let data = row.unwrap().data;
            let length = i32::from_be_bytes(data[..4].try_into().unwrap());
            values.push((length >= 0).then(|| data[4..].to_vec()));
        }
        values
    }

    fn texts(array: ArrayRef) -> Vec<Option<String>> {
        let values = sent(array, 0);
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        values.into_iter().map(|value| value.map(text)).collect()
    }

    fn some(values: &[&str]) -> Vec<Option<String>> {
        values.iter().map(|value| Some(value.to_string())).collect()
    }

    #[test]
    fn texts_are_those_of_postgresql() {
        let time =
            TimestampMicrosecondArray::from(vec![1_795_957_500_000_001, 1_795_957_500_000_000])
                .with_timezone("UTC");
        assert_eq!(
            texts(Arc::new(time)),
            some(&["2026-11-29 13:05:00.000001+00", "2026-11-29 13:05:00+00"])
        );
        assert_eq!(
            texts(Arc::new(BooleanArray::from(vec![true, false]))),
            some(&["t", "f"])
        );
        let numbers = Float64Array::from(vec![0.1, 1e300, f64::NAN, f64::NEG_INFINITY]);
        assert_eq!(
            texts(Arc::new(numbers)),
            some(&["0.1", "1e+300", "NaN", "-Infinity"])
        );
        assert_eq!(
            texts(Arc::new(UInt64Array::from(vec![u64::MAX]))),
            some(&["18446744073709551615"])
        );
        assert_eq!(
            texts(Arc::new(Date32Array::from(vec![20_786]))),
            some(&["2026-11-29"])
        );
        let list = ListArray::from_iter_primitive::<Int64Type, _, _>(vec![
            Some(vec![Some(1), None]),
            None,
        ]);
        assert_eq!(texts(Arc::new(list)), [Some("{1,NULL}".to_string()), None]);
    }

    #[test]
    fn null_is_null_in_every_type() {
        let interval = IntervalMonthDayNanoArray::from(vec![None::<IntervalMonthDayNano>]);
        assert_eq!(texts(Arc::new(interval)), [None]);
        assert_eq!(texts(Arc::new(Int32Array::from(vec![None]))), [None]);
        assert_eq!(
            texts(arrow::array::new_null_array(&DataType::Null, 1)),
            [None]
        );
    }

    #[test]
    fn binary_values_are_those_of_postgresql() {
        assert_eq!(
            sent(Arc::new(Int64Array::from(vec![-2])), 1),
            [Some(vec![255, 255, 255, 255, 255, 255, 255, 254])]
        );
        // 2026-11-29 13:05:00+00 lies 849272700 s after 2000.
        let time =
            TimestampMicrosecondArray::from(vec![1_795_957_500_000_000]).with_timezone("UTC");
        assert_eq!(
            sent(Arc::new(time), 1),
            [Some(849_272_700_000_000i64.to_be_bytes().to_vec())]
        );
    }

    #[test]
    fn structs_travel_as_json() {
        let names: ArrayRef = Arc::new(StringArray::from(vec![Some("a\"b"), None]));
        let counts: ArrayRef = Arc::new(Int64Array::from(vec![1, 2]));
        let entries = StructArray::from(vec![
            (Arc::new(Field::new("cause", DataType::Utf8, true)), names),
            (Arc::new(Field::new("count", DataType::Int64, true)), counts),
        ]);
        let expected = [
            r#"{"cause":"a\"b","count":1}"#,
            r#"{"cause":null,"count":2}"#,
        ];
        let parsed: Vec<serde_json::Value> = texts(Arc::new(entries))
            .iter()
            .map(|text| serde_json::from_str(text.as_deref().unwrap()).unwrap())
            .collect();
        for (text, expected) in parsed.iter().zip(expected) {
            assert_eq!(
                *text,
                serde_json::from_str::<serde_json::Value>(expected).unwrap()
            );
        }
    }
}
