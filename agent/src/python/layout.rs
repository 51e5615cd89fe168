//! Where CPython keeps what frames are read from, by version.
//!
//! What an interpreter says of itself wins: `_Py_DebugOffsets` at the start of `_PyRuntime` (3.13),
//! the members of `PyCode_Type` (all versions), the code of `PyGILState_GetThisThreadState` for the
//! key. The rest is from CPython's headers for x86-64, each line naming its structure. A code object
//! whose members lie elsewhere than the table says is of a build we do not know (with debugging of
//! references, for example), whose other offsets are unknown as well: it is refused.

use vramscope_ebpf_abi::python::{
    ENTRY_EVERY, ENTRY_FLAG, ENTRY_SHIM, Interpreter, NO_CFRAME, SPAN,
};

/// Minor versions that are read.
pub const OLDEST: u32 = 10;
pub const NEWEST: u32 = 13;

/// Offsets of a code object's members as `PyCode_Type` has them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Members {
    pub file: Option<u32>,
    pub name: Option<u32>,
    pub qualified_name: Option<u32>,
    pub table: Option<u32>,
    pub first_line: Option<u32>,
}

/// Offsets as they are in the whole structures.
struct Offsets {
    /// `autoTSSkey` in `_PyRuntime`.
    key: u32,
    interpreters: u32,
    next_interpreter: u32,
    first_thread: u32,
    next_thread: u32,
    thread_id: u32,
    thread_frame: u32,
    cframe_frame: u32,
    frame_code: u32,
    frame_previous: u32,
    frame_instruction: u32,
    frame_entry: u32,
    entry: u32,
    file: u32,
    /// `co_name`.
    plain_name: u32,
    /// What is shown: `co_qualname`, which 3.10 has not.
    name: u32,
    table: u32,
    first_line: u32,
    /// The word that makes the fingerprint beside the table's address.
    print: u32,
    /// Whether the name's hash does as well.
    print_name: bool,
    body: u32,
    ascii: u32,
    compact: u32,
}

/// `PyThreadState`, `PyFrameObject`, `PyCodeObject` of 3.10.
const V10: Offsets = Offsets {
    key: 0x248,
    interpreters: 0x20,
    next_interpreter: 0,
    first_thread: 8,
    next_thread: 8,
    thread_id: 176,
    thread_frame: 24,
    cframe_frame: NO_CFRAME,
    frame_code: 32,
    frame_previous: 24,
    frame_instruction: 96,
    frame_entry: 104,
    entry: ENTRY_EVERY,
    file: 104,
    plain_name: 112,
    name: 112,
    table: 120,
    first_line: 40,
    print: 40,
    print_name: true,
    body: 0,
    ascii: 48,
    compact: 72,
};

/// `PyThreadState`, `_PyCFrame`, `_PyInterpreterFrame`, `PyCodeObject` of 3.11.
const V11: Offsets = Offsets {
    key: 0x250,
    interpreters: 0x28,
    next_interpreter: 0,
    first_thread: 0x10,
    next_thread: 8,
    thread_id: 152,
    thread_frame: 56,
    cframe_frame: 8,
    frame_code: 32,
    frame_previous: 48,
    frame_instruction: 56,
    frame_entry: 68,
    entry: ENTRY_FLAG,
    file: 112,
    plain_name: 120,
    name: 128,
    table: 136,
    first_line: 72,
    print: 72,
    print_name: true,
    body: 184,
    ascii: 48,
    compact: 72,
};

/// The same of 3.12.
const V12: Offsets = Offsets {
    key: 0x608,
    interpreters: 0x28,
    next_interpreter: 0,
    first_thread: 0x48,
    next_thread: 8,
    thread_id: 136,
    thread_frame: 56,
    cframe_frame: 0,
    frame_code: 0,
    frame_previous: 8,
    frame_instruction: 56,
    frame_entry: 70,
    entry: ENTRY_SHIM,
    file: 112,
    plain_name: 120,
    name: 128,
    table: 136,
    first_line: 68,
    // `co_version` is its upper half.
    print: 88,
    print_name: false,
    body: 192,
    ascii: 40,
    compact: 56,
};

/// Bytes of `_Py_DebugOffsets` of 3.13.
pub const DEBUG_OFFSETS: usize = 584;

/// `_Py_DebugOffsets` of 3.13 (`Include/internal/pycore_runtime.h`): 64-bit words, the first a mark.
/// What it does not tell (the key, `co_version`, the longer header of strings) is from the headers.
fn v13(words: &[u8]) -> Result<Offsets, String> {
    let word = |at: usize| -> Result<u32, String> {
        let bytes = words
            .get(at..at + 8)
            .ok_or("its debug offsets are cut short")?;
        let value = u64::from_le_bytes([
            bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
        ]);
        u32::try_from(value)
            .ok()
            .filter(|value| *value < 1 << 20)
            .ok_or_else(|| format!("its debug offsets hold {value} at {at}"))
    };
    if words.get(..8) != Some(b"xdebugpy") {
        return Err("it has no debug offsets".into());
    }
    if word(16)? != 0 {
        return Err("it is built without a GIL (free-threaded)".into());
    }
    Ok(Offsets {
        key: 0x870,
        interpreters: word(40)?,
        next_interpreter: word(64)?,
        first_thread: word(72)?,
        next_thread: word(168)?,
        thread_frame: word(184)?,
        thread_id: word(192)?,
        cframe_frame: NO_CFRAME,
        frame_previous: word(232)?,
        frame_code: word(240)?,
        frame_instruction: word(248)?,
        frame_entry: word(264)?,
        entry: ENTRY_SHIM,
        file: word(280)?,
        plain_name: word(288)?,
        name: word(296)?,
        table: word(304)?,
        first_line: word(312)?,
        print: 88,
        print_name: false,
        body: word(344)?,
        ascii: word(560)?,
        compact: 56,
    })
}

/// The layout of one version, with offsets alone: addresses are the caller's to fill in, but that
/// `key` holds the key's offset in `_PyRuntime`. `debug`: the first [`DEBUG_OFFSETS`] bytes of
/// `_PyRuntime`. An error says why it is refused.
pub fn layout(version: u32, members: &Members, debug: &[u8]) -> Result<Interpreter, String> {
    let offsets = match version {
        10 => V10,
        11 => V11,
        12 => V12,
        13 => v13(debug)?,
        _ => {
            return Err(format!(
                "CPython 3.{version}: frames are read of 3.{OLDEST} to 3.{NEWEST}"
            ));
        }
    };
    for (member, told, known) in [
        ("co_filename", members.file, offsets.file),
        ("co_name", members.name, offsets.plain_name),
        ("co_linetable", members.table, offsets.table),
        ("co_firstlineno", members.first_line, offsets.first_line),
        (
            "co_qualname",
            members
                .qualified_name
                .or((version == 10).then_some(offsets.name)),
            offsets.name,
        ),
    ] {
        if told != Some(known) {
            let told = told.map_or("nowhere".into(), |at| format!("at {at}"));
            return Err(format!(
                "CPython 3.{version} of an unknown build: its code objects have {member} {told}, not at {known}"
            ));
        }
    }
    let frame = [
        offsets.frame_code,
        offsets.frame_previous,
        offsets.frame_instruction,
        offsets.frame_entry,
    ];
    let (frame_start, frame_bytes) = span(&frame)?;
    let name = offsets.print_name.then_some(offsets.plain_name);
    let print: Vec<u32> = [offsets.print, offsets.table]
        .into_iter()
        .chain(name)
        .collect();
    let (print_start, print_bytes) = span(&print)?;
    Ok(Interpreter {
        key: u64::from(offsets.key),
        version,
        first_interpreter: offsets.interpreters,
        next_interpreter: offsets.next_interpreter,
        first_thread: offsets.first_thread,
        next_thread: offsets.next_thread,
        thread_id: offsets.thread_id,
        thread_frame: offsets.thread_frame,
        cframe_frame: offsets.cframe_frame,
        frame_start,
        frame_bytes,
        frame_code: offsets.frame_code - frame_start,
        frame_previous: offsets.frame_previous - frame_start,
        frame_instruction: offsets.frame_instruction - frame_start,
        frame_entry: offsets.frame_entry - frame_start,
        entry: offsets.entry,
        print_start,
        print_bytes,
        print_first: offsets.print - print_start,
        print_table: offsets.table - print_start,
        print_name: name.map_or(0, |name| name - print_start),
        code_file: offsets.file,
        code_name: offsets.name,
        code_table: offsets.table,
        code_first_line: offsets.first_line,
        code_body: offsets.body,
        ascii: offsets.ascii,
        compact: offsets.compact,
        ..Interpreter::default()
    })
}

/// Start and length of what holds the words at all these offsets.
fn span(offsets: &[u32]) -> Result<(u32, u32), String> {
    let start = offsets.iter().min().copied().unwrap_or(0) & !7;
    let end = (offsets.iter().max().copied().unwrap_or(0) & !7) + 8;
    let bytes = end - start;
    // The kernel side's mask leaves room for one word less.
    if bytes as usize >= SPAN {
        return Err(format!("its structures are too large: {bytes} bytes"));
    }
    Ok((start, bytes))
}

/// Where `autoTSSkey` lies, from the code of `PyGILState_GetThisThreadState`, which hands its address
/// to `PyThread_tss_get`: the offset in `_PyRuntime`, if the code is of a known form. `at`: the
/// function's address in the file, as `runtime` is.
pub fn key_from_code(code: &[u8], at: u64, runtime: u64) -> Option<u64> {
    /// No structure of that name was larger; what lies beyond is something else.
    const LARGEST: u64 = 1 << 20;
    /// The key is behind a word that says whether there is one (`Py_tss_t`).
    const KEY: u64 = 4;
    let inside = |offset: u64| (offset > 0 && offset < LARGEST).then_some(offset);
    for (index, six) in code.windows(7).enumerate() {
        let displacement = |from: usize| {
            let bytes = [six[from], six[from + 1], six[from + 2], six[from + 3]];
            i64::from(i32::from_le_bytes(bytes)) as u64
        };
        let next = |length: u64| at.wrapping_add(index as u64).wrapping_add(length);
        let found = match six {
            // lea offset(%rax),%rdi or %rbx: %rax has the address of _PyRuntime.
            [0x48, 0x8d, 0xb8 | 0x98, ..] => inside(displacement(3)),
            // lea address(%rip),%rdi or %rbx
            [0x48, 0x8d, 0x3d | 0x1d, ..] => {
                inside(next(7).wrapping_add(displacement(3)).wrapping_sub(runtime))
            }
            // mov address(%rip),%edi: the key itself, for pthread_getspecific.
            [0x8b, 0x3d, ..] => {
                let key = next(6).wrapping_add(displacement(2)).wrapping_sub(runtime);
                inside(key.wrapping_sub(KEY))
            }
            _ => None,
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(file: u32, name: u32, table: u32, first_line: u32) -> Members {
        Members {
            file: Some(file),
            name: Some(name),
            qualified_name: None,
            table: Some(table),
            first_line: Some(first_line),
        }
    }

    #[test]
    fn what_is_read_at_once_is_no_more_than_there_is_room_for() {
        let ten = layout(10, &members(104, 112, 120, 40), &[]).unwrap();
        assert_eq!((ten.frame_start, ten.frame_bytes), (24, 88));
        assert_eq!((ten.print_start, ten.print_bytes), (40, 88));
        assert_eq!(
            (ten.print_first, ten.print_table, ten.print_name),
            (0, 80, 72)
        );
        let mut eleven = members(112, 120, 136, 72);
        eleven.qualified_name = Some(128);
        let eleven = layout(11, &eleven, &[]).unwrap();
        assert_eq!((eleven.frame_start, eleven.frame_entry), (32, 36));
    }

    #[test]
    fn unknown_layouts_are_refused_aloud() {
        let refused =
            |version, members: &Members, debug: &[u8]| layout(version, members, debug).unwrap_err();
        let known = members(104, 112, 120, 40);
        assert!(refused(9, &known, &[]).contains("CPython 3.9: frames are read of 3.10 to 3.13"));
        assert!(refused(14, &known, &[]).contains("CPython 3.14"));
        let shifted = members(120, 128, 136, 56);
        assert!(refused(10, &shifted, &[]).contains("co_filename at 120, not at 104"));
        assert!(refused(10, &Members::default(), &[]).contains("co_filename nowhere"));
        assert!(refused(13, &known, &[0; DEBUG_OFFSETS]).contains("no debug offsets"));
        let mut debug = [0; DEBUG_OFFSETS];
        debug[..8].copy_from_slice(b"xdebugpy");
        debug[16] = 1;
        assert!(refused(13, &known, &debug).contains("without a GIL"));
        debug[16] = 0;
        debug[47] = 1;
        assert!(refused(13, &known, &debug).contains("hold 72057594037927936 at 40"));
    }

    /// The forms that GCC makes of it, assembled by hand.
    #[test]
    fn the_key_is_found_in_the_accessors_code() {
        // endbr64; mov got(%rip),%rax; lea 0x248(%rax),%rdi; jmp
        let shared = [
            0xf3, 0x0f, 0x1e, 0xfa, 0x48, 0x8b, 0x05, 1, 2, 3, 0, 0x48, 0x8d, 0xb8, 0x48, 2, 0, 0,
            0xe9, 0, 0, 0, 0,
        ];
        assert_eq!(key_from_code(&shared, 0x1000, 0x9000), Some(0x248));
        // lea 0x8850(%rip),%rdi at 0x1000: 0x1007 + 0x8249 = 0x9250
        let fixed = [0x48, 0x8d, 0x3d, 0x49, 0x82, 0, 0, 0xe9, 0, 0, 0, 0];
        assert_eq!(key_from_code(&fixed, 0x1000, 0x9000), Some(0x250));
        // mov 0x824e(%rip),%edi: 0x1006 + 0x824e = 0x9254, the key behind its mark.
        let inlined = [0x8b, 0x3d, 0x4e, 0x82, 0, 0, 0xe9, 0, 0, 0, 0];
        assert_eq!(key_from_code(&inlined, 0x1000, 0x9000), Some(0x250));
        assert_eq!(key_from_code(&[0x90; 64], 0x1000, 0x9000), None);
    }
}
