//! Flame graphs and profiles of `vramscope leaks`, over the hour of [`super::recording`].

use std::io::Read;
use std::path::Path;
use std::process::Command;

use super::recording;
use crate::cli::{stderr, vramscope};

/// Titles of the boxes of a flame graph, in order.
pub fn titles(svg: &str) -> Vec<String> {
    let mut found: Vec<String> = svg
        .split("<title>")
        .skip(1)
        .filter_map(|rest| rest.split("</title>").next())
        .map(str::to_string)
        .collect();
    found.sort();
    found
}

/// Draws a flame graph of the recording with these options.
fn drawn(options: &[&str]) -> (String, String) {
    let (guard, data) = recording::folder();
    let file = guard.path().join("out.svg");
    let mut arguments = vec![
        "leaks",
        "--data",
        &data,
        "--flamegraph",
        file.to_str().unwrap(),
    ];
    arguments.extend(options);
    let output = vramscope(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    (std::fs::read_to_string(&file).unwrap(), stderr(&output))
}

#[test]
fn a_flame_graph_holds_the_live_bytes_of_one_class() {
    let (svg, note) = drawn(&[]);
    // insert: 4000 and 2000 of the two pods; weights: 10000.
    let expected = [
        "all: 15.6 KiB, 100.0 %",
        "cudaMalloc: 5.86 KiB, 37.5 %",
        "cudaMalloc: 9.77 KiB, 62.5 %",
        "insert: 5.86 KiB, 37.5 %",
        "load: 9.77 KiB, 62.5 %",
        "main: 15.6 KiB, 100.0 %",
        "reserve: 9.77 KiB, 62.5 %",
        "serve: 5.86 KiB, 37.5 %",
    ];
    assert_eq!(titles(&svg), expected);
    assert!(note.contains("15.6 KiB live is in"), "{note}");
    assert!(
        svg.contains(
            "physical memory of 2 process lifetimes, 2026-11-29T10:00:00Z to 2026-11-29T11:00:00Z"
        ),
        "{svg}"
    );
    assert!(svg.contains("<script") && svg.contains("search (Ctrl-F)"));
    let (svg, _) = drawn(&["--class", "sub_allocated"]);
    let all: Vec<String> = titles(&svg)
        .into_iter()
        .filter(|t| t.starts_with("all") || t.starts_with("forward"))
        .collect();
    assert_eq!(all, ["all: 500 B, 100.0 %", "forward: 500 B, 100.0 %"]);
    let (svg, _) = drawn(&["--kind", "pinned_host"]);
    assert_eq!(
        titles(&svg),
        ["(no stack): 64 B, 100.0 %", "all: 64 B, 100.0 %"]
    );
}

#[test]
fn growth_counts_from_the_warm_up_or_from_since() {
    let all = |options: &[&str]| {
        let (svg, _) = drawn(options);
        let mut titles = titles(&svg).into_iter();
        titles.find(|title| title.starts_with("all: ")).unwrap()
    };
    // A quarter of an hour of 60 minutes is warm-up: 4000 - 1000, and 2000 - 1000.
    assert_eq!(all(&["--value", "growth"]), "all: 3.91 KiB, 100.0 %");
    // From 10:30 on: 4000 - 1500, and 2000 - 1000.
    assert_eq!(
        all(&["--value", "growth", "--since", "30m"]),
        "all: 3.42 KiB, 100.0 %"
    );
    assert_eq!(
        all(&["--value", "growth", "--since", "2026-11-29T10:30:00Z"]),
        "all: 3.42 KiB, 100.0 %"
    );
    // 2500 and 1000 were given in the last minute.
    assert_eq!(
        all(&["--value", "allocated", "--since", "30m"]),
        "all: 3.42 KiB, 100.0 %"
    );
    // 1000 + 500 + 2500 + 10000 + 1000 + 1000
    assert_eq!(all(&["--value", "allocated"]), "all: 15.6 KiB, 100.0 %");
    // At 10:30: 1500 + 10000 + 1000.
    assert_eq!(all(&["--until", "30m"]), "all: 12.2 KiB, 100.0 %");
    assert_eq!(all(&["--pod", "server-2"]), "all: 1.95 KiB, 100.0 %");
    assert_eq!(all(&["--exe", "server-1.1"]), "all: 13.7 KiB, 100.0 %");
    assert_eq!(
        all(&["--pid", "12", "--host", "*"]),
        "all: 1.95 KiB, 100.0 %"
    );
}

#[test]
fn without_roll_ups_events_are_counted() {
    let guard = tempfile::tempdir().unwrap();
    crate::seed::write_trace(guard.path());
    let data = guard.path().to_str().unwrap();
    let file = guard.path().join("out.svg");
    let output = vramscope(&[
        "leaks",
        "--data",
        data,
        "--process",
        "101",
        "--kind",
        "device",
        "--flamegraph",
        file.to_str().unwrap(),
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let svg = std::fs::read_to_string(&file).unwrap();
    // As process_totals has it, by hand from the seed's events.
    assert!(
        titles(&svg).contains(&"all: 2.93 KiB, 100.0 %".to_string()),
        "{:?}",
        titles(&svg)
    );
}

#[test]
fn nothing_and_nonsense_are_told_apart() {
    let (guard, data) = recording::folder();
    let file = guard.path().join("x.svg");
    let run = |options: &[&str]| {
        let mut arguments = vec![
            "leaks",
            "--data",
            &data,
            "--flamegraph",
            file.to_str().unwrap(),
        ];
        arguments.extend(options);
        let output = vramscope(&arguments);
        (output.status.code().unwrap(), stderr(&output))
    };
    let (code, text) = run(&["--pod", "nonesuch"]);
    assert_eq!(code, 3, "{text}");
    assert!(
        text.contains("no physical memory of pod nonesuch is recorded"),
        "{text}"
    );
    assert!(!file.exists());
    let (code, text) = run(&["--since", "yesterday"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("yesterday"), "{text}");
    let (code, text) = run(&["--class", "physical", "--kind", "device"]);
    assert_eq!(code, 2, "{text}");
}

/// Fields of a protobuf message: number, then a varint or bytes. Written from the encoding's
/// description, so that the profile is read by other code than wrote it.
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

fn fields(mut bytes: &[u8]) -> Vec<(u64, Field)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut bytes)),
            2 => {
                let length = varint(&mut bytes) as usize;
                let (own, rest) = bytes.split_at(length);
                bytes = rest;
                Field::Bytes(own.to_vec())
            }
            other => panic!("wire type {other}"),
        };
        found.push((tag >> 3, field));
    }
    found
}

/// All values of a field, packed or not.
fn numbers(message: &[(u64, Field)], number: u64) -> Vec<u64> {
    let mut found = Vec::new();
    for (_, field) in message.iter().filter(|(of, _)| *of == number) {
        match field {
            Field::Number(value) => found.push(*value),
            Field::Bytes(packed) => {
                let mut left = packed.as_slice();
                while !left.is_empty() {
                    found.push(varint(&mut left));
                }
            }
        }
    }
    found
}

fn messages(message: &[(u64, Field)], number: u64) -> Vec<Vec<(u64, Field)>> {
    let of = message.iter().filter(|(of, _)| *of == number);
    of.map(|(_, field)| match field {
        Field::Bytes(bytes) => fields(bytes),
        Field::Number(_) => panic!("field {number} is a number"),
    })
    .collect()
}

/// A profile, read by the numbers of `profile.proto`.
pub struct Profile {
    message: Vec<(u64, Field)>,
    strings: Vec<String>,
}

impl Profile {
    pub fn read(file: &Path) -> Profile {
        let packed = std::fs::read(file).unwrap();
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(packed.as_slice())
            .read_to_end(&mut bytes)
            .unwrap();
        let message = fields(&bytes);
        let strings = message
            .iter()
            .filter(|(number, _)| *number == 6)
            .map(|(_, field)| match field {
                Field::Bytes(bytes) => String::from_utf8(bytes.clone()).unwrap(),
                Field::Number(_) => panic!("a string"),
            })
            .collect();
        Profile { message, strings }
    }

    fn text(&self, message: &[(u64, Field)], number: u64) -> String {
        let index = numbers(message, number).first().copied().unwrap_or(0);
        self.strings[index as usize].clone()
    }

    pub fn sample_types(&self) -> Vec<(String, String)> {
        let types = messages(&self.message, 1);
        types
            .iter()
            .map(|each| (self.text(each, 1), self.text(each, 2)))
            .collect()
    }

    /// Of each sample: function names, innermost first, values, and labels as text.
    pub fn samples(&self) -> Vec<(Vec<String>, Vec<i64>, Vec<String>)> {
        let locations = messages(&self.message, 4);
        let functions = messages(&self.message, 5);
        let by_id = |of: &'_ [Vec<(u64, Field)>], id: u64| {
            of.iter().position(|each| numbers(each, 1) == [id]).unwrap()
        };
        let read = |sample: &Vec<(u64, Field)>| {
            let mut names = Vec::new();
            for id in numbers(sample, 1) {
                let location = &locations[by_id(&locations, id)];
                for line in messages(location, 4) {
                    let function = &functions[by_id(&functions, numbers(&line, 1)[0])];
                    let at = numbers(&line, 2).first().copied().unwrap_or(0);
                    names.push(format!(
                        "{} {}:{at}",
                        self.text(function, 2),
                        self.text(function, 4)
                    ));
                }
            }
            let values = numbers(sample, 2)
                .iter()
                .map(|value| *value as i64)
                .collect();
            let labels = messages(sample, 3);
            let label = |label: &Vec<(u64, Field)>| {
                let number = numbers(label, 3).first().copied().unwrap_or(0);
                let value = match self.text(label, 2) {
                    text if text.is_empty() => number.to_string(),
                    text => text,
                };
                format!("{}={value}", self.text(label, 1))
            };
            (names, values, labels.iter().map(label).collect())
        };
        messages(&self.message, 2).iter().map(read).collect()
    }
}

#[test]
fn a_profile_has_every_byte_frame_and_label() {
    let (guard, data) = recording::folder();
    let file = guard.path().join("live.pb.gz");
    let output = vramscope(&["leaks", "--data", &data, "--pprof", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let profile = Profile::read(&file);
    let types = profile.sample_types();
    let names: Vec<&str> = types.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "live_count",
            "live_bytes",
            "growth_bytes",
            "allocations",
            "allocated_bytes"
        ]
    );
    let samples = profile.samples();
    let total = |index: usize| {
        samples
            .iter()
            .map(|(_, values, _)| values[index])
            .sum::<i64>()
    };
    // Live 3 + 1 + 2 with 4000 + 10000 + 2000; grown 3000 + 1000; given 3 + 1 + 2 times 4000 + 10000 + 2000.
    assert_eq!([0, 1, 2, 3, 4].map(total), [6, 16_000, 4_000, 6, 16_000]);
    let of_pod = |pod: &str, name: &str| {
        let found = samples.iter().find(|(frames, _, labels)| {
            labels.contains(&format!("pod={pod}")) && frames.iter().any(|f| f.starts_with(name))
        });
        found.unwrap_or_else(|| panic!("{name} of {pod}"))
    };
    let (frames, values, labels) = of_pod("server-1", "insert");
    assert_eq!(
        frames,
        &["cudaMalloc :0", "insert cache.cc:10", "serve :0", "main :0"]
    );
    assert_eq!(values, &[3, 4000, 3000, 3, 4000]);
    assert_eq!(
        labels,
        &[
            "host=h",
            "pod=server-1",
            "namespace=prod",
            "exe=/opt/server-1.1",
            "pid=11"
        ]
    );
    assert_eq!(of_pod("server-2", "insert").1, [2, 2000, 1000, 2, 2000]);
    let (frames, _, _) = of_pod("server-1", "load");
    assert_eq!(
        frames[1..3],
        ["reserve w.h:3".to_string(), "load w.cc:77".to_string()]
    );
    // Inlined functions are lines of one location, and modules have their build ids.
    let lines: Vec<usize> = messages(&profile.message, 4)
        .iter()
        .map(|each| messages(each, 4).len())
        .collect();
    assert_eq!(
        lines.iter().filter(|count| **count == 2).count(),
        1,
        "{lines:?}"
    );
    let mut mappings: Vec<(String, String)> = messages(&profile.message, 3)
        .iter()
        .map(|each| (profile.text(each, 5), profile.text(each, 6)))
        .collect();
    assert_eq!(
        mappings.remove(0),
        ("/opt/server".to_string(), "bb22".to_string())
    );
    assert_eq!(
        mappings,
        [("/opt/libcache.so".to_string(), "aa11".to_string())]
    );
    for location in messages(&profile.message, 4) {
        let (mapping, address) = (numbers(&location, 2), numbers(&location, 3));
        let Some(id) = mapping.first() else { continue };
        let mapping = &messages(&profile.message, 3)[*id as usize - 1];
        let (start, limit) = (numbers(mapping, 2)[0], numbers(mapping, 3)[0]);
        assert!(
            (start..limit).contains(&address[0]),
            "{start:x} {limit:x} {address:x?}"
        );
    }
}

/// The command that the format's authors read profiles with: `VRAMSCOPE_PPROF` names it, else it is
/// `pprof` or `go tool pprof`.
fn pprof_tool() -> Option<Vec<String>> {
    let words = |text: &str| text.split(' ').map(str::to_string).collect::<Vec<_>>();
    let named = std::env::var("VRAMSCOPE_PPROF").ok().map(|path| vec![path]);
    let candidates = [named, Some(words("pprof")), Some(words("go tool pprof"))];
    candidates.into_iter().flatten().find(|command| {
        let help = Command::new(&command[0])
            .args(&command[1..])
            .arg("-help")
            .output();
        help.is_ok_and(|help| {
            String::from_utf8_lossy(&help.stderr).contains("sample_index")
                || String::from_utf8_lossy(&help.stdout).contains("sample_index")
        })
    })
}

#[test]
fn the_formats_own_tool_reads_the_profile() {
    let Some(tool) = pprof_tool() else {
        eprintln!("skipped: no pprof; `go install` brings it, VRAMSCOPE_PPROF names it");
        return;
    };
    let (guard, data) = recording::folder();
    let file = guard.path().join("live.pb.gz");
    let output = vramscope(&["leaks", "--data", &data, "--pprof", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let read = |options: &[&str]| {
        let output = Command::new(&tool[0])
            .args(&tool[1..])
            .args(options)
            .arg(&file)
            .env("PPROF_TMPDIR", guard.path())
            .env("HOME", guard.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    // Live bytes are shown first, without being asked for.
    let top = read(&["-top", "-unit=B"]);
    assert!(top.contains("Type: live_bytes"), "{top}");
    assert!(top.contains("of 16000B total"), "{top}");
    let line = |name: &str| {
        let found = top
            .lines()
            .find(|line| line.split_whitespace().nth(5) == Some(name));
        found
            .unwrap_or_else(|| panic!("{name} in {top}"))
            .split_whitespace()
            .collect::<Vec<_>>()
    };
    // Own bytes, and those with all that was called.
    assert_eq!(
        (line("cudaMalloc")[0], line("cudaMalloc")[3]),
        ("16000B", "16000B")
    );
    assert_eq!((line("insert")[0], line("insert")[3]), ("0", "6000B"));
    assert_eq!((line("load")[0], line("load")[3]), ("0", "10000B"));
    let growth = read(&["-top", "-unit=B", "-sample_index=growth_bytes"]);
    assert!(growth.contains("of 4000B total"), "{growth}");
    let of_pod = read(&["-top", "-unit=B", "-tagfocus=pod=server-2"]);
    assert!(of_pod.contains("2000B"), "{of_pod}");
}
