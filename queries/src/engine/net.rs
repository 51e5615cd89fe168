//! How workers are reached: over loopback in the clear, from host to host by mutual TLS and no
//! other way.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use datafusion::error::{DataFusionError, Result};
use datafusion_distributed::grpc::{BoxCloneSyncChannel, create_worker_client};
use datafusion_distributed::{ChannelResolver, WorkerChannel};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use url::{Host, Url};

use crate::Error;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Who a node is, and whom it believes: PEM texts. Workers call each other, so each of them is a
/// client too and all have certificates of one authority.
#[derive(Clone)]
pub struct Identity {
    /// The authority's certificate.
    pub authority: Vec<u8>,
    /// The node's certificate.
    pub certificate: Vec<u8>,
    /// Its key.
    pub key: Vec<u8>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Identity(…)")
    }
}

/// Connections to workers. Clones share them.
#[derive(Clone, Debug)]
pub struct Net {
    tls: Option<ClientTlsConfig>,
    channels: Arc<Mutex<HashMap<Url, Channel>>>,
}

impl Net {
    pub fn new(identity: Option<Identity>) -> std::result::Result<Net, Error> {
        let tls = identity.map(|identity| {
            // tonic takes the process's provider, and two are compiled in. One that is set stays.
            let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
            ClientTlsConfig::new()
                .ca_certificate(Certificate::from_pem(&identity.authority))
                .identity(tonic::transport::Identity::from_pem(
                    &identity.certificate,
                    &identity.key,
                ))
        });
        Ok(Net {
            tls,
            channels: Arc::default(),
        })
    }

    /// The URL of a worker, if it can be used.
    pub fn check(&self, worker: &str) -> std::result::Result<Url, Error> {
        let wrong = |why: &str| Error::Workers(format!("worker {worker:?}: {why}"));
        let url = Url::parse(worker).map_err(|_| {
            wrong("not a URL; for example http://127.0.0.1:7720 or https://gpu-9:7720")
        })?;
        match (url.scheme(), &self.tls) {
            ("https", Some(_)) => Ok(url),
            ("https", None) => Err(wrong(
                "https needs a certificate, its key and its authority; give --worker-cert, --worker-key and --worker-ca",
            )),
            ("http", _) if is_loopback(&url) => Ok(url),
            ("http", _) => Err(wrong(
                "rows do not go from host to host in the clear; use https:// or a tunnel to loopback",
            )),
            _ => Err(wrong(
                "only http:// on loopback and https:// are understood",
            )),
        }
    }

    async fn channel(&self, url: &Url) -> Result<Channel> {
        if let Some(known) = self.known().get(url) {
            return Ok(known.clone());
        }
        let failed = |error: tonic::transport::Error| {
            use std::error::Error as _;
            let mut text = error.to_string();
            let mut cause = error.source();
            while let Some(behind) = cause {
                text = format!("{text}: {behind}");
                cause = behind.source();
            }
            DataFusionError::Execution(format!("failed to reach worker {url}: {text}"))
        };
        let endpoint = Endpoint::from_shared(url.to_string()).map_err(failed)?;
        let mut endpoint = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            // A worker whose host vanished must not hold a query until its time is over.
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(10))
            .tcp_nodelay(true);
        if url.scheme() == "https"
            && let Some(tls) = &self.tls
        {
            endpoint = endpoint.tls_config(tls.clone()).map_err(failed)?;
        }
        let channel = endpoint.connect().await.map_err(failed)?;
        self.known().insert(url.clone(), channel.clone());
        Ok(channel)
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<Url, Channel>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost",
        None => false,
    }
}

#[async_trait]
impl ChannelResolver for Net {
    async fn get_worker_client_for_url(&self, url: &Url) -> Result<Box<dyn WorkerChannel>> {
        let channel = self.channel(url).await?;
        Ok(create_worker_client(BoxCloneSyncChannel::new(channel)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_leaves_the_host_in_the_clear() {
        let net = Net::new(None).unwrap();
        for fine in [
            "http://127.0.0.1:7720",
            "http://[::1]:7720",
            "http://localhost:1",
        ] {
            assert!(net.check(fine).is_ok(), "{fine}");
        }
        for (wrong, says) in [
            ("http://gpu-9:7720", "in the clear"),
            ("http://10.0.0.9:7720", "in the clear"),
            ("https://gpu-9:7720", "--worker-cert"),
            ("127.0.0.1:7720", "worker \"127.0.0.1:7720\""),
        ] {
            let error = net.check(wrong).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
