//! What PyTorch's versions and writers put into a snapshot, and that all of it comes out.

use std::io::Write;
use std::process::{Command, Stdio};
use std::rc::Rc;

use vramscope_model::map::{BlockState, PoolSize};
use vramscope_snapshot::{Action, Memory};

use super::whole;
use super::writer::{HANDS, Hand, Py, json, pickle};
use crate::dict;

fn frame(name: &str, file: &str, line: i64) -> Py {
    dict! {"name" => name, "filename" => file, "line" => line}
}

/// Two devices, a private pool, an expandable segment, host memory, both pending states, every
/// action and an unknown one, shared frame lists, and keys that nobody reads.
pub fn small() -> Py {
    let train = Rc::new(frame("train", "train.py", 12));
    let malloc = Rc::new(frame("c10::cuda::malloc", "??", 0));
    let frames = Rc::new(Py::List(vec![
        Py::Shared(malloc.clone()),
        Py::Shared(train.clone()),
    ]));
    // One empty list for all that have no stack, as PyTorch writes it.
    let empty = Py::Shared(Rc::new(Py::List(vec![])));
    let alone = Py::List(vec![Py::Shared(train)]);
    let block = |address: i64, size: i64, state: &str, frames: Py| {
        dict! {"address" => address, "size" => size, "requested_size" => size - 12,
        "state" => state, "frames" => frames}
    };
    let base = 0x7f00_0000_0000_i64;
    let segments = vec![
        dict! {
            "device" => 0, "address" => base, "total_size" => 2_097_152, "allocated_size" => 512,
            "active_size" => 1536, "requested_size" => 500, "stream" => 0, "segment_type" => "small",
            "segment_pool_id" => Py::Tuple(vec![0.into(), 0.into()]), "is_expandable" => false,
            "frames" => empty.clone(),
            "blocks" => vec![
                block(base, 512, "active_allocated", Py::Shared(frames.clone())),
                block(base + 512, 512, "active_pending_free", alone.clone()),
                block(base + 1024, 512, "active_awaiting_free", alone),
                block(base + 1536, 2_095_616, "inactive", empty.clone()),
            ],
        },
        dict! {
            "device" => 1, "address" => base + (1 << 30), "total_size" => 20_971_520,
            "stream" => 94_087_155, "segment_type" => "large",
            "segment_pool_id" => Py::Tuple(vec![0.into(), 1.into()]), "is_expandable" => true,
            "frames" => Py::Shared(frames.clone()),
            "blocks" => vec![
                block(base + (1 << 30), 20_971_520, "inactive", empty.clone()),
            ],
        },
    ];
    let entry = |action: &str, address: i64, size: i64| {
        dict! {"action" => action, "addr" => address, "size" => size, "stream" => 0,
        "time_us" => 1_700_000_000_000_000, "compile_context" => "N/A",
        "user_metadata" => "", "pool_id" => Py::Tuple(vec![0.into(), 0.into()]),
        "frames" => Py::Shared(frames.clone())}
    };
    let first = vec![
        entry("segment_alloc", base, 2_097_152),
        entry("alloc", base, 500),
        entry("snapshot", 0, 0),
        entry("free_requested", base, 500),
        entry("free_completed", base, 500),
        entry("segment_free", base, 2_097_152),
        entry("annotate", base, 0),
        entry("defragment", base, 0),
        dict! {"action" => "oom", "device_free" => 8_000_000, "size" => 1 << 33, "stream" => 0,
        "time_us" => 1_700_000_000_000_001, "frames" => Py::Shared(frames.clone())},
    ];
    let second = vec![
        entry("segment_map", base + (1 << 30), 20_971_520),
        entry("segment_unmap", base, 2),
    ];
    let host = dict! {
        "address" => 4096, "total_size" => 1024, "stream" => 0, "is_expandable" => false,
        "blocks" => vec![block(4096, 1024, "active_allocated", empty.clone())],
    };
    dict! {
        "segments" => segments,
        "device_traces" => vec![Py::List(first), Py::List(second), Py::List(vec![])],
        "allocator_settings" => dict!{
            "PYTORCH_CUDA_ALLOC_CONF" => "max_split_size_mb:128,expandable_segments:True",
            "max_split_size" => 134_217_728, "garbage_collection_threshold" => Py::Float(0.0),
            "expandable_segments" => true,
            "roundup_power2_divisions" => dict!{"1" => 0, "2" => 0},
        },
        "external_annotations" => vec![
            dict!{"stage" => "START", "name" => "Optimizer.step", "device" => 0, "time_us" => 5},
            dict!{"stage" => "END", "name" => "Optimizer.step", "device" => 0, "time_us" => 6},
        ],
        "host_segments" => vec![host],
        "host_traces" => vec![Py::List(vec![entry("alloc", 4096, 1000)])],
        "something_new" => dict!{"nested" => vec![Py::Tuple(vec![1.into(), 2.into(), 3.into(), 4.into()])]},
    }
}

fn check_small(found: &super::Whole, hand: &str) {
    let base = 0x7f00_0000_0000_u64;
    let [first, second, host] = &found.segments[..] else {
        panic!("{hand}: {} segments", found.segments.len());
    };
    assert_eq!(
        (first.memory, first.address, first.bytes),
        (Memory::Device(0), base, 2_097_152)
    );
    assert_eq!(
        (first.size, first.expandable),
        (Some(PoolSize::Small), false)
    );
    assert_eq!((first.private_pool, first.stream), (None, 0));
    assert_eq!(found.tables.stack(first.stack.unwrap()).len(), 0);
    let blocks: Vec<_> = first
        .blocks
        .iter()
        .map(|b| (b.address - base, b.bytes, b.requested, b.state))
        .collect();
    assert_eq!(
        blocks,
        [
            (0, 512, Some(500), BlockState::Allocated),
            (512, 512, Some(500), BlockState::PendingFree),
            (1024, 512, Some(500), BlockState::PendingFree),
            (1536, 2_095_616, None, BlockState::Inactive),
        ],
        "{hand}"
    );
    let names = |stack| -> Vec<(String, String, i64)> {
        found
            .tables
            .stack(stack)
            .map(|f| {
                let text = |text| found.tables.text(text).to_string();
                (text(f.name), text(f.file), f.line)
            })
            .collect()
    };
    let malloc = ("c10::cuda::malloc".to_string(), "??".to_string(), 0);
    let train = ("train".to_string(), "train.py".to_string(), 12);
    assert_eq!(
        names(first.blocks[0].stack.unwrap()),
        [malloc, train.clone()]
    );
    assert_eq!(names(first.blocks[1].stack.unwrap()), [train]);
    assert_eq!(first.blocks[1].stack, first.blocks[2].stack);
    assert_eq!(
        (second.memory, second.private_pool),
        (Memory::Device(1), Some((0, 1)))
    );
    assert_eq!((second.expandable, second.stream), (true, 94_087_155));
    assert_eq!(second.stack, first.blocks[0].stack);
    assert_eq!((host.memory, host.size), (Memory::Host, None));

    let events: Vec<_> = found
        .events
        .iter()
        .map(|e| {
            let name = match e.action {
                Action::Other(text) => found.tables.text(text),
                known => known.name().unwrap(),
            };
            (e.memory.device(), name)
        })
        .collect();
    let of_first = [
        "segment_alloc",
        "alloc",
        "snapshot",
        "free_requested",
        "free_completed",
        "segment_free",
        "annotate",
        "defragment",
        "oom",
    ];
    let mut expected: Vec<_> = of_first.map(|name| (0, name)).to_vec();
    expected.extend([(1, "segment_map"), (1, "segment_unmap"), (-1, "alloc")]);
    assert_eq!(events, expected, "{hand}");
    let oom = &found.events[8];
    assert_eq!(
        (oom.address, oom.device_free, oom.bytes),
        (None, Some(8_000_000), 1 << 33)
    );
    assert_eq!(oom.time_us, Some(1_700_000_000_000_001));
    assert_eq!(oom.stack, first.blocks[0].stack);
    let alloc = &found.events[1];
    assert_eq!(
        (alloc.address, alloc.bytes, alloc.private_pool),
        (Some(base), 500, None)
    );
    assert_eq!(found.outline.device_traces, 3);
    assert_eq!(
        found.outline.skipped_keys,
        ["external_annotations", "something_new"]
    );
    assert_eq!(
        found.outline.settings.as_deref(),
        Some("max_split_size_mb:128,expandable_segments:True")
    );
}

/// Every writer's file says the same.
#[test]
fn all_writers_are_read_alike() {
    for hand in HANDS {
        check_small(
            &whole(&pickle(&small(), hand)).unwrap(),
            &format!("{hand:?}"),
        );
    }
    let text = json(&small());
    check_small(&whole(text.as_bytes()).unwrap(), "JSON");
    let with_mark = format!("\u{feff}  {text}\n");
    check_small(
        &whole(with_mark.as_bytes()).unwrap(),
        "JSON with a byte order mark",
    );
}

/// The writer of these tests writes what Python reads: `pickle.load` gives the JSON's value.
#[test]
fn python_reads_what_the_writer_writes() {
    const PROGRAM: &str = "import sys, json, pickle
data = sys.stdin.buffer.read()
size = int.from_bytes(data[:8], 'little')
value = json.loads(data[8:8 + size])
found = pickle.loads(data[8 + size:])
assert json.loads(json.dumps(found)) == value, found";
    for hand in HANDS {
        let started = Command::new("python3")
            .args(["-c", PROGRAM])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let Ok(mut python) = started else {
            eprintln!("SKIPPED: no python3");
            return;
        };
        let text = json(&small());
        let mut input = (text.len() as u64).to_le_bytes().to_vec();
        input.extend(text.as_bytes());
        input.extend(pickle(&small(), hand));
        python.stdin.take().unwrap().write_all(&input).unwrap();
        let output = python.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{hand:?}: {error}");
    }
}

/// More entries than CPython writes in a batch, and one more than a batch, which it writes alone.
#[test]
fn batches_are_put_together() {
    for count in [0, 1, 2, 999, 1000, 1001, 1002, 3001] {
        let entry = |i: i64| {
            dict! {"action" => "alloc", "addr" => 512 * (i + 1), "size" => 512, "stream" => 0}
        };
        let value = dict! {
            "segments" => Py::List(vec![]),
            "device_traces" => vec![
                Py::List((0..count).map(entry).collect()),
                Py::List(vec![entry(7)]),
            ],
        };
        for hand in HANDS {
            let found = whole(&pickle(&value, hand)).unwrap();
            let device =
                |device| move |e: &&vramscope_snapshot::Event| e.memory == Memory::Device(device);
            assert_eq!(
                found.events.iter().filter(device(0)).count() as i64,
                count,
                "{hand:?}"
            );
            assert_eq!(found.events.iter().filter(device(1)).count(), 1, "{hand:?}");
            let in_order = found.events.windows(2).take(count.max(1) as usize - 1);
            assert!(
                in_order
                    .into_iter()
                    .all(|pair| pair[0].address < pair[1].address)
            );
        }
    }
}

/// A dictionary with one key, and one device: CPython writes these without marks.
#[test]
fn single_elements_are_written_without_marks() {
    let entry = dict! {"action" => "alloc", "addr" => 512, "size" => 512};
    let only_traces = dict! {"device_traces" => vec![Py::List(vec![entry.clone(), entry])]};
    for hand in HANDS {
        let found = whole(&pickle(&only_traces, hand)).unwrap();
        assert_eq!(found.events.len(), 2, "{hand:?}");
        assert_eq!(found.outline.device_traces, 1);
    }
}

/// What `torch.cuda.memory_snapshot()` returns, and blocks of versions before 2.1: without
/// addresses, and with size and stack in a history.
#[test]
fn older_versions_are_read() {
    let old = vec![dict! {
        "device" => 0, "address" => 1 << 21, "total_size" => 4096, "allocated_size" => 512,
        "active_size" => 512, "stream" => 0, "segment_type" => "small",
        "blocks" => vec![
            dict!{"size" => 512, "state" => "active_allocated", "history" => vec![
                dict!{"addr" => 1 << 21, "real_size" => 100,
                      "frames" => vec![frame("f", "f.py", 1)]},
                dict!{"addr" => 1 << 21, "real_size" => 90,
                      "frames" => vec![frame("g", "g.py", 1)]},
            ]},
            dict!{"size" => 3584, "state" => "inactive"},
        ],
    }];
    let alone = Py::List(old.clone());
    let in_dict = dict! {"segments" => old};
    for value in [alone, in_dict] {
        for hand in [Hand::Python(4), Hand::Torch] {
            let found = whole(&pickle(&value, hand)).unwrap();
            let blocks = &found.segments[0].blocks;
            assert_eq!(
                (blocks[0].address, blocks[0].requested),
                (1 << 21, Some(100))
            );
            assert_eq!(
                (blocks[1].address, blocks[1].requested),
                ((1 << 21) + 512, None)
            );
            let stack: Vec<_> = found.tables.stack(blocks[0].stack.unwrap()).collect();
            assert_eq!(found.tables.text(stack[0].name), "f");
            assert_eq!(found.outline.settings, None);
        }
    }
}

/// Settings that a program made without the environment variable are put into its spelling.
#[test]
fn settings_are_spelled_like_the_variable() {
    let settings = |settings: Py| {
        let value = dict! {"segments" => Py::List(vec![]), "allocator_settings" => settings};
        whole(&pickle(&value, Hand::Python(4)))
            .unwrap()
            .outline
            .settings
    };
    let found = settings(dict! {
        "PYTORCH_CUDA_ALLOC_CONF" => "", "max_split_size" => 209_715_200,
        "garbage_collection_threshold" => Py::Float(0.8), "expandable_segments" => true,
        "roundup_power2_divisions" => dict!{"1" => 0, "2" => 0, "256" => 4},
    });
    assert_eq!(
        found.as_deref(),
        Some(
            "max_split_size_mb:200,garbage_collection_threshold:0.8,expandable_segments:True,\
             roundup_power2_divisions:[1:0,2:0,256:4]"
        )
    );
    let found = settings(dict! {"roundup_power2_divisions" => dict!{"1" => 8, "2" => 8}});
    assert_eq!(found.as_deref(), Some("roundup_power2_divisions:8"));
    let found = settings(dict! {"max_split_size" => -1, "expandable_segments" => false});
    assert_eq!(found.as_deref(), Some(""));
}

/// What is wrong with an entry is said, with the place of that entry.
#[test]
fn broken_entries_are_named() {
    let segment = |blocks: Vec<Py>| {
        dict! {"segments" => vec![dict!{
            "device" => 0, "address" => 4096, "total_size" => 1024, "stream" => 0,
            "segment_type" => "small", "blocks" => blocks,
        }]}
    };
    let block = |address: i64, size: i64, state: &str| {
        dict! {"address" => address, "size" => size, "state" => state}
    };
    let trace = |entry: Py| dict! {"device_traces" => vec![Py::List(vec![entry])]};
    let cases = [
        (
            segment(vec![block(4096, 512, "inactive")]),
            "in segment 0x1000 a block border at 0x1200 instead of 0x1400",
        ),
        (
            segment(vec![
                block(4096, 512, "inactive"),
                block(4096, 1024, "inactive"),
            ]),
            "without hole or overlap",
        ),
        (
            segment(vec![block(4096, 1024, "borrowed")]),
            "a block's state, found \"borrowed\"",
        ),
        (
            segment(vec![block(4096, 0, "inactive")]),
            "a block with bytes",
        ),
        (segment(vec![Py::Int(5)]), "a block, found a whole number"),
        (trace(dict! {"addr" => 1}), "a trace entry with `action`"),
        (
            trace(dict! {"action" => "alloc", "size" => 1}),
            "a trace entry with `addr`",
        ),
        (
            trace(dict! {"action" => "alloc", "addr" => 1}),
            "a trace entry with `size`",
        ),
        (
            trace(dict! {"action" => "alloc", "addr" => -1, "size" => 1}),
            "found -1",
        ),
        (
            trace(dict! {"action" => "alloc", "addr" => "x", "size" => 1}),
            "found \"x\"",
        ),
        (
            trace(
                dict! {"action" => "alloc", "addr" => 1, "size" => 1, "frames" => vec![Py::Int(1)]},
            ),
            "a list of frames as `frames`",
        ),
        (
            dict! {"segments" => vec![dict!{
                "address" => Py::Int(i128::from(u64::MAX)), "total_size" => 512,
                "blocks" => Py::List(vec![]),
            }]},
            "a segment inside the address space",
        ),
        (
            dict! {"segments" => 5},
            "expected a list, found a whole number",
        ),
    ];
    for (value, expected) in cases {
        for file in [pickle(&value, Hand::Python(4)), json(&value).into_bytes()] {
            let text = whole(&file).err().expect("a refusal").to_string();
            assert!(text.contains(expected), "{text}");
            assert!(text.contains("byte "), "{text}");
        }
    }
}
