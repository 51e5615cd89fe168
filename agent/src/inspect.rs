//! What the agent would hook in a file: answers "why is this library not traced" without a
//! process, a GPU, or root.

use std::fmt::Write as _;
use std::fs::File;
use std::path::Path;

use anyhow::Context;
use object::ReadCache;
use serde::Serialize;

use crate::host::library::{self, Library, hooked_functions};
use crate::host::usdt::{self, Probe};
use crate::probes::hooks::{HOOKS, Layer};
use crate::probes::places;

/// One function that the agent knows.
#[derive(Debug, Serialize)]
pub struct Function {
    pub symbol: &'static str,
    pub layer: &'static str,
    /// Offset in the file.
    pub offset: u64,
}

/// What a file has.
#[derive(Debug, Serialize)]
pub struct Inspection {
    pub file: String,
    /// The layer its name stands for; `None` for a file that the agent does not look for by name.
    pub layer: Option<&'static str>,
    pub functions: Vec<Function>,
    /// Functions of its layer that the agent knows and the file does not export.
    pub missing: Vec<&'static str>,
    pub probes: Vec<Probe>,
    /// Places where a framework's allocator tells of itself.
    pub places: Vec<Told>,
    /// Such places that cannot be hooked, and why.
    pub refused: Vec<(&'static str, String)>,
}

/// A place that is hooked in a framework's library.
#[derive(Debug, Serialize)]
pub struct Told {
    pub symbol: &'static str,
    /// Offset in the file, where the probe goes.
    pub offset: u64,
    /// Offset of the counter that turns it on; 0 for none.
    pub counter: u64,
}

/// Looks into a file.
pub fn inspect(path: &Path) -> anyhow::Result<Inspection> {
    let display = path.to_string_lossy().into_owned();
    let file = File::open(path).with_context(|| format!("failed to open {display}"))?;
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    anyhow::ensure!(is_file, "{display} is not a file");
    let cache = ReadCache::new(file);
    let found = hooked_functions(&cache, true)
        .with_context(|| format!("{display} is not a 64-bit ELF file"))?;
    let probes = usdt::probes(&cache).with_context(|| format!("in the USDT notes of {display}"))?;
    let layer = library::layer_of(&display);
    let told = match Library::from_path(path) {
        Ok(library) if layer == Some(Layer::Framework) => places::find(&library)?,
        _ => places::Found::default(),
    };
    let missing = HOOKS
        .iter()
        .filter(|hook| Some(hook.layer) == layer)
        .filter(|hook| !found.iter().any(|(have, _)| have.symbol == hook.symbol))
        .map(|hook| hook.symbol)
        .collect();
    Ok(Inspection {
        file: display,
        layer: layer.map(|layer| layer.name()),
        functions: found
            .into_iter()
            .map(|(hook, offset)| Function {
                symbol: hook.symbol,
                layer: hook.layer.name(),
                offset,
            })
            .collect(),
        missing,
        probes,
        places: told
            .places
            .iter()
            .map(|place| Told {
                symbol: place.symbol,
                offset: place.offset,
                counter: place.counter,
            })
            .collect(),
        refused: told.refused,
    })
}

/// The printed form.
pub fn text(found: &Inspection) -> String {
    let mut text = String::new();
    let layer = found.layer.map_or_else(
        || "not a library that the agent looks for by name".to_string(),
        |layer| match layer {
            "framework" => "a framework's allocator".to_string(),
            layer => format!("CUDA {layer}"),
        },
    );
    let _ = writeln!(text, "{}: {layer}", found.file);
    let _ = writeln!(text, "  functions to hook  {}", found.functions.len());
    for function in &found.functions {
        let _ = writeln!(
            text,
            "    {:<40} {:<8} {:#x}",
            function.symbol, function.layer, function.offset
        );
    }
    if !found.missing.is_empty() {
        let _ = writeln!(text, "  not exported       {}", found.missing.join(", "));
    }
    if !found.places.is_empty() || !found.refused.is_empty() {
        let _ = writeln!(text, "  places to hook     {}", found.places.len());
    }
    for place in &found.places {
        let _ = writeln!(text, "    {:<40} {:#x}", place.symbol, place.offset);
    }
    for (symbol, reason) in &found.refused {
        let _ = writeln!(text, "    {symbol:<40} not hooked: {reason}");
    }
    let _ = writeln!(text, "  USDT probes        {}", found.probes.len());
    for probe in &found.probes {
        let name = format!("{}:{}", probe.provider, probe.name);
        let semaphore = probe
            .semaphore
            .map_or(String::new(), |at| format!("  semaphore {at:#x}"));
        let _ = writeln!(
            text,
            "    {name:<40} {:#x}  {}{semaphore}",
            probe.offset, probe.arguments
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_elf_file_says_so() {
        let error = format!("{:#}", inspect(Path::new("Cargo.toml")).unwrap_err());
        assert!(
            error.contains("Cargo.toml is not a 64-bit ELF file"),
            "{error}"
        );
        let error = format!("{:#}", inspect(Path::new("src")).unwrap_err());
        assert!(error.contains("src is not a file"), "{error}");
    }

    #[test]
    fn a_program_without_cuda_has_nothing_to_hook() {
        let own = std::env::current_exe().unwrap();
        let found = inspect(&own).unwrap();
        assert!(found.functions.is_empty() && found.layer.is_none());
        assert!(text(&found).contains("functions to hook  0"));
    }
}
