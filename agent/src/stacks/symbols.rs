//! Names for code: function, file and line by blazesym, demangled, with inlined functions.
//! Where there is no symbol, the module and offset stand for themselves; never a guess.

use blazesym::symbolize::source::{Elf, Source};
use blazesym::symbolize::{CodeInfo, Input, Symbolized, Symbolizer};

use super::modules::Module;
use crate::spool::rows::{FrameKind, FrameRow};

/// Finds names.
pub struct Names {
    symbolizer: Symbolizer,
    debug_symbols: bool,
}

impl Names {
    pub fn new(debug_symbols: bool) -> Self {
        let symbolizer = Symbolizer::builder()
            .enable_code_info(debug_symbols)
            .enable_inlined_fns(debug_symbols)
            .build();
        Self {
            symbolizer,
            debug_symbols,
        }
    }

    /// The frames of one return address, innermost first: more than one where functions were
    /// inlined.
    pub fn frames(&self, module: &Module, offset: u64) -> Vec<FrameRow> {
        let bare = FrameRow {
            module: Some(module.path.clone()),
            build_id: module.build_id.clone(),
            offset: Some(offset as i64),
            ..FrameRow::default()
        };
        let Some(path) = module.open_path() else {
            return vec![bare];
        };
        let mut elf = Elf::new(path);
        elf.debug_syms = self.debug_symbols;
        // The call is before its return address.
        let input = Input::FileOffset(offset.saturating_sub(1));
        let Ok(Symbolized::Sym(symbol)) =
            self.symbolizer.symbolize_single(&Source::Elf(elf), input)
        else {
            return vec![bare];
        };
        let named = |function: &str, code: Option<&CodeInfo<'_>>| FrameRow {
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
            .map(|inner| named(&inner.name, inner.code_info.as_ref()));
        inlined
            .chain([named(&symbol.name, symbol.code_info.as_deref())])
            .collect()
    }
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
