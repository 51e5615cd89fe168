//! The SQL functions, against published figures and hand calculations.

use std::path::PathBuf;
use std::process::Command;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Float64Type;
use arrow::util::display::array_value_to_string;
use datafusion::prelude::{CsvReadOptions, JsonReadOptions, SessionContext};
use futures::TryStreamExt;
use vramscope_queries::session::{self, Limits, Options};

async fn rows(session: &SessionContext, sql: &str) -> Vec<RecordBatch> {
    let stream = session::query(session, sql, Limits::default())
        .await
        .unwrap();
    stream.try_collect().await.unwrap()
}

async fn value(sql: &str) -> String {
    let session = session::session(&Options::default()).unwrap();
    let batches = rows(&session, sql).await;
    array_value_to_string(batches[0].column(0), 0).unwrap()
}

#[tokio::test]
async fn kv_page_waste_is_what_the_last_page_lacks() {
    assert_eq!(value("SELECT kv_page_waste(418, 16)").await, "14");
    assert_eq!(value("SELECT kv_page_waste(416, 16)").await, "0");
    assert_eq!(value("SELECT kv_page_waste(1, 0)").await, "");
    assert_eq!(value("SELECT kv_page_waste(NULL, 16)").await, "");
    assert_eq!(value("SELECT kv_page_waste(-1, 16)").await, "");
    // 14 of 432 and 0 of 16; the unknown length counts for nothing.
    let sql = "SELECT kv_page_waste_ratio(tokens, 16) = 14 / 448.0 FROM (VALUES (418), (16), (NULL)) AS t (tokens)";
    assert_eq!(value(sql).await, "true");
    let none = "SELECT kv_page_waste_ratio(1, 16) FROM (VALUES (1)) AS t (x) WHERE false";
    assert_eq!(value(none).await, "");
}

#[tokio::test]
async fn requests_are_rounded_as_the_allocator_does() {
    assert_eq!(value("SELECT allocator_round(0)").await, "512");
    assert_eq!(value("SELECT allocator_round(1000)").await, "1024");
    // PyTorch's own example: four steps between 1024 and 2048, here in KiB.
    let steps = "SELECT allocator_round(1228800, 'roundup_power2_divisions:4')";
    assert_eq!(value(steps).await, "1310720");
    assert_eq!(value("SELECT allocator_round(1000, NULL)").await, "1024");
    assert_eq!(value("SELECT allocator_round(NULL)").await, "");
}

#[tokio::test]
async fn the_unusable_share_of_free_blocks_is_exact() {
    let blocks = "FROM (VALUES (1024), (2048), (4096), (NULL)) AS t (bytes)";
    let index = |request: &str| format!("SELECT unusable_free_index(bytes, {request}) {blocks}");
    assert_eq!(value(&index("1024")).await, "0.0");
    assert_eq!(
        value(&format!(
            "SELECT unusable_free_index(bytes, 2049) = 3072 / 7168.0 {blocks}"
        ))
        .await,
        "true"
    );
    assert_eq!(value(&index("5000")).await, "1.0");
    assert_eq!(value(&index("NULL")).await, "");
}

/// Failures that were reported in public, with the class that fits their numbers: tried, free,
/// reserved but unallocated.
#[tokio::test]
async fn public_failures_have_their_class() {
    const MIB: f64 = 1024.0 * 1024.0;
    const GIB: f64 = 1024.0 * MIB;
    let cases = [
        (1.96 * GIB, 1.08 * GIB, 1.83 * GIB, "fragmentation"),
        (138.0 * MIB, 2.2 * MIB, 612.0 * MIB, "fragmentation"),
        (222.0 * MIB, 218.0 * MIB, 1608.0 * MIB, "fragmentation"),
        (60.0 * MIB, 8.4 * MIB, 1055.0 * MIB, "fragmentation"),
        (524.0 * MIB, 137.0 * MIB, 121.0 * MIB, "capacity"),
        (1.16 * GIB, 1.17 * GIB, 0.0, "driver refused"),
        (960.0 * MIB, 15.5 * GIB, 0.0, "driver refused"),
    ];
    for (tried, free, stranded, class) in cases {
        let sql = format!(
            "SELECT oom_class({}, {}, {}, 0, NULL, NULL, NULL, NULL)",
            tried as i64, free as i64, stranded as i64
        );
        assert_eq!(value(&sql).await, class, "{sql}");
    }
    // A card of 39.6 GiB of which the process holds 0.68.
    let external = format!(
        "SELECT oom_class({}, {}, 0, 0, {}, {}, NULL, NULL)",
        (0.5 * GIB) as i64,
        (0.1 * GIB) as i64,
        (39.6 * GIB) as i64,
        (0.68 * GIB) as i64
    );
    assert_eq!(value(&external).await, "external process");
    assert_eq!(
        value("SELECT oom_class(10, 1, 2, 3, NULL, NULL, NULL, 5.0)").await,
        "leak"
    );
    assert_eq!(
        value("SELECT oom_class(10, 1, NULL, 3, NULL, NULL, NULL, 5.0)").await,
        "unknown"
    );
    assert_eq!(
        value("SELECT oom_class(NULL, 1, 2, 3, NULL, NULL, NULL, NULL)").await,
        ""
    );
}

/// The folder with recorded data that is too large for the repository, if it is there.
pub fn shared(path: &str) -> Option<PathBuf> {
    let beside = format!(
        "{}/../../shared",
        std::env::var("CARGO_MANIFEST_DIR").unwrap()
    );
    let folder =
        std::env::var_os("VRAMSCOPE_SHARED").map_or_else(|| PathBuf::from(beside), PathBuf::from);
    let file = folder.join("data").join(path);
    if file.exists() {
        return Some(file);
    }
    eprintln!("SKIPPED: {file:?} is not there; VRAMSCOPE_SHARED names the folder that holds data/");
    None
}

const PAGES: [i64; 6] = [8, 16, 32, 64, 128, 256];

/// Percent with two digits, as the figures are published.
async fn waste(session: &SessionContext, tokens: &str, requests: &str) -> Vec<f64> {
    let columns: Vec<String> = PAGES
        .iter()
        .map(|page| format!("round(100 * kv_page_waste_ratio({tokens}, {page}), 2)"))
        .collect();
    let sql = format!("SELECT {} FROM {requests}", columns.join(", "));
    let batches = rows(session, &sql).await;
    let columns = batches[0].columns().iter();
    columns
        .map(|column| column.as_primitive::<Float64Type>().value(0))
        .collect()
}

#[tokio::test]
async fn page_waste_on_request_traces_is_as_published() {
    let session = session::session(&Options::default()).unwrap();
    let azure = [
        ("conv", [0.26, 0.54, 1.12, 2.21, 4.38, 8.02]),
        ("code", [0.17, 0.37, 0.73, 1.51, 3.04, 6.09]),
    ];
    for (name, published) in azure {
        let Some(file) = shared(&format!("traces/azure_llm_2023_{name}.csv")) else {
            return;
        };
        session
            .register_csv(name, file.to_str().unwrap(), CsvReadOptions::new())
            .await
            .unwrap();
        let tokens = "\"ContextTokens\" + \"GeneratedTokens\"";
        assert_eq!(waste(&session, tokens, name).await, published, "{name}");
    }
    let Some(packed) = shared("traces/mooncake_conversation.jsonl.gz") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mooncake.json");
    let text = Command::new("gzip")
        .arg("-dc")
        .arg(&packed)
        .output()
        .unwrap();
    std::fs::write(&file, text.stdout).unwrap();
    session
        .register_json(
            "mooncake",
            file.to_str().unwrap(),
            JsonReadOptions::default(),
        )
        .await
        .unwrap();
    let published = [0.03, 0.06, 0.12, 0.25, 0.51, 1.01];
    assert_eq!(
        waste(&session, "input_length + output_length", "mooncake").await,
        published
    );
}

/// DataFusion 55.2 leaves out a selection of the same words as the one below it.
#[tokio::test]
async fn selections_of_the_same_words_are_all_computed() {
    let nested = |select: &str, times: usize| {
        let innermost = "SELECT 3 + value AS a, 7 + value AS b FROM range(0, 1)".to_string();
        (0..times).fold(innermost, |below, _| {
            format!("SELECT {select} FROM ({below})")
        })
    };
    let cases = [
        // 3 doubled five times; 3 + 5.
        (nested("a + a AS a", 5), "96"),
        (nested("a + 1 AS a", 5), "8"),
        // Swapped five times, and four.
        (nested("b AS a, a AS b", 5), "7"),
        (nested("b AS a, a AS b", 4), "3"),
        (nested("a AS a, b", 4), "3"),
        // Fibonacci's numbers from 3 and 7 on: 3, 7, 10, 17, 27.
        (nested("b AS a, a + b AS b", 4), "27"),
        // One in between that changes nothing.
        (
            format!(
                "SELECT a + 1 AS a FROM (SELECT a FROM ({}))",
                nested("a + 1 AS a", 2)
            ),
            "6",
        ),
        (
            format!("SELECT max(a) FROM ({})", nested("a || 'x' AS a", 3)),
            "3xxx",
        ),
    ];
    for (sql, expected) in cases {
        assert_eq!(value(&sql).await, expected, "{sql}");
    }
    let session = session::session(&Options::default()).unwrap();
    let plan = rows(&session, &format!("EXPLAIN {}", nested("a + a AS a", 3))).await;
    let plan = arrow::util::pretty::pretty_format_batches(&plan).unwrap();
    assert!(!plan.to_string().contains("__apart"), "{plan}");
}
