//! The allocator model against the real allocator: the four real snapshots hold the last events of
//! a program and the map that they ended in, both written by PyTorch.

use vramscope_model::map::AddressMap;
use vramscope_model::settings::Settings;
use vramscope_model::simulator::{Card, Scenario};
use vramscope_model::trace::{Replay, Start, TraceEvent};

use super::{real, whole};

const FILES: [&str; 4] = [
    "medium_1024_inference.pickle",
    "medium_1024_training.pickle",
    "medium_256_inference.pickle",
    "medium_512_training.pickle",
];

/// Tags are stacks, which a replay gives to fewer blocks than PyTorch.
fn without_tags(mut map: AddressMap) -> AddressMap {
    map.sort();
    for segment in &mut map.segments {
        segment.tag = None;
        for block in &mut segment.blocks {
            block.tag = None;
        }
    }
    map
}

/// What lived before the events, then the events (as PyTorch's allocator did them, and as the
/// simulator does them by itself) lead to PyTorch's map, block for block.
#[test]
fn the_real_allocators_map_comes_out() {
    let Some(folder) = real::folder() else { return };
    for name in FILES {
        let file = std::fs::read(folder.join(name)).unwrap();
        let found = whole(&file).unwrap();
        let end = AddressMap {
            segments: found.segments.iter().map(|s| s.to_map()).collect(),
        };
        let end = without_tags(end);
        assert_eq!(end.check(), Ok(()), "{name}");
        let events: Vec<TraceEvent> = found.events.iter().filter_map(|e| e.to_trace()).collect();

        let settings = Settings::default();
        let start = Start::find(&events, &end, &settings);
        assert_eq!(start.problems, [], "{name}");
        let mut replay = Replay::from_map(&start.map, settings.clone()).unwrap();
        for event in &events {
            replay.apply(event);
        }
        assert_eq!(without_tags(replay.map()), end, "{name}: replay");

        let scenario = Scenario {
            device: 0,
            events: &events,
            start: Some(&start.map),
            recorded: settings.clone(),
            settings,
            card: Card::default(),
        };
        let rerun = scenario.run().unwrap();
        assert_eq!(without_tags(rerun.map), end, "{name}: rerun");
        assert_eq!(rerun.new_failures, 0, "{name}");
    }
}
