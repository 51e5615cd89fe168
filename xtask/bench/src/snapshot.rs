//! Memory snapshots: how long reading and replaying one takes, a large one made up, and what
//! another program needs for its work.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use vramscope_model::map::AddressMap;
use vramscope_model::settings::Settings;
use vramscope_model::trace::{Replay, Start};
use vramscope_snapshot::{Error, Item};

/// Reads a snapshot and replays its trace, several times.
#[derive(Debug, Args)]
pub struct Snapshot {
    /// The snapshot
    file: PathBuf,
    #[arg(long, default_value_t = 20)]
    rounds: usize,
}

pub fn read(options: &Snapshot) -> Result<Value> {
    let mut reading = Vec::new();
    let mut both = Vec::new();
    let mut events = 0;
    for _ in 0..options.rounds.max(1) {
        let started = Instant::now();
        let (map, trace) = parse(&options.file)?;
        reading.push(started.elapsed().as_secs_f64());
        events = trace.len();
        let start = Start::find(&trace, &map, &Settings::default());
        let mut replay = Replay::from_map(&start.map, Settings::default())
            .context("the map before the trace is not sound")?;
        for event in &trace {
            replay.apply(event);
        }
        let end = replay.map();
        both.push(started.elapsed().as_secs_f64());
        if end.segments.len() != map.segments.len() {
            bail!(
                "the replay of {} does not lead to its map",
                options.file.display()
            );
        }
    }
    Ok(json!({
        "events": events,
        "read_seconds": median(&mut reading),
        "read_replay_seconds": median(&mut both),
    }))
}

fn parse(path: &Path) -> Result<(AddressMap, Vec<vramscope_model::trace::TraceEvent>)> {
    let failed = || format!("failed to read {}", path.display());
    let file = File::open(path).with_context(failed)?;
    let size = file.metadata().with_context(failed)?.len();
    let mut map = AddressMap::default();
    let mut trace = Vec::new();
    vramscope_snapshot::read(file, size, |item, _| {
        match item {
            Item::Segment(segment) => map.segments.push(segment.to_map()),
            Item::Event(event) => trace.extend(event.to_trace()),
        }
        Ok::<(), Error>(())
    })
    .with_context(failed)?;
    Ok((map, trace))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Writes a snapshot of about that many bytes, as CPython would: one segment, and a trace of
/// blocks that live for a while, from 10,000 stacks of 12 frames.
#[derive(Debug, Args)]
pub struct Make {
    /// Where to
    file: PathBuf,
    #[arg(long)]
    bytes: u64,
}

const STACKS: u64 = 10_000;
const FRAMES: u64 = 12;
/// Blocks that live at one time.
const LIVE: u64 = 2_000;
const SEGMENT: u64 = 2_000_000_000;
const BASE: u64 = 0x7f00_0000_0000;
/// Entries that CPython writes before it appends them.
const BATCH: u64 = 1000;

pub fn make(options: &Make) -> Result<Value> {
    let failed = || format!("failed to write {}", options.file.display());
    let file = File::create(&options.file).with_context(failed)?;
    let mut pickle = Pickle {
        out: BufWriter::new(file),
        bytes: 0,
        memo: 0,
        words: HashMap::new(),
        frames: HashMap::new(),
    };
    let events = pickle.snapshot(options.bytes).with_context(failed)?;
    pickle.out.flush().with_context(failed)?;
    Ok(json!({"events": events, "bytes": pickle.bytes}))
}

/// Protocol 4, without frames: readers need none.
struct Pickle {
    out: BufWriter<File>,
    bytes: u64,
    memo: u32,
    words: HashMap<&'static str, u32>,
    frames: HashMap<u64, u32>,
}

type Io = std::io::Result<()>;

impl Pickle {
    fn put(&mut self, bytes: &[u8]) -> Io {
        self.bytes += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// A container or text was written: its number.
    fn memoize(&mut self) -> std::io::Result<u32> {
        self.put(&[0x94])?;
        self.memo += 1;
        Ok(self.memo - 1)
    }

    fn text(&mut self, text: &str) -> std::io::Result<u32> {
        self.put(&[0x8c, text.len() as u8])?;
        self.put(text.as_bytes())?;
        self.memoize()
    }

    fn number(&mut self, number: u64) -> Io {
        self.put(&[0x8a, 8])?;
        self.put(&number.to_le_bytes())
    }

    fn get(&mut self, memo: u32) -> Io {
        self.put(b"j")?;
        self.put(&memo.to_le_bytes())
    }

    fn open(&mut self, opcode: u8) -> std::io::Result<u32> {
        self.put(&[opcode])?;
        self.memoize()
    }

    /// A text that comes again and again.
    fn word(&mut self, word: &'static str) -> Io {
        match self.words.get(word) {
            Some(number) => self.get(*number),
            None => {
                let number = self.text(word)?;
                self.words.insert(word, number);
                Ok(())
            }
        }
    }

    /// Blocks are allocated one after the other. When `LIVE` of them live the oldest is freed, in
    /// two steps, before the next; in the end all are.
    fn snapshot(&mut self, bytes: u64) -> std::io::Result<u64> {
        self.put(&[0x80, 4])?;
        self.open(b'}')?;
        self.put(b"(")?;
        self.text("segments")?;
        self.open(b']')?;
        self.segment()?;
        self.put(b"a")?;
        self.text("device_traces")?;
        self.open(b']')?;
        self.open(b']')?;
        let mut events = 0;
        let mut live = VecDeque::new();
        let mut next_block = 0;
        let mut is_pending = false;
        loop {
            let is_ending = self.bytes >= bytes;
            let frees = is_pending || is_ending || live.len() as u64 == LIVE;
            let (action, block) = match (frees, live.front()) {
                (true, None) => break,
                (true, Some(&oldest)) if is_pending => ("free_completed", oldest),
                (true, Some(&oldest)) => ("free_requested", oldest),
                (false, _) => ("alloc", next_block),
            };
            match action {
                "alloc" => {
                    live.push_back(block);
                    next_block += 1;
                }
                "free_requested" => is_pending = true,
                _ => {
                    live.pop_front();
                    is_pending = false;
                }
            }
            if events % BATCH == 0 {
                self.put(b"(")?;
            }
            self.entry(action, block, events)?;
            events += 1;
            if events % BATCH == 0 {
                self.put(b"e")?;
            }
        }
        if events % BATCH != 0 {
            self.put(b"e")?;
        }
        self.put(b"au.")?;
        Ok(events)
    }

    fn segment(&mut self) -> Io {
        self.open(b'}')?;
        self.put(b"(")?;
        for (key, value) in [
            ("device", 0),
            ("address", BASE),
            ("total_size", SEGMENT),
            ("stream", 0),
        ] {
            self.text(key)?;
            self.number(value)?;
        }
        self.text("segment_type")?;
        self.text("large")?;
        self.text("blocks")?;
        self.open(b']')?;
        self.open(b'}')?;
        self.put(b"(")?;
        self.text("size")?;
        self.number(SEGMENT)?;
        self.text("state")?;
        self.text("inactive")?;
        self.put(b"uau")
    }

    fn entry(&mut self, action: &'static str, block: u64, number: u64) -> Io {
        self.open(b'}')?;
        self.put(b"(")?;
        self.word("action")?;
        self.word(action)?;
        for (key, value) in [
            ("addr", BASE + block % (LIVE * 2) * (SEGMENT / LIVE / 2)),
            ("size", 400_000 + block % 977 * 100),
            ("stream", 0),
            ("time_us", 1_700_000_000_000_000 + number),
        ] {
            self.word(key)?;
            self.number(value)?;
        }
        self.word("frames")?;
        let stack = (block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % STACKS;
        self.stack(stack)?;
        self.put(b"u")
    }

    /// A list of its own for each entry, of frames that are shared.
    fn stack(&mut self, stack: u64) -> Io {
        self.open(b']')?;
        self.put(b"(")?;
        for depth in 0..FRAMES {
            let frame = (stack >> (depth % 4)) * FRAMES + depth;
            if let Some(number) = self.frames.get(&frame) {
                self.get(*number)?;
                continue;
            }
            let number = self.open(b'}')?;
            self.frames.insert(frame, number);
            self.put(b"(")?;
            self.word("name")?;
            self.text(&format!("function_{frame}"))?;
            self.word("filename")?;
            self.text(&format!("module_{}.py", frame / 100))?;
            self.word("line")?;
            self.number(frame % 1000)?;
            self.put(b"u")?;
        }
        self.put(b"e")
    }
}

/// Runs a program, and says how long it took, how much memory it had at most, and how much it read.
#[derive(Debug, Args)]
pub struct Run {
    #[arg(trailing_var_arg = true, required = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

pub fn run(options: &Run) -> Result<Value> {
    let started = Instant::now();
    let mut child = Command::new(&options.command[0])
        .args(&options.command[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start {}", options.command[0]))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let errors = std::thread::spawn(move || read_all(stderr));
    let stdout = read_all(stdout);
    let stderr = errors.join().unwrap_or_default();
    let read_bytes = read_until_its_end(&child);
    let status = child.wait().context("failed to wait for the program")?;
    let seconds = started.elapsed().as_secs_f64();
    let output = std::process::Output {
        status,
        stdout,
        stderr,
    };
    if !output.status.success() {
        bail!(
            "{} ended with {}: {}",
            options.command[0],
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    // SAFETY: plain system call; rusage is plain numbers, for which zero is a value.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    Ok(json!({
        "seconds": seconds,
        // Of the largest child, and there is one; in KiB on Linux.
        "peak_bytes": usage.ru_maxrss * 1024,
        "read_bytes": read_bytes,
        "output": String::from_utf8_lossy(&output.stdout).trim(),
    }))
}

fn read_all(pipe: Option<impl std::io::Read>) -> Vec<u8> {
    let mut all = Vec::new();
    // What can be read of a program that fails is enough to say why.
    let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut all));
    all
}

/// What it asked the kernel to read, from its files and elsewhere; waits for its end, after which
/// its numbers are still there until somebody takes its status.
fn read_until_its_end(child: &std::process::Child) -> Option<u64> {
    // SAFETY: a plain system call that fills a local; siginfo_t is plain numbers, for which zero is
    // a value.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(
            libc::P_PID,
            child.id(),
            &mut info,
            libc::WEXITED | libc::WNOWAIT,
        );
    }
    let numbers = std::fs::read_to_string(format!("/proc/{}/io", child.id())).ok()?;
    let read = numbers
        .lines()
        .find_map(|line| line.strip_prefix("rchar: "))?;
    read.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is made up is a snapshot whose trace leads to its map, of about the size asked for.
    #[test]
    fn a_made_snapshot_is_sound() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("made.pickle");
        let options = Make {
            file: file.clone(),
            bytes: 3_000_000,
        };
        let made = make(&options).unwrap();
        let size = std::fs::metadata(&file).unwrap().len();
        assert_eq!(made["bytes"], size);
        assert!((3_000_000..3_700_000).contains(&size), "{size}");
        let (map, trace) = parse(&file).unwrap();
        assert_eq!(made["events"], trace.len());
        assert_eq!(map.segments.len(), 1);
        let mut live = std::collections::BTreeMap::new();
        for event in &trace {
            match event.action {
                vramscope_model::trace::Action::Alloc => {
                    assert!(live.insert(event.address, event.bytes).is_none());
                    let end = event.address + event.bytes;
                    let next = live.range(event.address + 1..).next();
                    assert!(next.is_none_or(|(next, _)| end <= *next));
                }
                vramscope_model::trace::Action::FreeCompleted => {
                    assert!(live.remove(&event.address).is_some());
                }
                _ => {}
            }
        }
        assert!(live.is_empty());
        let start = Start::find(&trace, &map, &Settings::default());
        assert_eq!(start.counts.blocks, 0);
    }
}
