//! What is being done, how far it is, how long it has taken: on a terminal a live bar, elsewhere
//! one line at the start, one at the end and a sign of life in between. All of it goes to
//! standard error; standard output belongs to results.

use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use crate::children::{check_interrupted, tie_to_us};

/// How often a step says it is alive where no bar can be drawn.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// Lines of a failed command's output that are shown.
const SHOWN_ON_FAILURE: usize = 80;

/// One long piece of work.
#[derive(Debug)]
pub struct Step {
    what: String,
    started: Instant,
    last_sign: Instant,
    bar: Option<ProgressBar>,
    total: u64,
}

impl Step {
    /// Starts a step named by what is being done ("building the workspace").
    pub fn start(what: &str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            // The templates are constants and valid.
            if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix} [{elapsed}] {msg}")
            {
                bar.set_style(style);
            }
            bar.set_prefix(what.to_string());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        if bar.is_none() {
            eprintln!("{what} …");
        }
        let now = Instant::now();
        Self {
            what: what.to_string(),
            started: now,
            last_sign: now,
            bar,
            total: 0,
        }
    }

    /// From now on the step is a bar of `total` parts.
    pub fn set_total(&mut self, total: u64) {
        self.total = total;
        let Some(bar) = &self.bar else { return };
        bar.set_length(total);
        let template = "{spinner} {prefix} [{elapsed}] {bar:30} {pos}/{len} {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
    }

    /// Says how far it is and what it is at.
    pub fn at(&mut self, position: u64, message: &str) {
        if let Some(bar) = &self.bar {
            bar.set_position(position.min(self.total));
            bar.set_message(shorten(message));
            return;
        }
        if self.last_sign.elapsed() >= HEARTBEAT {
            self.last_sign = Instant::now();
            let elapsed = spell(self.started.elapsed());
            match self.total {
                0 => eprintln!("  {elapsed}: {}", shorten(message)),
                total => eprintln!(
                    "  {elapsed}: {} of {total}, {}",
                    position.min(total),
                    shorten(message)
                ),
            }
        }
    }

    /// Ends the step well, with a note ("3 tables").
    pub fn done(self, note: &str) {
        let elapsed = spell(self.started.elapsed());
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let note = if note.is_empty() {
            String::new()
        } else {
            format!(": {note}")
        };
        eprintln!("✓ {}{note} ({elapsed})", self.what);
    }

    /// Ends the step badly.
    pub fn failed(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        eprintln!("✗ {} ({})", self.what, spell(self.started.elapsed()));
    }
}

/// A line of text, cut to what fits beside a bar.
fn shorten(text: &str) -> String {
    const LIMIT: usize = 60;
    let text = text.trim();
    if text.chars().count() <= LIMIT {
        return text.to_string();
    }
    text.chars().take(LIMIT - 1).chain(['…']).collect()
}

/// A duration for people: `4.2 s`, `3 min 07 s`.
pub fn spell(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds < 60 {
        return format!("{:.1} s", duration.as_secs_f64());
    }
    format!("{} min {:02} s", seconds / 60, seconds % 60)
}

/// Runs a command to its end behind a step. `observe` sees every line of its output and may
/// move the step; it returns true for lines that are not worth showing if the command fails.
pub fn run(
    mut step: Step,
    command: &mut Command,
    mut observe: impl FnMut(&str, &mut Step) -> bool,
) -> Result<()> {
    tie_to_us(command);
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start {program}"))?;
    let (sender, lines) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        forward(stdout, sender.clone());
    }
    if let Some(stderr) = child.stderr.take() {
        forward(stderr, sender.clone());
    }
    drop(sender);

    let mut output = Vec::new();
    let status: ExitStatus = loop {
        match lines.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => {
                if !observe(&line, &mut step) {
                    output.push(line);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                break child.wait().context("failed to wait")?;
            }
        }
        if let Err(interrupted) = check_interrupted() {
            // SAFETY: plain system call; the group is led by our own child, not yet waited for.
            unsafe {
                libc::kill(-(child.id() as libc::pid_t), libc::SIGTERM);
            }
            let _ = child.wait();
            step.failed();
            return Err(interrupted);
        }
    };
    if !status.success() {
        let what = step.what.clone();
        step.failed();
        let skipped = output.len().saturating_sub(SHOWN_ON_FAILURE);
        if skipped > 0 {
            eprintln!("  … {skipped} lines left out");
        }
        for line in &output[skipped..] {
            eprintln!("  {line}");
        }
        bail!("{what} failed: {program} ended with {status}");
    }
    step.done("");
    Ok(())
}

fn forward(from: impl Read + Send + 'static, to: mpsc::Sender<String>) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if to.send(line).is_err() {
                break;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well() {
        assert_eq!(spell(Duration::from_millis(4200)), "4.2 s");
        assert_eq!(spell(Duration::from_secs(187)), "3 min 07 s");
    }

    #[test]
    fn long_messages_are_cut() {
        assert_eq!(shorten(&"x".repeat(100)).chars().count(), 60);
        assert_eq!(shorten(" Compiling arrow "), "Compiling arrow");
    }
}
