//! What this kernel can do. Each ability is tried, not derived from the version: distributions
//! carry features back to older numbers, and lockdown or a missing right takes them away.

use std::io;
use std::os::fd::AsRawFd;

use anyhow::bail;
use serde::{Deserialize, Serialize};

use super::multi;
use super::preflight::{self, Preflight};
use crate::host::perf;
use crate::python::btf;

// Values of `enum bpf_cmd`, `bpf_map_type` and the helpers' numbers in `linux/bpf.h`.
const BPF_MAP_CREATE: i64 = 0;
const BPF_MAP_TYPE_RINGBUF: u32 = 27;
const BPF_FUNC_GET_STACK: i32 = 67;
const BPF_FUNC_GET_ATTACH_COOKIE: i32 = 174;
const BPF_FUNC_LOOP: i32 = 181;
const BPF_F_USER_STACK: i32 = 1 << 8;

/// The name of the ability to read Python frames.
pub const PYTHON_FRAMES: &str = "python_frames";

/// One ability.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Feature {
    pub name: String,
    pub available: bool,
    /// The agent does not work without it.
    pub required: bool,
    /// What it is used for, or what is done without it.
    pub used: String,
    /// Why it is not available.
    pub reason: Option<String>,
}

/// What was found out before anything is hooked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checks {
    pub features: Features,
    pub preflight: Preflight,
}

impl Checks {
    /// Fails if this kernel lacks something that is needed. `uprobe_multi` is what the
    /// configuration wants.
    pub fn run(uprobe_multi: bool) -> anyhow::Result<Self> {
        let features = Features::probe(uprobe_multi);
        features.require()?;
        let preflight = preflight::run(&features.kernel);
        Ok(Self {
            features,
            preflight,
        })
    }
}

/// All that was tried.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    /// As `uname -r` has it.
    pub kernel: String,
    pub features: Vec<Feature>,
}

impl Features {
    /// Tries everything. `uprobe_multi` is what the configuration wants.
    pub fn probe(uprobe_multi: bool) -> Self {
        let feature = |name: &str, required, result: io::Result<()>, with: &str, without: &str| {
            let available = result.is_ok();
            Feature {
                name: name.into(),
                available,
                required,
                used: if available { with } else { without }.into(),
                reason: result.err().map(|error| error.to_string()),
            }
        };
        let multi_use = if uprobe_multi {
            "one link hooks a whole library"
        } else {
            "not used, uprobe_multi = false: a perf event for each function"
        };
        Self {
            kernel: kernel(),
            features: vec![
                feature(
                    "uprobes",
                    true,
                    uprobes(),
                    "hooks in library files",
                    "none: functions cannot be hooked",
                ),
                feature(
                    "ring_buffer",
                    true,
                    ring_buffer(),
                    "events on their way to the agent",
                    "none: events cannot be sent (kernels from 5.8 on have it)",
                ),
                feature(
                    "attach_cookie",
                    true,
                    load(&cookie_program()),
                    "tells hooks apart",
                    "none: hooks cannot be told apart (kernels from 5.15 on have it)",
                ),
                feature(
                    "user_stack",
                    true,
                    load(&stack_program()),
                    "frame-pointer stacks",
                    "none: stacks cannot be read",
                ),
                feature(
                    "uprobe_multi",
                    false,
                    multi_link(),
                    multi_use,
                    "a perf event for each function, slower to take away (kernels from 6.6 on have it)",
                ),
                feature(
                    PYTHON_FRAMES,
                    false,
                    python_frames(),
                    "frames of CPython in stacks",
                    "stacks without Python frames (kernels from 5.17 on with BTF have it)",
                ),
                feature(
                    "mmap_events",
                    false,
                    mmap_events(),
                    "new mappings are seen at once",
                    "processes are searched at intervals",
                ),
            ],
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.features
            .iter()
            .any(|feature| feature.name == name && feature.available)
    }

    /// An error that names the kernel and what it lacks.
    pub fn require(&self) -> anyhow::Result<()> {
        let missing: Vec<String> = self
            .features
            .iter()
            .filter(|feature| feature.required && !feature.available)
            .map(|feature| {
                let reason = feature.reason.as_deref().unwrap_or("unknown");
                format!("{} ({reason}): {}", feature.name, feature.used)
            })
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        bail!(
            "kernel {} cannot be traced, it lacks {}; vramscope needs Linux 5.15 or newer with BPF and uprobes, and root or CAP_BPF + CAP_PERFMON + CAP_SYS_ADMIN",
            self.kernel,
            missing.join("; ")
        )
    }
}

fn kernel() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map(|text| text.trim().to_string())
        .unwrap_or_else(|_| "unknown".into())
}

fn uprobes() -> io::Result<()> {
    perf::uprobe_type().map(|_| ())
}

fn mmap_events() -> io::Result<()> {
    perf::open_mappings(0).map(|_| ())
}

/// The part of `union bpf_attr` that making a map needs.
#[repr(C)]
#[derive(Default)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}

fn ring_buffer() -> io::Result<()> {
    let attributes = MapCreate {
        kind: BPF_MAP_TYPE_RINGBUF,
        // SAFETY: a query without side effects.
        max_entries: unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u32,
        ..MapCreate::default()
    };
    // SAFETY: the attributes hold no pointers.
    unsafe { multi::bpf_fd(BPF_MAP_CREATE, &attributes) }.map(|_| ())
}

/// `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn instruction(code: u8, destination: u8, source: u8, immediate: i32) -> Instruction {
    Instruction {
        code,
        registers: destination | source << 4,
        offset: 0,
        immediate,
    }
}

/// `call HELPER`.
const fn call(helper: i32) -> Instruction {
    instruction(0x85, 0, 0, helper)
}

/// `r0 = 0; exit`.
const END: [Instruction; 2] = [instruction(0xb7, 0, 0, 0), instruction(0x95, 0, 0, 0)];

fn cookie_program() -> Vec<Instruction> {
    [&[call(BPF_FUNC_GET_ATTACH_COOKIE)][..], &END].concat()
}

/// `bpf_get_stack(ctx, fp - 64, 64, BPF_F_USER_STACK)`.
fn stack_program() -> Vec<Instruction> {
    [
        &[
            instruction(0xbf, 2, 10, 0),
            instruction(0x07, 2, 0, -64),
            instruction(0xb7, 3, 0, 64),
            instruction(0xb7, 4, 0, BPF_F_USER_STACK),
            call(BPF_FUNC_GET_STACK),
        ][..],
        &END,
    ]
    .concat()
}

/// `bpf_loop(1, each, NULL, 0)`, with `each` behind it: `return 1`. A function that is called back
/// has to be described.
fn loop_program() -> (Vec<Instruction>, multi::Described) {
    /// `r2 = the function that begins six instructions further on`.
    const BPF_PSEUDO_FUNC: u8 = 4;
    let main = [
        instruction(0xb7, 1, 0, 1),
        instruction(0x18, 2, BPF_PSEUDO_FUNC, 6),
        instruction(0, 0, 0, 0),
        instruction(0xb7, 3, 0, 0),
        instruction(0xb7, 4, 0, 0),
        call(BPF_FUNC_LOOP),
    ];
    let each = [instruction(0xb7, 0, 0, 1), instruction(0x95, 0, 0, 0)];
    let program = [&main[..], &END, &each].concat();
    // Documentation/bpf/btf.rst: an int; a function that gives one; two functions of that type, the
    // first at instruction 0, the second at instruction 8.
    const STRINGS: &[u8] = b"\0int\0main\0each\0";
    const TYPES: [u32; 13] = [
        1,
        1 << 24,
        4,
        1 << 24 | 32,
        0,
        13 << 24,
        1,
        5,
        12 << 24,
        2,
        10,
        12 << 24,
        2,
    ];
    let bytes = size_of_val(&TYPES) as u32;
    let header = [24, 0, bytes, bytes, STRINGS.len() as u32];
    let mut btf = vec![0x9f, 0xeb, 1, 0];
    btf.extend(
        header
            .iter()
            .chain(&TYPES)
            .flat_map(|word| word.to_le_bytes()),
    );
    btf.extend_from_slice(STRINGS);
    let functions = [0u32, 3, 8, 4].iter().flat_map(|word| word.to_le_bytes());
    let described = multi::Described {
        btf,
        functions: functions.collect(),
        count: 2,
    };
    (program, described)
}

fn python_frames() -> io::Result<()> {
    let (program, described) = loop_program();
    multi::load_described(
        program.as_ptr().cast(),
        program.len(),
        c"GPL",
        multi::NO_ATTACH_TYPE,
        Some(&described),
    )?;
    btf::fsbase(btf::VMLINUX.as_ref())
        .map(|_| ())
        .map_err(io::Error::other)
}

fn load(program: &[Instruction]) -> io::Result<()> {
    multi::load_instructions(
        program.as_ptr().cast(),
        program.len(),
        c"GPL",
        multi::NO_ATTACH_TYPE,
    )
    .map(|_| ())
}

/// The kernel looks at the attach type before anything else: where it knows such links, hooking a
/// folder fails because it is no file.
fn multi_link() -> io::Result<()> {
    let program = multi::load_instructions(
        END.as_ptr().cast(),
        END.len(),
        c"GPL",
        multi::BPF_TRACE_UPROBE_MULTI,
    )?;
    debug_assert!(program.as_raw_fd() >= 0);
    let site = multi::Site {
        offset: 0,
        cookie: 0,
        counter: 0,
    };
    match multi::link(&program, std::path::Path::new("/"), &[site], false) {
        Err(error) if error.raw_os_error() == Some(libc::EBADF) => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::other("a folder could be hooked")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_ability_is_named_with_the_kernel() {
        let feature = |name: &str, available, required| Feature {
            name: name.into(),
            available,
            required,
            used: "it is for something".into(),
            reason: (!available).then(|| "Invalid argument".into()),
        };
        let mut features = Features {
            kernel: "5.4.0-150-generic".into(),
            features: vec![
                feature("ring_buffer", false, true),
                feature("uprobe_multi", false, false),
            ],
        };
        let error = features.require().unwrap_err().to_string();
        assert!(
            error.contains("kernel 5.4.0-150-generic") && error.contains("ring_buffer (Invalid"),
            "{error}"
        );
        assert!(!error.contains("uprobe_multi"), "{error}");
        features.features[0].available = true;
        features.require().unwrap();
        assert!(features.has("ring_buffer") && !features.has("uprobe_multi"));
    }
}
