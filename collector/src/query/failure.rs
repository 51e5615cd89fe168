//! What a failed question is called: one class for each way to fail, which every door translates
//! into its protocol's codes.

use arrow::error::ArrowError;
use datafusion::common::SchemaError;
use datafusion::error::DataFusionError;
use vramscope_queries::Error;

/// Whose move it is after a failure, and which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// The text is not SQL.
    Syntax,
    /// A table that is not there.
    NoTable,
    /// A column that is not there, or is there twice.
    NoColumn,
    /// SQL that does not fit the tables, or that the engine does not have.
    Semantics,
    /// A value that an operation cannot take: a division by zero, a text that is no number.
    Value,
    /// A statement that is no query.
    ReadOnly,
    /// The caller may not do this.
    Forbidden,
    /// The time was over.
    Time,
    /// It was cancelled.
    Cancelled,
    /// The answer has too many rows.
    Rows,
    /// It needs more memory, or more room to spill to, than there is for it.
    Memory,
    /// There is no room now.
    Busy,
    /// The collector's own fault, or its disk's.
    Internal,
}

impl Class {
    /// Which class an error is of.
    pub fn of(error: &Error) -> Class {
        match error.own() {
            Error::NotAQuery(_) => Class::ReadOnly,
            Error::StatementCount(_)
            | Error::TooLong { .. }
            | Error::TooDeep { .. }
            | Error::TooLarge { .. } => Class::Syntax,
            Error::TimedOut(_) => Class::Time,
            Error::Cancelled => Class::Cancelled,
            Error::Busy(_) => Class::Busy,
            Error::Forbidden(_) => Class::Forbidden,
            Error::TooManyRows(_) => Class::Rows,
            Error::Query(error) => of_engine(error.find_root()),
            _ => Class::Internal,
        }
    }

    /// In words that programs can compare: lower case, stable.
    pub fn name(self) -> &'static str {
        match self {
            Class::Syntax => "syntax",
            Class::NoTable => "no_table",
            Class::NoColumn => "no_column",
            Class::Semantics => "semantics",
            Class::Value => "value",
            Class::ReadOnly => "read_only",
            Class::Forbidden => "forbidden",
            Class::Time => "time_limit",
            Class::Cancelled => "cancelled",
            Class::Rows => "row_limit",
            Class::Memory => "memory_limit",
            Class::Busy => "busy",
            Class::Internal => "internal",
        }
    }

    /// The SQLSTATE of PostgreSQL 16 (its manual, appendix A) that comes nearest.
    pub fn sqlstate(self) -> &'static str {
        match self {
            Class::Syntax => "42601",
            Class::NoTable => "42P01",
            Class::NoColumn => "42703",
            Class::Semantics => "42000",
            Class::Value => "22000",
            Class::ReadOnly => "25006",
            Class::Forbidden => "42501",
            Class::Time | Class::Cancelled => "57014",
            Class::Rows => "54000",
            Class::Memory => "53200",
            Class::Busy => "53300",
            Class::Internal => "XX000",
        }
    }

    /// Whether it was turned away before anything ran.
    pub fn is_refusal(self) -> bool {
        matches!(self, Class::ReadOnly | Class::Forbidden | Class::Busy)
    }
}

fn of_engine(error: &DataFusionError) -> Class {
    match error {
        DataFusionError::SQL(..) => Class::Syntax,
        DataFusionError::SchemaError(error, _) => match error.as_ref() {
            SchemaError::FieldNotFound { .. } | SchemaError::AmbiguousReference { .. } => {
                Class::NoColumn
            }
            _ => Class::Semantics,
        },
        // The engine has no variant for it.
        DataFusionError::Plan(text) if text.contains("table '") && text.contains("not found") => {
            Class::NoTable
        }
        DataFusionError::Plan(_)
        | DataFusionError::NotImplemented(_)
        | DataFusionError::Configuration(_)
        | DataFusionError::Substrait(_) => Class::Semantics,
        DataFusionError::Execution(_) => Class::Value,
        DataFusionError::ArrowError(error, _) => match error.as_ref() {
            // What is spilled has its limit too, and the engine tells it as this.
            ArrowError::IoError(text, _) if text.contains("space during the spilling process") => {
                Class::Memory
            }
            ArrowError::IoError(..)
            | ArrowError::ExternalError(_)
            | ArrowError::IpcError(_)
            | ArrowError::MemoryError(_) => Class::Internal,
            _ => Class::Value,
        },
        DataFusionError::ResourcesExhausted(_) => Class::Memory,
        _ => Class::Internal,
    }
}

#[cfg(test)]
mod tests {
    use vramscope_queries::session::{self, Limits, Options};

    use super::*;

    async fn class_of(sql: &str) -> Class {
        let session = session::session(&Options::default()).unwrap();
        let rows = session::query(&session, sql, Limits::default()).await;
        let error = match rows {
            Err(error) => error,
            Ok(rows) => datafusion::physical_plan::common::collect(rows)
                .await
                .unwrap_err()
                .into(),
        };
        Class::of(&error)
    }

    #[tokio::test]
    async fn the_engines_errors_are_told_apart() {
        for (sql, class) in [
            ("SELEC 1", Class::Syntax),
            ("SELECT 1; SELECT 2", Class::Syntax),
            ("SELECT * FROM nonesuch", Class::NoTable),
            ("SELECT nonesuch FROM range(0, 3)", Class::NoColumn),
            ("SELECT nonesuch(1)", Class::Semantics),
            ("SELECT 1 / (value - 1) FROM range(0, 3)", Class::Value),
            (
                "SELECT CAST('x' || value AS INT) FROM range(0, 3)",
                Class::Value,
            ),
            ("DROP TABLE nonesuch", Class::ReadOnly),
            ("COPY (SELECT 1) TO '/tmp/x.csv'", Class::ReadOnly),
        ] {
            assert_eq!(class_of(sql).await, class, "{sql}");
        }
    }
}
