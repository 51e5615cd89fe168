//! Stands in front of a gRPC service and lets in whom it is for. Behind it a request carries its
//! [`Caller`], and of an agent its [`Agent`], as extensions.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

use super::accept::Peer;
use super::agents::Agent;
use super::{Access, Caller, Denied, Role};

/// Whom a service is for.
#[derive(Debug, Clone, Copy)]
enum For {
    Agents,
    Readers,
}

/// A service behind its guard.
#[derive(Clone)]
pub struct Guarded<S> {
    inner: S,
    access: Access,
    whom: For,
}

impl<S> Guarded<S> {
    /// For agents, which show a certificate.
    pub fn for_agents(access: &Access, inner: S) -> Guarded<S> {
        Guarded {
            inner,
            access: access.clone(),
            whom: For::Agents,
        }
    }

    /// For people and programs that ask, with `authorization: Bearer …` or `Basic …`.
    pub fn for_readers(access: &Access, inner: S) -> Guarded<S> {
        Guarded {
            inner,
            access: access.clone(),
            whom: For::Readers,
        }
    }
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B, R> Service<http::Request<B>> for Guarded<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: Send + 'static,
    R: Default,
{
    type Response = http::Response<R>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        // The one that is ready is used, its clone is kept.
        let ready = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, ready);
        let (access, whom) = (self.access.clone(), self.whom);
        Box::pin(async move {
            match admit(&access, whom, &mut request).await {
                Ok(()) => inner.call(request).await,
                Err(denied) => Ok(status(&denied).into_http()),
            }
        })
    }
}

async fn admit<B>(
    access: &Access,
    whom: For,
    request: &mut http::Request<B>,
) -> Result<(), Denied> {
    let peer = request.extensions().get::<Peer>().cloned();
    match whom {
        For::Agents => {
            let certificate = peer.and_then(|peer| peer.certificate);
            let (caller, agent) = Agent::admit(access, certificate)?;
            request.extensions_mut().insert(caller);
            request.extensions_mut().insert(agent);
        }
        For::Readers => {
            // Without an address, which every connection of ours has, all share one.
            let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
            let from = peer.map_or(nowhere, |peer| peer.address.ip());
            let header = request.headers().get(http::header::AUTHORIZATION);
            // A header that is no text is a wrong one.
            let header = header.map(|header| header.to_str().unwrap_or("").to_string());
            let caller = access.authenticate(from, "grpc", header.as_deref()).await?;
            if !caller.may_read() {
                return Err(not_allowed(&caller, "ask questions"));
            }
            request.extensions_mut().insert(caller);
        }
    }
    Ok(())
}

fn not_allowed(caller: &Caller, what: &'static str) -> Denied {
    Denied::Role {
        name: caller.name.clone(),
        role: Role::name(caller.role),
        what,
    }
}

/// As gRPC says it.
pub fn status(denied: &Denied) -> Status {
    let text = denied.to_string();
    match denied {
        Denied::Missing | Denied::Wrong | Denied::NoCertificate | Denied::Certificate => {
            Status::unauthenticated(text)
        }
        Denied::TooOften(_) => Status::resource_exhausted(text),
        Denied::Role { .. } => Status::permission_denied(text),
    }
}
