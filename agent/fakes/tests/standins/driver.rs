//! Result codes and rules of the driver's and the runtime's calls, as their interfaces document them.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use vramscope_fakes::ledger::{Kind, Layer};

use crate::support::{Bench, MIB, is_alone, run_alone, standins};

const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NOT_INITIALIZED: c_int = 3;
const INVALID_DEVICE: c_int = 101;
const INVALID_CONTEXT: c_int = 201;
const NOT_FOUND: c_int = 500;
const ALREADY_REGISTERED: c_int = 712;
const NOT_REGISTERED: c_int = 713;

#[test]
fn driver_calls_answer_as_documented() {
    let bench = Bench::new();
    run_alone(&bench, "driver::driver_calls", |_| {});
    let ledger = bench.ledger(Layer::Driver);
    // Worked out from the calls of `driver_calls`, in its order.
    let device_0 = ledger.totals(0, Kind::Device);
    assert_eq!((device_0.allocations, device_0.failed_allocations), (2, 2));
    assert_eq!((device_0.frees, device_0.failed_frees), (1, 2));
    assert_eq!(
        (device_0.live_bytes, device_0.peak_bytes),
        (100, 8192 * MIB)
    );
    let device_1 = ledger.totals(1, Kind::Device);
    assert_eq!((device_1.allocations, device_1.frees), (1, 1));
    assert_eq!((device_1.live_bytes, device_1.peak_bytes), (0, 5));
    let registered = ledger.totals(0, Kind::RegisteredHost);
    assert_eq!((registered.allocations, registered.frees), (1, 1));
    assert_eq!(registered.failed_allocations, 2);
    assert_eq!(registered.failed_frees, 1);
    let pinned = ledger.totals(0, Kind::PinnedHost);
    assert_eq!((pinned.allocations, pinned.frees), (1, 1));
    assert_eq!(pinned.failed_frees, 1);
    // Before cuInit, and without a context.
    assert_eq!(ledger.without_device["device"].failed_allocations, 2);
}

#[test]
fn runtime_calls_answer_as_documented() {
    let bench = Bench::new();
    run_alone(&bench, "driver::runtime_calls", |_| {});
    for layer in [Layer::Driver, Layer::Runtime] {
        let totals = bench.ledger(layer).totals(1, Kind::Device);
        assert_eq!((totals.allocations, totals.frees), (1, 1));
        assert_eq!((totals.live_bytes, totals.freed_bytes), (0, 1000));
    }
}

pub struct Library(*mut c_void);

impl Library {
    pub fn open(name: &str) -> Self {
        let path = standins()
            .join(name)
            .into_os_string()
            .into_string()
            .unwrap();
        let path = std::ffi::CString::new(path).unwrap();
        // SAFETY: the stand-in's initialisers do nothing.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null());
        Self(handle)
    }

    pub fn address(&self, name: &CStr) -> *mut c_void {
        // SAFETY: an open handle and a string with its zero byte.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?}");
        address
    }
}

/// Calls a function of a library: its name, then the type and value of each argument.
macro_rules! call {
    ($library:expr, $name:literal $(, $argument:expr => $type:ty)*) => {{
        let address = $library.address($name);
        // SAFETY: the interface documents this signature, and the arguments live through the call.
        unsafe {
            let function =
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> c_int>(address);
            function($($argument),*)
        }
    }};
}
pub(crate) use call;

#[test]
#[ignore = "run by driver_calls_answer_as_documented"]
fn driver_calls() {
    if !is_alone() {
        return;
    }
    let cuda = Library::open("libcuda.so.1");
    let alloc = |address: &mut usize, bytes: usize| call!(cuda, c"cuMemAlloc_v2", address => *mut usize, bytes => usize);
    let free = |address: usize| call!(cuda, c"cuMemFree_v2", address => usize);
    let create = |context: &mut usize, device: c_int| call!(cuda, c"cuCtxCreate_v2", context => *mut usize, 0 => c_uint, device => c_int);
    let set_current = |context: usize| call!(cuda, c"cuCtxSetCurrent", context => usize);

    let (mut address, mut version, mut count) = (0usize, 0, 0);
    assert_eq!(
        call!(cuda, c"cuDriverGetVersion", &mut version => *mut c_int),
        0
    );
    assert_eq!(version, 13000);
    let count_code = call!(cuda, c"cuDeviceGetCount", &mut count => *mut c_int);
    assert_eq!(count_code, NOT_INITIALIZED);
    assert_eq!(alloc(&mut address, 1), NOT_INITIALIZED);
    assert_eq!(call!(cuda, c"cuInit", 1 => c_uint), INVALID_VALUE);
    assert_eq!(call!(cuda, c"cuInit", 0 => c_uint), 0);
    assert_eq!(
        call!(cuda, c"cuDeviceGetCount", &mut count => *mut c_int),
        0
    );
    assert_eq!(count, 2);
    assert_eq!(alloc(&mut address, 1), INVALID_CONTEXT);

    let mut uuid = [9u8; 16];
    assert_eq!(
        call!(cuda, c"cuDeviceGetUuid_v2", &mut uuid => *mut [u8; 16], 1 => c_int),
        0
    );
    assert_eq!(u128::from_be_bytes(uuid), 1);
    let beyond = call!(cuda, c"cuDeviceGetUuid_v2", &mut uuid => *mut [u8; 16], 2 => c_int);
    assert_eq!(beyond, INVALID_DEVICE);

    // Two contexts; a block on device 1 is freed while device 0 is current.
    let (mut on_0, mut on_1, mut device) = (0, 0, -1);
    assert_eq!(create(&mut on_0, 0), 0);
    assert_eq!(create(&mut on_1, 1), 0);
    assert_eq!(call!(cuda, c"cuCtxGetDevice", &mut device => *mut c_int), 0);
    assert_eq!(device, 1);
    let mut on_device_1 = 0;
    assert_eq!(alloc(&mut on_device_1, 5), 0);
    assert_eq!(on_device_1 % (2 * MIB as usize), 0, "whole granules");
    let mut popped = 0;
    assert_eq!(
        call!(cuda, c"cuCtxPopCurrent_v2", &mut popped => *mut usize),
        0
    );
    assert_eq!(popped, on_1);
    let mut current = 0;
    assert_eq!(
        call!(cuda, c"cuCtxGetCurrent", &mut current => *mut usize),
        0
    );
    assert_eq!(current, on_0);
    assert_eq!(free(on_device_1), 0);

    // The card is full at its capacity, not before; 0 bytes are refused.
    let (mut free_bytes, mut total) = (0usize, 0usize);
    assert_eq!(alloc(&mut address, 8192 * MIB as usize), 0);
    let info = call!(
        cuda, c"cuMemGetInfo_v2", &mut free_bytes => *mut usize, &mut total => *mut usize
    );
    assert_eq!((info, free_bytes, total), (0, 0, 8192 * MIB as usize));
    let mut other = 0;
    assert_eq!(alloc(&mut other, 1), OUT_OF_MEMORY);
    assert_eq!(free(address), 0);
    assert_eq!(free(address), INVALID_VALUE);
    assert_eq!(alloc(&mut address, 0), INVALID_VALUE);
    assert_eq!(alloc(&mut address, 100), 0);
    assert_eq!(free(address + 8), INVALID_VALUE, "not a block's beginning");
    assert_eq!(free(0), 0);

    // Registered memory.
    let memory = vec![0u8; 8192];
    let start = memory.as_ptr() as usize;
    let register = |address: usize| {
        call!(
            cuda, c"cuMemHostRegister_v2", address => usize, 4096 => usize, 0 => c_uint
        )
    };
    let unregister = |address: usize| call!(cuda, c"cuMemHostUnregister", address => usize);
    assert_eq!(register(start), 0);
    assert_eq!(register(start + 4095), ALREADY_REGISTERED);
    assert_eq!(register(4096), INVALID_VALUE, "no such pages");
    assert_eq!(unregister(start), 0);
    assert_eq!(unregister(start), NOT_REGISTERED);

    // Pinned memory can be written to, and freed only as such.
    let mut pinned = 0usize;
    let host_alloc = call!(
        cuda, c"cuMemHostAlloc", &mut pinned => *mut usize, 9000 => usize, 0 => c_uint
    );
    assert_eq!(host_alloc, 0);
    // SAFETY: 9000 bytes that the driver just allocated.
    unsafe { std::slice::from_raw_parts_mut(pinned as *mut u8, 9000) }.fill(7);
    assert_eq!(call!(cuda, c"cuMemFreeHost", pinned => usize), 0);
    assert_eq!(
        call!(cuda, c"cuMemFreeHost", pinned => usize),
        INVALID_VALUE
    );

    // Contexts of another thread's making can be made current, gone ones cannot.
    assert_eq!(call!(cuda, c"cuCtxDestroy_v2", on_1 => usize), 0);
    assert_eq!(set_current(on_1), INVALID_CONTEXT);
    let (mut primary, mut flags, mut active) = (0usize, 0, -1);
    let mut state = || {
        let code = call!(
            cuda, c"cuDevicePrimaryCtxGetState",
            0 => c_int, &mut flags => *mut c_uint, &mut active => *mut c_int
        );
        (code, active)
    };
    assert_eq!(state(), (0, 0));
    let retain = call!(
        cuda, c"cuDevicePrimaryCtxRetain", &mut primary => *mut usize, 0 => c_int
    );
    assert_eq!(retain, 0);
    assert_eq!(state(), (0, 1));
    assert_eq!(set_current(primary), 0);
    assert_eq!(call!(cuda, c"cuDevicePrimaryCtxRelease_v2", 0 => c_int), 0);
    assert_eq!(state(), (0, 0));
    assert_eq!(set_current(0), 0);

    names_are_resolved(&cuda);
}

fn names_are_resolved(cuda: &Library) {
    let find_with = |name: &CStr, version: c_int, flags: u64| {
        let (mut function, mut status) = (std::ptr::null_mut(), -1);
        let code = call!(
            cuda, c"cuGetProcAddress_v2",
            name.as_ptr() => *const c_char, &mut function => *mut *mut c_void,
            version => c_int, flags => u64, &mut status => *mut c_int
        );
        (code, function, status)
    };
    let find = |name: &CStr, version: c_int| find_with(name, version, 0);
    let exported = |name: &CStr| (0, cuda.address(name), 0);
    // CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, of a call that has such a variant and of one that
    // has none.
    let per_thread = 2;
    assert_eq!(
        find(c"cuMemAllocAsync", 13000),
        exported(c"cuMemAllocAsync")
    );
    assert_eq!(
        find_with(c"cuMemAllocAsync", 13000, per_thread),
        exported(c"cuMemAllocAsync_ptsz")
    );
    assert_eq!(
        find_with(c"cuMemFreeAsync", 13000, per_thread),
        exported(c"cuMemFreeAsync_ptsz")
    );
    assert_eq!(
        find_with(c"cuMemAlloc", 13000, per_thread),
        exported(c"cuMemAlloc_v2")
    );
    assert_eq!(
        find(c"cuIpcOpenMemHandle", 13000),
        exported(c"cuIpcOpenMemHandle_v2")
    );
    assert_eq!(find(c"cuMemAlloc", 13000), exported(c"cuMemAlloc_v2"));
    assert_eq!(find(c"cuMemAlloc_v2", 13000), exported(c"cuMemAlloc_v2"));
    assert_eq!(find(c"cuMemHostAlloc", 13000), exported(c"cuMemHostAlloc"));
    assert_eq!(
        find(c"cuDeviceGetUuid", 11030),
        exported(c"cuDeviceGetUuid")
    );
    assert_eq!(
        find(c"cuDeviceGetUuid", 12000),
        exported(c"cuDeviceGetUuid_v2")
    );
    let null = std::ptr::null_mut();
    assert_eq!(find(c"cuNoSuchCall", 13000), (NOT_FOUND, null, 1));
    // The name's arguments changed in 11.4 and 12.5.
    assert_eq!(find(c"cuCtxCreate", 11030), exported(c"cuCtxCreate_v2"));
    assert_eq!(find(c"cuCtxCreate", 12040), exported(c"cuCtxCreate_v3"));
    assert_eq!(find(c"cuCtxCreate", 13000), exported(c"cuCtxCreate_v4"));
    // Younger than the version asked for.
    assert_eq!(find(c"cuMemAllocAsync", 11010), (NOT_FOUND, null, 2));

    let mut text: *const c_char = std::ptr::null();
    let code = call!(cuda, c"cuGetErrorName", 712 => c_int, &mut text => *mut *const c_char);
    assert_eq!(code, 0);
    // SAFETY: the driver's names are constant strings.
    let text = unsafe { CStr::from_ptr(text) };
    assert_eq!(text, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED");
}

#[test]
#[ignore = "run by runtime_calls_answer_as_documented"]
fn runtime_calls() {
    if !is_alone() {
        return;
    }
    let runtime = Library::open("libcudart.so.13");
    let get_device = || {
        let mut device = -1;
        assert_eq!(
            call!(runtime, c"cudaGetDevice", &mut device => *mut c_int),
            0
        );
        device
    };
    let set_device = |device: c_int| call!(runtime, c"cudaSetDevice", device => c_int);
    let malloc = |address: &mut usize, bytes: usize| call!(runtime, c"cudaMalloc", address => *mut usize, bytes => usize);
    assert_eq!(call!(runtime, c"cudaFree", 0 => usize), 0);
    assert_eq!(get_device(), 0);
    assert_eq!(set_device(2), INVALID_DEVICE);
    assert_eq!(call!(runtime, c"cudaPeekAtLastError"), INVALID_DEVICE);
    assert_eq!(call!(runtime, c"cudaGetLastError"), INVALID_DEVICE);
    assert_eq!(call!(runtime, c"cudaGetLastError"), 0);
    assert_eq!(set_device(1), 0);

    let mut address = 0;
    assert_eq!(malloc(&mut address, 1000), 0);
    let (mut free, mut total) = (0usize, 0usize);
    let info = call!(
        runtime, c"cudaMemGetInfo", &mut free => *mut usize, &mut total => *mut usize
    );
    assert_eq!((info, total - free), (0, 1000));
    let elsewhere = std::thread::scope(|scope| scope.spawn(get_device_of_new_thread).join());
    assert_eq!(elsewhere.unwrap(), 0, "a new thread begins on device 0");
    assert_eq!(get_device(), 1);

    // An empty allocation is a null pointer, and a reset frees what the device holds.
    let mut nothing = 1;
    assert_eq!((malloc(&mut nothing, 0), nothing), (0, 0));
    assert_eq!(call!(runtime, c"cudaDeviceReset"), 0);
    assert_eq!(call!(runtime, c"cudaFree", address => usize), INVALID_VALUE);
}

fn get_device_of_new_thread() -> c_int {
    let runtime = Library::open("libcudart.so.13");
    let mut device = -1;
    assert_eq!(
        call!(runtime, c"cudaGetDevice", &mut device => *mut c_int),
        0
    );
    device
}
