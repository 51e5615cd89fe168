//! `perf_event_open` in the few forms the agent needs: the watch over new mappings, and uprobes
//! without a program for the checks made before anything is hooked.

use std::ffi::CString;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

// Values of the kernel's `linux/perf_event.h`.
const PERF_TYPE_SOFTWARE: u32 = 1;
const PERF_COUNT_SW_DUMMY: u64 = 9;
const PERF_SAMPLE_TIME: u64 = 1 << 2;
const PERF_FORMAT_TOTAL_TIME_ENABLED: u64 = 1;
const PERF_FLAG_FD_CLOEXEC: u64 = 1 << 3;
const MMAP: u64 = 1 << 8;
const COMM: u64 = 1 << 9;
const WATERMARK: u64 = 1 << 14;
const SAMPLE_ID_ALL: u64 = 1 << 18;
const MMAP2: u64 = 1 << 23;
const COMM_EXEC: u64 = 1 << 24;
const USE_CLOCKID: u64 = 1 << 25;

/// `struct perf_event_attr` as of version 5 of its size (112 bytes); later fields are zero.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_watermark: u32,
    bp_type: u32,
    config1: u64,
    config2: u64,
    branch_sample_type: u64,
    sample_regs_user: u64,
    sample_stack_user: u32,
    clockid: i32,
    sample_regs_intr: u64,
    aux_watermark: u32,
    sample_max_stack: u16,
    reserved: u16,
}

/// Whose events are counted.
#[derive(Debug, Clone, Copy)]
enum Target {
    Process(u32),
    Cpu(u32),
}

fn open(mut attributes: Attributes, target: Target) -> io::Result<OwnedFd> {
    attributes.size = size_of::<Attributes>() as u32;
    let (pid, cpu) = match target {
        Target::Process(pid) => (pid as i32, -1),
        Target::Cpu(cpu) => (-1, cpu as i32),
    };
    // SAFETY: the attributes live until the call is over and have the size they name; pointers in
    // them are the callers' C strings, which live as long.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            pid,
            cpu,
            -1,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Records of every executable mapping and every exec on one CPU, in all processes, stamped with
/// CLOCK_MONOTONIC. Each record wakes the reader.
pub fn open_mappings(cpu: u32) -> io::Result<OwnedFd> {
    let attributes = Attributes {
        kind: PERF_TYPE_SOFTWARE,
        config: PERF_COUNT_SW_DUMMY,
        sample_type: PERF_SAMPLE_TIME,
        read_format: PERF_FORMAT_TOTAL_TIME_ENABLED,
        flags: MMAP | MMAP2 | COMM | COMM_EXEC | WATERMARK | SAMPLE_ID_ALL | USE_CLOCKID,
        wakeup_watermark: 1,
        clockid: libc::CLOCK_MONOTONIC,
        ..Attributes::default()
    };
    open(attributes, Target::Cpu(cpu))
}

/// A uprobe that only counts, in one process.
pub struct Uprobe<'a> {
    pub file: &'a Path,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Count returns instead of entries.
    pub at_return: bool,
    /// File offset of a USDT reference counter; 0 for none.
    pub reference_counter: u32,
    pub pid: u32,
}

/// A place in a file, in all processes, for a program to be linked to.
pub fn open_everywhere(file: &Path, offset: u64, reference_counter: u32) -> io::Result<OwnedFd> {
    let uprobe = Uprobe {
        file,
        offset,
        at_return: false,
        reference_counter,
        pid: 0,
    };
    // An event without a process needs a CPU; the program runs on all.
    uprobe.open_for(Target::Cpu(0))
}

impl Uprobe<'_> {
    /// The probe is there until the descriptor is closed. Read it for the count.
    pub fn open(&self) -> io::Result<OwnedFd> {
        self.open_for(Target::Process(self.pid))
    }

    fn open_for(&self, target: Target) -> io::Result<OwnedFd> {
        let path = CString::new(self.file.as_os_str().as_bytes()).map_err(io::Error::other)?;
        let attributes = Attributes {
            kind: uprobe_type()?,
            config: u64::from(self.reference_counter) << 32 | u64::from(self.at_return),
            config1: path.as_ptr() as u64,
            config2: self.offset,
            ..Attributes::default()
        };
        open(attributes, target)
    }
}

/// The number that this kernel gave to uprobes among the kinds of events.
pub fn uprobe_type() -> io::Result<u32> {
    let path = "/sys/bus/event_source/devices/uprobe/type";
    let text = std::fs::read_to_string(path)
        .map_err(|error| io::Error::new(error.kind(), format!("failed to read {path}: {error}")))?;
    text.trim()
        .parse()
        .map_err(|_| io::Error::other(format!("{path} holds {text:?}, not a number")))
}

/// The first number that an event's descriptor tells: the count.
pub fn count(event: &OwnedFd) -> io::Result<u64> {
    Ok(read_words::<1>(event)?[0])
}

/// How long an event of [`open_mappings`] has been on, nanoseconds. It stands still for good once
/// its CPU was taken offline.
pub fn time_enabled(event: &OwnedFd) -> io::Result<u64> {
    Ok(read_words::<2>(event)?[1])
}

fn read_words<const N: usize>(event: &OwnedFd) -> io::Result<[u64; N]> {
    let mut words = [0u64; N];
    let size = size_of_val(&words);
    // SAFETY: the buffer has `size` bytes, and any bytes make integers.
    let read = unsafe { libc::read(event.as_raw_fd(), words.as_mut_ptr().cast(), size) };
    if read == size as isize {
        Ok(words)
    } else if read < 0 {
        Err(io::Error::last_os_error())
    } else {
        Err(io::Error::from(io::ErrorKind::UnexpectedEof))
    }
}
