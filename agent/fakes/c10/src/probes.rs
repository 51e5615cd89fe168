//! The probes and the functions that are probed, in assembler, so that each place has its arguments
//! exactly where its note says.
//!
//! A note (`sys/sdt.h`, version 3) names the place, no base, the counter, provider, name and
//! arguments. The forms: those of PyTorch 2.15.0's own two places, and others that compilers write.

use std::arch::{global_asm, naked_asm};
use std::ffi::c_int;

/// Places of `pytorch:malloc`, and of `pytorch:free`.
pub const MALLOC_PLACES: c_int = 4;
pub const FREE_PLACES: c_int = 3;

type Malloc = unsafe extern "C" fn(address: u64, device: u64, bytes: u64, stream: i64);
type Free = unsafe extern "C" fn(address: u64);

global_asm!(
    // name, label, counter, arguments
    ".macro fake_c10_note name, place, counter, arguments",
    ".pushsection .note.stapsdt, \"\", \"note\"",
    ".balign 4",
    ".4byte 992f - 991f, 994f - 993f, 3",
    "991: .asciz \"stapsdt\"",
    "992: .balign 4",
    "993: .8byte \\place",
    ".8byte 0",
    ".8byte \\counter",
    ".asciz \"pytorch\"",
    ".asciz \"\\name\"",
    ".asciz \"\\arguments\"",
    "994: .balign 4",
    ".popsection",
    ".endm",
    // The counters that listeners raise.
    ".pushsection .probes, \"aw\", \"progbits\"",
    ".balign 2",
    "fake_c10_counter_malloc: .2byte 0",
    "fake_c10_counter_free: .2byte 0",
    ".popsection",
    ".text",
    // What a listener's program sees of the counters: malloc in the lower half.
    ".globl fake_c10_counters",
    ".hidden fake_c10_counters",
    "fake_c10_counters:",
    "movl fake_c10_counter_malloc(%rip), %eax",
    "ret",
    // Place 0, as in `allocateWithAddress`: -8@%rbp -1@%al -8@%r12 -8@56(%rsp)
    ".globl fake_c10_malloc_0",
    ".hidden fake_c10_malloc_0",
    "fake_c10_malloc_0:",
    "push %rbp",
    "push %r12",
    "sub $72, %rsp",
    "mov %rdi, %rbp",
    "mov %esi, %eax",
    "or $0x7f00, %eax",
    "mov %rdx, %r12",
    "mov %rcx, 56(%rsp)",
    "fake_c10_place_malloc_0: nop",
    "add $72, %rsp",
    "pop %r12",
    "pop %rbp",
    "ret",
    // Place 1, as in `allocate`: -8@%rax -1@%dl -8@%r14 -8@-56(%rbp)
    ".globl fake_c10_malloc_1",
    ".hidden fake_c10_malloc_1",
    "fake_c10_malloc_1:",
    "push %rbp",
    "mov %rsp, %rbp",
    "push %r14",
    "sub $72, %rsp",
    "mov %rdi, %rax",
    "mov %rdx, %r14",
    "mov %esi, %edx",
    "mov %rcx, -56(%rbp)",
    "fake_c10_place_malloc_1: nop",
    "add $72, %rsp",
    "pop %r14",
    "pop %rbp",
    "ret",
    // Place 2, base and index, a wide register, a high byte: 8@8(%rsp,%rcx,8) -1@%dh 8@%rsi -8@%r9
    ".globl fake_c10_malloc_2",
    ".hidden fake_c10_malloc_2",
    "fake_c10_malloc_2:",
    "push %rbp",
    "mov %rsp, %rbp",
    "sub $32, %rsp",
    "mov %rdi, 24(%rsp)",
    "mov %rcx, %r9",
    "mov $2, %ecx",
    "mov %rsi, %rax",
    "mov %rdx, %rsi",
    "xor %edx, %edx",
    "mov %al, %dh",
    "fake_c10_place_malloc_2: nop",
    "add $32, %rsp",
    "pop %rbp",
    "ret",
    // Place 3, memory of less than a word: -8@(%rdi) -1@16(%rdi) -8@%rdx -4@8(%rdi)
    ".globl fake_c10_malloc_3",
    ".hidden fake_c10_malloc_3",
    "fake_c10_malloc_3:",
    "push %rbp",
    "mov %rsp, %rbp",
    "sub $32, %rsp",
    "mov %rdi, (%rsp)",
    "movl %ecx, 8(%rsp)",
    "movl $0x55555555, 12(%rsp)",
    "movl $0x55555500, 16(%rsp)",
    "mov %sil, 16(%rsp)",
    "mov %rsp, %rdi",
    "fake_c10_place_malloc_3: nop",
    "add $32, %rsp",
    "pop %rbp",
    "ret",
    // Places of free: -8@%rdi, -8@%rbx, 8@8(%rsp)
    ".globl fake_c10_free_0",
    ".hidden fake_c10_free_0",
    "fake_c10_free_0:",
    "push %rbp",
    "mov %rsp, %rbp",
    "fake_c10_place_free_0: nop",
    "pop %rbp",
    "ret",
    ".globl fake_c10_free_1",
    ".hidden fake_c10_free_1",
    "fake_c10_free_1:",
    "push %rbx",
    "mov %rdi, %rbx",
    "xor %edi, %edi",
    "fake_c10_place_free_1: nop",
    "pop %rbx",
    "ret",
    ".globl fake_c10_free_2",
    ".hidden fake_c10_free_2",
    "fake_c10_free_2:",
    "push %rbp",
    "mov %rsp, %rbp",
    "sub $32, %rsp",
    "mov %rdi, 8(%rsp)",
    "xor %edi, %edi",
    "fake_c10_place_free_2: nop",
    "add $32, %rsp",
    "pop %rbp",
    "ret",
    "fake_c10_note malloc, fake_c10_place_malloc_0, fake_c10_counter_malloc, \"-8@%rbp -1@%al -8@%r12 -8@56(%rsp)\"",
    "fake_c10_note malloc, fake_c10_place_malloc_1, fake_c10_counter_malloc, \"-8@%rax -1@%dl -8@%r14 -8@-56(%rbp)\"",
    "fake_c10_note malloc, fake_c10_place_malloc_2, fake_c10_counter_malloc, \"8@8(%rsp,%rcx,8) -1@%dh 8@%rsi -8@%r9\"",
    "fake_c10_note malloc, fake_c10_place_malloc_3, fake_c10_counter_malloc, \"-8@(%rdi) -1@16(%rdi) -8@%rdx -4@8(%rdi)\"",
    "fake_c10_note free, fake_c10_place_free_0, fake_c10_counter_free, \"-8@%rdi\"",
    "fake_c10_note free, fake_c10_place_free_1, fake_c10_counter_free, \"-8@%rbx\"",
    "fake_c10_note free, fake_c10_place_free_2, fake_c10_counter_free, \"8@8(%rsp)\"",
    options(att_syntax)
);

unsafe extern "C" {
    fn fake_c10_counters() -> u32;
    fn fake_c10_malloc_0(address: u64, device: u64, bytes: u64, stream: i64);
    fn fake_c10_malloc_1(address: u64, device: u64, bytes: u64, stream: i64);
    fn fake_c10_malloc_2(address: u64, device: u64, bytes: u64, stream: i64);
    fn fake_c10_malloc_3(address: u64, device: u64, bytes: u64, stream: i64);
    fn fake_c10_free_0(address: u64);
    fn fake_c10_free_1(address: u64);
    fn fake_c10_free_2(address: u64);
}

/// What the first function loads before it saves a register.
static NOBODY: u64 = 0;

/// `c10::reportMemoryUsageToProfiler(void*, long, unsigned long, unsigned long, c10::Device)`: looks
/// at its arguments alone. It begins as PyTorch's own does, with a load and a `push`.
#[unsafe(export_name = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE")]
#[unsafe(naked)]
pub extern "C" fn report_memory_usage(
    address: u64,
    bytes: i64,
    allocated: u64,
    reserved: u64,
    device: u64,
) {
    naked_asm!(
        "mov {nobody}(%rip), %rax",
        "push %r14",
        "mov %r8d, %r14d",
        "pop %r14",
        "ret",
        nobody = sym NOBODY,
        options(att_syntax)
    )
}

/// `c10::reportOutOfMemoryToProfiler(long, unsigned long, unsigned long, c10::Device)`
#[unsafe(export_name = "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE")]
#[unsafe(naked)]
pub extern "C" fn report_out_of_memory(bytes: i64, allocated: u64, reserved: u64, device: u64) {
    naked_asm!(
        "push %r13",
        "mov %ecx, %r13d",
        "pop %r13",
        "ret",
        options(att_syntax)
    )
}

/// Listeners of malloc and of free.
pub fn listeners() -> (u16, u16) {
    // SAFETY: the function reads the two counters and returns.
    let both = unsafe { fake_c10_counters() };
    (both as u16, (both >> 16) as u16)
}

/// Passes a place of `pytorch:malloc`, if anybody listens.
pub fn malloc(place: c_int, address: u64, device: u8, bytes: u64, stream: i64) {
    const PLACES: [Malloc; MALLOC_PLACES as usize] = [
        fake_c10_malloc_0,
        fake_c10_malloc_1,
        fake_c10_malloc_2,
        fake_c10_malloc_3,
    ];
    if listeners().0 == 0 {
        return;
    }
    let place = PLACES[place as usize % PLACES.len()];
    // SAFETY: the functions move their arguments about, inside their own stack frames, and return.
    unsafe { place(address, u64::from(device), bytes, stream) };
}

/// Passes a place of `pytorch:free`, if anybody listens.
pub fn free(place: c_int, address: u64) {
    const PLACES: [Free; FREE_PLACES as usize] =
        [fake_c10_free_0, fake_c10_free_1, fake_c10_free_2];
    if listeners().1 == 0 {
        return;
    }
    let place = PLACES[place as usize % PLACES.len()];
    // SAFETY: as above.
    unsafe { place(address) };
}
