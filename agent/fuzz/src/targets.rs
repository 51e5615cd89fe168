//! What each fuzz target does with its bytes. A target checks more than that nothing panics:
//! what a parser accepts has to keep its own promises.
//!
//! Bytes come from where others write: library files and `/proc` from containers, the ring and
//! the spool from an earlier agent or a rotten disk, the configuration from people.

use bytes::Bytes;
use vramscope_agent::config::Settings;
use vramscope_agent::host::library::hooked_functions;
use vramscope_agent::host::procfs;
use vramscope_agent::host::usdt;
use vramscope_agent::probes::copies::Copied;
use vramscope_agent::probes::record;
use vramscope_agent::probes::{operands, places};
use vramscope_agent::spool::journal;
use vramscope_agent::traffic::{engines, exposition};
use vramscope_wire::{Table, parquet_file};

/// Symbols of a library.
pub fn elf(bytes: &[u8]) {
    for all in [false, true] {
        let Ok(functions) = hooked_functions(bytes, all) else {
            return;
        };
        for (i, (hook, _)) in functions.iter().enumerate() {
            assert!(
                functions[..i]
                    .iter()
                    .all(|(other, _)| other.symbol != hook.symbol),
                "a function twice"
            );
        }
    }
}

/// USDT notes of a library.
pub fn usdt(bytes: &[u8]) {
    let Ok(probes) = usdt::probes(bytes) else {
        return;
    };
    for probe in probes {
        assert!(probe.provider.len() <= 3 * 4096 && probe.arguments.len() <= 3 * 4096);
        // The kernel side looks at 21 registers and no others.
        if let Ok(site) = operands::site(&probe.arguments, 1) {
            let operand = site.operands[0];
            assert!(operand.register < 21 && (operand.index < 21 || operand.index == 0xff));
            assert!(operand.shift <= 3 && operand.spare_bits < 64);
        }
    }
    if let Ok(found) = places::places(bytes) {
        assert!(found.places.iter().all(|place| !place.symbol.is_empty()));
    }
}

/// `/proc/PID/maps`.
pub fn maps(bytes: &[u8]) {
    for line in String::from_utf8_lossy(bytes).lines() {
        if let Some(mapping) = procfs::parse_mapping(line) {
            assert!(mapping.start < mapping.end);
            assert!(mapping.path.starts_with('/'));
        }
    }
}

/// A record of one of the rings.
pub fn record(bytes: &[u8]) {
    if let Some(copied) = Copied::decode(bytes) {
        assert!(copied.bytes.len() < bytes.len());
    }
    let Ok(record::Decoded { event, frames, .. }) = record::decode(bytes) else {
        return;
    };
    assert!(frames.len().is_multiple_of(8) && frames.len() < bytes.len());
    // What is accepted can be asked.
    let _ = (event.seq(), event.tgid());
    if let vramscope_agent::probes::Event::Call(call) = &event {
        let _ = (call.hook(), call.effect_ns());
    }
}

/// A file of the spool, as the sender reads it: the first byte chooses the table. The Parquet
/// reader panics at some bytes, which `parquet_file` turns into errors.
pub fn spool_file(bytes: &[u8]) {
    let Some((first, file)) = bytes.split_first() else {
        return;
    };
    let table = Table::FROM_AGENTS[usize::from(*first) % Table::FROM_AGENTS.len()];
    let Ok(rows) = parquet_file::rows(table, Bytes::copy_from_slice(file)) else {
        return;
    };
    // A small file may tell of many rows; nobody has to read them all.
    for batch in rows.take(64) {
        let Ok(batch) = batch else { return };
        assert_eq!(batch.schema(), table.schema());
        assert!(batch.num_rows() <= 1024);
    }
}

/// The journal.
pub fn journal(bytes: &[u8]) {
    let decoded = journal::decode(bytes);
    assert!(decoded.good <= bytes.len());
    // What was cut off is not needed to read the rest again.
    let again = journal::decode(&bytes[..decoded.good]);
    assert_eq!(again.frames.len(), decoded.frames.len());
}

/// The configuration file.
pub fn config(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let _ = toml::from_str::<Settings>(&text);
}

/// A metrics page of a serving engine.
pub fn metrics(bytes: &[u8]) {
    let page = exposition::Page::read(bytes, engines::is_wanted);
    for sample in &page.samples {
        assert!(engines::is_wanted(sample.name));
        assert!(sample.labels.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
    for load in engines::read(&page) {
        let counts = [
            load.running,
            load.waiting,
            load.completed_total,
            load.kv_page_tokens,
            load.kv_total_pages,
            load.kv_used_pages,
            load.kv_cached_pages,
            load.kv_free_pages,
            load.swapped_bytes,
        ];
        assert!(counts.into_iter().flatten().all(|count| count >= 0));
        assert!(
            load.kv_usage_ratio
                .is_none_or(|ratio| (0.0..=1.0).contains(&ratio))
        );
    }
}
