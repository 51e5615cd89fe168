//! The views of `sql/*.sql`: their text, their documentation, their registration.
//!
//! A file is one SELECT under a header of comment lines:
//!
//! ```text
//! -- purpose: what it answers, in one line
//! -- reads: alloc_events (raw), processes
//! -- parameters: none
//! -- columns:
//! --   name | unit | meaning
//! -- formulas:
//! --   where a formula comes from, or what has to be known to read the numbers
//! ```
//!
//! `parameters` is `none` for every view: they are narrowed by WHERE. A header that does not
//! parse, and a header whose columns are not the view's, fail the tests.

mod lazy;

pub use lazy::register;

/// A view as it lies in `sql/`.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// Its name in SQL.
    pub name: &'static str,
    /// The whole file: header and SELECT.
    pub sql: &'static str,
}

macro_rules! views {
    ($($name:literal),* $(,)?) => {
        &[$(View { name: $name, sql: include_str!(concat!("../sql/", $name, ".sql")) }),*]
    };
}

/// Every view, in an order in which each reads only tables and views before it.
pub const ALL: &[View] = views![
    "current_processes",
    "framework_processes",
    "call_chains",
    "process_totals",
    "live_allocations",
    "top_stacks",
    "memory_map",
    "stranded_by_segment",
    "fragmentation",
    "fragmentation_now",
    "allocator_timeline",
    "oom_events",
    "kv_pool_conservation",
    "tetrahedron",
    "pools",
    "address_space",
    "numa_placement",
    "coverage",
    "reconciliation",
    "stack_history",
    "device_history",
    "losses",
    "answer_quality",
    "leak_by_stack",
    "leak_rate",
    "leak_by_function",
    "quiesce_points",
    "peak_recovery",
];

/// What a view's header says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Header {
    /// What the view answers.
    pub purpose: String,
    /// Tables and views it reads, with `raw` or `windows`.
    pub reads: String,
    /// Parameters; `none` for all so far.
    pub parameters: String,
    /// Columns in order.
    pub columns: Vec<ColumnDoc>,
    /// Where formulas come from and how the numbers are to be read, a paragraph each.
    pub formulas: Vec<String>,
}

/// One column of a view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnDoc {
    /// Its name.
    pub name: String,
    /// Its unit; `-` if it has none.
    pub unit: String,
    /// Its meaning.
    pub meaning: String,
}

impl View {
    /// The view of that name, if there is one.
    pub fn by_name(name: &str) -> Option<&'static View> {
        ALL.iter().find(|view| view.name == name)
    }

    /// The parsed header. The error says what does not fit, with its line.
    pub fn header(&self) -> Result<Header, String> {
        parse_header(self.sql).map_err(|problem| format!("sql/{}.sql: {problem}", self.name))
    }
}

fn parse_header(sql: &str) -> Result<Header, String> {
    #[derive(PartialEq)]
    enum Section {
        Start,
        Columns,
        Formulas,
    }
    let mut header = Header::default();
    let mut section = Section::Start;
    for (index, line) in sql.lines().enumerate() {
        let Some(text) = line.strip_prefix("-- ") else {
            break;
        };
        let wrong = |what: &str| format!("line {}: {what}", index + 1);
        if let Some(entry) = text.strip_prefix("  ") {
            match section {
                Section::Columns => header.columns.push(
                    parse_column(entry).ok_or_else(|| wrong("expected `name | unit | meaning`"))?,
                ),
                Section::Formulas => header.formulas.push(entry.trim().to_string()),
                Section::Start => {
                    return Err(wrong("an indented line outside columns and formulas"));
                }
            }
            continue;
        }
        let (key, value) = text
            .split_once(':')
            .ok_or_else(|| wrong("expected `key: value`"))?;
        let value = value.trim().to_string();
        match key {
            "purpose" => header.purpose = value,
            "reads" => header.reads = value,
            "parameters" => header.parameters = value,
            "columns" => section = Section::Columns,
            "formulas" => section = Section::Formulas,
            _ => return Err(wrong("unknown key")),
        }
    }
    let complete = !header.purpose.is_empty()
        && !header.reads.is_empty()
        && !header.parameters.is_empty()
        && !header.columns.is_empty();
    if complete {
        Ok(header)
    } else {
        Err("purpose, reads, parameters or columns are missing".to_string())
    }
}

fn parse_column(entry: &str) -> Option<ColumnDoc> {
    let mut parts = entry.splitn(3, '|').map(|part| part.trim().to_string());
    let column = ColumnDoc {
        name: parts.next()?,
        unit: parts.next()?,
        meaning: parts.next()?,
    };
    let filled = !column.name.is_empty() && !column.unit.is_empty() && !column.meaning.is_empty();
    filled.then_some(column)
}
