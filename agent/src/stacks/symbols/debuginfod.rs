//! Debug files from a server (<https://sourceware.org/elfutils/Debuginfod.html>), only where one is
//! configured: the environment's `DEBUGINFOD_URLS` is not looked at.
//!
//! A file is asked for once by its build id, and kept in a folder of bounded size; the least recently
//! used ones make room. What comes is written beside it and takes its name only when it is whole and
//! has that build id. Each download has a deadline, and at most half of the folder's bytes.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};

use super::debugfile;

/// See the module's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    pub urls: Vec<String>,
    pub cache: PathBuf,
    pub cache_bytes: u64,
    /// For one file from one server.
    pub deadline: Duration,
}

/// Whether a server's address makes sense; an error says what is wrong with it.
pub fn check(url: &str) -> Result<(), String> {
    let uri: Result<ureq::http::Uri, _> = url.parse();
    let uri = uri.map_err(|error| format!("debuginfod url {url:?} makes no sense: {error}"))?;
    match uri.scheme_str() {
        Some("http") if uri.host().is_some_and(|host| !host.is_empty()) => Ok(()),
        Some("https") => Err(format!(
            "debuginfod url {url:?}: the agent speaks no TLS; run a debuginfod near it that passes questions on (DEBUGINFOD_URLS={url} debuginfod), and name that one"
        )),
        _ => Err(format!(
            "debuginfod url {url:?}: write it as in http://debuginfod.example:8002"
        )),
    }
}

/// Asks the servers.
pub struct Client {
    options: Options,
    agent: ureq::Agent,
}

/// Files that are being written end so.
const PART: &str = "part";
const NAME: &str = "debug";

impl Client {
    pub fn new(options: Options) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(options.deadline))
            .proxy(None)
            .max_redirects(3)
            .http_status_as_error(false)
            .user_agent(concat!("vramscope-agent/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            agent: config.new_agent(),
            options,
        }
    }

    /// The debug file of a build: from the folder, or from the first server that has it. `None`: no
    /// server has it. An error: one might, and could not be asked.
    pub fn get(&self, build_id: &str) -> anyhow::Result<Option<PathBuf>> {
        // It becomes part of a path and of an address.
        if build_id.is_empty() || !build_id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Ok(None);
        }
        let path = self.options.cache.join(format!("{build_id}.{NAME}"));
        if debugfile::is_of_build(&path, build_id) {
            // So that it is not the next to make room.
            let used = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
            used.ok();
            return Ok(Some(path));
        }
        fs::create_dir_all(&self.options.cache)
            .with_context(|| format!("failed to create folder {}", self.options.cache.display()))?;
        let mut failure = None;
        for url in &self.options.urls {
            match self.download(url, build_id, &path) {
                Ok(true) => return Ok(Some(path)),
                Ok(false) => {}
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(None), Err)
    }

    fn download(&self, url: &str, build_id: &str, path: &Path) -> anyhow::Result<bool> {
        let url = format!("{}/buildid/{build_id}/debuginfo", url.trim_end_matches('/'));
        let asking = || format!("failed to get {url}");
        let mut response = self.agent.get(&url).call().with_context(asking)?;
        match response.status().as_u16() {
            200 => {}
            404 => return Ok(false),
            status => bail!("{url} answered {status}"),
        }
        let most = self.options.cache_bytes / 2;
        if response
            .body()
            .content_length()
            .is_some_and(|length| length > most)
        {
            bail!("{url} is larger than half of debuginfod_cache_bytes");
        }
        let part = path.with_extension(PART);
        let mut body = response.body_mut().as_reader();
        let written = self.write(&mut body, &part, most).with_context(asking);
        let checked = written.and_then(|()| {
            if debugfile::is_of_build(&part, build_id) {
                self.make_room(fs::metadata(&part)?.len(), &part)?;
                fs::rename(&part, path)
                    .with_context(|| format!("failed to write {}", path.display()))
            } else {
                bail!("{url} is no debug file of that build");
            }
        });
        if checked.is_err() {
            let _ = fs::remove_file(&part);
        }
        checked.map(|()| true)
    }

    fn write(&self, body: &mut impl Read, part: &Path, most: u64) -> anyhow::Result<()> {
        // What an earlier run left there counts too.
        self.make_room(0, part)?;
        let mut file =
            File::create(part).with_context(|| format!("failed to write {}", part.display()))?;
        let bytes = io::copy(&mut body.take(most + 1), &mut file)?;
        if bytes > most {
            bail!("it is larger than half of debuginfod_cache_bytes");
        }
        file.flush()?;
        Ok(())
    }

    /// Removes what was least recently used until `bytes` more fit; also what an earlier run did not
    /// finish, but for `keep`.
    fn make_room(&self, bytes: u64, keep: &Path) -> anyhow::Result<()> {
        let folder = &self.options.cache;
        let mut files = Vec::new();
        for entry in fs::read_dir(folder)
            .with_context(|| format!("failed to read {}", folder.display()))?
            .flatten()
        {
            let path = entry.path();
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            let has_extension = |wanted: &str| path.extension().is_some_and(|e| e == wanted);
            if has_extension(PART) && path != keep {
                let _ = fs::remove_file(&path);
            } else if has_extension(NAME) {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push((used, metadata.len(), path));
            }
        }
        files.sort();
        let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, size, path) in files {
            if total + bytes <= self.options.cache_bytes {
                break;
            }
            // Whoever reads it now has it mapped, and keeps it.
            if fs::remove_file(&path).is_ok() {
                total -= size;
            }
        }
        Ok(())
    }
}
