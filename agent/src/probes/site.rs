//! Where in a function a probe is cheap.
//!
//! A uprobe replaces an instruction. What the kernel cannot emulate it executes out of line, by
//! single-stepping, which costs tens of microseconds on virtual machines. The exported functions
//! of NVIDIA's driver library begin so: `cmpl $imm, flag(%rip); je …; jmp *target(%rip)` (all
//! 569 `cu…` functions of 535.261.03 that are stubs). The branch that follows is emulated, and
//! when it is reached nothing but the flags has changed: registers and stack are as at entry. So
//! the probe goes there.
//!
//! A function compiled for a shared library may begin with the load of an address into `%rax`,
//! which carries no argument, before it saves registers: `mov disp(%rip), %rax; push %r14`
//! (`c10::reportMemoryUsageToProfiler` of PyTorch 2.15.0). There the probe goes on the `push`.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileExt;

use super::attach::hooks_of;
use super::multi::Site;
use crate::host::library::Library;

/// Bytes of a function that [`displacement`] needs.
pub const PREFIX: usize = 12;

/// `cmpl $imm32, disp32(%rip)`: opcode, ModRM, displacement, immediate.
const COMPARE: [u8; 2] = [0x81, 0x3d];
const COMPARE_BYTES: usize = 10;
/// `je rel8`
const BRANCH: u8 = 0x74;
/// `mov disp32(%rip), %rax`: prefix, opcode, ModRM, displacement.
const LOAD: [u8; 3] = [0x48, 0x8b, 0x05];
const LOAD_BYTES: usize = 7;

/// `push %reg`, also with the prefix for the upper eight registers.
fn is_push(code: &[u8]) -> bool {
    match code {
        [0x50..=0x57, ..] => true,
        [0x41, second, ..] => matches!(second, 0x50..=0x57),
        _ => false,
    }
}

/// How many bytes after its start a function is best probed.
pub fn displacement(code: &[u8]) -> u64 {
    let guarded = code.starts_with(&COMPARE) && code.get(COMPARE_BYTES) == Some(&BRANCH);
    let loads = code.starts_with(&LOAD) && code.get(LOAD_BYTES..).is_some_and(is_push);
    match (guarded, loads) {
        (true, _) => COMPARE_BYTES as u64,
        (_, true) => LOAD_BYTES as u64,
        _ => 0,
    }
}

/// Where to probe, and names that are other names of code probed already.
pub(crate) struct Chosen {
    pub sites: Vec<(&'static str, Site)>,
    pub same_code: HashMap<&'static str, &'static str>,
}

/// One site for each function; of two names for the same code the first in the table, since two
/// probes there would see every call twice.
pub(crate) fn choose_sites(library: &Library, symbols: &HashMap<&'static str, u64>) -> Chosen {
    let file = fs::File::open(&library.open_path).ok();
    let mut chosen = Chosen {
        sites: Vec::new(),
        same_code: HashMap::new(),
    };
    let mut taken = HashMap::new();
    for (index, hook) in hooks_of(library.layer) {
        let Some(start) = symbols.get(hook.symbol) else {
            continue;
        };
        if let Some(twin) = taken.get(start) {
            chosen.same_code.insert(hook.symbol, *twin);
            continue;
        }
        taken.insert(*start, hook.symbol);
        let mut code = [0; PREFIX];
        let is_read = file
            .as_ref()
            .is_some_and(|file| file.read_exact_at(&mut code, *start).is_ok());
        let displacement = if is_read { displacement(&code) } else { 0 };
        let offset = start + displacement;
        let site = Site {
            offset,
            cookie: hook.cookie(index),
            counter: 0,
        };
        chosen.sites.push((hook.symbol, site));
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first bytes of cuMemAlloc_v2 in the driver 535.261.03, and of cudaMalloc in the
    /// runtime 13.5.
    #[test]
    fn guards_are_stepped_over() {
        let driver = [
            0x81, 0x3d, 0x3e, 0x35, 0x93, 0x01, 0x00, 0xba, 0x1c, 0x32, 0x74, 0x0c,
        ];
        assert_eq!(displacement(&driver), 10);
        let runtime = [
            0x55, 0x48, 0x89, 0xe5, 0x41, 0x57, 0x41, 0x56, 0, 0, 0x74, 0,
        ];
        assert_eq!(displacement(&runtime), 0);
        // c10::reportMemoryUsageToProfiler of PyTorch 2.15.0.
        let report = [
            0x48, 0x8b, 0x05, 0x91, 0x51, 0x0f, 0x00, 0x41, 0x56, 0x45, 0x89, 0xc6,
        ];
        assert_eq!(displacement(&report), 7);
        assert_eq!(displacement(&report[..8]), 0);
        assert_eq!(displacement(&driver[..10]), 0);
        assert_eq!(displacement(&[]), 0);
    }
}
