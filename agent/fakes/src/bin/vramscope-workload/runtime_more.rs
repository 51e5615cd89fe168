//! The runtime's calls for memory other than plain: managed, pitched, arrays, pools, other processes'.

use std::ffi::{c_int, c_uint, c_void};

use super::library::output;
use super::runtime::{
    Address, ChannelFormat, DefaultStream, Extent, IpcHandle, PitchedPointer, PoolProperties,
    Runtime, of_pointer,
};

/// cudaMemAttachGlobal.
const ATTACH_GLOBAL: c_uint = 1;
/// cudaIpcMemLazyEnablePeerAccess.
const LAZY_PEER_ACCESS: c_uint = 1;

impl Runtime {
    pub fn try_malloc_managed(&self, bytes: usize) -> Result<Address, c_int> {
        let function = self.functions.malloc_managed;
        // SAFETY: one output and plain numbers.
        output!(|address| unsafe { function(address, bytes, ATTACH_GLOBAL) }).map(of_pointer)
    }

    pub fn malloc_managed(&self, bytes: usize) -> anyhow::Result<Address> {
        self.expect("cudaMallocManaged", self.try_malloc_managed(bytes))
    }

    /// The address and the bytes of a row.
    pub fn malloc_pitch(&self, width: usize, height: usize) -> anyhow::Result<(Address, usize)> {
        let (mut address, mut pitch) = (std::ptr::null_mut(), 0);
        let function = self.functions.malloc_pitch;
        // SAFETY: two outputs and plain numbers.
        let code = unsafe { function(&mut address, &mut pitch, width, height) };
        self.check("cudaMallocPitch", code)?;
        Ok((of_pointer(address), pitch))
    }

    /// The address and the bytes of a row.
    pub fn malloc_3d(&self, extent: Extent) -> anyhow::Result<(Address, usize)> {
        let function = self.functions.malloc_3d;
        // SAFETY: one output and plain numbers.
        let made = output!(|pointer: *mut PitchedPointer| unsafe { function(pointer, extent) });
        let pointer = self.expect("cudaMalloc3D", made)?;
        Ok((of_pointer(pointer.address), pointer.pitch))
    }

    pub fn try_malloc_array(
        &self,
        format: &ChannelFormat,
        width: usize,
        height: usize,
    ) -> Result<usize, c_int> {
        let function = self.functions.malloc_array;
        // SAFETY: one output, a format that lives through the call, and plain numbers.
        output!(|array| unsafe { function(array, format, width, height, 0) })
    }

    pub fn malloc_3d_array(
        &self,
        format: &ChannelFormat,
        extent: Extent,
        flags: c_uint,
    ) -> anyhow::Result<usize> {
        let function = self.functions.malloc_3d_array;
        // SAFETY: one output, a format that lives through the call, and plain numbers.
        let made = output!(|array| unsafe { function(array, format, extent, flags) });
        self.expect("cudaMalloc3DArray", made)
    }

    pub fn malloc_mipmapped_array(
        &self,
        format: &ChannelFormat,
        extent: Extent,
        levels: c_uint,
    ) -> anyhow::Result<usize> {
        let function = self.functions.malloc_mipmapped_array;
        // SAFETY: one output, a format that lives through the call, and plain numbers.
        let made = output!(|array| unsafe { function(array, format, extent, levels, 0) });
        self.expect("cudaMallocMipmappedArray", made)
    }

    pub fn try_free_array(&self, array: usize) -> c_int {
        // SAFETY: the runtime checks the handle.
        unsafe { (self.functions.free_array)(array) }
    }

    pub fn free_mipmapped_array(&self, array: usize) -> anyhow::Result<()> {
        // SAFETY: the runtime checks the handle.
        let code = unsafe { (self.functions.free_mipmapped_array)(array) };
        self.check("cudaFreeMipmappedArray", code)
    }

    /// A slice of a pool, or of the device's current one, on the default stream.
    pub fn try_malloc_async(
        &self,
        bytes: usize,
        pool: Option<usize>,
        default: DefaultStream,
    ) -> Result<Address, c_int> {
        let functions = &self.functions;
        // SAFETY: one output, plain numbers, and a handle that the runtime checks.
        output!(|address| unsafe {
            match (pool, default) {
                (Some(pool), _) => (functions.malloc_from_pool)(address, bytes, pool, 0),
                (None, DefaultStream::Legacy) => (functions.malloc_async)(address, bytes, 0),
                (None, DefaultStream::PerThread) => {
                    (functions.malloc_async_ptsz)(address, bytes, 0)
                }
            }
        })
        .map(of_pointer)
    }

    pub fn malloc_async(&self, bytes: usize) -> anyhow::Result<Address> {
        let made = self.try_malloc_async(bytes, None, DefaultStream::Legacy);
        self.expect("cudaMallocAsync", made)
    }

    pub fn malloc_from_pool(&self, bytes: usize, pool: usize) -> anyhow::Result<Address> {
        let made = self.try_malloc_async(bytes, Some(pool), DefaultStream::Legacy);
        self.expect("cudaMallocFromPoolAsync", made)
    }

    pub fn try_free_async(&self, address: Address, default: DefaultStream) -> c_int {
        let function = match default {
            DefaultStream::Legacy => self.functions.free_async,
            DefaultStream::PerThread => self.functions.free_async_ptsz,
        };
        // SAFETY: the runtime checks the address.
        unsafe { function(address.0 as *mut c_void, 0) }
    }

    pub fn free_async(&self, address: Address) -> anyhow::Result<()> {
        let code = self.try_free_async(address, DefaultStream::Legacy);
        self.check("cudaFreeAsync", code)
    }

    pub fn synchronize_stream(&self) -> anyhow::Result<()> {
        // SAFETY: the default stream.
        let code = unsafe { (self.functions.stream_synchronize)(0) };
        self.check("cudaStreamSynchronize", code)
    }

    pub fn default_pool(&self, device: c_int) -> anyhow::Result<usize> {
        let function = self.functions.default_pool;
        // SAFETY: one output and a plain number.
        let found = output!(|pool| unsafe { function(pool, device) });
        self.expect("cudaDeviceGetDefaultMemPool", found)
    }

    pub fn create_pool(&self, device: c_int) -> anyhow::Result<usize> {
        // cudaMemAllocationTypePinned, cudaMemLocationTypeDevice.
        let properties = PoolProperties {
            allocation_type: 1,
            handle_types: 0,
            location_type: 1,
            location: device,
            rest: [0; 9],
        };
        let function = self.functions.pool_create;
        // SAFETY: one output, and properties that live through the call.
        let made = output!(|pool| unsafe { function(pool, &properties) });
        self.expect("cudaMemPoolCreate", made)
    }

    pub fn destroy_pool(&self, pool: usize) -> anyhow::Result<()> {
        // SAFETY: the runtime checks the handle.
        let code = unsafe { (self.functions.pool_destroy)(pool) };
        self.check("cudaMemPoolDestroy", code)
    }

    pub fn trim_pool(&self, pool: usize, keep: usize) -> anyhow::Result<()> {
        // SAFETY: the runtime checks the handle.
        let code = unsafe { (self.functions.pool_trim)(pool, keep) };
        self.check("cudaMemPoolTrimTo", code)
    }

    /// An attribute that is a number of bytes.
    pub fn pool_bytes(&self, pool: usize, attribute: c_int) -> anyhow::Result<u64> {
        let function = self.functions.pool_get;
        // SAFETY: one output of the attribute's 64 bits.
        let found = output!(|bytes: *mut u64| unsafe { function(pool, attribute, bytes.cast()) });
        self.expect("cudaMemPoolGetAttribute", found)
    }

    pub fn set_pool_bytes(&self, pool: usize, attribute: c_int, bytes: u64) -> anyhow::Result<()> {
        let mut bytes = bytes;
        let value = (&raw mut bytes).cast();
        // SAFETY: 64 bits that live through the call.
        let code = unsafe { (self.functions.pool_set)(pool, attribute, value) };
        self.check("cudaMemPoolSetAttribute", code)
    }

    pub fn ipc_handle(&self, address: Address) -> anyhow::Result<IpcHandle> {
        let function = self.functions.ipc_get;
        // SAFETY: one output; the runtime checks the address.
        let made = output!(|handle| unsafe { function(handle, address.0 as *mut c_void) });
        self.expect("cudaIpcGetMemHandle", made)
    }

    pub fn try_open_ipc(&self, handle: IpcHandle) -> Result<Address, c_int> {
        let function = self.functions.ipc_open;
        // SAFETY: one output; the runtime checks the handle.
        output!(|address| unsafe { function(address, handle, LAZY_PEER_ACCESS) }).map(of_pointer)
    }

    pub fn close_ipc(&self, address: Address) -> anyhow::Result<()> {
        // SAFETY: the runtime checks the address.
        let code = unsafe { (self.functions.ipc_close)(address.0 as *mut c_void) };
        self.check("cudaIpcCloseMemHandle", code)
    }
}
