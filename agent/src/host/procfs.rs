//! The few files of `/proc` that the agent reads. A process may vanish at any moment: then
//! there is simply nothing.

use std::fs;
use std::path::PathBuf;

use super::container::Container;
use super::library::FileId;
use super::redact;

/// Fields of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    pub state: u8,
    /// Field 22, clock ticks since boot.
    pub start_ticks: u64,
}

pub fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_stat(line: &str) -> Option<Stat> {
    // The command name may hold spaces and brackets: fields count from the last bracket.
    let fields = &line[line.rfind(')')? + 1..];
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.bytes().next()?;
    let start_ticks = fields.nth(18)?.parse().ok()?;
    Some(Stat { state, start_ticks })
}

/// The parent of a process.
pub fn parent(pid: u32) -> Option<u32> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields = &line[line.rfind(')')? + 1..];
    fields.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// True if no thread of the process lives any more: it is gone, or its leader is a zombie and
/// the only task.
pub fn is_gone(pid: u32, start_ticks: u64) -> bool {
    let Some(stat) = stat(pid) else { return true };
    if stat.start_ticks != start_ticks {
        return true;
    }
    let dead = matches!(stat.state, b'Z' | b'X');
    dead && fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count) <= 1
}

/// All process ids.
pub fn pids() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// The path of the executable, as the process sees it.
pub fn exe(pid: u32) -> Option<String> {
    fs::read_link(format!("/proc/{pid}/exe"))
        .ok()
        .map(|path| path.to_string_lossy().into_owned())
}

/// The longest command line that is kept, bytes.
const COMMAND_BYTES: usize = 4096;
/// The longest that is read to be kept: secrets are taken out before it is cut, as half of one
/// might not be known for what it is.
const READ_BYTES: usize = 128 << 10;

/// The command line as it is kept and shown: without secrets (see [`redact`]), and cut.
pub fn command(pid: u32) -> Option<String> {
    let mut command = redact::command(&words_within(pid, READ_BYTES));
    let mut end = COMMAND_BYTES.min(command.len());
    while !command.is_char_boundary(end) {
        end -= 1;
    }
    command.truncate(end);
    Some(command).filter(|command| !command.is_empty())
}

/// The words of the command line; none if the process is gone, or a thread of the kernel. They are
/// as the program got them: nothing of them may be kept.
pub fn words(pid: u32) -> Vec<String> {
    words_within(pid, COMMAND_BYTES)
}

fn words_within(pid: u32, most: usize) -> Vec<String> {
    let mut bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    bytes.truncate(most);
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    if bytes.is_empty() {
        return Vec::new();
    }
    let words = bytes.split(|b| *b == 0);
    words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

/// Variables of the environment the process was started with.
fn environment_variables<const N: usize>(pid: u32, names: [&str; N]) -> [Option<String>; N] {
    let bytes = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    names.map(|name| {
        bytes.split(|b| *b == 0).find_map(|entry| {
            let value = entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
            Some(String::from_utf8_lossy(value).into_owned())
        })
    })
}

/// Whether system calls of the process go through a seccomp filter.
pub fn has_seccomp_filter(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp:"))
        .is_some_and(|mode| mode.trim() == "2")
}

/// What a process runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Program {
    pub exe: Option<String>,
    pub command: Option<String>,
    /// `CUDA_VISIBLE_DEVICES` it was started with.
    pub visible_devices: Option<String>,
    /// `CUDA_DEVICE_ORDER` it was started with.
    pub device_order: Option<String>,
    /// The container it runs in.
    pub container: Container,
    /// Settings of PyTorch's allocator it was started with, as written.
    pub allocator_settings: Option<String>,
}

impl Program {
    /// All `None` if the process is gone.
    pub fn of(pid: u32) -> Self {
        let [
            visible_devices,
            device_order,
            pod,
            namespace,
            of_cuda,
            of_any,
        ] = environment_variables(
            pid,
            [
                "CUDA_VISIBLE_DEVICES",
                "CUDA_DEVICE_ORDER",
                "POD_NAME",
                "POD_NAMESPACE",
                "PYTORCH_CUDA_ALLOC_CONF",
                "PYTORCH_ALLOC_CONF",
            ],
        );
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        Self {
            exe: exe(pid),
            command: command(pid),
            visible_devices,
            device_order,
            container: Container::parse(
                &cgroup,
                pod.map(|pod| redact::variable("POD_NAME", pod)),
                namespace.map(|namespace| redact::variable("POD_NAMESPACE", namespace)),
            ),
            // The newer name wins, as PyTorch has it.
            allocator_settings: of_any.or(of_cuda),
        }
    }
}

/// One file mapping of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    /// Offset in the file, bytes.
    pub offset: u64,
    pub executable: bool,
    pub device: u64,
    pub inode: u64,
    /// Path as the process sees it, without the ` (deleted)` mark.
    pub path: String,
    /// The mark was there: the file was replaced or removed while in use.
    pub deleted: bool,
}

impl Mapping {
    /// Device and inode as the kernel lists them. On an overlay they may be those of either side,
    /// by the kernel's version: good for knowing a mapping again, and for nothing else.
    pub fn file_id(&self) -> FileId {
        FileId {
            device: self.device,
            inode: self.inode,
        }
    }

    /// A name that opens the mapped file itself, also in another mount namespace and after the
    /// file was replaced.
    pub fn open_path(&self, pid: u32) -> PathBuf {
        format!("/proc/{pid}/map_files/{:x}-{:x}", self.start, self.end).into()
    }
}

/// The file mappings of a process, in order of address.
pub fn mappings(pid: u32) -> Vec<Mapping> {
    let Ok(text) = fs::read(format!("/proc/{pid}/maps")) else {
        return Vec::new();
    };
    String::from_utf8_lossy(&text)
        .lines()
        .filter_map(parse_mapping)
        .collect()
}

/// Where code lies in a process.
#[derive(Debug, Default)]
pub struct Code {
    /// Of files, in order of address.
    pub files: Vec<Mapping>,
    /// Made while the program runs: of no file.
    pub anonymous: Vec<std::ops::Range<u64>>,
}

/// The executable mappings of a process; nothing if it is gone.
pub fn code(pid: u32) -> Code {
    let text = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let mut code = Code::default();
    for line in text.lines() {
        match parse_mapping(line) {
            Some(mapping) if mapping.executable => code.files.push(mapping),
            Some(_) => {}
            None => code.anonymous.extend(parse_anonymous_code(line)),
        }
    }
    code
}

/// An executable mapping of no file: without a name, or with one that the program gave it.
fn parse_anonymous_code(line: &str) -> Option<std::ops::Range<u64>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let is_executable = fields.next()?.as_bytes().get(2) == Some(&b'x');
    let name = fields.nth(3).unwrap_or_default();
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let range = hex(start)?..hex(end)?;
    (is_executable && (name.is_empty() || name.starts_with("[anon:"))).then_some(range)
}

/// Parses a line of `maps`; `None` for anonymous memory and for lines that make no sense.
pub fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut rest = line;
    let mut field = || {
        rest = rest.trim_start_matches(' ');
        let end = rest.find(' ').unwrap_or(rest.len());
        let (field, tail) = rest.split_at(end);
        rest = tail;
        field
    };
    let (range, permissions, offset, device, inode) = (field(), field(), field(), field(), field());
    let path = rest.trim_start_matches(' ');
    if !path.starts_with('/') {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let (major, minor) = device.split_once(':')?;
    let (path, deleted) = match path.strip_suffix(" (deleted)") {
        Some(path) => (path, true),
        None => (path, false),
    };
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    if start >= end {
        return None;
    }
    Some(Mapping {
        start,
        end,
        offset: hex(offset)?,
        executable: permissions.as_bytes().get(2) == Some(&b'x'),
        device: libc::makedev(hex(major)? as u32, hex(minor)? as u32),
        inode: inode.parse().ok()?,
        path: path.to_string(),
        deleted,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn stat_counts_fields_from_the_last_bracket() {
        let line = "42 (a) b) S 1 42 42 0 -1 4194560 9 0 0 0 1 2 0 0 20 0 1 0 987654 1 2";
        assert_eq!(
            parse_stat(line),
            Some(Stat {
                state: b'S',
                start_ticks: 987_654
            })
        );
        assert_eq!(parse_stat("42 (a"), None);
    }

    #[test]
    fn mappings_with_spaces_and_marks() {
        let line = "7f00-8f00 r-xp 00001000 fe:02 1234    /opt/my libs/libcuda.so.1 (deleted)";
        let mapping = parse_mapping(line).unwrap();
        assert_eq!(
            (mapping.start, mapping.end, mapping.offset),
            (0x7f00, 0x8f00, 0x1000)
        );
        assert_eq!(
            (mapping.device, mapping.inode),
            (libc::makedev(0xfe, 2), 1234)
        );
        assert_eq!(mapping.path, "/opt/my libs/libcuda.so.1");
        assert!(mapping.deleted && mapping.executable);
        assert_eq!(parse_mapping("7f00-8f00 rw-p 00000000 00:00 0 "), None);
        assert_eq!(
            parse_mapping("7f00-8f00 rw-p 00000000 00:00 0    [heap]"),
            None
        );
    }

    #[test]
    fn code_of_no_file() {
        let of = parse_anonymous_code;
        assert_eq!(of("7f00-8f00 rwxp 00000000 00:00 0 "), Some(0x7f00..0x8f00));
        assert_eq!(
            of("7f00-8f00 r-xp 00000000 00:00 0    [anon:jit]"),
            Some(0x7f00..0x8f00)
        );
        assert_eq!(of("7f00-8f00 rw-p 00000000 00:00 0 "), None);
        // Where the kernel puts return probes is no code of the program's.
        assert_eq!(of("7f00-8f00 --xp 00000000 00:00 0    [uprobes]"), None);
    }

    proptest! {
        #[test]
        fn any_line_is_survived(line in ".{0,200}") {
            let _ = parse_mapping(&line);
            let _ = parse_anonymous_code(&line);
            let _ = parse_stat(&line);
        }
    }

    #[test]
    fn this_process_is_there() {
        let me = std::process::id();
        let stat = stat(me).unwrap();
        assert!(!is_gone(me, stat.start_ticks));
        assert!(is_gone(me, stat.start_ticks + 1));
        assert!(mappings(me).iter().any(|m| m.executable));
    }
}
