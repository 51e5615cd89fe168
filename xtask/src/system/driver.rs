//! Which GPU driver workloads run on.

use std::path::{Path, PathBuf};

use crate::project::Project;

/// Where the driver that workloads use comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Driver {
    /// The stand-in libraries, which keep ledgers.
    StandIns {
        /// Folder with the libraries.
        folder: PathBuf,
    },
    /// The machine's own driver and GPU.
    Real {
        /// Path of its `libcuda.so.1`.
        libcuda: PathBuf,
    },
}

impl Driver {
    /// The machine's own driver if it has a GPU, else the stand-ins.
    pub fn detect(project: &Project) -> Self {
        real_libcuda().map_or_else(
            || Self::stand_ins(project),
            |libcuda| Self::Real { libcuda },
        )
    }

    /// The stand-ins that the build installed.
    pub fn stand_ins(project: &Project) -> Self {
        Self::StandIns {
            folder: project.standins(),
        }
    }
}

/// The driver library of a machine on which the kernel module runs as well.
fn real_libcuda() -> Option<PathBuf> {
    if !Path::new("/dev/nvidiactl").exists() {
        return None;
    }
    let folders = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/local/nvidia/lib64",
        "/usr/lib",
    ];
    folders
        .iter()
        .map(|folder| Path::new(folder).join("libcuda.so.1"))
        .find(|path| path.exists())
}
