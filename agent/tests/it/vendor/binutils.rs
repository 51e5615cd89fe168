//! What binutils say of a library: a reader of ELF files that is none of ours.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use super::cache::aloud;

/// Whether they are installed; it is said aloud if not.
pub fn present() -> bool {
    let is_missing = |tool: &&str| Command::new(tool).arg("--version").output().is_err();
    let missing = ["nm", "readelf", "objdump"].into_iter().find(is_missing);
    if let Some(tool) = missing {
        aloud(&format!("no {tool} here (binutils)"));
    }
    missing.is_none()
}

fn lines(tool: &str, arguments: &[&str], file: &Path) -> Vec<String> {
    let output = Command::new(tool)
        .args(arguments)
        .arg(file)
        .env("LC_ALL", "C")
        .output()
        .unwrap();
    assert!(output.status.success(), "{tool} {}", file.display());
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(str::to_string).collect()
}

fn hex(text: &str) -> u64 {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()
}

/// Functions that a library exports, by name without the version, and their addresses.
pub fn exports(library: &Path) -> BTreeMap<String, u64> {
    let lines = lines("nm", &["-D", "--defined-only"], library);
    lines
        .iter()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [address, "T" | "W" | "i", name] = words[..] else {
                return None;
            };
            let name = name.split('@').next()?;
            Some((name.to_string(), hex(address)))
        })
        .collect()
}

/// Where in the file an address is.
pub fn file_offset(library: &Path, address: u64) -> u64 {
    // Type, Offset, VirtAddr, PhysAddr, FileSiz
    let lines = lines("readelf", &["-lW"], library);
    let found = lines.iter().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["LOAD", offset, start, _, size, ..] = words[..] else {
            return None;
        };
        let into = address.checked_sub(hex(start))?;
        (into < hex(size)).then(|| hex(offset) + into)
    });
    found.unwrap()
}

/// The first instructions of a function: how far from its start, and their names.
pub fn instructions(library: &Path, address: u64) -> Vec<(u64, String)> {
    let range = [
        format!("--start-address={address:#x}"),
        format!("--stop-address={:#x}", address + 16),
    ];
    let arguments = ["-d", "--no-show-raw-insn", &range[0], &range[1]];
    let lines = lines("objdump", &arguments, library);
    lines
        .iter()
        .filter_map(|line| {
            let (at, code) = line.split_once(":\t")?;
            let at = u64::from_str_radix(at.trim(), 16).ok()?;
            let name = code.split_whitespace().next()?;
            Some((at - address, name.to_string()))
        })
        .collect()
}
