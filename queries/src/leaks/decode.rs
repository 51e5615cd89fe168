//! Rows of `slots.sql` to a process of `vramscope-leaks`.

use std::collections::HashMap;

use arrow::array::{
    Array, AsArray, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray,
};
use arrow::datatypes::{Float64Type, Int32Type, Int64Type};
use datafusion::error::{DataFusionError, Result};
use vramscope_leaks::{LoadSlot, Process, Settings, StackSlot};

use crate::texts;

/// The columns of one batch, in the order of `slots.sql`.
pub(super) struct Columns<'a> {
    process_id: &'a Int64Array,
    part: &'a Int64Array,
    slot: &'a Int64Array,
    stack_id: &'a Int64Array,
    device: &'a Int32Array,
    memory_kind: StringArray,
    layer: StringArray,
    held: [&'a Int64Array; 7],
    load: [&'a Float64Array; 5],
    quiet_ns: &'a Int64Array,
    scope: &'a Int64Array,
}

impl<'a> Columns<'a> {
    pub fn of(batch: &'a RecordBatch) -> Result<Self> {
        let column = |name: &str| {
            batch.column_by_name(name).ok_or_else(|| {
                DataFusionError::Internal(format!("the plan of slots has no column {name}"))
            })
        };
        let wrong = |name: &str| {
            DataFusionError::Internal(format!("column {name} of slots is of another type"))
        };
        let int = |name: &str| {
            let found = column(name)?.as_primitive_opt::<Int64Type>();
            found.ok_or_else(|| wrong(name))
        };
        let float = |name: &str| {
            let found = column(name)?.as_primitive_opt::<Float64Type>();
            found.ok_or_else(|| wrong(name))
        };
        let text = |name: &str| {
            let plain = texts::plain_column(column(name)?)?;
            let found = plain.as_string_opt::<i32>();
            found.cloned().ok_or_else(|| wrong(name))
        };
        let device = column("device")?.as_primitive_opt::<Int32Type>();
        Ok(Columns {
            process_id: int("process_id")?,
            part: int("part")?,
            slot: int("slot")?,
            stack_id: int("stack_id")?,
            device: device.ok_or_else(|| wrong("device"))?,
            memory_kind: text("memory_kind")?,
            layer: text("layer")?,
            held: [
                int("live_bytes")?,
                int("moment")?,
                int("freed_bytes")?,
                int("net_count")?,
                int("born_ns")?,
                int("after_rest")?,
                int("lossy")?,
            ],
            load: [
                float("running")?,
                float("running_peak")?,
                float("kv")?,
                float("kv_peak")?,
                float("completed")?,
            ],
            quiet_ns: int("quiet_ns")?,
            scope: int("scope")?,
        })
    }

    pub fn process_id(&self, row: usize) -> i64 {
        self.process_id.value(row)
    }

    fn held(&self, which: usize, row: usize) -> Option<i64> {
        let column = self.held[which];
        column.is_valid(row).then(|| column.value(row))
    }

    fn load(&self, which: usize, row: usize) -> f64 {
        let column = self.load[which];
        if column.is_valid(row) {
            column.value(row)
        } else {
            0.0
        }
    }
}

/// What tells the stacks of a process apart.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct StackKey {
    pub stack_id: Option<i64>,
    pub device: Option<i32>,
    pub memory_kind: String,
    pub layer: String,
}

/// A process whose rows come in.
#[derive(Debug)]
pub(super) struct Collecting {
    pub id: i64,
    settings: Settings,
    names: Vec<(String, String)>,
    index: HashMap<(Option<i64>, Option<i32>, usize), usize>,
    input: Process<StackKey>,
    net_counts: Vec<Vec<(i64, i64)>>,
    rows: usize,
    scope: i64,
    lossy: i64,
}

/// A process that is whole.
#[derive(Debug)]
pub(super) struct Collected {
    pub id: i64,
    pub input: Process<StackKey>,
    /// Whose traffic it was judged by: 1 its own, 2 its pod's, 3 its container's, 4 its host's, 0
    /// none.
    pub scope: i64,
    /// Windows of its stacks that lost events.
    pub lossy: i64,
}

impl Collecting {
    pub fn new(id: i64, settings: Settings) -> Self {
        Collecting {
            id,
            settings,
            names: Vec::new(),
            index: HashMap::new(),
            input: Process::default(),
            net_counts: Vec::new(),
            rows: 0,
            scope: 0,
            lossy: 0,
        }
    }

    /// Memory it takes, bytes.
    pub fn bytes(&self) -> usize {
        let a_row = size_of::<StackSlot>() + size_of::<(i64, i64)>();
        // Vectors grow by doubling.
        self.rows * 2 * a_row + self.index.len() * 256
    }

    pub fn add(&mut self, columns: &Columns, row: usize) {
        self.rows += 1;
        let slot = columns.slot.value(row);
        if columns.part.value(row) == 1 {
            self.add_load(columns, row, slot);
        } else {
            self.add_stack(columns, row, slot);
        }
    }

    fn add_load(&mut self, columns: &Columns, row: usize, slot: i64) {
        let [running, running_peak, kv, kv_peak, completed] =
            [0, 1, 2, 3, 4].map(|which| columns.load(which, row));
        self.input.loads.push(LoadSlot {
            slot,
            running,
            running_peak,
            kv,
            kv_peak,
            completed,
        });
        if columns.quiet_ns.is_valid(row) {
            self.input.quiet_slots.push(slot);
        }
        if columns.scope.is_valid(row) {
            self.scope = columns.scope.value(row);
        }
    }

    fn add_stack(&mut self, columns: &Columns, row: usize, slot: i64) {
        let name = (columns.memory_kind.value(row), columns.layer.value(row));
        let known = self
            .names
            .iter()
            .position(|(kind, layer)| (kind.as_str(), layer.as_str()) == name);
        let name = known.unwrap_or_else(|| {
            self.names.push((name.0.to_string(), name.1.to_string()));
            self.names.len() - 1
        });
        let stack_id = columns
            .stack_id
            .is_valid(row)
            .then(|| columns.stack_id.value(row));
        let device = columns
            .device
            .is_valid(row)
            .then(|| columns.device.value(row));
        let index = *self
            .index
            .entry((stack_id, device, name))
            .or_insert_with(|| {
                let (memory_kind, layer) = self.names[name].clone();
                let key = StackKey {
                    stack_id,
                    device,
                    memory_kind,
                    layer,
                };
                self.input.stacks.push((key, Vec::new()));
                self.net_counts.push(Vec::new());
                self.input.stacks.len() - 1
            });
        let [live, moment, freed, net_count, born, after_rest, lossy] =
            [0, 1, 2, 3, 4, 5, 6].map(|which| columns.held(which, row));
        let live_bytes = live.unwrap_or(0);
        let slot_ns = self.settings.slot_ns();
        let slot_ms = (slot_ns / 1_000_000) as f64;
        self.input.stacks[index].1.push(StackSlot {
            slot,
            live_bytes,
            mean_bytes: live_bytes as f64 - moment.unwrap_or(0) as f64 / slot_ms,
            freed_bytes: freed.unwrap_or(0),
            live_count: 0,
            oldest_age_ns: born.map(|born| (slot + 1) * slot_ns - born),
            // Only rows of a slot at rest have what came after; where nothing came it is NULL.
            quiet_bytes: Some(live_bytes - after_rest.unwrap_or(0)),
        });
        self.net_counts[index].push((slot, net_count.unwrap_or(0)));
        self.lossy += lossy.unwrap_or(0);
    }

    /// The process, with the live allocations counted up.
    pub fn finish(mut self) -> Collected {
        for ((_, slots), counts) in self.input.stacks.iter_mut().zip(&mut self.net_counts) {
            slots.sort_unstable_by_key(|slot| slot.slot);
            counts.sort_unstable_by_key(|(slot, _)| *slot);
            let mut live = 0;
            for (slot, (_, net)) in slots.iter_mut().zip(counts) {
                live += *net;
                // What was there before the recording is not counted: at least one if bytes live.
                live = live.max(i64::from(slot.live_bytes > 0));
                slot.live_count = live;
            }
        }
        Collected {
            id: self.id,
            input: self.input,
            scope: self.scope,
            lossy: self.lossy,
        }
    }
}
