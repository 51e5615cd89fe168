//! Embeds the BPF object that `cargo xtask ebpf` built. Without it the agent still builds, and
//! says at run time what is missing.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-env-changed=VRAMSCOPE_BPF_OBJECT");
    // Cargo sets OUT_DIR for every build script.
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let object =
        env::var_os("VRAMSCOPE_BPF_OBJECT").map_or_else(|| default_object(&out), PathBuf::from);
    println!("cargo:rerun-if-changed={}", object.display());
    let bytes = fs::read(&object).unwrap_or_default();
    fs::write(out.join("vramscope.bpf.o"), bytes)
}

/// `TARGET/ebpf/vramscope.bpf.o`, where OUT_DIR is `TARGET/PROFILE/build/CRATE-HASH/out`.
fn default_object(out: &Path) -> PathBuf {
    let target = out.ancestors().nth(4).unwrap_or(out);
    target.join("ebpf/vramscope.bpf.o")
}
