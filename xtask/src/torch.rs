//! PyTorch, for the tests that prove the framework layer against it: fetched from where everybody gets
//! it, at a fixed version, into a folder outside the checkout.
//!
//! Two variants lie side by side in the cache of vendors' files:
//! - `torch-VERSION/`: the two libraries that hold the caching allocator, and the headers that
//!   `agent/fakes/torch/harness.cpp` needs (5 MB, out of a wheel of 540 MB);
//! - `torch-VERSION-full/venv/`: a virtual environment with all of PyTorch (5.2 GB, 2.8 GB of
//!   downloads).
//!
//! Invariants:
//! - pip checks what it fetched against the index's hashes; nothing else is taken for whole: the first
//!   folder appears by one rename, the second is whole once it holds `complete`;
//! - what pip has fetched stays in the cache until it is unpacked, so that an interrupted run goes on
//!   where it stopped;
//! - one process fetches at a time; another waits for it and finds the result.

use std::ffi::CString;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::progress::{self, Step};
use crate::project::Project;

/// What is fetched. A newer release fails nobody's tests: raise it here, and see what is new.
pub const VERSION: &str = "2.15.0";

/// Where a folder other than the usual one is named.
const CACHE_VARIABLE: &str = "VRAMSCOPE_VENDOR_CACHE";

/// Bytes that have to be free for the small and the full variant: downloads and what is unpacked.
const SMALL_NEEDS: u64 = 700 << 20;
const FULL_NEEDS: u64 = 9 << 30;

/// In a full variant's folder: it is whole.
const COMPLETE: &str = "complete";

/// Takes what the harness needs out of a wheel.
const UNPACK: &str = "
import sys, zipfile
wheel, into = sys.argv[1:]
wanted = ('torch/include/c10/', 'torch/include/torch/headeronly/')
libraries = ('torch/lib/libc10.so', 'torch/lib/libc10_cuda.so')
with zipfile.ZipFile(wheel) as archive:
    names = [n for n in archive.namelist() if n.startswith(wanted) or n in libraries]
    archive.extractall(into, names)
";

/// The allocator's libraries and their headers.
#[derive(Debug, Clone)]
pub struct Small {
    /// Holds `libc10.so` and `libc10_cuda.so`.
    pub libraries: PathBuf,
    /// Holds `c10/`.
    pub headers: PathBuf,
}

/// All of PyTorch.
#[derive(Debug, Clone)]
pub struct Full {
    /// The virtual environment's interpreter.
    pub python: PathBuf,
    /// Holds `libc10.so`, `libc10_cuda.so` and the rest.
    pub libraries: PathBuf,
}

/// The folder of vendors' files in the user's cache; the agent's tests keep theirs there too.
///
/// # Errors
/// Says which variable to set if there is no home.
pub fn cache_folder() -> Result<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let in_cache = |cache: PathBuf| cache.join("vramscope/vendor");
    variable(CACHE_VARIABLE)
        .map(PathBuf::from)
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| in_cache(cache.into())))
        .or_else(|| variable("HOME").map(|home| in_cache(Path::new(&home).join(".cache"))))
        .with_context(|| format!("there is no folder for PyTorch: set {CACHE_VARIABLE}"))
}

/// No `=` in a name: `env` and options would take the path for an assignment.
fn small_folder(cache: &Path) -> PathBuf {
    cache.join(format!("torch-{VERSION}"))
}

fn full_folder(cache: &Path) -> PathBuf {
    cache.join(format!("torch-{VERSION}-full"))
}

/// The small variant, if it is there.
pub fn find_small(cache: &Path) -> Option<Small> {
    let folder = small_folder(cache).join("torch");
    let small = Small {
        libraries: folder.join("lib"),
        headers: folder.join("include"),
    };
    small.libraries.is_dir().then_some(small)
}

/// The full variant, if it is there and whole.
pub fn find_full(cache: &Path) -> Option<Full> {
    let folder = full_folder(cache);
    let python = folder.join("venv/bin/python");
    // Under the interpreter's version, of which there is one.
    let versions = std::fs::read_dir(folder.join("venv/lib")).ok()?;
    let packages = versions
        .flatten()
        .map(|v| v.path().join("site-packages/torch/lib"));
    let libraries = packages.into_iter().find(|path| path.is_dir())?;
    let is_whole = folder.join(COMPLETE).is_file() && python.exists();
    is_whole.then_some(Full { python, libraries })
}

/// The small variant, fetched if it is not there.
///
/// # Errors
/// Without network, python3 or pip, or where the disk is too full.
pub fn small(cache: &Path) -> Result<Small> {
    let _lock = lock(cache)?;
    if let Some(small) = find_small(cache) {
        return Ok(small);
    }
    let downloads = cache.join(format!("torch-{VERSION}-download"));
    require_free(cache, SMALL_NEEDS)?;
    download(&downloads, &["--no-deps"], "downloading PyTorch (540 MB)")?;
    unpack_small(cache, &downloads)?;
    remove(&downloads)?;
    find_small(cache).context("PyTorch was fetched and is not there")
}

/// The full variant, fetched if it is not there; and the small one with it, since its wheel is at hand.
///
/// # Errors
/// As for [`small`].
pub fn full(cache: &Path) -> Result<Full> {
    let _lock = lock(cache)?;
    if let Some(full) = find_full(cache) {
        return Ok(full);
    }
    let folder = full_folder(cache);
    let wheels = folder.join("wheels");
    require_free(cache, FULL_NEEDS.saturating_sub(bytes_in(&folder)))?;
    download(
        &wheels,
        &[],
        "downloading PyTorch and what it needs (2.8 GB)",
    )?;
    if find_small(cache).is_none() {
        unpack_small(cache, &wheels)?;
    }

    let venv = folder.join("venv");
    // One that was left half-way is made anew: pip takes a package for whole that is not.
    remove(&venv)?;
    let mut make = Command::new("python3");
    make.args(["-m", "venv"]).arg(&venv);
    run("making a virtual environment", &mut make)?;
    let mut install = Command::new(venv.join("bin/python"));
    install
        .args(["-m", "pip", "install", "--disable-pip-version-check"])
        .args(["--no-index", "--no-compile", "--find-links"])
        .args([&wheels, Path::new(&format!("torch=={VERSION}"))]);
    run("installing PyTorch (5.2 GB)", &mut install)?;
    std::fs::write(folder.join(COMPLETE), VERSION)
        .with_context(|| format!("failed to write to {}", folder.display()))?;
    remove(&wheels)?;
    find_full(cache).context("PyTorch was installed and is not there")
}

/// The harness, compiled for the small variant and the stand-ins; not again if nothing has changed.
///
/// # Errors
/// Without a C++ compiler, or with what the compiler says.
pub fn harness(project: &Project, small: &Small) -> Result<PathBuf> {
    compile(project, small, "harness", &project.standins())
}

/// The program that makes pairs of an allocation and a free for benchmarks, compiled likewise.
///
/// # Errors
/// As for [`harness`].
pub fn pairs(project: &Project, small: &Small) -> Result<PathBuf> {
    compile(project, small, "pairs", &project.release_standins())
}

fn compile(project: &Project, small: &Small, name: &str, standins: &Path) -> Result<PathBuf> {
    let sources = project.root.join("agent/fakes/torch");
    let folder = project.target.join("torch");
    let program = folder.join(name);
    let inputs = [
        sources.join(format!("{name}.cpp")),
        sources.join("include/cuda_runtime_api.h"),
        small.libraries.join("libc10_cuda.so"),
    ];
    if is_newer(&program, &inputs) {
        return Ok(program);
    }
    let compiler = compiler()?;
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("failed to create {}", folder.display()))?;
    let partial = folder.join(format!("{name}.partial"));
    let libraries = small.libraries.display().to_string();
    let mut compile = Command::new(compiler);
    compile
        .args(["-std=c++20", "-O1", "-w", "-o"])
        .arg(&partial)
        .arg(&inputs[0])
        .arg("-I")
        .arg(sources.join("include"))
        .arg("-I")
        .arg(&small.headers)
        .args([&format!("-L{libraries}"), "-lc10_cuda", "-lc10"])
        .arg(format!("-L{}", standins.display()))
        .arg("-l:libcudart.so.13")
        // The library wants versioned names; the stand-in's are not, and satisfy them all the same.
        .arg("-Wl,--allow-shlib-undefined")
        .arg(format!("-Wl,-rpath,{libraries}"));
    run("compiling a program over PyTorch's allocator", &mut compile)?;
    std::fs::rename(&partial, &program)
        .with_context(|| format!("failed to write {}", program.display()))?;
    Ok(program)
}

/// A command on the stand-ins with PyTorch's `libraries`: those look for the vendor's in folders of their
/// own first, so the stand-ins are loaded before them.
pub fn on_standins(project: &Project, libraries: &Path, command: &mut Command) {
    let folder = project.standins();
    let first = ["libcudart.so.13", "libcupti.so.13"].map(|name| folder.join(name));
    let [cudart, cupti] = first.map(|path| path.display().to_string());
    command.env("LD_PRELOAD", format!("{cudart}:{cupti}")).env(
        "LD_LIBRARY_PATH",
        format!("{}:{}", folder.display(), libraries.display()),
    );
}

fn compiler() -> Result<PathBuf> {
    let wanted = std::env::var_os("CXX").filter(|value| !value.is_empty());
    let names = wanted.map_or_else(
        || ["g++", "clang++", "c++"].map(PathBuf::from).to_vec(),
        |name| vec![name.into()],
    );
    for name in &names {
        let version = Command::new(name).arg("--version").output();
        if version.is_ok_and(|output| output.status.success()) {
            return Ok(name.clone());
        }
    }
    bail!("there is no C++ compiler: install g++, or set CXX to one")
}

fn is_newer(program: &Path, inputs: &[PathBuf]) -> bool {
    let changed = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
    let Some(made) = changed(program) else {
        return false;
    };
    // What cannot be read is for the compiler to name.
    inputs
        .iter()
        .all(|input| changed(input).is_some_and(|at| at <= made))
}

fn download(into: &Path, options: &[&str], what: &str) -> Result<()> {
    std::fs::create_dir_all(into)
        .with_context(|| format!("failed to create {}", into.display()))?;
    let mut pip = Command::new("python3");
    // What it has fetched is kept by us until it is unpacked: a second copy in pip's own cache would
    // stay for ever.
    pip.args(["-m", "pip", "download", "--disable-pip-version-check"])
        .args([
            "--no-cache-dir",
            "--only-binary=:all:",
            "--progress-bar",
            "off",
        ])
        .args(["--timeout", "30", "--retries", "2"])
        .args(options)
        .arg("--dest")
        .arg(into)
        .arg(format!("torch=={VERSION}"));
    run(what, &mut pip)
}

/// Moves what the harness needs out of the wheel in `downloads` to its place.
fn unpack_small(cache: &Path, downloads: &Path) -> Result<()> {
    let entries = std::fs::read_dir(downloads)
        .with_context(|| format!("failed to read {}", downloads.display()))?;
    let prefix = format!("torch-{VERSION}-");
    let wheel = entries.flatten().map(|entry| entry.path()).find(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&prefix) && name.ends_with(".whl")
    });
    let wheel = wheel.with_context(|| format!("pip left no wheel in {}", downloads.display()))?;
    let partial = tempfile::tempdir_in(cache)
        .with_context(|| format!("failed to write to {}", cache.display()))?;
    let whole = partial.path().join("whole");
    let mut unpack = Command::new("python3");
    unpack.args(["-c", UNPACK]).args([&wheel, &whole]);
    run("unpacking PyTorch's allocator", &mut unpack)?;
    let folder = small_folder(cache);
    std::fs::rename(&whole, &folder)
        .with_context(|| format!("failed to write {}", folder.display()))
}

fn run(what: &str, command: &mut Command) -> Result<()> {
    progress::run(Step::start(what), command, |line, step| {
        step.at(0, line);
        false
    })
}

fn remove(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("failed to remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Held while something is fetched.
fn lock(cache: &Path) -> Result<File> {
    std::fs::create_dir_all(cache)
        .with_context(|| format!("failed to create {}", cache.display()))?;
    let path = cache.join("torch.lock");
    let lock =
        File::create(&path).with_context(|| format!("failed to create {}", path.display()))?;
    lock.lock()
        .with_context(|| format!("failed to lock {}", path.display()))?;
    Ok(lock)
}

fn require_free(folder: &Path, bytes: u64) -> Result<()> {
    let free = free_bytes(folder)?;
    if free < bytes {
        bail!(
            "PyTorch needs {} MiB free in {}, which has {}: make room, or name another folder by \
             {CACHE_VARIABLE}",
            bytes >> 20,
            folder.display(),
            free >> 20
        );
    }
    Ok(())
}

fn free_bytes(folder: &Path) -> Result<u64> {
    let path = CString::new(folder.as_os_str().as_bytes()).context("a path has no zero byte")?;
    // SAFETY: a plain structure of numbers, for which zeros are valid.
    let mut answer: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a string with its zero byte and one output.
    if unsafe { libc::statvfs(path.as_ptr(), &mut answer) } != 0 {
        return Err(std::io::Error::last_os_error())
            .with_context(|| format!("failed to ask for the room in {}", folder.display()));
    }
    Ok(answer.f_bavail.saturating_mul(answer.f_frsize))
}

/// Bytes of the files directly in `folder` and one level below: what an earlier run has fetched.
fn bytes_in(folder: &Path) -> u64 {
    let files = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten();
    let below = files(folder).flat_map(|entry| files(&entry.path()).collect::<Vec<_>>());
    below
        .filter_map(|entry| entry.metadata().ok())
        .filter(std::fs::Metadata::is_file)
        .map(|metadata| metadata.len())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that a run left half-way is nothing; only the whole one is found.
    #[test]
    fn what_is_not_whole_is_not_found() {
        let cache = tempfile::tempdir().unwrap();
        let folder = full_folder(cache.path());
        std::fs::create_dir_all(folder.join("venv/bin")).unwrap();
        std::fs::write(folder.join("venv/bin/python"), "").unwrap();
        let libraries = "venv/lib/python3.11/site-packages/torch/lib";
        std::fs::create_dir_all(folder.join(libraries)).unwrap();
        assert!(find_full(cache.path()).is_none());
        std::fs::write(folder.join(COMPLETE), VERSION).unwrap();
        assert!(find_full(cache.path()).is_some());
        assert!(find_small(cache.path()).is_none());
    }

    /// A disk that is too full is told before anything is fetched, with the folder and the way out.
    #[test]
    fn a_full_disk_is_told_first() {
        let cache = tempfile::tempdir().unwrap();
        require_free(cache.path(), 0).unwrap();
        let error = require_free(cache.path(), u64::MAX)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&cache.path().display().to_string()),
            "{error}"
        );
        assert!(error.contains(CACHE_VARIABLE), "{error}");
    }

    /// What an interrupted run has fetched counts as room that is not needed again.
    #[test]
    fn bytes_fetched_earlier_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let wheels = folder.path().join("wheels");
        std::fs::create_dir(&wheels).unwrap();
        std::fs::write(wheels.join("a.whl"), [0; 1000]).unwrap();
        std::fs::write(wheels.join("b.whl"), [0; 234]).unwrap();
        assert_eq!(bytes_in(folder.path()), 1234);
        assert_eq!(bytes_in(&folder.path().join("none")), 0);
    }

    #[test]
    fn a_program_is_made_again_when_a_source_is_newer() {
        let folder = tempfile::tempdir().unwrap();
        let [program, source] = ["program", "source"].map(|name| folder.path().join(name));
        std::fs::write(&source, "").unwrap();
        let inputs = [source.clone()];
        assert!(!is_newer(&program, &inputs));
        std::fs::write(&program, "").unwrap();
        assert!(is_newer(&program, &inputs));
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
        File::open(&source).unwrap().set_modified(later).unwrap();
        assert!(!is_newer(&program, &inputs));
    }
}
