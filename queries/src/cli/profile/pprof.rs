//! Profiles in pprof's format (`profile.proto`, gzip), for `pprof`, Grafana and others.
//!
//! The messages are written here as the format's public description has them
//! (<https://github.com/google/pprof/blob/main/proto/README.md>): field numbers are part of it.
//!
//! - a location is a place in a module; frames of one place (inlined functions) are its lines,
//!   innermost first;
//! - modules have no addresses of their own here, since stacks come from many processes: each gets a
//!   range, in which an address is `start + offset in the file`;
//! - values are truthful: what is not written stack by stack is one sample more.

use std::collections::HashMap;
use std::io::Write;

use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;

use super::Process;
use crate::frames::{Frame, Stack};

/// Ranges of modules start here, and are multiples of it: nothing lies at address 0.
const ALIGNMENT: u64 = 1 << 20;

/// What a column of values is.
pub struct SampleType {
    pub name: &'static str,
    pub unit: &'static str,
}

/// One row of values, with what it is about.
pub struct Sample<'a> {
    pub stack: Option<&'a Stack>,
    /// What to call it without a stack.
    pub name: &'a str,
    pub process: Option<&'a Process>,
    pub values: Vec<i64>,
}

/// What holds for the whole profile.
pub struct About<'a> {
    pub types: &'a [SampleType],
    /// The one that is shown first.
    pub default_type: &'a str,
    pub time_nanoseconds: i64,
    pub duration_nanoseconds: i64,
    pub comments: &'a [String],
}

/// The file's bytes.
pub fn encode(about: &About<'_>, samples: &[Sample<'_>]) -> anyhow::Result<Vec<u8>> {
    let mut writer = Writer::new(samples);
    for sample in samples {
        writer.add(sample);
    }
    let profile = writer.finish(about);
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(&profile.encode_to_vec())
        .and_then(|()| gzip.finish())
        .context("failed to compress the profile")
}

#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<SampleRow>,
    #[prost(message, repeated, tag = "3")]
    mapping: Vec<Mapping>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(int64, repeated, tag = "13")]
    comment: Vec<i64>,
    #[prost(int64, tag = "14")]
    default_sample_type: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    r#type: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct SampleRow {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    str: i64,
    #[prost(int64, tag = "3")]
    num: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Mapping {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    memory_start: u64,
    #[prost(uint64, tag = "3")]
    memory_limit: u64,
    #[prost(int64, tag = "5")]
    filename: i64,
    #[prost(int64, tag = "6")]
    build_id: i64,
    #[prost(bool, tag = "7")]
    has_functions: bool,
    #[prost(bool, tag = "8")]
    has_filenames: bool,
    #[prost(bool, tag = "9")]
    has_line_numbers: bool,
    #[prost(bool, tag = "10")]
    has_inline_frames: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    mapping_id: u64,
    #[prost(uint64, tag = "3")]
    address: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "3")]
    system_name: i64,
    #[prost(int64, tag = "4")]
    filename: i64,
}

type Module<'a> = (&'a str, &'a str);

/// Gives numbers to what samples share.
struct Writer<'a> {
    profile: Profile,
    strings: HashMap<String, i64>,
    mappings: HashMap<Module<'a>, u64>,
    functions: HashMap<(i64, i64), u64>,
    locations: HashMap<(u64, u64, Vec<Line>), u64>,
}

impl<'a> Writer<'a> {
    fn new(samples: &[Sample<'a>]) -> Self {
        let mut writer = Writer {
            profile: Profile::default(),
            strings: HashMap::new(),
            mappings: HashMap::new(),
            functions: HashMap::new(),
            locations: HashMap::new(),
        };
        // String 0 is the empty one, by the format.
        writer.string("");
        writer.map_modules(samples);
        writer
    }

    /// Lays out a range for each module, large enough for every offset that is met in it. The
    /// outermost frame's comes first: readers take the first for the program itself.
    fn map_modules(&mut self, samples: &[Sample<'a>]) {
        let mut order: Vec<Module<'a>> = Vec::new();
        let mut ends: HashMap<Module<'a>, u64> = HashMap::new();
        let stacks = samples.iter().filter_map(|sample| sample.stack);
        for frame in stacks.flat_map(|stack| stack.frames.iter().rev()) {
            if frame.module.is_empty() {
                continue;
            }
            let module = (frame.module.as_str(), frame.build_id.as_str());
            let end = ends.entry(module).or_insert_with(|| {
                order.push(module);
                0
            });
            *end = (*end).max(offset(frame));
        }
        let mut start = ALIGNMENT;
        for module in order {
            let size = (ends[&module] / ALIGNMENT + 1) * ALIGNMENT;
            let id = self.profile.mapping.len() as u64 + 1;
            let mapping = Mapping {
                id,
                memory_start: start,
                memory_limit: start + size,
                filename: self.string(module.0),
                build_id: self.string(module.1),
                ..Mapping::default()
            };
            self.profile.mapping.push(mapping);
            self.mappings.insert(module, id);
            start += size;
        }
    }

    fn string(&mut self, text: &str) -> i64 {
        if let Some(index) = self.strings.get(text) {
            return *index;
        }
        let index = self.profile.string_table.len() as i64;
        self.profile.string_table.push(text.to_string());
        self.strings.insert(text.to_string(), index);
        index
    }

    fn function(&mut self, name: &str, file: &str) -> u64 {
        let (name, file) = (self.string(name), self.string(file));
        let next = self.profile.function.len() as u64 + 1;
        let id = *self.functions.entry((name, file)).or_insert(next);
        if id == next {
            self.profile.function.push(Function {
                id,
                name,
                system_name: name,
                filename: file,
            });
        }
        id
    }

    fn location(&mut self, mapping: u64, address: u64, lines: Vec<Line>) -> u64 {
        let next = self.profile.location.len() as u64 + 1;
        let key = (mapping, address, lines);
        if let Some(id) = self.locations.get(&key) {
            return *id;
        }
        self.profile.location.push(Location {
            id: next,
            mapping_id: mapping,
            address,
            line: key.2.clone(),
        });
        self.locations.insert(key, next);
        next
    }

    /// The location of frames of one place, innermost first.
    fn place(&mut self, frames: &'a [Frame]) -> u64 {
        let first = &frames[0];
        let module = (first.module.as_str(), first.build_id.as_str());
        let mapping = self.mappings.get(&module).copied().unwrap_or_default();
        let mut lines = Vec::with_capacity(frames.len());
        for frame in frames {
            if frame.function.is_empty() && mapping != 0 {
                continue;
            }
            let function_id = self.function(&frame.name(), &frame.file);
            let line = frame.line.unwrap_or_default().into();
            lines.push(Line { function_id, line });
        }
        let mut address = 0;
        if mapping != 0 {
            let known = &mut self.profile.mapping[mapping as usize - 1];
            let has = |of: fn(&Frame) -> bool| frames.iter().any(of);
            known.has_functions |= has(|frame| !frame.function.is_empty());
            known.has_filenames |= has(|frame| !frame.file.is_empty());
            known.has_line_numbers |= has(|frame| frame.line.is_some());
            known.has_inline_frames |= frames.len() > 1;
            address = known.memory_start + offset(first);
        }
        self.location(mapping, address, lines)
    }

    fn add(&mut self, sample: &Sample<'a>) {
        let mut location_id = Vec::new();
        let frames: &'a [Frame] = sample.stack.map_or(&[], |stack| stack.frames.as_slice());
        let mut left = frames;
        while !left.is_empty() {
            let (place, outer) = left.split_at(place_length(left));
            location_id.push(self.place(place));
            left = outer;
        }
        if location_id.is_empty() {
            let names = match sample.stack {
                Some(stack) if !stack.folded.is_empty() => stack.folded.as_str(),
                _ => sample.name,
            };
            for name in names.rsplit(';') {
                let function_id = self.function(name, "");
                let line = Line {
                    function_id,
                    line: 0,
                };
                location_id.push(self.location(0, 0, vec![line]));
            }
        }
        let label = sample
            .process
            .map_or(Vec::new(), |process| self.labels(process));
        self.profile.sample.push(SampleRow {
            location_id,
            value: sample.values.clone(),
            label,
        });
    }

    fn labels(&mut self, process: &Process) -> Vec<Label> {
        let texts = [
            ("host", Some(process.host.as_str())),
            ("pod", process.pod.as_deref()),
            ("namespace", process.namespace.as_deref()),
            ("exe", process.exe.as_deref()),
        ];
        let mut labels = Vec::new();
        for (key, text) in texts {
            if let Some(text) = text.filter(|text| !text.is_empty()) {
                let (key, str) = (self.string(key), self.string(text));
                labels.push(Label { key, str, num: 0 });
            }
        }
        let key = self.string("pid");
        labels.push(Label {
            key,
            str: 0,
            num: process.pid,
        });
        labels
    }

    fn finish(mut self, about: &About<'_>) -> Profile {
        for kind in about.types {
            let value = ValueType {
                r#type: self.string(kind.name),
                unit: self.string(kind.unit),
            };
            self.profile.sample_type.push(value);
        }
        for comment in about.comments {
            let index = self.string(comment);
            self.profile.comment.push(index);
        }
        self.profile.default_sample_type = self.string(about.default_type);
        self.profile.time_nanos = about.time_nanoseconds;
        self.profile.duration_nanos = about.duration_nanoseconds;
        self.profile
    }
}

fn offset(frame: &Frame) -> u64 {
    frame
        .offset
        .and_then(|offset| u64::try_from(offset).ok())
        .unwrap_or_default()
}

/// How many frames from the innermost on are of one place in the code: functions inlined into each
/// other. Where the innermost function comes again, it is recursion and no inlining.
fn place_length(frames: &[Frame]) -> usize {
    let first = &frames[0];
    let has_place = !first.module.is_empty() && first.offset.is_some() && !first.is_python();
    let same = |frame: &&Frame| {
        has_place
            && !frame.is_python()
            && frame.function != first.function
            && (&frame.module, &frame.build_id, frame.offset)
                == (&first.module, &first.build_id, first.offset)
    };
    1 + frames[1..].iter().take_while(same).count()
}
