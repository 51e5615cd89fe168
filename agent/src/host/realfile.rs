//! The file behind a path, as the kernel's uprobes know it.
//!
//! A uprobe belongs to an inode. On an overlay file system (every container image) the path's
//! inode is the overlay's own, while uprobes go to the file in the layer below: the same library
//! seen through two containers is one file, and hooking it by both would count each call twice.
//! So a path on an overlay is followed to its layer, by the mount's options.
//!
//! Invariant: two paths with the same [`RealFile::id`] are the same file. Where a layer cannot be
//! reached (it was mounted elsewhere, or unmounted since) `unresolved` says so, and the id is that
//! of the overlay: then equality of ids proves nothing, and the kernel has to be asked
//! ([`crate::probes::samefile`]).

use std::ffi::CString;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::library::FileId;

const OVERLAY_MAGIC: i64 = 0x794c_7630;
/// Where container engines keep layers that they name by relative paths.
const LAYER_FOLDERS: [&str; 3] = [
    "/var/lib/docker/overlay2",
    "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots",
    "/var/lib/containers/storage/overlay",
];

/// A file and a path that opens it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RealFile {
    pub id: FileId,
    pub open_path: PathBuf,
    /// Why the file below the overlay is not known; `None` if it is, or if there is no overlay.
    pub unresolved: Option<String>,
}

impl RealFile {
    /// `open_path` opens the file, and `path` is its name in the mount namespace of `pid`.
    pub fn of(open_path: &Path, path: &str, pid: u32) -> io::Result<Self> {
        let metadata = fs::metadata(open_path)?;
        let id = FileId {
            device: metadata.dev(),
            inode: metadata.ino(),
        };
        let plain = |unresolved| Self {
            id,
            open_path: open_path.to_path_buf(),
            unresolved,
        };
        if file_system(open_path)? != OVERLAY_MAGIC {
            return Ok(plain(None));
        }
        match below(open_path, path, pid, &metadata) {
            Ok((real, found)) => Ok(Self {
                id: FileId {
                    device: found.dev(),
                    inode: found.ino(),
                },
                open_path: real,
                unresolved: None,
            }),
            Err(reason) => Ok(plain(Some(reason))),
        }
    }
}

/// The file in its layer.
fn below(
    open_path: &Path,
    path: &str,
    pid: u32,
    seen: &fs::Metadata,
) -> Result<(PathBuf, fs::Metadata), String> {
    let mount_id = mount_id(open_path).map_err(|error| format!("its mount is unknown: {error}"))?;
    let pids = [pid.to_string(), "self".to_string(), "1".to_string()];
    let mut problem = "its overlay mount is in no namespace that could be read".to_string();
    for pid in &pids {
        let Ok(text) = fs::read_to_string(format!("/proc/{pid}/mountinfo")) else {
            continue;
        };
        let Some(mount) = text
            .lines()
            .filter_map(Mount::parse)
            .find(|mount| mount.id == mount_id && mount.kind == "overlay")
        else {
            continue;
        };
        let Some(inside) = mount.inside(path) else {
            problem = format!("{path} is not below its mount point {}", mount.point);
            continue;
        };
        // As seen by the agent, by the process, and by the host's first process.
        let roots: Vec<PathBuf> = [
            "/".to_string(),
            format!("/proc/{pid}/root"),
            "/proc/1/root".to_string(),
        ]
        .iter()
        .map(PathBuf::from)
        .collect();
        let bases = bases(&mount);
        for layer in mount.layers() {
            for place in places(&layer, &roots, &bases) {
                let candidate = place.join(inside.trim_start_matches('/'));
                if let Some(found) = same(&candidate, seen) {
                    return Ok((candidate, found));
                }
            }
        }
        problem = "none of its overlay's layers that can be reached holds it".to_string();
    }
    Err(problem)
}

/// Where a layer may lie, as paths of the agent.
fn places(layer: &str, roots: &[PathBuf], bases: &[PathBuf]) -> Vec<PathBuf> {
    let mut places = Vec::new();
    for root in roots {
        if layer.starts_with('/') {
            places.push(root.join(layer.trim_start_matches('/')));
        } else {
            places.extend(bases.iter().map(|base| {
                let base = base.strip_prefix("/").unwrap_or(base);
                root.join(base).join(layer)
            }));
        }
    }
    places
}

/// Folders that relative layer names may start from: the engines' own, and those above the places
/// where the same overlay is mounted on this host.
fn bases(mount: &Mount) -> Vec<PathBuf> {
    let mut bases: Vec<PathBuf> = LAYER_FOLDERS.iter().map(PathBuf::from).collect();
    for pid in ["self", "1"] {
        let text = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
        for same in text.lines().filter_map(Mount::parse) {
            if same.device == mount.device && same.kind == "overlay" {
                bases.extend(Path::new(&same.point).ancestors().map(Path::to_path_buf));
            }
        }
    }
    bases
}

/// The candidate's metadata if it is the file that was seen through the overlay.
fn same(candidate: &Path, seen: &fs::Metadata) -> Option<fs::Metadata> {
    // A layer's symbolic links are followed by the overlay, not here.
    let found = fs::symlink_metadata(candidate).ok()?;
    let is_same = found.is_file()
        && found.len() == seen.len()
        && (found.mtime(), found.mtime_nsec()) == (seen.mtime(), seen.mtime_nsec())
        && found.mode() == seen.mode();
    // Such a file has the name and the metadata alone; its data is in a lower layer.
    let holds_data = !has_attribute(candidate, c"trusted.overlay.metacopy");
    (is_same && holds_data).then_some(found)
}

fn has_attribute(path: &Path, name: &std::ffi::CStr) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: both are C strings; no value is asked for, only its length.
    unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) >= 0 }
}

fn file_system(path: &Path) -> io::Result<i64> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)?;
    let mut info = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the path is a C string and the buffer has the size the call writes.
    if unsafe { libc::statfs(path.as_ptr(), info.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded and filled the buffer.
    Ok(unsafe { info.assume_init() }.f_type)
}

fn mount_id(path: &Path) -> io::Result<u64> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)?;
    let mut info = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is a C string and the buffer has the size the call writes.
    let result = unsafe {
        libc::statx(
            libc::AT_FDCWD,
            path.as_ptr(),
            0,
            libc::STATX_MNT_ID,
            info.as_mut_ptr(),
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed before, and plain integers.
    let info = unsafe { info.assume_init() };
    if info.stx_mask & libc::STATX_MNT_ID == 0 {
        return Err(io::Error::other("this kernel tells no mount ids"));
    }
    Ok(info.stx_mnt_id)
}

/// A line of `mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    id: u64,
    device: String,
    /// The folder of the file system that is mounted.
    root: String,
    point: String,
    kind: String,
    options: String,
}

impl Mount {
    fn parse(line: &str) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ');
        let id = left.next()?.parse().ok()?;
        let device = left.nth(1)?.to_string();
        let (root, point) = (unescape(left.next()?), unescape(left.next()?));
        let mut right = right.split(' ');
        let kind = right.next()?.to_string();
        let options = right.nth(1)?.to_string();
        Some(Self {
            id,
            device,
            root,
            point,
            kind,
            options,
        })
    }

    /// A path of the namespace as a path inside the file system.
    fn inside(&self, path: &str) -> Option<String> {
        let rest = if self.point == "/" {
            path
        } else {
            path.strip_prefix(&self.point)
                .filter(|rest| rest.starts_with('/'))?
        };
        Some(format!("{}{rest}", self.root.trim_end_matches('/')))
    }

    /// The layers, topmost first.
    fn layers(&self) -> Vec<String> {
        let mut upper = Vec::new();
        let mut lower = Vec::new();
        for option in self.options.split(',') {
            let Some((key, value)) = option.split_once('=') else {
                continue;
            };
            let value = unescape(value);
            match key {
                "upperdir" => upper.push(value.replace("\\:", ":")),
                "lowerdir" => lower.extend(split_layers(&value)),
                // One option for each layer, from kernel 6.8 on.
                "lowerdir+" | "datadir+" => lower.push(value),
                _ => {}
            }
        }
        upper.extend(lower);
        upper
    }
}

/// Splits at colons that no backslash stands before.
fn split_layers(value: &str) -> Vec<String> {
    let mut layers = vec![String::new()];
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        let last = layers.last_mut();
        match (character, last) {
            ('\\', Some(last)) => last.extend(characters.next()),
            (':', _) => layers.push(String::new()),
            (other, Some(last)) => last.push(other),
            (_, None) => {}
        }
    }
    // Two colons stand before layers that hold data alone.
    layers.retain(|layer| !layer.is_empty());
    layers
}

/// Undoes the octal escapes of `mountinfo`.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let octal = tail
            .get(..3)
            .filter(|digits| *first == b'\\' && digits.iter().all(|d| (b'0'..=b'7').contains(d)));
        match octal {
            Some(digits) => {
                let value = digits
                    .iter()
                    .fold(0u32, |value, digit| value * 8 + u32::from(digit - b'0'));
                bytes.push(value as u8);
                rest = &tail[3..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Lines as kernels write them: a container of containerd, one of Docker with relative names,
    /// and one made by the new mount interface.
    #[test]
    fn layers_of_real_mounts() {
        let line = "1190 1093 0:153 / / rw,relatime master:404 - overlay overlay rw,lowerdir=/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/12/fs:/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/11/fs,upperdir=/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/40/fs,workdir=/x/work";
        let mount = Mount::parse(line).unwrap();
        assert_eq!((mount.id, mount.kind.as_str()), (1190, "overlay"));
        assert_eq!(
            mount.layers(),
            ["40", "12", "11"].map(|n| format!(
                "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/{n}/fs"
            ))
        );
        assert_eq!(
            mount.inside("/usr/lib/libcuda.so.1").as_deref(),
            Some("/usr/lib/libcuda.so.1")
        );

        let line = r"60 30 0:50 / /var/lib/docker/overlay2/ab/merged rw - overlay overlay rw,lowerdir=l/AAA:l/BB\134:B::l/D,upperdir=ab/diff,workdir=ab/work";
        let mount = Mount::parse(line).unwrap();
        assert_eq!(mount.layers(), ["ab/diff", "l/AAA", "l/BB:B", "l/D"]);
        assert_eq!(
            mount
                .inside("/var/lib/docker/overlay2/ab/merged/usr/x")
                .as_deref(),
            Some("/usr/x")
        );
        assert_eq!(mount.inside("/var/lib/docker/overlay2/ab/mergedx/y"), None);

        let line = r"61 30 0:51 /sub /mnt/a\040b rw shared:1 master:2 - overlay none rw,lowerdir+=/one:1,lowerdir+=/two\054,upperdir=/up";
        let mount = Mount::parse(line).unwrap();
        assert_eq!(mount.layers(), ["/up", "/one:1", "/two,"]);
        assert_eq!(
            mount.inside("/mnt/a b/lib/x").as_deref(),
            Some("/sub/lib/x")
        );
    }

    #[test]
    fn a_file_that_is_on_no_overlay_is_itself() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let path = file.path().to_string_lossy();
        let real = RealFile::of(file.path(), &path, std::process::id()).unwrap();
        assert_eq!(real.id, FileId::of(file.path()).unwrap());
        assert_eq!(
            (real.open_path.as_path(), real.unresolved),
            (file.path(), None)
        );
    }

    proptest! {
        #[test]
        fn any_line_is_survived(line in r"[ -~]{0,120}") {
            if let Some(mount) = Mount::parse(&line) {
                let _ = (mount.layers(), mount.inside(&line));
            }
        }
    }
}
