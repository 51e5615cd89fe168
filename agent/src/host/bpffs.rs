//! The BPF file system, which keeps probes in the kernel while no agent runs.

use std::ffi::CString;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::Context;

const BPF_FS_MAGIC: i64 = 0xcafe_4a11;
const DEFAULT_MOUNT: &str = "/sys/fs/bpf";

/// Makes sure that `root` lies on a BPF file system, mounting one at `/sys/fs/bpf` (its place on
/// every distribution) or else at `root` itself.
pub fn ensure_mounted(root: &Path) -> anyhow::Result<()> {
    let default = Path::new(DEFAULT_MOUNT);
    if root.starts_with(default) && !is_bpffs(default) {
        mount(default)?;
    }
    if let Err(error) = fs::create_dir_all(root)
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(error).with_context(|| format!("failed to create {}", root.display()));
    }
    if !is_bpffs(root) {
        mount(root)?;
    }
    Ok(())
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

fn is_bpffs(path: &Path) -> bool {
    let Ok(path) = c_path(path) else { return false };
    let mut info = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the path is a C string and the buffer has the size the call writes.
    if unsafe { libc::statfs(path.as_ptr(), info.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: the call succeeded and filled the buffer.
    unsafe { info.assume_init() }.f_type == BPF_FS_MAGIC
}

fn mount(target: &Path) -> anyhow::Result<()> {
    let path = c_path(target)?;
    // SAFETY: all pointers are C strings or null.
    let result = unsafe {
        libc::mount(
            c"bpf".as_ptr(),
            path.as_ptr(),
            c"bpf".as_ptr(),
            0,
            std::ptr::null(),
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error()).with_context(|| {
            format!("failed to mount a BPF file system at {}; mount one there (mount -t bpf bpf DIR) or set pin_path", target.display())
        });
    }
    Ok(())
}
