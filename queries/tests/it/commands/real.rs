//! The commands on snapshots of real programs, where they are at hand.

use std::path::Path;

use serde_json::Value;

use super::map::balanced;
use crate::cli::{stderr, stdout, vramscope};
use crate::functions::shared;

fn imported(name: &str) -> Option<(tempfile::TempDir, String)> {
    let file = shared(&format!("snapshots/{name}.pickle"))?;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data").to_str().unwrap().to_string();
    let output = vramscope(&["import", file.to_str().unwrap(), "--data", &data]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    Some((dir, data))
}

fn answer(arguments: &[&str]) -> Value {
    let output = vramscope(arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

/// The known answers: reserved 25.18 GB, active 6.87, slack 72.7 %, releasable 11.58, stranded 6.72 (26.7 %)
/// of the training, slack 46.8 % and stranded 0.4 % of the inference.
#[test]
fn fragmentation_of_real_snapshots_is_as_published() {
    let sql =
        "SELECT round(reserved_bytes / 1e9, 2) AS reserved, round(active_bytes / 1e9, 2) AS active,
        round(releasable_bytes / 1e9, 2) AS releasable, round(stranded_bytes / 1e9, 2) AS stranded,
        round(100 * internal_ratio, 1) AS slack, round(100 * stranded_ratio, 1) AS stranded_percent
        FROM fragmentation_now";
    let Some((_guard, data)) = imported("medium_1024_training") else {
        return;
    };
    let rows = answer(&["sql", "--data", &data, "-c", sql, "--format", "json"]);
    let expected = serde_json::json!([{
        "reserved": 25.18, "active": 6.87, "releasable": 11.58, "stranded": 6.72, "slack": 72.7,
        "stranded_percent": 26.7,
    }]);
    assert_eq!(rows, expected);
    let Some((_guard, data)) = imported("medium_1024_inference") else {
        return;
    };
    let rows = answer(&["sql", "--data", &data, "-c", sql, "--format", "json"]);
    assert_eq!(
        (&rows[0]["slack"], &rows[0]["stranded_percent"]),
        (&46.8.into(), &0.4.into())
    );
}

#[test]
fn a_real_map_is_drawn_in_a_small_picture() {
    let Some((guard, data)) = imported("medium_1024_training") else {
        return;
    };
    let file = guard.path().join("map.svg");
    let output = vramscope(&["map", "--data", &data, "--svg", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(
        stdout(&output).contains("stranded, of what is reserved         6.26 GiB (26.7 %)"),
        "{}",
        stdout(&output)
    );
    let picture = std::fs::read_to_string(Path::new(&file)).unwrap();
    balanced(&picture);
    assert!(picture.len() < 1 << 20, "{} bytes", picture.len());
    // It ran out of nothing.
    let none = vramscope(&["why", "--data", &data]);
    assert_eq!(none.status.code(), Some(3));
}
