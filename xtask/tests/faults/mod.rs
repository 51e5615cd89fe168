//! Faults planted in the driver, and in the comparison itself.

use xtask::compare::Source;

use crate::bench::{Bench, WORKLOAD};

/// A free that the driver refuses leaves the block alive, in the SQL as in the ledger.
#[test]
fn refused_frees_equal_the_ledger() {
    let Some(mut bench) = Bench::start("refused_frees_equal_the_ledger") else {
        return;
    };
    let mut workload = bench
        .system
        .start_workload_with(
            &["threads", "--threads", "4", "--iterations", "300"],
            &[("VRAMSCOPE_FAKE_FAIL_FREE", "7")],
        )
        .unwrap();
    workload.wait_success(WORKLOAD).unwrap();
    bench.come_to_rest();
    bench.assert_equal_to_ledgers();
}

/// A ledger with one allocation too many does not match: the comparison can fail.
#[test]
fn a_planted_miscount_is_found() {
    let Some(mut bench) = Bench::start("a_planted_miscount_is_found") else {
        return;
    };
    let mut workload = bench
        .system
        .start_workload_with(
            &["demo", "--requests", "10"],
            &[("VRAMSCOPE_FAKE_MISCOUNT", "1")],
        )
        .unwrap();
    workload.wait_success(WORKLOAD).unwrap();
    let pid = workload.id();
    bench.come_to_rest();
    for source in Source::ALL {
        let differences = bench.system.differences_in(source).unwrap();
        let names_the_count = differences
            .iter()
            .any(|line| line.contains(&format!("process {pid}")) && line.contains("allocations"));
        assert!(names_the_count, "{source:?}: {differences:#?}");
    }
}
