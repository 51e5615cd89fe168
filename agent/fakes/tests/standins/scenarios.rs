//! Every scenario's ledgers against totals worked out by hand.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    process::{Command, Stdio},
};

use vramscope_fakes::ledger::{Kind, Layer, Totals};

use crate::support::{Bench, Expected, MIB, assert_ledger, succeed};

/// `exit-code`, `crash` and `sleep` hold one device block and one pinned one.
fn held() -> [(u32, Kind, Expected); 2] {
    let block = |bytes| Expected {
        allocations: 1,
        allocated: bytes,
        peak: bytes,
        ..Expected::NONE
    };
    [
        (0, Kind::Device, block(64 * MIB)),
        (0, Kind::PinnedHost, block(2 * MIB)),
    ]
}

/// `demo` with R requests of which K grow the KV cache, device 0, in MiB: 8 weights of 32, K chunks
/// of 8, R times activations of 24, logits of 2 and a leak of 1, two scratch blocks of 3.
fn assert_demo(requests: u64, kv_chunks: u64) {
    let bench = Bench::new();
    succeed(&mut bench.workload(&format!("demo --requests {requests}")));
    let leaked = requests;
    let lasting = 256 + 8 * kv_chunks + leaked;
    let temporary = 26 * requests + 3 + 3;
    for layer in [Layer::Driver, Layer::Runtime] {
        let expected = [
            (
                0,
                Kind::Device,
                Expected {
                    allocations: 8 + kv_chunks + 3 * requests + 2,
                    // The one that is larger than the card.
                    failed_allocations: 1,
                    frees: 2 * requests + 2,
                    // The second free of the same block.
                    failed_frees: 1,
                    allocated: (lasting + temporary) * MIB,
                    freed: temporary * MIB,
                    // In the last request all that lasts is there, with activations and logits.
                    peak: (lasting + 26) * MIB,
                },
            ),
            (
                1,
                Kind::Device,
                Expected {
                    allocations: 8,
                    allocated: 256 * MIB,
                    peak: 256 * MIB,
                    ..Expected::NONE
                },
            ),
            (
                0,
                Kind::PinnedHost,
                Expected {
                    allocations: 2,
                    frees: 1,
                    allocated: 18 * MIB,
                    freed: 2 * MIB,
                    peak: 18 * MIB,
                    ..Expected::NONE
                },
            ),
            (
                1,
                Kind::PinnedHost,
                Expected {
                    allocations: 1,
                    allocated: 16 * MIB,
                    peak: 16 * MIB,
                    ..Expected::NONE
                },
            ),
            (
                0,
                Kind::RegisteredHost,
                Expected {
                    allocations: 1,
                    frees: 1,
                    allocated: 4 * MIB,
                    freed: 4 * MIB,
                    peak: 4 * MIB,
                    ..Expected::NONE
                },
            ),
        ];
        assert_ledger(&bench.ledger(layer), &expected);
    }
}

#[test]
fn demo() {
    assert_demo(3, 3);
    assert_demo(100, 16);
}

/// Every 256 allocations of a thread use each multiple of 4096 up to 1 MiB once: 4096 * (1 + … +
/// 256) = 134,742,016 bytes. Threads alternate between two devices. Before, one block of 8 MiB a
/// thread (here 4 * 8 = 32 MiB) goes up and down on each device.
#[test]
fn threads() {
    for seed in [1, 77] {
        let bench = Bench::new();
        let arguments = format!("threads --threads 4 --iterations 512 --seed {seed}");
        succeed(&mut bench.workload(&arguments));
        let on_device = || Expected {
            allocations: 2 * 512 + 1,
            frees: 2 * 512 + 1,
            allocated: 2 * 2 * 134_742_016 + 32 * MIB,
            freed: 2 * 2 * 134_742_016 + 32 * MIB,
            peak: 32 * MIB,
            ..Expected::NONE
        };
        let expected = [
            (0, Kind::Device, on_device()),
            (1, Kind::Device, on_device()),
        ];
        assert_ledger(&bench.ledger(Layer::Driver), &expected);
        assert_ledger(&bench.ledger(Layer::Runtime), &expected);
    }
}

#[test]
fn every_nth_free_fails_when_asked_and_its_block_lives() {
    let bench = Bench::new();
    let mut command = bench.workload("threads --threads 4 --iterations 256");
    succeed(command.env("VRAMSCOPE_FAKE_FAIL_FREE", "10"));
    // 4 * 256 blocks of the threads and one a device before: 1026 frees are tried, 102 fail.
    for layer in [Layer::Driver, Layer::Runtime] {
        let ledger = bench.ledger(layer);
        let sum = |field: fn(Totals) -> u64| -> u64 {
            (0..2)
                .map(|device| field(ledger.totals(device, Kind::Device)))
                .sum()
        };
        assert_eq!(sum(|totals| totals.allocations), 1026);
        assert_eq!(sum(|totals| totals.frees), 924);
        assert_eq!(sum(|totals| totals.failed_frees), 102);
        assert_eq!(sum(|totals| totals.live_count), 102);
    }
}

#[test]
fn paced_runs_its_course() {
    let bench = Bench::new();
    let output = succeed(&mut bench.workload("paced --seconds 1 --rate 200"));
    // 200 blocks of 16 KiB, every tenth leaked. Before each leak but the first, a block came on top
    // of one leak less, so the peak is that of the 20th leak.
    let expected = [(
        0,
        Kind::Device,
        Expected {
            allocations: 200,
            frees: 180,
            allocated: 200 * 16384,
            freed: 180 * 16384,
            peak: 20 * 16384,
            ..Expected::NONE
        },
    )];
    assert_ledger(&bench.ledger(Layer::Driver), &expected);
    assert_ledger(&bench.ledger(Layer::Runtime), &expected);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("20 leaked (327680 bytes)"), "{text}");
}

#[test]
fn paced_ends_cleanly_on_sigterm() {
    let bench = Bench::new();
    let mut command = bench.workload("paced --seconds 600 --rate 200");
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    bench.wait_for(|totals| totals.allocations > 20);
    // SAFETY: a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let totals = bench.ledger(Layer::Driver).totals(0, Kind::Device);
    assert_eq!(totals.live_count, totals.allocations / 10);
}

#[test]
fn a_forked_child_has_books_of_its_own() {
    for (arguments, before) in [("fork", 0), ("fork --after-use", 7 * MIB)] {
        let bench = Bench::new();
        let mut command = bench.workload(arguments);
        let mut parent = command.spawn().unwrap();
        assert!(parent.wait().unwrap().success());
        let ledgers = bench.ledgers();
        assert_eq!(ledgers.len(), 4, "two layers of two processes");
        for ledger in &ledgers {
            let expected = if ledger.pid == parent.id() {
                Expected {
                    allocations: 1 + u64::from(before > 0),
                    allocated: before + 3 * MIB,
                    peak: before + 3 * MIB,
                    ..Expected::NONE
                }
            } else {
                Expected {
                    allocations: 2,
                    frees: 1,
                    allocated: 10 * MIB,
                    freed: 5 * MIB,
                    peak: 10 * MIB,
                    ..Expected::NONE
                }
            };
            assert_ledger(ledger, &[(0, Kind::Device, expected)]);
        }
    }
}

#[test]
fn exit_code_is_passed_on() {
    let bench = Bench::new();
    let status = bench.workload("exit-code 17").status().unwrap();
    assert_eq!(status.code(), Some(17));
    assert_ledger(&bench.ledger(Layer::Driver), &held());
    assert_ledger(&bench.ledger(Layer::Runtime), &held());
}

#[test]
fn a_crash_leaves_the_books() {
    let bench = Bench::new();
    let status = bench.workload("crash").status().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGABRT));
    assert_ledger(&bench.ledger(Layer::Driver), &held());
    assert_ledger(&bench.ledger(Layer::Runtime), &held());
}

#[test]
fn a_kill_leaves_the_books() {
    let bench = Bench::new();
    let mut child = bench.workload("sleep 60").spawn().unwrap();
    bench.wait_for(|totals| totals.live_bytes == 64 * MIB);
    let pinned = || bench.ledger(Layer::Runtime).totals(0, Kind::PinnedHost);
    while pinned().live_count == 0 {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    let ledger = bench.ledger(Layer::Driver);
    assert_eq!(ledger.pid, child.id());
    assert_ledger(&ledger, &held());
}

#[test]
fn driver_scenario_uses_no_runtime() {
    let bench = Bench::new();
    succeed(&mut bench.workload("driver"));
    // 10 MiB freed, 6 MiB freed by its context's end, 6 MiB left.
    let expected = [
        (
            0,
            Kind::Device,
            Expected {
                allocations: 3,
                failed_allocations: 1,
                frees: 2,
                allocated: 22 * MIB,
                freed: 16 * MIB,
                peak: 10 * MIB,
                ..Expected::NONE
            },
        ),
        (
            0,
            Kind::PinnedHost,
            Expected {
                allocations: 1,
                frees: 1,
                allocated: 2 * MIB,
                freed: 2 * MIB,
                peak: 2 * MIB,
                ..Expected::NONE
            },
        ),
        (
            0,
            Kind::RegisteredHost,
            Expected {
                allocations: 1,
                frees: 1,
                allocated: MIB,
                freed: MIB,
                peak: MIB,
                ..Expected::NONE
            },
        ),
    ];
    assert_eq!(bench.ledgers().len(), 1);
    assert_ledger(&bench.ledger(Layer::Driver), &expected);
}

#[test]
fn the_planted_miscount_doubles_the_drivers_first_allocation() {
    let bench = Bench::new();
    let mut command = bench.workload("exit-code 0");
    succeed(command.env("VRAMSCOPE_FAKE_MISCOUNT", "1"));
    let expected = Expected {
        allocations: 2,
        allocated: 128 * MIB,
        peak: 128 * MIB,
        ..Expected::NONE
    };
    let [_, pinned] = held();
    let driver = bench.ledger(Layer::Driver);
    assert_ledger(&driver, &[(0, Kind::Device, expected), pinned]);
    assert_ledger(&bench.ledger(Layer::Runtime), &held());
}

#[test]
fn without_a_folder_nothing_is_written() {
    let bench = Bench::new();
    let mut command = bench.workload("exit-code 0");
    succeed(command.env_remove("VRAMSCOPE_FAKE_DIR"));
    assert_eq!(fs::read_dir(bench.folder()).unwrap().count(), 0);
}

#[test]
fn a_missing_library_is_said_with_exit_code_3() {
    // SAFETY: only asks the dynamic linker whether there is such a library.
    let is_there =
        |name: &std::ffi::CStr| unsafe { !libc::dlopen(name.as_ptr(), libc::RTLD_NOW).is_null() };
    if [c"libcudart.so.13", c"libcudart.so.12", c"libcudart.so"]
        .into_iter()
        .any(is_there)
    {
        eprintln!("skipped: this machine has a CUDA runtime of its own");
        return;
    }
    let bench = Bench::new();
    let mut command = bench.workload("demo");
    let output = command
        .env("LD_LIBRARY_PATH", bench.folder())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("no CUDA library found"), "{text}");
    assert!(text.contains("LD_LIBRARY_PATH"), "{text}");
}

#[test]
fn the_ledger_command_prints_what_the_files_hold() {
    let bench = Bench::new();
    succeed(&mut bench.workload("exit-code 0"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramscope-fakes"));
    let output = succeed(command.arg("ledger").arg(bench.folder()));
    let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed[0]["layer"], "driver");
    assert_eq!(
        printed[0]["devices"][0]["kinds"]["device"]["live_bytes"],
        67_108_864
    );
    assert_eq!(
        printed[1]["devices"][0]["kinds"]["pinned_host"]["live_bytes"],
        2_097_152
    );
}
