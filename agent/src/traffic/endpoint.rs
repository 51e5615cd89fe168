//! Metrics pages that the configuration names.

use std::str::FromStr;

use serde::Deserialize;
use ureq::http::Uri;

/// One entry of `[[traffic]]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// As in http://127.0.0.1:8000/metrics; the path /metrics may be left out.
    pub url: String,
    /// The process whose load it is; the page is read in that process's network namespace.
    #[serde(default)]
    pub pid: Option<u32>,
    /// The same for every process whose command line matches: a pattern where * is any text.
    #[serde(default)]
    pub process: Option<String>,
}

impl Endpoint {
    /// The page's address; an error says what is wrong with it.
    pub fn uri(&self) -> Result<Uri, String> {
        let url = &self.url;
        let uri: Uri = url
            .parse()
            .map_err(|error| format!("traffic url {url:?} makes no sense: {error}"))?;
        if uri.scheme_str() == Some("https") {
            return Err(format!(
                "traffic url {url:?}: the agent speaks no TLS; name the engine's own http address on this host, or a proxy's"
            ));
        }
        if uri.scheme_str() != Some("http") || uri.host().is_none_or(str::is_empty) {
            return Err(format!(
                "traffic url {url:?}: write it as in http://127.0.0.1:8000/metrics"
            ));
        }
        if self.pid.is_some() && self.process.is_some() {
            return Err(format!(
                "traffic url {url:?}: pid and process exclude each other"
            ));
        }
        if uri.path() != "/" || uri.query().is_some() {
            return Ok(uri);
        }
        let with_path = format!("{}/metrics", url.trim_end_matches('/'));
        with_path
            .parse()
            .map_err(|error| format!("traffic url {url:?} makes no sense: {error}"))
    }
}

/// As a flag or in the environment an endpoint is its address alone.
impl FromStr for Endpoint {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        let endpoint = Self {
            url: url.to_string(),
            pid: None,
            process: None,
        };
        endpoint.uri()?;
        Ok(endpoint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_slips() {
        let path = |url: &str| Endpoint::from_str(url).map(|e| e.uri().unwrap().to_string());
        assert_eq!(
            path("http://127.0.0.1:8000").unwrap(),
            "http://127.0.0.1:8000/metrics"
        );
        assert_eq!(
            path("http://[::1]:8000/").unwrap(),
            "http://[::1]:8000/metrics"
        );
        assert_eq!(path("http://h:1/x?y=1").unwrap(), "http://h:1/x?y=1");
        for (url, part) in [
            ("https://h:1/metrics", "no TLS"),
            ("127.0.0.1:8000", "127.0.0.1:8000"),
            ("ftp://h/metrics", "write it as in"),
            ("http://", "\"http://\""),
        ] {
            let error = path(url).unwrap_err();
            assert!(error.contains(part) && error.contains(url), "{error}");
        }
    }
}
