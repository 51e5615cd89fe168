//! Which processes of this host may be a serving engine's front, and on which of their ports a
//! metrics page is asked for.
//!
//! An engine's processes also listen for one another (ZeroMQ, gloo, NCCL, key-value stores), and a
//! request that such a port does not expect may disturb it. So a port is asked only if
//! - the process's command line names an engine, and the port is the one the command line gives, or
//!   else the engine's usual one, or else the only one the process listens on; or
//! - the process is traced, or an ancestor or descendant of a traced one in the same network
//!   namespace, and the port is one that engines usually serve on.
//!
//! Whatever else is meant is named in the configuration.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;

use super::fetch::namespace_of;
use super::sockets;
use crate::host::procfs;

/// Ports on which the engines serve unless told otherwise.
const USUAL_PORTS: [u16; 6] = [80, 3000, 8000, 8002, 8080, 30_000];
/// How far up an engine's front may be from the process that holds the memory.
const MAX_ANCESTORS: usize = 3;
/// Processes that get rows of one page at most: one for each card of a large machine, and then some.
const MAX_SERVED: usize = 64;
/// How deep trees of processes are followed, against ids that are given out again meanwhile.
const MAX_DEPTH: usize = 32;

/// A page that may be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Who listens.
    pub pid: u32,
    /// Its network namespace.
    pub namespace: u64,
    pub address: SocketAddr,
    /// The command line names an engine.
    pub is_named: bool,
    /// The traced processes of that engine.
    pub served: Vec<u32>,
}

/// The processes of this host at a moment.
pub struct Census {
    parents: HashMap<u32, u32>,
    children: HashMap<u32, Vec<u32>>,
    commands: BTreeMap<u32, Vec<String>>,
}

impl Census {
    pub fn take() -> Self {
        let mut census = Self {
            parents: HashMap::new(),
            children: HashMap::new(),
            commands: BTreeMap::new(),
        };
        for pid in procfs::pids() {
            let Some(parent) = procfs::parent(pid) else {
                continue;
            };
            // Kernel threads have none.
            let words = procfs::words(pid);
            if words.is_empty() {
                continue;
            }
            census.add(pid, parent, words);
        }
        census
    }

    fn add(&mut self, pid: u32, parent: u32, words: Vec<String>) {
        self.parents.insert(pid, parent);
        self.children.entry(parent).or_default().push(pid);
        self.commands.insert(pid, words);
    }

    fn ancestors(&self, pid: u32) -> impl Iterator<Item = u32> {
        let parent = move |pid: &u32| self.parents.get(pid).copied().filter(|p| *p > 1);
        std::iter::successors(parent(&pid), parent).take(MAX_DEPTH)
    }

    fn descendants(&self, pid: u32) -> Vec<u32> {
        let mut found = Vec::new();
        let mut level = vec![pid];
        for _ in 0..MAX_DEPTH {
            level = level
                .iter()
                .flat_map(|pid| self.children.get(pid).into_iter().flatten().copied())
                .collect();
            if level.is_empty() {
                break;
            }
            found.extend(&level);
        }
        found
    }

    /// Processes whose command line matches a pattern.
    pub fn matching(&self, pattern: &str) -> Vec<u32> {
        let matches = |words: &[String]| crate::host::safety::matches(pattern, &words.join(" "));
        let found = self.commands.iter().filter(|(_, words)| matches(words));
        found.map(|(pid, _)| *pid).collect()
    }

    /// The traced processes of the engine whose front is `front`: itself and what it started; where
    /// an engine's launcher started the front, what the launcher started.
    pub fn served(&self, front: u32, traced: &BTreeSet<u32>) -> Vec<u32> {
        let launcher = self.parents.get(&front).filter(|parent| {
            let words = self.commands.get(parent);
            words.is_some_and(|words| front_of(words).is_some())
        });
        let top = launcher.copied().unwrap_or(front);
        let mut all = self.descendants(top);
        all.push(top);
        all.retain(|pid| traced.contains(pid));
        all.sort_unstable();
        all.dedup();
        all.truncate(MAX_SERVED);
        all
    }

    /// `below`: only what that process started, and traced processes.
    pub fn find(&self, traced: &BTreeSet<u32>, below: Option<u32>) -> Vec<Found> {
        let kin = self.kin(traced);
        let is_ours = |pid: u32| {
            below.is_none_or(|top| kin.contains(&pid) || self.ancestors(pid).any(|p| p == top))
        };
        let mut found: Vec<Found> = Vec::new();
        for (&pid, words) in &self.commands {
            if !is_ours(pid) {
                continue;
            }
            let front = front_of(words);
            if front.is_none() && !kin.contains(&pid) {
                continue;
            }
            let Ok(namespace) = namespace_of(pid) else {
                continue;
            };
            let listening = sockets::listening(pid);
            let is_named = front.is_some();
            let ports = front.map_or(Ports::Among(USUAL_PORTS.to_vec()), |front| front.ports);
            for address in ports.choose(&listening) {
                // A socket may be open in several processes; the first is the one that made it.
                let is_known = |f: &Found| f.namespace == namespace && f.address == address;
                if found.iter().any(is_known) {
                    continue;
                }
                found.push(Found {
                    pid,
                    namespace,
                    address,
                    is_named,
                    served: self.served(pid, traced),
                });
            }
        }
        found
    }

    /// Traced processes, and their ancestors and descendants in the same network namespace.
    fn kin(&self, traced: &BTreeSet<u32>) -> HashSet<u32> {
        let mut kin = HashSet::new();
        for &pid in traced {
            let Ok(namespace) = namespace_of(pid) else {
                continue;
            };
            let around = self
                .ancestors(pid)
                .take(MAX_ANCESTORS)
                .chain(self.descendants(pid));
            kin.extend(around.filter(|pid| namespace_of(*pid).is_ok_and(|n| n == namespace)));
            kin.insert(pid);
        }
        // The agent's own parents are nobody's engine.
        kin.remove(&std::process::id());
        kin
    }
}

/// Which ports of an engine's front are asked.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ports {
    /// The command line gives it.
    Given(u16),
    /// One of the usual ones, or the only one there is.
    Usual(u16),
    Among(Vec<u16>),
}

impl Ports {
    fn choose(&self, listening: &[SocketAddr]) -> Vec<SocketAddr> {
        let on = |port: u16| {
            listening
                .iter()
                .find(|address| address.port() == port)
                .copied()
        };
        match self {
            Self::Given(port) => on(*port).into_iter().collect(),
            Self::Usual(port) => match (on(*port), listening) {
                (Some(address), _) => vec![address],
                (None, [only]) => vec![*only],
                _ => Vec::new(),
            },
            Self::Among(ports) => ports.iter().filter_map(|port| on(*port)).collect(),
        }
    }
}

/// An engine's front, as its command line shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Front {
    ports: Ports,
}

/// The front that a command line starts; `None` for everything else, also for an engine's workers,
/// which give themselves titles such as `VLLM::EngineCore`.
fn front_of(words: &[String]) -> Option<Front> {
    let base = |word: &str| word.rsplit('/').next().unwrap_or(word).to_string();
    let first = base(words.first()?);
    // An interpreter's script may stand behind a few options.
    let scripts: Vec<String> = words.iter().take(8).map(|word| base(word)).collect();
    let module = |name: &str| {
        let mut pairs = words.windows(2).take(8);
        pairs.any(|pair| pair[0] == "-m" && pair[1].starts_with(name))
    };
    let script = |name: &str, with: Option<&str>| {
        scripts.iter().enumerate().any(|(i, word)| {
            word == name && with.is_none_or(|with| words.get(i + 1).is_some_and(|w| w == with))
        })
    };
    let (flags, usual): (&[&str], u16) = if first.starts_with("VLLM::APIServer")
        || script("vllm", Some("serve"))
        || module("vllm.entrypoints.")
    {
        (&["--port"], 8000)
    } else if script("sglang", Some("serve")) || module("sglang.launch_server") {
        (&["--port"], 30_000)
    } else if first == "tritonserver" {
        (&["--metrics-port"], 8002)
    } else if script("trtllm-serve", None) || module("tensorrt_llm.commands.serve") {
        (&["--port"], 8000)
    } else if first == "text-generation-launcher" || first == "text-generation-router" {
        (&["--port", "-p"], 3000)
    } else {
        return None;
    };
    let ports = flag(words, flags).map_or(Ports::Usual(usual), Ports::Given);
    Some(Front { ports })
}

/// A port given as `--port 1` or `--port=1`; the last one counts.
fn flag(words: &[String], names: &[&str]) -> Option<u16> {
    let mut found = None;
    for (i, word) in words.iter().enumerate() {
        for name in names {
            let value = match word.strip_prefix(name) {
                Some("") => words.get(i + 1).map(String::as_str),
                Some(rest) => rest.strip_prefix('='),
                None => None,
            };
            found = value.and_then(|value| value.parse().ok()).or(found);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_string).collect()
    }

    /// Command lines as the engines' guides give them.
    #[test]
    fn fronts_are_known_by_their_command_lines() {
        for (line, ports) in [
            (
                "/usr/bin/python3 /opt/venv/bin/vllm serve org/m",
                Ports::Usual(8000),
            ),
            (
                "/usr/bin/python3 /opt/venv/bin/vllm serve org/m --port 9000",
                Ports::Given(9000),
            ),
            (
                "python -m vllm.entrypoints.openai.api_server --port=8001",
                Ports::Given(8001),
            ),
            ("VLLM::APIServer_0", Ports::Usual(8000)),
            (
                "python3 -m sglang.launch_server --model-path m --port 30001",
                Ports::Given(30_001),
            ),
            (
                "python3 -u -m sglang.launch_server --model-path m",
                Ports::Usual(30_000),
            ),
            (
                "/opt/tritonserver/bin/tritonserver --http-port 9 --metrics-port=18002",
                Ports::Given(18_002),
            ),
            (
                "tritonserver --model-repository=/models",
                Ports::Usual(8002),
            ),
            (
                "python3 /usr/local/bin/trtllm-serve m --port 8123",
                Ports::Given(8123),
            ),
            (
                "text-generation-router --port 80 --master-shard-uds-path /tmp/x",
                Ports::Given(80),
            ),
        ] {
            assert_eq!(front_of(&words(line)), Some(Front { ports }), "{line}");
        }
        for line in [
            "VLLM::EngineCore_DP0",
            "VLLM::Worker_TP1",
            "sglang::scheduler_TP0",
            "sglang::detokenizer",
            "vim vllm",
            "grep vllm serve.log",
            "python train.py",
            "text-generation-server serve m",
        ] {
            assert_eq!(front_of(&words(line)), None, "{line}");
        }
        assert_eq!(front_of(&[]), None);
    }

    #[test]
    fn ports_are_given_or_usual_or_the_only_one() {
        let at = |ports: &[u16]| -> Vec<SocketAddr> {
            ports
                .iter()
                .map(|port| SocketAddr::new([127, 0, 0, 1].into(), *port))
                .collect()
        };
        assert_eq!(Ports::Given(9).choose(&at(&[7, 9])), at(&[9]));
        assert!(Ports::Given(9).choose(&at(&[7])).is_empty());
        assert_eq!(Ports::Usual(9).choose(&at(&[7, 9])), at(&[9]));
        assert_eq!(Ports::Usual(9).choose(&at(&[7])), at(&[7]));
        assert!(Ports::Usual(9).choose(&at(&[7, 8])).is_empty());
        assert_eq!(Ports::Among(vec![1, 7]).choose(&at(&[7, 8])), at(&[7]));
    }

    /// 10 launcher ─ 11 router (front), 12 shard; 20 front ─ 21 engine ─ 22 worker; 30 shell ─ 31.
    fn census() -> Census {
        let mut census = Census {
            parents: HashMap::new(),
            children: HashMap::new(),
            commands: BTreeMap::new(),
        };
        for (pid, parent, line) in [
            (10, 1, "text-generation-launcher --port 80"),
            (11, 10, "text-generation-router --port 80"),
            (12, 10, "python text-generation-server serve m"),
            (20, 1, "python /bin/vllm serve m"),
            (21, 20, "VLLM::EngineCore"),
            (22, 21, "VLLM::Worker_TP0"),
            (30, 1, "bash"),
            (31, 30, "python train.py"),
        ] {
            census.add(pid, parent, words(line));
        }
        census
    }

    #[test]
    fn a_front_serves_the_traced_processes_of_its_engine() {
        let census = census();
        let traced = BTreeSet::from([12, 20, 22, 31]);
        assert_eq!(census.served(11, &traced), [12], "the launcher's shards");
        assert_eq!(census.served(20, &traced), [20, 22]);
        assert_eq!(census.served(31, &traced), [31]);
        assert!(census.served(21, &BTreeSet::new()).is_empty());
        assert_eq!(census.matching("python*serve m"), [12, 20]);
        assert_eq!(census.ancestors(22).collect::<Vec<_>>(), [21, 20]);
    }
}
