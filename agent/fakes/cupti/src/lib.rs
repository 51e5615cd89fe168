//! Stand-in for `libcupti.so.13`: the documented functions that PyTorch's profiler is linked with.
//!
//! Subscribers and external correlation are kept as the interface documents them, one subscriber at a
//! time. Nothing is ever delivered: the pretended cards do nothing that an activity record could
//! tell, and the runtime stand-in calls nobody back. A profiler that runs on it sees an idle card.
//!
//! Invariants: nothing here panics, since a panic must not cross into C; each function has code of its
//! own, so that a probe on one does not see the others' calls.

use std::{
    collections::HashMap,
    ffi::{c_char, c_int, c_void},
    mem::MaybeUninit,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// An output parameter: in C a pointer.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// CUptiResult.
const SUCCESS: c_int = 0;
const INVALID_PARAMETER: c_int = 1;
const MAX_LIMIT_REACHED: c_int = 12;
const QUEUE_EMPTY: c_int = 18;
const MULTIPLE_SUBSCRIBERS: c_int = 39;

/// CUPTI_API_VERSION of the series whose interface this is.
const API_VERSION: u32 = 130_000;

/// CUpti_SubscriberHandle: opaque.
type Subscriber = usize;

static STATE: Mutex<State> = Mutex::new(State {
    subscribers: 0,
    subscriber: None,
    correlations: None,
});

struct State {
    /// How many there ever were; gives each a handle of its own.
    subscribers: usize,
    subscriber: Option<Subscriber>,
    /// Ids pushed and not popped yet, by kind.
    correlations: Option<HashMap<u32, Vec<u64>>>,
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a function apart from those that do the same, which an optimiser would fold into one. It
/// costs no instruction.
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

/// Never inlined: a function's first instruction has to be its frame's, not a look at `out`.
#[inline(never)]
fn put<T>(out: Out<T>, value: T) -> c_int {
    let Some(out) = out else {
        return INVALID_PARAMETER;
    };
    out.write(value);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiGetVersion(version: Out<u32>) -> c_int {
    put(version, API_VERSION)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiGetResultString(result: c_int, text: Out<*const c_char>) -> c_int {
    let known = match result {
        SUCCESS => c"CUPTI_SUCCESS",
        INVALID_PARAMETER => c"CUPTI_ERROR_INVALID_PARAMETER",
        MAX_LIMIT_REACHED => c"CUPTI_ERROR_MAX_LIMIT_REACHED",
        QUEUE_EMPTY => c"CUPTI_ERROR_QUEUE_EMPTY",
        MULTIPLE_SUBSCRIBERS => c"CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
        _ => return INVALID_PARAMETER,
    };
    put(text, known.as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiSubscribe(
    subscriber: Out<Subscriber>,
    _callback: *const c_void,
    _data: *mut c_void,
) -> c_int {
    subscribe(subscriber)
}

#[inline(never)]
fn subscribe(subscriber: Out<Subscriber>) -> c_int {
    let Some(out) = subscriber else {
        return INVALID_PARAMETER;
    };
    let mut state = state();
    if state.subscriber.is_some() {
        return MULTIPLE_SUBSCRIBERS;
    }
    state.subscribers += 1;
    state.subscriber = Some(state.subscribers);
    out.write(state.subscribers);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiUnsubscribe(subscriber: Subscriber) -> c_int {
    let code = require(subscriber);
    if code == SUCCESS {
        state().subscriber = None;
    }
    code
}

#[inline(never)]
fn require(subscriber: Subscriber) -> c_int {
    if state().subscriber == Some(subscriber) {
        SUCCESS
    } else {
        INVALID_PARAMETER
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiEnableCallback(
    _enable: u32,
    subscriber: Subscriber,
    _domain: u32,
    _callback: u32,
) -> c_int {
    distinct!("cuptiEnableCallback");
    require(subscriber)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiEnableDomain(_enable: u32, subscriber: Subscriber, _domain: u32) -> c_int {
    distinct!("cuptiEnableDomain");
    require(subscriber)
}

/// No callback has a name here, since none is ever called.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiGetCallbackName(
    _domain: u32,
    _callback: u32,
    _name: *mut *const c_char,
) -> c_int {
    distinct!("cuptiGetCallbackName");
    INVALID_PARAMETER
}

/// Ends what there is: a later subscriber may come.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiFinalize() -> c_int {
    let mut state = state();
    state.subscriber = None;
    state.correlations = None;
    SUCCESS
}

/// Settings of the collection of activities, of which there are none: accepted.
macro_rules! accepted {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            distinct!(stringify!($name));
            SUCCESS
        }
    )*};
}

accepted! {
    cuptiActivityEnable
    cuptiActivityDisable
    cuptiActivityEnableCudaEventDeviceTimestamps
    cuptiActivityEnableDriverApi
    cuptiActivityEnableRuntimeApi
    cuptiActivityFlushAll
    cuptiActivityRegisterCallbacks
    cuptiActivityRegisterTimestampCallback
    cuptiActivitySetAttribute
}

/// A buffer is empty: nobody fills one.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityGetNextRecord(
    _buffer: *mut u8,
    _valid_bytes: usize,
    _record: *mut *mut c_void,
) -> c_int {
    distinct!("cuptiActivityGetNextRecord");
    MAX_LIMIT_REACHED
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityGetNumDroppedRecords(
    _context: *mut c_void,
    _stream: u32,
    dropped: Out<usize>,
) -> c_int {
    put(dropped, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityPushExternalCorrelationId(kind: u32, id: u64) -> c_int {
    let mut state = state();
    let all = state.correlations.get_or_insert_default();
    all.entry(kind).or_default().push(id);
    SUCCESS
}

/// The output is optional.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityPopExternalCorrelationId(kind: u32, last: Out<u64>) -> c_int {
    pop(kind, last)
}

#[inline(never)]
fn pop(kind: u32, last: Out<u64>) -> c_int {
    let mut state = state();
    let of_kind = state
        .correlations
        .as_mut()
        .and_then(|all| all.get_mut(&kind));
    let Some(id) = of_kind.and_then(Vec::pop) else {
        return QUEUE_EMPTY;
    };
    if let Some(last) = last {
        last.write(id);
    }
    SUCCESS
}
