//! One page from one address, in the network namespace where that address means something.
//!
//! Whoever answers may be slow, endless, huge or broken: the whole exchange has one deadline and the
//! answer a size. One connection a page, closed after it; no redirects, and no proxy whatever the
//! environment says.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use ureq::http::Uri;

/// A page larger than this is not read, bytes. A vLLM page of many models has some hundred KiB.
pub const MAX_PAGE: u64 = 8 << 20;

/// Bytes of an answer's head at most.
const MAX_HEAD: usize = 64 * 1024;

/// Reads pages.
pub struct Fetcher {
    agent: ureq::Agent,
}

impl Fetcher {
    /// `deadline`: for a whole exchange, from connecting to the last byte.
    pub fn new(deadline: Duration) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(deadline))
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .max_idle_connections(0)
            .max_response_header_size(MAX_HEAD)
            .user_agent(concat!("vramscope-agent/", env!("CARGO_PKG_VERSION")))
            .accept("text/plain;version=0.0.4")
            .build();
        Self {
            agent: config.new_agent(),
        }
    }

    /// The page's bytes, or why there are none.
    pub fn get(&self, uri: &Uri) -> Result<Vec<u8>, String> {
        let request = self.agent.get(uri).header("Connection", "close");
        let mut response = request.call().map_err(|error| error.to_string())?;
        if response.status() != 200 {
            return Err(format!("answered {}", response.status()));
        }
        let body = response.body_mut().with_config().limit(MAX_PAGE);
        body.read_to_vec().map_err(|error| match error {
            ureq::Error::BodyExceedsLimit(limit) => {
                format!("the page is larger than {} MiB", limit >> 20)
            }
            error => error.to_string(),
        })
    }
}

/// The network namespace of a process, by the kernel's number for it.
pub fn namespace_of(pid: u32) -> io::Result<u64> {
    Ok(std::fs::metadata(format!("/proc/{pid}/ns/net"))?.ino())
}

/// Lets this thread work in other network namespaces.
pub struct Namespaces {
    own: File,
    own_id: u64,
}

impl Namespaces {
    pub fn open() -> io::Result<Self> {
        let own = File::open("/proc/thread-self/ns/net")?;
        let own_id = own.metadata()?.ino();
        Ok(Self { own, own_id })
    }

    pub fn own_id(&self) -> u64 {
        self.own_id
    }

    /// Does `work` in the namespace of a process. The outer error: this thread could not come back,
    /// and must not do anything more.
    pub fn within<T>(
        &self,
        pid: Option<u32>,
        work: impl FnOnce() -> T,
    ) -> io::Result<Result<T, String>> {
        let Some(pid) = pid else {
            return Ok(Ok(work()));
        };
        let opened = File::open(format!("/proc/{pid}/ns/net"))
            .and_then(|file| Ok((file.metadata()?.ino(), file)));
        let file = match opened {
            Ok((id, _)) if id == self.own_id => return Ok(Ok(work())),
            Ok((_, file)) => file,
            Err(error) => {
                return Ok(Err(format!(
                    "process {pid} has no network namespace any more: {error}"
                )));
            }
        };
        if let Err(error) = enter(&file) {
            return Ok(Err(format!(
                "the network namespace of process {pid} cannot be entered ({error}); it takes CAP_SYS_ADMIN"
            )));
        }
        let result = work();
        enter(&self.own)?;
        Ok(Ok(result))
    }
}

fn enter(namespace: &File) -> io::Result<()> {
    // SAFETY: a system call on a file descriptor we hold; it moves this thread and no other.
    match unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
