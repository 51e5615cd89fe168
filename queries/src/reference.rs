//! The SQL reference (`docs/sql-reference.md`), made from the tables' columns and the views'
//! headers, so that it cannot say something else than the prompt's `\d`.

use std::fmt::Write;

use arrow::datatypes::{DataType, Field};
use vramscope_wire::Table;

use crate::{functions, views};

const INTRODUCTION: &str = "\
# SQL reference

<!-- Made by `vramscope reference`. Do not edit: change the headers of queries/sql/*.sql or the
column texts of collector/wire/src/schema/, then run
`UPDATE_DOCS=1 cargo test -p vramscope-queries`. -->

Tables and views of a data folder, the same in a trace, in a lake and through a collector.
Column names, units and meanings are stable: they are only added to.

- Bytes are bytes, ratios are 0..1, `ts` columns are microseconds UTC, `ts_ns` nanoseconds
  since 1970.
- NULL means that a value is not known. It is never 0.
- Bytes of different classes (`byte_class`: physical, host, virtual, sub_allocated, ipc) are never
  added up, nor are reserved and mapped addresses.
- Views read the raw tables or the windows, as each one's *Reads* line says. They take no
  parameters: narrow them with WHERE.
- A lake has two more columns at the end of every table but `stacks`: `date` and `hour` of `ts`,
  by which its files are laid out.
";

/// The whole reference as Markdown. The error is a header that does not parse.
pub fn markdown() -> Result<String, String> {
    let mut text = INTRODUCTION.to_string();
    write_views(&mut text)?;
    write_functions(&mut text);
    write_tables(&mut text);
    Ok(text)
}

fn write_views(out: &mut String) -> Result<(), String> {
    out.push_str("\n## Views\n\n| view | answers |\n|---|---|\n");
    for view in views::ALL {
        let purpose = view.header()?.purpose;
        line(out, &format!("| [`{0}`](#{0}) | {purpose} |", view.name));
    }
    for view in views::ALL {
        let header = view.header()?;
        line(out, &format!("\n### {}\n", view.name));
        line(out, &format!("{}.\n", capitalised(&header.purpose)));
        line(
            out,
            &format!(
                "Reads: {}. Parameters: {}.\n",
                header.reads, header.parameters
            ),
        );
        line(out, "| column | unit | meaning |\n|---|---|---|");
        for column in &header.columns {
            line(
                out,
                &format!(
                    "| `{}` | {} | {} |",
                    column.name,
                    cell(&column.unit),
                    cell(&column.meaning)
                ),
            );
        }
        if !header.formulas.is_empty() {
            out.push('\n');
        }
        for formula in &header.formulas {
            line(out, &format!("- {formula}"));
        }
    }
    Ok(())
}

fn write_functions(out: &mut String) {
    out.push_str("\n## Functions\n\nBeside [DataFusion's own](https://datafusion.apache.org/user-guide/sql/index.html):\n\n");
    line(
        out,
        "| function | returns | what | for example |\n|---|---|---|---|",
    );
    for function in functions::ALL {
        let kind = if function.aggregate {
            ", aggregate"
        } else {
            ""
        };
        line(
            out,
            &format!(
                "| `{}` | {}{kind} | {} | `{}` |",
                function.call,
                function.returns,
                cell(function.meaning),
                cell(function.example)
            ),
        );
    }
}

fn write_tables(out: &mut String) {
    out.push_str("\n## Tables\n\n| table | a row is |\n|---|---|\n");
    for table in Table::ALL {
        line(
            out,
            &format!("| [`{0}`](#{0}) | {1} |", table.name(), table.doc()),
        );
    }
    for table in Table::ALL {
        line(out, &format!("\n### {}\n", table.name()));
        line(out, &format!("A row is {}.\n", table.doc()));
        line(out, "| column | type | meaning |\n|---|---|---|");
        for column in table.columns() {
            let nullable = if column.field.is_nullable() {
                ""
            } else {
                " NOT NULL"
            };
            let sql = type_name(column.field.data_type());
            line(
                out,
                &format!(
                    "| `{}` | {sql}{nullable} | {} |",
                    column.field.name(),
                    cell(column.doc)
                ),
            );
        }
    }
}

/// The SQL name of a column's type.
pub fn type_name(data_type: &DataType) -> String {
    match data_type {
        DataType::Boolean => "BOOLEAN".to_string(),
        DataType::Int32 => "INTEGER".to_string(),
        DataType::Int64 => "BIGINT".to_string(),
        DataType::Float64 => "DOUBLE".to_string(),
        DataType::Utf8 | DataType::Utf8View | DataType::LargeUtf8 => "VARCHAR".to_string(),
        DataType::Date32 => "DATE".to_string(),
        DataType::Timestamp(_, _) => "TIMESTAMP".to_string(),
        DataType::List(element) => format!("{}[]", type_name(element.data_type())),
        DataType::Struct(fields) => {
            let inner: Vec<String> = fields.iter().map(|f| struct_member(f)).collect();
            format!("STRUCT({})", inner.join(", "))
        }
        DataType::Dictionary(_, value) => type_name(value),
        other => other.to_string(),
    }
}

fn struct_member(field: &Field) -> String {
    format!("{} {}", field.name(), type_name(field.data_type()))
}

fn line(out: &mut String, text: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{text}");
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars).collect(),
        None => String::new(),
    }
}
