//! Memory of the card, managed, pinned and registered memory, and arrays.

use std::ffi::{c_int, c_uint, c_void};

use super::code;
use crate::{
    Array, Out,
    blocks::{self, ArrayDescriptor, BY_ARRAY_DESTROY, BY_FREE, BY_FREE_HOST, BY_UNREGISTER},
    hook::{self, Moment},
};

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(address: Out<usize>, bytes: usize) -> c_int {
    hook::run(Moment::Before);
    let allocated = code(blocks::allocate_device(address, bytes));
    hook::run(Moment::After);
    allocated
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocPitch_v2(
    address: Out<usize>,
    pitch: Out<usize>,
    width: usize,
    height: usize,
    element_bytes: c_uint,
) -> c_int {
    code(blocks::allocate_pitched(
        address,
        pitch,
        width,
        height,
        element_bytes,
    ))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocManaged(address: Out<usize>, bytes: usize, flags: c_uint) -> c_int {
    code(blocks::allocate_managed(address, bytes, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: usize) -> c_int {
    code(blocks::free(BY_FREE, address))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(address: Out<usize>, bytes: usize) -> c_int {
    code(blocks::allocate_pinned(address, bytes, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(address: Out<usize>, bytes: usize, flags: c_uint) -> c_int {
    code(blocks::allocate_pinned(address, bytes, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: *mut c_void) -> c_int {
    code(blocks::free(BY_FREE_HOST, address as usize))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister(address: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    distinct!("cuMemHostRegister");
    code(blocks::register(address as usize, bytes, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    code(blocks::register(address as usize, bytes, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(address: *mut c_void) -> c_int {
    code(blocks::free(BY_UNREGISTER, address as usize))
}

/// CUDA_ARRAY_DESCRIPTOR.
#[repr(C)]
pub struct Descriptor2D {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

/// CUDA_ARRAY3D_DESCRIPTOR.
#[repr(C)]
pub struct Descriptor3D {
    width: usize,
    height: usize,
    depth: usize,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

impl Descriptor3D {
    fn descriptor(&self) -> ArrayDescriptor {
        ArrayDescriptor {
            width: self.width,
            height: self.height,
            depth: self.depth,
            format: self.format,
            channels: self.channels,
            flags: self.flags,
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuArrayCreate_v2(array: Out<Array>, descriptor: Option<&Descriptor2D>) -> c_int {
    let descriptor = descriptor.map(|given| ArrayDescriptor {
        width: given.width,
        height: given.height,
        depth: 0,
        format: given.format,
        channels: given.channels,
        flags: 0,
    });
    code(blocks::create_array(array, descriptor, None))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuArray3DCreate_v2(
    array: Out<Array>,
    descriptor: Option<&Descriptor3D>,
) -> c_int {
    let descriptor = descriptor.map(Descriptor3D::descriptor);
    code(blocks::create_array(array, descriptor, None))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuArrayDestroy(array: Array) -> c_int {
    code(blocks::free(BY_ARRAY_DESTROY, array))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMipmappedArrayCreate(
    array: Out<Array>,
    descriptor: Option<&Descriptor3D>,
    levels: c_uint,
) -> c_int {
    let descriptor = descriptor.map(Descriptor3D::descriptor);
    code(blocks::create_array(array, descriptor, Some(levels)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMipmappedArrayDestroy(array: Array) -> c_int {
    distinct!("cuMipmappedArrayDestroy");
    code(blocks::free(BY_ARRAY_DESTROY, array))
}
