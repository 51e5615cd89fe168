//! Answers as rows with named columns, for commands that read what they print.

use anyhow::Context;
use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{
    DataType, Float64Type, Int32Type, Int64Type, TimeUnit, TimestampMicrosecondType, UInt64Type,
};
use arrow::util::display::array_value_to_string;

/// A whole answer.
pub struct Rows(pub Vec<RecordBatch>);

/// One row of it.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    batch: &'a RecordBatch,
    index: usize,
}

impl Rows {
    pub fn iter(&self) -> impl Iterator<Item = Row<'_>> {
        self.0
            .iter()
            .flat_map(|batch| (0..batch.num_rows()).map(move |index| Row { batch, index }))
    }

    pub fn first(&self) -> Option<Row<'_>> {
        self.iter().next()
    }
}

impl<'a> Row<'a> {
    /// The column, unless the row has NULL there.
    fn column(&self, name: &str) -> anyhow::Result<Option<&'a dyn Array>> {
        let column = self.batch.column_by_name(name);
        let column = column.with_context(|| format!("the answer has no column {name:?}"))?;
        Ok((!column.is_null(self.index)).then_some(column.as_ref()))
    }

    pub fn number(&self, name: &str) -> anyhow::Result<Option<i64>> {
        let Some(column) = self.column(name)? else {
            return Ok(None);
        };
        let value = match column.data_type() {
            DataType::Int32 => column.as_primitive::<Int32Type>().value(self.index).into(),
            DataType::Int64 => column.as_primitive::<Int64Type>().value(self.index),
            DataType::UInt64 => {
                i64::try_from(column.as_primitive::<UInt64Type>().value(self.index))?
            }
            DataType::Null => return Ok(None),
            other => anyhow::bail!("column {name:?} is {other}, expected a whole number"),
        };
        Ok(Some(value))
    }

    /// A size: what is below 0 is none.
    pub fn bytes(&self, name: &str) -> anyhow::Result<Option<u64>> {
        let value = self.number(name)?;
        Ok(value.and_then(|value| u64::try_from(value).ok()))
    }

    pub fn ratio(&self, name: &str) -> anyhow::Result<Option<f64>> {
        let Some(column) = self.column(name)? else {
            return Ok(None);
        };
        match column.data_type() {
            DataType::Float64 => Ok(Some(column.as_primitive::<Float64Type>().value(self.index))),
            DataType::Null => Ok(None),
            other => anyhow::bail!("column {name:?} is {other}, expected a ratio"),
        }
    }

    pub fn flag(&self, name: &str) -> anyhow::Result<Option<bool>> {
        let Some(column) = self.column(name)? else {
            return Ok(None);
        };
        let column = column.as_boolean_opt();
        let column = column.with_context(|| format!("column {name:?} is no flag"))?;
        Ok(Some(column.value(self.index)))
    }

    /// The value as text, whatever its type.
    pub fn text(&self, name: &str) -> anyhow::Result<Option<String>> {
        let Some(column) = self.column(name)? else {
            return Ok(None);
        };
        // Kept to seconds where there is nothing below them, as people write them.
        if let DataType::Timestamp(TimeUnit::Microsecond, _) = column.data_type() {
            let value = column.as_primitive::<TimestampMicrosecondType>();
            let time = value.value_as_datetime(self.index);
            return Ok(time.map(|time| format!("{}Z", time.format("%Y-%m-%dT%H:%M:%S%.f"))));
        }
        Ok(Some(array_value_to_string(column, self.index)?))
    }
}

/// A value as SQL text: only what comes from users as text needs it.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

impl Row<'_> {
    /// The elements of a list.
    pub fn list(&self, name: &str) -> anyhow::Result<Option<arrow::array::ArrayRef>> {
        let Some(column) = self.column(name)? else {
            return Ok(None);
        };
        let column = column.as_list_opt::<i32>();
        let column = column.with_context(|| format!("column {name:?} is no list"))?;
        Ok(Some(column.value(self.index)))
    }
}
