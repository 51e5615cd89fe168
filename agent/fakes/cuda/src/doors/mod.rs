//! The doors: thin functions under the vendor's names and argument orders, which hand over to the
//! rest. Invariants:
//! - nothing here panics, since a panic must not cross into C: it would end the program;
//! - a null output pointer is refused with CUDA_ERROR_INVALID_VALUE;
//! - output parameters are `Option<&mut MaybeUninit<T>>`, which C sees as a pointer that may be
//!   null. That the pointer, where not null, points to a `T` is the caller's part, as with the vendor's;
//! - no door calls another, and each has code of its own, also where two names mean the same: a probe
//!   on one must not see the other's calls.

/// Keeps a function apart from those that do the same: an optimiser folds functions of equal code
/// into one, and this text makes the code unequal. It costs no instruction.
macro_rules! distinct {
    ($name:expr) => {
        // SAFETY: a comment in the assembler's language.
        unsafe {
            std::arch::asm!(
                concat!("# ", $name),
                options(nomem, nostack, preserves_flags)
            )
        }
    };
}

pub mod blocks;
pub mod contexts;
pub mod copies;
pub mod devices;
pub mod ipc;
pub mod names;
pub mod pools;
pub mod refused;
pub mod vmm;

use std::ffi::c_int;

use crate::{
    Out,
    codes::{CuResult, INVALID_VALUE, SUCCESS},
};

fn code(result: CuResult<()>) -> c_int {
    match result {
        Ok(()) => SUCCESS,
        Err(code) => code,
    }
}

/// Writes a result to where the caller wants it. Never inlined: a door's first instruction has to be
/// its frame's, not a look at `out`.
#[inline(never)]
fn put<T>(out: Out<T>, value: CuResult<T>) -> c_int {
    let Some(out) = out else {
        return INVALID_VALUE;
    };
    code(value.map(|value| {
        out.write(value);
    }))
}

/// As [`put`], for calls with an effect: without a place for the result they have none.
fn put_new<T>(out: Out<T>, make: impl FnOnce() -> CuResult<T>) -> c_int {
    let Some(out) = out else {
        return INVALID_VALUE;
    };
    code(make().map(|value| {
        out.write(value);
    }))
}
