//! A stand-in for the part of PyTorch that tells of its allocator: USDT probes in the documented
//! form of `sys/sdt.h`, with counters that turn them on, and the two functions of c10 that are
//! called on every block. It allocates nothing real and keeps its own ledger, which is what the
//! agent's rows are compared with.
//!
//! Invariants:
//! - a block is reported from inside the lock, as PyTorch does it, so the ledger's order is the
//!   reports' order;
//! - a probe fires if and only if its counter is not zero, after the report when memory is handed
//!   out and before it when it is taken back;
//! - each place of a probe has its arguments elsewhere ([`probes`]).

mod ledger;
mod probes;

use std::ffi::{c_char, c_int};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ledger::Ledger;

static LEDGER: Mutex<Ledger> = Mutex::new(Ledger::new());

fn ledger() -> MutexGuard<'static, Ledger> {
    // A test that failed inside leaves readable books.
    LEDGER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `c10::DeviceType::CUDA`, and the index in the byte above it.
fn device(index: u8) -> u64 {
    1 | u64::from(index) << 8
}

/// Hands out a block of `bytes` on a device and stream; the probe is the one at `place`, or none
/// for a negative one (an allocation by address alone). Gives the address.
#[unsafe(no_mangle)]
pub extern "C" fn fake_c10_allocate(
    bytes: u64,
    device_index: u8,
    stream: i64,
    place: c_int,
) -> u64 {
    let asked = (place >= 0).then_some((bytes, stream));
    let address = {
        let mut ledger = ledger();
        let block = ledger.allocate(bytes, device_index, stream, asked);
        let (allocated, reserved) = ledger.totals(device_index);
        // The address stays ours until we free it.
        report(
            block.address,
            block.bytes as i64,
            allocated,
            reserved,
            device_index,
        );
        block.address
    };
    if place >= 0 {
        probes::malloc(place, address, device_index, bytes, stream);
    }
    address
}

/// Takes a block back, with the probe at `place` or, for a negative one, without. Gives 0, or 1 if
/// there is no such block.
#[unsafe(no_mangle)]
pub extern "C" fn fake_c10_free(address: u64, place: c_int) -> c_int {
    if place >= 0 {
        probes::free(place, address);
    }
    let mut ledger = ledger();
    let Some(block) = ledger.free(address) else {
        return 1;
    };
    let (allocated, reserved) = ledger.totals(block.device);
    report(
        address,
        -(block.bytes as i64),
        allocated,
        reserved,
        block.device,
    );
    0
}

/// An allocator that does not cache: probes alone tell of a block, which is all of what the driver
/// gave at `address`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_c10_tell_uncached(address: u64, bytes: u64, begins: c_int) {
    if begins != 0 {
        probes::malloc(0, address, 0, bytes, 7);
    } else {
        probes::free(0, address);
    }
}

/// Says that `bytes` could not be had.
#[unsafe(no_mangle)]
pub extern "C" fn fake_c10_out_of_memory(bytes: i64, device_index: u8) {
    let mut ledger = ledger();
    ledger.ooms += 1;
    let (allocated, reserved) = ledger.totals(device_index);
    probes::report_out_of_memory(bytes, allocated, reserved, device(device_index));
}

/// Allocates and frees at random for so many rounds on so many threads, over all places, devices
/// and streams; every eighth block stays. The numbers are the same in every run.
#[unsafe(no_mangle)]
pub extern "C" fn fake_c10_churn(rounds: u64, threads: u64) {
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut state = 0x9e37_79b9_7f4a_7c15 ^ thread;
                let mut below = |limit: u64| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (state >> 33) % limit
                };
                for round in 0..rounds {
                    let place = below(probes::MALLOC_PLACES as u64 + 1) as c_int - 1;
                    let bytes = 1 + below(256 << 10);
                    let address =
                        fake_c10_allocate(bytes, below(2) as u8, below(5) as i64 - 1, place);
                    if round % 8 != 7 {
                        let place = below(probes::FREE_PLACES as u64 + 1) as c_int - 1;
                        fake_c10_free(address, place);
                    }
                }
            });
        }
    });
}

/// How many listeners turned the probes on: of malloc in the lower half, of free in the upper.
#[unsafe(no_mangle)]
pub extern "C" fn fake_c10_listeners() -> c_int {
    let (malloc, free) = probes::listeners();
    c_int::from(malloc) | c_int::from(free) << 16
}

/// Writes the books to a file, as JSON. Gives 0.
///
/// # Safety
/// `path` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_c10_write_books(path: *const c_char) -> c_int {
    // SAFETY: as promised by the caller.
    let path = unsafe { std::ffi::CStr::from_ptr(path) };
    let path = PathBuf::from(path.to_string_lossy().into_owned());
    let books = ledger().to_json();
    c_int::from(std::fs::write(path, books.to_string()).is_err())
}

/// Calls c10's function as the allocator does.
fn report(address: u64, bytes: i64, allocated: u64, reserved: u64, device_index: u8) {
    probes::report_memory_usage(address, bytes, allocated, reserved, device(device_index));
}
