//! What the prompt's `\d` and `vramscope views` print: tables and views with their columns,
//! types and meanings. Compiled in, so that it is the same against a folder and a collector.

use arrow::datatypes::SchemaRef;
use datafusion::prelude::SessionContext;
use vramscope_wire::Table;

use crate::functions::{self, Function};
use crate::session::{self, Options};
use crate::views::{self, View};
use crate::{Error, reference, trace};

/// A session with every table, without rows, and every view.
pub async fn empty_session() -> Result<SessionContext, Error> {
    let session = session::session(&Options::default())?;
    for table in Table::ALL {
        session.register_table(table.name(), trace::empty(table)?)?;
    }
    views::register(&session).await?;
    Ok(session)
}

/// Names, columns and texts of everything there is.
pub struct Catalog {
    session: SessionContext,
}

impl Catalog {
    /// Plans nothing yet.
    pub async fn load() -> Result<Catalog, Error> {
        let session = empty_session().await?;
        Ok(Catalog { session })
    }

    /// Names of views and tables.
    pub fn names(&self) -> Vec<&'static str> {
        let views = views::ALL.iter().map(|view| view.name);
        views
            .chain(Table::ALL.iter().map(|table| table.name()))
            .collect()
    }

    /// Names of all columns, each once: those of views as their headers have them.
    pub fn column_names(&self) -> Vec<String> {
        let of_views = views::ALL.iter().flat_map(|view| {
            // A header that does not parse fails the tests of this crate.
            let header = view.header().unwrap_or_default();
            header.columns.into_iter().map(|column| column.name)
        });
        let of_tables = Table::ALL.into_iter().flat_map(|table| {
            let schema = table.schema();
            let names: Vec<String> = schema.fields().iter().map(|f| f.name().clone()).collect();
            names
        });
        let mut names: Vec<String> = of_views.chain(of_tables).collect();
        names.sort();
        names.dedup();
        names
    }

    /// One line per view, table and function.
    pub fn list(&self) -> String {
        let mut rows = vec![[
            "name".to_string(),
            "kind".to_string(),
            "what it is".to_string(),
        ]];
        for view in views::ALL {
            let purpose = view
                .header()
                .map(|header| header.purpose)
                .unwrap_or_default();
            rows.push([view.name.to_string(), "view".to_string(), purpose]);
        }
        for table in Table::ALL {
            rows.push([
                table.name().to_string(),
                "table".to_string(),
                table.doc().to_string(),
            ]);
        }
        for function in functions::ALL {
            rows.push([
                function.name.to_string(),
                "function".to_string(),
                function.meaning.to_string(),
            ]);
        }
        aligned(&rows)
    }

    /// Columns and texts of one view, table or function; `None` if there is none of that name.
    pub async fn describe(&self, name: &str) -> Result<Option<String>, Error> {
        let name = name.to_ascii_lowercase();
        if let Some(view) = View::by_name(&name) {
            let provider = self.session.table_provider(view.name).await?;
            return Ok(Some(describe_view(view, &provider.schema())));
        }
        let function = functions::ALL.iter().find(|function| function.name == name);
        Ok(function
            .map(describe_function)
            .or_else(|| Table::by_name(&name).map(describe_table)))
    }
}

fn describe_view(view: &View, schema: &SchemaRef) -> String {
    // A header that does not parse fails the tests of this crate.
    let header = view.header().unwrap_or_default();
    let mut rows = vec![["column", "type", "unit", "meaning"].map(str::to_string)];
    for column in &header.columns {
        let data_type = match schema.field_with_name(&column.name) {
            Ok(field) => reference::type_name(field.data_type()),
            Err(_) => String::new(),
        };
        rows.push([
            column.name.clone(),
            data_type,
            column.unit.clone(),
            column.meaning.clone(),
        ]);
    }
    let mut text = format!(
        "view {}: {}\nreads: {}\n\n",
        view.name, header.purpose, header.reads
    );
    text.push_str(&aligned(&rows));
    for formula in &header.formulas {
        text.push_str(&format!("\n* {formula}"));
    }
    if !header.formulas.is_empty() {
        text.push('\n');
    }
    text
}

fn describe_function(function: &Function) -> String {
    let kind = if function.aggregate {
        "aggregate"
    } else {
        "function"
    };
    format!(
        "{kind} {} -> {}\n{}\n\nfor example: {}\n",
        function.call, function.returns, function.meaning, function.example
    )
}

fn describe_table(table: Table) -> String {
    let mut rows = vec![["column", "type", "meaning"].map(str::to_string)];
    for column in table.columns() {
        let data_type = reference::type_name(column.field.data_type());
        rows.push([
            column.field.name().clone(),
            data_type,
            column.doc.to_string(),
        ]);
    }
    format!(
        "table {}: a row is {}\n\n{}",
        table.name(),
        table.doc(),
        aligned(&rows)
    )
}

/// Columns padded to the widest cell but for the last one, which is free text.
fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            // A list of structs would push all other types far to the right.
            *width = (*width).max(cell.chars().count().min(28));
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (index, cell) in row.iter().enumerate() {
            let is_last = index == N - 1;
            let width = if is_last { 0 } else { widths[index] };
            line.push_str(&format!("{cell:<width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
