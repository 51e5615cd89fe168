//! Frameworks by their libraries: which allocator is hooked, which version it is, and which ones
//! are not hooked, so that nobody believes a layer is empty when it is unseen.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::known::{Coverage, WHOLE_LIBRARY};
use crate::host::procfs::Mapping;

/// The framework whose allocator is hooked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Framework {
    pub name: &'static str,
    pub version: Option<String>,
}

/// `torch/version.py` has some ten lines.
const VERSION_BYTES: u64 = 16 << 10;
/// Names that are looked through for a `torch-VERSION.dist-info`.
const FOLDER_ENTRIES: usize = 20_000;

/// Libraries of allocators that are not hooked: how a file's name begins, and why.
const NOT_HOOKED: [(&str, &str); 20] = [
    (
        "libxla_extension",
        "JAX's allocator (BFC) is in one library without exported functions or probes; the driver layer sees the memory it takes",
    ),
    (
        "xla_extension",
        "JAX's allocator (BFC) is in one library without exported functions or probes; the driver layer sees the memory it takes",
    ),
    (
        "xla_cuda_plugin",
        "XLA's allocator (BFC) is in one library without exported functions or probes; the driver layer sees the memory it takes",
    ),
    (
        "pjrt_c_api_gpu_plugin",
        "XLA's allocator (BFC) is in one library without exported functions or probes; the driver layer sees the memory it takes",
    ),
    (
        "libtensorflow_framework",
        "TensorFlow's allocator (BFC) tells of its blocks in no call that can be hooked by name; the driver layer sees the memory it takes",
    ),
    (
        "libtensorflow_cc",
        "TensorFlow's allocator (BFC) tells of its blocks in no call that can be hooked by name; the driver layer sees the memory it takes",
    ),
    (
        "_pywrap_tensorflow_internal",
        "TensorFlow's allocator (BFC) tells of its blocks in no call that can be hooked by name; the driver layer sees the memory it takes",
    ),
    (
        "memory.cpython",
        "may be CuPy's memory pool, which is compiled Python without exported functions; the runtime layer sees the memory it takes",
    ),
    (
        "librmm",
        "RMM's pools are templates compiled into each program; the runtime layer sees the memory they take",
    ),
    (
        "libonnxruntime_providers_cuda",
        "ONNX Runtime's arena has no exported functions or probes; the runtime layer sees the memory it takes",
    ),
    (
        "libphi",
        "Paddle's allocator is not known to this agent; the runtime layer sees the memory it takes",
    ),
    (
        "libpaddle",
        "Paddle's allocator is not known to this agent; the runtime layer sees the memory it takes",
    ),
    (
        "libnvinfer.so",
        "TensorRT plans its memory inside the library; the runtime layer sees what it takes",
    ),
    (
        "libnvinfer_plugin",
        "TensorRT's plugins allocate through the program's own allocator; the runtime layer sees it",
    ),
    (
        "libggml-cuda",
        "ggml's buffer pools have no exported functions for their blocks; the driver and runtime layers see the memory they take",
    ),
    (
        "libggml_cuda",
        "ggml's buffer pools have no exported functions for their blocks; the driver and runtime layers see the memory they take",
    ),
    (
        "libtritonserver",
        "Triton's pinned and device pools are inside the server; the runtime layer sees the memory they take",
    ),
    (
        "libmxnet",
        "MXNet's storage pool is not known to this agent; the runtime layer sees the memory it takes",
    ),
    (
        "liboneflow",
        "OneFlow's allocator is not known to this agent; the runtime layer sees the memory it takes",
    ),
    ("libc10_hip", "PyTorch for AMD: only CUDA memory is traced"),
];

/// Rows for allocators that are not hooked, each library once.
pub fn remarks(mappings: &[Mapping]) -> Vec<Coverage> {
    let mut rows: Vec<Coverage> = Vec::new();
    for mapping in mappings.iter().filter(|mapping| mapping.executable) {
        let Some(reason) = reason(&mapping.path) else {
            continue;
        };
        if rows.iter().all(|row| row.library != mapping.path) {
            rows.push(Coverage {
                library: mapping.path.clone(),
                symbol: WHOLE_LIBRARY,
                refused: Some(format!("framework not hooked: {reason}")),
            });
        }
    }
    rows
}

fn reason(path: &str) -> Option<&'static str> {
    let (folder, name) = path.rsplit_once('/')?;
    let is_cupy = |prefix: &str| prefix != "memory.cpython" || folder.ends_with("cupy/cuda");
    NOT_HOOKED
        .iter()
        .find(|(prefix, _)| name.starts_with(prefix) && is_cupy(prefix))
        .map(|(_, reason)| *reason)
}

/// The framework of a process that maps its allocator's library, with the version that its
/// package names.
pub fn of_process(pid: u32, mappings: &[Mapping]) -> Option<Framework> {
    let library = mappings.iter().find(|mapping| {
        let name = mapping.path.rsplit('/').next().unwrap_or_default();
        mapping.executable && name.starts_with("libc10_cuda.so")
    })?;
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    Some(Framework {
        name: "pytorch",
        version: version(&root, Path::new(&library.path)),
    })
}

/// `library` is a path below `root`: `…/site-packages/torch/lib/libc10_cuda.so`.
fn version(root: &Path, library: &Path) -> Option<String> {
    let below = library.strip_prefix("/").unwrap_or(library);
    let package = root.join(below).parent()?.parent()?.to_path_buf();
    written_version(&package.join("version.py")).or_else(|| installed_version(package.parent()?))
}

/// `__version__ = '2.15.0+cu130'`
fn written_version(path: &Path) -> Option<String> {
    let file = File::open(path).ok()?;
    // Whatever the container has put there: a device or a pipe is not waited for.
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = String::new();
    file.take(VERSION_BYTES).read_to_string(&mut text).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("__version__"))?;
    let value = line.trim_start().strip_prefix('=')?.trim();
    let quote = value.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let version = value[1..].split(quote).next()?;
    is_version(version).then(|| version.to_string())
}

/// `torch-2.15.0.dist-info` beside the package.
fn installed_version(packages: &Path) -> Option<String> {
    let entries = std::fs::read_dir(packages).ok()?;
    entries.take(FOLDER_ENTRIES).flatten().find_map(|entry| {
        let name = entry.file_name();
        let rest = name.to_str()?.strip_prefix("torch-")?;
        let version = rest.strip_suffix(".dist-info")?;
        is_version(version).then(|| version.to_string())
    })
}

fn is_version(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '_' | '-');
    text.starts_with(|c: char| c.is_ascii_digit()) && text.len() <= 64 && text.chars().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(path: &str) -> Mapping {
        Mapping {
            start: 0,
            end: 4096,
            offset: 0,
            executable: true,
            device: 1,
            inode: 2,
            path: path.into(),
            deleted: false,
        }
    }

    #[test]
    fn unseen_allocators_get_one_row_each() {
        let rows = remarks(&[
            mapping("/x/jaxlib/xla_extension.so"),
            mapping("/x/jaxlib/xla_extension.so"),
            mapping("/x/cupy/cuda/memory.cpython-311-x86_64-linux-gnu.so"),
            mapping("/x/other/memory.cpython-311-x86_64-linux-gnu.so"),
            mapping("/x/torch/lib/libc10_cuda.so"),
        ]);
        let libraries: Vec<_> = rows.iter().map(|row| row.library.as_str()).collect();
        assert_eq!(
            libraries,
            [
                "/x/jaxlib/xla_extension.so",
                "/x/cupy/cuda/memory.cpython-311-x86_64-linux-gnu.so"
            ]
        );
        assert!(
            rows.iter()
                .all(|row| row.symbol == "*" && row.refused.is_some())
        );
    }

    #[test]
    fn the_version_is_what_the_package_says() {
        let root = tempfile::tempdir().unwrap();
        let package = root.path().join("site-packages/torch");
        std::fs::create_dir_all(package.join("lib")).unwrap();
        let library = Path::new("/site-packages/torch/lib/libc10_cuda.so");
        assert_eq!(version(root.path(), library), None);
        std::fs::create_dir(root.path().join("site-packages/torch-2.1.0.dist-info")).unwrap();
        assert_eq!(version(root.path(), library).as_deref(), Some("2.1.0"));
        let written = "from typing import Optional\n__all__ = ['__version__']\n__version__ = '2.15.0+cu130'\ndebug = False\n";
        std::fs::write(package.join("version.py"), written).unwrap();
        assert_eq!(
            version(root.path(), library).as_deref(),
            Some("2.15.0+cu130")
        );
        // Somebody else's file may hold anything.
        std::fs::write(package.join("version.py"), "__version__ = 'rm -rf'").unwrap();
        assert_eq!(version(root.path(), library).as_deref(), Some("2.1.0"));
    }
}
