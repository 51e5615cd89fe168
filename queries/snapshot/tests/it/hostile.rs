//! Files made to hurt, and files that were hurt. Each is refused with a reason, without running
//! anything, in memory bounded by its size.

#[path = "../../../../agent/tests/hostile/memory.rs"]
mod memory;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use vramscope_snapshot::{Error, read};

use super::shapes::small;
use super::writer::{HANDS, Hand, json, pickle};
use super::{targets, whole};

fn refusal(file: &[u8]) -> String {
    whole(file).err().expect("a refusal").to_string()
}

/// A pickle of protocol 4 with that after its first opcode.
fn protocol_4(rest: &[u8]) -> Vec<u8> {
    [&[0x80, 4][..], rest].concat()
}

/// `pickle.dumps` of an object whose `__reduce__` is `os.system("…")`, and every other way that
/// a pickle has to name or call code: refused at the opcode, by name and place.
#[test]
fn nothing_that_would_run_code_is_read() {
    let system = protocol_4(b"\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.");
    assert_eq!(
        refusal(&system),
        "opcode STACK_GLOBAL at byte 17 would make Python run code: a memory snapshot is plain \
         data, this is something else"
    );
    for (opcode, bytes) in [
        ("GLOBAL", &b"cos\nsystem\n."[..]),
        ("REDUCE", b"\x8c\x01a)R."),
        ("BUILD", b"}}b."),
        ("INST", b"(ios\nsystem\n."),
        ("OBJ", b"(\x8c\x01ao."),
        ("NEWOBJ", b"\x8c\x01a)\x81."),
        ("NEWOBJ_EX", b"\x8c\x01a)}\x92."),
        ("PERSID", b"Pid\n."),
        ("BINPERSID", b"\x8c\x01aQ."),
        ("EXT1", b"\x82\x01."),
        ("EXT2", b"\x83\x01\x00."),
        ("EXT4", b"\x84\x01\x00\x00\x00."),
        ("NEXT_BUFFER", b"\x97."),
        ("READONLY_BUFFER", b"N\x98."),
    ] {
        let text = refusal(&protocol_4(bytes));
        assert!(text.contains(&format!("opcode {opcode} at byte")), "{text}");
    }
    // Deep inside what is otherwise a snapshot, after entries were handed out.
    let mut file = pickle(&small(), Hand::Python(4));
    file.truncate(file.len() - 2);
    let at = file.len();
    file.extend(b"cposix\nsystem\n.");
    assert!(refusal(&file).contains(&format!("opcode GLOBAL at byte {at} ")));
}

/// Lengths and numbers that promise gigabytes: refused before anything is allocated.
#[test]
fn promises_of_gigabytes_cost_nothing() {
    let huge = (1u64 << 40).to_le_bytes();
    let bombs: Vec<(&str, Vec<u8>, &str)> = vec![
        (
            "text",
            [&[0x8d][..], &huge].concat(),
            "a length of 1099511627776 bytes",
        ),
        (
            "text",
            b"X\xff\xff\xff\xffabc".to_vec(),
            "a length of 4294967295 bytes where 3 are left",
        ),
        ("bytes", [&[0x8e][..], &huge].concat(), "a length of"),
        ("bytearray", [&[0x96][..], &huge].concat(), "a length of"),
        (
            "number",
            b"\x8b\xff\xff\xff\x7f12".to_vec(),
            "a length of 2147483647 bytes",
        ),
        (
            "number",
            b"\x8b\xff\xff\xff\xff12".to_vec(),
            "the length of a number, found -1",
        ),
        (
            "memo",
            b"}r\xff\xff\xff\xff.".to_vec(),
            "memo entry 4294967295",
        ),
        (
            "memo",
            b"j\xff\xff\xff\xff.".to_vec(),
            "number 4294967295, which was not",
        ),
        (
            "frame",
            [&[0x95][..], &[0xff; 8], b"N."].concat(),
            "it holds None",
        ),
    ];
    memory::bounded(1 << 20, || {
        for (what, bytes, expected) in &bombs {
            let text = refusal(&protocol_4(bytes));
            assert!(text.contains(expected), "{what}: {text}");
        }
    });
}

/// Nesting, in each of the ways to nest; a parser that recursed would overflow its stack.
#[test]
fn deep_nesting_is_refused() {
    let many = 1_000_000;
    let nests: [Vec<u8>; 6] = [
        b"](".repeat(many),
        b"(".repeat(many),
        // Lists into lists without marks.
        [b"]".repeat(many), b"a".repeat(many - 1)].concat(),
        [&b")"[..], &b"\x85".repeat(many)].concat(),
        [&b"N"[..], &b"\x85".repeat(many)].concat(),
        b"}(\x8c\x01k".repeat(many),
    ];
    for nest in nests {
        let size = nest.len();
        memory::bounded((64 << 20) + 8 * size, || {
            let text = refusal(&protocol_4(&nest));
            assert!(
                text.contains("nested") || text.contains("bytes of memory"),
                "{text}"
            );
        });
    }
    let text = refusal("[".repeat(many).as_bytes());
    assert!(text.contains("nested 65 deep"), "{text}");
    let text = refusal(r#"{"a":"#.repeat(many).as_bytes());
    assert!(text.contains("nested 65 deep"), "{text}");
}

/// A megabyte of each opcode that makes something of one byte: memory stays below what is allowed.
#[test]
fn floods_are_refused_in_bounded_memory() {
    let flood = 4 << 20;
    for unit in [
        &b"N"[..],
        b"}",
        b"]",
        b")",
        b"K\x01",
        b"}\x94",
        b"]\x94",
        b"\x8c\x00\x94",
        b"(NN",
        b"K\x01K\x02\x86",
    ] {
        let mut file = protocol_4(b"](");
        while file.len() < flood {
            file.extend(unit);
        }
        let size = file.len();
        memory::bounded((64 << 20) + 8 * size, || {
            assert!(whole(&file).is_err(), "{unit:?}");
        });
    }
}

/// Lists of references to lists of references …: each a few bytes, together 10^18 elements for
/// whoever walks them. They are no frames, so nobody does.
#[test]
fn a_billion_laughs_are_not_told() {
    let mut body = b"}\x94(\x8c\x04more]\x94(NNNNNNNNNNe".to_vec();
    for level in 0..18u8 {
        body.extend(b"\x8c\x01x]\x94(");
        body.extend([b'h', level + 1].repeat(10));
        body.push(b'e');
    }
    body.extend(b"u.");
    memory::bounded(4 << 20, || {
        let text = refusal(&protocol_4(&body));
        assert!(text.contains("without `segments`"), "{text}");
    });
}

/// What was handed out is gone: a second use is an error and not another row.
#[test]
fn a_reference_to_an_entry_that_was_read_is_refused() {
    let entry = b"}\x94(\x8c\x06action\x8c\x08snapshotu";
    // device_traces = [[e, e']] where e' refers to the memo of e (0: root, 1: traces, 2: trace).
    let file = [
        b"}\x94(\x8c\x0ddevice_traces]\x94(]\x94(".as_slice(),
        entry,
        b"}(\x8c\x06action\x8c\x08snapshotu",
        b"h\x03eeu.",
    ]
    .concat();
    let text = refusal(&protocol_4(&file));
    assert!(text.contains("read to its end before"), "{text}");
    // Nor may one be changed afterwards.
    let frame = b"}\x94(\x8c\x04name\x8c\x01f\x8c\x08filename\x8c\x01gu";
    let file = [
        b"}\x94(\x8c\x08segments]\x94(}\x94(\x8c\x06frames]\x94(".as_slice(),
        frame,
        b"eh\x04\x8c\x01aNsuu.",
    ]
    .concat();
    let text = refusal(&protocol_4(&file));
    assert!(text.contains("one that was used before"), "{text}");
}

#[test]
fn files_of_other_kinds_are_named() {
    for (file, expected) in [
        (&b""[..], "the file is empty"),
        (b"PK\x03\x04rest", "a zip file"),
        (b"\x1f\x8b\x08rest", "a gzip file"),
        (b"(dp0\n.", "protocol 0 or 1"),
        (b"<html>", "neither a pickle nor JSON"),
        (b"\x80\x01}.", "expected pickle protocol 2 to 5, found 1"),
        (b"\x80\x06}.", "expected pickle protocol 2 to 5, found 6"),
        (b"\x80\x04}.", "without `segments`"),
        (b"{\"traceEvents\": []}", "[\"traceEvents\"]"),
        (b"\x80\x04K\x01.", "it holds a whole number"),
        (b"\x80\x04].", ""),
        (b"{\"segments\": []} more", "not valid JSON"),
        (b"\x80\x04].N", "more bytes behind the pickle"),
    ] {
        match whole(file) {
            Ok(_) => assert_eq!(expected, "", "{file:?}"),
            Err(error) => {
                let text = error.to_string();
                assert!(
                    !expected.is_empty() && text.contains(expected),
                    "{file:?}: {text}"
                );
            }
        }
    }
}

/// Wherever a file ends too early, the error says so and where.
#[test]
fn cut_off_files_say_where() {
    for hand in HANDS {
        let file = pickle(&small(), hand);
        for end in 1..file.len() {
            let error = whole(&file[..end]).err().expect("a refusal");
            let names_the_end = match &error {
                Error::CutOff { offset, .. } => *offset == end as u64,
                Error::Unexpected { found, .. } => found.contains("are left"),
                _ => false,
            };
            assert!(names_the_end, "{hand:?} cut at {end}: {error}");
        }
    }
    let text = json(&small());
    for end in 1..text.len() {
        let error = whole(&text.as_bytes()[..end]).err().expect("a refusal");
        assert!(
            matches!(error, Error::CutOff { .. }),
            "cut at {end}: {error}"
        );
    }
}

/// A disk that fails is not a file that ends.
#[test]
fn a_read_error_is_passed_on() {
    struct Broken;
    impl std::io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("disk on fire"))
        }
    }
    let file = pickle(&small(), Hand::Python(4));
    for start in [&file[..file.len() / 2], br#"{"segments": ["#] {
        let source = std::io::Read::chain(start, Broken);
        let error = read(source, file.len() as u64, |_, _| Ok::<(), Error>(())).unwrap_err();
        assert!(matches!(error, Error::Read { .. }), "{error}");
    }
}

fn cases() -> u32 {
    std::env::var("VRAMSCOPE_HOSTILE_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(2000)
}

/// The fuzz target over spoiled snapshots: flipped bits, huge numbers, pieces of one file inside
/// another.
#[test]
fn spoiled_snapshots_break_no_promise() {
    let seeds: Vec<Vec<u8>> = HANDS
        .iter()
        .map(|hand| pickle(&small(), *hand))
        .chain([json(&small()).into_bytes()])
        .collect();
    seeds.iter().for_each(|seed| targets::snapshot(seed));
    let mut runner = TestRunner::new(Config {
        cases: cases(),
        failure_persistence: None,
        ..Config::default()
    });
    let at = any::<prop::sample::Index>;
    let harm = (0..5u8, at(), at(), any::<u8>(), 1..40usize);
    let spoiled = (
        0..seeds.len(),
        0..seeds.len(),
        prop::collection::vec(harm, 1..6),
    );
    memory::bounded(80 << 20, || {
        runner
            .run(&spoiled, |(seed, other, harms)| {
                let mut bytes = seeds[seed].clone();
                for (kind, at, from, value, count) in harms {
                    if bytes.is_empty() {
                        break;
                    }
                    let at = at.index(bytes.len());
                    match kind {
                        0 => bytes[at] ^= 1 << (value % 8),
                        1 => bytes[at] = value,
                        2 => bytes.truncate(at),
                        3 => {
                            let end = bytes.len().min(at + count);
                            bytes.drain(at..end);
                        }
                        _ => {
                            let from = from.index(seeds[other].len());
                            let end = seeds[other].len().min(from + count);
                            bytes.splice(at..at, seeds[other][from..end].iter().copied());
                        }
                    }
                }
                targets::snapshot(&bytes);
                Ok(())
            })
            .unwrap();
    });
    let opcodes = b"(eau]})N.t\x85\x86\x87\x88\x89\x94qhjrK\x8cXld";
    let programs = prop::collection::vec(
        prop_oneof![3 => prop::sample::select(opcodes.to_vec()), 1 => 0..8u8],
        0..200,
    );
    runner
        .run(&programs, |program| {
            targets::snapshot(&protocol_4(&program));
            Ok(())
        })
        .unwrap();
}
