//! Four real snapshots (a 24-layer transformer, inference and training). What they hold was counted
//! with CPython 3.11: `pickle.load`, then sums over `segments`, `blocks` and `device_traces[0]`,
//! frame lists compared as tuples of (name, filename, line).

use std::collections::BTreeMap;
use std::path::PathBuf;

use vramscope_model::map::BlockState;
use vramscope_snapshot::Memory;

use super::whole;

struct Known {
    file: &'static str,
    segments: usize,
    blocks: usize,
    gaps: usize,
    reserved: u64,
    active: u64,
    requested: u64,
    stacks: usize,
    events: &'static [(&'static str, usize)],
    alloc_bytes: u64,
    address_sum: u64,
    first_and_last_us: (i64, i64),
}

const KNOWN: &[Known] = &[
    Known {
        file: "medium_1024_inference.pickle",
        segments: 108,
        blocks: 239,
        gaps: 16,
        reserved: 3_204_448_256,
        active: 1_703_677_952,
        requested: 1_701_711_872,
        stacks: 89,
        events: &[
            ("alloc", 1_280),
            ("free_completed", 1_280),
            ("free_requested", 1_280),
        ],
        alloc_bytes: 56_655_331_424,
        address_sum: 118_401_123_274_752,
        first_and_last_us: (1_783_874_588_218_846, 1_783_874_588_301_130),
    },
    Known {
        file: "medium_1024_training.pickle",
        segments: 234,
        blocks: 1_031,
        gaps: 146,
        reserved: 25_178_406_912,
        active: 6_874_481_152,
        requested: 6_870_548_484,
        stacks: 189,
        events: &[
            ("alloc", 7_591),
            ("free_completed", 7_370),
            ("free_requested", 7_370),
        ],
        alloc_bytes: 166_521_770_119,
        address_sum: 885_003_719_554_560,
        first_and_last_us: (1_783_874_422_287_973, 1_783_874_422_934_661),
    },
    Known {
        file: "medium_256_inference.pickle",
        segments: 101,
        blocks: 232,
        gaps: 9,
        reserved: 1_864_368_128,
        active: 1_703_333_888,
        requested: 1_701_367_808,
        stacks: 89,
        events: &[
            ("alloc", 1_280),
            ("free_completed", 1_280),
            ("free_requested", 1_280),
        ],
        alloc_bytes: 6_911_357_024,
        address_sum: 116_169_245_442_048,
        first_and_last_us: (1_783_872_326_936_042, 1_783_872_326_964_533),
    },
    Known {
        file: "medium_512_training.pickle",
        segments: 400,
        blocks: 1_041,
        gaps: 156,
        reserved: 12_660_506_624,
        active: 6_838_108_672,
        requested: 6_829_260_804,
        stacks: 189,
        events: &[
            ("alloc", 7_591),
            ("free_completed", 7_370),
            ("free_requested", 7_370),
            ("segment_alloc", 1),
        ],
        alloc_bytes: 72_637_134_473,
        address_sum: 800_714_554_764_800,
        first_and_last_us: (1_783_874_667_632_574, 1_783_874_667_912_969),
    },
];

pub fn folder() -> Option<PathBuf> {
    let shared = std::env::var_os("VRAMSCOPE_SHARED").map_or_else(
        || {
            PathBuf::from(format!(
                "{}/../../../shared",
                std::env::var("CARGO_MANIFEST_DIR").unwrap()
            ))
        },
        PathBuf::from,
    );
    let folder = shared.join("data/snapshots");
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!(
        "SKIPPED: no real snapshots in {} (VRAMSCOPE_SHARED)",
        folder.display()
    );
    None
}

#[test]
fn real_snapshots_are_read_as_python_reads_them() {
    let Some(folder) = folder() else { return };
    for known in KNOWN {
        let file = std::fs::read(folder.join(known.file)).unwrap();
        let found = whole(&file).unwrap();
        let blocks = || found.segments.iter().flat_map(|s| &s.blocks);
        let active = || blocks().filter(|b| b.state != BlockState::Inactive);
        let name = known.file;
        assert_eq!(found.segments.len(), known.segments, "{name}");
        assert_eq!(blocks().count(), known.blocks, "{name}");
        assert_eq!(blocks().count() - active().count(), known.gaps, "{name}");
        let reserved: u64 = found.segments.iter().map(|s| s.bytes).sum();
        assert_eq!(reserved, known.reserved, "{name}");
        assert_eq!(
            active().map(|b| b.bytes).sum::<u64>(),
            known.active,
            "{name}"
        );
        let requested: u64 = active().filter_map(|b| b.requested).sum();
        assert_eq!(requested, known.requested, "{name}");
        // The reader's tables hold the empty stack of inactive blocks as well.
        assert_eq!(found.tables.stack_count() as usize, known.stacks, "{name}");
        let mut events = BTreeMap::new();
        for event in &found.events {
            *events.entry(event.action.name().unwrap()).or_insert(0) += 1;
            assert_eq!(event.memory, Memory::Device(0));
        }
        assert_eq!(
            events.into_iter().collect::<Vec<_>>(),
            known.events,
            "{name}"
        );
        let allocs = found
            .events
            .iter()
            .filter(|e| e.action.name() == Some("alloc"));
        assert_eq!(
            allocs.map(|e| e.bytes).sum::<u64>(),
            known.alloc_bytes,
            "{name}"
        );
        let addresses: u64 = found.events.iter().filter_map(|e| e.address).sum();
        assert_eq!(addresses, known.address_sum, "{name}");
        let time = |event: Option<&vramscope_snapshot::Event>| event.unwrap().time_us.unwrap();
        let times = (time(found.events.first()), time(found.events.last()));
        assert_eq!(times, known.first_and_last_us, "{name}");
        assert_eq!(found.outline.settings.as_deref(), Some(""), "{name}");
    }
}
