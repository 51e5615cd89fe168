//! The log against files as crashes and failing disks leave them.

use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;

use super::record::Head;
use super::writer::Segment;
use super::*;
use crate::ingest::placing::Clock;

fn batch(agent: &str, seq: u64, table: Table, payload: &[u8]) -> NewBatch {
    let day = std::time::Duration::from_secs(86_400);
    let clock = Clock {
        ahead: day,
        behind: 31 * day,
    };
    NewBatch {
        agent: agent.into(),
        seq,
        host: seq.is_multiple_of(2).then(|| "höst".into()),
        table,
        crc32: crc32fast::hash(payload),
        rows: seq * 3,
        decoded_bytes: 100,
        times: (table != Table::Stacks).then_some((-1, 1_795_957_500_000_000)),
        placing: clock.at(1_795_957_500_000_000),
        misdated: 2,
    }
}

fn stack(agent: &str, seq: u64, payload: &[u8]) -> NewBatch {
    batch(agent, seq, Table::Stacks, payload)
}

fn open(data: &Path) -> Wal {
    Wal::open(data, 1 << 20).unwrap()
}

fn store(wal: &Wal, batch: NewBatch, payload: &[u8]) -> Result<(), StoreError> {
    let stored = wal.store(batch, Bytes::copy_from_slice(payload));
    futures::executor::block_on(stored)
}

fn seqs(entries: &[Entry]) -> Vec<u64> {
    entries.iter().map(|entry| entry.batch.seq).collect()
}

fn segments(data: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(data.join("_wal"))
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "wal"))
        .collect();
    found.sort();
    found
}

/// As a kill leaves it: nothing is closed or deleted.
fn kill(wal: Wal) {
    let sender = wal.work.lock().unwrap().take();
    drop(sender);
    let thread = wal.thread.lock().unwrap().take();
    // The thread closes its segment when it ends; with nothing deleted, that changes no byte.
    thread.unwrap().join().unwrap();
    std::mem::forget(wal);
}

#[test]
fn what_was_stored_reads_back_after_a_restart_in_order() {
    let data = tempfile::tempdir().unwrap();
    let wal = open(data.path());
    let stored = [
        (batch("a", 1, Table::Devices, b"one"), &b"one"[..]),
        (stack("b", 7, b""), b""),
        (stack("a", 2, b"three"), b"three"),
    ];
    for (batch, payload) in &stored {
        store(&wal, batch.clone(), payload).unwrap();
    }
    let id = wal.id().to_string();
    kill(wal);
    let again = open(data.path());
    assert_eq!(again.id(), id);
    let waiting = again.waiting();
    let batches: Vec<_> = waiting.iter().map(|entry| entry.batch.clone()).collect();
    assert_eq!(batches, stored.clone().map(|(batch, _)| batch));
    for (entry, (_, payload)) in waiting.iter().zip(stored) {
        assert_eq!(again.read(entry).unwrap(), payload);
    }
    assert_eq!(again.highest("a"), Some(2));
    assert_eq!(again.backlog(), Backlog { files: 3, bytes: 8 });
    let numbers: Vec<_> = waiting.iter().map(|entry| entry.number).collect();
    assert_eq!(numbers, [1, 2, 3]);
    // Numbers go on behind what the tables know, too.
    again.continue_after(10);
    store(&again, stack("b", 8, b"x"), b"x").unwrap();
    assert_eq!(again.waiting().last().unwrap().number, 11);
}

/// Lengths that a cut in the last record can leave: the whole records stay, the torn one
/// goes, and the log goes on.
#[test]
fn a_torn_tail_is_cut_off_at_any_byte() {
    let data = tempfile::tempdir().unwrap();
    let wal = open(data.path());
    store(&wal, stack("a", 1, b"first"), b"first").unwrap();
    let whole = fs::metadata(&segments(data.path())[0]).unwrap().len();
    store(&wal, stack("a", 2, b"second"), b"second").unwrap();
    kill(wal);
    let path = segments(data.path())[0].clone();
    let bytes = fs::read(&path).unwrap();
    for len in (whole as usize..bytes.len()).step_by(5) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("_wal")).unwrap();
        let name = path.file_name().unwrap();
        fs::write(folder.path().join("_wal").join(name), &bytes[..len]).unwrap();
        let wal = open(folder.path());
        assert_eq!(seqs(&wal.waiting()), [1], "{len}");
        store(&wal, stack("a", 2, b"second"), b"second").unwrap();
        kill(wal);
        let wal = open(folder.path());
        assert_eq!(seqs(&wal.waiting()), [1, 2], "{len}");
        assert!(damaged(wal.root()).unwrap().is_empty());
    }
}

/// Blocks of the last group that never reached the disk read as zeros, wherever they are.
#[test]
fn a_hole_in_the_last_group_is_no_damage() {
    let data = tempfile::tempdir().unwrap();
    let wal = open(data.path());
    store(&wal, stack("a", 1, b"first"), b"first").unwrap();
    let end = fs::metadata(&segments(data.path())[0]).unwrap().len();
    kill(wal);
    let path = segments(data.path())[0].clone();
    // Two records of a group that was being written; the first one's head is zeros.
    let mut group = Vec::new();
    for (number, seq) in [(2, 2), (3, 9)] {
        let head = Head {
            number,
            synced: end,
            batch: stack(if seq == 2 { "a" } else { "b" }, seq, b"later"),
        };
        head.write(5, &mut group);
        group.extend_from_slice(b"later");
    }
    group[..40].fill(0);
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&group, end).unwrap();
    for _ in 0..2 {
        let wal = open(data.path());
        assert_eq!(seqs(&wal.waiting()), [1, 9]);
        assert!(damaged(wal.root()).unwrap().is_empty());
        kill(wal);
    }
}

/// A head that rots is found out by what was written later, and what comes behind it is kept.
#[test]
fn a_rotten_head_is_set_aside_once() {
    let data = tempfile::tempdir().unwrap();
    let wal = open(data.path());
    let mut ends = Vec::new();
    for seq in 1..=3 {
        store(&wal, stack("a", seq, b"payload"), b"payload").unwrap();
        ends.push(fs::metadata(&segments(data.path())[0]).unwrap().len());
    }
    kill(wal);
    let path = segments(data.path())[0].clone();
    let mut bytes = fs::read(&path).unwrap();
    bytes[ends[0] as usize + 30] ^= 1;
    fs::write(&path, &bytes).unwrap();
    for _ in 0..3 {
        let wal = open(data.path());
        assert_eq!(seqs(&wal.waiting()), [1, 3]);
        let kept = damaged(wal.root()).unwrap();
        assert_eq!(kept.len(), 1, "{kept:?}");
        assert_eq!(
            fs::read(&kept[0]).unwrap(),
            bytes[ends[0] as usize..ends[1] as usize]
        );
        kill(wal);
    }
}

#[test]
fn a_damaged_batch_is_set_aside_and_leaves_the_line() {
    let data = tempfile::tempdir().unwrap();
    let wal = open(data.path());
    store(&wal, stack("a", 1, b"x"), b"x").unwrap();
    let entry = wal.waiting().remove(0);
    let aside = wal.set_aside(&entry).unwrap();
    assert!(aside.ends_with("damaged/a-00000000000000000001-stacks-8cdc1683.parquet"));
    assert_eq!(fs::read(&aside).unwrap(), b"x");
    assert_eq!(wal.backlog(), Backlog::default());
}

/// A batch that was let go without a commit does not come back, while others in its segment wait.
#[test]
fn a_void_batch_does_not_come_back() {
    let data = tempfile::tempdir().unwrap();
    let wal = open(data.path());
    for seq in 1..=3 {
        store(&wal, stack("a", seq, b"x"), b"x").unwrap();
    }
    wal.void(&wal.waiting()[1..2]).unwrap();
    kill(wal);
    for _ in 0..2 {
        let wal = open(data.path());
        assert_eq!(seqs(&wal.waiting()), [1, 3]);
        assert!(damaged(wal.root()).unwrap().is_empty());
        kill(wal);
    }
}

#[test]
fn the_limit_counts_what_waits_and_ends_with_the_commit() {
    let data = tempfile::tempdir().unwrap();
    let wal = Wal::open(data.path(), 10).unwrap();
    store(&wal, stack("a", 1, b"123456"), b"123456").unwrap();
    let full = store(&wal, stack("a", 2, b"123456"), b"123456").unwrap_err();
    assert!(
        matches!(full, StoreError::Full { held: 6, limit: 10 }),
        "{full}"
    );
    assert_eq!(wal.highest("a"), Some(1));
    let entries = wal.oldest(Table::Stacks, u64::MAX);
    wal.committed(&entries);
    assert_eq!(wal.backlog().files, 1);
    assert_eq!(seqs(&wal.unledgered()), [1]);
    wal.finish(&entries);
    assert_eq!(wal.backlog(), Backlog::default());
    store(&wal, stack("a", 2, b"123456"), b"123456").unwrap();
    assert_eq!(wal.highest("a"), Some(2));
}

#[test]
fn the_oldest_are_a_prefix_within_the_budget() {
    let data = tempfile::tempdir().unwrap();
    let wal = open(data.path());
    for (agent, seq) in [("a", 1), ("b", 7), ("a", 2), ("a", 3)] {
        store(&wal, stack(agent, seq, b"x"), b"x").unwrap();
    }
    store(&wal, batch("a", 4, Table::Devices, b"x"), b"x").unwrap();
    let oldest = |budget| seqs(&wal.oldest(Table::Stacks, budget));
    assert_eq!(oldest(0), [1]);
    assert_eq!(oldest(250), [1, 7]);
    assert_eq!(oldest(u64::MAX), [1, 7, 2, 3]);
}

/// Segments are closed at their size, and go when nothing in them is needed any more, whatever
/// lies in others.
#[test]
fn segments_go_when_all_their_batches_are_committed() {
    let data = tempfile::tempdir().unwrap();
    let wal = Wal::open(data.path(), 1 << 40).unwrap();
    let payload = vec![7; (SEGMENT_BYTES / 2 + 1) as usize];
    for seq in 1..=5 {
        store(&wal, stack("a", seq, &payload), &payload).unwrap();
    }
    assert_eq!(segments(data.path()).len(), 3);
    let entries = wal.waiting();
    wal.finish(&entries[1..4]);
    assert_eq!(segments(data.path()).len(), 2);
    wal.finish(&entries);
    wal.close();
    assert!(segments(data.path()).is_empty());
}

/// A group is one sync: batches that come while the disk is busy wait together.
#[test]
fn batches_that_come_together_are_stored_together() {
    let data = tempfile::tempdir().unwrap();
    let disk = Arc::new(Faults::default());
    let wal = Wal::open_on(data.path(), 1 << 20, Box::new(Arc::clone(&disk))).unwrap();
    let stores = (0..200).map(|agent| {
        let agent = format!("agent-{agent}");
        wal.store(stack(&agent, 1, b"x"), Bytes::from_static(b"x"))
    });
    let stored = futures::executor::block_on(futures::future::join_all(stores));
    assert!(stored.iter().all(Result::is_ok));
    // One for the header of the segment; the rest arrived within a moment.
    let syncs = disk.syncs.load(Ordering::Relaxed);
    assert!(syncs < 100, "{syncs} syncs for 200 batches");
    assert_eq!(wal.backlog().files, 200);
}

/// A disk that fails when it is told to.
#[derive(Debug, Default)]
struct Faults {
    write_fails: AtomicBool,
    sync_fails: AtomicBool,
    syncs: AtomicU64,
}

impl Disk for Arc<Faults> {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Segment>> {
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)?;
        Ok(Box::new(Faulty {
            file: Arc::new(file),
            faults: Arc::clone(self),
        }))
    }
}

struct Faulty {
    file: Arc<fs::File>,
    faults: Arc<Faults>,
}

impl Segment for Faulty {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if self.faults.write_fails.load(Ordering::Relaxed) {
            // Half of it, as a full disk does it.
            self.file.write_all_at(&bytes[..bytes.len() / 2], offset)?;
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.file.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.faults.syncs.fetch_add(1, Ordering::Relaxed);
        if self.faults.sync_fails.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.file.sync_data()
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        if self.faults.sync_fails.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.file.set_len(len)
    }

    fn reader(&self) -> Arc<fs::File> {
        Arc::clone(&self.file)
    }
}

#[test]
fn a_full_disk_refuses_and_leaves_whole_records() {
    let data = tempfile::tempdir().unwrap();
    let disk = Arc::new(Faults::default());
    let wal = Wal::open_on(data.path(), 1 << 20, Box::new(Arc::clone(&disk))).unwrap();
    store(&wal, stack("a", 1, b"first"), b"first").unwrap();
    let good = fs::metadata(&segments(data.path())[0]).unwrap().len();
    disk.write_fails.store(true, Ordering::Relaxed);
    let error = store(&wal, stack("a", 2, b"second"), b"second").unwrap_err();
    assert!(
        matches!(&error, StoreError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull),
        "{error}"
    );
    assert!(error.to_string().contains("_wal/00000000000000000001.wal"));
    assert_eq!(fs::metadata(&segments(data.path())[0]).unwrap().len(), good);
    disk.write_fails.store(false, Ordering::Relaxed);
    store(&wal, stack("a", 2, b"second"), b"second").unwrap();
    assert_eq!(segments(data.path()).len(), 1);
    assert_eq!(
        wal.backlog(),
        Backlog {
            files: 2,
            bytes: 11
        }
    );
    kill(wal);
    assert_eq!(seqs(&open(data.path()).waiting()), [1, 2]);
}

/// After a sync that failed nobody is told "stored", another segment is begun, and what lies in the
/// failed one is not believed after a restart, even if it can be read.
#[test]
fn a_failed_sync_is_not_forgotten() {
    let data = tempfile::tempdir().unwrap();
    let disk = Arc::new(Faults::default());
    let wal = Wal::open_on(data.path(), 1 << 20, Box::new(Arc::clone(&disk))).unwrap();
    store(&wal, stack("a", 1, b"first"), b"first").unwrap();
    disk.sync_fails.store(true, Ordering::Relaxed);
    store(&wal, stack("a", 2, b"second"), b"second").unwrap_err();
    store(&wal, stack("b", 1, b"other"), b"other").unwrap_err();
    disk.sync_fails.store(false, Ordering::Relaxed);
    assert_eq!(wal.highest("a"), Some(1));
    // The agent sends it again.
    store(&wal, stack("a", 2, b"second"), b"second").unwrap();
    assert!(segments(data.path()).len() > 1);
    let waiting = wal.waiting();
    assert_eq!(seqs(&waiting), [1, 2]);
    kill(wal);
    let again = open(data.path());
    let names: Vec<_> = again.waiting().iter().map(Entry::key).collect();
    assert_eq!(names, [("a".into(), 1), ("a".into(), 2)]);
    assert_eq!(again.waiting()[1].number, waiting[1].number);
    assert!(damaged(again.root()).unwrap().is_empty());
}

#[test]
fn hostile_agent_names_are_refused() {
    for wrong in [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a\\b",
        ".tmp",
        "damaged",
        "a b",
        "ä",
        "a\0",
        "log:a",
        &"x".repeat(129),
    ] {
        assert!(!is_agent_id(wrong), "{wrong:?}");
    }
    for right in ["a", "0c2f7a-9.b_c", &"x".repeat(128)] {
        assert!(is_agent_id(right), "{right:?}");
    }
}
