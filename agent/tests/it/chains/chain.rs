//! As chain.cpp, in Rust: closures, a trait's object, generics, iterators, a thread. Compiled with
//! optimisation, without frame pointers and without debug information.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::hint::black_box;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Allocate = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;

thread_local! {
    static WITHIN: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

struct In;

impl In {
    fn new(name: &'static str) -> Self {
        WITHIN.with_borrow_mut(|within| within.push(name));
        Self
    }
}

impl Drop for In {
    fn drop(&mut self) {
        WITHIN.with_borrow_mut(|within| within.pop());
    }
}

fn allocate() -> Allocate {
    let runtime = unsafe { dlopen(c"libcudart.so.13".as_ptr(), 2) };
    assert!(!runtime.is_null(), "no runtime");
    let found = unsafe { dlsym(runtime, c"cudaMalloc".as_ptr()) };
    assert!(!found.is_null(), "no cudaMalloc");
    unsafe { std::mem::transmute::<*mut c_void, Allocate>(found) }
}

#[inline(never)]
fn leaf(bytes: usize) -> i64 {
    let _in = In::new("chain::leaf");
    let mut address = std::ptr::null_mut();
    let result = unsafe { allocate()(&raw mut address, bytes) };
    let chain = WITHIN.with_borrow(|within| {
        let names: Vec<&str> = within.iter().rev().copied().collect();
        names.join(";")
    });
    println!("{bytes} {chain}");
    black_box(i64::from(result))
}

trait Way {
    fn go(&self, bytes: usize) -> i64;
}

struct Boxed {
    add: i64,
}

impl Way for Boxed {
    #[inline(never)]
    fn go(&self, bytes: usize) -> i64 {
        let _in = In::new("<chain::Boxed as chain::Way>::go");
        black_box(leaf(bytes) + self.add)
    }
}

#[inline(never)]
fn by_object(way: &dyn Way, bytes: usize) -> i64 {
    let _in = In::new("chain::by_object");
    black_box(way.go(bytes) + 1)
}

#[inline(never)]
fn by_iterator(bytes: usize) -> i64 {
    let _in = In::new("chain::by_iterator");
    let ways: Vec<Box<dyn Way>> = vec![Box::new(Boxed { add: 3 })];
    black_box(ways.iter().map(|way| by_object(way.as_ref(), bytes)).sum())
}

#[inline(never)]
fn by_catch(bytes: usize) -> i64 {
    let _in = In::new("chain::by_catch");
    black_box(std::panic::catch_unwind(|| by_iterator(bytes)).unwrap_or(-1))
}

#[inline(never)]
fn down(bytes: usize, left: usize) -> i64 {
    let _in = In::new("chain::down");
    let pad = black_box([left; 9]);
    let below = if left > 0 {
        down(bytes, left - 1)
    } else {
        by_catch(bytes)
    };
    black_box(below + pad[left % 9] as i64)
}

#[inline(never)]
fn in_thread(number: usize) {
    let _in = In::new("chain::in_thread");
    black_box(down(600_000 + 4096 * number, 12));
}

fn main() {
    let _in = In::new("chain::main");
    black_box(down(500_000, 12));
    let threads: Vec<_> = (0..2)
        .map(|number| std::thread::spawn(move || in_thread(number)))
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    // Whoever traces has to read where the code lies, on however busy a machine.
    std::thread::sleep(std::time::Duration::from_secs(2));
}
