//! The documentation says what the code does.

use std::path::Path;

use arrow::array::RecordBatch;
use arrow::util::pretty::pretty_format_batches;
use futures::TryStreamExt;
use vramscope_queries::describe::{self, Catalog};
use vramscope_queries::session::{self, Limits};
use vramscope_queries::{reference, views};

/// Regenerate with `UPDATE_DOCS=1 cargo test -p vramscope-queries`.
#[test]
fn the_sql_reference_is_current() {
    let path =
        Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap()).join("../docs/sql-reference.md");
    let wanted = reference::markdown().unwrap();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, wanted).unwrap();
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == wanted,
        "docs/sql-reference.md is stale: run `UPDATE_DOCS=1 cargo test -p vramscope-queries`"
    );
}

/// A header names exactly the view's columns, in order.
#[tokio::test]
async fn headers_name_the_columns_of_their_views() {
    let session = describe::empty_session().await.unwrap();
    for view in views::ALL {
        let header = view.header().unwrap();
        let documented: Vec<String> = header
            .columns
            .iter()
            .map(|column| column.name.clone())
            .collect();
        let schema = session.table_provider(view.name).await.unwrap().schema();
        let found: Vec<String> = schema
            .fields()
            .iter()
            .map(|field| field.name().clone())
            .collect();
        assert_eq!(documented, found, "columns of {}", view.name);
    }
}

#[tokio::test]
async fn the_catalog_describes_views_and_tables() {
    let catalog = Catalog::load().await.unwrap();
    let tetrahedron = catalog.describe("Tetrahedron").await.unwrap().unwrap();
    let line = tetrahedron
        .lines()
        .find(|line| line.starts_with("peak_live_bytes"))
        .unwrap();
    assert!(
        line.contains("BIGINT") && line.contains("bytes") && line.contains("largest live_bytes"),
        "{line}"
    );
    let table = catalog.describe("alloc_events").await.unwrap().unwrap();
    assert!(table.contains("lifetime_ns") && table.contains("nanoseconds"));
    assert_eq!(catalog.describe("nonesuch").await.unwrap(), None);
}

/// Views are planned when they are first named; until then they are there all the same.
#[tokio::test]
async fn views_are_listed_and_described_before_a_query_names_them() {
    let session = describe::empty_session().await.unwrap();
    let text = async |sql: &str| {
        let rows = session::query(&session, sql, Limits::default())
            .await
            .unwrap();
        let batches: Vec<RecordBatch> = rows.try_collect().await.unwrap();
        pretty_format_batches(&batches).unwrap().to_string()
    };
    let listed = text("SHOW TABLES").await;
    for name in views::ALL.iter().map(|view| view.name) {
        let is_view = |line: &str| line.contains(&format!(" {name} ")) && line.contains(" VIEW ");
        assert!(listed.lines().any(is_view), "{name} in {listed}");
    }
    assert!(listed.contains(" alloc_events "), "{listed}");
    let described = text("DESCRIBE top_stacks").await;
    assert!(described.contains("implicit_count"), "{described}");
    // What came before stays what it was: a name is free or taken as ever.
    assert!(session.table_exist("top_stacks").unwrap());
    assert!(!session.table_exist("nonesuch").unwrap());
}
