//! Snapshots of real runs, where they are at hand.

use std::path::PathBuf;

use super::{ask, text};
use crate::cli::{stderr, stdout, vramscope};

fn real_snapshots() -> Option<PathBuf> {
    let shared = std::env::var_os("VRAMSCOPE_SHARED").map_or_else(
        || {
            PathBuf::from(format!(
                "{}/../../shared",
                std::env::var("CARGO_MANIFEST_DIR").unwrap()
            ))
        },
        PathBuf::from,
    );
    let folder = shared.join("data/snapshots");
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("SKIPPED: no real snapshots in {}", folder.display());
    None
}

/// The known answers of the definitions, and byte for byte what CPython counts in the files: the
/// published figures are 25.18 GB reserved, 6.87 GB active, slack 72.7 %, releasable 11.58 GB,
/// stranded 6.72 GB (26.7 %) of `medium_1024_training`; slack 46.8 %, stranded 0.4 % of
/// `medium_1024_inference`. The replay of each trace leads to its map block for block.
#[test]
fn known_answers_of_real_snapshots() {
    let Some(folder) = real_snapshots() else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let names = [
        "medium_1024_inference",
        "medium_1024_training",
        "medium_256_inference",
        "medium_512_training",
    ];
    let paths = names.map(|name| folder.join(format!("{name}.pickle")));
    let mut arguments = vec!["import", "--json", "--data", text(&data)];
    arguments.extend(paths.iter().map(|path| text(path)));
    let output = vramscope(&arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let summary: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    for imported in summary["imported"].as_array().unwrap() {
        assert_eq!(
            imported["memories"][0]["replay_differences"], 0,
            "{imported}"
        );
        assert_eq!(imported["memories"][0]["contradictions"], 0);
    }

    let shares = "SELECT host, round(reserved_bytes / 1e9, 2), round(active_bytes / 1e9, 2), \
         round(100.0 * (reserved_bytes - active_bytes) / reserved_bytes, 1), \
         round(releasable_bytes / 1e9, 2), round(stranded_bytes / 1e9, 2), \
         round(100.0 * stranded_bytes / reserved_bytes, 1) \
         FROM allocator_samples WHERE host LIKE 'medium_1024%' ORDER BY host";
    assert_eq!(
        ask(&data, shares),
        "\
medium_1024_inference.pickle,3.2,1.7,46.8,1.49,0.01,0.4
medium_1024_training.pickle,25.18,6.87,72.7,11.58,6.72,26.7"
    );
    let bytes = "SELECT host, sum(bytes), sum(active_bytes), sum(requested_bytes), \
         sum(releasable_bytes), sum(stranded_bytes), max(largest_free_block_bytes), count(*) \
         FROM segments GROUP BY host ORDER BY host";
    assert_eq!(
        ask(&data, bytes),
        "\
medium_1024_inference.pickle,3204448256,1703677952,1701711872,1486880768,13889536,268435456,108
medium_1024_training.pickle,25178406912,6874481152,6870548484,11582570496,6721355264,268435456,234
medium_256_inference.pickle,1864368128,1703333888,1701367808,146800640,14233600,41943040,101
medium_512_training.pickle,12660506624,6838108672,6829260804,4771020800,1051377152,83886080,400"
    );
    let sum = "SELECT host, sum(allocated_bytes) - max(s.allocated) FROM segments \
         JOIN (SELECT process_id, allocated_bytes AS allocated FROM allocator_samples) s \
         USING (process_id) GROUP BY host HAVING sum(allocated_bytes) <> max(s.allocated)";
    assert_eq!(ask(&data, sum), "", "segments and samples differ");
    let events = "SELECT host, api, count(*), sum(requested_bytes) FROM alloc_events \
         WHERE host LIKE 'medium_512%' AND api IN ('alloc', 'segment_alloc', 'free_completed') \
         GROUP BY 1, 2 ORDER BY 1, 2";
    assert_eq!(
        ask(&data, events),
        "\
medium_512_training.pickle,alloc,7591,72637134473
medium_512_training.pickle,free_completed,7370,70903441029
medium_512_training.pickle,segment_alloc,1,67108864"
    );
    // Live by its entries: 659 blocks in each training, none in inference, the same that the map
    // says were allocated in the trace, with the same bytes.
    let live = "SELECT e.host, count(*), sum(e.bytes) - sum(m.bytes), sum(e.requested_bytes) - sum(m.requested) \
         FROM (SELECT host, seq, process_id, address, bytes, requested_bytes FROM alloc_events a \
               WHERE api = 'alloc' AND NOT EXISTS (SELECT 1 FROM alloc_events f \
                 WHERE f.process_id = a.process_id AND f.alloc_seq = a.seq)) e \
         FULL JOIN (SELECT process_id, b['alloc_seq'] AS seq, b['address'] AS address, \
                      b['bytes'] AS bytes, b['requested_bytes'] AS requested \
               FROM (SELECT process_id, unnest(blocks) AS b FROM segments) \
               WHERE b['alloc_seq'] IS NOT NULL) m \
           ON m.process_id = e.process_id AND m.seq = e.seq AND m.address = e.address \
         GROUP BY 1 ORDER BY 1";
    assert_eq!(
        ask(&data, live),
        "medium_1024_training.pickle,659,0,0\nmedium_512_training.pickle,659,0,0"
    );
}
