//! The data folder: the lock that keeps a second collector out, and writes that survive a
//! power cut.
//!
//! A file is durable when its bytes are fsynced and the folder that names it is fsynced after
//! the name appeared. Everything here writes under a temporary name first, so that a name
//! without that mark always stands for a whole file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Name of the lock file inside a data folder.
pub const LOCK_FILE: &str = "_collector.lock";

/// Name of the file with the collector's id.
const ID_FILE: &str = "_collector.id";
const ID_DIGITS: usize = 16;

/// Holds a data folder for this process. The kernel lets go of it when the process ends,
/// however it ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the folder, or says who is in the way.
    pub fn take(data: &Path) -> anyhow::Result<Lock> {
        let path = data.join(LOCK_FILE);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .with_context(|| format!("failed to open lock file {}", path.display()))?;
        // `status` holds the lock for an instant to see whether somebody else does: wait that out.
        let give_up = Instant::now() + Duration::from_secs(1);
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Lock { _file: file }),
                Err(TryLockError::WouldBlock) if Instant::now() < give_up => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(TryLockError::WouldBlock) => bail!(
                    "another collector holds the data folder {}; stop it, or give this one another --data",
                    data.display()
                ),
                Err(TryLockError::Error(error)) => {
                    return Err(error)
                        .with_context(|| format!("failed to lock {}", path.display()));
                }
            }
        }
    }

    /// Whether some collector holds the folder now. A folder without lock file is free.
    pub fn is_held(data: &Path) -> io::Result<bool> {
        let file = match File::open(data.join(LOCK_FILE)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

/// The id of a data folder's collector: 16 hexadecimal digits, made once and kept in the folder.
pub fn collector_id(data: &Path) -> io::Result<String> {
    let path = data.join(ID_FILE);
    match std::fs::read_to_string(&path) {
        Ok(text) if text.trim().len() == ID_DIGITS => return Ok(text.trim().to_string()),
        Ok(text) => {
            let wrong = format!("{} is not an id: {text:?}", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, wrong));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let id = format!("{:016x}", random());
    let temporary = data.join(format!("{ID_FILE}.{id}"));
    let temporary = write_temporary(temporary, [id.as_bytes()].into_iter())?;
    // A link fails if the name is taken: of two that make one, the first counts for both.
    let linked = std::fs::hard_link(&temporary, &path);
    std::fs::remove_file(&temporary)?;
    match linked {
        Ok(()) => sync_dir(data).map(|()| id),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => collector_id(data),
        Err(error) => Err(error),
    }
}

/// A number that no other process has: the keys of a hasher come from the system's randomness.
pub fn random() -> u64 {
    use std::hash::BuildHasher;
    std::hash::RandomState::new().hash_one(std::process::id())
}

/// Makes names that appeared in or went from a folder durable.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Creates a folder if it is missing, and makes its name durable.
pub fn create_dir_durably(dir: &Path) -> io::Result<()> {
    match std::fs::create_dir(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => {}
        Err(error) => return Err(error),
    }
    match dir.parent() {
        Some(parent) => sync_dir(parent),
        None => Ok(()),
    }
}

/// Writes a new file under a temporary name and fsyncs its bytes. The caller gives it its
/// name and fsyncs the folder. On an error nothing is left behind.
pub fn write_temporary<'a>(
    path: PathBuf,
    pieces: impl Iterator<Item = &'a [u8]>,
) -> io::Result<PathBuf> {
    let write = || -> io::Result<()> {
        let mut file = File::create(&path)?;
        for piece in pieces {
            file.write_all(piece)?;
        }
        file.sync_all()
    };
    match write() {
        Ok(()) => Ok(path),
        Err(error) => {
            let _ = std::fs::remove_file(&path);
            Err(error)
        }
    }
}
