//! Created memory, mappings, pools, contexts: histories calculated by hand.

use super::*;

fn vmm(symbol: &str, seq: u64, args: [u64; 4], out: Option<u64>) -> TracedCall {
    let mut call = call(symbol, seq, [args[0], args[1]], out, 0);
    call.args[2..4].copy_from_slice(&args[2..4]);
    // Properties: pinned memory, on device 1.
    call.extra = Some([1, 1 | 1 << 32, 0, 0]);
    call
}

/// What each row says: api, op, kind, bytes, counted.
type Line = (
    &'static str,
    &'static str,
    Option<&'static str>,
    Option<i64>,
    bool,
);

fn lines(rows: &[AllocRow]) -> Vec<Line> {
    rows.iter()
        .map(|r| (r.api, r.op, r.memory_kind, r.bytes, r.counted))
        .collect()
}

fn physical(ledger: &Ledger) -> (u64, u64) {
    ledger.get(PID).unwrap().rollup.live(Class::Physical)
}

/// As expandable segments do: create, map, release the handle, unmap later.
#[test]
fn created_memory_lives_until_its_last_mapping_is_gone() {
    let mut ledger = new_ledger();
    apply(
        &mut ledger,
        &vmm("cuMemAddressReserve", 1, [0, 1000, 0, 0], Some(0x10_0000)),
        false,
    );
    let created = apply(
        &mut ledger,
        &vmm("cuMemCreate", 2, [0, 100, 0, 0], Some(7)),
        false,
    );
    assert_eq!(created[0].device, Some(1));
    apply(
        &mut ledger,
        &vmm("cuMemMap", 3, [0x10_0000, 100, 0, 7], None),
        false,
    );
    apply(
        &mut ledger,
        &vmm("cuMemMap", 4, [0x10_0064, 100, 0, 7], None),
        false,
    );
    let released = apply(
        &mut ledger,
        &vmm("cuMemRelease", 5, [7, 0, 0, 0], None),
        false,
    );
    assert_eq!(
        lines(&released),
        [("cuMemRelease", "free", Some("vmm_physical"), Some(0), false)]
    );
    // The same handle names other memory now, and is released at once.
    apply(
        &mut ledger,
        &vmm("cuMemCreate", 6, [0, 40, 0, 0], Some(7)),
        false,
    );
    assert_eq!(physical(&ledger), (140, 2));
    let released = apply(
        &mut ledger,
        &vmm("cuMemRelease", 7, [7, 0, 0, 0], None),
        false,
    );
    assert_eq!(
        lines(&released),
        [("cuMemRelease", "free", Some("vmm_physical"), Some(40), true)]
    );
    assert_eq!(released[0].alloc_seq, Some(6));
    // One unmap over both mappings ends them, and the memory with the last.
    let unmapped = apply(
        &mut ledger,
        &vmm("cuMemUnmap", 8, [0x10_0000, 200, 0, 0], None),
        false,
    );
    assert_eq!(
        lines(&unmapped),
        [
            ("cuMemUnmap", "unmap", Some("vmm_mapped"), Some(100), true),
            ("cuMemUnmap", "unmap", Some("vmm_mapped"), Some(100), true),
            ("cuMemUnmap", "free", Some("vmm_physical"), Some(100), true),
        ]
    );
    assert_eq!(physical(&ledger), (0, 0));
    assert_eq!(live(&ledger), (1000, 1), "the addresses stay reserved");
    apply(
        &mut ledger,
        &vmm("cuMemAddressFree", 9, [0x10_0000, 1000, 0, 0], None),
        false,
    );
    assert_eq!(live(&ledger), (0, 0));
}

#[test]
fn a_retained_handle_keeps_memory_and_imports_count_nowhere() {
    let mut ledger = new_ledger();
    apply(
        &mut ledger,
        &vmm("cuMemCreate", 1, [0, 100, 0, 0], Some(7)),
        false,
    );
    apply(
        &mut ledger,
        &vmm("cuMemMap", 2, [0x10_0000, 100, 0, 7], None),
        false,
    );
    let retain = vmm(
        "cuMemRetainAllocationHandle",
        3,
        [0, 0x10_0010, 0, 0],
        Some(7),
    );
    assert_eq!(apply(&mut ledger, &retain, false)[0].bytes, Some(0));
    apply(
        &mut ledger,
        &vmm("cuMemUnmap", 4, [0x10_0000, 100, 0, 0], None),
        false,
    );
    apply(
        &mut ledger,
        &vmm("cuMemRelease", 5, [7, 0, 0, 0], None),
        false,
    );
    assert_eq!(physical(&ledger), (100, 1), "two references, one released");
    let import = vmm("cuMemImportFromShareableHandle", 6, [0, 3, 1, 0], Some(9));
    let imported = apply(&mut ledger, &import, false);
    assert_eq!((imported[0].bytes, imported[0].counted), (None, false));
    apply(
        &mut ledger,
        &vmm("cuMemRelease", 7, [9, 0, 0, 0], None),
        false,
    );
    apply(
        &mut ledger,
        &vmm("cuMemRelease", 8, [7, 0, 0, 0], None),
        false,
    );
    assert_eq!(physical(&ledger), (0, 0));
}

#[test]
fn slices_belong_to_their_pools_device_and_outlive_its_name() {
    let mut ledger = new_ledger();
    apply(
        &mut ledger,
        &vmm("cuMemPoolCreate", 1, [0, 0, 0, 0], Some(0xb0)),
        false,
    );
    let mut slice = vmm("cuMemAllocFromPoolAsync", 2, [0, 64, 0xb0, 5], Some(0x5000));
    slice.device = Some(0);
    let row = &apply(&mut ledger, &slice, false)[0];
    assert_eq!(
        (row.device, row.pool, row.stream, row.memory_kind),
        (Some(1), Some(0xb0), Some(5), Some("pool"))
    );
    let mut asks = vmm("cuMemPoolGetAttribute", 3, [0xb0, 5, 0, 0], Some(32 << 20));
    asks.result = 0;
    apply(&mut ledger, &asks, false);
    assert_eq!(ledger.pool_reserved_bytes(PID, Some(1)), Some(32 << 20));
    assert_eq!(ledger.pool_reserved_bytes(PID, Some(0)), None);
    assert!(
        apply(
            &mut ledger,
            &vmm("cuMemPoolDestroy", 4, [0xb0, 0, 0, 0], None),
            false
        )
        .is_empty()
    );
    let free = &apply(
        &mut ledger,
        &vmm("cuMemFreeAsync", 5, [0x5000, 5, 0, 0], None),
        false,
    )[0];
    assert_eq!(
        (
            free.bytes,
            free.counted,
            free.device,
            free.pool,
            free.stream
        ),
        (Some(64), true, Some(1), Some(0xb0), Some(5))
    );
    assert_eq!(live(&ledger), (0, 0));
}

#[test]
fn other_processes_memory_is_a_row_and_no_bytes() {
    let mut ledger = new_ledger();
    let opened = apply(
        &mut ledger,
        &vmm("cuIpcOpenMemHandle_v2", 1, [0; 4], Some(0x7000)),
        false,
    );
    let closed = apply(
        &mut ledger,
        &vmm("cuIpcCloseMemHandle", 2, [0x7000, 0, 0, 0], None),
        false,
    );
    assert_eq!(
        lines(&[opened, closed].concat()),
        [
            ("cuIpcOpenMemHandle_v2", "map", Some("ipc"), None, false),
            ("cuIpcCloseMemHandle", "unmap", Some("ipc"), None, false),
        ]
    );
}

/// Retained twice, so the second release ends it; a reset ends it at once.
#[test]
fn a_primary_context_ends_with_its_last_retain_or_a_reset() {
    for (calls, api) in [
        (
            [
                ("cuDevicePrimaryCtxRelease_v2", 0),
                ("cuDevicePrimaryCtxRelease_v2", 1),
            ],
            "cuDevicePrimaryCtxRelease_v2",
        ),
        (
            [
                ("cuDevicePrimaryCtxReset_v2", 1),
                ("cuDevicePrimaryCtxRelease_v2", 0),
            ],
            "cuDevicePrimaryCtxReset_v2",
        ),
    ] {
        let mut ledger = new_ledger();
        for seq in [1, 2] {
            let retain = call("cuDevicePrimaryCtxRetain", seq, [0, 1], Some(0xc0), 0);
            apply(&mut ledger, &retain, false);
        }
        let mut alloc = call("cuMemAlloc_v2", 3, [0, 8], Some(0x1000), 0);
        alloc.context = Some(0xc0);
        apply(&mut ledger, &alloc, false);
        for (seq, (symbol, freed)) in (4..).zip(calls) {
            let rows = apply(&mut ledger, &call(symbol, seq, [1, 0], None, 0), false);
            assert_eq!(rows.len(), freed, "{symbol}");
            assert!(rows.iter().all(|row| row.api == api && row.implicit));
        }
        assert_eq!(live(&ledger), (0, 0));
    }
}

/// The runtime's reset shows the driver's under it: the driver's row does the work.
#[test]
fn a_reset_through_the_runtime_ends_memory_once() {
    let mut ledger = new_ledger();
    apply(
        &mut ledger,
        &call("cuDevicePrimaryCtxRetain", 1, [0, 1], Some(0xc0), 0),
        false,
    );
    let mut alloc = call("cuMemAlloc_v2", 2, [0, 8], Some(0x1000), 0);
    alloc.context = Some(0xc0);
    apply(&mut ledger, &alloc, false);
    let rows = apply(
        &mut ledger,
        &call("cudaDeviceReset", 3, [0, 0], None, 0),
        false,
    );
    assert_eq!((rows.len(), live(&ledger)), (1, (0, 0)));
}

#[test]
fn beyond_the_limit_rows_go_on_and_nothing_is_followed() {
    let mut ledger = Ledger::new(host(), 2);
    for seq in 1..=3 {
        let row = &apply(
            &mut ledger,
            &call("cuMemAlloc_v2", seq, [0, 8], Some(seq << 12), 0),
            false,
        )[0];
        assert_eq!((row.counted, row.bytes), (seq < 3, Some(8)));
    }
    assert_eq!((live(&ledger), ledger.overflows()), ((16, 2), (1, 0)));
    let free = &apply(
        &mut ledger,
        &call("cuMemFree_v2", 4, [3 << 12, 0], None, 0),
        false,
    )[0];
    assert_eq!((free.bytes, free.counted), (None, false));
    apply(
        &mut ledger,
        &call("cuMemFree_v2", 5, [1 << 12, 0], None, 0),
        false,
    );
    apply(
        &mut ledger,
        &call("cuMemAlloc_v2", 6, [0, 8], Some(0x9000), 0),
        false,
    );
    assert_eq!((live(&ledger), ledger.live()), ((16, 2), 2));
}

/// Of a size that could not be read nothing is claimed.
#[test]
fn memory_of_unknown_size_or_address_is_not_counted() {
    let mut ledger = new_ledger();
    let mut pitched = call("cuMemAllocPitch_v2", 1, [0, 0], Some(0x1000), 0);
    pitched.args[2..4].copy_from_slice(&[100, 10]);
    let row = &apply(&mut ledger, &pitched, false)[0];
    assert_eq!(
        (row.requested_bytes, row.bytes, row.counted),
        (Some(1000), None, false)
    );
    let unread = call("cuMemAlloc_v2", 2, [0, 8], None, 0);
    let row = &apply(&mut ledger, &unread, false)[0];
    assert_eq!(
        (row.address, row.bytes, row.counted),
        (None, Some(8), false)
    );
    assert_eq!(live(&ledger), (0, 0));
}

#[test]
fn what_was_there_before_is_told_once_and_counts_for_nothing() {
    let mut ledger = new_ledger();
    apply(
        &mut ledger,
        &call("cuMemAlloc_v2", 1, [0, 100], Some(0x1000), 0),
        false,
    );
    let card: Arc<str> = "GPU-1".into();
    let rows = rows_of(&mut ledger, |ledger, desk| {
        ledger.baseline(PID, &card, 1000, 5, desk);
        ledger.baseline(PID, &card, 2000, 6, desk);
    });
    assert_eq!(
        lines(&rows),
        [("baseline", "alloc", None, Some(900), false)]
    );
    assert_eq!(live(&ledger), (100, 1));
}
