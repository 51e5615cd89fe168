//! The recorder between a spool and a journal that are played here, against sets of rows that are
//! kept here. A row is known by its `seq`.

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

/// A row a second of each of two processes, for two minutes; an OOM of the first after 90 s.
#[test]
fn an_oom_takes_the_minute_before_it_and_ten_seconds_after() {
    let mut agent = Agent::new(options());
    let mut all = Vec::new();
    for second in 0..120 {
        NOW.set(START + second * SECOND);
        let mut rows = vec![
            row(2 * second, 1, NOW.get()),
            row(2 * second + 1, 2, NOW.get()),
        ];
        all.extend(rows.clone());
        if second == 90 {
            rows.push(oom(1000, 1, NOW.get() + 1));
            assert!(agent.arrived().is_empty());
        }
        agent.flush(rows);
    }
    agent.settle();
    let at = START + 90 * SECOND + 1;
    let mut expected = of(&all, 1, at - 60 * SECOND, at + 10 * SECOND);
    // Seconds 31 to 100.
    assert_eq!(expected.len(), 70);
    expected.insert(1000);
    assert_eq!(agent.arrived(), expected);
    let report = agent.recorder().report();
    assert_eq!((report.triggers, report.travelled_rows), (1, 70));
    assert_eq!((report.rows, report.recorded_rows), (241, 241));
    assert!(agent.counts.is_empty());
}

/// Random spans, asked for by OOMs, failed allocations and a collector, that overlap at will;
/// random kills; two processes.
#[test]
fn overlapping_spans_and_kills_carry_each_row_once() {
    for seed in 1..=8u64 {
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut draw = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % below
        };
        let mut agent = Agent::new(Options {
            before: Duration::from_secs(8),
            after: Duration::from_secs(3),
            ..options()
        });
        let (mut all, mut expected) = (Vec::new(), BTreeSet::new());
        let mut spans = Vec::new();
        let mut seq = 0;
        for _ in 0..40 {
            NOW.set(NOW.get() + SECOND);
            let now = NOW.get();
            let mut rows = Vec::new();
            for _ in 0..draw(20) {
                seq += 1;
                let late = draw(1500) as i64 * 1_000_000;
                rows.push(row(seq, 1 + draw(2) as i64, now - late));
            }
            all.extend(rows.clone());
            let process = 1 + draw(2) as i64;
            seq += 1;
            match draw(12) {
                0 => {
                    rows.push(oom(seq, process, now));
                    expected.insert(seq);
                    spans.push((process, now - 8 * SECOND, now + 3 * SECOND));
                }
                1 => {
                    rows.push(failed(seq, process, now));
                    spans.push((process, now - 8 * SECOND, now + 3 * SECOND));
                }
                2 => {
                    let from = now - draw(30) as i64 * SECOND;
                    let to = from + 1 + draw(20) as i64 * SECOND;
                    agent
                        .link
                        .ask(request(&format!("r{seq}"), process, from, to));
                    spans.push((process, from, to));
                }
                _ => {}
            }
            let kill = match draw(6) {
                0 => Kill::Taken,
                1 => Kill::Shipped,
                2 => Kill::Journalled,
                _ => Kill::Never,
            };
            let asked: Vec<_> = agent.link.take();
            for request in &asked {
                agent.link.ask(request.clone());
            }
            agent.flush_killed(rows, Vec::new(), kill);
            // The collector asks again after each restart, since it has no answer.
            for request in asked {
                agent.link.ask(request);
            }
        }
        agent.settle();
        for (process, from, to) in &spans {
            expected.extend(of(&all, *process, *from, *to));
        }
        assert!(!expected.is_empty());
        assert_eq!(agent.arrived(), expected, "seed {seed}");
    }
}

/// Every row is kept, has travelled, or is counted as overwritten; nothing else.
#[test]
fn what_is_overwritten_is_counted_to_the_row() {
    let mut agent = Agent::new(Options {
        max_bytes: 300_000,
        ..options()
    });
    let mut seq = 0;
    let mut all = Vec::new();
    for second in 0..120 {
        NOW.set(START + second * SECOND);
        let mut rows: Vec<_> = (0..50)
            .map(|i| row(seq + i, 1 + i % 3, NOW.get() + i * 1000))
            .collect();
        seq += 50;
        all.extend(rows.clone());
        if second == 40 {
            seq += 1;
            rows.push(oom(seq, 2, NOW.get()));
            all.push(oom(seq, 2, NOW.get()));
            seq += 1;
        }
        let kill = if second % 17 == 5 {
            Kill::Journalled
        } else {
            Kill::Never
        };
        agent.flush_killed(rows, Vec::new(), kill);
        let on_disk: u64 = fs::read_dir(agent.folder.path().join(FOLDER))
            .unwrap()
            .map(|file| room::on_disk(file.unwrap().metadata().unwrap().len()))
            .sum();
        // The state is beside it.
        assert!(on_disk <= 300_000 + 2 * 4096, "{on_disk}");
    }
    agent.settle();
    let kept: BTreeSet<i64> = agent
        .recorder()
        .entries
        .iter()
        .flat_map(|entry| {
            let path = entry.path(&agent.folder.path().join(FOLDER));
            let all = Pick {
                process_id: None,
                from_ns: i64::MIN,
                to_ns: i64::MAX,
            };
            files::pick_all(&path, all).unwrap()
        })
        .flat_map(|batch| {
            let seqs = batch.column_by_name("seq").unwrap();
            seqs.as_primitive::<Int64Type>().values().to_vec()
        })
        .collect();
    let arrived = agent.arrived();
    let gone: Vec<&AllocRow> = all
        .iter()
        .filter(|row| !kept.contains(&row.seq) && !arrived.contains(&row.seq))
        .collect();
    assert!(!gone.is_empty() && !kept.is_empty() && !arrived.is_empty());
    let report = agent.recorder().report();
    assert_eq!(report.overwritten_rows, gone.len() as u64);
    assert_eq!(agent.counts[RECORDER_OVERWRITTEN], gone.len() as u64);
    assert_eq!(
        report.overwritten_first_ns,
        gone.iter().map(|row| row.ts_ns).min()
    );
    assert_eq!(
        report.overwritten_last_ns,
        gone.iter().map(|row| row.ts_ns).max()
    );
    // By process, and what the listing says of it.
    let wanted = Wanted {
        process: None,
        from: None,
        to: None,
    };
    let listing = view::list(agent.folder.path(), &wanted).unwrap();
    for process in 1..=3 {
        let line = listing.processes.iter().find(|l| l.process_id == process);
        let line = line.unwrap();
        let told: u64 = line.overwritten.iter().map(|stretch| stretch.rows).sum();
        let of_process = gone.iter().filter(|row| row.process_id == process);
        assert_eq!(told, of_process.count() as u64);
        let of_process = all.iter().filter(|row| row.process_id == process);
        let there = of_process.filter(|row| kept.contains(&row.seq)).count();
        assert_eq!(line.rows, there as u64);
    }
}

/// A request over a time of which the first half is gone: what is there travels, what is gone is
/// said, and the same question again brings the same answer and no row.
#[test]
fn a_request_is_answered_with_what_is_gone() {
    let mut agent = Agent::new(Options {
        max_age: Duration::from_secs(60),
        ..options()
    });
    let mut all = Vec::new();
    for second in 0..100 {
        NOW.set(START + second * SECOND);
        let rows = vec![row(second, 7, NOW.get())];
        all.extend(rows.clone());
        agent.flush(rows);
    }
    let oldest = agent.recorder().entries[0].first_ns;
    assert!(oldest > START + 30 * SECOND);
    agent
        .link
        .ask(request("r1", 7, START, START + 150 * SECOND));
    agent
        .link
        .ask(request("r2", 7, START + 60 * SECOND, START + 60 * SECOND));
    agent.flush(Vec::new());
    assert!(
        agent
            .link
            .answers(u64::MAX)
            .iter()
            .all(|(id, _)| id == "r2")
    );
    let refusal = agent.link.answers(u64::MAX)[0].1.refused.clone();
    assert!(refusal.unwrap().contains("not behind its beginning"));
    // Rows of the span that are still to come belong to it, also after a restart.
    agent.start();
    NOW.set(START + 110 * SECOND);
    let late = row(1000, 7, NOW.get());
    all.push(late.clone());
    agent.flush(vec![late]);
    NOW.set(START + 149 * SECOND);
    agent.settle();
    let answers: BTreeMap<_, _> = agent.link.answers(u64::MAX).into_iter().collect();
    let answer = &answers["r1"];
    let expected = of(&all, 7, oldest, i64::MAX);
    assert_eq!(agent.arrived(), expected);
    assert_eq!(
        (answer.rows, answer.rows_before),
        (expected.len() as u64, 0)
    );
    let gone = of(&all, 7, START, oldest);
    assert_eq!(
        answer.overwritten,
        [Stretch {
            first_ns: START,
            last_ns: oldest - SECOND,
            rows: gone.len() as u64,
        }]
    );
    // True only when the collector has the last batch.
    assert!(answer.last_batch_seq > 0);
    assert!(
        agent
            .link
            .answers(answer.last_batch_seq)
            .iter()
            .all(|(id, _)| id != "r1")
    );
    // Another one over the same rows brings none of them again.
    agent
        .link
        .ask(request("r3", 7, START, START + 105 * SECOND));
    agent.settle();
    let answers: BTreeMap<_, _> = agent.link.answers(u64::MAX).into_iter().collect();
    assert_eq!(answers["r3"].rows, 0);
    agent.arrived();
}

#[test]
fn what_finds_no_room_in_the_spool_waits() {
    let mut agent = Agent::new(options());
    agent.spool.has_room = false;
    agent.flush(vec![row(0, 1, START), oom(2, 1, START + 1)]);
    NOW.set(START + 30 * SECOND);
    agent.flush(Vec::new());
    let report = agent.recorder().report();
    assert!(report.waits_for_spool && report.open_spans == 1);
    assert_eq!(agent.arrived(), [2].into());
    agent.spool.has_room = true;
    agent.settle();
    assert_eq!(agent.arrived(), [0, 2].into());
}

/// A disk without room: the newest rows go, counted; the oldest stay; the spool goes on.
#[test]
fn a_full_disk_drops_the_newest_rows() {
    let mut agent = Agent::new(options());
    agent.flush(vec![row(0, 1, START), row(1, 1, START + 1)]);
    agent.spool.has_reserve = false;
    agent.flush(vec![row(2, 1, START + 2), failed(3, 1, START + 3)]);
    agent.spool.has_reserve = true;
    agent.flush(vec![row(4, 1, START + 4)]);
    agent.settle();
    assert_eq!(agent.counts, [(RECORDER_FULL, 1)].into());
    assert_eq!(agent.recorder().report().full_rows, 1);
    assert_eq!(agent.arrived(), [0, 1, 4].into());
}

#[test]
fn modes_do_what_they_say() {
    let rows = || vec![row(0, 1, START), oom(2, 1, START + 1)];
    let off = || Options {
        max_bytes: 0,
        ..options()
    };
    // Recorded, and stays: an OOM still travels.
    let mut agent = Agent::new(Options {
        travel: Travel::Never,
        ..options()
    });
    agent.flush(rows());
    agent.link.ask(request("r", 1, START, START + 10));
    agent.settle();
    assert_eq!(agent.arrived(), [2].into());
    assert_eq!(agent.recorder().report().rows, 2);
    let answers = agent.link.answers(u64::MAX);
    assert!(answers[0].1.refused.as_ref().unwrap().contains("never"));
    // All travels.
    let mut agent = Agent::new(Options {
        travel: Travel::Always,
        ..off()
    });
    agent.flush(rows());
    assert_eq!(agent.arrived(), [0, 2].into());
    assert_eq!(agent.recorder().report().rows, 0);
    // Neither.
    let mut agent = Agent::new(off());
    agent.flush(rows());
    agent.link.ask(request("r", 1, START, START + 10));
    agent.settle();
    assert_eq!(agent.arrived(), [2].into());
    assert_eq!(agent.counts, [(RECORDER_OFF, 1)].into());
    assert!(
        agent.link.answers(u64::MAX)[0]
            .1
            .refused
            .as_ref()
            .unwrap()
            .contains("off")
    );
}

/// What has travelled is not known then: it must not travel, and stays readable.
#[test]
fn a_damaged_state_lets_nothing_travel_twice() {
    let mut agent = Agent::new(options());
    agent.flush(vec![row(0, 1, START), oom(2, 1, START + 1)]);
    agent.settle();
    assert_eq!(agent.arrived(), [0, 2].into());
    let state = agent.folder.path().join(FOLDER).join(state::FILE);
    fs::write(&state, "rubbish").unwrap();
    agent.start();
    NOW.set(NOW.get() + SECOND);
    agent.flush(vec![
        row(3, 1, START + 5 * SECOND),
        failed(4, 1, START + 6 * SECOND),
    ]);
    agent.settle();
    assert_eq!(agent.arrived(), [0, 2, 3].into());
    assert_eq!(agent.recorder().report().rows, 3);
}

fn folded(folder: &Path) -> Vec<String> {
    let mut texts = Vec::new();
    let Ok(files) = fs::read_dir(folder.join("stacks")) else {
        return texts;
    };
    for file in files {
        let opened = fs::File::open(file.unwrap().path()).unwrap();
        for batch in parquet_file::decode(Table::Stacks, opened).unwrap() {
            let column = batch.column_by_name("folded").unwrap().as_string::<i32>();
            texts.extend((0..batch.num_rows()).map(|i| column.value(i).to_string()));
        }
    }
    texts.sort();
    texts
}

/// Stacks come one by one over 300 flushes and are used again much later, while the ring
/// overwrites and the agent restarts: an export has each that its rows refer to, once.
#[test]
fn an_export_has_rows_and_stacks() {
    let mut agent = Agent::new(Options {
        max_age: Duration::from_secs(100),
        ..options()
    });
    let mut all = Vec::new();
    for second in 0..300 {
        NOW.set(START + second * SECOND);
        let new = 100 + second;
        // Its own, one that was named long before, and one of all.
        let used = [new, 100 + second / 2, 100];
        let rows: Vec<_> = (0..3)
            .map(|i| AllocRow {
                stack_id: Some(used[i as usize]),
                ..row(10 * second + i, 1 + i % 2, NOW.get())
            })
            .collect();
        all.extend(rows.clone());
        let kill = if second % 50 == 25 {
            Kill::Shipped
        } else {
            Kill::Never
        };
        agent.flush_killed(rows, vec![stack(new)], kill);
    }
    let stacks = fs::read_dir(agent.folder.path().join(FOLDER)).unwrap();
    let stacks = stacks.filter(|file| {
        let name = file.as_ref().unwrap().file_name();
        name.to_str().unwrap().starts_with("stacks-")
    });
    assert!(stacks.count() <= 65);
    let to = tempfile::tempdir().unwrap();
    let (from_ns, to_ns) = (START + 250 * SECOND, START + 280 * SECOND);
    let wanted = Wanted {
        process: Some(Who::Pid(1)),
        from: Some(Moment(from_ns)),
        to: Some(Moment(to_ns)),
    };
    let exported = view::export(agent.folder.path(), &wanted, to.path()).unwrap();
    let expected = of(&all, 1, from_ns, to_ns);
    assert_eq!(exported.rows, expected.len() as u64);
    let ids: BTreeSet<i64> = all
        .iter()
        .filter(|row| expected.contains(&row.seq))
        .filter_map(|row| row.stack_id)
        .collect();
    let mut names: Vec<_> = ids.iter().map(|id| format!("f{id}")).collect();
    names.sort();
    assert_eq!(folded(to.path()), names);
    assert_eq!(
        (exported.stacks, exported.stacks_missing),
        (ids.len() as u64, 0)
    );
    let again = view::export(agent.folder.path(), &wanted, to.path()).unwrap_err();
    assert!(again.to_string().contains("not empty"), "{again}");
    let nothing = view::list(to.path(), &wanted).unwrap_err();
    assert!(nothing.to_string().contains("no recorder"), "{nothing}");
}

/// A stack that was named before the recorder was there is asked for, once.
#[test]
fn stacks_that_are_missing_are_asked_for() {
    let mut agent = Agent::new(options());
    let with_stack = |seq| AllocRow {
        stack_id: Some(5),
        ..row(seq, 1, START + seq)
    };
    let mut asked = Vec::new();
    for seq in 0..3 {
        let mut rows = Rows {
            alloc_events: vec![with_stack(seq)],
            ..Rows::default()
        };
        let mut taken = Taken::default();
        let recorder = agent.recorder.as_mut().unwrap();
        recorder
            .take(&mut rows, &mut agent.spool, &mut taken)
            .unwrap();
        recorder.committed();
        asked.push(taken.stacks);
    }
    assert_eq!(asked, [vec![5], vec![], vec![]]);
}

/// A commit that fails: the rows come again with the next flush, under the same numbers.
#[test]
fn a_commit_that_fails_keeps_no_row_twice() {
    let mut agent = Agent::new(options());
    let mut rows = Rows {
        alloc_events: vec![row(0, 1, START), oom(2, 1, START)],
        ..Rows::default()
    };
    for _ in 0..3 {
        agent.spool.next = agent.next_batch_seq;
        let mut taken = Taken::default();
        let recorder = agent.recorder.as_mut().unwrap();
        recorder
            .take(&mut rows, &mut agent.spool, &mut taken)
            .unwrap();
        recorder.ship(&mut agent.spool, &mut taken).unwrap();
        assert!(taken.must_commit);
        assert_eq!(rows.framework_events.len(), 1);
        // The spool removes what it wrote.
        let written = folder::list(agent.folder.path()).unwrap();
        assert_eq!(written.len(), 1);
        fs::remove_file(&written[0].path).unwrap();
    }
    let again = rows
        .framework_events
        .drain(..)
        .chain(rows.alloc_events.drain(..));
    agent.flush(again.collect());
    agent.settle();
    assert_eq!(agent.arrived(), [0, 2].into());
    assert_eq!(agent.recorder().report().rows, 2);
}

/// How fast rows are recorded and travel, for docs/flight-recorder.md. Measures, asserts nothing
/// about time:
/// `cargo test --workspace --lib -- --ignored --nocapture recording_speed`
#[test]
#[ignore = "a measurement"]
fn recording_speed() {
    const FLUSHES: i64 = 20;
    const ROWS: i64 = 50_000;
    let mut agent = Agent::new(options());
    let mut spent = Duration::ZERO;
    let cpu_before = clock::cpu_ns();
    let mut cpu_making = 0;
    for flush in 0..FLUSHES {
        let making = clock::cpu_ns();
        // A block lives for some hundred others; 300 stacks; totals that go up and down.
        let rows: Vec<_> = (0..ROWS)
            .map(|i| {
                let seq = flush * ROWS + i;
                let mixed = (seq as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
                let bytes = 512 * (1 + (mixed % 4096) as i64);
                AllocRow {
                    ts_enter_ns: Some(START + seq * 10_000),
                    tid: Some(7),
                    device: Some(0),
                    stream: Some((mixed % 3) as i64),
                    bytes: Some(bytes),
                    requested_bytes: Some(bytes - (mixed % 512) as i64),
                    address: Some(0x7f00_0000_0000 + (mixed % (1 << 25)) as i64 * 512),
                    stack_id: Some((mixed % 300) as i64),
                    stack_quality: Some("frame_pointer"),
                    alloc_seq: (seq % 2 == 1).then_some(seq - (mixed % 400) as i64),
                    lifetime_ns: (seq % 2 == 1).then_some((mixed % 4_000_000) as i64),
                    segment_address: Some(0x7f00_0000_0000 + (mixed % 64) as i64 * (20 << 20)),
                    allocator_allocated_bytes: Some((4 << 30) + (mixed % 100_000) as i64 * 512),
                    allocator_reserved_bytes: Some((5 << 30) + (seq / 10_000) * (2 << 20)),
                    ..row(seq, 1, START + seq * 10_000)
                }
            })
            .collect();
        cpu_making += clock::cpu_ns() - making;
        NOW.set(START + flush * ROWS * 10_000);
        let begun = Instant::now();
        agent.flush(rows);
        spent += begun.elapsed();
    }
    let cpu = clock::cpu_ns() - cpu_before - cpu_making;
    let report = agent.recorder().report();
    let rows = report.recorded_rows as f64;
    println!(
        "recorded {rows} rows: {:.0} rows a second of processor, {:.0} by the clock, {:.1} bytes a row",
        rows / (cpu as f64 / 1e9),
        rows / spent.as_secs_f64(),
        report.bytes as f64 / rows
    );
    let cpu_before = clock::cpu_ns();
    agent
        .link
        .ask(request("r", 1, START, START + FLUSHES * ROWS * 10_000));
    agent.settle();
    let carried = agent.recorder().report().travelled_rows as f64;
    println!(
        "carried {carried} rows: {:.0} rows a second of processor",
        carried / ((clock::cpu_ns() - cpu_before) as f64 / 1e9)
    );
}
