//! Reads PyTorch memory snapshots (`torch.cuda.memory._dump_snapshot`): pickles of protocols 2
//! to 5, and the same dictionary as JSON.
//!
//! Snapshots come from anywhere, so a file is data and nothing else: opcodes that make Python
//! import or call something are refused, and so is everything that asks for more memory than its
//! size warrants.
//!
//! Invariants:
//! - one pass; trace entries and segments are handed out as they are read and then forgotten, so
//!   that what is held grows with the distinct stacks and not with the trace;
//! - what a pickle refers to by its memo after it was handed out is refused, never guessed;
//! - no length in a file is believed before the bytes are there;
//! - the blocks of a segment that is handed out tile it.
//!
//! ```
//! use vramscope_snapshot::{Error, Item, read};
//!
//! let file = br#"{"segments": [{"device": 0, "address": 512, "total_size": 1024, "stream": 0,
//!     "segment_type": "small", "blocks": [{"size": 1024, "state": "inactive"}]}]}"#;
//! let mut bytes = 0;
//! read(&file[..], file.len() as u64, |item, _tables| {
//!     if let Item::Segment(segment) = item {
//!         bytes += segment.bytes;
//!     }
//!     Ok::<(), Error>(())
//! })?;
//! assert_eq!(bytes, 1024);
//! # Ok::<(), Error>(())
//! ```

mod build;
mod error;
mod input;
mod item;
mod json;
mod limits;
mod machine;
mod pickle;
mod tables;

use std::io::Read;

pub use error::Error;
pub use item::{Action, Block, Event, HOST, Item, Memory, Outline, Segment};
pub use limits::Limits;
pub use tables::{Frame, StackId, Tables, Text};

use input::Input;
use machine::Machine;

/// Reads a snapshot of `size` bytes and hands out what it holds, in the order of the file. Ends at
/// the first error, the sink's or the file's own; what was handed out before is then worth
/// nothing.
pub fn read<E: From<Error>>(
    source: impl Read,
    size: u64,
    sink: impl FnMut(Item, &Tables) -> Result<(), E>,
) -> Result<(Outline, Tables), E> {
    read_with(source, size, Limits::for_file(size), sink)
}

/// The same with other limits.
pub fn read_with<E: From<Error>>(
    source: impl Read,
    size: u64,
    limits: Limits,
    mut sink: impl FnMut(Item, &Tables) -> Result<(), E>,
) -> Result<(Outline, Tables), E> {
    let mut input = Input::new(source, size);
    let mut machine = Machine::new(limits);
    match Kind::of(&mut input)? {
        Kind::Pickle => pickle::read(&mut input, &mut machine, &mut sink)?,
        Kind::Json => json::read(&mut input, &mut machine, &mut sink)?,
    }
    Ok(machine.into_parts())
}

enum Kind {
    Pickle,
    Json,
}

impl Kind {
    /// Looks at the first bytes.
    fn of(input: &mut Input<impl Read>) -> Result<Kind, Error> {
        let start = input.peek()?;
        let not = |what: &str| Err(Error::NotASnapshot(what.to_string()));
        let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start);
        let first = text.iter().find(|byte| !byte.is_ascii_whitespace());
        match (start, first) {
            ([], _) => not("the file is empty"),
            ([0x80, ..], _) => Ok(Kind::Pickle),
            ([b'P', b'K', ..], _) => {
                not("a zip file; torch.save writes such, memory snapshots are plain pickles")
            }
            ([0x1f, 0x8b, ..], _) => not("a gzip file; unpack it first"),
            ([0x28, 0xb5, 0x2f, 0xfd, ..], _) => not("a zstd file; unpack it first"),
            (_, Some(b'{' | b'[')) => Ok(Kind::Json),
            (_, Some(b'(' | b'}' | b']')) => {
                not("perhaps a pickle of protocol 0 or 1; protocols 2 to 5 are read")
            }
            _ => not("it begins like neither a pickle nor JSON"),
        }
    }
}
