//! The HTTP door: SQL over `POST /api/v1/sql`, and what operators and Prometheus ask for.
//!
//! Invariants:
//! - what is answered is told by `openapi.json`, and the other way round (a test compares them);
//! - only `/healthz`, `/readyz` and `/api/v1/openapi.json` answer without credentials, once there
//!   are any; none of them tells what is in the lake;
//! - browsers are kept out: a request with an `Origin` is refused, there are no CORS headers, and
//!   without credentials the `Host` has to be an address or `localhost`, so that no page can reach
//!   a collector on its reader's loopback under a name of its own;
//! - bodies, heads, connections and the time for each are bounded ([`connection`]).

mod connection;
mod format;
mod problem;
mod sql;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use utoipa::OpenApi;

use crate::access::accept::Peer;
use crate::access::{Access, Caller};
use crate::metrics::health::{Health, Readiness, Reason};
use crate::metrics::{METRICS, RequestLabels};
use crate::query::{Gate, QueryId};

pub use connection::{Bounds, serve};
use problem::Problem;

/// What the handlers share. Clones share everything.
#[derive(Clone)]
pub struct HttpDoor {
    gate: Gate,
    access: Access,
    health: Arc<Health>,
    /// How long a body may take.
    patience: Duration,
}

impl HttpDoor {
    /// A door in front of a gate.
    pub fn new(gate: Gate, access: Access, health: Arc<Health>) -> HttpDoor {
        HttpDoor {
            gate,
            access,
            health,
            patience: Duration::from_secs(20),
        }
    }

    fn with_patience(self, patience: Duration) -> HttpDoor {
        HttpDoor { patience, ..self }
    }

    /// Who asks. They may ask questions.
    async fn reader(&self, parts: &Parts) -> Result<Caller, Problem> {
        // Every connection of the door has an address.
        let from = parts.extensions.get::<Peer>();
        let from = from.map_or(IpAddr::from([0, 0, 0, 0]), |peer| peer.address.ip());
        let header = parts.headers.get(header::AUTHORIZATION);
        // A header that is no text is a wrong one.
        let header = header.map(|header| header.to_str().unwrap_or(""));
        let caller = self.access.authenticate(from, "http", header).await?;
        if caller.may_read() {
            Ok(caller)
        } else {
            let name = &caller.name;
            Err(Problem::forbidden(format!("{name} may not ask questions")))
        }
    }
}

/// The document that describes the door.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "vramscope collector",
        description = "SQL over what a fleet's GPU memory is used for. Column and error names are stable."
    ),
    paths(sql::answer, cancel, openapi, healthz, readyz, metrics),
    components(schemas(
        sql::SqlRequest,
        sql::Answer,
        problem::Body,
        problem::Detail,
        Readiness,
        Reason
    ))
)]
struct Api;

/// Routes as a list and as a router: no way to have one without the other.
macro_rules! routes {
    ($($method:ident $path:literal => $handler:path,)*) => {
        /// Method and path of everything that is answered.
        const ROUTES: &[(&str, &str)] = &[$((stringify!($method), $path)),*];

        fn routes() -> Router<HttpDoor> {
            Router::new()$(.route($path, $method($handler)))*
        }
    };
}

routes! {
    post "/api/v1/sql" => sql::answer,
    delete "/api/v1/queries/{id}" => cancel,
    get "/api/v1/openapi.json" => openapi,
    get "/healthz" => healthz,
    get "/readyz" => readyz,
    get "/metrics" => metrics,
}

fn router(door: HttpDoor) -> Router {
    routes()
        .fallback(nothing_there)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(door.clone(), no_browsers))
        .layer(from_fn(count))
        .with_state(door)
}

/// Cancels a query of one's own; an administrator cancels any.
#[utoipa::path(
    delete,
    path = "/api/v1/queries/{id}",
    params(("id" = String, Path, description = "As `vramscope-query-id` says it", example = "0123456789abcdef0123456789abcdef")),
    responses(
        (status = 204, description = "It was told to end"),
        (status = 404, description = "No such query runs, or it is somebody else's", body = problem::Body)
    )
)]
async fn cancel(
    State(door): State<HttpDoor>,
    Path(id): Path<String>,
    request: Request,
) -> Result<StatusCode, Problem> {
    let (parts, _) = request.into_parts();
    let caller = door.reader(&parts).await?;
    let id: QueryId = id.parse().map_err(Problem::bad_request)?;
    if door.gate.cancel(&caller, id) {
        Ok(StatusCode::NO_CONTENT)
    } else {
        let text = format!("no query {id} of yours runs");
        Err(Problem::new(StatusCode::NOT_FOUND, "no_query", text))
    }
}

/// This description.
#[utoipa::path(
    get,
    path = "/api/v1/openapi.json",
    responses((status = 200, description = "An OpenAPI 3.1 document", content_type = "application/json"))
)]
async fn openapi() -> Response {
    json(StatusCode::OK, &Api::openapi())
}

/// Whether the process answers.
#[utoipa::path(
    get,
    path = "/healthz",
    responses((status = 200, description = "It does", body = String, content_type = "text/plain"))
)]
async fn healthz() -> &'static str {
    "ok\n"
}

/// Whether a batch sent now would be taken and become visible; if not, why.
#[utoipa::path(
    get,
    path = "/readyz",
    responses(
        (status = 200, description = "Ready", body = Readiness),
        (status = 503, description = "Not ready, with reasons", body = Readiness)
    )
)]
async fn readyz(State(door): State<HttpDoor>) -> Response {
    let readiness = door.health.readiness();
    let status = match readiness.ready {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    json(status, &readiness)
}

/// The collector's metrics, for Prometheus.
#[utoipa::path(
    get,
    path = "/metrics",
    responses((status = 200, description = "OpenMetrics text", body = String, content_type = "application/openmetrics-text"))
)]
async fn metrics(State(door): State<HttpDoor>, request: Request) -> Result<Response, Problem> {
    let (parts, _) = request.into_parts();
    door.reader(&parts).await?;
    let text = door
        .health
        .metrics()
        .map_err(|error| Problem::internal(format!("failed to write the metrics: {error}")))?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

fn json(status: StatusCode, value: &impl serde::Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(mut text) => {
            text.push(b'\n');
            (status, [(header::CONTENT_TYPE, "application/json")], text).into_response()
        }
        Err(error) => Problem::internal(format!("failed to write JSON: {error}")).into_response(),
    }
}

async fn nothing_there(uri: Uri) -> Problem {
    let path: String = uri.path().chars().take(100).collect();
    Problem::new(
        StatusCode::NOT_FOUND,
        "no_path",
        format!("there is no {path:?}; /api/v1/openapi.json tells what there is"),
    )
}

async fn wrong_method(method: Method, uri: Uri) -> Problem {
    let path: String = uri.path().chars().take(100).collect();
    Problem::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method",
        format!("{path} does not take {method}; /api/v1/openapi.json tells what it takes"),
    )
}

/// Refuses what comes from a page in a browser.
async fn no_browsers(State(door): State<HttpDoor>, request: Request, next: Next) -> Response {
    if request.headers().contains_key(header::ORIGIN) {
        let text = "requests from web pages (with an Origin) are not answered";
        return Problem::new(StatusCode::FORBIDDEN, "origin", text).into_response();
    }
    if !door.access.required() && !is_address(host(&request)) {
        let text = "without credentials the collector is asked by an address or as localhost only";
        return Problem::new(StatusCode::FORBIDDEN, "host", text).into_response();
    }
    next.run(request).await
}

fn host(request: &Request) -> Option<&str> {
    let of_uri = request.uri().host();
    of_uri.or_else(|| {
        let header = request.headers().get(header::HOST)?;
        // What is no text is no address.
        Some(header.to_str().unwrap_or("?"))
    })
}

/// Whether a host, perhaps with a port, is no name that somebody may have made up. HTTP/1.0 has
/// none, and neither have browsers HTTP/1.0.
fn is_address(host: Option<&str>) -> bool {
    let Some(host) = host else { return true };
    let name = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or(v6),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

async fn count(request: Request, next: Next) -> Response {
    let path = label(request.uri().path());
    let response = next.run(request).await;
    let status = response.status().as_u16();
    let labels = RequestLabels { path, status };
    METRICS.http_requests.get_or_create(&labels).inc();
    response
}

/// The path as it is documented: clients do not choose labels.
fn label(path: &str) -> &'static str {
    if path.starts_with("/api/v1/queries/") {
        return "/api/v1/queries/{id}";
    }
    let known = ROUTES.iter().find(|(_, known)| *known == path);
    known.map_or("other", |(_, path)| path)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn what_is_answered_is_what_is_described() {
        let described = serde_json::to_value(Api::openapi()).unwrap();
        let mut methods = BTreeSet::new();
        for (path, operations) in described["paths"].as_object().unwrap() {
            for method in operations.as_object().unwrap().keys() {
                methods.insert((method.clone(), path.clone()));
            }
        }
        let answered = ROUTES.iter().map(|(m, p)| (m.to_string(), p.to_string()));
        assert_eq!(answered.collect::<BTreeSet<_>>(), methods);
    }

    #[test]
    fn only_addresses_and_localhost_are_no_names() {
        for host in [
            "127.0.0.1",
            "127.0.0.1:7718",
            "[::1]:7718",
            "localhost:1",
            "LOCALHOST",
        ] {
            assert!(is_address(Some(host)), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:7718",
            "",
            "127.0.0.1.evil.example",
            "?",
        ] {
            assert!(!is_address(Some(host)), "{host}");
        }
    }
}
