//! The documentation says what the code does.

use std::path::Path;

use vramscope_queries::describe::{self, Catalog};
use vramscope_queries::{reference, views};

/// Regenerate with `UPDATE_DOCS=1 cargo test -p vramscope-queries`.
#[test]
fn the_sql_reference_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/sql-reference.md");
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
    let tetrahedron = catalog.describe("Tetrahedron").unwrap();
    let line = tetrahedron
        .lines()
        .find(|line| line.starts_with("peak_live_bytes"))
        .unwrap();
    assert!(
        line.contains("BIGINT") && line.contains("bytes") && line.contains("largest live_bytes"),
        "{line}"
    );
    let table = catalog.describe("alloc_events").unwrap();
    assert!(table.contains("lifetime_ns") && table.contains("nanoseconds"));
    assert_eq!(catalog.describe("nonesuch"), None);
}
