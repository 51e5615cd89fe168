//! How large a result can be at most, of the arguments alone.
//!
//! A bound may be far too high: that costs evaluating fewer rows at a time. It must not be too low.

use arrow::array::{Array, ArrayRef, AsArray, Int64Array};
use arrow::compute::{cast, max};
use arrow::datatypes::{DataType, Int64Type, IntervalMonthDayNanoType, TimeUnit};
use datafusion::error::Result;
use datafusion::logical_expr::ColumnarValue;

use crate::sizes;

/// Bytes of a call's result at most.
pub(super) type Bound = fn(&Call) -> u64;

/// Bytes that a row takes beside its value: an offset or a view, and its validity.
const ROW: u64 = 17;

/// The functions whose results can be larger than what they are given, and how large.
const ALL: &[(&str, Bound)] = &[
    (super::concat::NAME, Call::all),
    ("concat", Call::all),
    ("concat_ws", |call| {
        call.all() + call.bytes(0) * call.arguments.len() as u64
    }),
    ("overlay", Call::all),
    ("array_append", Call::all),
    ("array_concat", Call::all),
    ("array_prepend", Call::all),
    ("array_union", Call::all),
    ("arrays_zip", Call::all),
    ("flatten", Call::all),
    ("make_array", Call::all),
    ("map", Call::all),
    // A byte is two digits in hexadecimal, fewer in base64.
    ("encode", |call| call.all() * 2),
    // A character of one byte may become one of four.
    ("translate", |call| call.all() * 4),
    // Every character may become a text with its offset, or its view.
    ("string_to_array", |call| call.all() * ROW),
    ("repeat", |call| {
        let once = call.bytes(0).min(call.rows() * call.most(0));
        (call.rows() * ROW).saturating_add(once.saturating_mul(call.number(1)))
    }),
    ("array_repeat", |call| {
        let items = call.bytes(0).saturating_mul(call.number(1));
        items.saturating_add(call.rows() * ROW)
    }),
    ("array_resize", |call| {
        let items = call.rows().saturating_mul(call.number(1));
        (call.all()).saturating_add(items.saturating_mul(call.most(2) + ROW))
    }),
    ("lpad", Call::padded),
    ("rpad", Call::padded),
    // At every place of the text, also before and after it.
    ("replace", Call::replaced),
    // What was found may stand in the replacement as often as that has room for `\1`.
    ("regexp_replace", |call| call.replaced().saturating_mul(2)),
    ("array_replace", Call::replaced),
    ("array_replace_n", Call::replaced),
    ("array_replace_all", Call::replaced),
    ("array_to_string", |call| {
        // A number has at most 32 digits or so, and an item is a bit at least.
        let each = call.most(1) + call.most(2) + 32;
        (call.bytes(0) * 8).saturating_mul(each)
    }),
    ("range", Call::series),
    ("generate_series", Call::series),
];

/// The bound of a function, if it has one.
pub(super) fn of(name: &str) -> Option<Bound> {
    let found = ALL.iter().find(|(known, _)| *known == name);
    found.map(|(_, bound)| *bound)
}

/// The arguments of a call.
pub(super) struct Call {
    /// Each with the times that it counts: constants are there once and count for every row.
    arguments: Vec<(ArrayRef, u64)>,
    rows: usize,
}

impl Call {
    pub fn new(arguments: &[ColumnarValue], rows: usize) -> Result<Call> {
        let arguments = arguments.iter().map(|argument| match argument {
            ColumnarValue::Array(array) => Ok((array.clone(), 1)),
            ColumnarValue::Scalar(value) => Ok((value.to_array()?, rows as u64)),
        });
        Ok(Call {
            arguments: arguments.collect::<Result<_>>()?,
            rows,
        })
    }

    fn rows(&self) -> u64 {
        self.rows as u64
    }

    /// Bytes of an argument in all rows. An argument that is not there has none.
    fn bytes(&self, index: usize) -> u64 {
        let argument = self.arguments.get(index);
        argument.map_or(0, |(values, times)| {
            sizes::bytes(values).saturating_mul(*times)
        })
    }

    /// Bytes of the largest value of an argument.
    fn most(&self, index: usize) -> u64 {
        let argument = self.arguments.get(index);
        argument.map_or(0, |(values, _)| sizes::largest(values))
    }

    /// The greatest number of an argument, 0 at least.
    fn number(&self, index: usize) -> u64 {
        let numbers = self.arguments.get(index).and_then(|(values, _)| {
            let numbers = cast(values, &DataType::Int64).ok()?;
            max(numbers.as_primitive::<Int64Type>())
        });
        u64::try_from(numbers.unwrap_or(0)).unwrap_or(0)
    }

    fn all(&self) -> u64 {
        let each = (0..self.arguments.len()).map(|index| self.bytes(index));
        each.fold(self.rows() * ROW, u64::saturating_add)
    }

    /// Filled up to so many characters, of four bytes at most.
    fn padded(&self) -> u64 {
        let filled = self.rows().saturating_mul(self.number(1) * 4);
        self.all().saturating_add(filled)
    }

    fn replaced(&self) -> u64 {
        (self.bytes(0) + self.rows()).saturating_mul(self.most(2) + 1)
    }

    /// Items of eight bytes, from a start to an end in steps.
    fn series(&self) -> u64 {
        let Some((start, end, step)) = self.ends() else {
            // A type that has no series: the function says so.
            return 0;
        };
        let row = |values: &Int64Array, row: usize| {
            let row = if values.len() == 1 { 0 } else { row };
            values.is_valid(row).then(|| values.value(row))
        };
        let items = (0..self.rows).map(|at| {
            let (Some(start), Some(end)) = (row(&start, at), row(&end, at)) else {
                return 0;
            };
            let step = row(&step, at).unwrap_or(1).unsigned_abs();
            end.abs_diff(start) / step.max(1) + 1
        });
        let items = items.fold(0, u64::saturating_add);
        items.saturating_mul(8).saturating_add(self.rows() * ROW)
    }

    /// Start, end and step of a series as whole numbers of one unit.
    fn ends(&self) -> Option<(Int64Array, Int64Array, Int64Array)> {
        let whole = |values: &ArrayRef| {
            let nanoseconds = DataType::Timestamp(TimeUnit::Nanosecond, None);
            let values = match values.data_type() {
                DataType::Date32 | DataType::Date64 | DataType::Timestamp(_, _) => {
                    cast(values, &nanoseconds).ok()?
                }
                DataType::Interval(_) => return shortest(values),
                _ => values.clone(),
            };
            let values = cast(&values, &DataType::Int64).ok()?;
            Some(values.as_primitive::<Int64Type>().clone())
        };
        let number = |value: i64| Int64Array::from(vec![value]);
        let values = self.arguments.iter().map(|(values, _)| whole(values));
        match values.collect::<Option<Vec<_>>>()?.as_slice() {
            [end] => Some((number(0), end.clone(), number(1))),
            [start, end] => Some((start.clone(), end.clone(), number(1))),
            [start, end, step] => Some((start.clone(), end.clone(), step.clone())),
            _ => None,
        }
    }
}

/// Intervals in nanoseconds, with no more of them than their months and days have at least.
fn shortest(intervals: &ArrayRef) -> Option<Int64Array> {
    use arrow::datatypes::IntervalUnit::MonthDayNano;
    const HOUR: i64 = 3_600_000_000_000;
    let intervals = cast(intervals, &DataType::Interval(MonthDayNano)).ok()?;
    let intervals = intervals.as_primitive_opt::<IntervalMonthDayNanoType>()?;
    let length = |interval: arrow::datatypes::IntervalMonthDayNano| {
        // A February, and a day on which clocks go forward.
        let days = i64::from(interval.months) * 28 + i64::from(interval.days);
        (days * 23 * HOUR).saturating_add(interval.nanoseconds)
    };
    Some(intervals.iter().map(|value| value.map(length)).collect())
}
