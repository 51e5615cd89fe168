//! Asks the kernel whether two paths lead to the same file, as uprobes see it.
//!
//! The kernel keeps one uprobe per (inode, offset) and refuses a second one there with another
//! reference counter. So a probe with a counter that no file can have, set where a hook of ours
//! is, fails with EINVAL if the path leads to the hooked file, and succeeds if it does not. It is limited to this very process, which maps no such library: no breakpoint is
//! written anywhere. This works on every file system and in every mount namespace; the kernel
//! writes one line to its log when the files are the same.

use std::io;
use std::path::Path;

use crate::host::perf::Uprobe;

/// Far behind the end of any library, and even, as the kernel wants it.
const IMPOSSIBLE_COUNTER: u32 = 0xffff_fff0;

/// Whether `path` leads to the file that has one of our hooks at `offset`, with that reference
/// counter (0 for none).
pub fn is_hooked_file(path: &Path, offset: u64, counter: u32) -> io::Result<bool> {
    let probe = |reference_counter| {
        Uprobe {
            file: path,
            offset,
            at_return: false,
            reference_counter,
            pid: std::process::id(),
        }
        .open()
    };
    // With the hook's own it must succeed, or the answer below would mean nothing.
    drop(probe(counter)?);
    match probe(IMPOSSIBLE_COUNTER) {
        Ok(_) => Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(true),
        Err(error) => Err(error),
    }
}
