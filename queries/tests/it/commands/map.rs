//! `vramscope map` on the seeded data.

use serde_json::json;

use super::{json, run, trace};
use crate::cli::{stderr, stdout, vramscope};

const MIB: i64 = 1 << 20;

/// Process 401 at second 30: NVML's newest sample before is of second 5 (64 MiB, 54 in use); the driver
/// gave it 20 + 2 + 16 MiB; 6,292,480 are allocated for 6,292,456 asked for.
#[test]
fn the_waterfall_goes_from_the_card_to_what_was_asked_for() {
    let answer = json(&["map", "--process", "401"]);
    let fall = &answer["waterfall"];
    assert_eq!(answer["snapshot_id"], 9002);
    assert_eq!(fall["card_total_bytes"], 64 * MIB);
    assert_eq!(fall["card_used_bytes"], 54 * MIB);
    assert_eq!(fall["process_physical_bytes"], 38 * MIB);
    assert_eq!(fall["reserved_bytes"], 38 * MIB);
    // Tracing does not see what waits for a stream: not known, not 0.
    assert_eq!(fall["active_bytes"], json!(null));
    assert_eq!(fall["allocated_bytes"], 6_292_480);
    assert_eq!(fall["requested_bytes"], 6_292_456);
    assert_eq!(fall["stranded_bytes"], 16_776_192);
    assert_eq!(fall["max_contiguous_bytes"], 20 * MIB);
    let segments = answer["segments"].as_array().unwrap();
    assert_eq!(segments.len(), 3);
    for segment in segments {
        let blocks = segment["blocks"].as_array().unwrap();
        let sum: i64 = blocks
            .iter()
            .map(|block| block["bytes"].as_i64().unwrap())
            .sum();
        assert_eq!(sum, segment["bytes"].as_i64().unwrap());
    }
}

/// In 20 shares of S1's 20 MiB: the gap of 4,000,256 reaches into the fourth MiB, the block of 6 MiB from
/// there into the tenth.
#[test]
fn the_text_has_a_line_a_segment() {
    let (code, out, err) = run(&["map", "--pid", "4001", "--width", "81"]);
    assert_eq!(code, 0, "{err}");
    let line = |address: &str| {
        let found = out.lines().find(|line| line.contains(address));
        found
            .unwrap_or_else(|| panic!("{address} in {out}"))
            .to_string()
    };
    let first = line("0x7f0000000000");
    assert!(
        first.contains("20.0 MiB [") && first.ends_with("] 14.0 MiB stranded"),
        "{first}"
    );
    let strip: String = first.split(['[', ']']).nth(1).unwrap().to_string();
    // 3.8 of 20 MiB are free, then 6 in use.
    let used: Vec<usize> = strip
        .char_indices()
        .filter(|(_, c)| *c == '#')
        .map(|(i, _)| i)
        .collect();
    let (begin, end) = (
        used[0] as f64 / strip.len() as f64,
        used[used.len() - 1] as f64 / strip.len() as f64,
    );
    assert!(
        (begin - 3.815 / 20.0).abs() < 0.05 && (end - 9.815 / 20.0).abs() < 0.05,
        "{strip}"
    );
    assert!(line("0x7f0010000000").contains("[-...."));
    let idle = line("0x7f0020000000");
    assert!(
        !idle.contains('#') && idle.ends_with("16.0 MiB releasable"),
        "{idle}"
    );
    assert!(out.contains(
        "default pool, large requests, stream 0: 2 segments, 6.00 MiB of 36.0 MiB allocated"
    ));
    assert!(out.lines().all(|line| line.chars().count() <= 100), "{out}");
}

#[test]
fn what_a_request_would_do_follows_the_allocators_rules() {
    let placement = |size: &str| {
        let answer = json(&["map", "--process", "401", "--request", size]);
        answer["request"].clone()
    };
    // The best fit for 8 MiB is S1's gap of 10,679,808, not S3's of 16 MiB.
    let fits = placement("8MiB");
    assert_eq!(fits["placement"]["kind"], "cached");
    assert_eq!(fits["placement"]["gap_bytes"], 10_679_808);
    assert_eq!(fits["placement"]["rest_bytes"], 10_679_808 - 8 * MIB);
    // 20 MiB fit no gap; 4 MiB of the driver and the flushed 16 MiB of S3 are just enough.
    let flushed = placement("20MiB");
    assert_eq!(flushed["placement"]["kind"], "new_segment");
    assert_eq!(flushed["placement"]["bytes"], 20 * MIB);
    assert_eq!(flushed["released_bytes"], 16 * MIB);
    let fails = placement("22MiB");
    assert_eq!(fails["placement"]["kind"], "fails");
    assert_eq!(fails["placement"]["device_free_bytes"], 20 * MIB);
    // A rounding of 1000 bytes.
    assert_eq!(placement("1000")["rounded_bytes"], 1024);
}

#[test]
fn older_maps_are_found_by_time_and_snapshot() {
    let at =
        |more: &[&str]| json(&[&["map", "--process", "401"], more].concat())["snapshot_id"].clone();
    assert_eq!(at(&["--at", "2026-11-29T10:00:29Z"]), 9001);
    assert_eq!(at(&["--at", "2026-11-29T10:00:30Z"]), 9002);
    assert_eq!(at(&["--snapshot", "9001"]), 9001);
}

#[test]
fn which_map_is_meant_must_be_clear() {
    let (code, out, err) = run(&["map"]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(
        err.contains("--process 401 --device 0   pid 4001 on delta"),
        "{err}"
    );
    assert!(
        err.contains("--process 501 --device 0   snap.pickle"),
        "{err}"
    );
    let (code, _, err) = run(&["map", "--pid", "1"]);
    assert_eq!(code, 3);
    assert!(
        err.starts_with("nothing found: no address map of pid 1;"),
        "{err}"
    );
    let (code, _, err) = run(&["map", "--at", "yesterday"]);
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("\"yesterday\" is not a time"), "{err}");
    let (code, _, err) = run(&["map", "--at", "2026-13-01"]);
    assert_eq!(code, 1, "{err}");
    let output = vramscope(&["map", "--data", "/nonesuch"]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn the_picture_is_whole_xml_with_every_block() {
    let (guard, data) = trace();
    for (color, legend) in [
        ("stack", "Blocks by the code that allocated them"),
        ("age", "Blocks by the time since"),
    ] {
        let file = guard.path().join(format!("{color}.svg"));
        let path = file.to_str().unwrap();
        let output = vramscope(&[
            "map",
            "--data",
            &data,
            "--process",
            "401",
            "--svg",
            path,
            "--color",
            color,
        ]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(stderr(&output).contains(&format!("note: the picture is in {path}")));
        assert!(stdout(&output).contains("default pool"));
        let picture = std::fs::read_to_string(&file).unwrap();
        assert!(picture.contains(legend));
        // Three segments with three, two and one block or gap.
        assert_eq!(picture.matches("class=\"b ").count(), 6);
        assert!(picture.contains("6.00 MiB at 0x7f00003d0a00"), "{picture}");
        balanced(&picture);
    }
}

/// Every element that is opened is closed, in order.
pub fn balanced(xml: &str) {
    let mut open: Vec<&str> = Vec::new();
    for tag in xml.split('<').skip(1) {
        let inside = tag.split('>').next().unwrap();
        let name = inside
            .split([' ', '/'])
            .find(|part| !part.is_empty())
            .unwrap();
        if inside.starts_with('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !inside.ends_with('/') {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
}
