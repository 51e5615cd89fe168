//! What can go wrong between a question and its answer. A variant exists where a caller
//! branches on it; each text names the file or value and the way out. A text already says what
//! is behind it, so none of them has a `source`: printed with its chain it would say it twice.

use std::path::PathBuf;
use std::time::Duration;

use datafusion::error::DataFusionError;
use datafusion::sql::sqlparser::parser::ParserError;

/// Why a folder cannot be opened or a question cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder is not there.
    #[error(
        "data folder {0:?} does not exist; give the folder of a collector or of `vramscope-agent trace -o`"
    )]
    NoFolder(PathBuf),
    /// The path is a file.
    #[error("{0:?} is not a folder; give the folder that holds the tables, not one of its files")]
    NotAFolder(PathBuf),
    /// The folder holds neither a lake nor a trace.
    #[error(
        "no tables in {folder:?}; expected folders such as {folder:?}/alloc_events with a Delta log or Parquet files"
    )]
    NoTables {
        /// The folder that was given.
        folder: PathBuf,
    },
    /// The folder cannot be listed or a file cannot be read.
    #[error("failed to read {path:?}: {cause}")]
    Io {
        /// The folder or file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// Files of a trace that cannot be read.
    #[error("{}", damaged_text(.0))]
    Damaged(Vec<DamagedFile>),
    /// A path under which the Delta library panics or loses its way.
    #[error(
        "{path:?} cannot hold Delta tables: its path has a {character:?}; rename it, or link to it under another name"
    )]
    PathCharacter {
        /// The table's folder.
        path: PathBuf,
        /// The first offending character.
        character: char,
    },
    /// A Delta table that cannot be opened.
    #[error("failed to open table {path:?}: {cause}")]
    Table {
        /// The table's folder.
        path: PathBuf,
        /// What the Delta library said.
        cause: Box<deltalake::DeltaTableError>,
    },
    /// A Delta table whose columns are not those of the data model.
    #[error(
        "table {path:?} does not fit: {detail}; it was written by another version or another program"
    )]
    TableColumns {
        /// The table's folder.
        path: PathBuf,
        /// The first difference.
        detail: String,
    },
    /// A place on an object store that cannot be used.
    #[error("failed to use {place}: {detail}")]
    Store {
        /// Its URL, without anything secret.
        place: String,
        /// What went wrong.
        detail: String,
    },
    /// Workers that cannot be used, or a question that they cannot take.
    #[error("{0}")]
    Workers(String),
    /// A statement that would change something.
    #[error("{0} is not allowed: only queries are (SELECT, WITH, SHOW, DESCRIBE, EXPLAIN)")]
    NotAQuery(String),
    /// Several statements where one is expected.
    #[error("expected one statement, found {0}")]
    StatementCount(usize),
    /// The query ran too long.
    #[error("the query was stopped after {} s; narrow it (for example by ts) or raise the time limit", .0.as_secs_f64())]
    TimedOut(Duration),
    /// The query was cancelled by whoever asked, or by an administrator.
    #[error("the query was cancelled")]
    Cancelled,
    /// There is no room for the query now.
    #[error("too busy: {0}; come back later")]
    Busy(String),
    /// The caller may not do this.
    #[error("{0}")]
    Forbidden(String),
    /// A statement that is too long to look at.
    #[error("the statement has {bytes} bytes, more than {limit}")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// A statement of more links than a stack can take.
    #[error(
        "the statement is a chain of {links} links, more than {limit} (an operator is one, a SELECT, JOIN or UNION is ten); write a list as IN (…) or VALUES, and ask in several statements"
    )]
    TooDeep {
        /// Its links.
        links: usize,
        /// The limit.
        limit: usize,
    },
    /// A statement that becomes too large when what it uses several times is written out.
    #[error(
        "the statement uses its own steps so often that, written out, it has more than {limit} {what}; use each step and column fewer times, or ask in several statements"
    )]
    TooLarge {
        /// Of what it has too many.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The answer is longer than allowed.
    #[error("the answer has more than {0} rows; add a LIMIT or raise the row limit")]
    TooManyRows(usize),
    /// A collector that cannot be reached, or what it answered instead of rows.
    #[error("{detail} (collector {url})")]
    Collector {
        /// The collector's URL.
        url: String,
        /// What went wrong, in the collector's words if it has any.
        detail: String,
    },
    /// The query is wrong, or failed while it ran.
    #[error("{}", query_text(.0))]
    Query(DataFusionError),
}

/// One file that cannot be read, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedFile {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

fn damaged_text(files: &[DamagedFile]) -> String {
    let mut text = String::new();
    for file in files {
        text.push_str(&format!("damaged file {:?}: {}\n", file.path, file.reason));
    }
    text + "restore or remove what is damaged, or go on without it (--skip-damaged)"
}

/// DataFusion's own text without its backtrace and prefixes that say nothing to people.
fn query_text(error: &DataFusionError) -> String {
    if let Some(limit) = limit_behind(error) {
        return limit.to_string();
    }
    let text = match error.find_root() {
        DataFusionError::ResourcesExhausted(detail) => {
            format!(
                "out of memory for queries: {detail}; narrow the query or raise the memory limit"
            )
        }
        DataFusionError::Plan(text) => text.clone(),
        DataFusionError::SQL(error, _) => match error.as_ref() {
            ParserError::ParserError(text) | ParserError::TokenizerError(text) => text.clone(),
            ParserError::RecursionLimitExceeded => "the statement is nested too deeply".to_string(),
        },
        DataFusionError::ArrowError(error, _) => error.to_string(),
        root => root.to_string(),
    };
    let text = text
        .split(DataFusionError::BACK_TRACE_SEP)
        .next()
        .unwrap_or_default();
    // With a near name at hand, the list of every column of the view only hides it.
    let text = match text.split_once("\nValid fields are") {
        Some((suggestion, _)) if suggestion.contains("Did you mean") => suggestion,
        _ => text,
    };
    text.trim_start_matches("Schema error: ")
        .replace("datafusion.public.", "")
}

/// A limit of ours that travelled through DataFusion as an external error.
fn limit_behind(error: &DataFusionError) -> Option<&Error> {
    match error.find_root() {
        DataFusionError::External(inner) => inner.downcast_ref::<Error>(),
        _ => None,
    }
}

impl Error {
    /// Whether damaged files may be behind a failed query: it failed while reading.
    pub fn may_be_damage(&self) -> bool {
        let Error::Query(error) = self else {
            return false;
        };
        matches!(
            error.find_root(),
            DataFusionError::ParquetError(_)
                | DataFusionError::ArrowError(_, _)
                | DataFusionError::IoError(_)
                | DataFusionError::ObjectStore(_)
                | DataFusionError::External(_)
        )
    }

    /// The error of ours that this one is, also if it travelled through the engine.
    pub fn own(&self) -> &Error {
        match self {
            Error::Query(error) => limit_behind(error).unwrap_or(self),
            own => own,
        }
    }

    /// Whether the answer was cut because it had too many rows.
    pub fn is_too_many_rows(&self) -> bool {
        match self {
            Error::TooManyRows(_) => true,
            Error::Query(error) => matches!(limit_behind(error), Some(Error::TooManyRows(_))),
            _ => false,
        }
    }
}

impl From<DataFusionError> for Error {
    /// An error of ours that passed through DataFusion comes out as itself.
    fn from(error: DataFusionError) -> Self {
        match error {
            DataFusionError::External(inner) => match inner.downcast::<Error>() {
                Ok(own) => *own,
                Err(other) => Error::Query(DataFusionError::External(other)),
            },
            other => Error::Query(other),
        }
    }
}

impl From<Error> for DataFusionError {
    fn from(error: Error) -> Self {
        match error {
            Error::Query(inner) => inner,
            other => DataFusionError::External(Box::new(other)),
        }
    }
}
