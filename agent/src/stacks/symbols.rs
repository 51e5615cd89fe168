//! Names for code: function, file and line by blazesym, demangled, with inlined functions.
//!
//! Never a guess: a name stands only where a symbol says how far its function reaches and the address
//! lies within. A symbol without a size would give its name to whatever follows it, such as static
//! functions of a stripped library. Where there is no such symbol, module and offset stand for
//! themselves.
//!
//! A stripped file's names are looked for in separate debug files ([`debugfile`]), and with a server
//! of debug files only where one is configured ([`debuginfod`]).

pub mod debugfile;
pub mod debuginfod;

use std::path::{Path, PathBuf};

use blazesym::symbolize::source::{Elf, Source};
use blazesym::symbolize::{CodeInfo, Input, Sym, Symbolized, Symbolizer};

use crate::Map;
use crate::spool::rows::{FrameKind, FrameRow};
use debugfile::Facts;

/// Where names come from.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Read DWARF, for inlined functions, files and lines.
    pub debug_symbols: bool,
    /// Folders with separate debug files.
    pub folders: Vec<PathBuf>,
    /// A server of debug files; none is asked unless configured.
    pub debuginfod: Option<debuginfod::Options>,
}

/// A file with code, for whoever finds names on another thread.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Code {
    /// Path as the process sees it.
    pub path: String,
    /// Hexadecimal.
    pub build_id: Option<String>,
    /// A path that opens this very file; `None` if nothing does any more.
    pub open_path: Option<PathBuf>,
}

impl Code {
    /// What is known of an address without any name.
    pub fn bare(&self, offset: u64) -> FrameRow {
        FrameRow {
            module: Some(self.path.clone()),
            build_id: self.build_id.clone(),
            offset: Some(offset as i64),
            ..FrameRow::default()
        }
    }
}

/// Finds names.
pub struct Names {
    symbolizer: Symbolizer,
    options: Options,
    files: Map<PathBuf, Option<File>>,
}

/// What is known of a file with code.
struct File {
    facts: Facts,
    /// Where its symbols are besides in itself.
    debug_file: Option<PathBuf>,
}

impl Names {
    pub fn new(options: Options) -> Self {
        let symbolizer = Symbolizer::builder()
            .enable_code_info(options.debug_symbols)
            .enable_inlined_fns(options.debug_symbols)
            // Debug files are found, and checked, before they get there.
            .set_debug_dirs(Some(std::iter::empty::<&Path>()))
            .build();
        Self {
            symbolizer,
            options,
            files: Map::default(),
        }
    }

    /// The build id of the file that a server of debug files may have: one whose symbols are nowhere
    /// on this host.
    pub fn wanted(&mut self, code: &Code) -> Option<String> {
        self.options.debuginfod.as_ref()?;
        let debug_symbols = self.options.debug_symbols;
        let file = self.file(code)?;
        let has_all = if debug_symbols {
            file.facts.has_debug_info
        } else {
            file.facts.has_symbols
        };
        (!has_all && file.debug_file.is_none())
            .then(|| code.build_id.clone())
            .flatten()
    }

    /// A server gave a file's debug file.
    pub fn fetched(&mut self, code: &Code, debug_file: &Path) {
        let Some(open_path) = &code.open_path else {
            return;
        };
        if let Some(Some(file)) = self.files.get_mut(open_path) {
            file.debug_file = Some(debug_file.to_path_buf());
        }
    }

    fn file(&mut self, code: &Code) -> Option<&File> {
        let open_path = code.open_path.as_ref()?;
        let options = &self.options;
        let file = self.files.entry(open_path.clone()).or_insert_with(|| {
            let facts = Facts::read(open_path)?;
            let is_enough = if options.debug_symbols {
                facts.has_debug_info
            } else {
                facts.has_symbols
            };
            let debug_file = (!is_enough)
                .then(|| debugfile::find(&facts, Path::new(&code.path), &options.folders))
                .flatten();
            Some(File { facts, debug_file })
        });
        file.as_ref()
    }

    /// The frames of one return address, innermost first: more than one where functions were
    /// inlined.
    pub fn frames(&mut self, code: &Code, offset: u64) -> Vec<FrameRow> {
        let bare = code.bare(offset);
        // The call is before its return address.
        let called_from = offset.saturating_sub(1);
        let Some(file) = self.file(code) else {
            return vec![bare];
        };
        let Some(address) = file.facts.address_of(called_from) else {
            return vec![bare];
        };
        let debug_file = file.debug_file.clone();
        let has_debug_info = file.facts.has_debug_info;
        let debug_symbols = self.options.debug_symbols;
        // Its own symbols last: a stripped library's dynamic ones do not know what was inlined.
        debug_file
            .and_then(|path| {
                self.ask(&path, debug_symbols, address, &bare)
                    .or_else(|| self.ask(&path, false, address, &bare))
            })
            .or_else(|| {
                let path = code.open_path.as_deref()?;
                (debug_symbols && has_debug_info)
                    .then(|| self.ask(path, true, address, &bare))
                    .flatten()
                    .or_else(|| self.ask(path, false, address, &bare))
            })
            .unwrap_or_else(|| vec![bare])
    }

    fn ask(
        &self,
        path: &Path,
        debug_symbols: bool,
        address: u64,
        bare: &FrameRow,
    ) -> Option<Vec<FrameRow>> {
        let mut elf = Elf::new(path);
        elf.debug_syms = debug_symbols;
        let input = Input::VirtOffset(address);
        match self.symbolizer.symbolize_single(&Source::Elf(elf), input) {
            Ok(Symbolized::Sym(symbol)) => frames_of(&symbol, bare),
            _ => None,
        }
    }
}

fn frames_of(symbol: &Sym<'_>, bare: &FrameRow) -> Option<Vec<FrameRow>> {
    // Whose end nobody knows, may be over by now.
    let end = symbol.size? as u64;
    if symbol.offset as u64 >= end && symbol.inlined.is_empty() && symbol.code_info.is_none() {
        return None;
    }
    let named = |function: &str, kind, code: Option<&CodeInfo<'_>>| FrameRow {
        kind,
        function: Some(function.to_string()),
        file: code.map(|code| code.to_path().to_string_lossy().into_owned()),
        line: code.and_then(|code| code.line).map(|line| line as i32),
        ..bare.clone()
    };
    // blazesym lists inlined functions outermost first.
    let inlined = symbol
        .inlined
        .iter()
        .rev()
        .map(|inner| named(&inner.name, FrameKind::Inlined, inner.code_info.as_ref()));
    let outer = named(&symbol.name, FrameKind::Native, symbol.code_info.as_deref());
    Some(inlined.chain([outer]).collect())
}

/// The probed function itself: its frame is gone when the probe runs at its return.
pub fn probed_function(symbol: &str) -> FrameRow {
    FrameRow {
        function: Some(symbol.to_string()),
        ..FrameRow::default()
    }
}

/// `main;load_weights;cudaMalloc`: outermost first, a frame without a name as `module+0xoffset`.
pub fn folded(frames: &[FrameRow]) -> String {
    let name = |frame: &FrameRow| match (&frame.function, &frame.module, frame.offset) {
        // A semicolon in a name would split it.
        (Some(function), Some(module), _) if frame.kind == FrameKind::Python => {
            let file = module.rsplit('/').next().unwrap_or(module);
            let line = frame.line.map_or(String::new(), |line| format!(":{line}"));
            format!("{function} ({file}{line})").replace(';', ":")
        }
        (Some(function), _, _) => function.replace(';', ":"),
        (None, Some(module), Some(offset)) => {
            format!(
                "{}+{offset:#x}",
                module.rsplit('/').next().unwrap_or(module)
            )
        }
        _ => "?".to_string(),
    };
    frames.iter().rev().map(name).collect::<Vec<_>>().join(";")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folded_stacks_are_outermost_first() {
        let frames = [
            probed_function("cudaMalloc"),
            FrameRow {
                module: Some("/opt/lib.so".into()),
                offset: Some(0x1f),
                ..FrameRow::default()
            },
            FrameRow {
                kind: FrameKind::Python,
                function: Some("Model.forward".into()),
                module: Some("/srv/app/model.py".into()),
                line: Some(12),
                ..FrameRow::default()
            },
            FrameRow {
                function: Some("main".into()),
                ..FrameRow::default()
            },
        ];
        assert_eq!(
            folded(&frames),
            "main;Model.forward (model.py:12);lib.so+0x1f;cudaMalloc"
        );
    }
}
