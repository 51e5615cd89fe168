//! How a collector is asked: by which protocol, as whom, and which CA is believed.

use std::path::{Path, PathBuf};

use clap::Args;
use url::{Host, Url};
use vramscope_queries::Error;

/// Where secrets come from. Other users of a machine can read command lines: `--token` is there
/// for scripts that have no better place.
#[derive(Args, Clone, Debug, Default)]
pub struct Login {
    /// Bearer token; better in VRAMSCOPE_TOKEN or --token-file, where other users do not see it
    #[arg(
        long,
        value_name = "TOKEN",
        env = "VRAMSCOPE_TOKEN",
        hide_env_values = true
    )]
    token: Option<String>,
    /// File with the bearer token
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// User; the password comes from --password-file or PGPASSWORD
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// File with the user's password
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,
    /// CA that signed the collector's certificate, PEM (`ca.pem` of `vramscope-collector init`)
    #[arg(long, value_name = "FILE", env = "VRAMSCOPE_CA_FILE")]
    ca_file: Option<PathBuf>,
}

/// What is shown to a collector.
pub enum Shown {
    Nothing,
    Token(String),
    Password { user: String, password: String },
}

/// The protocol of a URL.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Protocol {
    Http,
    Flight,
    Postgres,
}

/// A collector's URL, taken apart. Its text, for messages, has no password.
#[derive(Debug)]
pub struct Address {
    pub protocol: Protocol,
    /// As given, with the secrets.
    pub url: Url,
    /// Whether the connection is encrypted.
    pub tls: bool,
}

impl Address {
    /// `--url`: the scheme says the protocol.
    pub fn of_url(text: &str) -> Result<Address, Error> {
        Self::parse(text, Protocol::Http)
    }

    /// `--collector`: `http` and `https` are Flight SQL too.
    pub fn of_collector(text: &str) -> Result<Address, Error> {
        Self::parse(text, Protocol::Flight)
    }

    fn parse(text: &str, of_http: Protocol) -> Result<Address, Error> {
        let wrong = |detail: &str| Error::Collector {
            url: text.split('@').next_back().unwrap_or(text).to_string(),
            detail: detail.to_string(),
        };
        let url = Url::parse(text)
            .ok()
            .filter(|url| url.has_host() && url.host_str() != Some(""))
            .ok_or_else(|| wrong("not a URL; for example http://127.0.0.1:7718"))?;
        let (protocol, tls) = match url.scheme() {
            "http" => (of_http, false),
            "https" => (of_http, true),
            "grpc" | "flight" | "grpc+tcp" => (Protocol::Flight, false),
            "grpcs" | "flights" | "grpc+tls" => (Protocol::Flight, true),
            "postgresql" | "postgres" => (Protocol::Postgres, false),
            _ => {
                return Err(wrong(
                    "unknown protocol; there are http(s), grpc(s) and postgresql",
                ));
            }
        };
        Ok(Address { protocol, url, tls })
    }

    /// Without the password.
    pub fn text(&self) -> String {
        let mut url = self.url.clone();
        // Both only fail for URLs without a host.
        let _ = url.set_password(None);
        url.to_string().trim_end_matches('/').to_string()
    }

    /// Whether it stays on this machine.
    pub fn is_loopback(&self) -> bool {
        match self.url.host() {
            Some(Host::Ipv4(address)) => address.is_loopback(),
            Some(Host::Ipv6(address)) => address.is_loopback(),
            // A scheme that is not of the web has its host as text.
            Some(Host::Domain(name)) => {
                let name = name.trim_matches(['[', ']']);
                let address = name.parse::<std::net::IpAddr>();
                name == "localhost" || address.is_ok_and(|address| address.is_loopback())
            }
            None => false,
        }
    }

    pub fn failed(&self, detail: impl Into<String>) -> Error {
        Error::Collector {
            url: self.text(),
            detail: detail.into(),
        }
    }
}

impl Login {
    /// What to show to a collector; never in clear text over a network.
    pub fn shown(&self, address: &Address) -> Result<Shown, Error> {
        let shown = self.secrets(address)?;
        let secret = !matches!(shown, Shown::Nothing);
        if secret && !address.tls && !address.is_loopback() {
            return Err(address.failed(
                "a token or password is not sent in clear text; use https:// or grpcs://",
            ));
        }
        Ok(shown)
    }

    fn secrets(&self, address: &Address) -> Result<Shown, Error> {
        if let Some(file) = &self.token_file {
            return Ok(Shown::Token(read(file)?));
        }
        if let Some(user) = self.user(address) {
            let password = self.password(address)?;
            return Ok(Shown::Password { user, password });
        }
        let token = self.token.as_deref().map(str::trim);
        Ok(match token.filter(|token| !token.is_empty()) {
            Some(token) => Shown::Token(token.to_string()),
            None => Shown::Nothing,
        })
    }

    pub fn user(&self, address: &Address) -> Option<String> {
        let of_url = Some(address.url.username()).filter(|user| !user.is_empty());
        self.user.clone().or_else(|| of_url.map(decoded))
    }

    /// The password of whoever asks; empty if none was given.
    pub fn password(&self, address: &Address) -> Result<String, Error> {
        if let Some(file) = &self.password_file {
            return read(file);
        }
        let of_url = address.url.password().map(decoded);
        let of_environment = || std::env::var("PGPASSWORD").ok();
        Ok(of_url.or_else(of_environment).unwrap_or_default())
    }

    /// The CA's certificates as PEM, if a file was given.
    pub fn ca(&self) -> Result<Option<Vec<u8>>, Error> {
        let Some(path) = &self.ca_file else {
            return Ok(None);
        };
        let bytes = std::fs::read(path).map_err(|cause| Error::Io {
            path: path.clone(),
            cause,
        })?;
        Ok(Some(bytes))
    }
}

/// A file's first line.
fn read(path: &Path) -> Result<String, Error> {
    let text = std::fs::read_to_string(path).map_err(|cause| Error::Io {
        path: path.to_path_buf(),
        cause,
    })?;
    Ok(text.lines().next().unwrap_or("").trim().to_string())
}

/// URLs write `%40` for `@`.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let byte = digits.and_then(|two| u8::from_str_radix(two, 16).ok());
        match (first, byte) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_says_the_protocol() {
        let of = |text| {
            let address = Address::of_url(text).unwrap();
            (address.protocol, address.tls, address.is_loopback())
        };
        assert_eq!(of("http://127.0.0.1:7718"), (Protocol::Http, false, true));
        assert_eq!(of("https://[::1]:7718"), (Protocol::Http, true, true));
        assert_eq!(of("grpc://localhost:7717"), (Protocol::Flight, false, true));
        assert_eq!(of("grpcs://gpu:7717"), (Protocol::Flight, true, false));
        assert_eq!(
            of("postgresql://ann@[::1]:7719/x"),
            (Protocol::Postgres, false, true)
        );
        assert_eq!(
            of("postgres://127.0.0.1.evil.example"),
            (Protocol::Postgres, false, false)
        );
        let flight = Address::of_collector("http://127.0.0.1:7717").unwrap();
        assert_eq!(flight.protocol, Protocol::Flight);
        for wrong in ["127.0.0.1:7717", "ftp://h", "http://", "x"] {
            assert!(Address::of_url(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn secrets_stay_out_of_texts_and_off_the_network() {
        let address = Address::of_url("http://ann:s%40crat@gpu:7718").unwrap();
        assert!(!address.text().contains("crat"), "{}", address.text());
        let login = Login::default();
        assert_eq!(login.password(&address).unwrap(), "s@crat");
        let refused = login.shown(&address).err().unwrap().to_string();
        assert!(refused.contains("clear text"), "{refused}");
        assert!(!refused.contains("crat"), "{refused}");
        let address = Address::of_url("https://ann:secret@gpu:7718").unwrap();
        assert!(matches!(
            login.shown(&address).unwrap(),
            Shown::Password { user, password } if user == "ann" && password == "secret"
        ));
    }
}
