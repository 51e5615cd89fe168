//! Names against programs that are compiled here: which functions the compiler had to put into which
//! is in their sources, and where they were is what they say themselves.

mod debuginfod;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vramscope_agent::spool::rows::FrameRow;
use vramscope_agent::stacks::symbols::debugfile::Facts;
use vramscope_agent::stacks::symbols::{Code, Names, Options};

/// Each place says its label and address. What comes after `place` on a line is the line's mark.
const CPP: &str = r#"
#include <cstdio>
#include <fstream>
#include <string>
#define HERE(label) \
    do { \
        void *at; \
        asm volatile("lea 0(%%rip), %0" : "=r"(at) : : "memory"); \
        std::printf("at %s %p\n", label, at); \
    } while (0)
namespace app {
template <typename T> struct Pool {
    T held;
    __attribute__((always_inline)) inline T take(T n) {
        HERE("inlined"); // mark:take
        return n + held;
    }
};
__attribute__((always_inline)) inline int middle(Pool<int> &pool, int n) {
    return pool.take(n) * 2; // mark:middle
}
__attribute__((noinline)) int outer(int n) {
    Pool<int> pool{n};
    return middle(pool, n) + 3; // mark:outer
}
}
static __attribute__((noinline)) int hidden(int n) {
    HERE("hidden"); // mark:hidden
    return n ^ 5;
}
int main(int argc, char **) {
    int n = app::outer(argc) + hidden(argc);
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
        std::printf("map %s\n", line.c_str());
    return n == 0;
}
"#;

const RUST: &str = r#"
mod app {
    pub struct Pool<T>(pub T);
    impl<T: Copy + std::ops::Add<Output = T>> Pool<T> {
        #[inline(always)]
        pub fn take(&self, n: T) -> T {
            let at: u64;
            unsafe { std::arch::asm!("lea {}, [rip]", out(reg) at) }; // mark:take
            println!("at inlined {at:#x}");
            n + self.0
        }
    }
    #[inline(always)]
    fn middle(pool: &Pool<u32>, n: u32) -> u32 {
        pool.take(n) * 2 // mark:middle
    }
    #[inline(never)]
    pub fn outer(n: u32) -> u32 {
        middle(&Pool(n), n) + 3 // mark:outer
    }
}
fn main() {
    let n = app::outer(std::env::args().count() as u32);
    for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        println!("map {line}");
    }
    std::process::exit(i32::from(n == 0));
}
"#;

fn skipped(why: &str) {
    // Not by eprintln!, which the test harness keeps to itself when a test passes.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Runs a tool; false, said aloud, if it is not there.
fn run(tool: &str, arguments: &[&str]) -> bool {
    match Command::new(tool)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
    {
        Ok(output) => {
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{tool} {arguments:?}: {error}");
            true
        }
        Err(error) => {
            skipped(&format!("{tool}: {error}"));
            false
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A program in a folder of its own.
struct Built {
    folder: tempfile::TempDir,
    program: PathBuf,
    source: &'static str,
}

impl Built {
    /// `None`, said aloud, where there is no compiler.
    fn cpp(more: &[&str]) -> Option<Self> {
        let built = Self::new(CPP, "program.cc");
        let source = built.folder.path().join("program.cc");
        let mut arguments = vec![
            "-O2",
            "-g",
            "-rdynamic",
            "-o",
            text(&built.program),
            text(&source),
        ];
        arguments.extend(more);
        run("c++", &arguments).then_some(built)
    }

    fn rust() -> Option<Self> {
        let built = Self::new(RUST, "program.rs");
        let source = built.folder.path().join("program.rs");
        let flags = [
            "--edition=2021",
            "-Copt-level=2",
            "-Cdebuginfo=2",
            "-Cstrip=none",
            "-o",
        ];
        let mut arguments = flags.to_vec();
        arguments.extend([text(&built.program), text(&source)]);
        run("rustc", &arguments).then_some(built)
    }

    fn new(source: &'static str, name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(name), source).unwrap();
        Self {
            program: folder.path().join("program"),
            folder,
            source,
        }
    }

    /// Where the program's places were, by label: the offset in its file behind each.
    fn places(&self) -> BTreeMap<String, u64> {
        let output = Command::new(&self.program).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
        let mappings: Vec<(u64, u64, u64)> = said
            .lines()
            .filter_map(|line| line.strip_prefix("map "))
            .filter(|line| line.ends_with(text(&self.program)))
            .map(|line| {
                let words: Vec<_> = line.split_ascii_whitespace().collect();
                let (start, end) = words[0].split_once('-').unwrap();
                (hex(start), hex(end), hex(words[2]))
            })
            .collect();
        let places = said.lines().filter_map(|line| line.strip_prefix("at "));
        places
            .map(|line| {
                let (label, address) = line.split_once(' ').unwrap();
                let address = hex(address);
                let within = |(start, end, _): &&(u64, u64, u64)| (*start..*end).contains(&address);
                let (start, _, offset) = mappings.iter().find(within).unwrap();
                (label.to_string(), address - start + offset)
            })
            .collect()
    }

    fn line(&self, mark: &str) -> i32 {
        let mark = format!("mark:{mark}");
        let line = self.source.lines().position(|line| line.ends_with(&mark));
        line.unwrap() as i32 + 1
    }

    fn code(&self) -> Code {
        Code {
            path: text(&self.program).to_string(),
            build_id: Facts::read(&self.program).unwrap().build_id,
            open_path: Some(self.program.clone()),
        }
    }

    /// Splits the debug information off into a file.
    fn strip_into(&self, debug: &Path) -> bool {
        run(
            "objcopy",
            &["--only-keep-debug", text(&self.program), text(debug)],
        ) && run("strip", &["--strip-all", text(&self.program)])
    }
}

/// function, kind, line.
type Named<'a> = (Option<&'a str>, &'static str, Option<i32>);

fn named(frames: &[FrameRow]) -> Vec<Named<'_>> {
    let named = frames.iter();
    named
        .map(|frame| (frame.function.as_deref(), frame.kind.name(), frame.line))
        .collect()
}

fn with_debug_symbols() -> Options {
    Options {
        debug_symbols: true,
        ..Options::default()
    }
}

fn is_whole(built: &Built, frames: &[FrameRow]) {
    let expected = [
        ("take", "inlined"),
        ("middle", "inlined"),
        ("outer", "native"),
    ];
    let got = named(frames);
    assert_eq!(got.len(), expected.len(), "{got:?}");
    for ((function, kind, line), (name, expected)) in got.iter().zip(expected) {
        let function = function.unwrap();
        // Demangled: as in the source, whatever stands around it.
        assert!(
            function.contains(name) && !function.starts_with("_Z") && !function.starts_with("_R"),
            "{got:?}"
        );
        assert_eq!(
            (*kind, *line),
            (expected, Some(built.line(name))),
            "{got:?}"
        );
    }
    assert!(frames[2].function.as_ref().unwrap().contains("app::outer"));
    assert!(
        frames
            .iter()
            .all(|frame| frame.file.as_ref().unwrap().contains("program."))
    );
}

/// Inlined functions are frames of their own, innermost first, each with its line.
#[test]
fn inlined_functions_of_cpp() {
    let Some(built) = Built::cpp(&[]) else { return };
    let places = built.places();
    let mut names = Names::new(with_debug_symbols());
    is_whole(&built, &names.frames(&built.code(), places["inlined"]));
    let hidden = names.frames(&built.code(), places["hidden"]);
    assert!(
        hidden[0].function.as_ref().unwrap().contains("hidden"),
        "{hidden:?}"
    );
    assert_eq!(hidden[0].line, Some(built.line("hidden")));
    // Without debug information there are the functions that code is in, and no lines.
    let mut names = Names::new(Options::default());
    let frames = names.frames(&built.code(), places["inlined"]);
    assert_eq!(named(&frames), [(Some("app::outer(int)"), "native", None)]);
}

#[test]
fn inlined_functions_of_rust() {
    let Some(built) = Built::rust() else { return };
    let places = built.places();
    let mut names = Names::new(with_debug_symbols());
    is_whole(&built, &names.frames(&built.code(), places["inlined"]));
}

/// Of a stripped program the dynamic symbols are left. A function that has none gets no name: above
/// all not that of the nearest one that has.
#[test]
fn stripped_code_gets_no_wrong_name() {
    let Some(built) = Built::cpp(&[]) else { return };
    let places = built.places();
    if !run("strip", &["--strip-all", text(&built.program)]) {
        return;
    }
    for options in [Options::default(), with_debug_symbols()] {
        let mut names = Names::new(options);
        let frames = names.frames(&built.code(), places["inlined"]);
        assert_eq!(named(&frames), [(Some("app::outer(int)"), "native", None)]);
        let frames = names.frames(&built.code(), places["hidden"]);
        assert_eq!(named(&frames), [(None, "native", None)]);
        assert_eq!(frames[0].offset, Some(places["hidden"] as i64));
        assert_eq!(frames[0].build_id, built.code().build_id);
    }
    // An offset that is no code, and one behind the file's end.
    let mut names = Names::new(Options::default());
    for offset in [1, u64::MAX] {
        let frames = names.frames(&built.code(), offset);
        assert_eq!(named(&frames), [(None, "native", None)]);
    }
}

/// By the link's name beside the file, in `.debug` and below a folder; by build id; and a debug file
/// of another build is never taken, with build ids or without.
#[test]
fn separate_debug_files() {
    for flags in [&[][..], &["-Wl,--build-id=none"]] {
        let has_build_id = flags.is_empty();
        let Some(built) = Built::cpp(flags) else {
            return;
        };
        let places = built.places();
        let folder = built.folder.path();
        let debug = folder.join("program.debug");
        if !built.strip_into(&debug) {
            return;
        }
        let link = format!("--add-gnu-debuglink={}", text(&debug));
        assert!(run("objcopy", &[&link, text(&built.program)]));
        assert_eq!(built.code().build_id.is_some(), has_build_id);
        let elsewhere = tempfile::tempdir().unwrap();
        let options = Options {
            folders: vec![elsewhere.path().to_path_buf()],
            ..with_debug_symbols()
        };
        let frames = || Names::new(options.clone()).frames(&built.code(), places["inlined"]);

        is_whole(&built, &frames());
        let beside = folder.join(".debug");
        let below = elsewhere.path().join(folder.strip_prefix("/").unwrap());
        let mut last = debug;
        for to in [&beside, &below] {
            std::fs::create_dir_all(to).unwrap();
            let next = to.join("program.debug");
            std::fs::rename(&last, &next)
                .or_else(|_| std::fs::copy(&last, &next).and_then(|_| std::fs::remove_file(&last)))
                .unwrap();
            is_whole(&built, &frames());
            last = next;
        }
        if let Some(build_id) = &built.code().build_id {
            let by_id = elsewhere.path().join(".build-id").join(&build_id[..2]);
            std::fs::create_dir_all(&by_id).unwrap();
            let next = by_id.join(format!("{}.debug", &build_id[2..]));
            std::fs::rename(&last, &next).unwrap();
            is_whole(&built, &frames());
            // Without debug symbols its names serve all the same.
            let mut names = Names::new(Options {
                debug_symbols: false,
                ..options.clone()
            });
            let hidden = names.frames(&built.code(), places["hidden"]);
            assert!(hidden[0].function.as_ref().unwrap().contains("hidden"));
            std::fs::rename(&next, &last).unwrap();
        }
        // The same place, another build.
        let other = Built::cpp(&[flags, &["-DOTHER", "-O1"]].concat()).unwrap();
        assert!(run(
            "objcopy",
            &["--only-keep-debug", text(&other.program), text(&last)]
        ));
        assert_eq!(
            named(&frames()),
            [(Some("app::outer(int)"), "native", None)]
        );
    }
}
