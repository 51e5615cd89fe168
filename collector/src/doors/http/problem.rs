//! Errors as HTTP says them.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;
use vramscope_queries::Error;

use crate::access::Denied;
use crate::query::QueryId;
use crate::query::failure::Class;

/// Body of every answer that is an error.
#[derive(Debug, Serialize, ToSchema)]
pub struct Body {
    /// What went wrong.
    pub error: Detail,
}

/// What went wrong.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Detail {
    /// In one word that programs can compare: `syntax`, `no_table`, `time_limit`, …
    pub code: &'static str,
    /// The SQLSTATE that comes nearest; absent if it is not about SQL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sqlstate: Option<&'static str>,
    /// In words, with the way out.
    pub message: String,
    /// The query, if there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query_id: Option<String>,
}

/// An error on its way to a client.
#[derive(Debug)]
pub struct Problem {
    status: StatusCode,
    /// Seconds after which it is worth another try.
    retry_after: Option<u64>,
    detail: Detail,
}

impl Problem {
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Problem {
        Problem {
            status,
            retry_after: None,
            detail: Detail {
                code,
                sqlstate: None,
                message: message.into(),
                query_id: None,
            },
        }
    }

    pub fn bad_request(message: impl Into<String>) -> Problem {
        Problem::new(StatusCode::BAD_REQUEST, "request", message)
    }

    pub fn forbidden(message: impl Into<String>) -> Problem {
        Problem::new(StatusCode::FORBIDDEN, Class::Forbidden.name(), message)
    }

    pub fn internal(message: impl Into<String>) -> Problem {
        let message = message.into();
        tracing::warn!("a request failed: {message}");
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            Class::Internal.name(),
            message,
        )
    }

    /// Of a query that failed.
    pub fn of_query(id: QueryId, error: &Error) -> Problem {
        let class = Class::of(error);
        if class == Class::Internal {
            tracing::warn!(query = %id, "a query failed: {error}");
        }
        Problem {
            status: status(class),
            retry_after: (class == Class::Busy).then_some(1),
            detail: Detail {
                code: class.name(),
                sqlstate: Some(class.sqlstate()),
                message: error.to_string(),
                query_id: Some(id.to_string()),
            },
        }
    }

    /// The same where the status is gone already.
    pub fn into_detail(self) -> Detail {
        self.detail
    }
}

/// Who sees this status knows whose move it is; `docs/http-api.md` has the table.
fn status(class: Class) -> StatusCode {
    match class {
        Class::Syntax | Class::NoTable | Class::NoColumn | Class::Semantics => {
            StatusCode::BAD_REQUEST
        }
        Class::Value => StatusCode::UNPROCESSABLE_ENTITY,
        Class::ReadOnly | Class::Forbidden => StatusCode::FORBIDDEN,
        Class::Time => StatusCode::REQUEST_TIMEOUT,
        Class::Cancelled => StatusCode::CONFLICT,
        Class::Rows => StatusCode::PAYLOAD_TOO_LARGE,
        Class::Memory => StatusCode::INSUFFICIENT_STORAGE,
        Class::Busy => StatusCode::SERVICE_UNAVAILABLE,
        Class::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl From<Denied> for Problem {
    fn from(denied: Denied) -> Problem {
        let text = denied.to_string();
        match denied {
            Denied::TooOften(seconds) => Problem {
                retry_after: Some(seconds),
                ..Problem::new(StatusCode::TOO_MANY_REQUESTS, "too_often", text)
            },
            Denied::Role { .. } => Problem::forbidden(text),
            _ => Problem::new(StatusCode::UNAUTHORIZED, "credentials", text),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = super::json(self.status, &Body { error: self.detail });
        let headers = response.headers_mut();
        if self.status == StatusCode::UNAUTHORIZED {
            for scheme in ["Bearer realm=\"vramscope\"", "Basic realm=\"vramscope\""] {
                let value = HeaderValue::from_static(scheme);
                headers.append(header::WWW_AUTHENTICATE, value);
            }
        }
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
