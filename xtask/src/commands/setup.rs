//! `cargo xtask setup`: installs what the build needs beyond Rust, and nothing that is there.
//!
//! Only the kernel side needs anything: a `core` library for the BPF target, and a linker for
//! it. There are two ways to have both:
//! - **packaged**: Debian's `/usr/bin/rustc` with a prebuilt `core`, and bpf-linker built
//!   against Debian's LLVM of the same major version. Does not disturb rustup.
//! - **nightly**: rustup's nightly with `rust-src`, which builds `core` itself (the usual way of
//!   aya projects), and any bpf-linker.
//!
//! Whichever is there is taken; if none is, and this is Debian or Ubuntu and we are root, the
//! packaged way is installed. In any other case we print what to install by hand: guessing
//! another distribution's packages would be worse than two lines to copy.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use clap::Args;

use crate::progress::{self, Step};
use crate::project::{Project, cargo, cargo_command};

/// LLVM's major version: bpf-linker reads bitcode of the rustc that wrote it, so its LLVM must
/// not be older than rustc's.
const LLVM: &str = "22";
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";
const BPF_LINKER_VERSION: &str = "0.13.0";
const BPF_TARGET: &str = "bpfel-unknown-none";
const PACKAGED_RUSTC: &str = "/usr/bin/rustc";

/// Package, and what it is for.
const PACKAGES: [(&str, &str); 10] = [
    ("rustc-web", "a rustc beside rustup's, for the BPF target"),
    ("libstd-rust-web-dev-bpf", "its prebuilt core library"),
    ("llvm-22-dev", "LLVM, which bpf-linker links"),
    ("libpolly-22-dev", "a part of LLVM"),
    ("clang-22", "C compiler for LLVM's glue"),
    ("libclang-22-dev", "libclang of the same version"),
    ("zlib1g-dev", "LLVM links it"),
    ("libzstd-dev", "LLVM links it"),
    ("libxml2-dev", "LLVM links it"),
    ("g++", "C++ runtime for LLVM, linker for everything"),
];

/// Installs what the build needs beyond Rust; does nothing if it is there.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask setup            install what is missing (Debian or Ubuntu, as root)
  cargo xtask setup --check    only say what is missing; exit 1 if anything is")]
pub struct Setup {
    /// Only say what is there and what is missing
    #[arg(long)]
    pub check: bool,
}

/// A way to build the kernel side that is there and works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Toolchain {
    /// A rustc with a prebuilt `core` for the BPF target.
    Packaged {
        /// That rustc.
        rustc: PathBuf,
    },
    /// rustup's nightly with `rust-src`.
    Nightly,
}

/// Nothing is installed, and we cannot install it: the message says what to do by hand.
#[derive(Debug)]
pub struct ByHand(String);

impl std::fmt::Display for ByHand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ByHand {}

/// The command.
pub fn run(project: &Project, options: &Setup) -> Result<()> {
    if options.check {
        return check();
    }
    let toolchain = ensure(project)?;
    eprintln!("{}", describe(&toolchain));
    Ok(())
}

/// Gives a way to build the kernel side, installing one if there is none.
pub fn ensure(project: &Project) -> Result<Toolchain> {
    if let Some(toolchain) = detect() {
        return Ok(toolchain);
    }
    eprintln!(
        "the kernel side (eBPF) needs a core library and a linker for {BPF_TARGET}; \
         setting them up, once"
    );
    install_packages()?;
    install_bpf_linker(project)?;
    detect().context(
        "everything was installed, and still no way to build for BPF was found; \
         `cargo xtask setup --check` says what is missing",
    )
}

/// The way that is there, the packaged one first since it needs no unstable build of `core`.
pub fn detect() -> Option<Toolchain> {
    let linker = bpf_linker_version()?;
    let packaged_linker_fits = linker == BPF_LINKER_VERSION;
    if packaged_linker_fits && packaged_core().is_some() {
        return Some(Toolchain::Packaged {
            rustc: PathBuf::from(PACKAGED_RUSTC),
        });
    }
    nightly_source().is_some().then_some(Toolchain::Nightly)
}

fn describe(toolchain: &Toolchain) -> String {
    match toolchain {
        Toolchain::Packaged { rustc } => format!(
            "the kernel side builds with {} and its prebuilt core",
            rustc.display()
        ),
        Toolchain::Nightly => "the kernel side builds with rustup's nightly and rust-src".into(),
    }
}

fn check() -> Result<()> {
    let found = |what: &str, value: Option<String>| match value {
        Some(value) => println!("found    {what}: {value}"),
        None => println!("missing  {what}"),
    };
    let core = packaged_core().map(|p| p.display().to_string());
    let source = nightly_source().map(|p| p.display().to_string());
    found("bpf-linker", bpf_linker_version());
    found("packaged core for BPF", core);
    found("nightly rust-src", source);
    match detect() {
        Some(toolchain) => {
            println!("{}", describe(&toolchain));
            Ok(())
        }
        None => anyhow::bail!("the kernel side cannot be built yet: run `cargo xtask setup`"),
    }
}

/// Version of the bpf-linker on the path.
fn bpf_linker_version() -> Option<String> {
    let output = quiet_output(Command::new("bpf-linker").arg("--version"))?;
    Some(output.split_whitespace().nth(1)?.to_string())
}

/// Folder of the packaged rustc's prebuilt `core`, if it is there.
fn packaged_core() -> Option<PathBuf> {
    core_of(Path::new(PACKAGED_RUSTC))
}

fn core_of(rustc: &Path) -> Option<PathBuf> {
    if !rustc.is_file() {
        return None;
    }
    let sysroot = quiet_output(Command::new(rustc).args(["--print", "sysroot"]))?;
    let folder = Path::new(sysroot.trim())
        .join("lib/rustlib")
        .join(BPF_TARGET)
        .join("lib");
    let has_core = std::fs::read_dir(&folder).ok()?.flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libcore-") && name.ends_with(".rlib")
    });
    has_core.then_some(folder)
}

/// Folder of the nightly's library sources, if they are there.
fn nightly_source() -> Option<PathBuf> {
    let mut rustc = Command::new("rustup");
    rustc.args(["run", "nightly", "rustc", "--print", "sysroot"]);
    // Asking must not install anything.
    rustc.env("RUSTUP_AUTO_INSTALL", "0");
    let sysroot = quiet_output(&mut rustc)?;
    let source = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
    source.join("core").is_dir().then_some(source)
}

fn quiet_output(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::null()).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn install_packages() -> Result<()> {
    let missing: Vec<_> = PACKAGES
        .into_iter()
        .filter(|(package, _)| !is_installed(package))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !is_debian_like() {
        return Err(by_hand("this is not Debian or Ubuntu"));
    }
    // SAFETY: plain system call.
    if unsafe { libc::geteuid() } != 0 {
        return Err(by_hand("installing packages needs root"));
    }
    let mut update = Command::new("apt-get");
    update.args(["update", "-q"]).env("LC_ALL", "C");
    progress::run(
        Step::start("reading the package lists"),
        &mut update,
        |line, step| {
            step.at(0, line);
            false
        },
    )?;
    let unavailable: Vec<_> = missing
        .iter()
        .filter(|(package, _)| !is_available(package))
        .map(|(package, _)| *package)
        .collect();
    if !unavailable.is_empty() {
        let why = format!(
            "this distribution has no package {}",
            unavailable.join(", ")
        );
        return Err(by_hand(&why));
    }
    for (package, purpose) in &missing {
        eprintln!("  {package}: {purpose}");
    }
    let mut install = Command::new("apt-get");
    install
        .args(["install", "-y", "-q", "--no-install-recommends"])
        .args(missing.iter().map(|(package, _)| package))
        .env("LC_ALL", "C")
        .env("DEBIAN_FRONTEND", "noninteractive");
    let what = format!("installing {} packages", missing.len());
    progress::run(Step::start(&what), &mut install, |line, step| {
        step.at(0, line);
        false
    })
}

fn is_installed(package: &str) -> bool {
    let mut query = Command::new("dpkg-query");
    query.args(["-W", "-f=${db:Status-Status}", package]);
    quiet_output(&mut query).is_some_and(|status| status.trim() == "installed")
}

fn is_available(package: &str) -> bool {
    let mut policy = Command::new("apt-cache");
    policy.args(["policy", package]).env("LC_ALL", "C");
    quiet_output(&mut policy).is_some_and(|text| has_candidate(&text))
}

/// Reads `apt-cache policy`: nothing at all for an unknown name, `(none)` for one that other
/// packages only mention.
fn has_candidate(policy: &str) -> bool {
    policy
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Candidate:"))
        .any(|candidate| candidate.trim() != "(none)")
}

fn is_debian_like() -> bool {
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let mut words = release
        .lines()
        .filter_map(|line| line.strip_prefix("ID=").or(line.strip_prefix("ID_LIKE=")))
        .flat_map(|value| value.trim_matches('"').split(' '));
    words.any(|word| word == "debian" || word == "ubuntu")
}

fn install_bpf_linker(project: &Project) -> Result<()> {
    if bpf_linker_version().as_deref() == Some(BPF_LINKER_VERSION) {
        return Ok(());
    }
    let mut install = cargo_command(project);
    install
        .args(["install", "bpf-linker", "--locked"])
        .args(["--version", BPF_LINKER_VERSION])
        .args(["--no-default-features", "--features"])
        .arg(format!("llvm-{LLVM}"))
        .env("LLVM_PREFIX", LLVM_PREFIX)
        // Our own flags (frame pointers) and target folder are not meant for it.
        .env("RUSTFLAGS", "")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_TARGET_DIR");
    progress::run(
        Step::start("building bpf-linker (about 2 minutes)"),
        &mut install,
        |line, step| {
            step.at(0, line);
            false
        },
    )?;
    if bpf_linker_version().is_none() {
        anyhow::bail!(
            "bpf-linker was installed but is not on the path; add ~/.cargo/bin to PATH \
             (cargo is {})",
            cargo().display()
        );
    }
    Ok(())
}

fn by_hand(why: &str) -> anyhow::Error {
    let packages: Vec<_> = PACKAGES.iter().map(|(package, _)| *package).collect();
    ByHand(format!(
        "cannot install what the kernel side needs: {why}. One of these by hand:

  on Debian 12 or later, or an Ubuntu that has these packages, as root:
    apt-get install -y --no-install-recommends {}
    LLVM_PREFIX={LLVM_PREFIX} cargo install bpf-linker --version {BPF_LINKER_VERSION} \
     --locked --no-default-features --features llvm-{LLVM}

  anywhere, with rustup (and an LLVM for bpf-linker, see its README):
    rustup toolchain install nightly --component rust-src
    cargo install bpf-linker

then run the command again",
        packages.join(" ")
    ))
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts as apt 2.6 prints them.
    #[test]
    fn reads_apt_policy() {
        let known = "llvm-22-dev:\n  Installed: (none)\n  Candidate: 1:22.1.8-1\n";
        let mentioned = "foo:\n  Installed: (none)\n  Candidate: (none)\n  Version table:\n";
        assert!(has_candidate(known));
        assert!(!has_candidate(mentioned));
        assert!(!has_candidate(""));
    }

    /// A rustc that is not there is no way to build.
    #[test]
    fn absent_rustc_has_no_core() {
        assert_eq!(core_of(Path::new("/nonexistent/rustc")), None);
    }

    /// Who cannot be helped gets both ways in full.
    #[test]
    fn instructions_name_both_ways() {
        let text = by_hand("this is a test").to_string();
        for needed in [
            "this is a test",
            "rustc-web",
            "bpf-linker --version 0.13.0",
            "rust-src",
        ] {
            assert!(text.contains(needed), "{needed} is not in: {text}");
        }
    }
}
