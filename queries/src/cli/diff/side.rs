//! The grammar of what is compared: a recording, a time, or processes.
//!
//! ```text
//! ./trace                      a data folder
//! http://127.0.0.1:7717        a collector
//! 6h..3h                       a time, as FROM..TO; one of them may be left out
//! pod=server-1,since=6h        keys and values
//! ```

use std::path::{Path, PathBuf};

use crate::scope::{Scope, When};
use crate::target::Target;

const KEYS: &str = "data, collector, url, since, until, host, pid, process, device, namespace, pod, exe, command, build, framework";

/// One side of a comparison, as it was said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Side {
    /// What was said, for headings.
    pub label: String,
    pub target: Option<Target>,
    pub scope: Scope,
}

impl Side {
    pub fn parse(text: &str) -> Result<Side, String> {
        let mut side = Side {
            label: text.to_string(),
            ..Side::default()
        };
        if text.is_empty() {
            return Err(format!(
                "an empty side; a folder, a URL, FROM..TO, or keys: {KEYS}"
            ));
        }
        if Path::new(text).is_dir() {
            side.target = Some(Target::Data(PathBuf::from(text)));
        } else if text.starts_with("http://") || text.starts_with("https://") {
            side.target = Some(Target::Collector(text.to_string()));
        } else if text.contains("://") {
            side.target = Some(Target::Url(text.to_string()));
        } else if text.contains('=') {
            for entry in text.split(',') {
                side.set(entry)?;
            }
        } else if let Some((from, to)) =
            text.split_once("..").filter(|(from, to)| is_span(from, to))
        {
            side.scope.since = time(from)?;
            side.scope.until = time(to)?;
        } else {
            // It may yet be made, and the error of a folder that is not there is clear.
            side.target = Some(Target::Data(PathBuf::from(text)));
        }
        Ok(side)
    }

    fn set(&mut self, entry: &str) -> Result<(), String> {
        let (key, value) = entry
            .split_once('=')
            .ok_or_else(|| format!("{entry:?} is not KEY=VALUE; keys: {KEYS}"))?;
        let value = value.trim();
        if value.is_empty() {
            return Err(format!("{key:?} has no value"));
        }
        let text = || Some(value.to_string());
        let number = |what: &str| format!("{value:?} is not a {what}");
        let scope = &mut self.scope;
        match key.trim() {
            "data" => self.target = Some(Target::Data(PathBuf::from(value))),
            "collector" => self.target = Some(Target::Collector(value.to_string())),
            "url" => self.target = Some(Target::Url(value.to_string())),
            "since" => scope.since = time(value)?,
            "until" => scope.until = time(value)?,
            "host" => scope.host = text(),
            "pid" => scope.pid = Some(value.parse().map_err(|_| number("pid"))?),
            "process" => scope.process = Some(value.parse().map_err(|_| number("process_id"))?),
            "device" => scope.device = Some(value.parse().map_err(|_| number("device"))?),
            "namespace" => scope.namespace = text(),
            "pod" => scope.pod = text(),
            "exe" => scope.exe = text(),
            "command" => scope.command = text(),
            "build" => scope.build = text(),
            "framework" => scope.framework_version = text(),
            other => return Err(format!("unknown key {other:?}; keys: {KEYS}")),
        }
        Ok(())
    }

    /// With what holds for both sides where this one says nothing.
    pub fn or(&self, target: Option<&Target>, common: &Scope) -> Side {
        fn first<T: Clone>(own: &Option<T>, common: &Option<T>) -> Option<T> {
            own.clone().or_else(|| common.clone())
        }
        let own = &self.scope;
        Side {
            label: self.label.clone(),
            target: self.target.clone().or_else(|| target.cloned()),
            scope: Scope {
                host: first(&own.host, &common.host),
                pid: first(&own.pid, &common.pid),
                process: first(&own.process, &common.process),
                device: first(&own.device, &common.device),
                pod: first(&own.pod, &common.pod),
                namespace: first(&own.namespace, &common.namespace),
                exe: first(&own.exe, &common.exe),
                since: first(&own.since, &common.since),
                until: first(&own.until, &common.until),
                command: first(&own.command, &common.command),
                framework_version: first(&own.framework_version, &common.framework_version),
                build: first(&own.build, &common.build),
            },
        }
    }
}

/// Whether it is meant as a time: one that is wrong is to be told so, and not as a folder.
fn is_span(from: &str, to: &str) -> bool {
    let starts = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
    starts(from) || (from.is_empty() && starts(to))
}

fn time(text: &str) -> Result<Option<When>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    When::parse(text).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_recordings_times_or_processes() {
        let target = |text| Side::parse(text).unwrap().target;
        assert_eq!(
            target("/nonexistent/monday"),
            Some(Target::Data("/nonexistent/monday".into()))
        );
        assert_eq!(
            target("http://h:1"),
            Some(Target::Collector("http://h:1".into()))
        );
        assert_eq!(
            target("../nonexistent"),
            Some(Target::Data("../nonexistent".into()))
        );
        let time = Side::parse("6h..3h").unwrap().scope;
        assert_eq!(time.since, Some(When::Before(6 * 3_600_000_000)));
        assert_eq!(time.until, Some(When::Before(3 * 3_600_000_000)));
        assert_eq!(Side::parse("..3h").unwrap().scope.since, None);
        assert_eq!(Side::parse("3h..").unwrap().scope.until, None);
        let side = Side::parse("data=./a,pod=server-*,pid=7").unwrap();
        assert_eq!(side.target, Some(Target::Data("./a".into())));
        assert_eq!(side.scope.pod.as_deref(), Some("server-*"));
        assert_eq!(side.scope.pid, Some(7));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("", "empty"),
            ("pods=a", "\"pods\""),
            ("pid=seven", "\"seven\""),
            ("pod=", "no value"),
            ("pod=a,b", "\"b\""),
            ("6h..later", "\"later\""),
        ] {
            let error = Side::parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_side_goes_before_what_holds_for_both() {
        let common = Scope {
            host: Some("alpha".to_string()),
            pod: Some("x".to_string()),
            ..Scope::default()
        };
        let both = Target::Data("/both".into());
        let side = Side::parse("pod=a").unwrap().or(Some(&both), &common);
        assert_eq!(side.target, Some(both));
        assert_eq!(side.scope.pod.as_deref(), Some("a"));
        assert_eq!(side.scope.host.as_deref(), Some("alpha"));
    }
}
