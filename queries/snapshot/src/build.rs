//! Makes segments, events, frames and settings of dictionaries, and says what is missing.

mod keys;

use vramscope_model::map::{BlockState, PoolSize};

pub(crate) use keys::Key;
use keys::key_of;

use crate::Error;
use crate::item::{Action, Block, Event, Memory, Segment};
use crate::machine::nodes::Nodes;
use crate::machine::{Handle, Kind, Value};
use crate::tables::{Frame, StackId, Tables, Text};

/// A whole number that is not negative.
pub(crate) fn number(value: Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(number).ok(),
        Value::Uint(number) => Some(number),
        // JSON writers that know only one sort of number.
        Value::Float(number)
            if number >= 0.0 && number <= 2f64.powi(53) && number.fract() == 0.0 =>
        {
            Some(number as u64)
        }
        _ => None,
    }
}

fn signed(value: Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(number),
        // A handle above 2^63.
        Value::Uint(number) => Some(number as i64),
        other => number(other).and_then(|number| i64::try_from(number).ok()),
    }
}

/// A frame, if the dictionary is one. When a key comes twice the last counts, as in Python.
pub(crate) fn frame(items: &[Value]) -> Option<Frame> {
    let (mut name, mut file, mut line) = (None, None, 0);
    for pair in items.chunks_exact(2) {
        match (key_of(pair[0]), pair[1]) {
            (Some(Key::Name), Value::Text(text)) => name = Some(text),
            (Some(Key::FileName), Value::Text(text)) => file = Some(text),
            (Some(Key::Line), value) => line = signed(value).unwrap_or(0),
            _ => {}
        }
    }
    Some(Frame {
        name: name?,
        file: file?,
        line,
    })
}

/// Reads the values of one dictionary.
struct Fields<'a> {
    nodes: &'a Nodes,
    tables: &'a Tables,
    items: &'a [Value],
    offset: u64,
}

impl<'a> Fields<'a> {
    fn of(
        nodes: &'a Nodes,
        tables: &'a Tables,
        value: Value,
        expected: &'static str,
        offset: u64,
    ) -> Result<Self, Error> {
        let node = match value {
            Value::Node(handle) => nodes.get(handle),
            _ => None,
        };
        match node {
            Some(node) if node.kind == Kind::Dict => Ok(Self {
                nodes,
                tables,
                items: &node.items,
                offset: node.offset,
            }),
            _ => Err(Error::unexpected(offset, expected, value.kind())),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (Key, Value)> + use<'a> {
        self.items
            .chunks_exact(2)
            .filter_map(|pair| Some((key_of(pair[0])?, pair[1])))
    }

    fn number(&self, value: Value, expected: &'static str) -> Result<u64, Error> {
        number(value).ok_or_else(|| self.unexpected(expected, value))
    }

    fn signed(&self, value: Value, expected: &'static str) -> Result<i64, Error> {
        signed(value).ok_or_else(|| self.unexpected(expected, value))
    }

    fn stack(&self, value: Value) -> Result<Option<StackId>, Error> {
        match value {
            Value::Stack(stack) => Ok(Some(stack)),
            Value::None => Ok(None),
            _ => Err(self.unexpected("a list of frames as `frames`", value)),
        }
    }

    /// A private pool's id; PyTorch's default pool is (0, 0).
    fn pool(&self, value: Value) -> Result<Option<(u64, u64)>, Error> {
        let pair = match value {
            Value::None => return Ok(None),
            Value::Pair(pair) => Some(self.tables.pair(pair)),
            Value::Node(handle) => self.pair_of(handle),
            _ => None,
        };
        match pair {
            Some((0, 0)) => Ok(None),
            Some(pair) => Ok(Some(pair)),
            None => Err(self.unexpected("two numbers as a pool's id", value)),
        }
    }

    fn pair_of(&self, handle: Handle) -> Option<(u64, u64)> {
        match self.nodes.get(handle)?.items[..] {
            [a, b] => Some((number(a)?, number(b)?)),
            _ => None,
        }
    }

    fn unexpected(&self, expected: &'static str, found: Value) -> Error {
        let found = match found {
            Value::Text(text) => format!("{:?}", shorten(self.tables.text(text))),
            Value::Int(number) => number.to_string(),
            other => other.kind().to_string(),
        };
        Error::unexpected(self.offset, expected, found)
    }

    fn need<T>(&self, value: Option<T>, expected: &'static str) -> Result<T, Error> {
        value.ok_or_else(|| Error::unexpected(self.offset, expected, "none"))
    }
}

/// What fits an error's line.
fn shorten(text: &str) -> String {
    text.chars().take(60).collect()
}

pub(crate) fn event(
    nodes: &Nodes,
    tables: &Tables,
    value: Value,
    memory: Memory,
    offset: u64,
) -> Result<Event, Error> {
    let fields = Fields::of(nodes, tables, value, "a trace entry", offset)?;
    let (mut action, mut address, mut bytes, mut device_free) = (None, None, None, None);
    let (mut stream, mut time_us, mut private_pool, mut stack) = (0, None, None, None);
    for (key, value) in fields.iter() {
        match key {
            Key::Action => match value {
                Value::Text(text) => action = Some(action_of(text)),
                other => return Err(fields.unexpected("a text as `action`", other)),
            },
            Key::Addr => address = Some(fields.number(value, "an address as `addr`")?),
            Key::DeviceFree => {
                device_free = Some(fields.number(value, "bytes as `device_free`")?);
            }
            Key::Size => bytes = Some(fields.number(value, "bytes as `size`")?),
            Key::Stream => stream = fields.signed(value, "a number as `stream`")?,
            Key::TimeUs => time_us = Some(fields.signed(value, "microseconds as `time_us`")?),
            Key::PoolId => private_pool = fields.pool(value)?,
            Key::Frames => stack = fields.stack(value)?,
            _ => {}
        }
    }
    let action = fields.need(action, "a trace entry with `action`")?;
    match action {
        Action::Snapshot | Action::Annotate | Action::Other(_) => {}
        Action::Oom => {
            fields.need(bytes, "an oom entry with `size`")?;
            // Some versions put what is free where the others have the address.
            device_free = device_free.or(address.take());
        }
        _ => {
            fields.need(address, "a trace entry with `addr`")?;
            fields.need(bytes, "a trace entry with `size`")?;
        }
    }
    Ok(Event {
        memory,
        action,
        address,
        bytes: bytes.unwrap_or(0),
        stream,
        time_us,
        private_pool,
        device_free,
        stack,
    })
}

fn action_of(text: Text) -> Action {
    match Key::of(text) {
        Some(Key::Alloc) => Action::Alloc,
        Some(Key::FreeRequested) => Action::FreeRequested,
        Some(Key::FreeCompleted) => Action::FreeCompleted,
        Some(Key::SegmentAlloc) => Action::SegmentAlloc,
        Some(Key::SegmentFree) => Action::SegmentFree,
        Some(Key::SegmentMap) => Action::SegmentMap,
        Some(Key::SegmentUnmap) => Action::SegmentUnmap,
        Some(Key::Snapshot) => Action::Snapshot,
        Some(Key::Oom) => Action::Oom,
        Some(Key::Annotate) => Action::Annotate,
        _ => Action::Other(text),
    }
}

pub(crate) fn segment(
    nodes: &Nodes,
    tables: &Tables,
    value: Value,
    host: bool,
    offset: u64,
) -> Result<Segment, Error> {
    let fields = Fields::of(nodes, tables, value, "a segment", offset)?;
    let (mut device, mut address, mut bytes, mut size) = (0, None, None, None);
    let (mut stream, mut private_pool, mut expandable) = (0, None, false);
    let (mut stack, mut blocks) = (None, None);
    for (key, value) in fields.iter() {
        match key {
            Key::Device => device = fields.signed(value, "a number as `device`")?,
            Key::Address => address = Some(fields.number(value, "an address as `address`")?),
            Key::TotalSize => bytes = Some(fields.number(value, "bytes as `total_size`")?),
            Key::Stream => stream = fields.signed(value, "a number as `stream`")?,
            Key::SegmentType => match key_of(value) {
                Some(Key::Small) => size = Some(PoolSize::Small),
                Some(Key::Large) => size = Some(PoolSize::Large),
                _ => return Err(fields.unexpected("small or large as `segment_type`", value)),
            },
            Key::SegmentPoolId => private_pool = fields.pool(value)?,
            Key::IsExpandable => match value {
                Value::Bool(yes) => expandable = yes,
                other => return Err(fields.unexpected("True or False as `is_expandable`", other)),
            },
            Key::Frames => stack = fields.stack(value)?,
            Key::Blocks => blocks = Some(value),
            _ => {}
        }
    }
    let address = fields.need(address, "a segment with `address`")?;
    let bytes = fields.need(bytes, "a segment with `total_size`")?;
    let blocks = fields.need(blocks, "a segment with `blocks`")?;
    let is_sound = bytes > 0 && address.checked_add(bytes).is_some();
    if !is_sound {
        return Err(Error::unexpected(
            fields.offset,
            "a segment inside the address space",
            format!("{bytes} bytes at {address:#x}"),
        ));
    }
    let device = i32::try_from(device)
        .map_err(|_| Error::unexpected(fields.offset, "a device's index", device.to_string()))?;
    Ok(Segment {
        memory: if host {
            Memory::Host
        } else {
            Memory::Device(device)
        },
        address,
        bytes,
        stream,
        size,
        private_pool,
        expandable,
        stack,
        blocks: tiled(&fields, address, bytes, blocks)?,
    })
}

/// The blocks in order of address; an error if they do not tile the segment.
fn tiled(
    fields: &Fields<'_>,
    address: u64,
    bytes: u64,
    blocks: Value,
) -> Result<Vec<Block>, Error> {
    let list = match blocks {
        Value::Node(handle) => fields.nodes.get(handle),
        _ => None,
    };
    let Some(list) = list.filter(|node| node.kind != Kind::Dict) else {
        return Err(fields.unexpected("a list as `blocks`", blocks));
    };
    let mut tiles = Vec::with_capacity(list.items.len());
    let mut next = address;
    for value in &list.items {
        let of = Fields::of(
            fields.nodes,
            fields.tables,
            *value,
            "a block",
            fields.offset,
        )?;
        let block = block(&of, next)?;
        next = block.address.saturating_add(block.bytes);
        tiles.push(block);
    }
    if !tiles.is_sorted_by_key(|block| block.address) {
        tiles.sort_by_key(|block| block.address);
    }
    let mut end = address;
    for block in &tiles {
        if block.address != end {
            return Err(not_tiled(fields, address, block.address, end));
        }
        end = end.saturating_add(block.bytes);
    }
    if end != address + bytes {
        return Err(not_tiled(fields, address, end, address + bytes));
    }
    Ok(tiles)
}

fn not_tiled(fields: &Fields<'_>, segment: u64, found: u64, expected: u64) -> Error {
    Error::unexpected(
        fields.offset,
        "blocks that fill their segment without hole or overlap",
        format!("in segment {segment:#x} a block border at {found:#x} instead of {expected:#x}"),
    )
}

/// `next`: where the block lies if it does not say.
fn block(fields: &Fields<'_>, next: u64) -> Result<Block, Error> {
    let (mut address, mut bytes, mut requested) = (next, None, None);
    let (mut state, mut stack, mut history) = (None, None, None);
    for (key, value) in fields.iter() {
        match key {
            Key::Address => address = fields.number(value, "an address as `address`")?,
            Key::Size => bytes = Some(fields.number(value, "bytes as `size`")?),
            Key::RequestedSize => {
                requested = Some(fields.number(value, "bytes as `requested_size`")?);
            }
            Key::State => {
                state = Some(match key_of(value) {
                    Some(Key::ActiveAllocated) => BlockState::Allocated,
                    Some(Key::ActiveAwaitingFree | Key::ActivePendingFree) => {
                        BlockState::PendingFree
                    }
                    Some(Key::Inactive) => BlockState::Inactive,
                    _ => return Err(fields.unexpected("a block's state", value)),
                });
            }
            Key::Frames => stack = fields.stack(value)?,
            Key::History => history = Some(value),
            _ => {}
        }
    }
    let state = fields.need(state, "a block with `state`")?;
    let bytes = fields.need(bytes, "a block with `size`")?;
    if bytes == 0 {
        return Err(Error::unexpected(fields.offset, "a block with bytes", "0"));
    }
    if let Some(history) = history.filter(|_| state != BlockState::Inactive) {
        let (real_size, frames) = last_of_history(fields, history)?;
        requested = requested.or(real_size);
        stack = stack.or(frames);
    }
    Ok(Block {
        address,
        bytes,
        // Of a gap it is what the last owner asked for.
        requested: requested.filter(|_| state != BlockState::Inactive),
        state,
        stack,
    })
}

/// PyTorch 1.13 and 2.0 told size and stack of a block in a list of what it was used for.
fn last_of_history(
    fields: &Fields<'_>,
    history: Value,
) -> Result<(Option<u64>, Option<StackId>), Error> {
    let list = match history {
        Value::Node(handle) => fields.nodes.get(handle),
        _ => None,
    };
    let Some(newest) = list.and_then(|node| node.items.first()) else {
        return Ok((None, None));
    };
    let of = Fields::of(
        fields.nodes,
        fields.tables,
        *newest,
        "an entry of `history`",
        fields.offset,
    )?;
    let (mut requested, mut stack) = (None, None);
    for (key, value) in of.iter() {
        match key {
            Key::RealSize => requested = Some(of.number(value, "bytes as `real_size`")?),
            Key::Frames => stack = of.stack(value)?,
            _ => {}
        }
    }
    Ok((requested, stack))
}

/// The settings in the spelling of `PYTORCH_CUDA_ALLOC_CONF`: as they were given, or put together
/// from the values in force (a program may set them without the variable). `None` if the snapshot
/// has no settings.
pub(crate) fn settings(nodes: &Nodes, tables: &Tables, value: Value) -> Option<String> {
    let fields = Fields::of(nodes, tables, value, "settings", 0).ok()?;
    let mut given = None;
    let mut parts = Vec::new();
    for pair in fields.items.chunks_exact(2) {
        let Value::Text(key) = pair[0] else { continue };
        match (tables.text(key), pair[1]) {
            ("PYTORCH_CUDA_ALLOC_CONF" | "PYTORCH_ALLOC_CONF", Value::Text(text)) => {
                let text = tables.text(text);
                given = Some(text).filter(|text| !text.is_empty()).or(given);
            }
            ("max_split_size", value) => {
                // -1: no limit.
                if let Some(bytes) = number(value) {
                    parts.push(format!("max_split_size_mb:{}", bytes >> 20));
                }
            }
            ("garbage_collection_threshold", Value::Float(share)) if share > 0.0 => {
                parts.push(format!("garbage_collection_threshold:{share}"));
            }
            ("expandable_segments", Value::Bool(true)) => {
                parts.push("expandable_segments:True".to_string());
            }
            ("roundup_power2_divisions", Value::Node(handle)) => {
                parts.extend(divisions(nodes, tables, handle));
            }
            _ => {}
        }
    }
    Some(given.map_or_else(|| parts.join(","), str::to_string))
}

/// `{"1": 0, "2": 4, …}`: how a power of two, in MiB, is divided; 0 is not at all.
fn divisions(nodes: &Nodes, tables: &Tables, handle: Handle) -> Option<String> {
    let node = nodes.get(handle).filter(|node| node.kind == Kind::Dict)?;
    let steps: Vec<(&str, u64)> = node
        .items
        .chunks_exact(2)
        .filter_map(|pair| match pair[0] {
            Value::Text(key) => Some((tables.text(key), number(pair[1])?)),
            _ => None,
        })
        .collect();
    let first = steps.first()?.1;
    if steps.iter().all(|(_, divisions)| *divisions == first) {
        return (first > 0).then(|| format!("roundup_power2_divisions:{first}"));
    }
    let steps: Vec<String> = steps
        .iter()
        .map(|(power, divisions)| format!("{power}:{divisions}"))
        .collect();
    Some(format!("roundup_power2_divisions:[{}]", steps.join(",")))
}
