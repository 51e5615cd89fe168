//! What computes an answer: this process or workers.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use vramscope_queries::Error;
use vramscope_queries::engine::{Cluster, Engine, Identity};

/// Flags of the engine.
#[derive(Args)]
pub struct Arguments {
    /// What computes the answer
    #[arg(long, value_enum, default_value = "local", env = "VRAMSCOPE_ENGINE")]
    engine: Name,
    /// Workers of the distributed engine (`vramscope-collector executor`)
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        env = "VRAMSCOPE_WORKERS"
    )]
    workers: Vec<String>,
    /// Certificate shown to workers (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["worker_key", "worker_ca"])]
    worker_cert: Option<PathBuf>,
    /// Key of that certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "worker_cert")]
    worker_key: Option<PathBuf>,
    /// Authority that workers' certificates are of (PEM)
    #[arg(long, value_name = "FILE", requires = "worker_cert")]
    worker_ca: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Name {
    /// This process
    Local,
    /// Workers, each over a part of the files
    Distributed,
}

impl Arguments {
    /// The engine that the flags name.
    pub fn engine(&self) -> Result<Engine, Error> {
        if self.engine == Name::Local {
            return Ok(Engine::Local);
        }
        let files = (&self.worker_ca, &self.worker_cert, &self.worker_key);
        let identity = match files {
            (Some(authority), Some(certificate), Some(key)) => Some(Identity {
                authority: read(authority)?,
                certificate: read(certificate)?,
                key: read(key)?,
            }),
            // The flags require each other.
            _ => None,
        };
        Cluster::new(&self.workers, identity).map(Engine::Distributed)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|cause| Error::Io {
        path: path.to_path_buf(),
        cause,
    })
}
