//! The thread that writes the log: gathers, appends, syncs once, answers all.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::oneshot;

use super::record::Head;
use super::segment::{self, HEADER};
use super::{Entry, NewBatch, Shared, StoreError};
use crate::folder;
use crate::metrics::METRICS;

/// How long a group waits for more batches. What comes while the disk syncs makes the next group
/// anyway, so this only matters on a fast disk.
const GATHER: Duration = Duration::from_millis(2);

/// Most bytes and batches of a group.
const GROUP_BYTES: usize = 32 << 20;
const GROUP_BATCHES: usize = 4096;

/// Records are appended in pieces of about this size.
const WRITE_BYTES: usize = 1 << 20;

/// One batch, and who waits for it.
pub(super) struct Job {
    pub batch: NewBatch,
    pub parquet: Bytes,
    pub done: oneshot::Sender<Result<(), StoreError>>,
}

/// Where segments are made: the file system, or in tests one that fails.
pub(super) trait Disk: Send {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Segment>>;
}

/// A file that is appended to.
pub(super) trait Segment: Send {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    fn sync(&self) -> io::Result<()>;
    fn cut(&self, len: u64) -> io::Result<()>;
    /// For reading batches back.
    fn reader(&self) -> Arc<File>;
}

/// The file system.
pub(super) struct LocalDisk;

impl Disk for LocalDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Segment>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)?;
        Ok(Box::new(Arc::new(file)))
    }
}

impl Segment for Arc<File> {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        // The length is part of what fdatasync makes durable.
        self.sync_data()
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }

    fn reader(&self) -> Arc<File> {
        Arc::clone(self)
    }
}

/// The segment being written.
struct Current {
    number: u64,
    file: Box<dyn Segment>,
    /// Everything up to here is on disk.
    synced: u64,
}

pub(super) struct Writer {
    shared: Arc<Shared>,
    disk: Box<dyn Disk>,
    current: Option<Current>,
    /// Number and good bytes of the last segment.
    last: (u64, u64),
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, disk: Box<dyn Disk>, last: u64, synced: u64) -> Writer {
        Writer {
            shared,
            disk,
            current: None,
            last: (last, synced),
        }
    }

    /// Works until the senders are gone.
    pub(super) fn run(mut self, work: &Receiver<Job>) {
        while let Ok(first) = work.recv() {
            let group = gather(first, work);
            self.store(group);
        }
        self.close();
    }

    fn store(&mut self, group: Vec<Job>) {
        let began = Instant::now();
        match self.append(&group) {
            Ok(entries) => {
                METRICS.group_batches.observe(group.len() as f64);
                METRICS.group_seconds.observe(began.elapsed().as_secs_f64());
                self.shared.lock().stored(entries);
                for job in group {
                    // Whoever asked may be gone; the batch is stored all the same.
                    let _ = job.done.send(Ok(()));
                }
            }
            Err(error) => {
                let mut index = self.shared.lock();
                for job in &group {
                    index.refuse(job.parquet.len() as u64);
                }
                drop(index);
                for job in group {
                    let _ = job.done.send(Err(error.clone()));
                }
            }
        }
    }

    /// Appends a group and syncs it.
    fn append(&mut self, group: &[Job]) -> Result<Vec<Entry>, StoreError> {
        let wants_closing = self
            .current
            .as_ref()
            .is_some_and(|current| self.shared.lock().wants_closing(current.number));
        if wants_closing {
            self.close();
        }
        let current = match self.current.take() {
            Some(current) => current,
            None => self.begin()?,
        };
        let path = segment::path(&self.shared.root, current.number);
        let failed = |source| StoreError::Io {
            path: path.clone(),
            source: Arc::new(source),
        };
        let (entries, end) = match self.write(&current, group) {
            Ok(written) => written,
            Err(error) => {
                // Half a record at the end would be cut off at the next start too; what matters
                // is that the next group does not come behind it.
                match current.file.cut(current.synced) {
                    Ok(()) => self.current = Some(current),
                    Err(_) => self.give_up(current),
                }
                return Err(failed(error));
            }
        };
        if let Err(error) = current.file.sync() {
            tracing::error!(path = %path.display(), %error, "failed to sync the log; what was to be stored is refused, and another segment begun");
            let _ = current.file.cut(current.synced);
            self.give_up(current);
            return Err(failed(error));
        }
        self.current = Some(Current {
            synced: end,
            ..current
        });
        Ok(entries)
    }

    fn write(&self, current: &Current, group: &[Job]) -> io::Result<(Vec<Entry>, u64)> {
        let mut entries = Vec::with_capacity(group.len());
        let mut buffer = Vec::new();
        // `written` is on its way to the disk, the buffer comes behind it.
        let mut written = current.synced;
        for job in group {
            let number = self.shared.next_number.fetch_add(1, Ordering::Relaxed);
            let bytes = job.parquet.len() as u64;
            let head = Head {
                number,
                synced: current.synced,
                batch: job.batch.clone(),
            };
            let start = written + buffer.len() as u64;
            head.write(bytes, &mut buffer);
            let offset = written + buffer.len() as u64;
            buffer.extend_from_slice(&job.parquet);
            entries.push(Entry {
                number,
                batch: head.batch,
                bytes,
                segment: current.number,
                start,
                offset,
            });
            if buffer.len() >= WRITE_BYTES {
                current.file.write_at(&buffer, written)?;
                written += buffer.len() as u64;
                buffer.clear();
            }
        }
        current.file.write_at(&buffer, written)?;
        Ok((entries, written + buffer.len() as u64))
    }

    /// Makes the next segment.
    fn begin(&mut self) -> Result<Current, StoreError> {
        let (last, last_synced) = self.last;
        let number = last + 1;
        let path = segment::path(&self.shared.root, number);
        let make = || -> io::Result<Box<dyn Segment>> {
            let file = self.disk.create(&path)?;
            let written = file
                .write_at(&segment::header(number, last_synced), 0)
                .and_then(|()| file.sync())
                .and_then(|()| folder::sync_dir(&self.shared.root));
            if let Err(error) = written {
                let _ = std::fs::remove_file(&path);
                return Err(error);
            }
            Ok(file)
        };
        let file = make().map_err(|source| StoreError::Io {
            path: path.clone(),
            source: Arc::new(source),
        })?;
        self.shared.lock().opened(number, file.reader(), HEADER);
        Ok(Current {
            number,
            file,
            synced: HEADER,
        })
    }

    fn close(&mut self) {
        if let Some(current) = self.current.take() {
            self.give_up(current);
        }
    }

    /// Ends a segment where it was good last.
    fn give_up(&mut self, current: Current) {
        self.last = (current.number, current.synced);
        let mut index = self.shared.lock();
        index.closed(current.number);
        index.sweep(&self.shared.root);
    }
}

/// Waits a moment for company.
fn gather(first: Job, work: &Receiver<Job>) -> Vec<Job> {
    let deadline = Instant::now() + GATHER;
    let mut bytes = first.parquet.len();
    let mut group = vec![first];
    while bytes < GROUP_BYTES && group.len() < GROUP_BATCHES {
        let left = deadline.saturating_duration_since(Instant::now());
        match work.recv_timeout(left) {
            Ok(job) => {
                bytes += job.parquet.len();
                group.push(job);
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    group
}
