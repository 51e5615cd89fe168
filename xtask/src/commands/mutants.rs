//! `cargo xtask mutants`: breaks each rule of the probes and the books on purpose, and sees
//! whether the test that is there for it fails.
//!
//! The mutants are rows of `xtask/mutants.toml`. Each is applied alone to a copy of the tree below
//! the target folder, which has a target folder of its own that stays warm: the checkout is never
//! touched, and a mutant costs one build of the agent and one test.
//!
//! Invariants:
//! - a mutant whose text is not found exactly once is an error, so the table cannot rot silently;
//! - the tests are seen to pass on the unbroken copy first: a test that always fails catches
//!   nothing;
//! - a mutant that does not compile is an error and not caught.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Deserialize;

use super::{ebpf, setup};
use crate::children::output;
use crate::progress::Step;
use crate::project::{Project, cargo_command};

/// The rules of the probes; `docs/mutants.md` names them.
const RULES: std::ops::RangeInclusive<u8> = 1..=12;

/// The agent, and the stand-ins that its tests run on. Nothing here needs the query engine.
const PACKAGES: [&str; 12] = [
    "-p",
    "vramscope-agent",
    "-p",
    "vramscope-fakes",
    "-p",
    "vramscope-fake-cuda",
    "-p",
    "vramscope-fake-cudart",
    "-p",
    "vramscope-fake-cupti",
    "-p",
    "vramscope-fake-nvml",
];

/// Breaks rules on purpose and checks that tests notice. Takes a while; not part of CI.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask mutants                all mutants; prints a table, writes docs/mutants.md
  cargo xtask mutants --rule 3       those of one rule
  cargo xtask mutants --verify       only check that the table fits the sources (a second)")]
pub struct Mutants {
    /// Only check that each mutant's text is found exactly once
    #[arg(long)]
    pub verify: bool,
    /// Only mutants of this rule
    #[arg(long, value_name = "N")]
    pub rule: Vec<u8>,
    /// Only mutants whose name contains this
    #[arg(long, value_name = "TEXT")]
    pub name: Option<String>,
}

/// `xtask/mutants.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    mutant: Vec<Mutant>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutant {
    /// Number of the rule that it breaks.
    rule: u8,
    /// What it does, in a few words.
    name: String,
    /// Relative to the checkout.
    file: PathBuf,
    /// Found exactly once in the file.
    text: String,
    replacement: String,
    /// Test program (`lib`, or `it` for the integration tests) and the test's full name.
    test: String,
}

impl Mutant {
    fn test(&self) -> Result<(&str, &str)> {
        match self.test.split_once(' ') {
            Some((program @ ("lib" | "it"), name)) => Ok((program, name)),
            _ => bail!(
                "mutant {:?}: test {:?} is not `lib NAME` or `it NAME`",
                self.name,
                self.test
            ),
        }
    }

    /// The file's text with the rule broken.
    fn applied(&self, root: &Path) -> Result<String> {
        let path = root.join(&self.file);
        let source = fs::read_to_string(&path).with_context(|| {
            format!("mutant {:?}: failed to read {}", self.name, path.display())
        })?;
        match source.matches(&self.text).count() {
            1 if self.text == self.replacement => {
                bail!("mutant {:?} changes nothing", self.name)
            }
            1 => Ok(source.replacen(&self.text, &self.replacement, 1)),
            found => bail!(
                "mutant {:?}: its text is found {found} times in {}, not once: {:?}",
                self.name,
                self.file.display(),
                self.text
            ),
        }
    }
}

/// How a mutant ended.
struct Outcome {
    mutant: Mutant,
    caught: bool,
    how: String,
}

/// The command.
pub fn run(project: &Project, options: &Mutants) -> Result<()> {
    let table = read(&project.root)?;
    let rules_without = verify(&project.root, &table)?;
    if !rules_without.is_empty() {
        let list: Vec<String> = rules_without.iter().map(u8::to_string).collect();
        eprintln!("no mutant breaks rule {}", list.join(", "));
    }
    if options.verify {
        println!("{} mutants fit the sources", table.len());
        return Ok(());
    }
    let wanted = |mutant: &Mutant| {
        let by_name = options.name.as_ref();
        (options.rule.is_empty() || options.rule.contains(&mutant.rule))
            && by_name.is_none_or(|part| mutant.name.contains(part))
    };
    let all = table.len();
    let chosen: Vec<Mutant> = table.into_iter().filter(|mutant| wanted(mutant)).collect();
    if chosen.is_empty() {
        bail!("no mutant is so called; see xtask/mutants.toml");
    }

    let copy = Copy::make(project)?;
    copy.build_kernel_side()?;
    let step = Step::start("running the tests on the unbroken copy");
    let mut tests = BTreeSet::new();
    for mutant in &chosen {
        if !tests.insert(mutant.test.as_str()) {
            continue;
        }
        if let Verdict::Failed(how) = copy.test(mutant)? {
            bail!("{} fails without any mutant ({how})", mutant.test);
        }
    }
    step.done(&format!("{} tests", tests.len()));

    let mut outcomes = Vec::new();
    for mutant in chosen {
        let step = Step::start(&format!("rule {}: {}", mutant.rule, mutant.name));
        let outcome = copy.try_mutant(mutant)?;
        if outcome.caught {
            step.done(&outcome.how);
        } else {
            step.failed();
        }
        outcomes.push(outcome);
    }
    let text = markdown(&outcomes);
    print!("{text}");
    if outcomes.len() == all {
        let path = project.root.join("docs/mutants.md");
        fs::write(&path, format!("{HEADER}{text}"))
            .with_context(|| format!("failed to write {}", path.display()))?;
        eprintln!("written to {}", path.display());
    }
    let missed: Vec<&str> = outcomes
        .iter()
        .filter(|outcome| !outcome.caught)
        .map(|outcome| outcome.mutant.name.as_str())
        .collect();
    if !missed.is_empty() {
        bail!("not caught: {}", missed.join("; "));
    }
    Ok(())
}

const HEADER: &str = "# Mutants: which test catches which broken rule

Written by `cargo xtask mutants`; the table of mutants is `xtask/mutants.toml`. Each row breaks one
rule of the probes on purpose and names the test that failed because of it.

1. Identity is process, start time and address, never the thread. 2. Only success commits. 3. An
allocation takes effect at its return, a free at its entry. 4. One counted row per call chain. 5. A
free goes to the device that allocated; unknown is NULL. 6. Implicit frees. 7. Nothing live is
evicted. 8. Allocations and frees are never sampled. 9. Every loss is counted by cause. 10.
Discovery by file and not by path. 11. Bounded cardinality. 12. Nothing unsafe is hooked.

Rules of the collector are not broken here, since each mutant would cost a build of the query engine.
That it acknowledges before it syncs is planted beneath the program instead, in every test run:
[durability](durability.md#the-proof-of-the-proof).

";

fn markdown(outcomes: &[Outcome]) -> String {
    let mut text =
        String::from("| rule | what is broken | where | test | outcome |\n|---|---|---|---|---|\n");
    for outcome in outcomes {
        let mutant = &outcome.mutant;
        let name = mutant.test.split_once(' ').map_or("", |(_, name)| name);
        let verdict = if outcome.caught {
            "caught"
        } else {
            "NOT CAUGHT"
        };
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "| {} | {} | `{}` | `{name}` | {verdict} |",
            mutant.rule,
            mutant.name,
            mutant.file.display(),
        );
    }
    text
}

fn read(root: &Path) -> Result<Vec<Mutant>> {
    let path = root.join("xtask/mutants.toml");
    let text =
        fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
    let table: Table = toml::from_str(&text).with_context(|| format!("in {}", path.display()))?;
    Ok(table.mutant)
}

/// Checks every mutant against the sources; gives the rules that none breaks.
fn verify(root: &Path, table: &[Mutant]) -> Result<Vec<u8>> {
    let mut problems = Vec::new();
    for mutant in table {
        if !RULES.contains(&mutant.rule) {
            problems.push(format!(
                "mutant {:?}: there is no rule {}",
                mutant.name, mutant.rule
            ));
        }
        for problem in [mutant.test().err(), mutant.applied(root).err()]
            .into_iter()
            .flatten()
        {
            problems.push(format!("{problem:#}"));
        }
    }
    if !problems.is_empty() {
        bail!(
            "xtask/mutants.toml does not fit the sources:\n  {}",
            problems.join("\n  ")
        );
    }
    Ok(RULES
        .filter(|rule| !table.iter().any(|mutant| mutant.rule == *rule))
        .collect())
}

enum Verdict {
    Passed,
    Failed(String),
}

/// A copy of the tree that may be broken.
struct Copy {
    /// The copy as a project: its root and its own target folder.
    project: Project,
}

impl Copy {
    fn make(project: &Project) -> Result<Self> {
        let folder = project.target.join("mutants");
        let copy = Self {
            project: Project {
                root: folder.join("tree"),
                target: folder.join("target"),
            },
        };
        let mut list = Command::new("git");
        list.args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .current_dir(&project.root);
        let listed = output(&mut list)?;
        if !listed.status.success() {
            bail!("git ls-files failed: the copy is made of what git knows");
        }
        let names = String::from_utf8_lossy(&listed.stdout).into_owned();
        let names: BTreeSet<&str> = names.split('\0').filter(|name| !name.is_empty()).collect();
        for name in &names {
            let from = project.root.join(name);
            // Listed, and deleted since.
            if from.is_file() {
                copy_changed(&from, &copy.project.root.join(name))?;
            }
        }
        copy.remove_others(&copy.project.root, &names)?;
        Ok(copy)
    }

    /// What an earlier copy had and the tree has no more.
    fn remove_others(&self, folder: &Path, names: &BTreeSet<&str>) -> Result<()> {
        for entry in
            fs::read_dir(folder).with_context(|| format!("failed to read {}", folder.display()))?
        {
            let path = entry?.path();
            if path.is_dir() {
                self.remove_others(&path, names)?;
                continue;
            }
            let name = path.strip_prefix(&self.project.root).unwrap_or(&path);
            if !names.contains(name.to_string_lossy().as_ref()) {
                fs::remove_file(&path)
                    .with_context(|| format!("failed to remove {}", path.display()))?;
            }
        }
        Ok(())
    }

    fn build_kernel_side(&self) -> Result<()> {
        let toolchain = setup::ensure(&self.project)?;
        ebpf::build(&self.project, &toolchain)
    }

    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = cargo_command(&self.project);
        command
            .args(arguments)
            .env("CARGO_TARGET_DIR", &self.project.target)
            .env("CARGO_INCREMENTAL", "1");
        command
    }

    /// Builds all test programs of the agent and the stand-ins; the error is the compiler's.
    fn build(&self) -> Result<()> {
        let mut arguments = vec![
            "test", "--locked", "--no-run", "--lib", "--bins", "--test", "it",
        ];
        arguments.extend(PACKAGES);
        for arguments in [
            ["build", "--locked", "--lib", "--bins"]
                .iter()
                .chain(&PACKAGES)
                .copied()
                .collect(),
            arguments,
        ] {
            let built = output(&mut self.cargo(&arguments))?;
            if !built.status.success() {
                bail!(
                    "it does not build:\n{}",
                    String::from_utf8_lossy(&built.stderr)
                );
            }
        }
        Ok(())
    }

    fn test(&self, mutant: &Mutant) -> Result<Verdict> {
        self.build()?;
        let (program, name) = mutant.test()?;
        let which: &[&str] = if program == "lib" {
            &["--lib"]
        } else {
            &["--test", "it"]
        };
        let mut arguments = vec!["test", "--locked", "-p", "vramscope-agent"];
        // The same packages as above, so that features and hence builds are the same.
        arguments.extend(&PACKAGES[2..]);
        arguments.extend(which);
        arguments.extend(["--", "--exact", name]);
        let ran = output(&mut self.cargo(&arguments))?;
        let text = String::from_utf8_lossy(&ran.stdout);
        if !text.contains("running 1 test") {
            bail!(
                "{} is no test: {}",
                mutant.test,
                String::from_utf8_lossy(&ran.stderr).trim()
            );
        }
        if String::from_utf8_lossy(&ran.stderr).contains("SKIPPED") {
            bail!("{} was skipped here: run as root", mutant.test);
        }
        Ok(if ran.status.success() {
            Verdict::Passed
        } else {
            let assertion = text.lines().find(|line| line.contains("panicked at"));
            Verdict::Failed(
                assertion
                    .unwrap_or("the test program failed")
                    .trim()
                    .to_string(),
            )
        })
    }

    /// Breaks the copy, tests, mends it.
    fn try_mutant(&self, mutant: Mutant) -> Result<Outcome> {
        let path = self.project.root.join(&mutant.file);
        let broken = mutant.applied(&self.project.root)?;
        let whole = fs::read_to_string(&path)?;
        let of_kernel_side = mutant.file.starts_with("ebpf");
        fs::write(&path, broken).with_context(|| format!("failed to write {}", path.display()))?;
        let tested = self
            .rebuilt(of_kernel_side)
            .and_then(|()| self.test(&mutant));
        fs::write(&path, whole).with_context(|| format!("failed to write {}", path.display()))?;
        self.rebuilt(of_kernel_side)?;
        let verdict = tested.with_context(|| format!("mutant {:?}", mutant.name))?;
        let (caught, how) = match verdict {
            Verdict::Passed => (false, "the test passes".to_string()),
            Verdict::Failed(how) => (true, how),
        };
        Ok(Outcome {
            mutant,
            caught,
            how,
        })
    }

    fn rebuilt(&self, of_kernel_side: bool) -> Result<()> {
        if of_kernel_side {
            self.build_kernel_side()?;
        }
        Ok(())
    }
}

/// An unchanged file keeps its time stamp, so that cargo builds nothing again.
fn copy_changed(from: &Path, to: &Path) -> Result<()> {
    let new = fs::read(from).with_context(|| format!("failed to read {}", from.display()))?;
    if fs::read(to).is_ok_and(|old| old == new) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)
            .with_context(|| format!("failed to create {}", folder.display()))?;
    }
    fs::write(to, new).with_context(|| format!("failed to write {}", to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Part of CI: the table fits the sources, so that a change to a rule's code is a change here.
    #[test]
    fn the_table_fits_the_sources() {
        let package = std::env::var("CARGO_MANIFEST_DIR").unwrap();
        let root = Path::new(&package).parent().unwrap();
        verify(root, &read(root).unwrap()).unwrap();
    }

    #[test]
    fn a_text_that_is_gone_or_not_unique_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("a.rs"), "one two two").unwrap();
        let mutant = |text: &str| Mutant {
            rule: 1,
            name: "m".into(),
            file: "a.rs".into(),
            text: text.into(),
            replacement: "X".into(),
            test: "lib t".into(),
        };
        assert_eq!(mutant("one").applied(root.path()).unwrap(), "X two two");
        for text in ["two", "three"] {
            let error = mutant(text).applied(root.path()).unwrap_err().to_string();
            assert!(error.contains("a.rs") && error.contains("times"), "{error}");
        }
    }

    #[test]
    fn copies_follow_the_source() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("a"), folder.path().join("b/c"));
        fs::write(&from, "one").unwrap();
        copy_changed(&from, &to).unwrap();
        let written = fs::metadata(&to).unwrap().modified().unwrap();
        copy_changed(&from, &to).unwrap();
        assert_eq!(fs::metadata(&to).unwrap().modified().unwrap(), written);
        fs::write(&from, "two").unwrap();
        copy_changed(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(&to).unwrap(), "two");
    }
}
