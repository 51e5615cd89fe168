//! Decodes ring records. The ring is written by our own programs only, but a pinned ring may
//! outlive the agent that made it, so nothing is assumed of the bytes.

use serde::{Deserialize, Serialize};
use vramscope_ebpf_abi::{
    Call, CallStack, EXTRA_WORDS, FLAG_CONTEXT, FLAG_DEVICE, FLAG_EXTRA, FLAG_OUT,
    FLAG_STACK_COPIED, FLAG_STACK_FULL, KIND_CALL, KIND_CALL_STACK, KIND_EXEC, KIND_EXIT,
    KIND_FRAMEWORK, Process, STACK_FRAMES,
};

use vramscope_ebpf_abi::python::{CALL_PYTHON, CALL_PYTHON_LOST};

use super::framework::Told;
use super::hooks::{HOOKS, Hook};

/// What a call's return addresses turned out to be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stack {
    pub id: Option<i64>,
    pub quality: Quality,
}

/// How much of a stack is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Quality {
    /// None was taken.
    #[default]
    None,
    /// All frames up to the thread's first, by the rules that compilers write for unwinding.
    Full,
    /// By frame pointers, at least in part: callers that keep none may be missing.
    FramePointer,
    /// The outermost frames are missing, or some lie in no known module.
    Truncated,
    /// No frame lies in a known module.
    Unresolved,
    /// The same four with Python frames in them, and with such that could not be read.
    FramePointerPython,
    FramePointerNoPython,
    TruncatedPython,
    TruncatedNoPython,
    UnresolvedPython,
    UnresolvedNoPython,
    FullPython,
    FullNoPython,
}

impl Quality {
    /// The value of `alloc_events.stack_quality`.
    pub const fn name(self) -> &'static str {
        match self {
            Quality::None => "none",
            Quality::Full => "full",
            Quality::FramePointer => "frame_pointer",
            Quality::Truncated => "truncated",
            Quality::Unresolved => "unresolved",
            Quality::FramePointerPython => "frame_pointer+python",
            Quality::FramePointerNoPython => "frame_pointer-python",
            Quality::TruncatedPython => "truncated+python",
            Quality::TruncatedNoPython => "truncated-python",
            Quality::UnresolvedPython => "unresolved+python",
            Quality::UnresolvedNoPython => "unresolved-python",
            Quality::FullPython => "full+python",
            Quality::FullNoPython => "full-python",
        }
    }

    /// The same of a stack with an interpreter in it, whose frames were read or not.
    pub const fn with_python(self, read: bool) -> Self {
        match (self, read) {
            (Quality::FramePointer, true) => Quality::FramePointerPython,
            (Quality::FramePointer, false) => Quality::FramePointerNoPython,
            (Quality::Truncated, true) => Quality::TruncatedPython,
            (Quality::Truncated, false) => Quality::TruncatedNoPython,
            (Quality::Unresolved, true) => Quality::UnresolvedPython,
            (Quality::Unresolved, false) => Quality::UnresolvedNoPython,
            (Quality::Full, true) => Quality::FullPython,
            (Quality::Full, false) => Quality::FullNoPython,
            (other, _) => other,
        }
    }
}

/// One finished call, whatever source saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedCall {
    /// Row of the hook table.
    pub hook: u16,
    pub tgid: u32,
    pub tid: u32,
    /// When the call took effect, in the host's order.
    pub seq: u64,
    /// CLOCK_MONOTONIC nanoseconds.
    pub enter_ns: u64,
    pub exit_ns: u64,
    /// `enter_ns` of the enclosing recorded call of this thread.
    pub parent_enter_ns: Option<u64>,
    pub args: [u64; 6],
    /// What an argument pointed to, where the hook asks for it and it could be read.
    pub extra: Option<[u64; EXTRA_WORDS]>,
    /// What the out-pointer held at return; `None` if it was not read or could not be.
    pub out: Option<u64>,
    pub context: Option<u64>,
    /// Device the thread chose through the runtime.
    pub device: Option<i32>,
    pub result: i32,
    /// Of the outermost call of a chain; filled in when the record arrives, while the process
    /// can still be asked.
    pub stack: Stack,
}

impl TracedCall {
    /// The hook table's row.
    pub fn hook(&self) -> &'static Hook {
        &HOOKS[self.hook as usize]
    }

    /// When the call took effect, CLOCK_MONOTONIC nanoseconds.
    pub fn effect_ns(&self) -> u64 {
        if self.hook().effect.at_entry() {
            self.enter_ns
        } else {
            self.exit_ns
        }
    }
}

/// What the ring delivers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    Call(TracedCall),
    /// What a framework's allocator told.
    Framework(Told),
    Exec {
        tgid: u32,
        seq: u64,
        at_ns: u64,
    },
    Exit {
        tgid: u32,
        seq: u64,
        at_ns: u64,
    },
}

impl Event {
    pub fn seq(&self) -> u64 {
        match self {
            Event::Call(call) => call.seq,
            Event::Framework(told) => told.seq,
            Event::Exec { seq, .. } | Event::Exit { seq, .. } => *seq,
        }
    }

    /// When it took effect, CLOCK_MONOTONIC nanoseconds.
    pub fn effect_ns(&self) -> u64 {
        match self {
            Event::Call(call) => call.effect_ns(),
            Event::Framework(told) => told.at_ns,
            Event::Exec { at_ns, .. } | Event::Exit { at_ns, .. } => *at_ns,
        }
    }

    pub fn tgid(&self) -> u32 {
        match self {
            Event::Call(call) => call.tgid,
            Event::Framework(told) => told.tgid,
            Event::Exec { tgid, .. } | Event::Exit { tgid, .. } => *tgid,
        }
    }
}

/// A record that no version of this agent can have written.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DecodeError {
    #[error("record of {0} bytes is too short for its kind {1}")]
    Short(usize, u32),
    #[error("unknown record kind {0}")]
    Kind(u32),
    #[error("unknown event {0} of a framework")]
    Framework(u32),
    #[error("hook {0} is not in the table of {len} rows", len = HOOKS.len())]
    Hook(u32),
}

/// A record and what lies behind it.
#[derive(Debug, PartialEq, Eq)]
pub struct Decoded<'a> {
    pub event: Event,
    /// The call's return addresses, innermost first, eight bytes each.
    pub frames: &'a [u8],
    /// There were more of them.
    pub cut: bool,
    /// Registers and stack were copied ([`super::copies`]), and of the return addresses only the
    /// first is here.
    pub copied: bool,
    /// What the kernel side did about Python frames.
    pub python: PythonOf,
}

/// What the kernel side did about a call's Python frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PythonOf {
    /// Nothing: the thread runs no Python, or nobody looked.
    #[default]
    None,
    /// They were sent, right before.
    Sent,
    /// There are some, and they could not be sent.
    Lost,
}

impl PythonOf {
    pub(super) fn of(flags: u32) -> Self {
        match flags & (CALL_PYTHON | CALL_PYTHON_LOST) {
            0 => Self::None,
            CALL_PYTHON => Self::Sent,
            _ => Self::Lost,
        }
    }
}

/// Decodes one record.
pub fn decode(bytes: &[u8]) -> Result<Decoded<'_>, DecodeError> {
    let alone = |event| Decoded {
        event,
        python: PythonOf::None,
        frames: &[],
        cut: false,
        copied: false,
    };
    let kind = word(bytes, 0).ok_or(DecodeError::Short(bytes.len(), 0))?;
    let wanted = match kind {
        KIND_CALL => size_of::<Call>(),
        // As many words follow as the call has frames.
        KIND_CALL_STACK => {
            let at = core::mem::offset_of!(Call, frames);
            let frames = word(bytes, at).ok_or(DecodeError::Short(bytes.len(), kind))? as usize;
            size_of::<Call>() + 8 * frames.min(STACK_FRAMES)
        }
        KIND_FRAMEWORK => return super::framework::decode(bytes),
        KIND_EXEC | KIND_EXIT => size_of::<Process>(),
        other => return Err(DecodeError::Kind(other)),
    };
    if bytes.len() < wanted {
        return Err(DecodeError::Short(bytes.len(), kind));
    }
    let word = |offset| word(bytes, offset).unwrap_or_default();
    let long = |offset| u64::from(word(offset)) | u64::from(word(offset + 4)) << 32;
    let tgid = word(
        4 + if kind == KIND_CALL || kind == KIND_CALL_STACK {
            4
        } else {
            0
        },
    );
    match kind {
        KIND_EXEC => {
            let event = Event::Exec {
                tgid,
                seq: long(8),
                at_ns: long(16),
            };
            return Ok(alone(event));
        }
        KIND_EXIT => {
            let event = Event::Exit {
                tgid,
                seq: long(8),
                at_ns: long(16),
            };
            return Ok(alone(event));
        }
        _ => {}
    }
    let hook = word(4);
    if hook as usize >= HOOKS.len() {
        return Err(DecodeError::Hook(hook));
    }
    let flags = word(core::mem::offset_of!(Call, flags));
    let flagged = |flag: u32| flags & flag != 0;
    let parent = long(core::mem::offset_of!(Call, parent_enter_ns));
    let args = core::mem::offset_of!(Call, args);
    let extra = core::mem::offset_of!(Call, extra);
    let count = (word(core::mem::offset_of!(Call, frames)) as usize).min(STACK_FRAMES);
    let stack_at = core::mem::offset_of!(CallStack, stack);
    let frames = if kind == KIND_CALL_STACK {
        bytes
            .get(stack_at..stack_at + 8 * count)
            .unwrap_or_default()
    } else {
        &[]
    };
    let call = TracedCall {
        hook: hook as u16,
        tgid,
        tid: word(core::mem::offset_of!(Call, tid)),
        seq: long(core::mem::offset_of!(Call, seq)),
        enter_ns: long(core::mem::offset_of!(Call, enter_ns)),
        exit_ns: long(core::mem::offset_of!(Call, exit_ns)),
        parent_enter_ns: (parent != 0).then_some(parent),
        args: core::array::from_fn(|i| long(args + 8 * i)),
        extra: flagged(FLAG_EXTRA).then(|| core::array::from_fn(|i| long(extra + 8 * i))),
        out: flagged(FLAG_OUT).then(|| long(core::mem::offset_of!(Call, out))),
        context: flagged(FLAG_CONTEXT).then(|| long(core::mem::offset_of!(Call, context))),
        device: flagged(FLAG_DEVICE).then(|| word(core::mem::offset_of!(Call, device)) as i32),
        result: word(core::mem::offset_of!(Call, result)) as i32,
        stack: Stack::default(),
    };
    Ok(Decoded {
        python: PythonOf::of(flags),
        event: Event::Call(call),
        frames,
        cut: flagged(FLAG_STACK_FULL),
        copied: flagged(FLAG_STACK_COPIED),
    })
}

pub(super) fn long(bytes: &[u8], offset: usize) -> Option<u64> {
    let bytes = bytes.get(offset..offset.checked_add(8)?)?;
    // Eight bytes, since the range has as many.
    Some(u64::from_ne_bytes(bytes.try_into().unwrap()))
}

pub(super) fn word(bytes: &[u8], offset: usize) -> Option<u32> {
    let bytes = bytes.get(offset..offset + 4)?;
    Some(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_of<T: Copy>(value: &T) -> Vec<u8> {
        // SAFETY: the records have no padding (checked in the abi crate), so every byte is
        // initialised.
        unsafe {
            std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>())
        }
        .to_vec()
    }

    fn sample() -> Call {
        Call {
            kind: KIND_CALL_STACK,
            hook: 6,
            tgid: 10,
            tid: 11,
            seq: 1 << 40,
            enter_ns: 100,
            exit_ns: 200,
            parent_enter_ns: 0,
            args: [1, 2, 3, 4, 5, u64::MAX],
            extra: [9, 8, 7, 6],
            out: 0xdead_beef_0000,
            context: 7,
            device: -1,
            result: 2,
            flags: FLAG_OUT | FLAG_DEVICE | FLAG_EXTRA,
            frames: 2,
        }
    }

    #[test]
    fn a_call_comes_back_as_it_was_written() {
        let mut stack = [0; STACK_FRAMES];
        stack[..2].copy_from_slice(&[0x1000, 0x2000]);
        let record = bytes_of(&CallStack {
            call: sample(),
            stack,
        });
        let Decoded {
            event: Event::Call(call),
            frames,
            cut: false,
            python: PythonOf::None,
            copied: false,
        } = decode(&record).unwrap()
        else {
            panic!("not a call with a whole stack")
        };
        assert_eq!(
            frames,
            [0x1000u64.to_ne_bytes(), 0x2000u64.to_ne_bytes()].concat()
        );
        // The kernel side sends as much as there is.
        let shortest = &record[..size_of::<Call>() + 16];
        assert_eq!(decode(shortest).unwrap().frames, frames);
        let short = &record[..size_of::<Call>() + 15];
        assert_eq!(
            decode(short),
            Err(DecodeError::Short(short.len(), KIND_CALL_STACK))
        );
        assert_eq!(call.extra, Some([9, 8, 7, 6]));
        assert_eq!(
            (call.hook, call.tgid, call.tid, call.seq),
            (6, 10, 11, 1 << 40)
        );
        assert_eq!(call.args, [1, 2, 3, 4, 5, u64::MAX]);
        assert_eq!(
            (call.out, call.context, call.device),
            (Some(0xdead_beef_0000), None, Some(-1))
        );
        assert_eq!((call.result, call.parent_enter_ns), (2, None));
    }

    #[test]
    fn strange_records_are_refused() {
        assert_eq!(decode(&[1, 0]), Err(DecodeError::Short(2, 0)));
        assert_eq!(decode(&[99, 0, 0, 0]), Err(DecodeError::Kind(99)));
        let mut call = sample();
        call.kind = KIND_CALL;
        call.hook = 60_000;
        assert_eq!(decode(&bytes_of(&call)), Err(DecodeError::Hook(60_000)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..800)) {
            let _ = decode(&bytes);
        }
    }
}
