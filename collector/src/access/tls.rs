//! TLS of the doors: what the files hold, ready for use, and who a certificate is of.
//!
//! Invariants:
//! - files that cannot be read, do not belong together or hold nothing are an error, never clear
//!   text;
//! - a door that speaks with agents takes certificates of the clients' CA only; people may come
//!   without one, and show something else;
//! - the library that does the cryptography is named, as the workspace links two.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ServerConfig, WebPkiClientVerifier};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// What is spoken over TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Agents and Flight SQL. Clients may show a certificate.
    Grpc,
    /// The HTTP API.
    Http,
    /// PostgreSQL's, after its own question for TLS.
    Postgres,
}

impl Protocol {
    /// For logs.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Grpc => "grpc",
            Protocol::Http => "http",
            Protocol::Postgres => "postgresql",
        }
    }
}

/// Where the certificates lie; all PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The collector's certificate, and those between it and its CA's.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// CA of the agents' certificates.
    pub client_ca: PathBuf,
}

/// The doors' configurations.
#[derive(Debug, Clone)]
pub struct Configs {
    grpc: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
    postgres: Arc<ServerConfig>,
    /// When the collector's certificate ends, seconds since 1970.
    pub expires: i64,
}

impl Configs {
    /// Reads the files and tries them.
    pub fn load(files: &TlsFiles) -> anyhow::Result<Configs> {
        let chain = certificates(&files.cert)?;
        let key = key(&files.key)?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&files.client_ca)? {
            roots
                .add(certificate)
                .with_context(|| format!("{} holds no CA", files.client_ca.display()))?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let agents = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
            .allow_unauthenticated()
            .build()
            .with_context(|| format!("{} holds no usable CA", files.client_ca.display()))?;
        let expires = expires(&chain[0])
            .with_context(|| format!("certificate {} cannot be read", files.cert.display()))?;
        let fits = || {
            format!(
                "certificate {} and key {} do not go together",
                files.cert.display(),
                files.key.display()
            )
        };
        let builder = || {
            ServerConfig::builder_with_provider(provider.clone())
                .with_safe_default_protocol_versions()
                .context("the TLS library has no protocol versions")
        };
        let mut grpc = builder()?
            .with_client_cert_verifier(agents)
            .with_single_cert(chain.clone(), key.clone_key())
            .with_context(fits)?;
        grpc.alpn_protocols = vec![b"h2".to_vec()];
        let mut http = builder()?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .with_context(fits)?;
        let mut postgres = http.clone();
        http.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        postgres.alpn_protocols = vec![b"postgresql".to_vec()];
        Ok(Configs {
            grpc: Arc::new(grpc),
            http: Arc::new(http),
            postgres: Arc::new(postgres),
            expires,
        })
    }

    /// That of one door.
    pub fn of(&self, protocol: Protocol) -> Arc<ServerConfig> {
        Arc::clone(match protocol {
            Protocol::Grpc => &self.grpc,
            Protocol::Http => &self.http,
            Protocol::Postgres => &self.postgres,
        })
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("failed to read {}", path.display()))
}

pub(super) fn certificates(path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let pem = read(path)?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .with_context(|| format!("{} is not PEM", path.display()))?;
    if certificates.is_empty() {
        bail!("{} holds no certificate in PEM", path.display());
    }
    Ok(certificates)
}

fn key(path: &Path) -> anyhow::Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(&read(path)?)
        .with_context(|| format!("{} holds no private key in PEM", path.display()))
}

/// The host that an agent's certificate is for: its first DNS name, or else its common name. Whether
/// the certificate can be believed was found out before. `None` if it names nothing that can be a
/// host.
pub fn host_of(der: &[u8]) -> Option<Arc<str>> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let alternatives = certificate.subject_alternative_name().ok().flatten();
    let dns = alternatives.and_then(|names| {
        let mut names = names.value.general_names.iter();
        names.find_map(|name| match name {
            GeneralName::DNSName(name) => Some(*name),
            _ => None,
        })
    });
    let common = || {
        let mut names = certificate.subject().iter_common_name();
        names.next().and_then(|name| name.as_str().ok())
    };
    let host = dns.or_else(common)?;
    // It goes into logs and into a file of lines.
    let is_sane = (1..=253).contains(&host.len()) && !host.chars().any(char::is_control);
    is_sane.then(|| Arc::from(host))
}

/// When a certificate ends, seconds since 1970.
pub fn expires(der: &[u8]) -> anyhow::Result<i64> {
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(certificate.validity().not_after.timestamp())
}
