//! The kernel side under every circumstance that makes it lose something: each is brought about
//! a known number of times, and counted exactly that often under its name.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Mutex;

use vramscope_ebpf_abi::framework::{self, What};
use vramscope_ebpf_abi::{Action, Cookie, Loss, NO_ARG};

use super::bpf::{self, Sizes};
use super::channel::Channel;
use super::framework::Told;
use super::hooks::HOOKS;
use super::multi::{self, Site};
use super::record::{self, DecodeError};
use super::{Event, TracedCall};

mod copies;

/// Probes are attached to functions of this program: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

type Probed = extern "C" fn(*const u64, u64) -> i32;
type Reports = extern "C" fn(u64, i64, u64, u64, u64);

const ME: &str = "/proc/self/exe";

/// What is probed. It writes nothing.
#[inline(never)]
extern "C" fn gives(_out: *const u64, _size: u64) -> i32 {
    std::hint::black_box(0)
}

/// The same, with another call of it inside, `depth` deep.
#[inline(never)]
extern "C" fn nests(_out: *const u64, depth: u64) -> i32 {
    if depth > 1 {
        std::hint::black_box(nests(std::ptr::null(), depth - 1));
    }
    std::hint::black_box(0)
}

/// As c10's function: address, bytes, totals, device.
#[inline(never)]
extern "C" fn reports(address: u64, bytes: i64, allocated: u64, reserved: u64, device: u64) {
    std::hint::black_box((address, bytes, allocated, reserved, device));
}

/// Offset of a function in this program's file.
fn offset_of(function: Probed) -> u64 {
    offset_of_code(function as *const () as u64)
}

fn offset_of_code(address: u64) -> u64 {
    let mappings = crate::host::procfs::mappings(std::process::id());
    let mapping = mappings
        .iter()
        .find(|m| (m.start..m.end).contains(&address))
        .expect("a function lies in a mapping");
    address - mapping.start + mapping.offset
}

fn hook(symbol: &str) -> u16 {
    HOOKS.iter().position(|h| h.symbol == symbol).unwrap() as u16
}

struct Bed {
    channel: Channel,
    programs: bpf::MultiPrograms,
    links: Vec<OwnedFd>,
}

impl Bed {
    fn new(ring_bytes: u32, threads: u32) -> Option<Self> {
        Self::of(Sizes {
            ring_bytes,
            stack_ring_bytes: RING,
            threads,
        })
    }

    fn of(sizes: Sizes) -> Option<Self> {
        // SAFETY: a query without side effects.
        if unsafe { libc::geteuid() } != 0 {
            let _ = writeln!(std::io::stderr(), "SKIPPED: probes need root");
            return None;
        }
        let (channel, programs) = bpf::load_for_test(sizes).unwrap();
        let Some(programs) = programs else {
            let _ = writeln!(std::io::stderr(), "SKIPPED: no uprobe-multi links here");
            return None;
        };
        Some(Self {
            channel,
            programs,
            links: Vec::new(),
        })
    }

    /// Hooks a function; its returns alone if `entries` is false.
    fn attach(&mut self, function: Probed, cookie: Cookie, entries: bool) {
        let site = [Site {
            offset: offset_of(function),
            cookie: cookie.pack(),
            counter: 0,
        }];
        let link = |program, returns| multi::link(program, Path::new(ME), &site, returns).unwrap();
        self.links.push(link(&self.programs.leave, true));
        if entries {
            self.links.push(link(&self.programs.enter, false));
        }
    }

    /// Hooks a function as one of those by which an allocator tells of itself.
    fn attach_framework(&mut self, function: Reports, what: What) {
        let site = [Site {
            offset: offset_of_code(function as *const () as u64),
            cookie: framework::Cookie { what, site: 0 }.pack(),
            counter: 0,
        }];
        let program = &self.programs.framework;
        let link = multi::link(program, Path::new(ME), &site, false).unwrap();
        self.links.push(link);
    }

    fn told(&mut self) -> Vec<Told> {
        let mut told = Vec::new();
        self.channel.ring.read(usize::MAX, |bytes| {
            if let Ok(Event::Framework(event)) = record::decode(bytes).map(|d| d.event) {
                told.push(event);
            }
        });
        told
    }

    fn lost(&self, cause: Loss) -> u64 {
        self.channel.lost().unwrap()[cause as usize]
    }

    fn total_lost(&self) -> u64 {
        let calls = |cause: &&Loss| **cause != Loss::ProcessEvent;
        Loss::ALL.iter().filter(calls).map(|c| self.lost(*c)).sum()
    }

    /// What came, of this process.
    fn read(&mut self) -> Vec<Result<TracedCall, DecodeError>> {
        let mut calls = Vec::new();
        self.channel.ring.read(usize::MAX, |bytes| {
            match record::decode(bytes).map(|decoded| decoded.event) {
                Ok(Event::Call(call)) => calls.push(Ok(call)),
                Ok(_) => {}
                Err(error) => calls.push(Err(error)),
            }
        });
        calls
    }
}

fn plain(symbol: &str) -> Cookie {
    Cookie {
        hook: hook(symbol),
        out_arg: NO_ARG,
        action: Action::Record,
        seq_at_entry: false,
        stack: false,
        stack_args: false,
        extra_arg: NO_ARG,
        extra_words: 0,
    }
}

fn turn() -> std::sync::MutexGuard<'static, ()> {
    TURN.lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

const RING: u32 = 1 << 20;

#[test]
fn every_call_is_a_record_where_nothing_is_lacking() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(RING, 100) else {
        return;
    };
    bed.attach(gives as Probed, plain("cuMemAlloc_v2"), true);
    for size in 0..50 {
        gives(std::ptr::null(), size);
    }
    let sizes: Vec<u64> = bed.read().into_iter().map(|c| c.unwrap().args[1]).collect();
    assert_eq!(sizes, (0..50).collect::<Vec<_>>());
    assert_eq!(bed.total_lost(), 0);
}

#[test]
fn what_finds_the_ring_full_is_counted() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(4096, 100) else {
        return;
    };
    bed.attach(gives as Probed, plain("cuMemAlloc_v2"), true);
    for _ in 0..1000 {
        gives(std::ptr::null(), 1);
    }
    let seen = bed.read().len() as u64;
    // Other processes of the host start and end, and take space as well.
    let room = 4096 / (size_of::<vramscope_ebpf_abi::Call>() as u64 + 8);
    assert!(seen > 0 && seen <= room, "{seen}");
    assert_eq!(bed.lost(Loss::RingFull), 1000 - seen);
    assert_eq!(bed.total_lost(), 1000 - seen);
}

#[test]
fn threads_without_room_are_counted_call_by_call() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(RING, 1) else {
        return;
    };
    bed.attach(gives as Probed, plain("cuMemAlloc_v2"), true);
    gives(std::ptr::null(), 1);
    let others = || {
        for _ in 0..7 {
            gives(std::ptr::null(), 2);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(others);
        scope.spawn(others);
    });
    gives(std::ptr::null(), 3);
    let sizes: Vec<u64> = bed.read().into_iter().map(|c| c.unwrap().args[1]).collect();
    assert_eq!(sizes, [1, 3]);
    assert_eq!((bed.lost(Loss::ThreadsFull), bed.total_lost()), (14, 14));
}

#[test]
fn calls_nested_too_deep_are_counted_once() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(RING, 100) else {
        return;
    };
    bed.attach(nests as Probed, plain("cuMemAlloc_v2"), true);
    nests(std::ptr::null(), 11);
    assert_eq!(bed.read().len(), 8, "as many as are kept");
    assert_eq!((bed.lost(Loss::TooDeep), bed.total_lost()), (3, 3));
    nests(std::ptr::null(), 8);
    assert_eq!((bed.read().len(), bed.total_lost()), (8, 3));
}

#[test]
fn returns_without_an_entry_are_counted() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(RING, 100) else {
        return;
    };
    bed.attach(gives as Probed, plain("cuMemAlloc_v2"), false);
    for _ in 0..5 {
        gives(std::ptr::null(), 1);
    }
    assert!(bed.read().is_empty());
    assert_eq!((bed.lost(Loss::MissedEntry), bed.total_lost()), (5, 5));
    // What only keeps the kernel's own notes is no call that anybody misses.
    let mut notes = plain("cuCtxSetCurrent");
    notes.action = Action::SetContext;
    bed.attach(nests as Probed, notes, false);
    nests(std::ptr::null(), 1);
    assert_eq!(bed.total_lost(), 5);
}

#[test]
fn what_cannot_be_read_is_counted_and_not_made_up() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(RING, 100) else {
        return;
    };
    let mut cookie = plain("cuMemAlloc_v2");
    cookie.out_arg = 0;
    bed.attach(gives as Probed, cookie, true);
    let given = 0x7000u64;
    gives(&raw const given, 1);
    gives(std::ptr::without_provenance(8), 2);
    let out: Vec<_> = bed.read().into_iter().map(|c| c.unwrap().out).collect();
    assert_eq!(out, [Some(0x7000), None]);
    assert_eq!((bed.lost(Loss::ReadFault), bed.total_lost()), (1, 1));
}

#[test]
fn hooks_that_no_table_has_are_not_decoded() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(RING, 100) else {
        return;
    };
    let mut cookie = plain("cuMemAlloc_v2");
    cookie.hook = 60_000;
    bed.attach(gives as Probed, cookie, true);
    gives(std::ptr::null(), 1);
    assert_eq!(bed.read(), [Err(DecodeError::Hook(60_000))]);
}

/// A function probed twice in one place still gives one record for a call.
#[test]
fn two_probes_in_one_place_count_a_call_once() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(RING, 100) else {
        return;
    };
    bed.attach(gives as Probed, plain("cuMemAlloc_v2"), true);
    bed.attach(gives as Probed, plain("cuMemAlloc_v2"), true);
    for _ in 0..20 {
        gives(std::ptr::null(), 1);
    }
    assert_eq!(bed.read().len(), 20);
}

/// CUDA's device type is 1, the index in the byte above it; host memory is nobody's business here.
#[test]
fn every_report_about_a_card_is_a_record() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(RING, 100) else {
        return;
    };
    bed.attach_framework(reports, What::Report);
    for index in 0..50u64 {
        reports(
            0x1000 * (index + 1),
            512,
            512 * (index + 1),
            1 << 21,
            0x0201,
        );
        reports(0x1000, 64, 0, 0, 0);
        reports(0x1000 * (index + 1), -512, 512 * index, 1 << 21, 0x0201);
    }
    let told = bed.told();
    let expected = (1..=50i64).flat_map(|index| [(index, 512), (index, -512)]);
    let seen: Vec<_> = told
        .iter()
        .map(|t| ((t.address / 0x1000) as i64, t.bytes))
        .collect();
    assert_eq!(seen, expected.collect::<Vec<_>>());
    assert!(told.iter().all(|t| t.device == Some(2)));
    assert_eq!(told[99].totals, Some((512 * 49, 1 << 21)));
    assert!(told.is_sorted_by(|a, b| a.seq < b.seq));
    assert_eq!(bed.total_lost(), 0);
}

#[test]
fn reports_that_find_no_room_are_counted() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(4096, 100) else {
        return;
    };
    bed.attach_framework(reports, What::Report);
    for _ in 0..1000 {
        reports(0x1000, 512, 512, 512, 1);
    }
    let seen = bed.told().len() as u64;
    // Other processes of the host start and end, and take space as well.
    assert!(seen > 0 && seen < 4096 / size_of::<framework::Told>() as u64);
    assert_eq!(bed.lost(Loss::RingFull), 1000 - seen);
    assert_eq!(bed.total_lost(), 1000 - seen);
}

#[test]
fn reports_of_threads_without_room_are_counted() {
    let _turn = turn();
    let Some(mut bed) = Bed::new(RING, 1) else {
        return;
    };
    bed.attach_framework(reports, What::Report);
    reports(0x1000, 512, 512, 512, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| (0..7).for_each(|_| reports(0x2000, 512, 512, 512, 1)));
    });
    assert_eq!(bed.told().len(), 1);
    assert_eq!((bed.lost(Loss::ThreadsFull), bed.total_lost()), (7, 7));
}
