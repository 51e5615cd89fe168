//! Device memory of another process.

use std::ffi::{c_int, c_uint};

use super::{code, put, put_new};
use crate::{
    Out,
    ipc::{self, Handle},
};

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcGetMemHandle(handle: Out<Handle>, address: usize) -> c_int {
    put(handle, ipc::export(address))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcOpenMemHandle(address: Out<usize>, handle: Handle, flags: c_uint) -> c_int {
    distinct!("cuIpcOpenMemHandle");
    put_new(address, || ipc::open(handle, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcOpenMemHandle_v2(
    address: Out<usize>,
    handle: Handle,
    flags: c_uint,
) -> c_int {
    put_new(address, || ipc::open(handle, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcCloseMemHandle(address: usize) -> c_int {
    code(ipc::close(address))
}
