use serde_json::json;

use super::*;

fn zero() -> Value {
    json!({
        "allocations": 0, "failed_allocations": 0, "frees": 0, "failed_frees": 0,
        "live_count": 0, "live_bytes": 0, "peak_bytes": 0,
        "allocated_bytes": 0, "freed_bytes": 0
    })
}

/// A process that allocated 100 + 50 + 20 bytes on device 1, freed the 100 first, kept the rest to
/// its end, failed to allocate once and to free twice (one of them with the device unknown), and
/// reserved 8 bytes of addresses. Peak 150: worked out by hand.
fn ledger(start_ticks: u64) -> Vec<ProcessLedger> {
    let device = json!({
        "allocations": 3, "failed_allocations": 1, "frees": 1, "failed_frees": 1,
        "live_count": 2, "live_bytes": 70, "peak_bytes": 150,
        "allocated_bytes": 170, "freed_bytes": 100
    });
    let mut failed_free = zero();
    failed_free["failed_frees"] = json!(1);
    let mut addresses = zero();
    for (name, value) in [
        ("allocations", 1),
        ("live_count", 1),
        ("live_bytes", 8),
        ("peak_bytes", 8),
        ("allocated_bytes", 8),
    ] {
        addresses[name] = json!(value);
    }
    let text = json!([
        {"pid": 7, "start_ticks": start_ticks, "layer": "driver",
         "devices": [
            {"device": 0, "kinds": {"device": failed_free, "pinned_host": zero()},
             "pool_reserved_bytes": 0, "pool_reserved_peak_bytes": 0},
            {"device": 1, "kinds": {"device": device},
             "pool_reserved_bytes": 0, "pool_reserved_peak_bytes": 0}],
         "without_device": {"vmm_virtual": addresses}},
        {"pid": 7, "start_ticks": start_ticks, "layer": "runtime", "devices": [],
         "without_device": {}}
    ]);
    serde_json::from_value(text).unwrap()
}

/// A process that only asked what there is.
fn silent(start_ticks: u64) -> ProcessLedger {
    let mut ledger = ledger(start_ticks).remove(0);
    for device in &mut ledger.devices {
        device
            .kinds
            .values_mut()
            .for_each(|t| *t = Totals::default());
    }
    ledger.without_device.clear();
    ledger
}

fn rows_of(process_id: u64, started: u64) -> Vec<Row> {
    let rows = json!([
        {"pid": 7, "device": 1, "memory_kind": "device",
         "allocations": 3, "allocated_bytes": 170, "frees": 1, "freed_bytes": 100,
         "live_at_exit": 2, "live_at_exit_bytes": 70,
         "failed_allocations": 1, "failed_frees": 1, "peak_bytes": 150},
        {"pid": 7, "device": null, "memory_kind": null,
         "allocations": 0, "allocated_bytes": 0, "frees": 0, "freed_bytes": 0,
         "live_at_exit": 0, "live_at_exit_bytes": 0,
         "failed_allocations": 0, "failed_frees": 1, "peak_bytes": 0},
        {"pid": 7, "device": null, "memory_kind": "vmm_virtual",
         "allocations": 1, "allocated_bytes": 8, "frees": 0, "freed_bytes": 0,
         "live_at_exit": 1, "live_at_exit_bytes": 8,
         "failed_allocations": 0, "failed_frees": 0, "peak_bytes": 8},
        {"pid": 7, "device": 0, "memory_kind": "ipc",
         "allocations": 0, "allocated_bytes": 0, "frees": 0, "freed_bytes": 0,
         "live_at_exit": 0, "live_at_exit_bytes": 0,
         "failed_allocations": 1, "failed_frees": 1, "peak_bytes": 0},
        {"pid": 8, "device": 0, "memory_kind": "device",
         "allocations": 9, "allocated_bytes": 9, "frees": 0, "freed_bytes": 0,
         "live_at_exit": 9, "live_at_exit_bytes": 9,
         "failed_allocations": 0, "failed_frees": 0, "peak_bytes": 9}
    ]);
    let mut rows: Vec<Row> = serde_json::from_value(rows).unwrap();
    for row in &mut rows {
        row.insert("process_id".to_string(), json!(process_id));
        row.insert("started".to_string(), json!(started));
    }
    rows
}

fn rows() -> Vec<Row> {
    rows_of(5000, 1)
}

fn compare_with(ledgers: &[ProcessLedger], rows: &[Row]) -> Vec<String> {
    let ledger = from_ledgers(Source::Totals, ledgers).unwrap();
    let sql = from_rows(Source::Totals, rows, &BTreeSet::from([7])).unwrap();
    differences(&ledger, &sql)
}

fn compare(rows: &[Row]) -> Vec<String> {
    compare_with(&ledger(1), rows)
}

/// Equal sides have no differences; a process without a ledger is not looked at, nor is another
/// process's memory.
#[test]
fn equal_sides_match() {
    assert_eq!(compare(&rows()), Vec::<String>::new());
}

/// One more of anything is found and named, in a kind with a device and in one without.
#[test]
fn every_column_is_looked_at() {
    for figure in Source::Totals.figures() {
        for place in [0, 2] {
            let mut rows = rows();
            let value = rows[place][figure.name].as_u64().unwrap();
            rows[place][figure.name] = json!(value + 1);
            let found = compare(&rows);
            assert_eq!(found.len(), 1, "{}: {found:?}", figure.name);
            assert!(found[0].contains(figure.name), "{found:?}");
        }
    }
}

/// A process the SQL does not know, and a place the ledger does not know, are differences.
#[test]
fn missing_and_surplus_rows_are_found() {
    assert_eq!(compare(&[]), ["process 7 is in the ledger, not in SQL"]);
    let mut surplus = rows();
    surplus[4]["pid"] = json!(7);
    assert!(!compare(&surplus).is_empty());
    // The same memory under another device, or under none.
    for device in [json!(0), json!(null)] {
        let mut moved = rows();
        moved[0]["device"] = device;
        assert!(!compare(&moved).is_empty());
    }
}

/// Two lifetimes with one pid are compared in the order of their starts, whatever their ids, and
/// one that did nothing takes no turn.
#[test]
fn a_reused_pid_is_two_processes() {
    let mut second = ledger(30);
    let device = second[0].devices[1].kinds.get_mut("device").unwrap();
    device.peak_bytes = 160;
    let ledgers = [second, ledger(20), vec![silent(10)]].concat();
    let mut later = rows_of(4000, 2);
    later[0]["peak_bytes"] = json!(160);
    let both = [later.clone(), rows()].concat();
    assert_eq!(compare_with(&ledgers, &both), Vec::<String>::new());
    assert_eq!(
        compare_with(&ledgers, &rows()),
        ["process 7 (number 2 of that pid) is in the ledger, not in SQL"]
    );
    // The other way round they differ.
    for row in &mut later {
        row["started"] = json!(0);
    }
    let swapped = [later, rows()].concat();
    assert_eq!(compare_with(&ledgers, &swapped).len(), 2);
}

/// Roll-ups have an end for what the end of the process ended, and nothing left.
#[test]
fn roll_ups_are_compared_too() {
    let row = json!({
        "pid": 7, "process_id": 1, "started": 1, "device": 1, "memory_kind": "device",
        "allocations": 3, "allocated_bytes": 170, "ends": 3, "ended_bytes": 170,
        "left_count": 0, "left_bytes": 0, "failed_allocations": 1, "failed_frees": 2,
        "peak_bytes": 150, "window_peak_bytes": 150
    });
    let addresses = json!({
        "pid": 7, "process_id": 1, "started": 1, "device": null, "memory_kind": "vmm_virtual",
        "allocations": 1, "allocated_bytes": 8, "ends": 1, "ended_bytes": 8,
        "left_count": 0, "left_bytes": 0, "failed_allocations": 0, "failed_frees": 0,
        "peak_bytes": 8, "window_peak_bytes": 8
    });
    let rows: Vec<Row> = serde_json::from_value(json!([row, addresses])).unwrap();
    for source in [Source::DeviceWindows, Source::StackWindows] {
        let ledger = from_ledgers(source, &ledger(1)).unwrap();
        let compare = |rows: &[Row]| {
            let sql = from_rows(source, rows, &BTreeSet::from([7])).unwrap();
            differences(&ledger, &sql)
        };
        assert_eq!(compare(&rows), Vec::<String>::new());
        for figure in source.figures() {
            let mut rows = rows.clone();
            let value = rows[0][figure.name].as_u64().unwrap();
            rows[0][figure.name] = json!(value + 1);
            assert_eq!(compare(&rows).len(), 1, "{}", figure.name);
        }
    }
}
