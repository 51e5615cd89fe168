//! Texts of times and numbers as PostgreSQL writes them: what clients read into their own types,
//! and what people compare.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, PrimitiveArray, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Float32Type, Float64Type, TimeUnit, TimestampMicrosecondType,
};
use arrow::error::ArrowError;

/// The texts of a column; `None` if its type is written well by others.
pub fn texts(column: &ArrayRef) -> Result<Option<ArrayRef>, ArrowError> {
    Ok(match column.data_type() {
        DataType::Timestamp(_, zone) => {
            let zone = zone.is_some();
            // To UTC, in which all times are shown.
            let kind = DataType::Timestamp(TimeUnit::Microsecond, zone.then(|| "UTC".into()));
            let column = cast(column, &kind)?;
            let column = column.as_primitive::<TimestampMicrosecondType>();
            Some(spelled(column, |us| time(us, zone)))
        }
        // From these exponents on PostgreSQL writes one (src/common/d2s.c, f2s.c).
        DataType::Float64 => Some(spelled(column.as_primitive::<Float64Type>(), |number| {
            float(number, &format!("{number:e}"), 15)
        })),
        DataType::Float32 => Some(spelled(column.as_primitive::<Float32Type>(), |number| {
            float(number.into(), &format!("{number:e}"), 6)
        })),
        _ => None,
    })
}

fn spelled<T: ArrowPrimitiveType>(
    column: &PrimitiveArray<T>,
    spell: impl Fn(T::Native) -> String,
) -> ArrayRef {
    let texts = column.iter().map(|value| value.map(&spell));
    Arc::new(StringArray::from_iter(texts))
}

/// `2026-11-29 13:05:00.25+00`: no more digits than there are.
fn time(us: i64, zone: bool) -> String {
    let Some(time) = chrono::DateTime::from_timestamp_micros(us) else {
        // 262,000 years away from here.
        return if us > 0 { "infinity" } else { "-infinity" }.to_string();
    };
    use chrono::Datelike;
    let mut text = time.format("%m-%d %H:%M:%S").to_string();
    let fraction = us.rem_euclid(1_000_000);
    if fraction != 0 {
        let digits = format!("{fraction:06}");
        text.push('.');
        text.push_str(digits.trim_end_matches('0'));
    }
    if zone {
        text.push_str("+00");
    }
    match time.year() {
        year if year > 0 => format!("{year:04}-{text}"),
        // There is no year 0.
        year => format!("{:04}-{text} BC", 1 - year),
    }
}

/// From the shortest digits that read back the same, as `d.ddde±x`.
fn float(number: f64, scientific: &str, fixed_below: i32) -> String {
    if number.is_nan() {
        return "NaN".to_string();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_string();
    }
    let (digits, exponent) = scientific.split_once('e').unwrap_or((scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, digits) = match digits.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", digits),
    };
    if exponent < -4 || exponent >= fixed_below {
        let direction = if exponent < 0 { '-' } else { '+' };
        return format!("{sign}{digits}e{direction}{:02}", exponent.abs());
    }
    let digits = digits.replace('.', "");
    // Between -4 and 15.
    let shift = usize::try_from(exponent.abs()).unwrap_or(0);
    if exponent < 0 {
        return format!("{sign}0.{}{digits}", "0".repeat(shift - 1));
    }
    if digits.len() <= shift + 1 {
        return format!("{sign}{digits}{}", "0".repeat(shift + 1 - digits.len()));
    }
    let (whole, fraction) = digits.split_at(shift + 1);
    format!("{sign}{whole}.{fraction}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_postgresql() {
        let double = |number: f64| float(number, &format!("{number:e}"), 15);
        // From PostgreSQL's regression tests (float8.out), and by hand where an exponent begins.
        for (number, text) in [
            (0.0, "0"),
            (-0.0, "-0"),
            (1004.3, "1004.3"),
            (-34.84, "-34.84"),
            (1.2345678901234e+200, "1.2345678901234e+200"),
            (1.2345678901234e-200, "1.2345678901234e-200"),
            (1_795_957_500.0, "1795957500"),
            (123_456_789_012_345.0, "123456789012345"),
            (1e15, "1e+15"),
            (1.5e15, "1.5e+15"),
            (0.0001, "0.0001"),
            (0.000_123_4, "0.0001234"),
            (0.00001, "1e-05"),
            (0.1, "0.1"),
            (10.0, "10"),
            (100.5, "100.5"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(double(number), text);
        }
        let single = |number: f32| float(number.into(), &format!("{number:e}"), 6);
        for (number, text) in [
            (1_234.5f32, "1234.5"),
            (123_456.0, "123456"),
            (1_000_000.0, "1e+06"),
            (1.234_567_9e-20, "1.2345679e-20"),
        ] {
            assert_eq!(single(number), text);
        }
    }

    #[test]
    fn times_have_the_digits_that_they_need() {
        assert_eq!(time(1_795_957_500_000_000, true), "2026-11-29 13:05:00+00");
        assert_eq!(time(1_795_957_500_250_000, false), "2026-11-29 13:05:00.25");
        assert_eq!(time(-1, true), "1969-12-31 23:59:59.999999+00");
        // The day before 0001-01-01, which PostgreSQL calls 0001-12-31 BC.
        assert_eq!(
            time(-62_135_596_800_000_001, false),
            "0001-12-31 23:59:59.999999 BC"
        );
        assert_eq!(time(i64::MAX, true), "infinity");
    }
}
