//! The first pass: what has to be known of a snapshot before its first row can be written.

use std::collections::{BTreeMap, HashMap, HashSet};

use vramscope_model::map::{AddressMap, BlockState};
use vramscope_model::settings::Settings;
use vramscope_model::trace::{Start, TraceEvent};
use vramscope_snapshot::{Action, Event, Item, Memory, Segment};

use super::source::Source;
use super::{Error, Watch};

/// Different unknown actions that are counted by name.
const UNKNOWN_NAMES: usize = 32;

/// Entries of a trace that are kept whole to find out what lived before it: about 20 MiB. Of longer
/// ones only those are kept that the start cannot be found without; then it is not known how far
/// blocks reached that were freed in the trace, beyond their rounded size.
const KEPT_ENTRIES: usize = 1 << 18;

/// The snapshot, without its trace.
pub(super) struct Survey {
    pub settings_text: Option<String>,
    pub settings: Settings,
    /// In order of memory and address.
    pub segments: Vec<Segment>,
    pub memories: BTreeMap<Memory, OfMemory>,
    /// Of any memory.
    pub last_us: Option<i64>,
    pub skipped_keys: Vec<String>,
}

/// What is known of the memory of one device, or of the host's.
#[derive(Default)]
pub(super) struct OfMemory {
    /// Entries of the trace by action.
    pub events: BTreeMap<&'static str, u64>,
    pub unknown: BTreeMap<String, u64>,
    pub total_events: u64,
    /// Blocks that lived before the trace begins: they were freed in it without having been
    /// allocated in it, or are in the map without an entry.
    pub older_blocks: u64,
    /// Entries that cannot be: an allocation where a block lives, a live block that the map does
    /// not have.
    pub contradictions: u64,
    /// The map before the first entry.
    pub start: AddressMap,
    /// Blocks in use in the final map.
    pub final_blocks: HashMap<u64, FinalBlock>,
    kept: Vec<Kept>,
    is_thinned: bool,
    live: HashMap<u64, Live>,
}

/// An entry that helps to find the start.
struct Kept {
    number: u64,
    event: TraceEvent,
    is_essential: bool,
}

/// A block in use in the final map.
#[derive(Clone, Copy)]
pub(super) struct FinalBlock {
    pub bytes: u64,
    /// Number of the trace entry that allocated it, counted in its own trace; `None` if it is
    /// older than the trace.
    pub entry: Option<u64>,
}

#[derive(Clone, Copy)]
struct Live {
    /// `None`: the block is older than the trace.
    entry: Option<u64>,
    event: TraceEvent,
    pending: bool,
}

impl OfMemory {
    fn note(&mut self, event: &Event, name: Option<&str>) {
        let entry = self.total_events;
        self.total_events += 1;
        match event.action.name() {
            Some(name) => *self.events.entry(name).or_default() += 1,
            None => {
                let name = name.unwrap_or_default();
                let is_new = !self.unknown.contains_key(name);
                let name = if is_new && self.unknown.len() >= UNKNOWN_NAMES {
                    "(others)"
                } else {
                    name
                };
                *self.unknown.entry(name.to_string()).or_default() += 1;
            }
        }
        let (Some(address), Some(traced)) = (event.address, event.to_trace()) else {
            return;
        };
        let mut is_essential = false;
        match event.action {
            Action::Alloc => {
                let block = Live {
                    entry: Some(entry),
                    event: traced,
                    pending: false,
                };
                let before = self.live.insert(address, block);
                self.contradictions += u64::from(before.is_some());
            }
            Action::FreeRequested => match self.live.get_mut(&address) {
                Some(block) => {
                    self.contradictions += u64::from(block.pending);
                    block.pending = true;
                }
                None => {
                    is_essential = true;
                    self.older_blocks += 1;
                    let block = Live {
                        entry: None,
                        event: traced,
                        pending: true,
                    };
                    self.live.insert(address, block);
                }
            },
            Action::FreeCompleted => {
                let known = self.live.remove(&address);
                self.older_blocks += u64::from(known.is_none());
                is_essential = known.is_none_or(|block| block.entry.is_none());
            }
            _ => is_essential = true,
        }
        self.keep(Kept {
            number: entry,
            event: traced,
            is_essential,
        });
    }

    fn keep(&mut self, entry: Kept) {
        if !self.is_thinned && self.kept.len() == KEPT_ENTRIES {
            self.is_thinned = true;
            self.kept.retain(|kept| kept.is_essential);
            self.kept.shrink_to_fit();
        }
        if !self.is_thinned || entry.is_essential {
            self.kept.push(entry);
        }
    }

    /// The entries from which the start is found.
    fn events(&mut self) -> Vec<TraceEvent> {
        let mut kept = std::mem::take(&mut self.kept);
        if self.is_thinned {
            // What was allocated last and lives on did not live before.
            let living = self.live.values().filter_map(|live| {
                Some(Kept {
                    number: live.entry?,
                    event: live.event,
                    is_essential: true,
                })
            });
            kept.extend(living);
            kept.sort_by_key(|kept| kept.number);
        }
        kept.into_iter().map(|kept| kept.event).collect()
    }

    /// Compares the trace with the map it led to, and finds the map that it began with.
    fn settle(&mut self, segments: &[&Segment], settings: &Settings) {
        let events = self.events();
        let end = AddressMap {
            segments: segments.iter().map(|segment| segment.to_map()).collect(),
        };
        self.start = Start::find(&events, &end, settings).map;
        for block in segments.iter().flat_map(|segment| &segment.blocks) {
            if block.state == BlockState::Inactive {
                continue;
            }
            let live = self.live.remove(&block.address);
            let is_pending = block.state == BlockState::PendingFree;
            let agrees = live.is_none_or(|live| live.pending == is_pending);
            self.contradictions += u64::from(!agrees);
            // An older block that the trace freed was counted then.
            self.older_blocks += u64::from(live.is_none() && self.total_events > 0);
            self.final_blocks.insert(
                block.address,
                FinalBlock {
                    bytes: block.bytes,
                    entry: live.and_then(|live| live.entry),
                },
            );
        }
        self.contradictions += self.live.len() as u64;
        self.live = HashMap::new();
    }

    /// Whether the trace begins with the allocator's first action. If not, recording began later,
    /// or the ring that held the trace was overwritten.
    pub fn is_whole(&self) -> bool {
        self.total_events > 0 && self.older_blocks == 0 && self.start.segments.is_empty()
    }

    pub fn ooms(&self) -> u64 {
        self.events.get("oom").copied().unwrap_or(0)
    }
}

/// Reads the file for the first time.
pub(super) fn take(source: &Source, watch: &dyn Watch) -> Result<(Survey, i64), Error> {
    let mut segments = Vec::new();
    let mut memories: BTreeMap<Memory, OfMemory> = BTreeMap::new();
    let mut last_us = None;
    let reading = source.read(watch, |item, tables| {
        match item {
            Item::Segment(segment) => segments.push(segment),
            Item::Event(event) => {
                last_us = last_us.max(event.time_us);
                let name = match event.action {
                    Action::Other(text) => Some(tables.text(text)),
                    _ => None,
                };
                memories.entry(event.memory).or_default().note(&event, name);
            }
        }
        Ok(())
    })?;
    segments.sort_by_key(|segment| (segment.memory, segment.address));
    check(source, &segments)?;
    let seen: HashSet<Memory> = segments.iter().map(|segment| segment.memory).collect();
    for memory in seen {
        memories.entry(memory).or_default();
    }
    let settings_text = reading.outline.settings;
    let settings = Settings::parse(settings_text.as_deref().unwrap_or_default()).settings;
    for (memory, of) in &mut memories {
        let own: Vec<&Segment> = segments.iter().filter(|s| s.memory == *memory).collect();
        of.settle(&own, &settings);
    }
    let survey = Survey {
        settings_text,
        settings,
        segments,
        memories,
        last_us,
        skipped_keys: reading.outline.skipped_keys,
    };
    Ok((survey, reading.content))
}

/// Segments of one memory must not overlap.
fn check(source: &Source, segments: &[Segment]) -> Result<(), Error> {
    let map = AddressMap {
        segments: segments.iter().map(Segment::to_map).collect(),
    };
    map.check().map_err(|problem| source.map_error(problem))
}
