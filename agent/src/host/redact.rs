//! Takes secrets out of command lines before anything of them is kept.
//!
//! Two kinds of rules, both regular expressions without regard to case:
//! - names: where an argument, a variable or a key has such a name (`--db-password=x`,
//!   `--db-password x`, `HF_TOKEN=x`, `"api_key": "x"`), its value is replaced;
//! - values: what looks like a secret whatever its name (`https://user:x@host`, `hf_x…`) is
//!   replaced, or of the match the first group if there is one.
//!
//! Invariants:
//! - rules see the words as the program got them, so that a value with blanks is replaced whole;
//! - nothing is kept, journalled, spooled or shown before it went through here: whoever reads
//!   `/proc/PID/cmdline` for keeping uses [`command`]. The words themselves stay in memory only,
//!   where serving engines are looked for;
//! - without [`configure`] the default rules hold.

use std::sync::OnceLock;

use regex::{Regex, RegexBuilder};

/// What stands where a secret stood.
pub const MARK: &str = "***";

/// Names whose values are secret, if nothing else is configured. A "token" of a language model is
/// none: `--tokenizer`, `--max-tokens` and the like stay.
pub const NAMES: &[&str] = &[
    "passw(or)?d",
    "passphrase",
    "secret",
    "credential",
    "token($|[_.-])",
    "(api|access|account|private|encryption|signing|license|master|auth)[_.-]?key",
    "(^|[_.-])(auth|authorization|cookie|pat|dsn)($|[_.-])",
    "connection[_.-]?string",
];

/// What looks like a secret, if nothing else is configured: a password in a URL, and tokens by the
/// prefixes that their makers give them.
pub const VALUES: &[&str] = &[
    r"://[^/\s:@]*:([^/\s@]+)@",
    r"\bbearer\s+([a-z0-9._~+/=-]+)",
    r"\b(?:hf_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|nvapi-|xox[abprs]-|akia|asia|vramscope-token\.)[a-z0-9_.-]{10,}",
    r"\beyj[a-z0-9_-]{8,}\.[a-z0-9_-]{8,}\.[a-z0-9_-]*",
];

/// Compiled rules.
#[derive(Debug)]
pub struct Rules {
    names: Vec<Regex>,
    values: Vec<Regex>,
    /// A name and what parts it from its value: group 1 dashes, 2 the name, 3 the rest.
    candidate: Regex,
}

static RULES: OnceLock<Rules> = OnceLock::new();

/// Sets the rules, once, before any process is looked at.
pub fn configure(rules: Rules) {
    // Whoever comes second finds the rules of the same configuration.
    let _ = RULES.set(rules);
}

fn rules() -> &'static Rules {
    RULES.get_or_init(|| {
        // A test compiles all of them.
        Rules::new(NAMES, VALUES).expect("the default rules")
    })
}

/// The words as one text, without secrets.
pub fn command(words: &[String]) -> String {
    rules().command(words)
}

/// The value of a variable of the environment, without secrets.
pub fn variable(name: &str, value: String) -> String {
    rules().variable(name, value)
}

impl Rules {
    /// Compiles rules. The error names the one that is wrong.
    pub fn new<S: AsRef<str>>(names: &[S], values: &[S]) -> Result<Rules, String> {
        let compile = |rules: &[S]| -> Result<Vec<Regex>, String> {
            let rules = rules.iter().map(|rule| {
                let rule = rule.as_ref();
                RegexBuilder::new(rule)
                    .case_insensitive(true)
                    .build()
                    .map_err(|error| format!("{rule:?} is no regular expression: {error}"))
            });
            rules.collect()
        };
        let candidate = r#"(--?)?([A-Za-z_][A-Za-z0-9_.-]*)(["']?\s*[=:]\s*|\s+)"#;
        Ok(Rules {
            names: compile(names)?,
            values: compile(values)?,
            candidate: Regex::new(candidate).map_err(|error| error.to_string())?,
        })
    }

    fn is_secret(&self, name: &str) -> bool {
        self.names.iter().any(|rule| rule.is_match(name))
    }

    fn command(&self, words: &[String]) -> String {
        let mut text = String::new();
        let mut is_value = false;
        for word in words {
            if !text.is_empty() {
                text.push(' ');
            }
            let is_flag = word.starts_with('-') && word.len() > 1;
            if is_value && !is_flag && !word.is_empty() {
                text.push_str(MARK);
                is_value = false;
                continue;
            }
            // The value of such a flag is the next word.
            is_value = is_flag && !word.contains(['=', ' ']) && self.is_secret(word);
            text.push_str(&self.word(word));
        }
        text
    }

    fn variable(&self, name: &str, value: String) -> String {
        if self.is_secret(name) {
            return MARK.to_string();
        }
        self.word(&value)
    }

    /// One word. It may be a whole script (`sh -c '…'`).
    fn word(&self, word: &str) -> String {
        let named = self.by_name(word);
        self.values.iter().fold(named, |text, rule| {
            let replaced = rule.replace_all(&text, |found: &regex::Captures<'_>| {
                let whole = &found[0];
                match found.get(1) {
                    Some(secret) => {
                        let start = found.get(0).map_or(0, |whole| whole.start());
                        let (from, to) = (secret.start() - start, secret.end() - start);
                        format!("{}{MARK}{}", &whole[..from], &whole[to..])
                    }
                    None => MARK.to_string(),
                }
            });
            replaced.into_owned()
        })
    }

    fn by_name(&self, word: &str) -> String {
        let mut text = String::with_capacity(word.len());
        let mut at = 0;
        while let Some(found) = self.candidate.captures_at(word, at) {
            let (Some(whole), Some(name), Some(parting)) =
                (found.get(0), found.get(2), found.get(3))
            else {
                break;
            };
            // `--name=value` or `NAME=value` as a word of its own: all behind the sign is its value.
            let is_whole = whole.start() == 0 && parting.as_str().starts_with('=');
            let value_at = if is_whole {
                parting.start() + 1
            } else {
                whole.end()
            };
            text.push_str(&word[at..value_at]);
            at = value_at;
            // Only a flag's value stands behind a mere blank.
            let is_blank = parting.as_str().trim().is_empty();
            if (is_blank && found.get(1).is_none()) || !self.is_secret(name.as_str()) {
                continue;
            }
            let rest = &word[at..];
            let length = if is_whole {
                rest.len()
            } else {
                value_length(rest)
            };
            let value = &rest[..length];
            let quote = value.chars().next().filter(|c| matches!(c, '"' | '\''));
            if length > 0 && !(is_blank && value.starts_with('-')) {
                match quote {
                    Some(quote) if length > 1 && !is_whole => {
                        text.push(quote);
                        text.push_str(MARK);
                        text.push(quote);
                    }
                    _ => text.push_str(MARK),
                }
                at += length;
            }
        }
        text.push_str(&word[at..]);
        text
    }
}

/// How far a value reaches inside of a word: to the closing quote, or to where a shell, a URL or
/// JSON would end it. After `Bearer` and the like comes the value proper.
fn value_length(rest: &str) -> usize {
    if let Some(quote) = rest.chars().next().filter(|c| matches!(c, '"' | '\'')) {
        let end = rest[1..].find(quote);
        return end.map_or(rest.len(), |end| end + 2);
    }
    let end = |text: &str| {
        text.find(|c: char| c.is_whitespace() || ";&|\"',()}".contains(c))
            .unwrap_or(text.len())
    };
    let first = end(rest);
    let scheme = rest[..first].to_ascii_lowercase();
    if matches!(scheme.as_str(), "bearer" | "basic" | "token" | "digest") {
        let behind = &rest[first..];
        let blank = behind.len() - behind.trim_start().len();
        return first + blank + end(behind.trim_start());
    }
    first
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    static DEFAULT: LazyLock<Rules> = LazyLock::new(|| Rules::new(NAMES, VALUES).unwrap());

    fn redacted(words: &[&str]) -> String {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        DEFAULT.command(&words)
    }

    /// Written by hand: what goes in, what has to come out.
    #[test]
    fn secrets_go() {
        for (words, wanted) in [
            (&["x", "--password=hunter2"][..], "x --password=***"),
            (&["x", "--password", "hunter2", "y"], "x --password *** y"),
            (
                &["x", "--db-password", "a b c", "y"],
                "x --db-password *** y",
            ),
            (&["x", "--db_Password=a b c", "y"], "x --db_Password=*** y"),
            (
                &["env", "HF_TOKEN=hf_short", "python"],
                "env HF_TOKEN=*** python",
            ),
            (
                &["env", "AWS_SECRET_ACCESS_KEY=a/b+c=", "x"],
                "env AWS_SECRET_ACCESS_KEY=*** x",
            ),
            (&["vllm", "--api-key", "sk"], "vllm --api-key ***"),
            (&["vllm", "-api-key", "sk"], "vllm -api-key ***"),
            (
                &["x", "--auth-token", "--verbose"],
                "x --auth-token --verbose",
            ),
            (
                &["sh", "-c", "export API_KEY='a b'; run --token t0 --n 3"],
                "sh -c export API_KEY='***'; run --token *** --n 3",
            ),
            (
                &["sh", "-c", "PGPASSWORD=x psql && echo done"],
                // The word begins with it, so all of the word is its value.
                "sh -c PGPASSWORD=***",
            ),
            (
                &["curl", "-H", "Authorization: Bearer abc.def", "http://h"],
                "curl -H Authorization: *** http://h",
            ),
            (
                &["x", "{\"api_key\": \"abc\", \"n\": 3}"],
                "x {\"api_key\": \"***\", \"n\": 3}",
            ),
            (
                &["x", "postgres://me:pw@db:5432/n"],
                "x postgres://me:***@db:5432/n",
            ),
            (&["x", "redis://:pw@cache"], "x redis://:***@cache"),
            (
                &["x", "http://h/?token=abc&n=1"],
                "x http://h/?token=***&n=1",
            ),
            (&["x", "hf_abcdefghijklmnop"], "x ***"),
            (&["x", "--note=see hf_abcdefghijklmnop"], "x --note=see ***"),
            (&["x", "eyJhbGciOiJI.eyJzdWIiOiIx.sig"], "x ***"),
            (&["x", "--dsn", "host=a user=b"], "x --dsn ***"),
        ] {
            assert_eq!(redacted(words), wanted);
        }
    }

    #[test]
    fn all_else_stays() {
        for words in [
            &[
                "vllm",
                "serve",
                "--tokenizer",
                "meta/llama",
                "--max-num-batched-tokens",
                "8192",
            ][..],
            &["x", "--max-tokens=512", "--tokenizer-mode=auto", "--token"],
            &["python", "-m", "sglang.launch_server", "--port", "30000"],
            &[
                "x",
                "--author=me",
                "--key-frames",
                "3",
                "a=b",
                "http://h:8000/path@v2",
            ],
            &["sh", "-c", "for i in a b; do echo $i; done"],
            &["x", "--keyfile", "/etc/x.key"],
            &["x", "", "y"],
        ] {
            assert_eq!(redacted(words), words.join(" "));
        }
    }

    #[test]
    fn own_rules_and_none() {
        let words = ["x", "--pin=1234", "--password=p", "id-77"].map(String::from);
        let rules = Rules::new(&["^-*pin$"], &[r"id-(\d+)"]).unwrap();
        assert_eq!(rules.command(&words), "x --pin=*** --password=p id-***");
        let rules = Rules::new::<&str>(&[], &[]).unwrap();
        assert_eq!(rules.command(&words), "x --pin=1234 --password=p id-77");
        let error = Rules::new(&["("], &[]).unwrap_err();
        assert!(error.contains("\"(\""), "{error}");
        let rules = &*DEFAULT;
        assert_eq!(rules.variable("HF_TOKEN", "x".into()), "***");
        assert_eq!(rules.variable("POD_NAMESPACE", "team-a".into()), "team-a");
    }

    proptest::proptest! {
        #[test]
        fn any_words_are_survived(words in proptest::collection::vec(".{0,60}", 0..6)) {
            let _ = DEFAULT.command(&words);
        }

        /// Whatever a password is, behind its flag nothing of it is left.
        #[test]
        fn a_flags_value_is_gone(secret in "[A-Za-z0-9 ;=:&'\"@/]{1,30}") {
            let text = redacted(&["x", &format!("--password={secret}"), "--password", &secret]);
            assert_eq!(text, "x --password=*** --password ***");
        }
    }
}
