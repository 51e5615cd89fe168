//! The driver's functions for what is no allocation: devices, copies, streams, names.

use std::ffi::{CStr, c_int, c_uint, c_void};

use super::{Driver, check, output};
use crate::codes::{CudaResult, SUCCESS};

impl Driver {
    pub fn device_attribute(&self, attribute: c_int, device: c_int) -> CudaResult<c_int> {
        // SAFETY: one output and plain numbers.
        output(|value| unsafe { (self.device_get_attribute)(value, attribute, device) })
    }

    /// A device's name, with its zero byte.
    pub fn device_name(&self, device: c_int) -> CudaResult<[u8; 256]> {
        let mut name = [0u8; 256];
        // SAFETY: the room is as long as is said.
        check(unsafe { (self.device_get_name)(name.as_mut_ptr().cast(), 256, device) })?;
        Ok(name)
    }

    pub fn device_uuid(&self, device: c_int) -> CudaResult<[u8; 16]> {
        // SAFETY: one output and a plain number.
        output(|uuid| unsafe { (self.device_get_uuid)(uuid, device) })
    }

    pub fn device_bytes(&self, device: c_int) -> CudaResult<usize> {
        // SAFETY: one output and a plain number.
        output(|bytes| unsafe { (self.device_total_mem)(bytes, device) })
    }

    pub fn query_stream(&self, stream: usize) -> CudaResult<()> {
        // SAFETY: the driver checks the handle.
        check(unsafe { (self.stream_query)(stream) })
    }

    /// Copies; on a stream if one is given.
    ///
    /// # Safety
    /// What is not the card's has to be readable at `source`, writable at `target`.
    pub unsafe fn copy(
        &self,
        target: usize,
        source: usize,
        bytes: usize,
        stream: Option<usize>,
    ) -> CudaResult<()> {
        // SAFETY: the caller's promise; the driver checks what is the card's, and the handle.
        check(unsafe {
            match stream {
                None => (self.memcpy)(target, source, bytes),
                Some(stream) => (self.memcpy_async)(target, source, bytes, stream),
            }
        })
    }

    /// Fills with a byte; on a stream if one is given.
    ///
    /// # Safety
    /// What is not the card's has to be writable at `target`.
    pub unsafe fn fill(
        &self,
        target: usize,
        value: u8,
        bytes: usize,
        stream: Option<usize>,
    ) -> CudaResult<()> {
        // SAFETY: the caller's promise; the driver checks what is the card's, and the handle.
        check(unsafe {
            match stream {
                None => (self.memset)(target, value, bytes),
                Some(stream) => (self.memset_async)(target, value, bytes, stream),
            }
        })
    }

    /// An attribute of an address that is an `int`.
    pub fn pointer_number(&self, attribute: c_uint, address: usize) -> CudaResult<c_int> {
        // SAFETY: room for the attribute, which the caller knows to be an `int`.
        output(|value: *mut c_int| unsafe {
            (self.pointer_get_attribute)(value.cast(), attribute, address)
        })
    }

    pub fn set_pool_access(
        &self,
        pool: usize,
        descriptions: *const c_void,
        count: usize,
    ) -> CudaResult<()> {
        // SAFETY: the driver checks the handle, and does not look at the descriptions.
        check(unsafe { (self.mem_pool_set_access)(pool, descriptions, count) })
    }

    /// The address of one of the driver's functions, and whether it was found, as
    /// CUdriverProcAddressQueryResult has it.
    pub fn entry_point(&self, name: &CStr, version: c_int, flags: u64) -> (*mut c_void, c_int) {
        let mut address = std::ptr::null_mut();
        let mut status = 0;
        // SAFETY: a string with its zero byte and two outputs, as documented.
        let code = unsafe { (self.get)(name.as_ptr(), &mut address, version, flags, &mut status) };
        if code == SUCCESS {
            (address, status)
        } else {
            (std::ptr::null_mut(), status)
        }
    }
}
