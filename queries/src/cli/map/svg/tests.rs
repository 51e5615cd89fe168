use super::super::segments::Shown;
use super::shapes::MOST_SHAPES;
use super::*;

fn cells(count: u64, bytes: u64) -> Vec<Cell> {
    let cell = |index: u64| Cell {
        address: index * bytes,
        bytes,
        requested: None,
        state: if index.is_multiple_of(2) {
            BlockState::Allocated
        } else {
            BlockState::Inactive
        },
        age_seconds: Some(index as f64),
        stack: Some((index % 40) as i64),
    };
    (0..count).map(cell).collect()
}

fn segment(address: u64, cells: Vec<Cell>) -> Shown {
    let bytes = cells.iter().map(|cell| cell.bytes).sum();
    let cells = cells
        .into_iter()
        .map(|cell| Cell {
            address: cell.address + address,
            ..cell
        })
        .collect();
    Shown {
        pool: "default".to_string(),
        size: "large".to_string(),
        stream: 0,
        expandable: false,
        address,
        bytes,
        allocated: bytes / 2,
        releasable: 0,
        stranded: bytes / 2,
        cells,
    }
}

fn moment() -> Moment {
    Moment {
        process_id: 1,
        pid: 2,
        host: "<host> & \"co\"".to_string(),
        device: 0,
        gpu_uuid: None,
        snapshot_id: 3,
        ts: "2026-11-29T10:00:00Z".to_string(),
        ts_ns: 0,
        reason: "oom".to_string(),
        source: "usdt".to_string(),
    }
}

#[test]
fn a_map_of_many_blocks_stays_small() {
    let map = Map {
        segments: (0..100)
            .map(|index| segment(index << 40, cells(1000, 4096)))
            .collect(),
    };
    for color in [Color::Stack, Color::Age] {
        let drawing = draw(&moment(), &Waterfall::default(), &map, &Names::new(), color);
        let shapes = drawing.matches("<rect").count() + drawing.matches("<path").count();
        assert!(shapes < MOST_SHAPES + 200, "{shapes} shapes");
        assert!(drawing.len() < 4 << 20, "{} bytes", drawing.len());
        assert!(drawing.contains("drawn together"));
    }
}

#[test]
fn every_block_of_a_small_map_is_drawn_and_told() {
    let map = Map {
        segments: vec![segment(1 << 40, cells(8, 1 << 20))],
    };
    let drawing = draw(
        &moment(),
        &Waterfall::default(),
        &map,
        &Names::new(),
        Color::Stack,
    );
    assert_eq!(drawing.matches("class=\"b ").count(), 8);
    assert!(drawing.contains("free 1.00 MiB at 0x10000100000"));
    assert!(drawing.contains("&lt;host&gt; &amp; &quot;co&quot;"));
    assert!(!drawing.contains("<host>"));
}

#[test]
fn segments_beyond_what_can_be_drawn_are_said() {
    let map = Map {
        segments: (0..5000)
            .map(|index| segment(index << 30, cells(2, 4096)))
            .collect(),
    };
    let drawing = draw(
        &moment(),
        &Waterfall::default(),
        &map,
        &Names::new(),
        Color::Stack,
    );
    assert!(drawing.contains("1000 segments of 7.81 MiB are not drawn"));
}

#[test]
fn text_of_data_is_no_markup() {
    assert_eq!(
        escaped("a<b>&\"'\u{0}\u{1b}c\n"),
        "a&lt;b&gt;&amp;&quot;&#39;c\n"
    );
}
