//! Stacks by frame pointers.

use aya_ebpf::helpers::generated::bpf_probe_read_user as read_user;
use vramscope_ebpf_abi::STACK_FRAMES;

use crate::{PIECE_WORDS, Thread};

/// Return addresses by frame pointers, innermost first, into the thread's record; gives how many.
///
/// `bpf_get_stack` does the same with two guarded reads a frame, some 90 ns each on a virtual
/// machine. Frames lie close together, so here a piece of the stack is copied at once and walked.
#[inline(always)]
pub fn walk_stack(thread: &mut Thread, returns_to: u64, frame_pointer: u64) -> u32 {
    const PIECE_BYTES: u64 = PIECE_WORDS as u64 * 8;
    thread.record.stack[0] = returns_to;
    let mut frames = 1u32;
    let mut pointer = frame_pointer;
    let (mut start, mut end) = (0u64, 0u64);
    for _ in 1..STACK_FRAMES {
        if pointer & 7 != 0 || pointer == 0 {
            break;
        }
        if pointer < start || pointer + 16 > end {
            let piece = (&raw mut thread.piece).cast();
            let from = pointer as *const core::ffi::c_void;
            // SAFETY: the helper writes at most the piece's size, and checks the source.
            let whole = unsafe { read_user(piece, PIECE_BYTES as u32, from) } == 0;
            // Near the end of the stack there may be no more than the frame itself.
            // SAFETY: as above.
            if !whole && unsafe { read_user(piece, 16, from) } != 0 {
                break;
            }
            start = pointer;
            end = pointer + if whole { PIECE_BYTES } else { 16 };
        }
        let at = ((pointer - start) >> 3) as usize;
        let next = thread.piece[at & (PIECE_WORDS - 1)];
        let address = thread.piece[(at + 1) & (PIECE_WORDS - 1)];
        if address == 0 {
            break;
        }
        thread.record.stack[(frames as usize) & (STACK_FRAMES - 1)] = address;
        frames += 1;
        // The stack grows down: a caller's frame lies above.
        if next <= pointer {
            break;
        }
        pointer = next;
    }
    frames
}
