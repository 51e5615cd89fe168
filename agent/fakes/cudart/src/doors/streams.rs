//! Streams, events, and what a stream could wait for. Nothing is ever in flight, and no stream is
//! being captured: those that would begin to are in [`super::refused`].

use std::{
    cell::Cell,
    ffi::{c_int, c_uint, c_void},
};

use crate::{Out, code, codes::INVALID_VALUE, events, put, runtime};

/// What cudaDeviceGetStreamPriorityRange says: the least and the greatest. They make no difference.
const PRIORITIES: (c_int, c_int) = (0, -5);

/// cudaStreamCaptureStatusNone.
const NOT_CAPTURING: c_int = 0;

thread_local! {
    /// cudaStreamCaptureModeGlobal, as every thread begins.
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

fn create(stream: Out<usize>) -> c_int {
    let Some(out) = stream else {
        return code(Err(INVALID_VALUE));
    };
    let made = runtime::with_driver(|driver| driver.create_stream());
    put(Some(out), made)
}

fn query(stream: usize) -> c_int {
    code(runtime::with_driver(|driver| driver.query_stream(stream)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreateWithFlags(stream: Out<usize>, _flags: c_uint) -> c_int {
    distinct!("cudaStreamCreateWithFlags");
    create(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreateWithPriority(
    stream: Out<usize>,
    _flags: c_uint,
    _priority: c_int,
) -> c_int {
    create(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetPriority(stream: usize, priority: Out<c_int>) -> c_int {
    let known = runtime::with_driver(|driver| driver.query_stream(stream));
    put(priority, known.map(|()| PRIORITIES.0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetStreamPriorityRange(
    least: Out<c_int>,
    greatest: Out<c_int>,
) -> c_int {
    code(runtime::ensure_context().map(|()| {
        // Either may be null, as documented.
        if let Some(least) = least {
            least.write(PRIORITIES.0);
        }
        if let Some(greatest) = greatest {
            greatest.write(PRIORITIES.1);
        }
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamQuery(stream: usize) -> c_int {
    query(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) -> c_int {
    let known = runtime::with_driver(|driver| driver.query_stream(stream));
    code(known.and_then(|()| events::require(event)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamIsCapturing(stream: usize, status: Out<c_int>) -> c_int {
    let known = runtime::with_driver(|driver| driver.query_stream(stream));
    put(status, known.map(|()| NOT_CAPTURING))
}

/// Of a stream that is not being captured only the status is given, as documented.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetCaptureInfo(
    stream: usize,
    status: Out<c_int>,
    _id: *mut u64,
    _graph: *mut c_void,
    _dependencies: *mut c_void,
    _edges: *mut c_void,
    _count: *mut usize,
) -> c_int {
    distinct!("cudaStreamGetCaptureInfo");
    let known = runtime::with_driver(|driver| driver.query_stream(stream));
    put(status, known.map(|()| NOT_CAPTURING))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: Option<&mut c_int>) -> c_int {
    code(exchange(mode))
}

#[inline(never)]
fn exchange(mode: Option<&mut c_int>) -> crate::codes::CudaResult<()> {
    let mode = mode.ok_or(INVALID_VALUE)?;
    if !(0..=2).contains(mode) {
        return Err(INVALID_VALUE);
    }
    // A thread that is ending has no mode any more.
    let _ = CAPTURE_MODE.try_with(|current| *mode = current.replace(*mode));
    Ok(())
}

/// What a stream calls once its work is done, which it is.
type Callback = unsafe extern "C" fn(stream: usize, status: c_int, data: *mut c_void);
type HostFunction = unsafe extern "C" fn(data: *mut c_void);

/// # Safety
/// The function may be called with the data.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamAddCallback(
    stream: usize,
    callback: Option<Callback>,
    data: *mut c_void,
    _flags: c_uint,
) -> c_int {
    let known = runtime::with_driver(|driver| driver.query_stream(stream));
    code(known.and_then(|()| {
        let callback = callback.ok_or(INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe { callback(stream, 0, data) };
        Ok(())
    }))
}

/// # Safety
/// The function may be called with the data.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaLaunchHostFunc(
    stream: usize,
    function: Option<HostFunction>,
    data: *mut c_void,
) -> c_int {
    let known = runtime::with_driver(|driver| driver.query_stream(stream));
    code(known.and_then(|()| {
        let function = function.ok_or(INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe { function(data) };
        Ok(())
    }))
}

fn create_event(event: Out<usize>) -> c_int {
    let Some(out) = event else {
        return code(Err(INVALID_VALUE));
    };
    put(Some(out), events::create())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventCreate(event: Out<usize>) -> c_int {
    distinct!("cudaEventCreate");
    create_event(event)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventCreateWithFlags(event: Out<usize>, _flags: c_uint) -> c_int {
    create_event(event)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventDestroy(event: usize) -> c_int {
    code(events::destroy(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecord(event: usize, stream: usize) -> c_int {
    distinct!("cudaEventRecord");
    code(events::record(event, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecordWithFlags(event: usize, stream: usize, _flags: c_uint) -> c_int {
    code(events::record(event, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventQuery(event: usize) -> c_int {
    distinct!("cudaEventQuery");
    code(events::require(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventSynchronize(event: usize) -> c_int {
    code(events::require(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) -> c_int {
    put(milliseconds, events::elapsed(start, end))
}
