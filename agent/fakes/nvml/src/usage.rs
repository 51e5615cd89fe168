//! What living processes hold on a card, from the driver's ledgers in `VRAMSCOPE_FAKE_DIR`.
//!
//! A process that ever took memory of a card counts with what it holds of it, pools' reserves
//! included, and a fixed overhead, the stand-in for its context's own memory. Host memory is none of
//! the card's.

use std::{ffi::OsString, path::Path};

use vramscope_fake_host::{
    card::CONTEXT_OVERHEAD_BYTES,
    ledger::{FOLDER_VARIABLE, Kind, Layer, read_ledgers},
    process,
};

use crate::structs::{NvmlResult, UNKNOWN};

/// Process numbers and the bytes each holds, in the order of process numbers. Without the folder
/// nothing is known of any process, as on a card that nobody uses.
pub fn by_process(device: usize) -> NvmlResult<Vec<(u32, u64)>> {
    let folder: Option<OsString> = std::env::var_os(FOLDER_VARIABLE);
    let Some(folder) = folder.filter(|folder| Path::new(folder).is_dir()) else {
        return Ok(Vec::new());
    };
    // A damaged ledger makes the sum unknown, so there is no answer rather than a low one.
    let ledgers = read_ledgers(Path::new(&folder)).map_err(|_| UNKNOWN)?;
    Ok(ledgers
        .into_iter()
        .filter(|ledger| ledger.layer == Layer::Driver)
        .filter(|ledger| process::is_alive(ledger.pid, ledger.start_ticks))
        .filter_map(|ledger| {
            let device = device as u32;
            let took_memory = |kind: &Kind| ledger.totals(device, *kind).allocations > 0;
            let has_context = Kind::PHYSICAL.iter().any(took_memory)
                || ledger
                    .device(device)
                    .is_some_and(|device| device.pool_reserved_peak_bytes > 0);
            let bytes = ledger.physical_bytes(device) + CONTEXT_OVERHEAD_BYTES;
            has_context.then_some((ledger.pid, bytes))
        })
        .collect())
}

/// Bytes in use on a card.
pub fn used_bytes(device: usize) -> NvmlResult<u64> {
    Ok(by_process(device)?.iter().map(|(_, bytes)| bytes).sum())
}
