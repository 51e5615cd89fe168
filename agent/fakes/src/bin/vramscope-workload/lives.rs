//! Scenarios about processes: how memory, programs and process numbers outlive each other.

use std::{
    ffi::{CString, c_char},
    os::unix::ffi::OsStringExt,
    time::Duration,
};

use anyhow::{Context, anyhow, bail, ensure};

use super::{
    ends::hold_memory,
    runtime::{Address, Runtime},
    steady::wait_for_a_line,
};

const MIB: usize = 1 << 20;

/// Allocates once and keeps it.
#[inline(never)]
pub fn hold(bytes: usize) -> anyhow::Result<()> {
    Runtime::load()?.malloc(bytes)?;
    Ok(())
}

/// Runs for a while before it loads any CUDA library.
pub fn late_dlopen(delay: Duration) -> anyhow::Result<()> {
    std::thread::sleep(delay);
    hold_memory()
}

/// Replaces the program while memory lives. The next one allocates as `exit-code 0` does.
pub fn exec() -> anyhow::Result<()> {
    hold_memory()?;
    let (program, arguments) = this_program(&["exit-code", "0"])?;
    let pointers = pointers(&arguments);
    // SAFETY: strings with their zero bytes, and a list with its null, that live through the call.
    unsafe { libc::execv(program.as_ptr(), pointers.as_ptr()) };
    bail!("exec failed: {}", std::io::Error::last_os_error())
}

/// A child that shares this process's memory until it executes another program, which allocates as
/// `exit-code 0` does; then this process allocates again.
pub fn vfork() -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    runtime.malloc(7 * MIB)?;
    let (program, arguments) = this_program(&["exit-code", "0"])?;
    let pointers = pointers(&arguments);
    let mut child = 0;
    // posix_spawn is vfork and exec: the C library asks for a child with CLONE_VM and CLONE_VFORK.
    // SAFETY: strings with their zero bytes, a list with its null, and this process's environment.
    let code = unsafe {
        libc::posix_spawn(
            &mut child,
            program.as_ptr(),
            std::ptr::null(),
            std::ptr::null(),
            pointers.as_ptr().cast(),
            environ.cast(),
        )
    };
    ensure!(code == 0, "posix_spawn failed with {code}");
    wait_for(child)?;
    runtime.malloc(3 * MIB)?;
    Ok(())
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// A thread allocates and ends; the process and the memory live on, and another thread frees some.
pub fn thread_exit() -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let second = on_a_thread(|| allocate_and_end(&runtime))?;
    on_a_thread(|| {
        runtime.free(second);
        Ok(())
    })?;
    runtime.malloc(4 * MIB)?;
    runtime.report_failed_frees();
    Ok(())
}

#[inline(never)]
fn allocate_and_end(runtime: &Runtime) -> anyhow::Result<Address> {
    runtime.malloc(8 * MIB)?;
    runtime.malloc(9 * MIB)
}

fn on_a_thread<T: Send>(action: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    std::thread::scope(|scope| {
        let worker = scope.spawn(action);
        worker.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

/// Allocates a part, waits, then frees one block of it and allocates the rest.
pub fn older(before: u64, after: u64) -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let mut earlier = Vec::new();
    for _ in 0..before {
        earlier.push(runtime.malloc(4 * MIB)?);
    }
    runtime.host_alloc(MIB)?;
    wait_for_a_line()?;
    if let Some(block) = earlier.first() {
        runtime.free(*block);
    }
    let mut later = Vec::new();
    for _ in 0..after {
        later.push(runtime.malloc(2 * MIB)?);
    }
    if let Some(block) = later.first() {
        runtime.free(*block);
    }
    runtime.report_failed_frees();
    Ok(())
}

/// Two processes of one number, one after the other: `hold` 5 MiB and `hold` 6 MiB.
pub fn pid_reuse() -> anyhow::Result<()> {
    let first = start_with_pid(None, &["hold", "--mib", "5"])?;
    wait_for(first)?;
    // A start time has a resolution of a hundredth of a second, and tells the two apart.
    std::thread::sleep(Duration::from_millis(50));
    let second = start_with_pid(Some(first), &["hold", "--mib", "6"])
        .context("the system gave no chosen process number: CAP_CHECKPOINT_RESTORE is needed")?;
    ensure!(second == first, "the kernel gave another number");
    wait_for(second)?;
    println!("pid {first}");
    Ok(())
}

/// Forks with clone3, which can choose the child's number, and executes this program in the child.
fn start_with_pid(pid: Option<i32>, words: &[&str]) -> anyhow::Result<i32> {
    let (program, arguments) = this_program(words)?;
    let pointers = pointers(&arguments);
    let chosen = [pid.unwrap_or(0)];
    // SAFETY: a struct of plain numbers, for which zeros mean "not asked for".
    let mut request: libc::clone_args = unsafe { std::mem::zeroed() };
    request.exit_signal = libc::SIGCHLD as u64;
    if pid.is_some() {
        request.set_tid = chosen.as_ptr() as u64;
        request.set_tid_size = 1;
    }
    // SAFETY: the request lives through the call. The child has a copy of this process's memory,
    // executes another program and does nothing else: what the C library believes of its number
    // does not matter. This process has one thread.
    let child = unsafe { libc::syscall(libc::SYS_clone3, &request, size_of_val(&request)) };
    match child {
        -1 => Err(std::io::Error::last_os_error()).context("clone3 failed"),
        0 => {
            // SAFETY: strings with their zero bytes, and a list with its null. If it fails, the child
            // ends without running the parent's exit handlers.
            unsafe {
                libc::execv(program.as_ptr(), pointers.as_ptr());
                libc::_exit(1)
            }
        }
        child => Ok(child as i32),
    }
}

fn wait_for(child: i32) -> anyhow::Result<()> {
    let mut status = 0;
    // SAFETY: a child of this process, and one output.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    let is_done = waited == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
    ensure!(is_done, "the child failed");
    Ok(())
}

/// This program's path, and its arguments with the program's name first.
fn this_program(words: &[&str]) -> anyhow::Result<(CString, Vec<CString>)> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let program = CString::new(program.into_os_string().into_vec())?;
    let mut arguments = vec![program.clone()];
    for word in words {
        arguments.push(CString::new(*word)?);
    }
    Ok((program, arguments))
}

fn pointers(arguments: &[CString]) -> Vec<*const c_char> {
    let given = arguments.iter().map(|argument| argument.as_ptr());
    given.chain([std::ptr::null()]).collect()
}
