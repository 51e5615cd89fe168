//! Raw rows of a framework's allocator of which only some have travelled: sums over them would be
//! wrong, so views that add up leave them out, process by process.

use serde_json::{Value, json};
use vramscope_queries::folder::Folder;
use vramscope_queries::session::Options;
use vramscope_wire::Table;

use crate::folder::number;
use crate::seed;

const WHOLE: i64 = 1;
const PARTIAL: i64 = 2;
const NOT_ROLLED_UP: i64 = 3;

fn block(process: i64, seq: i64) -> Value {
    let over = json!({
        "layer": "framework", "source": "usdt", "api": "pytorch:malloc",
        "memory_kind": "framework_block"});
    seed::alloc("h", process, seq, 1, 1000, 7, over)
}

fn window(process: i64, allocations: i64) -> Value {
    json!({
        "ts": seed::at(0), "ts_ns": seed::nanoseconds(0), "window_end": seed::at(60), "host": "h",
        "boot_id": "boot", "process_id": process, "pid": 1, "memory_kind": "framework_block",
        "layer": "framework", "alloc_bytes": 1000 * allocations, "alloc_count": allocations,
        "free_bytes": 0, "free_count": 0, "live_bytes": 0, "live_count": 0, "peak_live_bytes": 0,
        "process_peak_bytes": 0, "failed_allocations": 0, "failed_frees": 0, "lossy": false,
        "agent_id": "a", "batch_seq": 1})
}

#[tokio::test]
async fn only_whole_processes_are_added_up() {
    let dir = tempfile::tempdir().unwrap();
    let mut events = vec![seed::alloc("h", PARTIAL, 1, 1, 50, 7, json!({}))];
    events.extend([WHOLE, PARTIAL, NOT_ROLLED_UP].map(|process| block(process, 10 * process)));
    events.extend([WHOLE, PARTIAL].map(|process| block(process, 10 * process + 1)));
    seed::write_file(dir.path(), Table::AllocEvents, "1.parquet", &events);
    // One block of the second process stayed on its host.
    let windows = [window(WHOLE, 2), window(PARTIAL, 3)];
    seed::write_file(dir.path(), Table::DeviceWindows, "1.parquet", &windows);
    let folder = Folder::open(dir.path(), Options::default()).await.unwrap();
    for (sql, expected) in [
        ("SELECT count(*) FROM live_allocations", 3),
        (
            "SELECT count(*) FROM live_allocations WHERE memory_kind = 'framework_block'",
            2,
        ),
        (
            "SELECT CAST(sum(live_bytes) AS BIGINT) FROM process_totals",
            2050,
        ),
        ("SELECT CAST(sum(live_count) AS BIGINT) FROM top_stacks", 3),
        (
            "SELECT max(process_id) FROM framework_processes WHERE whole",
            WHOLE,
        ),
        (
            "SELECT count(*) FROM framework_processes WHERE NOT whole",
            2,
        ),
    ] {
        assert_eq!(number(&folder, sql).await, expected, "{sql}");
    }
}
