//! Stand-in for `libcuda.so.1`: the documented part of the driver API that allocates, on two cards
//! of 8 GiB that are really address space of the process.
//!
//! [`doors`] holds the functions under the vendor's names, [`state`] what guards a process's memory
//! and its contexts; [`blocks`], [`pools`], [`vmm`] and [`ipc`] are the sorts of memory, [`memory`]
//! the address space under them, [`copies`] what lies in it, [`symbols`] the functions by name.

mod blocks;
mod codes;
mod copies;
mod doors;
mod hook;
mod ipc;
mod memory;
mod pools;
mod state;
mod symbols;
mod vmm;

use std::mem::MaybeUninit;

/// An output parameter: in C a pointer.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// CUcontext: an opaque handle, 0 for none.
type Context = usize;
/// CUstream: an opaque handle; 0, 1 and 2 are built in.
type Stream = usize;
/// CUarray and CUmipmappedArray: opaque handles.
type Array = usize;
/// CUmemoryPool: an opaque handle.
type Pool = usize;
/// CUmemGenericAllocationHandle: 64 bits, opaque.
type Memory = usize;
