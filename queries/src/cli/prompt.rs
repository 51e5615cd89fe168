//! The interactive prompt: history, completion, statements over several lines.

use std::path::PathBuf;

use rustyline::completion::{Completer, Pair};
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{CompletionType, Config, Context, Editor, Helper, Highlighter, Hinter};
use vramscope_queries::describe::Catalog;
use vramscope_queries::session::Limits;
use vramscope_queries::{near, statements};

use crate::answer;
use crate::door::Door;
use crate::output::{Format, Sink};

const HELP: &str = "\
SQL ending in ';' is answered. It may go over several lines.
  \\d          views and tables
  \\d NAME     columns of one, with types, units and meaning
  \\?          this text
  \\q          leave (so does Ctrl-D)
Tab completes names, the arrow keys go through earlier questions.
Ctrl-C drops the line, or stops the question that is being answered.
";

const KEYWORDS: &[&str] = &[
    "SELECT",
    "FROM",
    "WHERE",
    "GROUP BY",
    "ORDER BY",
    "LIMIT",
    "JOIN",
    "LEFT JOIN",
    "USING",
    "WITH",
    "HAVING",
    "DISTINCT",
    "COUNT(*)",
    "SUM",
    "MAX",
    "MIN",
    "AVG",
    "DESC",
    "INTERVAL",
    "EXPLAIN",
    "SHOW TABLES",
    "DESCRIBE",
];

/// Runs until the user leaves. Returns the exit code.
pub async fn run(door: &mut Door, limits: Limits, format: Format) -> u8 {
    match converse(door, limits, format).await {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("error: {error:#}");
            1
        }
    }
}

async fn converse(door: &mut Door, limits: Limits, format: Format) -> anyhow::Result<()> {
    let catalog = Catalog::load().await?;
    let config = Config::builder()
        .completion_type(CompletionType::List)
        .max_history_size(10_000)?
        .build();
    let mut editor = Editor::<PromptHelper, FileHistory>::with_config(config)?;
    editor.set_helper(Some(PromptHelper::new(&catalog)));
    let history = history_file();
    if let Some(file) = &history {
        // No history yet is no error.
        let _ = editor.load_history(file);
    }
    println!(
        "vramscope {}: \\d lists views and tables, \\? helps, \\q leaves",
        env!("CARGO_PKG_VERSION")
    );
    loop {
        match editor.readline("vramscope> ") {
            Ok(line) => {
                if line.trim().is_empty() {
                    continue;
                }
                editor.add_history_entry(line.as_str())?;
                if let Some(command) = line.trim().strip_prefix('\\') {
                    if !meta_command(&catalog, command).await {
                        break;
                    }
                    continue;
                }
                ask(door, &line, limits, format).await;
            }
            Err(ReadlineError::Interrupted) => {}
            Err(ReadlineError::Eof) => break,
            Err(error) => return Err(error.into()),
        }
    }
    if let Some(file) = &history
        && let Err(error) = editor.save_history(file)
    {
        eprintln!("note: failed to keep the history in {file:?}: {error}");
    }
    Ok(())
}

/// Runs a backslash command; false means leave.
async fn meta_command(catalog: &Catalog, command: &str) -> bool {
    let mut words = command.trim_end_matches(';').split_whitespace();
    match (words.next(), words.next()) {
        (Some("q"), _) => return false,
        (Some("?" | "h" | "help"), _) => print!("{HELP}"),
        (Some("d" | "dt" | "dv"), None) => print!("{}", catalog.list()),
        (Some("d"), Some(name)) => match catalog.describe(name).await {
            Ok(Some(text)) => print!("{text}"),
            Ok(None) => eprintln!("error: no view or table named {name:?}; \\d lists them"),
            Err(error) => eprintln!("error: {error}"),
        },
        _ => eprintln!("error: unknown command \\{command}; \\? lists them"),
    }
    true
}

async fn ask(door: &mut Door, text: &str, limits: Limits, format: Format) {
    for statement in statements::split(text) {
        let work = async {
            let mut sink = Sink::open(format, None)?;
            answer(door, statement, limits, &mut sink).await
        };
        let outcome = tokio::select! {
            outcome = work => outcome,
            _ = tokio::signal::ctrl_c() => {
                eprintln!("cancelled");
                return;
            }
        };
        if let Err(error) = outcome {
            eprintln!("error: {}", near::with_suggestion(format!("{error:#}")));
            return;
        }
    }
}

/// `$XDG_STATE_HOME/vramscope/history`, by default under `~/.local/state`.
fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute());
    let state = match state {
        Some(dir) => dir,
        None => std::env::home_dir()?.join(".local/state"),
    };
    let dir = state.join("vramscope");
    std::fs::create_dir_all(&dir).ok()?;
    Some(dir.join("history"))
}

#[derive(Helper, Hinter, Highlighter)]
struct PromptHelper {
    names: Vec<String>,
    words: Vec<String>,
}

impl PromptHelper {
    fn new(catalog: &Catalog) -> Self {
        let names: Vec<String> = catalog.names().into_iter().map(str::to_string).collect();
        let mut words = names.clone();
        words.extend(catalog.column_names());
        words.extend(KEYWORDS.iter().map(|word| word.to_string()));
        words.sort();
        words.dedup();
        PromptHelper { names, words }
    }

    /// Candidates for the word that ends at `pos`, and where the word starts.
    fn candidates(&self, line: &str, pos: usize) -> (usize, Vec<String>) {
        let before = &line[..pos];
        let is_name_part = |c: char| c.is_alphanumeric() || c == '_';
        let word_length: usize = before
            .chars()
            .rev()
            .take_while(|c| is_name_part(*c))
            .map(char::len_utf8)
            .sum();
        let start = pos - word_length;
        let word = before[start..].to_lowercase();
        let wants_name = before.trim_start().starts_with("\\d");
        let from = if wants_name { &self.names } else { &self.words };
        let matching =
            |candidate: &&String| !word.is_empty() && candidate.to_lowercase().starts_with(&word);
        let found = if wants_name && word.is_empty() {
            from.clone()
        } else {
            from.iter().filter(matching).cloned().collect()
        };
        (start, found)
    }
}

impl Completer for PromptHelper {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        let (start, found) = self.candidates(line, pos);
        let pair = |text: String| Pair {
            display: text.clone(),
            replacement: text,
        };
        Ok((start, found.into_iter().map(pair).collect()))
    }
}

impl Validator for PromptHelper {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let input = context.input();
        let done = input.trim_start().starts_with('\\') || statements::is_complete(input);
        Ok(if done {
            ValidationResult::Valid(None)
        } else {
            ValidationResult::Incomplete
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn helper() -> PromptHelper {
        PromptHelper {
            names: vec!["alloc_events".to_string(), "stacks".to_string()],
            words: vec![
                "alloc_events".to_string(),
                "alloc_seq".to_string(),
                "SELECT".to_string(),
            ],
        }
    }

    #[test]
    fn completes_the_word_under_the_cursor() {
        let line = "SELECT alloc";
        assert_eq!(
            helper().candidates(line, line.len()),
            (7, vec!["alloc_events".into(), "alloc_seq".into()])
        );
        assert_eq!(helper().candidates("sel", 3), (0, vec!["SELECT".into()]));
        assert_eq!(helper().candidates("SELECT ", 7).1, Vec::<String>::new());
    }

    #[test]
    fn describes_complete_names_only() {
        assert_eq!(
            helper().candidates("\\d alloc", 8),
            (3, vec!["alloc_events".into()])
        );
        assert_eq!(helper().candidates("\\d ", 3).1.len(), 2);
    }
}
