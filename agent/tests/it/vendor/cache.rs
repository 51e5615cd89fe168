//! The vendor's own libraries. They are not ours to give away, so they lie in a folder outside the
//! checkout and are fetched from where everybody gets them: the wheels by pip, the driver by apt.
//!
//! Of each package one file is kept and its version, in a folder that appears by one rename: a
//! fetch that was interrupted leaves nothing that looks whole. Wheels have a fixed version, so that
//! the vendor's next release fails nobody's tests: raise it here, and see what is new. Of the driver
//! the distribution has one version.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::apt;

/// Packages, and how the name of the file that matters begins.
const PACKAGES: [(&str, &str); 5] = [
    ("nvidia-cuda-runtime==13.5.37", "libcudart.so."),
    ("nvidia-cuda-runtime-cu12==12.9.79", "libcudart.so."),
    ("nvidia-cuda-cupti==13.5.25", "libcupti.so."),
    ("nvidia-cuda-cupti-cu12==12.9.79", "libcupti.so."),
    (apt::DRIVER, "libcuda.so."),
];

const FETCH_TIMEOUT: Duration = Duration::from_secs(180);
const UNPACK_TIMEOUT: Duration = Duration::from_secs(60);
const VERSION: &str = "version";

/// One library as the vendor ships it.
#[derive(Debug, Clone)]
pub struct VendorLibrary {
    pub package: &'static str,
    pub version: String,
    pub path: PathBuf,
}

impl VendorLibrary {
    pub fn name(&self) -> String {
        let name = self.path.file_name().unwrap();
        name.to_string_lossy().into_owned()
    }

    /// A copy that no other test's agent hooks; gives its path.
    pub fn copy_into(&self, folder: &Path) -> PathBuf {
        let copy = folder.join(self.name());
        fs::copy(&self.path, &copy).unwrap();
        copy
    }
}

/// Those whose names begin so and that are there or can be fetched; what cannot is said aloud.
pub fn libraries(prefix: &str) -> Vec<VendorLibrary> {
    static ALL: OnceLock<Vec<VendorLibrary>> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        let Some(cache) = folder() else {
            aloud("no folder for the vendor's libraries: set VRAMSCOPE_VENDOR_CACHE");
            return Vec::new();
        };
        let found =
            PACKAGES
                .iter()
                .filter_map(|(package, file)| match library(&cache, package, file) {
                    Ok(library) => Some(library),
                    Err(error) => {
                        aloud(&format!("{package} cannot be fetched: {error}"));
                        None
                    }
                });
        found.collect()
    });
    let wanted = all.iter().filter(|l| l.name().starts_with(prefix));
    wanted.cloned().collect()
}

/// Says what is not tested.
pub fn aloud(what: &str) {
    // Not by eprintln!, which the test harness keeps to itself when a test passes.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {what}");
}

fn folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    variable("VRAMSCOPE_VENDOR_CACHE")
        .map(PathBuf::from)
        .or_else(|| variable("XDG_CACHE_HOME").map(|c| Path::new(&c).join("vramscope/vendor")))
        .or_else(|| variable("HOME").map(|h| Path::new(&h).join(".cache/vramscope/vendor")))
}

fn library(cache: &Path, package: &'static str, file: &str) -> Result<VendorLibrary, String> {
    let folder = cache.join(package);
    if !folder.is_dir() {
        fetch(cache, package, file, &folder)?;
    }
    let path = find(&folder, file).ok_or(format!("{} is empty", folder.display()))?;
    let version = fs::read_to_string(folder.join(VERSION)).map_err(|error| error.to_string())?;
    Ok(VendorLibrary {
        package,
        version,
        path,
    })
}

fn fetch(cache: &Path, package: &str, file: &str, folder: &Path) -> Result<(), String> {
    let text = |error: std::io::Error| error.to_string();
    fs::create_dir_all(cache).map_err(text)?;
    let temporary = tempfile::tempdir_in(cache).map_err(text)?;
    let work = temporary.path();
    let unpacked = work.join("unpacked");
    fs::create_dir(&unpacked).map_err(text)?;
    let version = if package == apt::DRIVER {
        apt::fetch(work, &unpacked)?
    } else {
        fetch_wheel(package, work, &unpacked)?
    };
    let found = find(&unpacked, file).ok_or(format!("it has no {file}*"))?;
    let whole = work.join("whole");
    fs::create_dir(&whole).map_err(text)?;
    let name = found.file_name().ok_or("a file has a name")?;
    fs::rename(&found, whole.join(name)).map_err(text)?;
    fs::write(whole.join(VERSION), version).map_err(text)?;
    match fs::rename(&whole, folder) {
        // Another test program was faster.
        Err(_) if folder.is_dir() => Ok(()),
        renamed => renamed.map_err(text),
    }
}

fn fetch_wheel(package: &str, work: &Path, unpacked: &Path) -> Result<String, String> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--disable-pip-version-check"])
        .args(["--no-deps", "--only-binary=:all:"])
        .args(["--timeout", "15", "--retries", "1", "--dest"])
        .args([work, Path::new(package)]);
    run(pip, work, FETCH_TIMEOUT)?;
    let wheel = with_ending(work, ".whl").ok_or("pip left no wheel")?;
    let mut unzip = Command::new("python3");
    unzip.args(["-m", "zipfile", "-e"]).args([&wheel, unpacked]);
    run(unzip, work, UNPACK_TIMEOUT)?;
    // A wheel is called NAME-VERSION-TAGS.
    let name = wheel.file_name().ok_or("a wheel has a name")?;
    let version = name.to_string_lossy().split('-').nth(1).map(str::to_string);
    version.ok_or(format!("{} has no version", wheel.display()))
}

/// Runs a command with a deadline; on failure gives the last line it wrote.
pub fn run(mut command: Command, work: &Path, timeout: Duration) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let text = |error: std::io::Error| format!("{name}: {error}");
    let log = work.join("log");
    let output = File::create(&log).map_err(text)?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(output.try_clone().map_err(text)?)
        .stderr(output)
        // What it starts ends with it.
        .process_group(0)
        .spawn()
        .map_err(text)?;
    let end = Instant::now() + timeout;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(text)? {
            break status;
        }
        if Instant::now() >= end {
            // SAFETY: our own child's group; the child is not waited for yet.
            unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
            let _ = child.wait();
            return Err(format!("{name} took more than {timeout:?}"));
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    if status.success() {
        return Ok(());
    }
    let said = fs::read_to_string(&log).unwrap_or_default();
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    Err(format!("{name}: {}", last.unwrap_or("it failed silently")))
}

/// The file, and no link, whose name begins so.
fn find(folder: &Path, prefix: &str) -> Option<PathBuf> {
    for entry in fs::read_dir(folder).ok()?.flatten() {
        let kind = entry.file_type().ok()?;
        let is_it = kind.is_file() && entry.file_name().to_string_lossy().starts_with(prefix);
        if is_it {
            return Some(entry.path());
        }
        if kind.is_dir()
            && let Some(found) = find(&entry.path(), prefix)
        {
            return Some(found);
        }
    }
    None
}

/// A file in that folder whose name ends so.
pub fn with_ending(folder: &Path, ending: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let mut paths = entries.map(|entry| entry.path());
    paths.find(|path| path.to_string_lossy().ends_with(ending))
}
