//! Rows as a table for people. Columns keep their SQL names; byte counts, ratios and times are
//! rounded for reading, so machines should take the JSON.

use serde_json::Value;

use crate::compare::Row;

/// Widest a cell may be before it is wrapped, in characters.
const WIDEST: usize = 64;

/// Draws rows with the given columns in order.
pub fn draw(columns: &[&str], rows: &[Row]) -> String {
    let cells: Vec<Vec<Vec<String>>> = rows
        .iter()
        .map(|row| {
            columns
                .iter()
                .map(|column| wrap(&cell(column, row.get(*column))))
                .collect()
        })
        .collect();
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(i, column)| {
            let lines = cells.iter().flat_map(|row| &row[i]);
            let widest = lines.map(|line| line.chars().count()).max();
            widest.unwrap_or(0).max(column.chars().count())
        })
        .collect();
    let right: Vec<bool> = columns
        .iter()
        .map(|column| {
            let mut values = rows.iter().filter_map(|row| row.get(*column));
            values.any(Value::is_number)
        })
        .collect();

    let mut text = String::new();
    let header: Vec<String> = columns.iter().map(|c| (*c).to_string()).collect();
    push_line(&mut text, &header, &widths, &right);
    let rule: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
    push_line(&mut text, &rule, &widths, &right);
    for row in &cells {
        let height = row.iter().map(Vec::len).max().unwrap_or(0);
        for line in 0..height {
            let parts: Vec<String> = row
                .iter()
                .map(|cell| cell.get(line).cloned().unwrap_or_default())
                .collect();
            push_line(&mut text, &parts, &widths, &right);
        }
    }
    if rows.is_empty() {
        text.push_str("  (no rows)\n");
    }
    text
}

fn push_line(text: &mut String, parts: &[String], widths: &[usize], right: &[bool]) {
    let mut line = String::from(" ");
    for ((part, width), right) in parts.iter().zip(widths).zip(right) {
        let pad = " ".repeat(width - part.chars().count());
        line.push(' ');
        if *right {
            line.push_str(&pad);
            line.push_str(part);
        } else {
            line.push_str(part);
            line.push_str(&pad);
        }
        line.push(' ');
    }
    text.push_str(line.trim_end());
    text.push('\n');
}

fn cell(column: &str, value: Option<&Value>) -> String {
    let Some(value) = value.filter(|value| !value.is_null()) else {
        return "NULL".to_string();
    };
    if let Some(number) = value.as_f64() {
        if column.ends_with("_bytes") || column == "bytes" {
            return bytes(number);
        }
        if column.ends_with("ratio") || column == "share" {
            return format!("{number:.3}");
        }
    }
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Bytes with a binary unit, three digits.
fn bytes(value: f64) -> String {
    let mut value = value;
    for unit in ["B", "KiB", "MiB"] {
        if value.abs() < 1024.0 {
            return format!("{} {unit}", three_digits(value));
        }
        value /= 1024.0;
    }
    format!("{} GiB", three_digits(value))
}

fn three_digits(value: f64) -> String {
    let whole = value.fract() == 0.0;
    if whole || value.abs() >= 100.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.1}")
    }
}

/// Cuts a long cell into lines, a folded stack at its `;`.
fn wrap(text: &str) -> Vec<String> {
    if text.chars().count() <= WIDEST {
        return vec![text.to_string()];
    }
    let mut lines = vec![String::new()];
    for part in text.split_inclusive([';', ' ']) {
        // There is always a last line.
        let last = lines.len() - 1;
        let fits = lines[last].chars().count() + part.chars().count() <= WIDEST;
        if fits || lines[last].is_empty() {
            lines[last].push_str(part);
        } else {
            lines.push(part.to_string());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_read_well_and_null_shows() {
        let row = |value: Value| serde_json::from_value::<Row>(value).unwrap();
        let rows = [
            row(json!({"pid": 12, "live_bytes": 0, "share": 0.5})),
            row(json!({"pid": 1234, "live_bytes": 3_221_225_472_u64, "share": null})),
        ];
        let expected = "   pid  live_bytes  share
  ────  ──────────  ─────
    12         0 B  0.500
  1234       3 GiB   NULL
";
        assert_eq!(draw(&["pid", "live_bytes", "share"], &rows), expected);
    }

    #[test]
    fn bytes_keep_three_digits() {
        assert_eq!(bytes(1536.0), "1.5 KiB");
        assert_eq!(bytes(1023.0), "1023 B");
        assert_eq!(bytes(268_435_456.0), "256 MiB");
        assert_eq!(bytes(8_589_934_592.0), "8 GiB");
    }

    #[test]
    fn stacks_wrap_between_frames() {
        let stack = ["a_rather_long_function_name"; 4].join(";");
        let lines = wrap(&stack);
        assert!(lines.len() > 1);
        assert!(lines.iter().all(|line| line.chars().count() <= WIDEST));
        assert_eq!(lines.concat(), stack);
    }
}
