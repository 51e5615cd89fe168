//! The fuzz targets of `agent/fuzz` as bounded tests: valid inputs with flipped bits, cuts,
//! lengths that promise gigabytes, and pieces of one another. A panic or an endless loop in a
//! parser fails here on any machine, without a fuzzer; `VRAMSCOPE_HOSTILE_CASES` makes it longer.

#[path = "../../fuzz/src/targets.rs"]
mod targets;

mod memory;
mod seeds;

use std::cell::Cell;
use std::sync::Once;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn cases() -> u32 {
    std::env::var("VRAMSCOPE_HOSTILE_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(300)
}

/// One way to spoil bytes.
#[derive(Debug, Clone)]
enum Harm {
    Flip {
        at: prop::sample::Index,
        bit: u8,
    },
    Cut {
        at: prop::sample::Index,
    },
    Drop {
        at: prop::sample::Index,
        bytes: u8,
    },
    /// A length, an offset or a count becomes huge, at an aligned place or anywhere.
    Bomb {
        at: prop::sample::Index,
        value: u64,
        wide: bool,
        aligned: bool,
    },
    /// Some bytes of one place at another.
    Copy {
        from: prop::sample::Index,
        to: prop::sample::Index,
        bytes: u8,
    },
    Insert {
        at: prop::sample::Index,
        bytes: Vec<u8>,
    },
}

fn harm() -> impl Strategy<Value = Harm> {
    let at = any::<prop::sample::Index>;
    let bombs = prop::sample::select(vec![
        0,
        1,
        0x7f,
        0xff,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_fff0,
        0xffff_ffff,
        1 << 40,
        i64::MAX as u64,
        u64::MAX - 7,
        u64::MAX,
    ]);
    prop_oneof![
        4 => (at(), 0..8u8).prop_map(|(at, bit)| Harm::Flip { at, bit }),
        1 => at().prop_map(|at| Harm::Cut { at }),
        1 => (at(), 1..40u8).prop_map(|(at, bytes)| Harm::Drop { at, bytes }),
        4 => (at(), bombs, any::<bool>(), any::<bool>())
            .prop_map(|(at, value, wide, aligned)| Harm::Bomb { at, value, wide, aligned }),
        1 => (at(), at(), 1..64u8).prop_map(|(from, to, bytes)| Harm::Copy { from, to, bytes }),
        1 => (at(), prop::collection::vec(any::<u8>(), 1..9))
            .prop_map(|(at, bytes)| Harm::Insert { at, bytes }),
    ]
}

fn spoil(bytes: &mut Vec<u8>, harm: &Harm) {
    if bytes.is_empty() {
        return;
    }
    let size = bytes.len();
    match harm {
        Harm::Flip { at, bit } => bytes[at.index(size)] ^= 1 << bit,
        Harm::Cut { at } => bytes.truncate(at.index(size)),
        Harm::Drop { at, bytes: count } => {
            let at = at.index(size);
            bytes.drain(at..size.min(at + usize::from(*count)));
        }
        Harm::Bomb {
            at,
            value,
            wide,
            aligned,
        } => {
            let width = if *wide { 8 } else { 4 };
            let at = at.index(size);
            let at = if *aligned { at / width * width } else { at };
            for (to, from) in bytes[at..].iter_mut().zip(&value.to_le_bytes()[..width]) {
                *to = *from;
            }
        }
        Harm::Copy {
            from,
            to,
            bytes: count,
        } => {
            let (from, to) = (from.index(size), to.index(size));
            let piece = bytes[from..size.min(from + usize::from(*count))].to_vec();
            for (to, from) in bytes[to..].iter_mut().zip(piece) {
                *to = from;
            }
        }
        Harm::Insert { at, bytes: new } => {
            let at = at.index(size);
            bytes.splice(at..at, new.iter().copied());
        }
    }
}

/// Runs a target over its seeds, whole and spoiled, and over random bytes. `repair` puts right
/// what only says that bytes are damaged, so that the parser behind it is reached.
fn run(seeds: &[Vec<u8>], repair: fn(&mut [u8]), target: fn(&[u8])) {
    assert!(!seeds.is_empty());
    for seed in seeds {
        target(seed);
        for cut in (0..seed.len()).step_by(1 + seed.len() / 200) {
            target(&seed[..cut]);
        }
    }
    let mut runner = TestRunner::new(Config {
        cases: cases(),
        failure_persistence: None,
        ..Config::default()
    });
    let spoiled = (0..seeds.len(), prop::collection::vec(harm(), 1..6));
    runner
        .run(&spoiled, |(seed, harms)| {
            let mut bytes = seeds[seed].clone();
            harms.iter().for_each(|harm| spoil(&mut bytes, harm));
            repair(&mut bytes);
            target(&bytes);
            Ok(())
        })
        .unwrap();
    let random = prop::collection::vec(any::<u8>(), 0..2000);
    runner
        .run(&random, |bytes| {
            target(&bytes);
            Ok(())
        })
        .unwrap();
}

/// A seed that is refused at its first byte would test nothing.
#[test]
fn seeds_are_valid() {
    use vramscope_agent::host::{library, usdt};
    let elf = seeds::elf();
    assert_eq!(
        library::hooked_functions(elf.as_slice(), true)
            .unwrap()
            .len(),
        2
    );
    let probes = usdt::probes(elf.as_slice()).unwrap();
    assert_eq!((probes.len(), probes[0].offset), (1, 0x200));
    assert_eq!(probes[0].semaphore, Some(0x300));
    for page in seeds::metrics() {
        let page = vramscope_agent::traffic::exposition::Page::read(&page, |_| true);
        assert_eq!(page.bad_lines, 0);
        assert!(!vramscope_agent::traffic::engines::read(&page).is_empty());
    }
    for record in seeds::records() {
        vramscope_agent::probes::record::decode(&record).unwrap();
    }
    for file in seeds::spool_files() {
        let table = vramscope_wire::Table::ALL[usize::from(file[0])];
        let bytes = bytes::Bytes::from(file[1..].to_vec());
        let batches = vramscope_wire::parquet_file::decode(table, bytes).unwrap();
        assert_eq!(batches[0].num_rows(), 3);
    }
    let mut journal = seeds::journals().remove(0);
    let whole = vramscope_agent::spool::journal::decode(&journal);
    assert_eq!((whole.frames.len(), whole.good), (2, journal.len()));
    let untouched = journal.clone();
    seeds::right_checksums(&mut journal);
    assert_eq!(journal, untouched);
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs something whose caught panics are not worth a backtrace each.
fn quietly<T>(run: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                usual(panic);
            }
        }));
    });
    QUIET.set(true);
    let result = run();
    QUIET.set(false);
    result
}

fn as_it_is(_: &mut [u8]) {}

#[test]
fn elf() {
    run(&[seeds::elf()], as_it_is, targets::elf);
}

#[test]
fn usdt() {
    run(&[seeds::elf()], as_it_is, targets::usdt);
}

#[test]
fn maps() {
    run(&[seeds::maps()], as_it_is, targets::maps);
}

#[test]
fn record() {
    run(&seeds::records(), as_it_is, targets::record);
}

#[test]
fn spool_file() {
    memory::bounded(1 << 30, || {
        quietly(|| run(&seeds::spool_files(), as_it_is, targets::spool_file));
    });
}

/// Every byte of a file, one at a time. The Parquet reader panics at some of them (a negative
/// offset in the footer, an offset beyond its buffer), which would end the sender's task: there
/// has to be an error instead.
#[test]
fn a_bad_byte_in_a_spool_file_is_an_error_or_no_matter() {
    let files = seeds::spool_files();
    let file = files.iter().min_by_key(|file| file.len()).unwrap();
    let table = vramscope_wire::Table::ALL[usize::from(file[0])];
    let mut panics = 0;
    // Most of the file is its footer.
    for at in (1..file.len()).step_by(3) {
        for value in [file[at] ^ 1, 0xff] {
            let mut bytes = file[1..].to_vec();
            bytes[at - 1] = value;
            let bytes = bytes::Bytes::from(bytes);
            let read = quietly(|| vramscope_wire::parquet_file::decode(table, bytes));
            panics += usize::from(matches!(
                read,
                Err(vramscope_wire::parquet_file::ReadError::Panic(_))
            ));
        }
    }
    // If this fails the reader has become better, and `survive` may go.
    assert!(panics > 0);
}

#[test]
fn journal() {
    memory::bounded(1 << 30, || {
        run(&seeds::journals(), as_it_is, targets::journal);
        run(&seeds::journals(), seeds::right_checksums, targets::journal);
    });
}

#[test]
fn config() {
    run(&seeds::configs(), as_it_is, targets::config);
}

#[test]
fn metrics() {
    run(&seeds::metrics(), as_it_is, targets::metrics);
}
