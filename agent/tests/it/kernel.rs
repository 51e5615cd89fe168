//! What a test does to a daemon's ring and hears from the kernel besides: the independent witnesses of
//! losses that no workload can count.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::maps::{Map, MapData, PerCpuArray};
use vramscope_ebpf_abi::Loss;

/// A system call's result as a file descriptor or number.
fn checked(result: libc::c_long, what: &str) -> i32 {
    assert!(result >= 0, "{what}: {}", io::Error::last_os_error());
    result as i32
}

/// The pinned map of a daemon's programs.
pub fn pinned(pins: &Path, map: &str) -> PathBuf {
    std::fs::read_dir(pins)
        .unwrap()
        .map(|entry| entry.unwrap().path().join(map))
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("no map {map} below {}", pins.display()))
}

/// What the programs have counted as lost so far, read from the kernel and not from the agent.
pub fn lost(pins: &Path, cause: Loss) -> u64 {
    let map = MapData::from_pin(pinned(pins, "LOST")).unwrap();
    let counts = PerCpuArray::<_, u64>::try_from(Map::PerCpuArray(map)).unwrap();
    counts.get(&(cause as u32), 0).unwrap().iter().sum()
}

/// One instruction of a BPF program.
fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    let registers = (from << 4) | to;
    u64::from(code)
        | u64::from(registers) << 8
        | u64::from(offset as u16) << 16
        | u64::from(value as u32) << 32
}

/// Puts records of eight bytes, all ones, into a daemon's ring, as programs of another version might
/// have left them there.
pub fn put_strange_records(pins: &Path, count: u32) {
    const SOCKET_FILTER: u32 = 1;
    const RINGBUF_OUTPUT: i32 = 130;
    const PROG_LOAD: libc::c_long = 5;
    const PROG_TEST_RUN: libc::c_long = 10;
    let ring = MapData::from_pin(pinned(pins, "EVENTS")).unwrap();
    let ring_fd = ring.fd().as_fd().as_raw_fd();
    let program = [
        instruction(0x18, 1, 1, 0, ring_fd), // r1 = the ring
        0,
        instruction(0x7a, 10, 0, -8, -1), // eight bytes of the stack, all ones
        instruction(0xbf, 2, 10, 0, 0),   // r2 = their address
        instruction(0x07, 2, 0, 0, -8),
        instruction(0xb7, 3, 0, 0, 8), // r3 = their number
        instruction(0xb7, 4, 0, 0, 0), // r4 = no flags
        instruction(0x85, 0, 0, 0, RINGBUF_OUTPUT),
        instruction(0xb7, 0, 0, 0, 0),
        instruction(0x95, 0, 0, 0, 0),
    ];
    let bpf = |command: libc::c_long, attributes: &[u64], what: &str| {
        // SAFETY: attributes of that command, alive during the call, as are what they point to.
        let result = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                command,
                attributes.as_ptr(),
                std::mem::size_of_val(attributes),
            )
        };
        checked(result, what)
    };
    let licence = c"GPL";
    let load = [
        u64::from(SOCKET_FILTER) | (program.len() as u64) << 32,
        program.as_ptr() as u64,
        licence.as_ptr() as u64,
        0,
        0,
        0,
    ];
    let loaded = bpf(PROG_LOAD, &load, "a program for the test");
    // SAFETY: just made, and nobody else has it.
    let loaded = unsafe { OwnedFd::from_raw_fd(loaded) };
    let packet = [0_u8; 64];
    let run = [
        loaded.as_raw_fd() as u64,
        packet.len() as u64,
        packet.as_ptr() as u64,
        0,
        u64::from(count),
    ];
    bpf(PROG_TEST_RUN, &run, "a run of the test's program");
}

/// The kernel's own word on processes that begin a program or end (`cn_proc`).
pub struct ProcessNews {
    socket: OwnedFd,
    /// When each happened, CLOCK_MONOTONIC nanoseconds.
    at_ns: Vec<u64>,
}

impl ProcessNews {
    /// `None` where the kernel does not tell: not root of the host, or built without.
    pub fn listen() -> Option<Self> {
        const CONNECTOR: i32 = 11;
        const PROC: u32 = 1;
        const LISTEN: u32 = 1;
        // SAFETY: a new socket, or -1.
        let socket = unsafe {
            libc::socket(
                libc::AF_NETLINK,
                libc::SOCK_DGRAM | libc::SOCK_CLOEXEC,
                CONNECTOR,
            )
        };
        if socket < 0 {
            return None;
        }
        // SAFETY: just made, and nobody else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        // SAFETY: an all-zero address is a valid one.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::AF_NETLINK as u16;
        address.nl_groups = PROC;
        // Nothing may be missed while the test is busy.
        let room: i32 = 16 << 20;
        // SAFETY: an option of four bytes, and an address of the family, alive during the calls.
        let bound = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVBUFFORCE,
                (&raw const room).cast(),
                4,
            );
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                std::mem::size_of_val(&address) as u32,
            )
        };
        if bound < 0 {
            return None;
        }
        // A netlink header (16 bytes), a connector's (20) and the wish to listen.
        let message: [u32; 10] = [
            40,
            libc::NLMSG_DONE as u32,
            0,
            std::process::id(),
            PROC,
            PROC,
            0,
            0,
            4,
            LISTEN,
        ];
        // SAFETY: bytes that live during the call.
        let sent = unsafe { libc::send(socket.as_raw_fd(), message.as_ptr().cast(), 40, 0) };
        let news = Self {
            socket,
            at_ns: Vec::new(),
        };
        (sent == 40).then_some(news)
    }

    /// How many there were from `from_ns` to `to_ns`.
    pub fn between(&mut self, from_ns: u64, to_ns: u64) -> u64 {
        self.take();
        let at = self.at_ns.iter();
        at.filter(|at| (from_ns..=to_ns).contains(at)).count() as u64
    }

    fn take(&mut self) {
        const EXEC: u32 = 0x2;
        const EXIT: u32 = 0x8000_0000;
        let mut bytes = [0_u8; 4096];
        loop {
            // SAFETY: room for as many bytes.
            let length = unsafe {
                libc::recv(
                    self.socket.as_raw_fd(),
                    bytes.as_mut_ptr().cast(),
                    bytes.len(),
                    libc::MSG_DONTWAIT,
                )
            };
            if length < 0 {
                let error = io::Error::last_os_error();
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "news were missed");
                return;
            }
            // Behind both headers: what, processor, when (8 bytes), thread, process.
            let event = &bytes[36..length as usize];
            let word = |at: usize| u32::from_ne_bytes(event[at..at + 4].try_into().unwrap());
            let what = word(0);
            let is_leader = event.len() >= 24 && word(16) == word(20);
            if what == EXEC || (what == EXIT && is_leader) {
                let at_ns = u64::from_ne_bytes(event[8..16].try_into().unwrap());
                self.at_ns.push(at_ns);
            }
        }
    }
}
