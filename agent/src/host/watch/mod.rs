//! Tells of every program that maps a CUDA library, as it does: the kernel writes a record of each
//! executable mapping into a ring per CPU, and a thread reads them.
//!
//! Of each new program the thread keeps the mappings since its exec, so that a process that is
//! over in a few milliseconds still has an executable and mappings for its stacks. What is kept is
//! bounded; a record may be lost, which is counted and told, so that the listener searches all
//! processes.

mod records;
mod ring;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::procfs::Mapping;
use super::{library, perf};
use records::Record;
use ring::Ring;

/// Rings are read at most this often: a host that starts thousands of programs a second must not
/// keep the agent busy.
const PAUSE: Duration = Duration::from_millis(1);
/// How often CPUs are looked for that came or went.
const CPU_CHECK: Duration = Duration::from_secs(5);
/// New programs whose mappings are kept, and mappings of each.
const PROGRAMS: usize = 1024;
const MAPPINGS: usize = 512;

/// A process has mapped a CUDA library.
#[derive(Debug, Clone)]
pub struct Mapped {
    pub pid: u32,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub at_ns: u64,
    /// Executable mappings since its exec, if that was seen, in order of address.
    pub mappings: Vec<Mapping>,
    /// The program it runs, if its exec was seen.
    pub exe: Option<String>,
}

/// What a listener hears.
#[derive(Debug, Clone)]
pub enum Sighting {
    Mapped(Mapped),
    /// Records were lost: anything may have been mapped.
    Overflow,
}

/// Figures for `status`.
#[derive(Debug, Default)]
pub struct Figures {
    pub cpus: AtomicUsize,
    pub lost: AtomicU64,
}

/// The thread; ends when dropped.
pub struct Watch {
    stop: OwnedFd,
    pub figures: Arc<Figures>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watch {
    /// Fails where the kernel or our rights do not allow it.
    pub fn start(tell: impl FnMut(Sighting) + Send + 'static) -> io::Result<Self> {
        // SAFETY: a system call without memory; its result is checked.
        let stop = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        // SAFETY: as above.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if stop < 0 || epoll < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: both were just made and belong to nobody else.
        let (stop, epoll) = unsafe { (OwnedFd::from_raw_fd(stop), OwnedFd::from_raw_fd(epoll)) };
        add(&epoll, stop.as_raw_fd(), STOP)?;
        let figures = Arc::new(Figures::default());
        let mut watcher = Watcher {
            epoll,
            rings: BTreeMap::new(),
            programs: Programs::default(),
            figures: Arc::clone(&figures),
            tell,
        };
        watcher.follow_cpus()?;
        let thread = std::thread::Builder::new()
            .name("watch".into())
            .spawn(move || watcher.run())?;
        Ok(Self {
            stop,
            figures,
            thread: Some(thread),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the buffer has the eight bytes that an eventfd takes.
        unsafe { libc::write(self.stop.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The mark of the descriptor that ends the thread; others are marked with their CPU.
const STOP: u64 = u64::MAX;

fn add(epoll: &OwnedFd, fd: i32, mark: u64) -> io::Result<()> {
    let mut event = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: mark,
    };
    // SAFETY: the event lives until the call is over.
    let result =
        unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

struct CpuRing {
    ring: Ring,
    /// How long the event was on when last asked.
    enabled_ns: u64,
}

struct Watcher<F> {
    epoll: OwnedFd,
    rings: BTreeMap<u32, CpuRing>,
    programs: Programs,
    figures: Arc<Figures>,
    tell: F,
}

impl<F: FnMut(Sighting)> Watcher<F> {
    fn run(&mut self) {
        let mut checked = Instant::now();
        let mut bytes = Vec::new();
        loop {
            let Some(ready) = self.wait() else { return };
            if !ready.is_empty() {
                // Let a burst gather; an only record is read a millisecond late at most.
                self.read(&ready, &mut bytes);
                std::thread::sleep(PAUSE);
            }
            if checked.elapsed() >= CPU_CHECK {
                checked = Instant::now();
                if let Err(error) = self.follow_cpus() {
                    warn!("new mappings may be noticed late: {error}");
                }
            }
        }
    }

    /// CPUs whose rings hold something; `None` to end.
    fn wait(&self) -> Option<Vec<u32>> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: the buffer has room for as many events as is said.
        let count = unsafe {
            libc::epoll_wait(
                self.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                events.len() as i32,
                CPU_CHECK.as_millis() as i32,
            )
        };
        let ready = &events[..usize::try_from(count).unwrap_or(0)];
        if ready.iter().any(|event| event.u64 == STOP) {
            return None;
        }
        Some(ready.iter().map(|event| event.u64 as u32).collect())
    }

    fn read(&mut self, cpus: &[u32], bytes: &mut Vec<u8>) {
        let mut all = Vec::new();
        for cpu in cpus {
            if let Some(cpu) = self.rings.get_mut(cpu) {
                bytes.clear();
                cpu.ring.drain(bytes);
                all.extend(records::parse(bytes));
            }
        }
        // A process that moved between CPUs has left its records in several rings.
        all.sort_by_key(|(at_ns, _)| *at_ns);
        let mut lost = false;
        for (at_ns, record) in all {
            match record {
                Record::Exec { pid } => self.programs.begin(pid),
                Record::Mapped { pid, mapping } => {
                    let is_cuda = library::layer_of(&mapping.path).is_some();
                    // A program may load its interpreter late. Before any CUDA library it is of no
                    // interest.
                    let is_late_python =
                        crate::python::is_library(&mapping.path) && self.programs.maps_cuda(pid);
                    self.programs.add(pid, mapping);
                    if is_cuda || is_late_python {
                        (self.tell)(Sighting::Mapped(self.programs.tell(pid, at_ns)));
                    }
                }
                Record::Lost(count) => {
                    self.figures.lost.fetch_add(count, Ordering::Relaxed);
                    lost = true;
                }
            }
        }
        if lost {
            self.programs = Programs::default();
            (self.tell)(Sighting::Overflow);
        }
    }

    /// Opens rings for CPUs that came, and closes those of CPUs that went. An error if not even
    /// one could be opened.
    fn follow_cpus(&mut self) -> io::Result<()> {
        let online = online_cpus()?;
        let before = self.rings.len();
        self.rings.retain(|cpu, ring| {
            // An event whose CPU was away for a while stays off when the CPU is back.
            let enabled_ns = perf::time_enabled(ring.ring.event()).unwrap_or(0);
            let is_on = enabled_ns > ring.enabled_ns;
            ring.enabled_ns = enabled_ns;
            online.contains(cpu) && is_on
        });
        let mut came = self.rings.len() < before;
        let mut failure = None;
        for cpu in online {
            if self.rings.contains_key(&cpu) {
                continue;
            }
            match self.open(cpu) {
                Ok(ring) => {
                    self.rings.insert(cpu, ring);
                    came = before > 0;
                }
                Err(error) => failure = Some((cpu, error)),
            }
        }
        self.figures.cpus.store(self.rings.len(), Ordering::Relaxed);
        if came {
            debug!(cpus = self.rings.len(), "CPUs came or went");
            (self.tell)(Sighting::Overflow);
        }
        match failure {
            // A CPU may go between the list and the attempt.
            Some((_, error)) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            Some((cpu, error)) => Err(io::Error::new(
                error.kind(),
                format!("failed to watch the mappings made on CPU {cpu}: {error}"),
            )),
            None => Ok(()),
        }
    }

    fn open(&self, cpu: u32) -> io::Result<CpuRing> {
        let ring = Ring::map(perf::open_mappings(cpu)?)?;
        add(&self.epoll, ring.fd(), u64::from(cpu))?;
        Ok(CpuRing {
            ring,
            enabled_ns: 0,
        })
    }
}

/// CPUs that run.
fn online_cpus() -> io::Result<Vec<u32>> {
    let path = "/sys/devices/system/cpu/online";
    let text = std::fs::read_to_string(path)
        .map_err(|error| io::Error::new(error.kind(), format!("failed to read {path}: {error}")))?;
    parse_cpus(text.trim())
        .ok_or_else(|| io::Error::other(format!("{path} holds {text:?}, not a list of CPUs")))
}

fn parse_cpus(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

/// Mappings of new programs, the oldest forgotten first.
#[derive(Default)]
struct Programs {
    mappings: HashMap<u32, Vec<Mapping>>,
    /// In the order of their execs; a pid may be in it twice.
    order: VecDeque<u32>,
}

impl Programs {
    fn begin(&mut self, pid: u32) {
        self.mappings.insert(pid, Vec::new());
        self.order.push_back(pid);
        if self.order.len() > PROGRAMS
            && let Some(old) = self.order.pop_front()
        {
            // Kept if it has run another program since.
            if !self.order.contains(&old) {
                self.mappings.remove(&old);
            }
        }
    }

    /// Of programs that began before the watch, nothing is kept: it would not be all.
    fn add(&mut self, pid: u32, mapping: Mapping) {
        if let Some(mappings) = self.mappings.get_mut(&pid)
            && mappings.len() < MAPPINGS
        {
            mappings.push(mapping);
        }
    }

    /// Of programs that began before the watch nobody knows: they are looked at once too often.
    fn maps_cuda(&self, pid: u32) -> bool {
        self.mappings.get(&pid).is_none_or(|mappings| {
            let mut mappings = mappings.iter();
            mappings.any(|mapping| library::layer_of(&mapping.path).is_some())
        })
    }

    fn tell(&self, pid: u32, at_ns: u64) -> Mapped {
        let mut mappings = self.mappings.get(&pid).cloned().unwrap_or_default();
        // The kernel maps the program itself before its loader maps anything.
        let exe = mappings.first().map(|mapping| mapping.path.clone());
        mappings.sort_by_key(|mapping| mapping.start);
        Mapped {
            pid,
            at_ns,
            mappings,
            exe,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus() {
        assert_eq!(parse_cpus("0-2,5,7-8"), Some(vec![0, 1, 2, 5, 7, 8]));
        assert_eq!(parse_cpus("0"), Some(vec![0]));
        assert_eq!(parse_cpus(""), None);
    }

    /// What an offline CPU does to an event: it is off from then on, and says nothing.
    #[test]
    fn an_event_that_went_off_is_opened_again() {
        // SAFETY: a system call without memory; its result is checked below.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        assert!(epoll >= 0);
        let (tell, told) = std::sync::mpsc::channel();
        let mut watcher = Watcher {
            // SAFETY: just made.
            epoll: unsafe { OwnedFd::from_raw_fd(epoll) },
            rings: BTreeMap::new(),
            programs: Programs::default(),
            figures: Arc::default(),
            tell: move |_| tell.send(()).unwrap(),
        };
        if let Err(error) = watcher.follow_cpus() {
            let text = format!("SKIPPED: mappings cannot be watched here: {error}\n");
            let _ = io::Write::write_all(&mut io::stderr(), text.as_bytes());
            return;
        }
        let cpus = watcher.rings.len();
        watcher.follow_cpus().unwrap();
        assert!(told.try_recv().is_err(), "nothing came or went");
        let first = watcher.rings.first_entry().unwrap();
        const PERF_EVENT_IOC_DISABLE: libc::c_ulong = 0x2401;
        // SAFETY: a system call on a descriptor we hold.
        let off = unsafe { libc::ioctl(first.get().ring.fd(), PERF_EVENT_IOC_DISABLE, 0) };
        assert_eq!(off, 0);
        // The first time it has been on since it was last asked.
        watcher.follow_cpus().unwrap();
        watcher.follow_cpus().unwrap();
        assert!(
            told.try_recv().is_ok(),
            "what happened meanwhile is to be searched for"
        );
        assert_eq!(watcher.rings.len(), cpus);
        std::thread::sleep(Duration::from_millis(1));
        watcher.follow_cpus().unwrap();
        assert!(told.try_recv().is_err(), "it is on again");
    }

    #[test]
    fn programs_are_forgotten_in_order_and_mappings_are_bounded() {
        let mapping = |path: &str| Mapping {
            start: 1,
            end: 2,
            offset: 0,
            executable: true,
            device: 0,
            inode: 0,
            path: path.into(),
            deleted: false,
        };
        let mut programs = Programs::default();
        programs.add(5, mapping("/lib/unseen.so"));
        assert_eq!(programs.tell(5, 0).exe, None, "its exec was not seen");
        for pid in 0..2 * PROGRAMS as u32 {
            programs.begin(pid);
            programs.add(pid, mapping("/bin/x"));
        }
        for _ in 0..2 * MAPPINGS {
            programs.add(2 * PROGRAMS as u32 - 1, mapping("/lib/y.so"));
        }
        assert_eq!(programs.mappings.len(), PROGRAMS);
        let last = programs.tell(2 * PROGRAMS as u32 - 1, 0);
        assert_eq!(
            (last.exe.as_deref(), last.mappings.len()),
            (Some("/bin/x"), MAPPINGS)
        );
        assert_eq!(programs.tell(0, 0).exe, None);
    }
}
