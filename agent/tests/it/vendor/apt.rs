//! Debian's package of the driver library, from the mirror that this host uses anyway. It is in
//! `non-free`, which few hosts have switched on: apt gets a configuration of its own for it, and
//! the host's lists and cache stay as they are.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::cache::{run, with_ending};

pub const DRIVER: &str = "libcuda1";

const TIMEOUT: Duration = Duration::from_secs(120);

/// Fetches and unpacks it; gives its version.
pub fn fetch(work: &Path, unpacked: &Path) -> Result<String, String> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let field = |name: &str| {
        let mut lines = release.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        value.map(|value| value.trim_matches('"').to_string())
    };
    let codename = field("VERSION_CODENAME").filter(|_| field("ID").as_deref() == Some("debian"));
    let codename = codename.ok_or("this host is no Debian")?;
    let sources = non_free(&host_sources(), &codename);
    if sources.is_empty() {
        return Err("apt's sources name no mirror of Debian".to_string());
    }
    let list = work.join("sources.list");
    fs::write(&list, sources).map_err(|error| error.to_string())?;
    let apt = |arguments: &[&str]| {
        let mut apt = Command::new("apt-get");
        let own = [
            ("Dir::Etc::SourceList", list.clone()),
            ("Dir::Etc::SourceParts", work.join("parts")),
            ("Dir::State::Lists", work.join("lists")),
            ("Dir::Cache", work.join("cache")),
        ];
        for (key, path) in own {
            apt.arg("-o").arg(format!("{key}={}", path.display()));
        }
        // The temporary folder is for its owner alone.
        for option in [
            "APT::Sandbox::User=root",
            "Acquire::Languages=none",
            "Acquire::Retries=1",
            "Acquire::http::Timeout=15",
            "Acquire::https::Timeout=15",
        ] {
            apt.args(["-o", option]);
        }
        apt.arg("-q").args(arguments).current_dir(work);
        apt
    };
    for folder in ["parts", "lists", "cache"] {
        fs::create_dir(work.join(folder)).map_err(|error| error.to_string())?;
    }
    run(apt(&["update"]), work, TIMEOUT)?;
    run(apt(&["download", DRIVER]), work, TIMEOUT)?;
    let package = with_ending(work, ".deb").ok_or("apt left no package")?;
    let mut unpack = Command::new("dpkg-deb");
    unpack.arg("-x").args([&package, unpacked]);
    run(unpack, work, TIMEOUT)?;
    // A package is called NAME_VERSION_ARCHITECTURE.
    let name = package.file_name().ok_or("a package has a name")?;
    let version = name.to_string_lossy().split('_').nth(1).map(str::to_string);
    version.ok_or(format!("{} has no version", package.display()))
}

/// The texts of all of apt's source files, and whether each is of the newer form.
fn host_sources() -> Vec<(bool, String)> {
    let etc = Path::new("/etc/apt");
    let parts = fs::read_dir(etc.join("sources.list.d"));
    let parts = parts.into_iter().flatten().flatten().map(|e| e.path());
    let files = std::iter::once(etc.join("sources.list")).chain(parts);
    files
        .filter_map(|path| {
            let ending = path.extension()?.to_str()?;
            let is_newer = match ending {
                "list" => false,
                "sources" => true,
                _ => return None,
            };
            Some((is_newer, fs::read_to_string(&path).ok()?))
        })
        .collect()
}

/// Lines for a source list: the mirrors of that release, with the one component.
fn non_free(sources: &[(bool, String)], codename: &str) -> String {
    let mut lines: Vec<String> = sources
        .iter()
        .flat_map(|(is_newer, text)| {
            if *is_newer {
                stanzas(text)
            } else {
                text.lines().filter_map(one_line).collect()
            }
        })
        .filter(|source| source.components.iter().any(|c| c == "main"))
        .flat_map(|source| {
            let is_ours = |suite: &&String| {
                let rest = suite.strip_prefix(codename);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
            };
            let suites = source.suites.iter().filter(is_ours);
            let places = suites.flat_map(|suite| {
                let options = &source.options;
                let line = move |uri| format!("deb {options}{uri} {suite} non-free\n");
                source.uris.iter().map(line)
            });
            places.collect::<Vec<_>>()
        })
        .collect();
    lines.sort();
    lines.dedup();
    lines.concat()
}

#[derive(Default)]
struct Source {
    options: String,
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_string).collect()
}

/// `deb [OPTIONS] URI SUITE COMPONENTS`
fn one_line(line: &str) -> Option<Source> {
    let mut rest = line.trim().strip_prefix("deb ")?.trim_start();
    let mut options = String::new();
    if rest.starts_with('[') {
        let (inner, after) = rest.split_once(']')?;
        options = format!("{inner}] ");
        rest = after;
    }
    let words = words(rest);
    let [uri, suite, components @ ..] = &words[..] else {
        return None;
    };
    Some(Source {
        options,
        uris: vec![uri.clone()],
        suites: vec![suite.clone()],
        components: components.to_vec(),
    })
}

/// `Key: value` lines, a blank line between sources.
fn stanzas(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for stanza in text.split("\n\n") {
        let mut source = Source::default();
        let mut is_used = false;
        let mut is_off = false;
        for line in stanza.lines().filter(|line| !line.starts_with('#')) {
            let Some((key, value)) = line.split_once(':') else {
                continue;
            };
            match key.to_ascii_lowercase().as_str() {
                "types" => is_used = words(value).iter().any(|word| word == "deb"),
                "uris" => source.uris = words(value),
                "suites" => source.suites = words(value),
                "components" => source.components = words(value),
                "signed-by" if !value.trim().is_empty() => {
                    source.options = format!("[signed-by={}] ", value.trim());
                }
                "enabled" => is_off = value.trim() == "no",
                _ => {}
            }
        }
        if is_used && !is_off {
            sources.push(source);
        }
    }
    sources
}

#[test]
fn both_forms_of_sources_are_read() {
    let older = "# deb http://old.example/debian somewhere main\n\
        deb [arch=amd64 signed-by=/k.gpg] https://one.example/debian somewhere main contrib\n\
        deb http://tools.example/apt tools-somewhere main\n\
        deb-src http://one.example/debian somewhere main\n";
    let newer = "Types: deb deb-src\n# a comment\nURIs: http://two.example/debian\n\
        Suites: somewhere somewhere-updates\nComponents: main\nSigned-By: /a.gpg\n\n\
        Types: deb\nURIs: http://else.example\nSuites: nodistro\nComponents: main\n\n\
        Enabled: no\nTypes: deb\nURIs: http://three.example\nSuites: somewhere\nComponents: main\n";
    let sources = [(false, older.to_string()), (true, newer.to_string())];
    let expected = "\
        deb [arch=amd64 signed-by=/k.gpg] https://one.example/debian somewhere non-free\n\
        deb [signed-by=/a.gpg] http://two.example/debian somewhere non-free\n\
        deb [signed-by=/a.gpg] http://two.example/debian somewhere-updates non-free\n";
    assert_eq!(non_free(&sources, "somewhere"), expected);
}
