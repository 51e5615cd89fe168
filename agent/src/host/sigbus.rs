//! Files of traced programs are mapped into the agent's memory, and anybody may cut them short
//! meanwhile: the kernel then sends SIGBUS to whoever reads a page that is gone, and the default is
//! to die.
//!
//! Copying what is read instead would cost the agent tens of megabytes for one PyTorch process. So
//! a page that is gone becomes a page of zeros: no unwinding rules and no names are found there, and
//! the stack says so by its quality. This holds for every mapping of a file that is not writable,
//! those of libraries for symbols included. Any other SIGBUS takes the course it had before.

use std::mem::MaybeUninit;
use std::sync::{Once, OnceLock};

/// `si_code` of a page behind the end of its file.
const BUS_ADRERR: i32 = 2;
const PAGE: usize = 4096;

static INSTALLED: Once = Once::new();
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// From now on the process survives it.
pub fn survive() {
    INSTALLED.call_once(|| {
        // SAFETY: an all-zero action is a valid one, and the handler makes async-signal-safe system
        // calls only. The action before is kept first, since the handler may run at once.
        unsafe {
            let mut before = MaybeUninit::<libc::sigaction>::zeroed();
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) != 0 {
                return;
            }
            let _ = BEFORE.set(before.assume_init());
            let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        }
    });
}

extern "C" fn handle(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid description; errno's place is the thread's own, and has to
    // be afterwards what the interrupted code left there.
    unsafe {
        let errno = libc::__errno_location();
        let kept = *errno;
        let address = (*info).si_addr() as usize;
        if (*info).si_code != BUS_ADRERR || !(is_read_only(address) && put_zeros(address)) {
            // The instruction runs again, and what was there before us decides.
            if let Some(before) = BEFORE.get() {
                libc::sigaction(libc::SIGBUS, before, std::ptr::null_mut());
            }
        }
        *errno = kept;
    }
}

fn put_zeros(address: usize) -> bool {
    let page = address & !(PAGE - 1);
    // SAFETY: the page has no memory behind it, is part of a mapping that nobody writes to, and is
    // read as zeros from now on.
    let mapped = unsafe {
        libc::mmap(
            page as *mut libc::c_void,
            PAGE,
            libc::PROT_READ,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

/// Whether the address lies in a mapping that is readable and not writable. It runs inside a signal
/// handler: no memory is allocated.
fn is_read_only(address: usize) -> bool {
    // SAFETY: a path with its zero byte.
    let maps = unsafe {
        libc::open(
            c"/proc/self/maps".as_ptr(),
            libc::O_RDONLY | libc::O_CLOEXEC,
        )
    };
    if maps < 0 {
        return false;
    }
    let mut found = false;
    let mut line = Line::default();
    let mut bytes = [0u8; 512];
    'read: loop {
        // SAFETY: room for as many bytes.
        let count = unsafe { libc::read(maps, bytes.as_mut_ptr().cast(), bytes.len()) };
        let Some(read) = usize::try_from(count).ok().and_then(|n| bytes.get(..n)) else {
            break;
        };
        if read.is_empty() {
            break;
        }
        for byte in read {
            if line.take(*byte) && line.start <= address && address < line.end {
                found = line.readable && !line.writable;
                break 'read;
            }
        }
    }
    // SAFETY: opened above.
    unsafe { libc::close(maps) };
    found
}

/// The beginning of a line of `maps`, byte by byte: `START-END rwxp`.
#[derive(Default)]
struct Line {
    start: usize,
    end: usize,
    readable: bool,
    writable: bool,
    /// Which part the next byte belongs to: 0 start, 1 end, 2 and 3 the first two permissions, 4
    /// the rest of the line.
    part: u8,
}

impl Line {
    /// True once all is there that is asked for.
    fn take(&mut self, byte: u8) -> bool {
        if byte == b'\n' {
            *self = Self::default();
            return false;
        }
        let digit = char::from(byte).to_digit(16).unwrap_or(0) as usize;
        match (self.part, byte) {
            (0, b'-') | (1, b' ') => self.part += 1,
            (0, _) => self.start = self.start << 4 | digit,
            (1, _) => self.end = self.end << 4 | digit,
            (2, _) => {
                self.readable = byte == b'r';
                self.part = 3;
            }
            (3, _) => {
                self.writable = byte == b'w';
                self.part = 4;
                return true;
            }
            _ => {}
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Without the handler the test's process would die.
    #[test]
    fn a_file_that_is_cut_short_reads_as_zeros() {
        survive();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 3 * PAGE]).unwrap();
        // SAFETY: what happens to the file is the matter of this test.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        let read = |at: usize| {
            // SAFETY: inside the mapping; the compiler must not know what is there.
            unsafe { std::ptr::read_volatile(map.as_ptr().add(at)) }
        };
        assert_eq!((read(0), read(2 * PAGE + 5)), (7, 7));
        file.set_len(PAGE as u64).unwrap();
        assert_eq!((read(5), read(PAGE), read(2 * PAGE + 5)), (7, 0, 0));
    }

    #[test]
    fn what_can_be_written_to_is_no_business_of_ours() {
        let local = 1u8;
        assert!(!is_read_only(&raw const local as usize));
        assert!(is_read_only(
            what_can_be_written_to_is_no_business_of_ours as *const () as usize
        ));
        assert!(!is_read_only(8));
    }
}
