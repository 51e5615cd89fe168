//! Does a return probe survive a seccomp filter on this kernel?
//!
//! From 6.11 on the kernel returns from a probed function by a system call of its own, and until
//! that was exempted a filter that does not list it (every container engine's default) killed the
//! program. Version numbers do not tell, since distributions carry the fix backwards, so the agent
//! tries it: a child of its own sets such a filter and calls a probed function of its own program.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use crate::host::perf::{self, Uprobe};
use crate::host::procfs;

/// The hidden command that the child runs.
pub const CHILD: &str = "preflight-child";
/// Number of the uretprobe system call on x86-64.
pub const URETPROBE: u32 = 335;
/// A child that takes longer hangs, which is as bad as dying.
const LIMIT: Duration = Duration::from_secs(5);

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preflight {
    /// Whether processes with a seccomp filter can be probed.
    pub survives: bool,
    pub detail: String,
}

/// Tries it. Where it cannot be tried, the kernel's version decides: before 6.11 there is no such
/// system call.
pub fn run(kernel: &str) -> Preflight {
    match attempt(URETPROBE) {
        Ok(preflight) => preflight,
        Err(error) => Preflight {
            survives: version(kernel).is_some_and(|version| version < (6, 11)),
            detail: format!("it could not be tried: {error:#}"),
        },
    }
}

/// Lets a child that may not make that system call run through a return probe.
pub fn attempt(forbidden: u32) -> anyhow::Result<Preflight> {
    let program = Path::new("/proc/self/exe");
    let mut child = Command::new(program)
        .args([CHILD, &forbidden.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("failed to start a child")?;
    let result = probe(&mut child, program);
    if result.is_err() {
        // Our own child; it may have ended by itself.
        let _ = child.kill();
        let _ = child.wait();
    }
    result
}

fn probe(child: &mut Child, program: &Path) -> anyhow::Result<Preflight> {
    let output = child.stdout.take().context("no pipe from the child")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    let offset: u64 = line
        .trim()
        .parse()
        .with_context(|| format!("the child said {line:?}, not where its function is"))?;
    let probe = Uprobe {
        file: program,
        offset,
        at_return: true,
        reference_counter: 0,
        pid: child.id(),
    };
    let event = probe.open().context("failed to set a return probe")?;
    // Closing its input lets the child go on.
    drop(child.stdin.take());
    let status = wait(child)?;
    let hits = perf::count(&event).context("failed to read the probe's count")?;
    judge(status, hits)
}

/// `None` for a child that hung.
fn wait(child: &mut Child) -> anyhow::Result<Option<ExitStatus>> {
    let end = Instant::now() + LIMIT;
    while Instant::now() < end {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

fn judge(status: Option<ExitStatus>, hits: u64) -> anyhow::Result<Preflight> {
    let Some(status) = status else {
        return Ok(Preflight {
            survives: false,
            detail: "a probed child with a filter hung".into(),
        });
    };
    if let Some(signal) = status.signal() {
        return Ok(Preflight {
            survives: false,
            detail: format!("a probed child with a filter was killed by signal {signal}"),
        });
    }
    if !status.success() {
        bail!("the child could not set its filter");
    }
    if hits == 0 {
        bail!("the probe did not fire");
    }
    Ok(Preflight {
        survives: true,
        detail: "a probed child with a filter lived".into(),
    })
}

/// The two first numbers of a kernel's version.
fn version(kernel: &str) -> Option<(u32, u32)> {
    let mut numbers = kernel.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// What the child does; gives its exit code.
pub fn child(forbidden: u32) -> u8 {
    let Some(offset) = offset_of_target() else {
        return 2;
    };
    println!("{offset}");
    if std::io::stdout().flush().is_err() {
        return 2;
    }
    let mut line = String::new();
    // Ends when the probe is set.
    let _ = std::io::stdin().read_line(&mut line);
    if forbid(forbidden).is_err() {
        return 3;
    }
    target();
    0
}

/// The function that is probed. It makes a system call, so that the check itself can be checked: a
/// filter against that one has to kill it.
#[inline(never)]
extern "C" fn target() -> libc::pid_t {
    // SAFETY: a query without side effects.
    std::hint::black_box(unsafe { libc::getppid() })
}

/// Offset of the probed function in this program's file.
fn offset_of_target() -> Option<u64> {
    let address = target as *const () as u64;
    let mappings = procfs::mappings(std::process::id());
    let mapping = mappings
        .iter()
        .find(|mapping| (mapping.start..mapping.end).contains(&address))?;
    Some(address - mapping.start + mapping.offset)
}

/// Installs a filter that kills this process if it makes that system call.
fn forbid(call: u32) -> std::io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let mut filter = [
        // The number is the first word of what a filter is shown.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: call,
        },
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_PROCESS),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the program and its instructions live until the calls are over.
    let results = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ),
        ]
    };
    if results == [0, 0] {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        let killed = judge(Some(ExitStatus::from_raw(libc::SIGSYS)), 1).unwrap();
        assert!(!killed.survives && killed.detail.contains("signal 31"));
        assert!(!judge(None, 0).unwrap().survives);
        assert!(judge(Some(ExitStatus::from_raw(0)), 1).unwrap().survives);
        assert!(
            judge(Some(ExitStatus::from_raw(0)), 0).is_err(),
            "no hit proves nothing"
        );
        assert!(judge(Some(ExitStatus::from_raw(3 << 8)), 0).is_err());
        assert_eq!(version("6.12.7-200.fc41"), Some((6, 12)));
        assert_eq!(version("x"), None);
    }
}
