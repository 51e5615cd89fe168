//! The recorder between a spool and a journal that are played here, against sets of rows that are
//! kept here. A row is known by its `seq`.

mod export;
mod limits;
mod spans;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;

use vramscope_wire::{Table, parquet_file};

use super::files::Pick;
use super::view::{Moment, Wanted, Who};
use super::*;
use crate::host::identity::Host;
use crate::spool::folder;
use crate::spool::room::{self, RECORDER_OFF, RECORDER_OVERWRITTEN};
use crate::spool::rows::{FrameRow, StackRow};

const SECOND: i64 = 1_000_000_000;
/// 2026-11-29 13:05:00 UTC.
const START: i64 = 1_795_957_500 * SECOND;

thread_local! {
    static NOW: Cell<i64> = const { Cell::new(START) };
}

/// The spool's side: numbers, and what was carried.
struct Spool {
    host: Host,
    folder: PathBuf,
    next: u64,
    has_room: bool,
    has_reserve: bool,
}

impl Carrier for Spool {
    fn origin(&self) -> Origin<'_> {
        Origin {
            host: &self.host,
            agent_id: "a",
            batch_seq: self.next as i64,
        }
    }

    fn advance(&mut self) {
        self.next += 1;
    }

    fn leaves_reserve(&self, _: u64) -> bool {
        self.has_reserve
    }

    fn has_room(&self, _: u64) -> bool {
        self.has_room
    }

    fn carry(&mut self, parquet: &[u8]) -> anyhow::Result<bool> {
        let path = folder::spool_path(&self.folder, self.next, Table::AllocEvents);
        fs::write(path, parquet)?;
        self.next += 1;
        Ok(true)
    }
}

/// Where an agent is killed in a flush.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kill {
    Never,
    Taken,
    Shipped,
    Journalled,
}

/// An agent, reduced to what surrounds the recorder.
struct Agent {
    folder: tempfile::TempDir,
    options: Options,
    link: Arc<Link>,
    recorder: Option<Recorder>,
    spool: Spool,
    /// What the journal says.
    next_batch_seq: u64,
    /// `seq` of all rows that were carried and count, as often as they came.
    arrived: Vec<i64>,
    counts: BTreeMap<&'static str, u64>,
}

impl Agent {
    fn new(options: Options) -> Self {
        NOW.set(START);
        let folder = tempfile::tempdir().unwrap();
        let mut agent = Self {
            options,
            link: Arc::default(),
            recorder: None,
            spool: Spool {
                host: Host {
                    name: "h".into(),
                    boot_id: "b".into(),
                },
                folder: folder.path().to_path_buf(),
                next: 1,
                has_room: true,
                has_reserve: true,
            },
            folder,
            next_batch_seq: 1,
            arrived: Vec::new(),
            counts: BTreeMap::new(),
        };
        agent.start();
        agent
    }

    /// As after a kill: files that the journal does not know are gone.
    fn start(&mut self) {
        self.recorder = None;
        for file in folder::list(self.folder.path()).unwrap() {
            if file.batch_seq >= self.next_batch_seq {
                fs::remove_file(&file.path).unwrap();
            }
        }
        self.spool.next = self.next_batch_seq;
        self.link = Arc::default();
        let (options, link) = (self.options.clone(), Arc::clone(&self.link));
        let mut recorder =
            Recorder::open(self.folder.path(), options, link, self.next_batch_seq).unwrap();
        recorder.now_ns = || NOW.get();
        // However slow the machine.
        recorder.carry_time = Duration::from_secs(600);
        self.recorder = Some(recorder);
    }

    fn recorder(&self) -> &Recorder {
        self.recorder.as_ref().unwrap()
    }

    /// One flush; after a kill the same rows come again, as the kernel's ring still has them.
    fn flush_killed(&mut self, new: Vec<AllocRow>, stacks: Vec<StackRow>, kill: Kill) {
        let rows = || Rows {
            alloc_events: new.clone(),
            stacks: stacks.clone(),
            ..Rows::default()
        };
        for kill in [kill, Kill::Never] {
            let mut taken = Taken::default();
            let mut rows = rows();
            self.spool.next = self.next_batch_seq;
            let recorder = self.recorder.as_mut().unwrap();
            recorder
                .take(&mut rows, &mut self.spool, &mut taken)
                .unwrap();
            if kill == Kill::Taken {
                self.start();
                continue;
            }
            recorder.ship(&mut self.spool, &mut taken).unwrap();
            if kill == Kill::Shipped {
                // What the window's row and the other tables take.
                self.spool.next += 1;
                self.start();
                continue;
            }
            assert_eq!(taken.must_commit, self.spool.next > self.next_batch_seq);
            // Another file of the flush, such as the window's.
            self.spool.advance();
            self.next_batch_seq = self.spool.next;
            for (cause, count) in taken.counts {
                *self.counts.entry(cause).or_default() += count;
            }
            // Rows of the driver, and OOMs, travel by themselves.
            let by_themselves = rows
                .alloc_events
                .iter()
                .filter(|row| row.layer == FRAMEWORK);
            self.arrived.extend(by_themselves.map(|row| row.seq));
            if kill == Kill::Journalled {
                self.start();
            } else {
                self.recorder.as_mut().unwrap().committed();
            }
            break;
        }
        self.deliver();
    }

    fn flush(&mut self, rows: Vec<AllocRow>) {
        self.flush_killed(rows, Vec::new(), Kill::Never);
    }

    /// The sender takes the files that count, as a collector would read them.
    fn deliver(&mut self) {
        for file in folder::list(self.folder.path()).unwrap() {
            assert!(file.batch_seq < self.next_batch_seq);
            let opened = fs::File::open(&file.path).unwrap();
            for batch in parquet_file::decode(Table::AllocEvents, opened).unwrap() {
                let column = |name: &str| {
                    let column = batch.column_by_name(name).unwrap();
                    column.as_primitive::<Int64Type>().values().to_vec()
                };
                assert!(
                    column("batch_seq")
                        .iter()
                        .all(|seq| *seq as u64 == file.batch_seq)
                );
                self.arrived.extend(column("seq"));
            }
            fs::remove_file(&file.path).unwrap();
        }
    }

    /// Time goes on with nothing to write, until no span is open.
    fn settle(&mut self) {
        for _ in 0..200 {
            NOW.set(NOW.get() + SECOND);
            self.flush(Vec::new());
            if self.recorder().report().open_spans == 0 {
                return;
            }
        }
        panic!("spans stay open: {:?}", self.recorder().state.spans);
    }

    /// All that arrived, each once.
    fn arrived(&self) -> BTreeSet<i64> {
        let once: BTreeSet<i64> = self.arrived.iter().copied().collect();
        assert_eq!(once.len(), self.arrived.len(), "a row came twice");
        once
    }
}

fn options() -> Options {
    Options {
        travel: Travel::Triggered,
        max_bytes: 1 << 30,
        max_age: Duration::from_secs(1800),
        before: Duration::from_secs(60),
        after: Duration::from_secs(10),
        settle: Duration::from_secs(2),
    }
}

fn row(seq: i64, process_id: i64, ts_ns: i64) -> AllocRow {
    AllocRow {
        ts_ns,
        process_id,
        pid: process_id as u32,
        layer: FRAMEWORK,
        source: "usdt",
        api: "c10",
        op: if seq % 2 == 0 { "alloc" } else { "free" },
        memory_kind: Some("framework_block"),
        address: Some(0x7000_0000 + seq * 512),
        bytes: Some(512),
        seq,
        counted: true,
        ..AllocRow::default()
    }
}

fn oom(seq: i64, process_id: i64, ts_ns: i64) -> AllocRow {
    AllocRow {
        op: "oom",
        requested_bytes: Some(1 << 30),
        bytes: Some(0),
        ..row(seq, process_id, ts_ns)
    }
}

fn failed(seq: i64, process_id: i64, ts_ns: i64) -> AllocRow {
    AllocRow {
        layer: "driver",
        source: "uprobe",
        op: "alloc",
        result: Some(2),
        ..row(seq, process_id, ts_ns)
    }
}

fn stack(stack_id: i64) -> StackRow {
    StackRow {
        stack_id,
        frames: vec![FrameRow {
            function: Some(format!("f{stack_id}")),
            ..FrameRow::default()
        }],
        folded: format!("f{stack_id}"),
    }
}

/// `seq` of rows in a span of a process.
fn of(rows: &[AllocRow], process_id: i64, from_ns: i64, to_ns: i64) -> BTreeSet<i64> {
    let all = rows.iter().filter(|row| row.process_id == process_id);
    all.filter(|row| (from_ns..to_ns).contains(&row.ts_ns))
        .map(|row| row.seq)
        .collect()
}

fn request(id: &str, process_id: i64, from_ns: i64, to_ns: i64) -> Request {
    Request {
        id: id.to_string(),
        process_id,
        from_ns,
        to_ns,
        reason: "test".to_string(),
    }
}
