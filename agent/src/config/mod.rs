//! The agent's configuration: one TOML file, every key also as a flag and as an environment
//! variable (`VRAMSCOPE_` and the key in capitals). Flags win over the environment, which wins
//! over the file, which wins over the defaults.

mod value;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::host::redact;
use crate::host::safety::SeccompRule;
use crate::recorder::Travel;
use crate::stacks::symbols::{self, debuginfod};
use crate::traffic::endpoint::Endpoint;
use value::ToToml;
pub use value::{Bytes, Span};

/// One list of keys makes the configuration, the file's form, the flags and the printed form.
macro_rules! configuration {
    ($( $(#[doc = $doc:literal])+ $name:ident: $kind:ty = $default:expr, $env:literal $(, $extra:ident)? ; )+
     optional: $( $(#[doc = $odoc:literal])+ $oname:ident: $okind:ty, $oenv:literal ; )+) => {
        /// The effective configuration.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Config {
            $( $(#[doc = $doc])+ pub $name: $kind, )+
            $( $(#[doc = $odoc])+ pub $oname: Option<$okind>, )+
        }

        /// What a file, the environment or flags set.
        #[derive(Debug, Clone, Default, Deserialize, clap::Args)]
        #[serde(deny_unknown_fields, default)]
        pub struct Settings {
            $( $(#[doc = $doc])+ #[arg(long, env = $env, global = true $(, $extra = ',')?)] pub $name: Option<$kind>, )+
            $( $(#[doc = $odoc])+ #[arg(long, env = $oenv, global = true)] pub $oname: Option<$okind>, )+
        }

        impl Default for Config {
            fn default() -> Self {
                Self { $( $name: $default, )+ $( $oname: None, )+ }
            }
        }

        impl Config {
            fn set(&mut self, settings: Settings) {
                $( if let Some(value) = settings.$name { self.$name = value; } )+
                $( if settings.$oname.is_some() { self.$oname = settings.$oname; } )+
            }

            /// The configuration as a file that sets it, each key with its meaning.
            pub fn to_toml(&self) -> String {
                let mut text = String::from("# Effective configuration of vramscope-agent.\n");
                $( write_key(&mut text, &[$($doc),+], stringify!($name), $env, Some(self.$name.to_toml())); )+
                $( write_key(&mut text, &[$($odoc),+], stringify!($oname), $oenv, self.$oname.as_ref().map(ToToml::to_toml)); )+
                text
            }
        }
    };
}

configuration! {
    /// Folder for events that were not acknowledged yet, and for the agent's own state.
    spool: PathBuf = "/var/lib/vramscope/spool".into(), "VRAMSCOPE_SPOOL";
    /// What the spool may take on the disk. When that much waits, what is there stays, and new
    /// rows are dropped and counted as spool_full.
    spool_limit: Bytes = Bytes(2 << 30), "VRAMSCOPE_SPOOL_LIMIT";
    /// Where the probes are kept in the kernel while no agent runs; on a BPF file system.
    pin_path: PathBuf = "/sys/fs/bpf/vramscope".into(), "VRAMSCOPE_PIN_PATH";
    /// Library files to hook before any process maps them, besides those found in the usual
    /// folders. As a flag: a comma between them.
    libraries: Vec<PathBuf> = Vec::new(), "VRAMSCOPE_LIBRARIES", value_delimiter;
    /// How often events are written to the spool, durably. What lies between two writes stays in
    /// the kernel's ring and survives a kill.
    flush_interval: Span = Span(Duration::from_secs(1)), "VRAMSCOPE_FLUSH_INTERVAL";
    /// How often the list of processes is searched for new ones. Where the kernel tells of new
    /// mappings (`watch`) all others are searched every `rescan_interval`; where not, each time.
    scan_interval: Span = Span(Duration::from_secs(2)), "VRAMSCOPE_SCAN_INTERVAL";
    /// In that time all processes are searched once more, a few at a time, against whatever was
    /// missed; and files that nobody can use any more are let go.
    rescan_interval: Span = Span(Duration::from_secs(60)), "VRAMSCOPE_RESCAN_INTERVAL";
    /// How often NVML is asked for the state of the cards.
    sample_interval: Span = Span(Duration::from_secs(10)), "VRAMSCOPE_SAMPLE_INTERVAL";
    /// Length of the windows in which events and losses are counted.
    window: Span = Span(Duration::from_secs(60)), "VRAMSCOPE_WINDOW";
    /// How long an event waits for an earlier one that is under way, such as a free that the
    /// driver takes long over.
    hold: Span = Span(Duration::from_millis(200)), "VRAMSCOPE_HOLD";
    /// How many allocations may be alive in the books, in all processes together; each takes up
    /// to 96 bytes of memory. Beyond that new ones are written but not followed, and counted as
    /// lost (live_full).
    live_limit: usize = 16_000_000, "VRAMSCOPE_LIVE_LIMIT";
    /// Bytes of the kernel's ring for records, a power of two from 4096 on. What comes while it is
    /// full is lost and counted (ring_full). Takes effect when the probes are made anew.
    ring_bytes: usize = 16 << 20, "VRAMSCOPE_RING_BYTES";
    /// How much of the stack is copied with a call of the driver or the runtime, so that callers
    /// without frame pointers are found: 4KiB, 8KiB, 16KiB, 32KiB or 64KiB; 0B: none, stacks are
    /// walked by frame pointers alone. See docs/stacks.md.
    stack_bytes: Bytes = Bytes(16 << 10), "VRAMSCOPE_STACK_BYTES";
    /// How many stacks of such calls are copied in a second of each thread; those of the calls beyond
    /// are walked by frame pointers.
    call_stacks: usize = 20_000, "VRAMSCOPE_CALL_STACKS";
    /// The same for the many events of a framework's allocator.
    framework_stacks: usize = 100, "VRAMSCOPE_FRAMEWORK_STACKS";
    /// Bytes of the kernel's ring for copied stacks, a power of two from 4096 on. A stack that finds
    /// it full is walked by frame pointers instead (counted as stack_not_copied; no event is lost).
    /// Takes effect when the probes are made anew.
    stack_ring_bytes: usize = 16 << 20, "VRAMSCOPE_STACK_RING_BYTES";
    /// How many threads may have been inside a traced call and still live; some 2,600 bytes
    /// of kernel memory for each that has. Calls of others are lost and counted (threads_full). Takes
    /// effect when the probes are made anew.
    threads_limit: usize = 65_536, "VRAMSCOPE_THREADS_LIMIT";
    /// Hook a whole library by one link where the kernel can (6.6 on); false: one perf event for
    /// each function, which every kernel can. Takes effect when the probes are made anew.
    uprobe_multi: bool = true, "VRAMSCOPE_UPROBE_MULTI";
    /// Let the kernel tell of new mappings in all processes, so that a library is hooked within
    /// milliseconds after it was loaded.
    watch: bool = true, "VRAMSCOPE_WATCH";
    /// Probe this host's programs. False: cards are sampled, and nothing is hooked.
    probes: bool = true, "VRAMSCOPE_PROBES";
    /// Hook the allocators of frameworks (PyTorch). False, or the flag --no-framework: only the
    /// driver and the runtime.
    framework: bool = true, "VRAMSCOPE_FRAMEWORK";
    /// Read the frames of Python (CPython 3.10 to 3.13) where a stack runs through its interpreter;
    /// kernels from 5.17 on.
    python: bool = true, "VRAMSCOPE_PYTHON";
    /// Of how many of a framework's events in a second and thread Python frames are read at most, in
    /// tens. Reading takes some 3 us for 10 frames and 8 us for 40. 0: of none.
    python_framework_rate: usize = 10_000, "VRAMSCOPE_PYTHON_FRAMEWORK_RATE";
    /// The kill switch: while this file exists nothing is probed. `vramscope-agent off` and `on`
    /// make and remove it.
    off_file: PathBuf = "/var/lib/vramscope/off".into(), "VRAMSCOPE_OFF_FILE";
    /// Programs that are never probed, such as those that switch stacks in ways of their own:
    /// patterns of their paths, where * is any text. While one runs, the libraries that it maps
    /// are hooked for nobody. As a flag: a comma between them.
    deny_executables: Vec<String> = Vec::new(), "VRAMSCOPE_DENY_EXECUTABLES", value_delimiter;
    /// Libraries, and programs with a runtime inside, that may be hooked: patterns of their paths as
    /// the processes see them. All if empty.
    only_libraries: Vec<String> = Vec::new(), "VRAMSCOPE_ONLY_LIBRARIES", value_delimiter;
    /// Libraries that are hooked whoever maps them, against deny_executables and
    /// seccomp_processes: patterns of their paths.
    allow_libraries: Vec<String> = Vec::new(), "VRAMSCOPE_ALLOW_LIBRARIES", value_delimiter;
    /// Libraries that a process with a seccomp filter maps: auto hooks them unless a trial at the
    /// start shows that this kernel kills such processes; hook, refuse.
    seccomp_processes: SeccompRule = SeccompRule::Auto, "VRAMSCOPE_SECCOMP_PROCESSES";
    /// Read debug information (DWARF), for inlined functions, files and lines. On a thread of its own:
    /// large libraries take seconds, and memory.
    debug_symbols: bool = false, "VRAMSCOPE_DEBUG_SYMBOLS";
    /// Folders with separate debug files of stripped code. As a flag: a comma between them.
    debug_folders: Vec<PathBuf> = vec!["/usr/lib/debug".into()], "VRAMSCOPE_DEBUG_FOLDERS", value_delimiter;
    /// Servers that are asked for debug files by build id, as in http://debuginfod.example:8002; none
    /// unless named here, whatever DEBUGINFOD_URLS says. As a flag: a comma between them.
    debuginfod_urls: Vec<String> = Vec::new(), "VRAMSCOPE_DEBUGINFOD_URLS", value_delimiter;
    /// Folder for what they gave.
    debuginfod_cache: PathBuf = "/var/cache/vramscope/debuginfod".into(), "VRAMSCOPE_DEBUGINFOD_CACHE";
    /// What that folder may take on the disk; the least recently used files make room. A file of more
    /// than half of it is not taken.
    debuginfod_cache_bytes: Bytes = Bytes(4 << 30), "VRAMSCOPE_DEBUGINFOD_CACHE_BYTES";
    /// How long one download may take. The stack waits for it, and nothing else does.
    debuginfod_deadline: Span = Span(Duration::from_secs(60)), "VRAMSCOPE_DEBUGINFOD_DEADLINE";
    /// What becomes of raw events of frameworks (their roll-ups always travel): triggered: they are
    /// recorded on this host, and spans of them travel at an OOM, a failed allocation, or when the
    /// collector asks; always: they travel as all others do; never: they are recorded and stay.
    framework_events: Travel = Travel::Triggered, "VRAMSCOPE_FRAMEWORK_EVENTS";
    /// What recorded framework events may take on the disk, below the spool and beside
    /// spool_limit; the oldest are overwritten. 0B: none are recorded.
    recorder_bytes: Bytes = Bytes(1 << 30), "VRAMSCOPE_RECORDER_BYTES";
    /// After how many minutes recorded events are overwritten, however few. 0: none are recorded.
    recorder_minutes: usize = 30, "VRAMSCOPE_RECORDER_MINUTES";
    /// How much from before an OOM or a failed allocation travels.
    recorder_before: Span = Span(Duration::from_secs(60)), "VRAMSCOPE_RECORDER_BEFORE";
    /// How much from after it travels.
    recorder_after: Span = Span(Duration::from_secs(10)), "VRAMSCOPE_RECORDER_AFTER";
    /// Read the load of serving engines (vLLM, SGLang, Triton with TensorRT-LLM, TGI) from their
    /// metrics pages. False, or the flag --no-traffic: nobody is asked.
    scrape: bool = true, "VRAMSCOPE_SCRAPE";
    /// How often each of them is asked, once and over one connection.
    traffic_interval: Span = Span(Duration::from_secs(15)), "VRAMSCOPE_TRAFFIC_INTERVAL";
    /// Find the pages by the engines' processes, in their own network namespaces. False: only those in
    /// `traffic` are read.
    traffic_discovery: bool = true, "VRAMSCOPE_TRAFFIC_DISCOVERY";
    /// Metrics pages to read besides those found. In a file as [[traffic]] with url and, to say whose
    /// load it is, pid or process (a pattern of its command line, where * is any text): the page is
    /// then read in that process's network namespace. As a flag: addresses with a comma between them.
    traffic: Vec<Endpoint> = Vec::new(), "VRAMSCOPE_TRAFFIC", value_delimiter;
    /// Take secrets out of command lines before anything of them is written. False: they are kept
    /// as they are.
    redact: bool = true, "VRAMSCOPE_REDACT";
    /// Names of arguments, variables and keys whose values are secret: regular expressions without
    /// regard to case, as in --db-password=VALUE, HF_TOKEN=VALUE. As a flag: once for each.
    redact_names: Vec<String> = redact::NAMES.iter().map(ToString::to_string).collect(), "VRAMSCOPE_REDACT_NAMES";
    /// What looks like a secret whatever its name: regular expressions without regard to case. The
    /// match is replaced, or its first group if it has one. As a flag: once for each.
    redact_values: Vec<String> = redact::VALUES.iter().map(ToString::to_string).collect(), "VRAMSCOPE_REDACT_VALUES";
    /// Folder to read PCI devices' NUMA nodes from.
    sysfs: PathBuf = "/sys".into(), "VRAMSCOPE_SYSFS";
    optional:
    /// Where the collector listens, as in https://collector.example:7717, or http://127.0.0.1:7717
    /// on this host. Without it events stay in the spool.
    collector: String, "VRAMSCOPE_COLLECTOR";
    /// CA that the collector's certificate has to be of, PEM; for https.
    ca: PathBuf, "VRAMSCOPE_CA";
    /// This agent's certificate, which names its host, PEM; for https. Read anew at each connection.
    cert: PathBuf, "VRAMSCOPE_CERT";
    /// Its private key, PEM.
    key: PathBuf, "VRAMSCOPE_KEY";
    /// What the spool leaves free of its file system, whatever spool_limit says; if not set, 512
    /// MiB or a twentieth of the file system, whichever is less.
    spool_reserve: Bytes, "VRAMSCOPE_SPOOL_RESERVE";
    /// Host name in all rows; the kernel's if not set.
    host: String, "VRAMSCOPE_HOST";
    /// NVML library to open; the loader finds libnvidia-ml.so.1 if not set.
    nvml_library: PathBuf, "VRAMSCOPE_NVML_LIBRARY";
}

fn write_key(text: &mut String, doc: &[&str], name: &str, env: &str, value: Option<String>) {
    text.push('\n');
    for line in doc {
        let _ = writeln!(text, "#{line}");
    }
    let flag = name.replace('_', "-");
    let _ = writeln!(text, "# Flag --{flag}, environment {env}.");
    let _ = match value {
        Some(value) => writeln!(text, "{name} = {value}"),
        None => writeln!(text, "# {name} is not set"),
    };
}

impl Config {
    /// Where functions' names come from.
    pub fn names(&self) -> symbols::Options {
        let debuginfod = (!self.debuginfod_urls.is_empty()).then(|| debuginfod::Options {
            urls: self.debuginfod_urls.clone(),
            cache: self.debuginfod_cache.clone(),
            cache_bytes: self.debuginfod_cache_bytes.0,
            deadline: self.debuginfod_deadline.0,
        });
        symbols::Options {
            debug_symbols: self.debug_symbols,
            folders: self.debug_folders.clone(),
            debuginfod,
        }
    }

    /// How secrets are taken out of what is written.
    pub fn redaction(&self) -> Result<redact::Rules, String> {
        if !self.redact {
            return redact::Rules::new::<&str>(&[], &[]);
        }
        redact::Rules::new(&self.redact_names, &self.redact_values)
            .map_err(|problem| format!("redact_names or redact_values: {problem}"))
    }

    /// Refuses to speak in the clear beyond this host, and half a set of certificates.
    fn check_collector(&self) -> anyhow::Result<()> {
        let set = [("ca", &self.ca), ("cert", &self.cert), ("key", &self.key)];
        let Some(url) = &self.collector else {
            return Ok(());
        };
        if url.starts_with("https://") {
            let missing = set.iter().find(|(_, path)| path.is_none());
            if let Some((name, _)) = missing {
                bail!(
                    "collector {url:?} takes ca, cert and key, and {name} is not set; `vramscope-collector agent-certificate` makes the files"
                );
            }
            return Ok(());
        }
        let on_loopback = ["http://127.0.0.1:", "http://localhost:", "http://[::1]:"];
        if !on_loopback.iter().any(|start| url.starts_with(start)) {
            bail!(
                "collector {url:?} is not on loopback: events would travel unencrypted; write https:// and set ca, cert and key, or run the collector on this host"
            );
        }
        if let Some((name, _)) = set.iter().find(|(_, path)| path.is_some()) {
            bail!("{name} is set, and collector {url:?} does not begin with https://");
        }
        Ok(())
    }

    /// Defaults, then the file, then flags and environment.
    pub fn load(file: Option<&Path>, settings: Settings) -> anyhow::Result<Self> {
        let mut config = Self::default();
        if let Some(path) = file {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("failed to read configuration {}", path.display()))?;
            let from_file = toml::from_str(&text)
                .with_context(|| format!("in configuration {}", path.display()))?;
            config.set(from_file);
        }
        config.set(settings);
        for endpoint in &config.traffic {
            endpoint.uri().map_err(anyhow::Error::msg)?;
        }
        for url in &config.debuginfod_urls {
            debuginfod::check(url).map_err(anyhow::Error::msg)?;
        }
        config.redaction().map_err(anyhow::Error::msg)?;
        config.check_collector()?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_configuration_sets_itself() {
        let config = Config {
            libraries: vec!["/opt/my \"cuda\"/libcuda.so.1".into()],
            hold: Span(Duration::from_millis(1500)),
            spool_limit: Bytes(3 << 19),
            spool_reserve: Some(Bytes(0)),
            collector: Some("http://127.0.0.1:7717".into()),
            traffic: vec![
                Endpoint {
                    url: "http://127.0.0.1:8000".into(),
                    pid: None,
                    process: Some("*\"vllm\" serve*".into()),
                },
                Endpoint {
                    url: "http://10.0.0.9/metrics".into(),
                    pid: Some(7),
                    process: None,
                },
            ],
            ..Config::default()
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.toml");
        std::fs::write(&path, config.to_toml()).unwrap();
        assert_eq!(
            Config::load(Some(&path), Settings::default()).unwrap(),
            config
        );
    }

    #[test]
    fn slips_name_the_key_and_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.toml");
        for (text, part) in [
            ("spoool = \"/x\"", "unknown field `spoool`"),
            ("window = \"5 parsecs\"", "not a span of time"),
            ("spool_limit = \"2 bushels\"", "not a number of bytes"),
            ("spool_limit = \"99999999999TiB\"", "not a number of bytes"),
            ("collector = \"http://10.0.0.1:7717\"", "not on loopback"),
            (
                "collector = \"http://localhost.evil:7717\"",
                "not on loopback",
            ),
            (
                "collector = \"https://c:7717\"\nca = \"/c\"",
                "cert is not set",
            ),
            (
                "collector = \"http://127.0.0.1:7717\"\nkey = \"/k\"",
                "does not begin with https://",
            ),
            ("redact_names = [\"(\"]", "no regular expression"),
            ("debuginfod_urls = [\"https://h\"]", "speaks no TLS"),
            ("debuginfod_urls = [\"debug.example\"]", "write it as in"),
            ("[[traffic]]\nurl = \"https://h:1\"", "no TLS"),
            ("[[traffic]]\nurl = \"h:1\"", "write it as in"),
            ("[[traffic]]\nport = 8000", "unknown field `port`"),
            (
                "[[traffic]]\nurl = \"http://h:1\"\npid = 1\nprocess = \"x\"",
                "exclude each other",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = format!(
                "{:#}",
                Config::load(Some(&path), Settings::default()).unwrap_err()
            );
            assert!(error.contains(part), "{error}");
        }
        let error = format!(
            "{:#}",
            Config::load(Some(Path::new("/nonexistent.toml")), Settings::default()).unwrap_err()
        );
        assert!(error.contains("/nonexistent.toml"), "{error}");
    }

    #[test]
    fn flags_win_over_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.toml");
        std::fs::write(&path, "host = \"file\"\nwindow = \"5s\"").unwrap();
        let settings = Settings {
            host: Some("flag".into()),
            ..Settings::default()
        };
        let config = Config::load(Some(&path), settings).unwrap();
        assert_eq!(
            (config.host.as_deref(), config.window),
            (Some("flag"), Span(Duration::from_secs(5)))
        );
    }
}
