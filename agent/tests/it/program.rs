//! A program under the tests' control: it loads the stand-ins when told to, and allocates when told
//! to, so that no test has to hope that the agent was quick enough.
//!
//! It is this very test program, run again with one ignored test. It also has a runtime inside, as
//! a program with a statically linked one has.

use std::ffi::{CString, c_int, c_void};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use crate::standins::Bench;

type Call1 = unsafe extern "C" fn(usize) -> c_int;
type Call2 = unsafe extern "C" fn(usize, usize) -> c_int;
/// As many words as go in registers; a function that takes fewer does not look at the others.
type Call6 = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> c_int;

/// Which libraries it loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runtime {
    Shared,
    /// The one inside the program.
    Inside,
}

/// A running program.
pub struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// The command that runs it, for a shell line; the environment is to be set by [`Self::start`].
    pub fn command_line(exe: &Path) -> String {
        format!(
            "{} --ignored --exact program::run_as_told --nocapture",
            exe.display()
        )
    }

    pub fn exe() -> PathBuf {
        std::env::current_exe().unwrap()
    }

    /// A copy of it in the test's folder: no other test's program is this file.
    pub fn copy(bench: &Bench, name: &str) -> PathBuf {
        let copy = bench.root().join(name);
        std::fs::copy(Self::exe(), &copy).unwrap();
        copy
    }

    /// Starts it in a shell, after `before` (`mount` commands, say) was run there.
    pub fn start(before: &str, exe: &Path, libraries: &Path, books: &Path) -> Self {
        let line = format!("set -e; {before}\nexec {}", Self::command_line(exe));
        Self::start_shell(&line, libraries, books)
    }

    pub fn start_shell(line: &str, libraries: &Path, books: &Path) -> Self {
        let mut child = Command::new("sh")
            .args(["-c", line])
            .env("LD_LIBRARY_PATH", libraries)
            .env("VRAMSCOPE_FAKE_DIR", books)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            input,
            output,
        }
    }

    /// The program's own pid: the shell became it.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it something and waits until it is done.
    pub fn tell(&mut self, what: &str) {
        writeln!(self.input, "{what}").unwrap();
        let mut line = String::new();
        // The test harness writes lines of its own.
        while !line.starts_with("done ") {
            line.clear();
            let read = self.output.read_line(&mut line).unwrap();
            assert!(read > 0, "the program ended before it did {what:?}");
        }
        assert_eq!(line.trim(), format!("done {what}"));
    }

    /// Calls a function of the library that is open, see `run_as_told`; gives its result.
    pub fn call(&mut self, call: &str) -> i64 {
        writeln!(self.input, "call {call}").unwrap();
        self.result(&format!("call {call}"))
    }

    /// A block of the runtime's, that stays until it is freed.
    pub fn allocate(&mut self, bytes: usize) -> i64 {
        writeln!(self.input, "keep {bytes}").unwrap();
        self.result(&format!("keep {bytes}"))
    }

    pub fn free(&mut self, address: i64) {
        self.tell(&format!("free {address}"));
    }

    fn result(&mut self, what: &str) -> i64 {
        let (mut line, mut result) = (String::new(), None);
        while !line.starts_with("done ") {
            line.clear();
            let read = self.output.read_line(&mut line).unwrap();
            assert!(read > 0, "the program ended before it did {what:?}");
            if let Some(words) = line.trim().strip_prefix("result ") {
                result = words.split(' ').nth(1).and_then(|word| word.parse().ok());
            }
        }
        result.unwrap_or_else(|| panic!("{what:?} gave no result"))
    }

    /// Lets it load the libraries.
    pub fn load(&mut self, runtime: Runtime) {
        self.tell(match runtime {
            Runtime::Shared => "shared",
            Runtime::Inside => "inside",
        });
    }

    /// Lets it end by itself.
    pub fn end(mut self) {
        drop(self.input);
        assert!(self.child.wait().unwrap().success());
    }
}

/// The driver's functions for the runtime inside.
static DRIVER: OnceLock<usize> = OnceLock::new();

fn symbol(library: usize, name: &str) -> *mut c_void {
    let name = CString::new(name).unwrap();
    // SAFETY: a handle that dlopen gave, and a C string.
    let address = unsafe { libc::dlsym(library as *mut c_void, name.as_ptr()) };
    assert!(!address.is_null(), "{name:?} is missing");
    address
}

fn open(name: &str) -> usize {
    let c_name = CString::new(name).unwrap();
    // SAFETY: a C string; the library is one of ours.
    let library = unsafe { libc::dlopen(c_name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!library.is_null(), "{name} cannot be loaded");
    library as usize
}

/// The runtime inside: its name is what a static runtime's function has in the symbol table.
///
/// # Safety
/// `address` points to room for an address.
#[unsafe(export_name = "cudaMalloc")]
#[inline(never)]
pub unsafe extern "C" fn cuda_malloc(address: *mut usize, bytes: usize) -> c_int {
    let driver = *DRIVER.get().expect("the driver is loaded first");
    // SAFETY: the driver's function of that name has this signature.
    let alloc: Call2 = unsafe { std::mem::transmute(symbol(driver, "cuMemAlloc_v2")) };
    // SAFETY: as promised by the caller.
    unsafe { alloc(address as usize, bytes) }
}

/// As above.
///
/// # Safety
/// The address is one that [`cuda_malloc`] gave.
#[unsafe(export_name = "cudaFree")]
#[inline(never)]
pub unsafe extern "C" fn cuda_free(address: usize) -> c_int {
    let driver = *DRIVER.get().expect("the driver is loaded first");
    // SAFETY: the driver's function of that name has this signature.
    let free: Call1 = unsafe { std::mem::transmute(symbol(driver, "cuMemFree_v2")) };
    // SAFETY: as promised by the caller.
    unsafe { free(address) }
}

/// Memory for a function to write to, or to register.
#[repr(align(4096))]
struct Room([u8; 4096]);

fn set_filter() {
    let mut filter = [libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_ALLOW,
    }];
    let program = libc::sock_fprog {
        len: 1,
        filter: filter.as_mut_ptr(),
    };
    // For all threads: /proc shows the filter of the first one.
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
    // SAFETY: the program and its instruction live until the calls are over.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        let set = libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program);
        assert_eq!(set, 0);
    }
}

#[test]
#[ignore = "the program that other tests run"]
pub fn run_as_told() {
    let mut malloc: Option<Call2> = None;
    let mut free: Option<Call1> = None;
    let mut pids = Vec::new();
    let mut opened = None;
    let mut room = Room([0; 4096]);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["shared"] => {
                let runtime = open("libcudart.so.13");
                open("libcuda.so.1");
                // SAFETY: the runtime's functions of these names have these signatures.
                unsafe {
                    malloc = Some(std::mem::transmute::<*mut c_void, Call2>(symbol(
                        runtime,
                        "cudaMalloc",
                    )));
                    free = Some(std::mem::transmute::<*mut c_void, Call1>(symbol(
                        runtime, "cudaFree",
                    )));
                }
            }
            ["inside"] => {
                let driver = open("libcuda.so.1");
                DRIVER.set(driver).unwrap();
                let mut context = 0usize;
                // SAFETY: the driver's functions of these names have these signatures.
                unsafe {
                    let init: Call1 = std::mem::transmute(symbol(driver, "cuInit"));
                    let retain: Call2 =
                        std::mem::transmute(symbol(driver, "cuDevicePrimaryCtxRetain"));
                    let set: Call1 = std::mem::transmute(symbol(driver, "cuCtxSetCurrent"));
                    assert_eq!(init(0), 0);
                    assert_eq!(retain(&raw mut context as usize, 0), 0);
                    assert_eq!(set(context), 0);
                    malloc = Some(std::mem::transmute::<*const (), Call2>(
                        cuda_malloc as *const (),
                    ));
                    free = Some(std::mem::transmute::<*const (), Call1>(
                        cuda_free as *const (),
                    ));
                }
            }
            // Any library, by path.
            ["open", path] => opened = Some(open(path)),
            // A function of that library: `room` is a page to write to, `text:` a C string, else
            // numbers. Answers with the result and the first word of the page.
            ["call", name, ref arguments @ ..] => {
                room.0.fill(0);
                let mut texts = Vec::new();
                let mut words = [0; 6];
                for (word, argument) in words.iter_mut().zip(arguments) {
                    *word = match argument.strip_prefix("text:") {
                        Some(text) => {
                            texts.push(CString::new(text).unwrap());
                            texts.last().unwrap().as_ptr() as usize
                        }
                        None if *argument == "room" => &raw mut room.0 as usize,
                        None => {
                            let signed = || argument.parse::<isize>().unwrap() as usize;
                            argument.parse().unwrap_or_else(|_| signed())
                        }
                    };
                }
                let [a, b, c, d, e, f] = words;
                let function = symbol(opened.expect("a library is open"), name);
                // SAFETY: the test gives the arguments that the vendor documents.
                let result = unsafe {
                    let function: Call6 = std::mem::transmute(function);
                    function(a, b, c, d, e, f)
                };
                let first = usize::from_ne_bytes(room.0[..8].try_into().unwrap());
                println!("result {name} {result} {first}");
            }
            // Where a function of that library is.
            ["where", name] => {
                let address = symbol(opened.expect("a library is open"), name) as usize;
                println!("result where 0 {address}");
            }
            // One block that stays.
            ["keep", bytes] => {
                let bytes: usize = bytes.parse().unwrap();
                let mut address = 0usize;
                // SAFETY: the address points to room for one.
                let result = unsafe { malloc.expect("loaded")(&raw mut address as usize, bytes) };
                assert_eq!(result, 0);
                println!("result keep {address}");
            }
            ["free", address] => {
                let address: usize = address.parse().unwrap();
                // SAFETY: given by the runtime before.
                assert_eq!(unsafe { free.expect("loaded")(address) }, 0);
            }
            // From now on its system calls go through a filter that lets all of them pass.
            ["filter"] => set_filter(),
            // Allocates so many blocks, and frees every second.
            ["alloc", count, bytes] => {
                let (count, bytes): (usize, usize) =
                    (count.parse().unwrap(), bytes.parse().unwrap());
                for index in 0..count {
                    let mut address = 0usize;
                    // SAFETY: the address points to room for one.
                    let result =
                        unsafe { malloc.expect("loaded")(&raw mut address as usize, bytes) };
                    assert_eq!(result, 0);
                    if index % 2 == 1 {
                        // SAFETY: given by the call above.
                        assert_eq!(unsafe { free.expect("loaded")(address) }, 0);
                    }
                }
            }
            // Starts a child that allocates the same and ends.
            ["fork", count, bytes] => {
                // SAFETY: the child makes calls of the stand-ins alone and ends without handlers.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    let (count, bytes): (usize, usize) =
                        (count.parse().unwrap(), bytes.parse().unwrap());
                    for _ in 0..count {
                        let mut address = 0usize;
                        // SAFETY: as above.
                        unsafe { malloc.expect("loaded")(&raw mut address as usize, bytes) };
                    }
                    // SAFETY: ends this process.
                    unsafe { libc::_exit(0) };
                }
                pids.push(pid);
            }
            _ => panic!("{line:?} is nothing this program can do"),
        }
        for pid in pids.drain(..) {
            // SAFETY: our own child.
            unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
        }
        println!("done {line}");
        std::io::stdout().flush().unwrap();
    }
}
