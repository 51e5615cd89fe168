//! What memory of the card holds, events, properties, and a card of another size: what PyTorch needs
//! beyond allocations.

use std::ffi::{c_char, c_int, c_uint, c_void};

use vramscope_fakes::ledger::{Kind, Layer};

use crate::driver::{Library, call};
use crate::support::{Bench, MIB, is_alone, run_alone};

const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const INVALID_HANDLE: c_int = 400;
const NOT_SUPPORTED: c_int = 801;

/// cudaMemcpyDefault.
const BY_ADDRESS: c_int = 4;
/// So small that a test fills it.
const CARD_BYTES: usize = 64 << 20;

#[test]
fn what_is_copied_to_a_card_comes_back() {
    let bench = Bench::new();
    run_alone(&bench, "copies::copies", |_| {});
    // Copies are in no book.
    let totals = bench.ledger(Layer::Driver).totals(0, Kind::Device);
    assert_eq!((totals.allocations, totals.frees), (3, 2));
}

#[test]
fn events_and_kernels_answer_as_documented() {
    run_alone(&Bench::new(), "copies::events", |_| {});
}

#[test]
fn a_card_is_as_large_as_the_environment_says() {
    let bench = Bench::new();
    run_alone(&bench, "copies::small_card", |command| {
        command.env("VRAMSCOPE_FAKE_DEVICE_BYTES", CARD_BYTES.to_string());
    });
    let totals = bench.ledger(Layer::Driver).totals(0, Kind::Device);
    assert_eq!((totals.allocations, totals.failed_allocations), (1, 1));
}

#[test]
#[ignore = "run by what_is_copied_to_a_card_comes_back"]
fn copies() {
    if !is_alone() {
        return;
    }
    let cuda = Library::open("libcudart.so.13");
    let malloc = |bytes: usize| {
        let mut address = 0usize;
        let code = call!(cuda, c"cudaMalloc", &mut address => *mut usize, bytes => usize);
        assert_eq!(code, 0);
        address
    };
    let copy = |to: usize, from: usize, bytes: usize| call!(cuda, c"cudaMemcpy", to => usize, from => usize, bytes => usize, BY_ADDRESS => c_int);
    let length = 5 * MIB as usize;
    let pattern: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
    let mut back = vec![1u8; length];

    let (first, second) = (malloc(length), malloc(length));
    assert_eq!(copy(first, pattern.as_ptr() as usize, length), 0);
    assert_eq!(copy(second + 100, first + 100, length - 100), 0);
    assert_eq!(copy(back.as_mut_ptr() as usize, second, length), 0);
    assert!(back[..100].iter().all(|byte| *byte == 0), "never written");
    assert_eq!(back[100..], pattern[100..]);
    let set = call!(cuda, c"cudaMemset", second => usize, 0x1ff => c_int, 10 => usize);
    assert_eq!(set, 0);
    assert_eq!(copy(back.as_mut_ptr() as usize, second, 20), 0);
    assert_eq!(back[..20], [[0xff; 10], [0; 10]].concat());

    // Freed memory can no longer be copied from, and the next one to get it reads zeros.
    let free = |address: usize| call!(cuda, c"cudaFree", address => usize);
    assert_eq!(free(first), 0);
    assert_eq!(copy(back.as_mut_ptr() as usize, first, 1), INVALID_VALUE);
    assert_eq!(malloc(length), first);
    assert_eq!(copy(back.as_mut_ptr() as usize, first, length), 0);
    assert!(back.iter().all(|byte| *byte == 0));
    // A range that goes beyond its block.
    assert_eq!(
        copy(first, pattern.as_ptr() as usize, usize::MAX / 2),
        INVALID_VALUE
    );

    // type, device, pointers; reserved words.
    let mut attributes = [0u64; 11];
    let mut kind_of = |address: usize| {
        let code = call!(
            cuda, c"cudaPointerGetAttributes", attributes.as_mut_ptr() => *mut u64,
            address => usize
        );
        assert_eq!(code, 0);
        attributes[0] as u32
    };
    assert_eq!(kind_of(second + 1), 2, "of the card");
    assert_eq!(kind_of(back.as_ptr() as usize), 0, "of nobody");
    let mut pinned = 0usize;
    let given = call!(
        cuda, c"cudaHostAlloc", &mut pinned => *mut usize, 4096 => usize, 0 => c_uint
    );
    assert_eq!((given, kind_of(pinned)), (0, 1));
    assert_eq!(free(second), 0);
}

#[test]
#[ignore = "run by events_and_kernels_answer_as_documented"]
fn events() {
    if !is_alone() {
        return;
    }
    let cuda = Library::open("libcudart.so.13");
    let create = || {
        let mut event = 0usize;
        let code = call!(
            cuda, c"cudaEventCreateWithFlags", &mut event => *mut usize, 0 => c_uint
        );
        assert_eq!(code, 0);
        event
    };
    let (start, end) = (create(), create());
    assert_ne!(start, end);
    let mut milliseconds = -1f32;
    let mut elapsed = || {
        call!(
            cuda, c"cudaEventElapsedTime", &mut milliseconds => *mut f32, start => usize,
            end => usize
        )
    };
    assert_eq!(elapsed(), INVALID_HANDLE, "neither was recorded");
    for event in [start, end] {
        assert_eq!(
            call!(cuda, c"cudaEventRecord", event => usize, 0 => usize),
            0
        );
        assert_eq!(call!(cuda, c"cudaEventQuery", event => usize), 0);
    }
    assert_eq!(elapsed(), 0);
    assert!(milliseconds >= 0.0);
    assert_eq!(call!(cuda, c"cudaEventDestroy", start => usize), 0);
    assert_eq!(
        call!(cuda, c"cudaEventDestroy", start => usize),
        INVALID_HANDLE
    );
    // A stream that was never made.
    assert_eq!(
        call!(cuda, c"cudaEventRecord", end => usize, 0x1234_5678 => usize),
        INVALID_HANDLE
    );

    // What was pushed for a launch is what the launch pops.
    let push = call!(
        cuda, c"__cudaPushCallConfiguration", 0x2_0000_0001 => u64, 3 => u64, 0x5_0000_0004 => u64,
        6 => u64, 7 => usize, 8 => usize
    );
    let (mut grid, mut block, mut shared, mut stream) = ([0u32; 3], [0u32; 3], 0usize, 0usize);
    let mut pop = || {
        call!(
            cuda, c"__cudaPopCallConfiguration", grid.as_mut_ptr() => *mut u32,
            block.as_mut_ptr() => *mut u32, &mut shared => *mut usize, &mut stream => *mut usize
        )
    };
    assert_eq!((push, pop(), pop()), (0, 0, INVALID_VALUE));
    assert_eq!((grid, block, shared, stream), ([1, 2, 3], [4, 5, 6], 7, 8));
    assert_eq!(
        call!(cuda, c"cudaGraphLaunch", 0 => usize, 0 => usize),
        NOT_SUPPORTED
    );
    assert_eq!(call!(cuda, c"cudaGetLastError"), NOT_SUPPORTED);

    // A name that the driver lacks is told in the status.
    let entry_point = |name: &std::ffi::CStr| {
        let (mut address, mut status) = (1usize, -1);
        let code = call!(
            cuda, c"cudaGetDriverEntryPointByVersion", name.as_ptr() => *const c_char,
            &mut address => *mut usize, 12000 => c_uint, 0 => u64, &mut status => *mut c_int
        );
        (code, address != 0, status)
    };
    assert_eq!(entry_point(c"cuMemGetAddressRange"), (0, true, 0));
    assert_eq!(entry_point(c"cuNoSuchFunction"), (0, false, 1));
}

#[test]
#[ignore = "run by a_card_is_as_large_as_the_environment_says"]
fn small_card() {
    if !is_alone() {
        return;
    }
    let cuda = Library::open("libcudart.so.13");
    let malloc = |bytes: usize| {
        let mut address = 0usize;
        call!(cuda, c"cudaMalloc", &mut address => *mut usize, bytes => usize)
    };
    assert_eq!(malloc(CARD_BYTES), 0);
    assert_eq!(malloc(1), OUT_OF_MEMORY);
    // cudaDeviceProp is 1008 bytes, with the card's bytes at 288 and its name first.
    let mut properties = [0u64; 127];
    let code = call!(
        cuda, c"cudaGetDeviceProperties", properties.as_mut_ptr().cast() => *mut c_void, 0 => c_int
    );
    assert_eq!((code, properties[288 / 8]), (0, CARD_BYTES as u64));
    assert_eq!(&properties[0].to_ne_bytes(), b"Stand-in");
    assert_eq!(properties[126], 0, "nothing is written behind its end");
}
