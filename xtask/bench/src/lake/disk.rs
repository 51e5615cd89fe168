//! A disk whose power can be cut: an ext4 file system in a file, mounted through a loop device.
//!
//! SIGKILL loses nothing that was written: the kernel keeps it. A power cut does. What a disk
//! holds at that moment is the file below the loop device, so a copy of it, mounted anew (which
//! replays the journal), is what a machine would find when it comes back: what was not synced is
//! not in it, or only in part.
//!
//! Between what is surely there (the copy) and what was written (the old mount, which still has
//! its page cache) every mixture is possible on some file system. [`Disk::cut_power`] can make one:
//! pieces of tails that no sync covered come back, with holes; names that were given and not
//! synced appear; files that were removed vanish.
//!
//! Limits: what the kernel had handed to the loop device counts as durable, also without a flush;
//! reordering below that is not simulated. The journal is committed only by syncs (`commit=300`).
//!
//! Mounts live in a mount namespace of our own ([`leave_the_mounts`]), so that nothing is left
//! behind, however we end. Without the rights for any of this [`Disk`] is a plain folder.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::Random;

/// Size of the file system; the file below it is sparse.
const BYTES: u64 = 2 << 30;

/// What cannot be had here, in words.
pub type Reason = String;

/// Moves this process into a mount namespace of its own. Before any thread is started.
pub fn leave_the_mounts() -> Result<(), Reason> {
    // SAFETY: plain system calls; all pointers are null or constant texts.
    let failed = unsafe {
        libc::unshare(libc::CLONE_NEWNS) != 0
            || libc::mount(
                std::ptr::null(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ) != 0
    };
    if failed {
        let error = std::io::Error::last_os_error();
        return Err(format!(
            "no mount namespace of our own ({error}); run as root"
        ));
    }
    Ok(())
}

/// A folder for data, and what can be done to it.
#[derive(Debug)]
pub struct Disk {
    folder: PathBuf,
    made: u32,
    mounted: bool,
}

/// How much of what was not synced came back after a power cut.
#[derive(Debug, Default, Clone, Copy)]
pub struct Mixed {
    /// Files that got a piece of a tail.
    pub tails: u64,
    /// Names that appeared or went.
    pub names: u64,
}

impl Disk {
    /// A file system in `folder`, or the reason why it is a plain folder.
    pub fn new(folder: &Path, may_mount: Result<(), Reason>) -> Result<(Disk, Option<Reason>)> {
        let mut disk = Disk {
            folder: folder.to_path_buf(),
            made: 0,
            mounted: false,
        };
        let reason = match may_mount {
            Err(reason) => Some(reason),
            Ok(()) => disk.make().err().map(|error| format!("{error:#}")),
        };
        disk.mounted = reason.is_none();
        fs::create_dir_all(disk.data())
            .with_context(|| format!("failed to create {}", disk.data().display()))?;
        Ok((disk, reason))
    }

    /// The folder for data.
    pub fn data(&self) -> PathBuf {
        self.mount().join("data")
    }

    /// Whether it is a file system of its own.
    pub fn is_mounted(&self) -> bool {
        self.mounted
    }

    fn image(&self) -> PathBuf {
        self.folder.join(format!("disk-{}.img", self.made))
    }

    fn mount(&self) -> PathBuf {
        self.folder.join(format!("disk-{}", self.made))
    }

    fn make(&self) -> Result<()> {
        let image = self.image();
        File::create(&image)
            .and_then(|file| file.set_len(BYTES))
            .with_context(|| format!("failed to create {}", image.display()))?;
        // No blocks for root alone, and inodes for many small files.
        run(Command::new("mkfs.ext4")
            .args(["-q", "-F", "-m", "0", "-i", "8192"])
            .arg(&image))?;
        self.attach()
    }

    fn attach(&self) -> Result<()> {
        let mount = self.mount();
        fs::create_dir_all(&mount)
            .with_context(|| format!("failed to create {}", mount.display()))?;
        let options = "loop,commit=300,noatime";
        run(Command::new("mount")
            .args(["-t", "ext4", "-o", options])
            .args([self.image(), mount]))
    }

    /// Cuts the power: afterwards the data folder holds what a machine would find. Nothing may
    /// write meanwhile. With random numbers, a mixture with what was written and not synced.
    pub fn cut_power(&mut self, mixing: Option<&mut Random>) -> Result<Mixed> {
        if !self.mounted {
            bail!(
                "{} is a plain folder: its power cannot be cut",
                self.folder.display()
            );
        }
        let (old_image, old_mount, old_data) = (self.image(), self.mount(), self.data());
        self.made += 1;
        run(Command::new("cp")
            .arg("--sparse=always")
            .args([&old_image, &self.image()]))?;
        self.attach()?;
        let mut mixed = Mixed::default();
        if let Some(random) = mixing {
            mix(&old_data, &self.data(), random, &mut mixed)?;
        }
        run(Command::new("umount").arg(&old_mount))?;
        fs::remove_file(&old_image)
            .with_context(|| format!("failed to remove {}", old_image.display()))?;
        // An empty folder in the way of nobody.
        let _ = fs::remove_dir(&old_mount);
        fs::create_dir_all(self.data())
            .with_context(|| format!("failed to create {}", self.data().display()))?;
        Ok(mixed)
    }

    /// Takes all room there is. Gone when dropped.
    pub fn fill(&self) -> Result<Ballast> {
        use std::os::fd::AsRawFd;
        let path = self.mount().join("ballast");
        let file =
            File::create(&path).with_context(|| format!("failed to create {}", path.display()))?;
        let mut offset = 0;
        let mut piece: i64 = BYTES as i64;
        while piece >= 4096 {
            // SAFETY: plain system call on a file that is open.
            match unsafe { libc::posix_fallocate(file.as_raw_fd(), offset, piece) } {
                0 => offset += piece,
                libc::ENOSPC => piece /= 2,
                other => {
                    let error = std::io::Error::from_raw_os_error(other);
                    return Err(error)
                        .with_context(|| format!("failed to fill {}", path.display()));
                }
            }
        }
        Ok(Ballast(path))
    }
}

/// What fills a disk.
#[derive(Debug)]
pub struct Ballast(PathBuf);

impl Drop for Ballast {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("failed to run {}", command.get_program().to_string_lossy()))?;
    if !output.status.success() {
        bail!(
            "{} failed: {}",
            command.get_program().to_string_lossy(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

/// Every file below a folder: its path from there, and its inode.
fn files(root: &Path) -> Result<HashMap<PathBuf, u64>> {
    let mut found = HashMap::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let listed = match fs::read_dir(&folder) {
            Ok(listed) => listed,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                return Err(error).with_context(|| format!("failed to read {}", folder.display()));
            }
        };
        for entry in listed {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                let path = entry.path();
                let name = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
                found.insert(name, entry.metadata()?.ino());
            }
        }
    }
    Ok(found)
}

/// Brings a part of what was written (`written`) into what is durable (`durable`).
///
/// Inode numbers are the same on both sides, which tells a file that only got another name (its
/// content is as durable as before) from one that no sync ever covered.
fn mix(written: &Path, durable: &Path, random: &mut Random, mixed: &mut Mixed) -> Result<()> {
    let (live, surviving) = (files(written)?, files(durable)?);
    let by_inode: HashMap<u64, &PathBuf> = surviving
        .iter()
        .map(|(path, inode)| (*inode, path))
        .collect();
    let mut names: Vec<_> = live.iter().collect();
    // Hash maps have no order, and a seed must lead to the same choices.
    names.sort();
    for (name, inode) in names {
        let (from, to) = (written.join(name), durable.join(name));
        match (surviving.get(name), by_inode.get(inode)) {
            (Some(old), _) if old == inode => {}
            (_, Some(other)) if random.once_in(2) => {
                let other = durable.join(other);
                if other.exists() {
                    make_parent(&to)?;
                    fs::rename(&other, &to)
                        .with_context(|| format!("failed to rename {}", other.display()))?;
                    mixed.names += 1;
                }
            }
            (None, None) if random.once_in(2) => {
                make_parent(&to)?;
                File::create(&to).with_context(|| format!("failed to create {}", to.display()))?;
                mixed.names += 1;
            }
            _ => continue,
        }
        if to.exists() && random.once_in(2) {
            mixed.tails += u64::from(tear(&from, &to, random)?);
        }
    }
    let mut gone: Vec<_> = surviving
        .keys()
        .filter(|name| !live.contains_key(*name))
        .collect();
    gone.sort();
    for name in gone {
        let path = durable.join(name);
        if random.once_in(3) && path.exists() {
            fs::remove_file(&path)
                .with_context(|| format!("failed to remove {}", path.display()))?;
            mixed.names += 1;
        }
    }
    Ok(())
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).with_context(|| format!("failed to create {}", parent.display()))
}

/// Appends a piece of what `from` has beyond `to`, sometimes with a sector of zeros in it.
fn tear(from: &Path, to: &Path, random: &mut Random) -> Result<bool> {
    const SECTOR: usize = 512;
    let work = || -> std::io::Result<Option<Vec<u8>>> {
        let durable = to.metadata()?.len();
        let mut file = File::open(from)?;
        if file.metadata()?.len() <= durable {
            return Ok(None);
        }
        file.seek(SeekFrom::Start(durable))?;
        let mut tail = Vec::new();
        file.read_to_end(&mut tail)?;
        Ok(Some(tail))
    };
    let failed = || format!("failed to tear {}", to.display());
    let Some(mut tail) = work().with_context(failed)? else {
        return Ok(false);
    };
    tail.truncate(random.below(tail.len() as u64 + 1) as usize);
    if tail.len() > 2 * SECTOR && random.once_in(3) {
        let hole = random.below((tail.len() - SECTOR) as u64) as usize;
        tail[hole..hole + SECTOR].fill(0);
    }
    let mut file = File::options().append(true).open(to).with_context(failed)?;
    file.write_all(&tail).with_context(failed)?;
    Ok(!tail.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names and tails move from what was written to what is durable; what is durable is kept.
    #[test]
    fn a_mixture_keeps_what_was_synced() {
        let folder = tempfile::tempdir().unwrap();
        let (written, durable) = (folder.path().join("w"), folder.path().join("d"));
        let mut tails = 0;
        for seed in 1..60 {
            for side in [&written, &durable] {
                let _ = fs::remove_dir_all(side);
                fs::create_dir_all(side).unwrap();
            }
            fs::write(durable.join("log"), "synced").unwrap();
            fs::hard_link(durable.join("log"), written.join("log")).unwrap();
            fs::write(written.join("new"), vec![7; 4000]).unwrap();
            let mut mixed = Mixed::default();
            mix(
                &written,
                &durable,
                &mut Random::new(seed * 7919),
                &mut mixed,
            )
            .unwrap();
            assert_eq!(fs::read(durable.join("log")).unwrap(), b"synced");
            if let Ok(torn) = fs::read(durable.join("new")) {
                assert!(torn.len() <= 4000 && torn.iter().all(|byte| [0, 7].contains(byte)));
                tails += mixed.tails;
            }
        }
        assert!(tails > 0);
    }

    /// The power cut itself: what was synced is there, what was not is not.
    #[test]
    fn a_power_cut_loses_what_was_not_synced() {
        // Threads of the test program may not change the namespace of all: mounts are made in it.
        let test = std::thread::spawn(|| {
            let folder = tempfile::tempdir().unwrap();
            let (mut disk, reason) = Disk::new(folder.path(), leave_the_mounts()).unwrap();
            if let Some(reason) = reason {
                eprintln!("SKIPPED a_power_cut_loses_what_was_not_synced: {reason}");
                return;
            }
            let synced = File::create(disk.data().join("synced")).unwrap();
            (&synced).write_all(&[1; 100_000]).unwrap();
            synced.sync_all().unwrap();
            File::open(disk.data()).unwrap().sync_all().unwrap();
            (&synced).write_all(&[2; 5000]).unwrap();
            // A file system with open files cannot be unmounted; a killed process has none.
            drop(synced);
            fs::write(disk.data().join("other"), [3; 100_000]).unwrap();
            disk.cut_power(None).unwrap();
            assert_eq!(fs::read(disk.data().join("synced")).unwrap(), [1; 100_000]);
            assert!(
                fs::read(disk.data().join("other")).is_ok_and(|b| b.is_empty())
                    || !disk.data().join("other").exists()
            );

            let full = disk.fill().unwrap();
            let error = fs::write(disk.data().join("more"), vec![0; 1 << 20]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
            drop(full);
            fs::write(disk.data().join("more"), vec![0; 1 << 20]).unwrap();
            run(Command::new("umount").arg(disk.mount())).unwrap();
        });
        test.join().unwrap();
    }
}
