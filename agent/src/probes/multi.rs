//! Uprobe-multi links (kernels from 6.6 on): one link hooks all functions of a library. They
//! attach and, above all, detach many times faster than one perf event per function, for which
//! the kernel waits some 90 ms each.
//!
//! aya 0.14 cannot load a program for them, so this module makes the three system calls itself;
//! the maps are aya's. Where the kernel knows no such links, `load` fails and the caller uses perf
//! events.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::Context;

// Values of `enum bpf_cmd`, `bpf_prog_type` and `bpf_attach_type` in the kernel's `linux/bpf.h`.
const BPF_PROG_LOAD: i64 = 5;
const BPF_OBJ_PIN: i64 = 6;
const BPF_OBJ_GET: i64 = 7;
const BPF_BTF_LOAD: i64 = 18;
const BPF_LINK_CREATE: i64 = 28;
const BPF_PROG_TYPE_KPROBE: u32 = 2;
pub(super) const BPF_TRACE_UPROBE_MULTI: u32 = 48;
const BPF_PERF_EVENT: u32 = 41;
/// Programs for perf events name none.
pub(super) const NO_ATTACH_TYPE: u32 = 0;
const BPF_F_UPROBE_MULTI_RETURN: u32 = 1;

/// The part of `union bpf_attr` that loading a program needs.
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
    prog_btf_fd: u32,
    func_info_rec_size: u32,
    func_info: u64,
    func_info_cnt: u32,
    padding: u32,
}

/// The part that loading type information needs.
#[repr(C)]
#[derive(Default)]
struct BtfLoad {
    btf: u64,
    btf_log_buf: u64,
    btf_size: u32,
    btf_log_size: u32,
    btf_log_level: u32,
    padding: u32,
}

/// Type information of a program's functions; the kernel asks for it where a function is called
/// back.
pub(super) struct Described {
    pub btf: Vec<u8>,
    /// For each function the number of its first instruction and that of its type, four bytes each.
    pub functions: Vec<u8>,
    pub count: usize,
}

/// The part that creating a uprobe-multi link needs.
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

/// The part that pinning needs.
#[repr(C)]
#[derive(Default)]
struct Obj {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// One function to hook.
#[derive(Debug, Clone, Copy)]
pub struct Site {
    /// Offset in the file, bytes.
    pub offset: u64,
    pub cookie: u64,
    /// Offset in the file of the counter that turns a USDT probe on; 0 for none.
    pub counter: u64,
}

/// Loads a program of the object for uprobe-multi links. `maps` are the object's maps as aya made
/// them.
pub fn load(object: &[u8], maps: &[(String, RawFd)], name: &str) -> anyhow::Result<OwnedFd> {
    let mut object = aya_obj::Object::parse(object).context("the BPF object is damaged")?;
    let btf = match aya::features().btf() {
        Some(features) => object.fixup_and_sanitize_btf(features)?,
        None => None,
    };
    let btf = btf.map(aya_obj::btf::Btf::to_bytes);
    let known: Vec<(String, RawFd, aya_obj::Map)> = maps
        .iter()
        .filter_map(|(name, fd)| Some((name.clone(), *fd, object.maps.get(name)?.clone())))
        .collect();
    let text: HashSet<usize> = object.functions.keys().map(|key| key.0).collect();
    object.relocate_maps(
        known
            .iter()
            .map(|(name, fd, map)| (name.as_str(), *fd, map)),
        &text,
    )?;
    object.relocate_calls(&text)?;
    let program = object
        .programs
        .get(name)
        .with_context(|| format!("no BPF program {name:?} in the object"))?;
    let function = &object.functions[&program.function_key()];
    let described = btf.map(|btf| Described {
        btf,
        functions: function.func_info.func_info_bytes(),
        count: function.func_info.len(),
    });
    load_described(
        function.instructions.as_ptr().cast(),
        function.instructions.len(),
        &program.license,
        BPF_TRACE_UPROBE_MULTI,
        described.as_ref(),
    )
    .with_context(|| format!("the kernel refused BPF program {name} for uprobe-multi links"))
}

/// Loads a uprobe program. `instructions` points to `count` of the kernel's eight-byte
/// instructions, which the verifier checks.
pub(super) fn load_instructions(
    instructions: *const u8,
    count: usize,
    license: &CStr,
    attach_type: u32,
) -> io::Result<OwnedFd> {
    load_described(instructions, count, license, attach_type, None)
}

/// The same of a program whose functions are described.
pub(super) fn load_described(
    instructions: *const u8,
    count: usize,
    license: &CStr,
    attach_type: u32,
    described: Option<&Described>,
) -> io::Result<OwnedFd> {
    let btf = match described {
        Some(described) => {
            let attributes = BtfLoad {
                btf: described.btf.as_ptr() as u64,
                btf_size: described.btf.len() as u32,
                ..BtfLoad::default()
            };
            // SAFETY: the bytes live until the call is over.
            Some(unsafe { bpf_fd(BPF_BTF_LOAD, &attributes) }?)
        }
        None => None,
    };
    let described = described.zip(btf.as_ref());
    let attributes = ProgLoad {
        prog_btf_fd: described.map_or(0, |(_, btf)| btf.as_raw_fd() as u32),
        func_info_rec_size: described.map_or(0, |_| 8),
        func_info: described.map_or(0, |(d, _)| d.functions.as_ptr() as u64),
        func_info_cnt: described.map_or(0, |(d, _)| d.count as u32),
        prog_type: BPF_PROG_TYPE_KPROBE,
        insn_cnt: count as u32,
        insns: instructions as u64,
        license: license.as_ptr() as u64,
        expected_attach_type: attach_type,
        ..ProgLoad::default()
    };
    // SAFETY: all pointers in the attributes live until the call is over; a pointer that is not
    // valid makes the call fail.
    unsafe { bpf_fd(BPF_PROG_LOAD, &attributes) }
}

/// Hooks all sites of a file with one link; entries, or returns.
pub fn link(program: &OwnedFd, file: &Path, sites: &[Site], returns: bool) -> io::Result<OwnedFd> {
    let path = c_path(file)?;
    let offsets: Vec<u64> = sites.iter().map(|site| site.offset).collect();
    let cookies: Vec<u64> = sites.iter().map(|site| site.cookie).collect();
    let counters: Vec<u64> = sites.iter().map(|site| site.counter).collect();
    let has_counters = counters.iter().any(|counter| *counter != 0);
    let attributes = LinkCreate {
        prog_fd: program.as_raw_fd() as u32,
        attach_type: BPF_TRACE_UPROBE_MULTI,
        path: path.as_ptr() as u64,
        offsets: offsets.as_ptr() as u64,
        ref_ctr_offsets: if has_counters {
            counters.as_ptr() as u64
        } else {
            0
        },
        cookies: cookies.as_ptr() as u64,
        cnt: sites.len() as u32,
        multi_flags: if returns {
            BPF_F_UPROBE_MULTI_RETURN
        } else {
            0
        },
        ..LinkCreate::default()
    };
    // SAFETY: all pointers in the attributes live until the call is over.
    unsafe { bpf_fd(BPF_LINK_CREATE, &attributes) }
}

/// The part that a link to a perf event needs.
#[repr(C)]
#[derive(Default)]
struct PerfLink {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
    cookie: u64,
    padding: [u64; 4],
}

/// Hooks the place of a perf event. The link keeps the event.
pub fn perf_link(program: RawFd, event: &OwnedFd, cookie: u64) -> io::Result<OwnedFd> {
    let attributes = PerfLink {
        prog_fd: program as u32,
        target_fd: event.as_raw_fd() as u32,
        attach_type: BPF_PERF_EVENT,
        cookie,
        ..PerfLink::default()
    };
    // SAFETY: the attributes hold no pointers.
    unsafe { bpf_fd(BPF_LINK_CREATE, &attributes) }
}

/// Keeps a program or link in the kernel under a name on a BPF file system.
pub fn pin(object: &OwnedFd, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let attributes = Obj {
        pathname: path.as_ptr() as u64,
        bpf_fd: object.as_raw_fd() as u32,
        ..Obj::default()
    };
    // SAFETY: the path lives until the call is over.
    unsafe { bpf(BPF_OBJ_PIN, &attributes) }.map(|_| ())
}

/// Opens what was kept.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let attributes = Obj {
        pathname: path.as_ptr() as u64,
        ..Obj::default()
    };
    // SAFETY: the path lives until the call is over.
    unsafe { bpf_fd(BPF_OBJ_GET, &attributes) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

/// # Safety
/// `attributes` is what `command` takes, and its pointers are valid.
pub(super) unsafe fn bpf<T>(command: i64, attributes: &T) -> io::Result<i32> {
    // SAFETY: as promised by the caller; the kernel reads `size_of::<T>()` bytes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result as i32)
    }
}

/// # Safety
/// As `bpf`, for commands that give a file descriptor.
pub(super) unsafe fn bpf_fd<T>(command: i64, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: as promised by the caller.
    let fd = unsafe { bpf(command, attributes) }?;
    // SAFETY: the kernel has just made it, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
