//! Events of a framework's allocator as the ring delivers them.
//!
//! PyTorch's allocator reports a block from inside its lock, and its USDT probe adds right after,
//! on the same thread, what was asked for: two records, one event. [`super::order`] puts them
//! together.

use serde::{Deserialize, Serialize};
use vramscope_ebpf_abi::STACK_FRAMES;
use vramscope_ebpf_abi::framework::{
    self as abi, FLAG_ANNOUNCED, FLAG_COPIED, FLAG_PAIRED, FLAG_STACK_CUT,
};

use super::record::{DecodeError, Decoded, Event, PythonOf, Stack, word};

/// Names of the probed places: `coverage.symbol`, `alloc_events.api`.
pub const MALLOC: &str = "pytorch:malloc";
pub const FREE: &str = "pytorch:free";
pub const REPORT: &str = "c10::reportMemoryUsageToProfiler";
pub const OOM: &str = "c10::reportOutOfMemoryToProfiler";

/// What an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// A block was handed out (`bytes` > 0) or taken back (< 0).
    Report,
    /// What the report with the same `seq` lacks.
    Rest,
    /// A block was handed out that no report told of.
    Malloc,
    /// A block is being taken back; a report may tell of it as well.
    Free,
    /// A request failed.
    Oom,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    pub what: What,
    pub tgid: u32,
    pub tid: u32,
    /// When it took effect, in the host's order.
    pub seq: u64,
    /// CLOCK_MONOTONIC nanoseconds.
    pub at_ns: u64,
    pub address: u64,
    /// Of a report the block's, negative when it was taken back; of an OOM what could not be had.
    pub bytes: i64,
    /// Bytes the allocator has handed out, and holds, as it says.
    pub totals: Option<(u64, u64)>,
    pub device: Option<i32>,
    /// As asked for, and the framework's id of the stream.
    pub asked: Option<(u64, i64)>,
    /// A USDT probe told of it as well.
    pub announced: bool,
    pub stack: Stack,
}

impl Told {
    /// Whether a USDT probe may add to it.
    pub fn is_half(&self) -> bool {
        self.what == What::Report && self.bytes > 0 && self.asked.is_none()
    }

    /// Takes what another record of the same event adds.
    pub fn complete(&mut self, rest: &Told) {
        self.asked = rest.asked;
        self.announced = true;
    }

    /// The place that told.
    pub fn api(&self) -> &'static str {
        match (self.what, self.announced) {
            (What::Rest | What::Malloc, _) => MALLOC,
            (What::Free, _) => FREE,
            (What::Oom, _) => OOM,
            (What::Report, true) if self.bytes > 0 => MALLOC,
            (What::Report, true) => FREE,
            (What::Report, false) => REPORT,
        }
    }

    /// The function or place whose stack it has.
    pub fn probed(&self) -> &'static str {
        match self.what {
            What::Report => REPORT,
            _ => self.api(),
        }
    }
}

/// Decodes a record of [`vramscope_ebpf_abi::KIND_FRAMEWORK`].
pub fn decode(bytes: &[u8]) -> Result<Decoded<'_>, DecodeError> {
    let header = size_of::<abi::Told>();
    let short = DecodeError::Short(bytes.len(), vramscope_ebpf_abi::KIND_FRAMEWORK);
    if bytes.len() < header {
        return Err(short);
    }
    let word = |offset| word(bytes, offset).unwrap_or(0);
    let long = |offset: usize| u64::from(word(offset)) | u64::from(word(offset + 4)) << 32;
    macro_rules! at {
        ($field:ident) => {
            core::mem::offset_of!(abi::Told, $field)
        };
    }
    let count = (word(at!(frames)) as usize).min(STACK_FRAMES);
    let frames = bytes.get(header..header + 8 * count).ok_or(short)?;
    let flags = word(at!(flags));
    let what =
        abi::What::from_u32(word(at!(what))).ok_or(DecodeError::Framework(word(at!(what))))?;
    let (first, second) = (long(at!(first)), long(at!(second)));
    let size = long(at!(size)) as i64;
    let is_paired = flags & FLAG_PAIRED != 0;
    let device = word(at!(device)) as i32;
    let told = Told {
        what: match what {
            abi::What::Malloc if is_paired => What::Rest,
            abi::What::Malloc => What::Malloc,
            abi::What::Free => What::Free,
            abi::What::Report => What::Report,
            abi::What::Oom => What::Oom,
        },
        tgid: word(at!(tgid)),
        tid: word(at!(tid)),
        seq: long(at!(seq)),
        at_ns: long(at!(at_ns)),
        address: long(at!(address)),
        bytes: match what {
            abi::What::Report | abi::What::Oom => size,
            abi::What::Malloc | abi::What::Free => 0,
        },
        totals: matches!(what, abi::What::Report | abi::What::Oom).then_some((first, second)),
        device: (device >= 0).then_some(device),
        asked: (what == abi::What::Malloc).then_some((size as u64, first as i64)),
        announced: flags & FLAG_ANNOUNCED != 0,
        stack: Stack::default(),
    };
    Ok(Decoded {
        python: PythonOf::of(flags),
        event: Event::Framework(told),
        frames,
        cut: flags & FLAG_STACK_CUT != 0,
        copied: flags & FLAG_COPIED != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probes::record;

    fn bytes_of(told: abi::Told, frames: &[u64]) -> Vec<u8> {
        // SAFETY: the record has no padding (checked in the abi crate).
        let mut bytes = unsafe {
            std::slice::from_raw_parts(
                std::ptr::from_ref(&told).cast::<u8>(),
                size_of::<abi::Told>(),
            )
        }
        .to_vec();
        bytes.extend(frames.iter().flat_map(|frame| frame.to_ne_bytes()));
        bytes
    }

    fn sample(what: abi::What, flags: u32, frames: u32) -> abi::Told {
        abi::Told {
            kind: vramscope_ebpf_abi::KIND_FRAMEWORK,
            what: what as u32,
            tgid: 10,
            tid: 11,
            seq: 1 << 40,
            at_ns: 99,
            address: 0x7000_0000_0200,
            size: -512,
            first: 1 << 33,
            second: 2 << 33,
            device: 3,
            flags,
            frames,
            unused: 0,
        }
    }

    #[test]
    fn a_report_comes_back_as_it_was_written() {
        let bytes = bytes_of(
            sample(abi::What::Report, FLAG_ANNOUNCED, 2),
            &[0x1000, 0x2000],
        );
        let decoded = record::decode(&bytes).unwrap();
        assert_eq!(decoded.frames.len(), 16);
        let Event::Framework(told) = decoded.event else {
            panic!("not a framework's event")
        };
        assert_eq!(
            (told.what, told.bytes, told.totals, told.device),
            (What::Report, -512, Some((1 << 33, 2 << 33)), Some(3))
        );
        assert_eq!(
            (told.asked, told.api(), told.is_half()),
            (None, FREE, false)
        );
        let short = &bytes[..bytes.len() - 1];
        assert!(matches!(record::decode(short), Err(DecodeError::Short(..))));
    }

    #[test]
    fn a_probe_completes_its_report() {
        let mut report = sample(abi::What::Report, 0, 0);
        report.size = 1024;
        let Event::Framework(mut report) = record::decode(&bytes_of(report, &[])).unwrap().event
        else {
            panic!("not a framework's event")
        };
        assert!(report.is_half() && report.api() == REPORT);
        let mut malloc = sample(abi::What::Malloc, FLAG_PAIRED, 0);
        malloc.size = 1000;
        malloc.first = (-1i64) as u64;
        let Event::Framework(malloc) = record::decode(&bytes_of(malloc, &[])).unwrap().event else {
            panic!("not a framework's event")
        };
        assert_eq!((malloc.what, malloc.seq), (What::Rest, report.seq));
        report.complete(&malloc);
        assert_eq!((report.asked, report.api()), (Some((1000, -1)), MALLOC));
        assert!(!report.is_half());
    }

    #[test]
    fn strange_events_are_refused() {
        let mut told = sample(abi::What::Oom, 0, 0);
        told.what = 9;
        let bytes = bytes_of(told, &[]);
        assert_eq!(record::decode(&bytes), Err(DecodeError::Framework(9)));
    }
}
