//! Parameters: from what a client binds to literals of SQL.
//!
//! A literal goes into the parsed statement, never into its text, so a value cannot become SQL.
//! Binary formats are those that PostgreSQL's types send (`…send` functions in its source).

use bytes::{Buf, Bytes};
use datafusion::sql::sqlparser::ast::{Expr, Value};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::parser::Parser;
use pgwire::api::Type;

use super::failure::Failure;

/// Microseconds from 1970 to 2000, where PostgreSQL's times begin.
const EPOCH_US: i64 = 946_684_800_000_000;
/// Days from 1970 to 2000.
const EPOCH_DAYS: i32 = 10_957;

/// A parameter as it was bound.
#[derive(Debug, Clone)]
pub struct Bound {
    /// Its type; unknown means that it is to be understood from where it stands.
    pub kind: Type,
    /// Whether the value is in the type's binary format.
    pub binary: bool,
    /// The value, `None` for NULL.
    pub value: Option<Bytes>,
}

impl Bound {
    /// NULL of a type.
    pub fn null(kind: Type) -> Bound {
        Bound {
            kind,
            binary: false,
            value: None,
        }
    }

    /// As an expression of SQL.
    pub fn literal(&self) -> Result<Expr, Failure> {
        let Some(value) = &self.value else {
            return null(&self.kind);
        };
        if let Some(element) = element_of(&self.kind) {
            let elements = if self.binary {
                binary_array(value.clone(), &element)?
            } else {
                text_array(text(value)?, &element)?
            };
            return array(&element, &elements);
        }
        let text = if self.binary {
            from_binary(&self.kind, value.clone())?
        } else {
            text(value)?.to_string()
        };
        typed(&self.kind, text)
    }
}

fn text(bytes: &Bytes) -> Result<&str, Failure> {
    std::str::from_utf8(bytes)
        .map_err(|_| Failure::error("22021", "invalid byte sequence for encoding \"UTF8\""))
}

fn wrong(kind: &Type) -> Failure {
    Failure::error(
        "22P03",
        format!("incorrect binary data format for type {}", kind.name()),
    )
}

/// The SQL name of a type that parameters can have.
fn sql_type(kind: &Type) -> Result<&'static str, Failure> {
    Ok(match *kind {
        Type::BOOL => "BOOLEAN",
        Type::INT2 => "SMALLINT",
        Type::INT4 | Type::OID | Type::REGCLASS | Type::REGTYPE | Type::REGPROC => "INT",
        Type::REGNAMESPACE => "INT",
        Type::INT8 => "BIGINT",
        Type::FLOAT4 => "REAL",
        Type::FLOAT8 | Type::NUMERIC => "DOUBLE",
        Type::DATE => "DATE",
        Type::TEXT
        | Type::VARCHAR
        | Type::BPCHAR
        | Type::NAME
        | Type::CHAR
        | Type::UNKNOWN
        | Type::JSON
        | Type::UUID => "VARCHAR",
        _ => {
            return Err(Failure::unsupported(format!(
                "a parameter of type {}",
                kind.name()
            )));
        }
    })
}

/// The engine's name of a time type, for `arrow_cast`.
fn time_type(kind: &Type) -> Option<&'static str> {
    match *kind {
        Type::TIMESTAMPTZ => Some("Timestamp(Microsecond, Some(\"UTC\"))"),
        Type::TIMESTAMP => Some("Timestamp(Microsecond, None)"),
        _ => None,
    }
}

/// Parses a template of ours and puts a text in the place of its only string `''`.
fn filled(template: &str, text: Option<String>) -> Result<Expr, Failure> {
    let parsed = Parser::new(&GenericDialect {})
        .try_with_sql(template)
        .and_then(|mut parser| parser.parse_expr());
    let mut expression =
        parsed.map_err(|error| Failure::error("XX000", format!("{template}: {error}")))?;
    if let Some(text) = text {
        let _ = datafusion::sql::sqlparser::ast::visit_expressions_mut(&mut expression, |inner| {
            if let Expr::Value(value) = inner
                && value.value == Value::SingleQuotedString(String::new())
            {
                value.value = Value::SingleQuotedString(text.clone());
                return std::ops::ControlFlow::Break(());
            }
            std::ops::ControlFlow::Continue(())
        });
    }
    Ok(expression)
}

fn typed(kind: &Type, text: String) -> Result<Expr, Failure> {
    if let Some(name) = time_type(kind) {
        return filled(&format!("arrow_cast('', '{name}')"), Some(text));
    }
    match *kind {
        // Understood from where it stands.
        Type::UNKNOWN => filled("''", Some(text)),
        Type::INTERVAL => filled("INTERVAL ''", Some(text)),
        // Whole numbers keep all their digits.
        Type::NUMERIC if text.parse::<i64>().is_ok() => filled("CAST('' AS BIGINT)", Some(text)),
        _ => filled(&format!("CAST('' AS {})", sql_type(kind)?), Some(text)),
    }
}

fn null(kind: &Type) -> Result<Expr, Failure> {
    if let Some(name) = time_type(kind) {
        return filled(&format!("arrow_cast(NULL, '{name}')"), None);
    }
    if let Some(element) = element_of(kind) {
        let name = sql_type(&element)?;
        return filled(&format!("CAST(NULL AS {name}[])"), None);
    }
    match *kind {
        Type::UNKNOWN => filled("NULL", None),
        Type::INTERVAL => filled("CAST(NULL AS INTERVAL)", None),
        _ => filled(&format!("CAST(NULL AS {})", sql_type(kind)?), None),
    }
}

fn array(element: &Type, values: &[Option<String>]) -> Result<Expr, Failure> {
    let mut list = filled("make_array(1)", None)?;
    let name = sql_type(element)?;
    if values.is_empty() {
        return filled(&format!("CAST(make_array() AS {name}[])"), None);
    }
    if let Expr::Function(function) = &mut list
        && let datafusion::sql::sqlparser::ast::FunctionArguments::List(arguments) =
            &mut function.args
    {
        arguments.args.clear();
        for value in values {
            let value = match value {
                Some(text) => typed(element, text.clone())?,
                None => null(element)?,
            };
            arguments
                .args
                .push(datafusion::sql::sqlparser::ast::FunctionArg::Unnamed(
                    value.into(),
                ));
        }
    }
    Ok(list)
}

fn element_of(kind: &Type) -> Option<Type> {
    Some(match *kind {
        Type::BOOL_ARRAY => Type::BOOL,
        Type::INT2_ARRAY => Type::INT2,
        Type::INT4_ARRAY => Type::INT4,
        Type::INT8_ARRAY => Type::INT8,
        Type::FLOAT4_ARRAY => Type::FLOAT4,
        Type::FLOAT8_ARRAY => Type::FLOAT8,
        Type::TEXT_ARRAY | Type::VARCHAR_ARRAY | Type::BPCHAR_ARRAY => Type::TEXT,
        Type::NAME_ARRAY => Type::TEXT,
        Type::OID_ARRAY => Type::OID,
        _ => return None,
    })
}

/// The text of a value in binary format.
fn from_binary(kind: &Type, mut value: Bytes) -> Result<String, Failure> {
    let length = value.len();
    let fixed = |expected: usize| match length == expected {
        true => Ok(()),
        false => Err(wrong(kind)),
    };
    Ok(match *kind {
        Type::BOOL => {
            fixed(1)?;
            (value.get_u8() != 0).to_string()
        }
        Type::INT2 => {
            fixed(2)?;
            value.get_i16().to_string()
        }
        Type::INT4 => {
            fixed(4)?;
            value.get_i32().to_string()
        }
        Type::OID | Type::REGCLASS | Type::REGTYPE | Type::REGPROC | Type::REGNAMESPACE => {
            fixed(4)?;
            value.get_u32().to_string()
        }
        Type::INT8 => {
            fixed(8)?;
            value.get_i64().to_string()
        }
        Type::FLOAT4 => {
            fixed(4)?;
            value.get_f32().to_string()
        }
        Type::FLOAT8 => {
            fixed(8)?;
            value.get_f64().to_string()
        }
        Type::NUMERIC => numeric(value).ok_or_else(|| wrong(kind))?,
        Type::DATE => {
            fixed(4)?;
            let days = value
                .get_i32()
                .checked_add(EPOCH_DAYS)
                .and_then(|days| chrono::DateTime::from_timestamp(i64::from(days) * 86_400, 0));
            let day = days.ok_or_else(|| out_of_range(kind))?;
            day.format("%Y-%m-%d").to_string()
        }
        Type::TIMESTAMP | Type::TIMESTAMPTZ => {
            fixed(8)?;
            let time = value
                .get_i64()
                .checked_add(EPOCH_US)
                .and_then(chrono::DateTime::from_timestamp_micros)
                .ok_or_else(|| out_of_range(kind))?;
            let zone = if *kind == Type::TIMESTAMPTZ { "Z" } else { "" };
            format!("{}{zone}", time.format("%Y-%m-%dT%H:%M:%S%.6f"))
        }
        Type::UUID => {
            fixed(16)?;
            let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
            let parts = [
                &hex[..8],
                &hex[8..12],
                &hex[12..16],
                &hex[16..20],
                &hex[20..],
            ];
            parts.join("-")
        }
        _ => {
            sql_type(kind)?;
            text(&value)?.to_string()
        }
    })
}

fn out_of_range(kind: &Type) -> Failure {
    Failure::error("22008", format!("{} out of range", kind.name()))
}

/// Digits in groups of four, with the position of the first group, sign and digits to show.
fn numeric(mut value: Bytes) -> Option<String> {
    if value.len() < 8 {
        return None;
    }
    let count = usize::try_from(value.get_i16()).ok()?;
    let weight = i32::from(value.get_i16());
    let sign = value.get_u16();
    let scale = usize::from(value.get_u16());
    if sign == 0xC000 {
        return Some("NaN".to_string());
    }
    if value.len() != 2 * count || !(-2500..=2500).contains(&weight) || scale > 16_383 {
        return None;
    }
    let groups: Vec<u16> = (0..count).map(|_| value.get_u16()).collect();
    if groups.iter().any(|group| *group > 9999) {
        return None;
    }
    let group = |at: i32| {
        let found = usize::try_from(at).ok().and_then(|at| groups.get(at));
        found.copied().unwrap_or(0)
    };
    let mut text = String::new();
    if sign == 0x4000 {
        text.push('-');
    }
    let whole: String = (0..=weight).map(|at| format!("{:04}", group(at))).collect();
    let whole = whole.trim_start_matches('0');
    text.push_str(if whole.is_empty() { "0" } else { whole });
    let mut fraction = String::new();
    let mut at = weight + 1;
    while fraction.len() < scale {
        fraction.push_str(&format!("{:04}", group(at)));
        at += 1;
    }
    fraction.truncate(scale);
    if !fraction.is_empty() {
        text.push('.');
        text.push_str(&fraction);
    }
    Some(text)
}

/// One dimension: flags, type, length and lower bound; then a length and bytes each.
fn binary_array(mut value: Bytes, element: &Type) -> Result<Vec<Option<String>>, Failure> {
    if value.len() < 12 {
        return Err(wrong(element));
    }
    let dimensions = value.get_i32();
    value.advance(8);
    if dimensions == 0 {
        return Ok(Vec::new());
    }
    if dimensions != 1 {
        return Err(Failure::unsupported("an array of several dimensions"));
    }
    if value.len() < 8 {
        return Err(wrong(element));
    }
    let count = usize::try_from(value.get_i32()).map_err(|_| wrong(element))?;
    value.advance(4);
    let mut elements = Vec::new();
    for _ in 0..count {
        if value.len() < 4 {
            return Err(wrong(element));
        }
        match usize::try_from(value.get_i32()) {
            Err(_) => elements.push(None),
            Ok(length) if length <= value.len() => {
                elements.push(Some(from_binary(element, value.split_to(length))?));
            }
            Ok(_) => return Err(wrong(element)),
        }
    }
    Ok(elements)
}

/// `{a,"b c",NULL}`.
fn text_array(text: &str, element: &Type) -> Result<Vec<Option<String>>, Failure> {
    let malformed = || Failure::error("22P02", format!("malformed array literal: \"{text}\""));
    let inner = text
        .trim()
        .strip_prefix('{')
        .and_then(|text| text.strip_suffix('}'))
        .ok_or_else(malformed)?;
    let mut elements = Vec::new();
    let mut current = String::new();
    let mut quoted = false;
    let mut was_quoted = false;
    let mut characters = inner.chars();
    let mut finish = |current: &mut String, was_quoted: &mut bool| {
        let text = std::mem::take(current);
        let is_null = !*was_quoted && text.trim().eq_ignore_ascii_case("null");
        elements.push((!is_null).then(|| match *was_quoted {
            true => text,
            false => text.trim().to_string(),
        }));
        *was_quoted = false;
    };
    if inner.trim().is_empty() {
        return Ok(Vec::new());
    }
    while let Some(character) = characters.next() {
        match character {
            '\\' => current.push(characters.next().ok_or_else(malformed)?),
            '"' => {
                quoted = !quoted;
                was_quoted = true;
            }
            // Space around an element is none of it.
            space if space.is_whitespace() && !quoted && (current.is_empty() || was_quoted) => {}
            ',' if !quoted => finish(&mut current, &mut was_quoted),
            '{' | '}' if !quoted => {
                return Err(Failure::unsupported(format!(
                    "an array of several dimensions of {}",
                    element.name()
                )));
            }
            other => current.push(other),
        }
    }
    if quoted {
        return Err(malformed());
    }
    finish(&mut current, &mut was_quoted);
    Ok(elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binary(kind: Type, value: &[u8]) -> Result<String, String> {
        let bound = Bound {
            kind,
            binary: true,
            value: Some(Bytes::copy_from_slice(value)),
        };
        bound
            .literal()
            .map(|literal| literal.to_string())
            .map_err(|error| error.code.to_string())
    }

    fn written(kind: Type, value: &str) -> Result<String, String> {
        let bound = Bound {
            kind,
            binary: false,
            value: Some(Bytes::copy_from_slice(value.as_bytes())),
        };
        bound
            .literal()
            .map(|literal| literal.to_string())
            .map_err(|error| error.code.to_string())
    }

    #[test]
    fn binary_values_are_read_as_postgresql_sends_them() {
        // Bytes by hand, from what int8send, timestamptz_send, date_send and numeric_send write.
        let big = binary(Type::INT8, &[0x80, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert_eq!(big, "CAST('-9223372036854775808' AS BIGINT)");
        // 2026-11-29 13:05:00+00 is 1795957500 s after 1970: 849272700 s after 2000.
        let time = binary(Type::TIMESTAMPTZ, &849_272_700_000_001i64.to_be_bytes()).unwrap();
        assert!(time.contains("'2026-11-29T13:05:00.000001Z'"), "{time}");
        let day = binary(Type::DATE, &9829i32.to_be_bytes()).unwrap();
        assert_eq!(day, "CAST('2026-11-29' AS DATE)");
        // 12345.6700: two groups before the point, one after it, scale 4.
        let number = [0, 3, 0, 1, 0, 0, 0, 4, 0, 1, 0x09, 0x29, 0x1a, 0x2c];
        let number = binary(Type::NUMERIC, &number).unwrap();
        assert_eq!(number, "CAST('12345.6700' AS DOUBLE)");
        // -0.0005 has its first group after the point.
        let number = [0, 1, 0xff, 0xff, 0x40, 0, 0, 4, 0, 5];
        let number = binary(Type::NUMERIC, &number).unwrap();
        assert_eq!(number, "CAST('-0.0005' AS DOUBLE)");
        assert_eq!(binary(Type::INT8, &[1]), Err("22P03".into()));
        assert_eq!(binary(Type::POINT, &[1]), Err("0A000".into()));
        assert_eq!(binary(Type::TEXT, &[0xff]), Err("22021".into()));
    }

    #[test]
    fn arrays_are_read_in_both_formats() {
        let bytes = [
            0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 20, 0, 0, 0, 2, 0, 0, 0, 1, // header
            0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff,
        ];
        assert_eq!(
            binary(Type::INT8_ARRAY, &bytes).unwrap(),
            "make_array(CAST('7' AS BIGINT), CAST(NULL AS BIGINT))"
        );
        assert_eq!(
            written(Type::TEXT_ARRAY, r#"{a, "b,\"c", NULL,"null"}"#).unwrap(),
            r#"make_array(CAST('a' AS VARCHAR), CAST('b,"c' AS VARCHAR), CAST(NULL AS VARCHAR), CAST('null' AS VARCHAR))"#
        );
        assert_eq!(written(Type::TEXT_ARRAY, "{\"a}"), Err("22P02".into()));
        assert_eq!(binary(Type::INT8_ARRAY, &bytes[..30]), Err("22P03".into()));
    }

    #[test]
    fn a_value_stays_a_value() {
        let nasty = r"\'; DROP TABLE stacks; --";
        let bound = Bound {
            kind: Type::TEXT,
            binary: false,
            value: Some(Bytes::copy_from_slice(nasty.as_bytes())),
        };
        let Expr::Cast { expr, .. } = bound.literal().unwrap() else {
            panic!("not a cast");
        };
        let Expr::Value(value) = *expr else {
            panic!("not a value");
        };
        assert_eq!(value.value, Value::SingleQuotedString(nasty.to_string()));
    }
}
