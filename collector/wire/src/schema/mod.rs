//! The tables: names, columns, types, units. This is the stable interface.

mod allocator;
mod entities;
mod events;
mod own;
mod traffic;
mod windows;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef, TimeUnit};

/// Version of all schemas together; raised when a column or a table is added. A collector
/// takes every version up to its own: what an older agent's rows lack is NULL.
///
/// 1: the first. 2: `stack_windows`, `device_windows`, `processes.pod_uid`, the memory kinds
/// `vmm_mapped` and `ipc`. 3: the framework layer: `allocator_samples`, `segments`, `traffic`, the
/// last columns of `alloc_events` and `processes`. 4: tables that the collector writes itself.
pub const SCHEMA_VERSION: u32 = 4;

/// One table of the data model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Table {
    /// One call that allocates, frees, reserves, maps, registers, or fails to; the other way
    /// round likewise.
    AllocEvents,
    /// One distinct call stack.
    Stacks,
    /// One state of one process lifetime; the last row by `ts_ns` is the current one.
    Processes,
    /// One sample of one card.
    Devices,
    /// Placement of one pinned host buffer, measured once after the call.
    HostBuffers,
    /// One window of one agent: what it saw and what it lost.
    AgentWindows,
    /// What one stack did in one window of one process: the roll-up that outlives raw events.
    StackWindows,
    /// What one process did on one device in one window, by kind of memory.
    DeviceWindows,
    /// One sample of a framework's caching allocator on one device.
    AllocatorSamples,
    /// One segment of a caching allocator in one snapshot of its address map.
    Segments,
    /// One sample of a serving engine's load.
    Traffic,
    /// One question that a collector was asked. Written by the collector alone.
    QueryLog,
    /// One batch that a collector acknowledged. Written by the collector alone.
    Batches,
}

impl Table {
    /// Every table, in the order of the documentation.
    pub const ALL: [Table; 13] = [
        Table::AllocEvents,
        Table::Stacks,
        Table::Processes,
        Table::Devices,
        Table::HostBuffers,
        Table::AgentWindows,
        Table::StackWindows,
        Table::DeviceWindows,
        Table::AllocatorSamples,
        Table::Segments,
        Table::Traffic,
        Table::QueryLog,
        Table::Batches,
    ];

    /// The tables that agents send; a collector takes no other.
    pub const FROM_AGENTS: [Table; 11] = [
        Table::AllocEvents,
        Table::Stacks,
        Table::Processes,
        Table::Devices,
        Table::HostBuffers,
        Table::AgentWindows,
        Table::StackWindows,
        Table::DeviceWindows,
        Table::AllocatorSamples,
        Table::Segments,
        Table::Traffic,
    ];

    /// The table's name in SQL and on disk.
    pub const fn name(self) -> &'static str {
        match self {
            Table::AllocEvents => "alloc_events",
            Table::Stacks => "stacks",
            Table::Processes => "processes",
            Table::Devices => "devices",
            Table::HostBuffers => "host_buffers",
            Table::AgentWindows => "agent_windows",
            Table::StackWindows => "stack_windows",
            Table::DeviceWindows => "device_windows",
            Table::AllocatorSamples => "allocator_samples",
            Table::Segments => "segments",
            Table::Traffic => "traffic",
            Table::QueryLog => "query_log",
            Table::Batches => "batches",
        }
    }

    /// The table of that name, if there is one.
    pub fn by_name(name: &str) -> Option<Table> {
        Table::ALL.into_iter().find(|t| t.name() == name)
    }

    /// Whether agents send the table's rows. The rest a collector writes itself.
    pub const fn is_from_agents(self) -> bool {
        !matches!(self, Table::QueryLog | Table::Batches)
    }

    /// Whether a lake partitions the table by `date` and `hour` of `ts`. Stacks have no time.
    pub const fn partitioned_by_time(self) -> bool {
        !matches!(self, Table::Stacks)
    }

    /// What a row is, for documentation and the prompt.
    pub const fn doc(self) -> &'static str {
        match self {
            Table::AllocEvents => {
                "one call that allocates, frees, reserves, releases, maps, unmaps, registers, unregisters, or fails to"
            }
            Table::Stacks => "one distinct call stack",
            Table::Processes => {
                "one state of one process lifetime; the last by ts_ns is the current one"
            }
            Table::Devices => "one sample of one card",
            Table::HostBuffers => {
                "placement of one pinned or registered host buffer, measured once after the call"
            }
            Table::AgentWindows => "one window of one agent: events seen and lost",
            Table::StackWindows => {
                "what one stack did in one window (default 60 s) of one process: the roll-up of counted rows, written for every stack that was active, when its process ends, and every 60th window for all that live"
            }
            Table::DeviceWindows => {
                "what one process did on one device in one window (default 60 s), by kind of memory: the roll-up of counted rows and of failures, written as stack_windows"
            }
            Table::AllocatorSamples => {
                "one sample of a framework's caching allocator on one device: its totals"
            }
            Table::Segments => {
                "one segment of a caching allocator in one snapshot of its address map, with its blocks and gaps"
            }
            Table::Traffic => "one sample of a serving engine's load, by its own metrics",
            Table::QueryLog => "one question that a collector was asked; written by the collector",
            Table::Batches => {
                "one batch of one agent that a collector acknowledged, and how many rows it had; written by the collector"
            }
        }
    }

    /// The columns with their documentation.
    pub fn columns(self) -> Vec<Column> {
        match self {
            Table::AllocEvents => events::alloc_events(),
            Table::Stacks => entities::stacks(),
            Table::Processes => entities::processes(),
            Table::Devices => entities::devices(),
            Table::HostBuffers => events::host_buffers(),
            Table::AgentWindows => windows::agent_windows(),
            Table::StackWindows => windows::stack_windows(),
            Table::DeviceWindows => windows::device_windows(),
            Table::AllocatorSamples => allocator::allocator_samples(),
            Table::Segments => allocator::segments(),
            Table::Traffic => traffic::traffic(),
            Table::QueryLog => own::query_log(),
            Table::Batches => own::batches(),
        }
    }

    /// The Arrow schema that spool files, the write-ahead log and the lake share. (The lake
    /// adds the partition columns `date` and `hour` of its own.)
    pub fn schema(self) -> SchemaRef {
        static SCHEMAS: LazyLock<BTreeMap<Table, SchemaRef>> = LazyLock::new(|| {
            let schema = |table: Table| {
                let fields = table.columns().into_iter().map(|column| column.field);
                (table, Arc::new(Schema::new(fields.collect::<Vec<_>>())))
            };
            Table::ALL.into_iter().map(schema).collect()
        });
        // All tables are in it.
        Arc::clone(&SCHEMAS[&self])
    }
}

/// A column and what it means.
#[derive(Debug, Clone)]
pub struct Column {
    /// Name, type, nullability.
    pub field: Field,
    /// Meaning and unit, one line.
    pub doc: &'static str,
}

/// TIMESTAMP in microseconds UTC, the only timestamp type of the data model.
pub fn timestamp() -> DataType {
    DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))
}

/// Fields of one element of `stacks.frames`; leaf first.
pub fn frame_fields() -> Fields {
    Fields::from(vec![
        Field::new("kind", DataType::Utf8, false),
        Field::new("module", DataType::Utf8, true),
        Field::new("build_id", DataType::Utf8, true),
        Field::new("offset", DataType::Int64, true),
        Field::new("function", DataType::Utf8, true),
        Field::new("file", DataType::Utf8, true),
        Field::new("line", DataType::Int32, true),
    ])
}

/// Fields of one element of `processes.coverage`.
pub fn coverage_fields() -> Fields {
    Fields::from(vec![
        Field::new("library", DataType::Utf8, false),
        Field::new("symbol", DataType::Utf8, false),
        Field::new("attached", DataType::Boolean, false),
        Field::new("reason", DataType::Utf8, true),
    ])
}

/// Fields of one element of `devices.processes`.
pub fn device_process_fields() -> Fields {
    Fields::from(vec![
        Field::new("pid", DataType::Int32, false),
        Field::new("process_id", DataType::Int64, true),
        Field::new("used_bytes", DataType::Int64, true),
    ])
}

/// Fields of one element of `host_buffers.pages`. A NULL node means pages that were not
/// resident or could not be asked for.
pub fn node_pages_fields() -> Fields {
    Fields::from(vec![
        Field::new("node", DataType::Int32, true),
        Field::new("pages", DataType::Int64, false),
    ])
}

/// Fields of one element of `segments.blocks`.
pub fn block_fields() -> Fields {
    Fields::from(vec![
        Field::new("address", DataType::Int64, false),
        Field::new("bytes", DataType::Int64, false),
        Field::new("requested_bytes", DataType::Int64, true),
        Field::new("state", DataType::Utf8, false),
        Field::new("stack_id", DataType::Int64, true),
        Field::new("allocated_ts_ns", DataType::Int64, true),
        Field::new("alloc_seq", DataType::Int64, true),
    ])
}

/// Fields of one element of a list of named counts.
pub fn count_fields(name: &str) -> Fields {
    Fields::from(vec![
        Field::new(name, DataType::Utf8, false),
        Field::new("count", DataType::Int64, false),
    ])
}

/// A list type as both Arrow and Delta spell it (`element`, as Parquet's own convention).
pub fn list_of(fields: Fields) -> DataType {
    DataType::List(Arc::new(Field::new(
        "element",
        DataType::Struct(fields),
        true,
    )))
}

fn required(name: &str, data_type: DataType, doc: &'static str) -> Column {
    Column {
        field: Field::new(name, data_type, false),
        doc,
    }
}

fn optional(name: &str, data_type: DataType, doc: &'static str) -> Column {
    Column {
        field: Field::new(name, data_type, true),
        doc,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Delta Lake has no unsigned integers and no nanosecond timestamps.
    #[test]
    fn types_are_those_delta_can_hold() {
        fn check(data_type: &DataType, path: &str) {
            match data_type {
                DataType::Boolean
                | DataType::Int32
                | DataType::Int64
                | DataType::Float64
                | DataType::Utf8 => {}
                DataType::Timestamp(TimeUnit::Microsecond, Some(tz)) if tz.as_ref() == "UTC" => {}
                DataType::List(element) => check(element.data_type(), path),
                DataType::Struct(fields) => fields.iter().for_each(|f| check(f.data_type(), path)),
                other => panic!("{path} has type {other}"),
            }
        }
        for table in Table::ALL {
            for column in table.columns() {
                check(
                    column.field.data_type(),
                    &format!("{}.{}", table.name(), column.field.name()),
                );
                assert!(!column.doc.is_empty());
            }
        }
    }

    #[test]
    fn names_lead_back_to_tables() {
        for table in Table::ALL {
            assert_eq!(Table::by_name(table.name()), Some(table));
        }
        assert_eq!(Table::by_name("nonesuch"), None);
    }

    #[test]
    fn tables_are_from_agents_or_of_the_collector() {
        for table in Table::ALL {
            let sent = Table::FROM_AGENTS.contains(&table);
            assert_eq!(sent, table.is_from_agents(), "{}", table.name());
            let has_origin = table.schema().field_with_name("batch_seq").is_ok();
            assert!(has_origin || !sent, "{}", table.name());
        }
    }
}
