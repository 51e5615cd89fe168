use proptest::prelude::*;
use vramscope_ebpf_abi::python::{CodeRecord, TABLE_SMALL};

use super::*;

fn bytes_of<T: Copy>(value: &T) -> Vec<u8> {
    // SAFETY: the records have no padding (checked in the abi crate).
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
        .to_vec()
}

fn walk(tid: u32, enter_ns: u64, frames: &[Frame]) -> Vec<u8> {
    let mut bytes = bytes_of(&Walk {
        kind: KIND_PYTHON,
        tgid: 10,
        tid,
        frames: frames.len() as u32,
        enter_ns,
        flags: 0,
        version: 12,
    });
    frames
        .iter()
        .for_each(|frame| bytes.extend(bytes_of(frame)));
    bytes
}

fn code(code: u64, fingerprint: u64, file: &str, name: &str) -> Vec<u8> {
    /// Kind 1, compact, ASCII.
    const ASCII: u32 = 1 << 2 | 1 << 5 | 1 << 6;
    let mut record = CodeRecord::<TABLE_SMALL> {
        code: Code {
            kind: KIND_PYTHON_CODE,
            tgid: 10,
            code,
            fingerprint,
            version: 12,
            first_line: 7,
            file_length: file.len() as u32,
            file_state: ASCII,
            name_length: name.len() as u32,
            name_state: ASCII,
            table_length: 3,
            table_room: TABLE_SMALL as u32,
        },
        file: [0; FILE_BYTES],
        name: [0; NAME_BYTES],
        table: [0; TABLE_SMALL],
    };
    record.file[..file.len()].copy_from_slice(file.as_bytes());
    record.name[..name.len()].copy_from_slice(name.as_bytes());
    // Eight instructions of line 7 + 1: the form with columns, one line further.
    record.table[..3].copy_from_slice(&[0x80 | 11 << 3 | 7, 0, 0]);
    bytes_of(&record)
}

fn frame(code: u64, fingerprint: u64) -> Frame {
    Frame {
        code,
        fingerprint,
        instruction: 6,
        flags: 0,
    }
}

/// What lies at an address is another code object after the first was freed.
#[test]
fn names_go_by_address_and_fingerprint() {
    let mut walks = Walks::default();
    assert!(walks.take(&code(0x100, 1, "a.py", "first")));
    assert!(walks.take(&code(0x100, 2, "b.py", "second")));
    assert!(walks.take(&walk(
        11,
        5,
        &[frame(0x100, 1), frame(0x100, 2), frame(0x100, 3)]
    )));
    assert_eq!(walks.of_call(12, 5), None);
    let walked = walks.of_call(11, 5).unwrap();
    assert_eq!(walks.of_call(11, 5), None, "once");
    let resolved = walks.resolve(&walked, || None);
    let seen: Vec<_> = resolved
        .frames
        .iter()
        .map(|f| (f.file.as_deref(), f.function.as_deref(), f.line))
        .collect();
    assert_eq!(
        seen,
        [
            (Some("a.py"), Some("first"), Some(8)),
            (Some("b.py"), Some("second"), Some(8)),
            (None, None, None)
        ]
    );
    assert!(resolved.is_nameless && resolved.is_whole);
    walks.forget(10);
    assert_eq!((walks.names.len(), walks.names_bytes), (0, 0));
}

#[test]
fn a_walk_of_another_call_is_not_taken_for_this_ones() {
    let mut walks = Walks::default();
    assert!(walks.take(&walk(11, 5, &[])));
    assert_eq!(walks.of_call(11, 6), None);
}

/// A long program in memory that holds all it may: what was there goes, and all is in order.
#[test]
fn names_take_no_more_than_they_may() {
    let mut walks = Walks::default();
    let name = "n".repeat(NAME_BYTES);
    for address in 0..(NAMES_BYTES / 300) as u64 {
        assert!(walks.take(&code(address, 1, "file.py", &name)));
        assert!(walks.names_bytes <= NAMES_BYTES);
    }
    let held: usize = walks.names.values().map(|names| names.bytes()).sum();
    assert_eq!(held, walks.names_bytes);
}

proptest! {
    #[test]
    fn any_record_is_survived(mut bytes in proptest::collection::vec(any::<u8>(), 4..1400), is_code in any::<bool>()) {
        let kind = if is_code { KIND_PYTHON_CODE } else { KIND_PYTHON };
        bytes[..4].copy_from_slice(&kind.to_ne_bytes());
        let mut walks = Walks::default();
        let _ = walks.take(&bytes);
        let waiting: Vec<(u32, u64)> = walks.pending.iter().map(|(tid, w)| (*tid, w.enter_ns)).collect();
        for (tid, enter_ns) in waiting {
            let walked = walks.of_call(tid, enter_ns).unwrap();
            let _ = walks.resolve(&walked, || None);
        }
    }
}
