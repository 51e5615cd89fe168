//! The floor: an entry and a return probe that do nothing, on one function of one file.
//!
//! The program is two instructions (`r0 = 0; exit`), so it is written here by hand rather than
//! compiled. It is attached by uprobe-multi links, as the agent attaches its own where the kernel
//! has them (6.6 on), and else by perf events.

use std::ffi::CString;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use object::{Object, ObjectSegment, ObjectSymbol};
use serde_json::{Value, json};

// Values of `enum bpf_cmd`, `bpf_prog_type` and `bpf_attach_type` in the kernel's `linux/bpf.h`.
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_PROG_TYPE_KPROBE: u32 = 2;
const BPF_TRACE_UPROBE_MULTI: u32 = 48;
const BPF_F_UPROBE_MULTI_RETURN: u32 = 1;
// `linux/perf_event.h`.
const PERF_EVENT_IOC_ENABLE: libc::c_ulong = 0x2400;
const PERF_EVENT_IOC_SET_BPF: libc::c_ulong = 0x4004_2408;
const PERF_ATTR_SIZE_VER5: u32 = 112;

/// `mov64 r0, 0; exit`, eight bytes each: opcode, registers, offset, immediate.
static PROGRAM: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, 0, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];

#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
    path: u64,
    offsets: u64,
    ref_ctr_offsets: u64,
    cookies: u64,
    cnt: u32,
    multi_flags: u32,
    pid: u32,
    padding: u32,
}

/// The part of `struct perf_event_attr` up to version 5.
#[repr(C)]
#[derive(Default)]
struct PerfAttr {
    kind: u32,
    size: u32,
    /// 1 in bit 0 makes it a return probe.
    config: u64,
    sample: [u64; 3],
    flags: u64,
    wakeup: [u32; 2],
    /// `uprobe_path`.
    config1: u64,
    /// `probe_offset`.
    config2: u64,
    rest: [u64; 5],
}

#[derive(Debug, Args)]
pub struct Hold {
    /// A place: PATH=OFFSET=COUNTER, both in the file; 0 for no counter.
    #[arg(long = "place", required = true, value_parser = place)]
    places: Vec<(PathBuf, u64, u64)>,
}

fn place(text: &str) -> Result<(PathBuf, u64, u64), String> {
    let mut parts = text.rsplitn(3, '=');
    let mut part = || parts.next().ok_or("expected PATH=OFFSET=COUNTER");
    let (counter, offset, path) = (part()?, part()?, part()?);
    let number = |text: &str| text.parse().map_err(|_| format!("{text:?} is no number"));
    Ok((path.into(), number(offset)?, number(counter)?))
}

/// Puts empty programs at all places, says "ready", and waits for the end of the input.
pub fn hold(options: &Hold) -> Result<Value> {
    let mut kept = Vec::new();
    for (path, offset, counter) in &options.places {
        let name =
            CString::new(path.as_os_str().as_encoded_bytes()).context("a path has no zeros")?;
        let fds = multi(&name, (*offset, *counter), false)
            .or_else(|_| perf_event(&name, (*offset, *counter), false))
            .with_context(|| format!("failed to hook {} at {offset}", path.display()))?;
        kept.push(fds);
    }
    println!("ready");
    io::stdout().flush().ok();
    io::copy(&mut io::stdin(), &mut io::sink()).context("failed to wait for the end")?;
    Ok(json!({"places": kept.len()}))
}

/// Probes that live as long as this value.
pub struct Probes {
    _kept: Vec<OwnedFd>,
}

/// Puts an empty probe at the function's entry and one at its return.
pub fn attach(file: &Path, symbol: &str) -> Result<Probes> {
    let offset = offset_of(file, symbol)?;
    let path = CString::new(file.as_os_str().as_encoded_bytes()).context("a path has no zeros")?;
    let mut kept = Vec::new();
    for returns in [true, false] {
        let fds = multi(&path, (offset, 0), returns)
            .or_else(|_| perf_event(&path, (offset, 0), returns))
            .with_context(|| format!("failed to hook {symbol} in {}", file.display()))?;
        kept.extend(fds);
    }
    Ok(Probes { _kept: kept })
}

fn offset_of(file: &Path, symbol: &str) -> Result<u64> {
    let bytes =
        std::fs::read(file).with_context(|| format!("failed to read {}", file.display()))?;
    let elf = object::File::parse(&*bytes)
        .with_context(|| format!("{} is no ELF file", file.display()))?;
    let address = elf
        .dynamic_symbols()
        .find(|found| found.name() == Ok(symbol))
        .with_context(|| format!("{} exports no {symbol}", file.display()))?
        .address();
    let segment = elf
        .segments()
        .find(|segment| (segment.address()..segment.address() + segment.size()).contains(&address))
        .with_context(|| format!("{symbol} lies in no segment of {}", file.display()))?;
    Ok(address - segment.address() + segment.file_range().0)
}

fn load(expected_attach_type: u32) -> io::Result<OwnedFd> {
    let license = c"GPL";
    let attributes = ProgLoad {
        prog_type: BPF_PROG_TYPE_KPROBE,
        insn_cnt: PROGRAM.len() as u32,
        insns: PROGRAM.as_ptr() as u64,
        license: license.as_ptr() as u64,
        expected_attach_type,
        ..ProgLoad::default()
    };
    // SAFETY: the attributes and what they point to live until the call is over.
    unsafe { bpf(BPF_PROG_LOAD, &attributes) }
}

fn multi(path: &CString, (offset, counter): (u64, u64), returns: bool) -> io::Result<Vec<OwnedFd>> {
    let program = load(BPF_TRACE_UPROBE_MULTI)?;
    let cookie = 0u64;
    let attributes = LinkCreate {
        prog_fd: program.as_raw_fd() as u32,
        attach_type: BPF_TRACE_UPROBE_MULTI,
        path: path.as_ptr() as u64,
        offsets: &raw const offset as u64,
        ref_ctr_offsets: if counter == 0 {
            0
        } else {
            &raw const counter as u64
        },
        cookies: &raw const cookie as u64,
        cnt: 1,
        multi_flags: if returns {
            BPF_F_UPROBE_MULTI_RETURN
        } else {
            0
        },
        ..LinkCreate::default()
    };
    // SAFETY: as above.
    let link = unsafe { bpf(BPF_LINK_CREATE, &attributes) }?;
    Ok(vec![program, link])
}

fn perf_event(
    path: &CString,
    (offset, counter): (u64, u64),
    returns: bool,
) -> io::Result<Vec<OwnedFd>> {
    let program = load(0)?;
    let kind = std::fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
    let attributes = PerfAttr {
        kind: kind.trim().parse().map_err(io::Error::other)?,
        size: PERF_ATTR_SIZE_VER5,
        config: counter << 32 | u64::from(returns),
        config1: path.as_ptr() as u64,
        config2: offset,
        ..PerfAttr::default()
    };
    // SAFETY: the attributes live until the call is over; every process, CPU 0 (which is enough
    // for a probe: the kernel runs its programs on all).
    let event = unsafe {
        fd(libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            -1,
            0,
            -1,
            0,
        ))?
    };
    // SAFETY: both are file descriptors of ours.
    let set = unsafe {
        libc::ioctl(
            event.as_raw_fd(),
            PERF_EVENT_IOC_SET_BPF,
            program.as_raw_fd(),
        ) == 0
            && libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_ENABLE, 0) == 0
    };
    if !set {
        return Err(io::Error::last_os_error());
    }
    Ok(vec![program, event])
}

/// # Safety
/// `attributes` is what `command` takes, and its pointers are valid.
unsafe fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: as promised by the caller; the kernel reads `size_of::<T>()` bytes.
    unsafe {
        fd(libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        ))
    }
}

/// # Safety
/// A result that is not negative is a file descriptor that nobody else has.
unsafe fn fd(result: libc::c_long) -> io::Result<OwnedFd> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as promised by the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(result as i32) })
}
