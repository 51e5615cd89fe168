//! One record: the fixed part, the head, and their checks. The format is in [`super`].
//!
//! Everything here may have rotted: lengths are bounded before they are used, and a head is
//! believed only with its CRC-32.

use std::sync::Arc;

use vramscope_wire::Table;

use super::NewBatch;
use crate::ingest::placing::Placing;

/// Bytes of the fixed part.
pub(super) const FIXED: usize = 24;

/// First bytes of a record that holds a batch.
pub(super) const BATCH: [u8; 4] = *b"VSb1";

/// First bytes of a record that holds nothing.
pub(super) const VOID: [u8; 4] = *b"VSv1";

/// Longest head: three names and a dozen numbers.
const MAX_HEAD: u32 = 4096;

/// Longest payload; agents may send less.
const MAX_PAYLOAD: u64 = 1 << 30;

/// What a record says about its batch, beside the payload's length and CRC-32. In this order:
///
/// ```text
/// u64 record number          u64 synced: bytes of the segment on disk when this was written
/// u64 batch_seq              u64 rows
/// u64 decoded bytes          u64 misdated rows
/// i64 arrived                i64 earliest ts believed       i64 latest ts believed
/// u8  1 if ts follow, or 0   i64 earliest ts                i64 latest ts
/// u8  length, agent_id       u8  length, table              u8  1 if a host follows, or 0
/// u8  length, host
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Head {
    pub number: u64,
    pub synced: u64,
    pub batch: NewBatch,
}

/// The fixed part of a record whose check was right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fixed {
    pub is_void: bool,
    pub head_len: u32,
    pub payload_len: u64,
    pub payload_crc32: u32,
    check: u32,
}

impl Fixed {
    /// Reads the fixed part as far as it makes sense; its check needs the head.
    pub(super) fn parse(bytes: &[u8; FIXED]) -> Option<Fixed> {
        let mut cursor = Cursor(bytes);
        let magic = cursor.take::<4>()?;
        let fixed = Fixed {
            is_void: magic == VOID,
            head_len: cursor.u32()?,
            payload_len: cursor.u64()?,
            payload_crc32: cursor.u32()?,
            check: cursor.u32()?,
        };
        let is_known = magic == BATCH || (fixed.is_void && fixed.head_len == 0);
        let fits =
            fixed.head_len <= MAX_HEAD && (fixed.is_void || fixed.payload_len <= MAX_PAYLOAD);
        (is_known && fits).then_some(fixed)
    }

    /// Whether the check is right for these bytes and this head.
    pub(super) fn is_sound(&self, bytes: &[u8; FIXED], head: &[u8]) -> bool {
        check(&bytes[..FIXED - 4], head) == self.check
    }
}

fn check(fixed: &[u8], head: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(fixed);
    hasher.update(head);
    hasher.finalize()
}

/// A void record over `len` bytes, at least [`FIXED`]: only its fixed part is written.
pub(super) fn void(len: u64) -> [u8; FIXED] {
    let mut bytes = [0; FIXED];
    bytes[..4].copy_from_slice(&VOID);
    bytes[8..16].copy_from_slice(&(len - FIXED as u64).to_le_bytes());
    let check = check(&bytes[..FIXED - 4], &[]);
    bytes[FIXED - 4..].copy_from_slice(&check.to_le_bytes());
    bytes
}

impl Head {
    /// Appends fixed part and head to `out`; the payload belongs right behind.
    pub(super) fn write(&self, payload_len: u64, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; FIXED]);
        let batch = &self.batch;
        for number in [
            self.number,
            self.synced,
            batch.seq,
            batch.rows,
            batch.decoded_bytes,
            batch.misdated,
        ] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        let placing = &batch.placing;
        for time in [placing.arrived_us, placing.earliest_us, placing.latest_us] {
            out.extend_from_slice(&time.to_le_bytes());
        }
        out.push(u8::from(batch.times.is_some()));
        let (earliest, latest) = batch.times.unwrap_or((0, 0));
        out.extend_from_slice(&earliest.to_le_bytes());
        out.extend_from_slice(&latest.to_le_bytes());
        text(out, &batch.agent);
        text(out, batch.table.name());
        out.push(u8::from(batch.host.is_some()));
        text(out, batch.host.as_deref().unwrap_or(""));

        let head_len = (out.len() - start - FIXED) as u32;
        let fixed = &mut out[start..start + FIXED];
        fixed[..4].copy_from_slice(&BATCH);
        fixed[4..8].copy_from_slice(&head_len.to_le_bytes());
        fixed[8..16].copy_from_slice(&payload_len.to_le_bytes());
        fixed[16..20].copy_from_slice(&batch.crc32.to_le_bytes());
        let check = check(&out[start..start + FIXED - 4], &out[start + FIXED..]);
        out[start + FIXED - 4..start + FIXED].copy_from_slice(&check.to_le_bytes());
    }

    /// Reads a head whose check was right. `None` if a later version wrote it (another table, say).
    pub(super) fn parse(head: &[u8], crc32: u32) -> Option<Head> {
        let mut cursor = Cursor(head);
        let (number, synced, seq) = (cursor.u64()?, cursor.u64()?, cursor.u64()?);
        let (rows, decoded_bytes, misdated) = (cursor.u64()?, cursor.u64()?, cursor.u64()?);
        let placing = Placing {
            arrived_us: cursor.i64()?,
            earliest_us: cursor.i64()?,
            latest_us: cursor.i64()?,
        };
        let has_times = cursor.take::<1>()? == [1];
        let times = (cursor.i64()?, cursor.i64()?);
        let agent = cursor.text()?;
        let table = Table::by_name(cursor.text()?)?;
        let has_host = cursor.take::<1>()? == [1];
        let host = cursor.text()?;
        Some(Head {
            number,
            synced,
            batch: NewBatch {
                agent: Arc::from(agent),
                seq,
                host: has_host.then(|| Arc::from(host)),
                table,
                crc32,
                rows,
                decoded_bytes,
                times: has_times.then_some(times),
                placing,
                misdated,
            },
        })
    }
}

/// Names are at most 255 bytes: agents' and tables' by their checks, hosts' by ours at the door.
fn text(out: &mut Vec<u8>, text: &str) {
    let bytes = &text.as_bytes()[..text.len().min(255)];
    out.push(bytes.len() as u8);
    out.extend_from_slice(bytes);
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn i64(&mut self) -> Option<i64> {
        self.take().map(i64::from_le_bytes)
    }

    fn text(&mut self) -> Option<&'a str> {
        let [len] = self.take::<1>()?;
        std::str::from_utf8(self.bytes(usize::from(len))?).ok()
    }
}
