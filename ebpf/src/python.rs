//! Frames of CPython, read where its interpreter keeps them (`vramscope_ebpf_abi::python`).
//!
//! The thread's state is found through the key under which CPython keeps it, as
//! `PyGILState_GetThisThreadState` does, so that it is there with the GIL released too; what says it
//! is a thread state must name this very thread. All reads are of user memory that may hold
//! anything: the worst that a wrong layout gives is no frames.
//!
//! Loops are the helper's `bpf_loop` (kernels from 5.17 on): unrolled by the verifier they would
//! cost nearly all of the million instructions it looks at. Kernels without it load the programs
//! that read no Python frames.

use core::ffi::c_void;

use aya_ebpf::{
    helpers::{
        bpf_get_current_task, bpf_probe_read_kernel,
        generated::{bpf_loop, bpf_map_update_elem, bpf_probe_read_user, bpf_ringbuf_output},
    },
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray},
};
use core::intrinsics::{AtomicOrdering, atomic_xadd};
use vramscope_ebpf_abi::Loss;
use vramscope_ebpf_abi::python::{
    CALL_PYTHON, CALL_PYTHON_LOST, Code, CodeRecord, ENTRY_FLAG, ENTRY_SHIM, FILE_BYTES,
    FRAME_ENTRY, FRAME_SHIM, FRAMES, Frame, Interpreter, KIND_PYTHON, KIND_PYTHON_CODE, Lost,
    NAME_BYTES, NO_CFRAME, NO_SPECIFIC, OWNED_BY_CSTACK, SPAN, TABLE_LARGE, TABLE_SMALL, WALK_CUT,
    WALK_FAULT, Walk, WalkFrames, fingerprint,
};

use crate::{BPF_F_NO_PREALLOC, BPF_NOEXIST, BPF_RB_NO_WAKEUP, EVENTS};

/// Threads and interpreters that are looked at for a thread's state, where the key does not lead to
/// it.
const STATES: u32 = 1024;
/// How long a thread's walks for a framework's events are counted, nanoseconds.
const LIMIT_NS: u64 = 100_000_000;

/// What one thread's walks need. The record is made here, so that the ring gets no byte more than
/// there are frames.
#[repr(C)]
pub struct PythonThread {
    pub record: WalkFrames,
    pub frame: [u64; SPAN / 8],
    pub print: [u64; SPAN / 8],
    /// The state that was found in the interpreter's lists.
    pub state: u64,
    pub limit_start_ns: u64,
    pub limit_walks: u64,
}

/// Interpreters by process, filled in by the agent.
#[map]
static PYTHON: HashMap<u32, Interpreter> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);

/// Keyed by thread id, made at a thread's first walk, removed at its exit. Its size is the loader's
/// to set.
#[map]
static PYTHON_THREADS: HashMap<u32, PythonThread> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);

/// One zeroed entry, never written.
#[map]
static NEW_PYTHON_THREAD: Array<PythonThread> = Array::with_max_entries(1, 0);

/// A code object whose names were sent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Seen {
    tgid: u64,
    code: u64,
    fingerprint: u64,
}

/// What was sent. One that is pushed out is sent again, which costs space in the ring alone.
#[map]
static PYTHON_SEEN: LruHashMap<Seen, u8> = LruHashMap::with_max_entries(65_536, 0);

/// By `Lost`.
#[map]
static PYTHON_LOST: PerCpuArray<u64> = PerCpuArray::with_max_entries(Lost::COUNT, 0);

#[inline(always)]
fn lose(cause: Lost) {
    if !matches!(cause, Lost::CodeRingFull) {
        crate::lose(Loss::PythonNotRead);
    }
    if let Some(count) = PYTHON_LOST.get_ptr_mut(cause as u32) {
        // SAFETY: the pointer is this CPU's slot; two programs on one CPU may interleave.
        unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(count, 1) };
    }
}

/// A process runs another program, or is over.
#[inline(always)]
pub fn forget_process(tgid: u32) {
    let _ = PYTHON.remove(tgid);
}

#[inline(always)]
pub fn forget_thread(tid: u32) {
    let _ = PYTHON_THREADS.remove(tid);
}

/// A word of user memory; 0 if there is none.
#[inline(always)]
fn word(address: u64) -> u64 {
    let mut value = 0u64;
    // SAFETY: eight bytes of a local; the helper checks the source.
    if unsafe { bpf_probe_read_user((&raw mut value).cast(), 8, address as *const _) } != 0 {
        return 0;
    }
    value
}

/// A word of a span, by its offset in bytes.
#[inline(always)]
fn at(span: &[u64; SPAN / 8], offset: u32) -> u64 {
    span[(offset >> 3) as usize & (SPAN / 8 - 1)]
}

#[inline(always)]
fn thread(tid: u32) -> Option<*mut PythonThread> {
    if let Some(thread) = PYTHON_THREADS.get_ptr_mut(tid) {
        return Some(thread);
    }
    let template = NEW_PYTHON_THREAD.get_ptr(0)?;
    // SAFETY: both pointers are valid for the map's key and value sizes; the kernel copies.
    unsafe {
        bpf_map_update_elem(
            (&raw const PYTHON_THREADS).cast_mut().cast(),
            (&raw const tid).cast(),
            template.cast(),
            BPF_NOEXIST,
        );
    }
    PYTHON_THREADS.get_ptr_mut(tid)
}

/// Walks the calling thread's Python frames and sends them, for the call of that time. Gives what
/// goes into the call's flags: 0 where there is no Python.
///
/// `limited`: at most as many as the agent allows for a framework's events.
#[inline(never)]
pub fn walk(pid_tgid: u64, enter_ns: u64, limited: bool) -> u32 {
    let Some(interpreter) = PYTHON.get_ptr((pid_tgid >> 32) as u32) else {
        return 0;
    };
    let Some(thread) = thread(pid_tgid as u32) else {
        lose(Lost::ThreadsFull);
        return CALL_PYTHON_LOST;
    };
    // SAFETY: the entry belongs to the running thread alone; no other program writes it.
    let thread = unsafe { &mut *thread };
    // SAFETY: an entry of the map, which the agent replaces as a whole.
    let python = unsafe { &*interpreter };
    if limited && is_over_limit(thread, python.framework_limit, enter_ns) {
        lose(Lost::Limited);
        return CALL_PYTHON_LOST;
    }
    let Some(frame) = current_frame(python, thread) else {
        return 0;
    };
    read_frames(pid_tgid, enter_ns, interpreter, thread, frame)
}

#[inline(always)]
fn is_over_limit(thread: &mut PythonThread, limit: u32, now_ns: u64) -> bool {
    if now_ns - thread.limit_start_ns >= LIMIT_NS {
        thread.limit_start_ns = now_ns;
        thread.limit_walks = 0;
    }
    thread.limit_walks += 1;
    thread.limit_walks > u64::from(limit)
}

/// The innermost frame of this thread; `None` if it runs no Python.
#[inline(always)]
fn current_frame(python: &Interpreter, thread: &mut PythonThread) -> Option<u64> {
    // SAFETY: a helper without arguments.
    let task = unsafe { bpf_get_current_task() };
    let place = (task + u64::from(python.fsbase)) as *const u64;
    // SAFETY: the helper checks the address.
    let own = unsafe { bpf_probe_read_kernel(place) }.ok()?;
    let is_own = |state: u64| state != 0 && word(state + u64::from(python.thread_id)) == own;
    let mut state = by_key(python, own);
    if !is_own(state) {
        state = thread.state;
        if !is_own(state) {
            state = by_lists(python, own);
            if state == 0 {
                return None;
            }
            thread.state = state;
        }
    }
    let mut frame = word(state + u64::from(python.thread_frame));
    if python.cframe_frame != NO_CFRAME && frame != 0 {
        frame = word(frame + u64::from(python.cframe_frame));
    }
    if frame == 0 { None } else { Some(frame) }
}

/// What `pthread_getspecific` gives: the C library keeps 32 keys to a block, each a number and a
/// value (`struct pthread_key_data`).
#[inline(always)]
fn by_key(python: &Interpreter, own: u64) -> u64 {
    if python.specific == NO_SPECIFIC {
        return 0;
    }
    // `Py_tss_t` has its key behind the word that says whether there is one.
    let both = word(python.key - 4);
    if both as u32 == 0 {
        return 0;
    }
    let key = both >> 32;
    let block = word(own + u64::from(python.specific) + (key >> 5) * 8);
    if block == 0 {
        return 0;
    }
    word(block + (key & 31) * 16 + 8)
}

#[repr(C)]
struct Search {
    python: *const Interpreter,
    interpreter: u64,
    state: u64,
    own: u64,
    found: u64,
}

#[inline(always)]
fn by_lists(python: &Interpreter, own: u64) -> u64 {
    let interpreter = word(python.runtime + u64::from(python.first_interpreter));
    if interpreter == 0 {
        return 0;
    }
    let mut search = Search {
        python,
        interpreter,
        state: word(interpreter + u64::from(python.first_thread)),
        own,
        found: 0,
    };
    // SAFETY: the callback takes what it is given here, which lives until the helper is done.
    unsafe {
        bpf_loop(
            STATES,
            look_at_state as *mut c_void,
            (&raw mut search).cast(),
            0,
        )
    };
    search.found
}

unsafe extern "C" fn look_at_state(_index: u32, search: *mut c_void) -> i64 {
    // SAFETY: what `by_lists` gave.
    let search = unsafe { &mut *search.cast::<Search>() };
    // SAFETY: as above.
    let python = unsafe { &*search.python };
    if search.state == 0 {
        search.interpreter = word(search.interpreter + u64::from(python.next_interpreter));
        if search.interpreter == 0 {
            return 1;
        }
        search.state = word(search.interpreter + u64::from(python.first_thread));
        return 0;
    }
    if word(search.state + u64::from(python.thread_id)) == search.own {
        search.found = search.state;
        return 1;
    }
    search.state = word(search.state + u64::from(python.next_thread));
    0
}

#[repr(C)]
struct Reading {
    python: *const Interpreter,
    thread: *mut PythonThread,
    frame: u64,
    tgid: u64,
    count: u32,
    flags: u32,
}

#[inline(never)]
fn read_frames(
    pid_tgid: u64,
    enter_ns: u64,
    python: *const Interpreter,
    thread: *mut PythonThread,
    frame: u64,
) -> u32 {
    let mut reading = Reading {
        python,
        thread,
        frame,
        tgid: pid_tgid >> 32,
        count: 0,
        flags: 0,
    };
    // SAFETY: the callback takes what it is given here, which lives until the helper is done.
    unsafe {
        bpf_loop(
            FRAMES as u32,
            read_frame as *mut c_void,
            (&raw mut reading).cast(),
            0,
        )
    };
    let mut flags = reading.flags;
    if reading.frame != 0 {
        flags |= WALK_CUT;
    }
    if flags & WALK_FAULT != 0 {
        lose(Lost::Fault);
    }
    if reading.count == 0 {
        return CALL_PYTHON_LOST;
    }
    // SAFETY: the entry belongs to the running thread alone.
    let thread = unsafe { &mut *thread };
    thread.record.walk = Walk {
        kind: KIND_PYTHON,
        tgid: (pid_tgid >> 32) as u32,
        tid: pid_tgid as u32,
        frames: reading.count,
        enter_ns,
        flags,
        // SAFETY: an entry of the map.
        version: unsafe { (*python).version },
    };
    let bytes = size_of::<Walk>() as u64
        + size_of::<Frame>() as u64 * (u64::from(reading.count) & (2 * FRAMES as u64 - 1));
    let bytes = bytes.min(size_of::<WalkFrames>() as u64);
    // SAFETY: so many bytes of the record were written just now. The call's record wakes the agent.
    let sent = unsafe {
        bpf_ringbuf_output(
            (&raw const EVENTS).cast_mut().cast(),
            (&raw mut thread.record).cast(),
            bytes,
            BPF_RB_NO_WAKEUP,
        )
    };
    if sent != 0 {
        lose(Lost::RingFull);
        return CALL_PYTHON_LOST;
    }
    CALL_PYTHON
}

unsafe extern "C" fn read_frame(index: u32, reading: *mut c_void) -> i64 {
    // SAFETY: what `read_frames` gave.
    let reading = unsafe { &mut *reading.cast::<Reading>() };
    // SAFETY: as above.
    let (python, thread) = unsafe { (&*reading.python, &mut *reading.thread) };
    let from = reading.frame;
    if from == 0 {
        return 1;
    }
    let span = (&raw mut thread.frame).cast();
    let start = (from + u64::from(python.frame_start)) as *const c_void;
    // SAFETY: at most the span's size is written; the helper checks the source.
    let fault = unsafe { bpf_probe_read_user(span, python.frame_bytes & (SPAN as u32 - 1), start) };
    if fault != 0 {
        reading.flags |= WALK_FAULT;
        reading.frame = 0;
        return 1;
    }
    let code = at(&thread.frame, python.frame_code);
    let mark = at(&thread.frame, python.frame_entry) >> ((python.frame_entry & 7) * 8) & 0xff;
    let mut flags = FRAME_ENTRY;
    if python.entry == ENTRY_FLAG {
        flags = if mark != 0 { FRAME_ENTRY } else { 0 };
    } else if python.entry == ENTRY_SHIM {
        flags = if mark == OWNED_BY_CSTACK {
            FRAME_SHIM
        } else {
            0
        };
    }
    let mut instruction = at(&thread.frame, python.frame_instruction);
    if python.code_body != 0 {
        instruction = instruction - code - u64::from(python.code_body);
    }
    let mut print = 0;
    if flags & FRAME_SHIM == 0 {
        print = fingerprint_of(python, thread, code);
    }
    let slot = index as usize & (FRAMES - 1);
    thread.record.frames[slot] = Frame {
        code,
        fingerprint: print,
        instruction: instruction as i32,
        flags,
    };
    reading.frame = at(&thread.frame, python.frame_previous);
    reading.count = index + 1;
    if flags & FRAME_SHIM == 0 {
        let seen = Seen {
            tgid: reading.tgid,
            code,
            fingerprint: print,
        };
        // SAFETY: the value is not used.
        if unsafe { PYTHON_SEEN.get(seen) }.is_none()
            && tell_code(reading.tgid, python, code, print)
        {
            let _ = PYTHON_SEEN.insert(seen, 1, 0);
        }
    }
    0
}

#[inline(always)]
fn fingerprint_of(python: &Interpreter, thread: &mut PythonThread, code: u64) -> u64 {
    let span = (&raw mut thread.print).cast();
    let start = (code + u64::from(python.print_start)) as *const c_void;
    // SAFETY: at most the span's size is written; the helper checks the source.
    let fault = unsafe { bpf_probe_read_user(span, python.print_bytes & (SPAN as u32 - 1), start) };
    if fault != 0 {
        return 0;
    }
    let mut name = 0;
    if python.print_name != 0 {
        // The hash that a string object keeps of itself.
        name = word(at(&thread.print, python.print_name) + 24);
    }
    fingerprint(
        at(&thread.print, python.print_first),
        at(&thread.print, python.print_table),
        name,
    )
}

/// Sends a code object's names. True if there is no use in trying again.
#[inline(always)]
fn tell_code(tgid: u64, python: &Interpreter, code: u64, print: u64) -> bool {
    // What the second word of every object says. If it is none, nothing of it is to be believed.
    if word(code + 8) != python.code_type {
        return false;
    }
    // A bytes object: its length, its hash, its bytes.
    let table = word(code + u64::from(python.code_table));
    if word(table + 16) <= TABLE_SMALL as u64 {
        send_code::<TABLE_SMALL>(tgid, python, code, print, table)
    } else {
        send_code::<TABLE_LARGE>(tgid, python, code, print, table)
    }
}

#[inline(never)]
fn send_code<const TABLE: usize>(
    tgid: u64,
    python: &Interpreter,
    code: u64,
    print: u64,
    table: u64,
) -> bool {
    let Some(mut entry) = EVENTS.reserve::<CodeRecord<TABLE>>(0) else {
        lose(Lost::CodeRingFull);
        return false;
    };
    let record = entry.as_mut_ptr();
    let length = word(table + 16);
    let file = word(code + u64::from(python.code_file));
    let name = word(code + u64::from(python.code_name));
    let (file_length, file_state) = (word(file + 16), word(file + 32));
    let (name_length, name_state) = (word(name + 16), word(name + 32));
    // SAFETY: the record is ours until it is submitted, and no more is written than it has.
    unsafe {
        (*record).code = Code {
            kind: KIND_PYTHON_CODE,
            tgid: tgid as u32,
            code,
            fingerprint: print,
            version: python.version,
            first_line: word(code + u64::from(python.code_first_line)) as i32,
            file_length: file_length as u32,
            file_state: file_state as u32,
            name_length: name_length as u32,
            name_state: name_state as u32,
            table_length: length as u32,
            table_room: TABLE as u32,
        };
        // Of a long path the end tells more.
        let bytes = string_bytes(file_length, file_state);
        let skipped = bytes.saturating_sub(FILE_BYTES as u64);
        copy::<FILE_BYTES>(
            &raw mut (*record).file,
            string_start(python, file, file_state) + skipped,
            bytes,
        );
        copy::<NAME_BYTES>(
            &raw mut (*record).name,
            string_start(python, name, name_state),
            string_bytes(name_length, name_state),
        );
        copy::<TABLE>(&raw mut (*record).table, table + 32, length);
    }
    entry.submit(BPF_RB_NO_WAKEUP);
    true
}

/// Copies what there is, and at most what there is room for; what cannot be read is zeros.
#[inline(always)]
fn copy<const ROOM: usize>(to: *mut [u8; ROOM], from: u64, bytes: u64) {
    let mut bytes = bytes;
    if bytes > ROOM as u64 {
        bytes = ROOM as u64;
    }
    // The compiler must not put the comparison elsewhere: the verifier has to see it.
    let bytes = core::hint::black_box(bytes as u32);
    if bytes > ROOM as u32 {
        return;
    }
    // SAFETY: at most the room; the helper checks the source, and fills with zeros on a fault.
    unsafe { bpf_probe_read_user(to.cast(), bytes, from as *const c_void) };
}

// `PyUnicodeObject.state`: two bits `interned`, three of the kind (bytes of a character), one
// `compact`, one `ascii`.

#[inline(always)]
fn string_bytes(length: u64, state: u64) -> u64 {
    length * (state >> 2 & 7)
}

#[inline(always)]
fn string_start(python: &Interpreter, string: u64, state: u64) -> u64 {
    let header = if state & 0x40 != 0 {
        python.ascii
    } else {
        python.compact
    };
    string + u64::from(header)
}
