//! What goes wrong, as clients are told: a severity, a SQLSTATE, a text.
//!
//! The codes are those of PostgreSQL's documentation, appendix "PostgreSQL Error Codes".

use arrow::error::ArrowError;
use datafusion::common::SchemaError;
use datafusion::error::DataFusionError;
use pgwire::error::{ErrorInfo, PgWireError};
use pgwire::messages::response::{ErrorResponse, NoticeResponse};
use vramscope_queries::Error;

use crate::query::failure::Class;

/// Text that is sent at most, in bytes. Clients take messages of 30,000.
const MAX_TEXT: usize = 8 << 10;

/// An error, or a notice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    severity: &'static str,
    /// SQLSTATE.
    pub code: &'static str,
    /// What happened.
    pub message: String,
    detail: Option<String>,
    hint: Option<String>,
}

impl Failure {
    /// A statement that failed.
    pub fn error(code: &'static str, message: impl Into<String>) -> Failure {
        Failure {
            severity: "ERROR",
            code,
            message: message.into(),
            detail: None,
            hint: None,
        }
    }

    /// The end of the connection.
    pub fn fatal(code: &'static str, message: impl Into<String>) -> Failure {
        Failure {
            severity: "FATAL",
            ..Failure::error(code, message)
        }
    }

    /// Something to know about an answer that is sent.
    pub fn notice(message: impl Into<String>) -> Failure {
        Failure {
            severity: "NOTICE",
            ..Failure::error("00000", message)
        }
    }

    /// Something that was asked for and has no effect.
    pub fn warning(code: &'static str, message: impl Into<String>) -> Failure {
        Failure {
            severity: "WARNING",
            ..Failure::error(code, message)
        }
    }

    /// With more about it.
    pub fn detail(mut self, detail: impl Into<String>) -> Failure {
        self.detail = Some(detail.into());
        self
    }

    /// With the way out.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// A statement that would change something.
    pub fn read_only(what: &str) -> Failure {
        Failure::error(
            "25006",
            format!("cannot execute {what} in a read-only transaction"),
        )
        .hint("only queries are answered here: SELECT, WITH, SHOW, DESCRIBE, EXPLAIN")
    }

    /// Something that PostgreSQL has and this does not.
    pub fn unsupported(what: impl std::fmt::Display) -> Failure {
        Failure::error("0A000", format!("{what} is not supported"))
    }

    fn info(self) -> ErrorInfo {
        let mut info = ErrorInfo::new(
            self.severity.to_string(),
            self.code.to_string(),
            cut(self.message),
        );
        info.severity_nonlocalized = Some(self.severity.to_string());
        info.detail = self.detail.map(cut);
        info.hint = self.hint.map(cut);
        info
    }
}

impl From<Failure> for ErrorResponse {
    fn from(failure: Failure) -> ErrorResponse {
        failure.info().into()
    }
}

impl From<Failure> for NoticeResponse {
    fn from(failure: Failure) -> NoticeResponse {
        failure.info().into()
    }
}

/// A text that fits, without zero bytes, which would end it early.
fn cut(text: String) -> String {
    let mut text = text.replace('\0', "");
    if text.len() > MAX_TEXT {
        let end = (0..=MAX_TEXT).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
    text
}

impl Failure {
    /// The failure that travelled through the engine, if it was one.
    pub fn within(error: &Error) -> Option<&Failure> {
        match error {
            Error::Query(error) => match error.find_root() {
                DataFusionError::External(inner) => inner.downcast_ref(),
                _ => None,
            },
            _ => None,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        if let Some(failure) = Failure::within(&error) {
            return failure.clone();
        }
        let text = error.to_string().replace("vramscope.public.", "");
        let class = Class::of(&error);
        match (class, error.own()) {
            (Class::Time, _) => {
                Failure::error("57014", "canceling statement due to statement timeout").detail(text)
            }
            (Class::Cancelled, _) => {
                Failure::error("57014", "canceling statement due to user request")
            }
            (_, Error::NotAQuery(what)) => Failure::read_only(what),
            (_, Error::Damaged(_)) => Failure::error("XX001", text),
            (Class::Semantics | Class::Value | Class::NoColumn, Error::Query(inner)) => {
                Failure::error(finer(inner.find_root()).unwrap_or(class.sqlstate()), text)
            }
            (Class::Internal, _) => {
                tracing::warn!("a query failed: {text}");
                Failure::error(class.sqlstate(), text)
            }
            _ => Failure::error(class.sqlstate(), text),
        }
    }
}

/// Codes that clients tell apart and other doors do not.
fn finer(error: &DataFusionError) -> Option<&'static str> {
    match error {
        DataFusionError::NotImplemented(_) => Some("0A000"),
        DataFusionError::SchemaError(error, _) => match error.as_ref() {
            SchemaError::AmbiguousReference { .. } => Some("42702"),
            SchemaError::DuplicateQualifiedField { .. }
            | SchemaError::DuplicateUnqualifiedField { .. } => Some("42701"),
            SchemaError::FieldNotFound { .. } => None,
        },
        DataFusionError::Plan(text) => of_plan(text),
        DataFusionError::ArrowError(error, _) => match error.as_ref() {
            ArrowError::DivideByZero => Some("22012"),
            ArrowError::ArithmeticOverflow(_) => Some("22003"),
            ArrowError::CastError(_) | ArrowError::ParseError(_) => Some("22P02"),
            _ => None,
        },
        _ => None,
    }
}

/// The engine has one kind of error for everything that is wrong with a statement's meaning.
fn of_plan(text: &str) -> Option<&'static str> {
    let text = text.to_ascii_lowercase();
    if text.contains("invalid function") || text.contains("no function matches") {
        Some("42883")
    } else if text.contains("group by") || text.contains("aggregate") {
        Some("42803")
    } else if text.contains("cannot coerce") || text.contains("failed to coerce") {
        Some("42804")
    } else {
        None
    }
}

impl From<PgWireError> for Failure {
    /// Values that cannot be written in the form that the client wants.
    fn from(error: PgWireError) -> Failure {
        let info = ErrorInfo::from(error);
        Failure::error("XX000", info.message)
    }
}
