//! Which processes must not be probed.
//!
//! A return probe replaces a return address on the stack. That breaks programs that switch stacks
//! in ways of their own, and on kernels with the uretprobe system call (6.11 until it was exempted)
//! programs whose seccomp filter does not know that call. A hook is in the library's file and so in
//! every process that maps it: there is no hooking it for some. So one process with an objection
//! keeps its libraries free of hooks as long as it lives, and the reason names it.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::procfs;
use crate::config::Config;
use crate::probes::preflight::Preflight;

/// What is done with libraries that a process with a seccomp filter maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SeccompRule {
    /// As the preflight says.
    #[default]
    Auto,
    Hook,
    Refuse,
}

impl FromStr for SeccompRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "hook" => Ok(Self::Hook),
            "refuse" => Ok(Self::Refuse),
            _ => Err(format!("{text:?} is none of auto, hook, refuse")),
        }
    }
}

impl std::fmt::Display for SeccompRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Hook => "hook",
            Self::Refuse => "refuse",
        })
    }
}

impl<'de> Deserialize<'de> for SeccompRule {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

impl Serialize for SeccompRule {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The rules in force.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    /// Patterns of executables that are never probed.
    pub deny_executables: Vec<String>,
    /// Patterns of libraries that may be hooked; all if empty.
    pub only_libraries: Vec<String>,
    /// Patterns of libraries that are hooked whoever maps them.
    pub allow_libraries: Vec<String>,
    /// Why processes with a seccomp filter are not probed; `None` if they are.
    refuse_filtered: Option<String>,
}

impl Policy {
    pub fn new(config: &Config, preflight: &Preflight) -> Self {
        let refuse_filtered = match config.seccomp_processes {
            SeccompRule::Hook => None,
            SeccompRule::Refuse => Some("seccomp_processes = \"refuse\"".to_string()),
            SeccompRule::Auto if preflight.survives => None,
            SeccompRule::Auto => Some(format!(
                "on this kernel that kills it ({}); seccomp_processes = \"hook\" would hook it nevertheless",
                preflight.detail
            )),
        };
        Self {
            deny_executables: config.deny_executables.clone(),
            only_libraries: config.only_libraries.clone(),
            allow_libraries: config.allow_libraries.clone(),
            refuse_filtered,
        }
    }

    /// Whether a process may come to object while it runs.
    pub fn can_change(&self) -> bool {
        self.refuse_filtered.is_some()
    }

    /// Why a process keeps the libraries that it maps from being hooked.
    pub fn objection(&self, pid: u32, exe: Option<&str>) -> Option<String> {
        let name = exe.unwrap_or("a program");
        if let Some(pattern) = self
            .deny_executables
            .iter()
            .find(|pattern| exe.is_some_and(|exe| matches(pattern, exe)))
        {
            return Some(format!(
                "{name} (pid {pid}) maps it, and deny_executables has {pattern:?}"
            ));
        }
        let why = self.refuse_filtered.as_ref()?;
        procfs::has_seccomp_filter(pid)
            .then(|| format!("{name} (pid {pid}) maps it and has a seccomp filter: {why}"))
    }

    /// Whether a library is none of those that may be hooked.
    pub fn excludes(&self, library: &str) -> bool {
        !self.only_libraries.is_empty()
            && !self
                .only_libraries
                .iter()
                .any(|pattern| matches(pattern, library))
    }

    /// Whether a library is hooked whoever maps it.
    pub fn allows(&self, library: &str) -> bool {
        self.allow_libraries
            .iter()
            .any(|pattern| matches(pattern, library))
    }
}

/// Shell-like patterns over whole paths: `*` is any text, also with slashes, `?` one character.
pub fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    // Where the last star was, and how much text it stands for so far.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if p < pattern.len() && pattern[p] == '*' {
            star = Some((p, t));
            p += 1;
        } else if p < pattern.len() && (pattern[p] == '?' || pattern[p] == text[t]) {
            p += 1;
            t += 1;
        } else if let Some((at, taken)) = star {
            star = Some((at, taken + 1));
            p = at + 1;
            t = taken + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|rest| *rest == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, text, expected) in [
            ("/usr/bin/go", "/usr/bin/go", true),
            ("/usr/bin/go", "/usr/bin/gofmt", false),
            ("*/go*", "/usr/local/bin/gofmt", true),
            ("/opt/*/bin/fib?r", "/opt/a/b/bin/fiber", true),
            ("/opt/*/bin/fib?r", "/opt/a/b/bin/fibr", false),
            ("*", "", true),
            ("", "x", false),
            ("a*b*c", "aXbXbXc", true),
            ("a*b*c", "aXbXbX", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn the_reason_names_the_process_and_the_rule() {
        let dies = Preflight {
            survives: false,
            detail: "killed by signal 31".into(),
        };
        let config = Config {
            deny_executables: vec!["*/stackswitcher".into()],
            allow_libraries: vec!["/opt/ok/*".into()],
            only_libraries: vec!["/opt/*".into(), "/usr/lib/*".into()],
            ..Config::default()
        };
        let policy = Policy::new(&config, &dies);
        assert!(
            policy.excludes("/home/x/libcuda.so.1") && !policy.excludes("/usr/lib/libcuda.so.1")
        );
        let me = std::process::id();
        assert_eq!(
            policy.objection(me, Some("/opt/stackswitcher")),
            Some(format!(
                "/opt/stackswitcher (pid {me}) maps it, and deny_executables has \"*/stackswitcher\""
            ))
        );
        assert!(policy.can_change() && policy.allows("/opt/ok/libcuda.so.1"));
        let lives = Preflight {
            survives: true,
            ..dies
        };
        let mut config = Config::default();
        let policy = Policy::new(&config, &lives);
        assert!(!policy.can_change() && !policy.excludes("/any/libcuda.so.1"));
        config.seccomp_processes = SeccompRule::Refuse;
        assert!(Policy::new(&config, &lives).can_change());
    }
}
