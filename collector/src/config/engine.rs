//! What computes answers: the keys of the distributed engine.

use std::path::PathBuf;

use serde::Deserialize;
use vramscope_queries::engine::{Cluster, Engine};

/// What computes answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EngineName {
    /// The collector itself.
    Local,
    /// Workers, each over a part of the files.
    Distributed,
}

/// What computes answers, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineKeys {
    /// Which.
    pub name: EngineName,
    /// URLs of workers.
    pub workers: Vec<String>,
    /// Certificate, key and authority.
    pub cert: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
    /// The authority.
    pub ca: Option<PathBuf>,
}

impl EngineKeys {
    /// The engine itself; reads the certificates.
    pub fn engine(&self) -> anyhow::Result<Engine> {
        if self.name == EngineName::Local {
            return Ok(Engine::Local);
        }
        let files = (
            self.ca.as_deref(),
            self.cert.as_deref(),
            self.key.as_deref(),
        );
        let identity = crate::executor::identity(files.0, files.1, files.2)?;
        Ok(Engine::Distributed(Cluster::new(&self.workers, identity)?))
    }

    pub(super) fn to_toml(&self) -> String {
        let name = match self.name {
            EngineName::Local => "local",
            EngineName::Distributed => "distributed",
        };
        let text = |value: &str| toml::Value::String(value.to_string()).to_string();
        let mut lines = vec![format!("engine = \"{name}\"")];
        if self.workers.is_empty() {
            lines.push("# workers = [\"http://127.0.0.1:7720\", \"http://127.0.0.1:7721\"]".into());
        } else {
            let workers: Vec<String> = self.workers.iter().map(|url| text(url)).collect();
            lines.push(format!("workers = [{}]", workers.join(", ")));
        }
        let files = [
            ("worker_cert", &self.cert),
            ("worker_key", &self.key),
            ("worker_ca", &self.ca),
        ];
        for (key, file) in files {
            lines.push(match file {
                Some(file) => format!("{key} = {}", text(&file.display().to_string())),
                None => format!("# {key} = \"/etc/vramscope/{}.pem\"", &key[7..]),
            });
        }
        lines.join("\n")
    }
}
