//! What the kernel's perf records say. Layouts are those of `linux/perf_event.h`.

use super::ring::HEADER;
use crate::host::procfs::Mapping;

const LOST: u32 = 2;
const COMM: u32 = 3;
const MMAP2: u32 = 10;
/// In the header of a `COMM` record: the name changed because of an exec.
const COMM_EXEC: u16 = 1 << 13;
const PROT_EXEC: u32 = 4;

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The process maps a file.
    Mapped { pid: u32, mapping: Mapping },
    /// The process runs a new program: nothing of the old one is mapped any more.
    Exec { pid: u32 },
    /// The ring was full; so many records are missing.
    Lost(u64),
}

/// The records in `bytes`, each with its time. What makes no sense is left out.
pub fn parse(bytes: &[u8]) -> Vec<(u64, Record)> {
    let mut records = Vec::new();
    let mut rest = bytes;
    while let Some(size) = number::<2>(rest, 6).map(|size| size as usize) {
        if size < HEADER || size > rest.len() {
            break;
        }
        let (record, tail) = rest.split_at(size);
        records.extend(parse_one(record));
        rest = tail;
    }
    records
}

fn parse_one(record: &[u8]) -> Option<(u64, Record)> {
    let kind = number::<4>(record, 0)? as u32;
    let misc = number::<2>(record, 4)? as u16;
    // The time comes last in every record, since it is all that was asked for.
    let (body, time) = record[HEADER..].split_at_checked(record.len().checked_sub(HEADER + 8)?)?;
    let time = number::<8>(time, 0)?;
    let parsed = match kind {
        LOST => Record::Lost(number::<8>(body, 8)?),
        COMM if misc & COMM_EXEC != 0 => Record::Exec {
            pid: number::<4>(body, 0)? as u32,
        },
        MMAP2 => {
            let executable = number::<4>(body, 56)? as u32 & PROT_EXEC != 0;
            Record::Mapped {
                pid: number::<4>(body, 0)? as u32,
                mapping: mapping(body, executable)?,
            }
        }
        _ => return None,
    };
    Some((time, parsed))
}

/// `None` for memory without a file.
fn mapping(body: &[u8], executable: bool) -> Option<Mapping> {
    let name = body.get(64..)?;
    let name = &name[..name.iter().position(|byte| *byte == 0)?];
    if !name.starts_with(b"/") || name.starts_with(b"//") {
        return None;
    }
    let path = String::from_utf8_lossy(name);
    let (path, deleted) = match path.strip_suffix(" (deleted)") {
        Some(path) => (path.to_string(), true),
        None => (path.into_owned(), false),
    };
    let start = number::<8>(body, 8)?;
    Some(Mapping {
        start,
        end: start.checked_add(number::<8>(body, 16)?)?,
        offset: number::<8>(body, 24)?,
        executable,
        device: libc::makedev(
            number::<4>(body, 32)? as libc::c_uint,
            number::<4>(body, 36)? as libc::c_uint,
        ),
        inode: number::<8>(body, 40)?,
        path,
        deleted,
    })
}

/// A number of `N` bytes in this machine's order.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut word = [0; 8];
    word[..N].copy_from_slice(bytes.get(at..at + N)?);
    Some(u64::from_le_bytes(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Laid out by hand after the kernel's header file.
    fn mmap2(path: &str, time: u64) -> Vec<u8> {
        let mut name = path.as_bytes().to_vec();
        name.resize((path.len() / 8 + 1) * 8, 0);
        let size = 8 + 64 + name.len() + 8;
        let mut record = Vec::new();
        record.extend(10u32.to_le_bytes());
        record.extend(2u16.to_le_bytes());
        record.extend((size as u16).to_le_bytes());
        for word in [77u32, 78] {
            record.extend(word.to_le_bytes());
        }
        for word in [0x7f00_0000_1000u64, 0x2000, 0x1000] {
            record.extend(word.to_le_bytes());
        }
        for word in [0xfeu32, 2] {
            record.extend(word.to_le_bytes());
        }
        for word in [1234u64, 1] {
            record.extend(word.to_le_bytes());
        }
        for word in [5u32, 2] {
            record.extend(word.to_le_bytes());
        }
        record.extend(name);
        record.extend(time.to_le_bytes());
        record
    }

    #[test]
    fn a_mapping_an_exec_and_a_loss() {
        let mut bytes = mmap2("/opt/my libs/libcuda.so.1", 9);
        // The name changed by exec, and by prctl.
        for misc in [1u16 << 13, 0] {
            bytes.extend(3u32.to_le_bytes());
            bytes.extend(misc.to_le_bytes());
            bytes.extend(32u16.to_le_bytes());
            bytes.extend(77u32.to_le_bytes());
            bytes.extend(77u32.to_le_bytes());
            bytes.extend(*b"python\0\0");
            bytes.extend(5u64.to_le_bytes());
        }
        bytes.extend(2u32.to_le_bytes());
        bytes.extend(0u16.to_le_bytes());
        bytes.extend(32u16.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.extend(40u64.to_le_bytes());
        bytes.extend(6u64.to_le_bytes());
        let records = parse(&bytes);
        let Record::Mapped { pid: 77, mapping } = &records[0].1 else {
            panic!("{records:?}")
        };
        assert_eq!(records[0].0, 9);
        assert_eq!(mapping.path, "/opt/my libs/libcuda.so.1");
        assert_eq!(
            (mapping.start, mapping.end, mapping.offset, mapping.inode),
            (0x7f00_0000_1000, 0x7f00_0000_3000, 0x1000, 1234)
        );
        assert_eq!(mapping.device, libc::makedev(0xfe, 2));
        assert!(mapping.executable && !mapping.deleted);
        assert_eq!(
            records[1..],
            [(5, Record::Exec { pid: 77 }), (6, Record::Lost(40))]
        );
        assert_eq!(parse(&mmap2("//anon", 1)), []);
        assert_eq!(parse(&mmap2("[vdso]", 1)), []);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn a_record_cut_short_is_survived(cut in 0usize..140) {
            let bytes = mmap2("/usr/lib/libcuda.so.1", 3);
            let _ = parse(&bytes[..cut.min(bytes.len())]);
        }
    }
}
