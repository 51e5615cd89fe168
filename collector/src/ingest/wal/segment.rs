//! Segment files: their names and headers, and reading them back. The format is in [`super`].

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use super::record::{BATCH, FIXED, Fixed, Head, VOID, void};
use super::{DAMAGED, Entry};
use crate::folder;

/// Bytes of a header.
pub(super) const HEADER: u64 = 24;

const MAGIC: [u8; 8] = *b"VSWAL\0\0\x01";

/// How far the search for the next record behind damage reads at a time.
const SEARCH_STEP: u64 = 1 << 20;

pub(super) fn path(root: &Path, number: u64) -> PathBuf {
    root.join(format!("{number:020}.wal"))
}

pub(super) fn header(number: u64, previous_synced: u64) -> [u8; HEADER as usize] {
    let mut bytes = [0; HEADER as usize];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    bytes[16..].copy_from_slice(&previous_synced.to_le_bytes());
    bytes
}

pub(super) fn read_payload(file: &File, offset: u64, bytes: u64) -> io::Result<Bytes> {
    let mut payload = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut payload, offset)?;
    Ok(payload.into())
}

/// Keeps a copy of damaged bytes for people. The same name is the same damage, found again.
pub(super) fn set_aside(root: &Path, name: &str, bytes: &[u8]) -> io::Result<PathBuf> {
    let dir = root.join(DAMAGED);
    folder::create_dir_durably(&dir)?;
    let aside = dir.join(name);
    let temporary = folder::write_temporary(dir.join(".tmp"), std::iter::once(bytes))?;
    fs::rename(temporary, &aside)?;
    folder::sync_dir(&dir)?;
    Ok(aside)
}

/// A segment that was found at start.
pub(super) struct Found {
    pub number: u64,
    pub file: Arc<File>,
    pub bytes: u64,
}

pub(super) struct Recovered {
    /// In ascending order.
    pub segments: Vec<Found>,
    /// In order of record numbers.
    pub entries: Vec<Entry>,
    /// Bytes of the last segment that are good; 0 without one.
    pub synced: u64,
}

/// Reads every segment; cuts torn tails and sets aside what rotted.
pub(super) fn recover(root: &Path) -> io::Result<Recovered> {
    let mut recovered = Recovered {
        segments: Vec::new(),
        entries: Vec::new(),
        synced: 0,
    };
    let numbers = numbers(root)?;
    for (index, &number) in numbers.iter().enumerate() {
        let path = path(root, number);
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        let successor = numbers.get(index + 1);
        let synced = synced_of(root, number, successor)?;
        let scan = scan(&file, number, synced)?;
        mend(root, &path, &file, &scan)?;
        if synced.is_none() {
            // What was written and not yet synced when the process was killed counts from now on.
            file.sync_all()?;
        }
        let bytes = file.metadata()?.len();
        recovered.synced = bytes;
        recovered.entries.extend(scan.entries);
        recovered.segments.push(Found {
            number,
            file: Arc::new(file),
            bytes,
        });
    }
    recovered.entries.sort_by_key(|entry| entry.number);
    Ok(recovered)
}

/// Reads every segment and changes nothing.
pub(super) fn list(root: &Path) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let numbers = numbers(root)?;
    for (index, &number) in numbers.iter().enumerate() {
        let file = match File::open(path(root, number)) {
            Ok(file) => file,
            // A collector at work deletes segments meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let synced = synced_of(root, number, numbers.get(index + 1))?;
        entries.extend(scan(&file, number, synced)?.entries);
    }
    entries.sort_by_key(|entry| entry.number);
    Ok(entries)
}

fn numbers(root: &Path) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    let files = match fs::read_dir(root) {
        Ok(files) => files,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(numbers),
        Err(error) => return Err(error),
    };
    for file in files {
        let name = file?.file_name();
        let number = name.to_str().and_then(|name| name.strip_suffix(".wal"));
        numbers.extend(number.and_then(|digits| digits.parse::<u64>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// How much of a segment was on disk when it was closed, as the next one tells.
fn synced_of(root: &Path, number: u64, successor: Option<&u64>) -> io::Result<Option<u64>> {
    let Some(&next) = successor.filter(|next| **next == number + 1) else {
        return Ok(None);
    };
    let file = match File::open(path(root, next)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(read_header(&file, next)?.filter(|synced| *synced > 0))
}

/// The header's last number; `None` if the header is torn or rotten.
fn read_header(file: &File, number: u64) -> io::Result<Option<u64>> {
    let mut bytes = [0; HEADER as usize];
    match file.read_exact_at(&mut bytes, 0) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let (own, rest) = bytes.split_at(16);
    let is_ours = own[..8] == MAGIC && own[8..] == number.to_le_bytes();
    let previous = rest.try_into().map(u64::from_le_bytes).unwrap_or(0);
    Ok(is_ours.then_some(previous))
}

/// What a segment holds.
#[derive(Debug, Default)]
struct Scan {
    entries: Vec<Entry>,
    /// Bytes that once were on disk and cannot be read any more.
    rotten: Vec<std::ops::Range<u64>>,
    /// Bytes that no acknowledgement stands for.
    torn: Vec<std::ops::Range<u64>>,
    /// Whole records behind the synced length of a closed segment: their group was refused.
    refused: u64,
    len: u64,
}

/// Reads a segment: heads only, and the payloads of the last group, which may be torn.
fn scan(file: &File, number: u64, synced_when_closed: Option<u64>) -> io::Result<Scan> {
    let len = file.metadata()?.len();
    let mut synced = synced_when_closed.unwrap_or(0);
    let mut found = Vec::new();
    let mut holes = Vec::new();
    let mut at = HEADER.min(len);
    while at < len {
        match read_head(file, at, len)? {
            Some(Record::Batch {
                head,
                offset,
                bytes,
            }) => {
                synced = synced.max(head.synced);
                let entry = Entry {
                    number: head.number,
                    batch: head.batch,
                    bytes,
                    segment: number,
                    start: at,
                    offset,
                };
                found.push(entry);
                at = offset + bytes;
            }
            Some(Record::Void { end }) => at = end,
            None => {
                let next = next_record(file, at + 1, len)?;
                holes.push(at..next);
                at = next;
            }
        }
    }
    let mut scan = Scan {
        len,
        ..Scan::default()
    };
    for hole in holes {
        if hole.start < synced {
            scan.rotten.push(hole);
        } else {
            scan.torn.push(hole);
        }
    }
    for entry in found {
        if entry.offset + entry.bytes <= synced {
            // Acknowledged. Whether its bytes are still good is seen when they are committed.
            scan.entries.push(entry);
        } else if synced_when_closed.is_some() {
            scan.refused += 1;
        } else if crc32fast::hash(&read_payload(file, entry.offset, entry.bytes)?)
            == entry.batch.crc32
        {
            scan.entries.push(entry);
        } else {
            scan.torn.push(entry.start..entry.offset + entry.bytes);
        }
    }
    scan.torn.sort_by_key(|hole| hole.start);
    Ok(scan)
}

enum Record {
    Batch {
        head: Box<Head>,
        offset: u64,
        bytes: u64,
    },
    Void {
        end: u64,
    },
}

/// The record at an offset, `None` if there is no sound one.
fn read_head(file: &File, at: u64, len: u64) -> io::Result<Option<Record>> {
    if len - at < FIXED as u64 {
        return Ok(None);
    }
    let mut bytes = [0; FIXED];
    file.read_exact_at(&mut bytes, at)?;
    let Some(fixed) = Fixed::parse(&bytes) else {
        return Ok(None);
    };
    let offset = at + FIXED as u64 + u64::from(fixed.head_len);
    let end = offset.saturating_add(fixed.payload_len);
    if end > len {
        return Ok(None);
    }
    let mut head = vec![0; fixed.head_len as usize];
    file.read_exact_at(&mut head, at + FIXED as u64)?;
    if !fixed.is_sound(&bytes, &head) {
        return Ok(None);
    }
    if fixed.is_void {
        return Ok(Some(Record::Void { end }));
    }
    match Head::parse(&head, fixed.payload_crc32) {
        Some(head) => Ok(Some(Record::Batch {
            head: Box::new(head),
            offset,
            bytes: fixed.payload_len,
        })),
        // Sound, and not to be understood: ignoring it would lose it.
        None => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "the log holds a batch (segment offset {at}) that only a later version of the \
                 collector can read; start that version once, and stop it after its commits"
            ),
        )),
    }
}

/// Where the next sound record begins, `len` if there is none.
fn next_record(file: &File, from: u64, len: u64) -> io::Result<u64> {
    let mut at = from;
    let mut piece = Vec::new();
    while at + FIXED as u64 <= len {
        let step = SEARCH_STEP.min(len - at);
        piece.resize(step as usize, 0);
        file.read_exact_at(&mut piece, at)?;
        for (index, four) in piece.windows(4).enumerate() {
            let is_record = four == BATCH || four == VOID;
            if is_record && read_head(file, at + index as u64, len)?.is_some() {
                return Ok(at + index as u64);
            }
        }
        // The last bytes may begin a magic.
        at += step.saturating_sub(3).max(1);
    }
    Ok(len)
}

/// Makes a segment readable from end to end: what rotted is kept aside, what is torn goes.
fn mend(root: &Path, path: &Path, file: &File, scan: &Scan) -> io::Result<()> {
    for hole in &scan.rotten {
        let bytes = read_payload(file, hole.start, hole.end - hole.start).unwrap_or_default();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let aside = set_aside(root, &format!("{name}-{}.part", hole.start), &bytes)?;
        tracing::error!(
            "lost an unknown number of rows: {} bytes at {} of {} are damaged; kept as {}",
            hole.end - hole.start,
            hole.start,
            path.display(),
            aside.display()
        );
        blank(file, hole)?;
    }
    let mut torn = 0;
    let mut end = scan.len;
    for hole in scan.torn.iter().rev() {
        torn += hole.end - hole.start;
        if hole.end == end {
            end = hole.start;
        } else {
            blank(file, hole)?;
        }
    }
    if torn > 0 {
        tracing::info!(
            path = %path.display(),
            bytes = torn,
            "cut off what was being written when the collector ended; nobody was told that it was stored"
        );
    }
    if scan.refused > 0 {
        tracing::info!(
            path = %path.display(),
            batches = scan.refused,
            "ignored batches whose sync had failed; their agents were told to send them again"
        );
    }
    if end < scan.len {
        file.set_len(end)?;
    }
    if torn > 0 || !scan.rotten.is_empty() {
        file.sync_all()?;
    }
    Ok(())
}

/// Overwrites damage with a void record, so that the next start reads over it.
pub(super) fn blank(file: &File, hole: &std::ops::Range<u64>) -> io::Result<()> {
    let len = hole.end - hole.start;
    if len < FIXED as u64 {
        // Between two sound records lies at least a whole fixed part; shorter than that is an end.
        return file.write_all_at(&vec![0; len as usize], hole.start);
    }
    file.write_all_at(&void(len), hole.start)
}
