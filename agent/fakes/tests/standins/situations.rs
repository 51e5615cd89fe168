//! Scenarios about sorts of memory, devices and contexts: totals worked out by hand from the steps
//! that each takes.

use std::process::Command;

use vramscope_fakes::ledger::{Kind, Layer, ProcessLedger};

use crate::support::{Bench, Expected, MIB, assert_books, assert_ledger, succeed};

fn output_of(command: &mut Command) -> String {
    String::from_utf8(succeed(command).stdout).unwrap()
}

#[track_caller]
fn assert_reserved(ledger: &ProcessLedger, device: u32, mib: u64, peak_mib: u64) {
    let device = ledger.device(device).unwrap();
    let found = (device.pool_reserved_bytes, device.pool_reserved_peak_bytes);
    assert_eq!(found, (mib * MIB, peak_mib * MIB));
}

/// T threads of I blocks each, thread t's of t times 4096 bytes; before, one block of 2 MiB a thread.
#[test]
fn race_hands_addresses_from_thread_to_thread() {
    let bench = Bench::new();
    let said = output_of(&mut bench.workload("race --threads 6 --iterations 3000"));
    let reused: u64 = said.split(' ').next().unwrap().parse().unwrap();
    assert!(reused > 0, "no address went to another thread: {said}");
    let sizes = 4096 * (1 + 2 + 3 + 4 + 5 + 6);
    let bytes = 3000 * sizes + 12 * MIB;
    let expected = [(
        0,
        Kind::Device,
        Expected::ended(6 * 3000 + 1, bytes, 12 * MIB),
    )];
    assert_ledger(&bench.ledger(Layer::Driver), &expected);
    assert_ledger(&bench.ledger(Layer::Runtime), &expected);
}

/// Of each kind one block that is allocated and freed; then a second free, and one of nothing.
#[test]
fn failures_are_counted_and_nothing_stays() {
    let bench = Bench::new();
    succeed(&mut bench.workload("failures"));
    let one = |bytes| Expected::ended(1, bytes, bytes);
    let of_runtime = [
        // The managed block's second free counts here: cudaFree is a function for device memory.
        (Some(0), Kind::Device, one(4 * MIB).failing(1, 3)),
        (Some(0), Kind::Managed, one(3 * MIB).failing(1, 0)),
        (Some(0), Kind::PinnedHost, one(2 * MIB).failing(1, 2)),
        (Some(0), Kind::RegisteredHost, one(MIB).failing(1, 2)),
        // 256 x 256 elements of one float.
        (Some(0), Kind::Array, one(256 * 256 * 4).failing(1, 2)),
        (Some(0), Kind::Pool, one(5 * MIB).failing(1, 2)),
    ];
    assert_books(&bench.ledger(Layer::Runtime), &of_runtime);
    let of_driver = [
        // 2 MiB created for the release, 2 for the mapping; more than the card asked for once.
        (
            Some(0),
            Kind::VmmPhysical,
            Expected::ended(2, 4 * MIB, 2 * MIB).failing(1, 0),
        ),
        // A mapping over the mapping; an unmapping of more than was mapped.
        (Some(0), Kind::VmmMapped, one(2 * MIB).failing(1, 1)),
        // The second unmapping finds nothing.
        (None, Kind::VmmMapped, Expected::NONE.failing(0, 1)),
        // Retained and imported nothing; released twice, and what never was.
        (None, Kind::VmmPhysical, Expected::NONE.failing(2, 2)),
        // Half of a reservation, and one twice.
        (
            None,
            Kind::VmmVirtual,
            Expected::ended(2, 8 * MIB, 4 * MIB).failing(1, 2),
        ),
        // A thread without a context.
        (None, Kind::Device, Expected::NONE.failing(1, 1)),
    ];
    let ledger = bench.ledger(Layer::Driver);
    assert_books(&ledger, &[&of_runtime[..], &of_driver[..]].concat());
    // The pool was never synchronised.
    assert_reserved(&ledger, 0, 32, 32);
}

#[test]
fn managed_memory_counts_for_the_current_device() {
    let bench = Bench::new();
    succeed(&mut bench.workload("managed"));
    let second = (1, Kind::Managed, Expected::held(4 * MIB));
    let runtime = Expected {
        allocations: 2,
        frees: 1,
        allocated: 16 * MIB,
        freed: 8 * MIB,
        peak: 16 * MIB,
        ..Expected::NONE
    };
    assert_ledger(
        &bench.ledger(Layer::Runtime),
        &[(0, Kind::Managed, runtime), second],
    );
    // With the driver's own block of 2 MiB, after the first of 8 was freed.
    let driver = Expected {
        allocations: 3,
        frees: 2,
        allocated: 18 * MIB,
        freed: 10 * MIB,
        ..runtime
    };
    assert_ledger(
        &bench.ledger(Layer::Driver),
        &[(0, Kind::Managed, driver), second],
    );
}

/// Rows are padded to 512 bytes: 1000 become 1024, 600 become 1024.
#[test]
fn pitched_memory_counts_with_its_padding_and_arrays_by_their_descriptors() {
    let bench = Bench::new();
    let said = output_of(&mut bench.workload("pitched"));
    assert_eq!(said, "pitch 1024\n".repeat(3));
    let (image, volume, rows) = (1024 * 300, 1024 * 30 * 20, 1024 * 10);
    // 128 x 64 of four floats; 32 x 16 x 8 bytes; six layers of 64 x 64 of two shorts; levels of 64 x 64
    // down to 1 x 1 of two shorts.
    let (flat, deep, layered) = (128 * 64 * 16, 32 * 16 * 8, 64 * 64 * 6 * 4);
    let levels = 4 * (64 * 64 + 32 * 32 + 16 * 16 + 8 * 8 + 4 * 4 + 2 * 2 + 1);
    let arrays = Expected {
        allocations: 4,
        frees: 2,
        allocated: flat + deep + layered + levels,
        freed: flat + levels,
        // The flat one is the largest by far until the last comes on top of the other two.
        peak: flat.max(deep + layered + levels),
        ..Expected::NONE
    };
    let of_runtime = Expected {
        allocations: 2,
        frees: 1,
        allocated: image + volume,
        freed: image,
        peak: volume,
        ..Expected::NONE
    };
    let of_driver = Expected {
        allocations: 3,
        frees: 2,
        allocated: image + volume + rows,
        freed: image + rows,
        peak: volume + rows,
        ..Expected::NONE
    };
    for (layer, device) in [(Layer::Runtime, of_runtime), (Layer::Driver, of_driver)] {
        let expected = [(0, Kind::Device, device), (0, Kind::Array, arrays)];
        assert_ledger(&bench.ledger(layer), &expected);
    }
}

/// In MiB, of chunks of 32: 10 and 20 in the first chunk; 40 takes a chunk of 64, twice; 6 and 7 take one
/// of the made pool; 3 do not fit the 2 left of the first chunk and take another.
#[test]
fn pools_reserve_in_chunks_and_count_slices() {
    let bench = Bench::new();
    let said = output_of(&mut bench.workload("pools"));
    let expected = "\
default: reserved 96 of at most 96, used 70 of at most 70
default: reserved 96 of at most 96, used 30 of at most 70
default: reserved 32 of at most 96, used 30 of at most 70
default: reserved 96 of at most 96, used 30 of at most 70
default: reserved 32 of at most 96, used 30 of at most 70
made: reserved 32 of at most 32, used 7 of at most 13
default: reserved 64 of at most 96, used 10 of at most 70
";
    assert_eq!(said, expected);
    let first = Expected {
        allocations: 7,
        // From the pool that was destroyed.
        failed_allocations: 1,
        frees: 6,
        allocated: (10 + 20 + 40 + 40 + 6 + 7 + 3) * MIB,
        freed: (20 + 40 + 40 + 6 + 7 + 3) * MIB,
        peak: 70 * MIB,
        ..Expected::NONE
    };
    // The slice of a pool of device 1, made while device 0 was current, outlives its pool.
    let second = Expected::held(5 * MIB);
    let ledger = bench.ledger(Layer::Driver);
    assert_ledger(&ledger, &[(0, Kind::Pool, first), (1, Kind::Pool, second)]);
    assert_reserved(&ledger, 0, 64, 96);
    assert_reserved(&ledger, 1, 32, 32);
    assert_eq!(ledger.physical_bytes(0), 64 * MIB);
}

#[test]
fn memory_ends_with_its_last_reference_and_mapping() {
    let bench = Bench::new();
    succeed(&mut bench.workload("vmm"));
    let expected = [
        // 8 that an unmapping ends, 6 that a release ends, 10 that stay.
        (
            Some(0),
            Kind::VmmPhysical,
            Expected {
                allocations: 3,
                frees: 2,
                allocated: 24 * MIB,
                freed: 14 * MIB,
                peak: 10 * MIB,
                ..Expected::NONE
            },
        ),
        (
            Some(1),
            Kind::VmmPhysical,
            Expected::ended(1, 4 * MIB, 4 * MIB),
        ),
        // The 8 twice; the 10; a part of the 8 could not be unmapped.
        (
            Some(0),
            Kind::VmmMapped,
            Expected {
                allocations: 3,
                frees: 2,
                failed_frees: 1,
                allocated: 26 * MIB,
                freed: 16 * MIB,
                peak: 16 * MIB,
                ..Expected::NONE
            },
        ),
        // The 4 twice.
        (
            Some(1),
            Kind::VmmMapped,
            Expected::ended(2, 8 * MIB, 8 * MIB),
        ),
        // The 6 that were imported.
        (None, Kind::VmmMapped, Expected::ended(1, 6 * MIB, 6 * MIB)),
        // 64 that could not be given back while mapped, and 16.
        (
            None,
            Kind::VmmVirtual,
            Expected {
                allocations: 2,
                frees: 1,
                failed_frees: 1,
                allocated: 80 * MIB,
                freed: 16 * MIB,
                peak: 80 * MIB,
                ..Expected::NONE
            },
        ),
    ];
    assert_books(&bench.ledger(Layer::Driver), &expected);
}

/// 10 segments of 20 MiB, of which each round gives 4 back and takes 4; then 5 of 2 MiB. Each pool
/// reserves nine eighths of the 8 GiB, up to a multiple of 20 MiB: 461 of them.
#[test]
fn expandable_segments_grow_and_shrink_at_their_end() {
    let bench = Bench::new();
    succeed(&mut bench.workload("vmm-segments --rounds 3"));
    let (large, small) = (20 * MIB, 2 * MIB);
    let mapped = Expected {
        allocations: 10 + 3 * 4 + 5,
        frees: 3 * 4,
        allocated: (10 + 3 * 4) * large + 5 * small,
        freed: 3 * 4 * large,
        peak: 10 * large + 5 * small,
        ..Expected::NONE
    };
    let reserved = Expected {
        allocations: 2,
        allocated: 2 * 461 * large,
        peak: 2 * 461 * large,
        ..Expected::NONE
    };
    let expected = [
        (Some(0), Kind::VmmPhysical, mapped),
        (Some(0), Kind::VmmMapped, mapped),
        (None, Kind::VmmVirtual, reserved),
    ];
    assert_books(&bench.ledger(Layer::Driver), &expected);
}

#[test]
fn opened_memory_is_in_the_exporters_books_alone() {
    let bench = Bench::new();
    succeed(&mut bench.workload("ipc"));
    for layer in [Layer::Driver, Layer::Runtime] {
        for bytes in [24 * MIB, 3 * MIB] {
            let expected = [(0, Kind::Device, Expected::held(bytes))];
            assert_ledger(&bench.ledger_with(layer, bytes), &expected);
        }
    }
}

#[test]
fn memory_belongs_to_the_device_that_was_current() {
    let bench = Bench::new();
    succeed(&mut bench.workload("devices"));
    // 5, freed under the other device; 3 in a pushed context; 1 on a new thread.
    let first = Expected {
        allocations: 3,
        frees: 1,
        allocated: 9 * MIB,
        freed: 5 * MIB,
        peak: 5 * MIB,
        ..Expected::NONE
    };
    // 7; 2 after the pop; 4 on the thread, freed; 6 in a context made current.
    let second = Expected {
        allocations: 4,
        frees: 1,
        allocated: 19 * MIB,
        freed: 4 * MIB,
        peak: 15 * MIB,
        ..Expected::NONE
    };
    assert_ledger(
        &bench.ledger(Layer::Driver),
        &[(0, Kind::Device, first), (1, Kind::Device, second)],
    );
}

#[test]
fn a_contexts_end_frees_what_was_made_in_it() {
    let bench = Bench::new();
    succeed(&mut bench.workload("contexts"));
    let expected = [
        // 4 destroyed; 6 freed; 1 that stays; 8 reset; 9 and 10 released.
        (
            0,
            Kind::Device,
            Expected {
                allocations: 6,
                frees: 5,
                allocated: (4 + 6 + 1 + 8 + 9 + 10) * MIB,
                freed: (4 + 6 + 8 + 9 + 10) * MIB,
                peak: (1 + 9 + 10) * MIB,
                ..Expected::NONE
            },
        ),
        (1, Kind::Device, Expected::ended(1, 5 * MIB, 5 * MIB)),
        (0, Kind::PinnedHost, Expected::ended(1, 2 * MIB, 2 * MIB)),
        (0, Kind::Managed, Expected::ended(1, 3 * MIB, 3 * MIB)),
        (
            0,
            Kind::Array,
            Expected::ended(1, 256 * 256 * 4, 256 * 256 * 4),
        ),
        // A pool is the device's.
        (0, Kind::Pool, Expected::held(2 * MIB)),
    ];
    assert_ledger(&bench.ledger(Layer::Driver), &expected);
}

#[test]
fn a_reset_frees_what_the_device_holds_but_for_its_pools() {
    let bench = Bench::new();
    succeed(&mut bench.workload("device-reset"));
    let device = Expected {
        allocations: 2,
        frees: 1,
        allocated: 12 * MIB,
        freed: 8 * MIB,
        peak: 8 * MIB,
        ..Expected::NONE
    };
    for layer in [Layer::Driver, Layer::Runtime] {
        let expected = [
            (0, Kind::Device, device),
            (0, Kind::PinnedHost, Expected::ended(1, 2 * MIB, 2 * MIB)),
            (0, Kind::Pool, Expected::held(3 * MIB)),
        ];
        assert_ledger(&bench.ledger(layer), &expected);
    }
}

/// 12 calls inside each other; 3 left before they allocated; 2 left after, whose memory nobody knows of.
#[test]
fn calls_that_never_return_leave_their_memory_in_the_drivers_books() {
    let bench = Bench::new();
    succeed(&mut bench.workload("deep --depth 12 --before 3 --after 2"));
    let nested = Expected {
        allocations: 12,
        allocated: 12 * MIB,
        peak: 12 * MIB,
        ..Expected::NONE
    };
    assert_ledger(&bench.ledger(Layer::Runtime), &[(0, Kind::Device, nested)]);
    let with_abandoned = Expected {
        allocations: 14,
        allocated: 16 * MIB,
        peak: 16 * MIB,
        ..Expected::NONE
    };
    assert_ledger(
        &bench.ledger(Layer::Driver),
        &[(0, Kind::Device, with_abandoned)],
    );
}
