//! What kind of statement a text is: a query for the engine, something that the door does itself,
//! or something that nobody does here.
//!
//! Invariant: what reaches the engine is text that asks. Everything that sets, begins, ends or
//! writes is decided here, by its first words, and the engine's own check for writes comes after.

use datafusion::sql::sqlparser::dialect::PostgreSqlDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};

use super::failure::Failure;

/// A statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Statement {
    /// Nothing but white space and comments.
    Empty,
    /// For the engine.
    Query(Tag),
    /// `SET name TO value`; no value is the default.
    Set {
        /// The setting.
        name: String,
        /// Its value.
        value: Option<String>,
        /// Until the transaction's end.
        local: bool,
    },
    /// `SHOW name`.
    Show(String),
    /// `SHOW ALL`.
    ShowAll,
    /// `RESET name`.
    Reset(String),
    /// `RESET ALL`.
    ResetAll,
    /// `DISCARD ALL`.
    DiscardAll,
    /// `BEGIN`, `START TRANSACTION`.
    Begin(&'static str),
    /// `COMMIT`, `END`.
    Commit,
    /// `ROLLBACK`, `ABORT`.
    Rollback,
    /// `DEALLOCATE name`; `None` is all of them.
    Deallocate(Option<String>),
    /// Has nothing to act on here (savepoints, `UNLISTEN`); the tag to answer.
    Nothing(&'static str),
    /// Leaves a failed transaction's statements behind: `ROLLBACK TO`.
    RollbackTo,
}

/// What is said of a query that is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tag {
    /// `SELECT n`.
    Select,
    /// `SHOW`.
    Show,
    /// `EXPLAIN`.
    Explain,
}

/// First words of statements that change something.
const WRITES: &[&str] = &[
    "ALTER",
    "ANALYZE",
    "CALL",
    "CHECKPOINT",
    "CLUSTER",
    "COMMENT",
    "COPY",
    "CREATE",
    "DELETE",
    "DO",
    "DROP",
    "GRANT",
    "IMPORT",
    "INSERT",
    "LOAD",
    "LOCK",
    "MERGE",
    "NOTIFY",
    "REASSIGN",
    "REFRESH",
    "REINDEX",
    "REPLACE",
    "REVOKE",
    "SECURITY",
    "TRUNCATE",
    "UPDATE",
    "VACUUM",
];
/// Those that are named with their second word.
const WITH_OBJECT: &[&str] = &["ALTER", "CREATE", "DROP"];
/// First words of statements that PostgreSQL has and this does not.
const UNSUPPORTED: &[&str] = &["DECLARE", "EXECUTE", "FETCH", "LISTEN", "MOVE", "PREPARE"];

/// The kind of one statement.
pub fn classify(sql: &str) -> Result<Statement, Failure> {
    let words = Words::of(sql)?;
    let Some(first) = words.keyword(0) else {
        return Ok(match words.tokens.first() {
            None => Statement::Empty,
            // `(SELECT …) UNION …`; anything else is the parser's to refuse.
            Some(_) => Statement::Query(Tag::Select),
        });
    };
    let second = words.keyword(1).unwrap_or_default();
    let first = first.as_str();
    if WRITES.contains(&first) {
        let what = match WITH_OBJECT.contains(&first) && !second.is_empty() {
            true => format!("{first} {second}"),
            false => first.to_string(),
        };
        return Err(Failure::read_only(&what));
    }
    if UNSUPPORTED.contains(&first) {
        return Err(Failure::unsupported(first));
    }
    match first {
        "SET" => set(&words),
        "SHOW" => Ok(show(&words, &second)),
        "RESET" => match second.as_str() {
            "" => Err(words.wrong()),
            "ALL" => Ok(Statement::ResetAll),
            "ROLE" => Err(not_permitted("RESET ROLE")),
            _ => Ok(Statement::Reset(words.name_from(1))),
        },
        "DISCARD" => match second.as_str() {
            "ALL" => Ok(Statement::DiscardAll),
            "PLANS" | "TEMP" | "TEMPORARY" | "SEQUENCES" => Ok(Statement::Nothing("DISCARD")),
            _ => Err(words.wrong()),
        },
        "BEGIN" => Ok(Statement::Begin("BEGIN")),
        "START" if second == "TRANSACTION" => Ok(Statement::Begin("START TRANSACTION")),
        "COMMIT" | "ROLLBACK" if second == "PREPARED" => {
            Err(Failure::unsupported("a two-phase commit"))
        }
        "COMMIT" | "END" => Ok(Statement::Commit),
        "ROLLBACK" | "ABORT" if words.has("TO") => Ok(Statement::RollbackTo),
        "ROLLBACK" | "ABORT" => Ok(Statement::Rollback),
        "SAVEPOINT" => Ok(Statement::Nothing("SAVEPOINT")),
        "RELEASE" => Ok(Statement::Nothing("RELEASE")),
        "UNLISTEN" => Ok(Statement::Nothing("UNLISTEN")),
        "CLOSE" if second == "ALL" => Ok(Statement::Nothing("CLOSE CURSOR ALL")),
        "CLOSE" => Err(Failure::unsupported("a cursor of SQL")),
        "DEALLOCATE" => {
            let at = if second == "PREPARE" { 2 } else { 1 };
            match words.keyword(at).as_deref() {
                Some("ALL") => Ok(Statement::Deallocate(None)),
                Some(_) => Ok(Statement::Deallocate(Some(words.name_from(at)))),
                None => Err(words.wrong()),
            }
        }
        "EXPLAIN" => Ok(Statement::Query(Tag::Explain)),
        _ => Ok(Statement::Query(Tag::Select)),
    }
}

fn set(words: &Words) -> Result<Statement, Failure> {
    let mut at = 1;
    let mut local = false;
    match words.keyword(at).as_deref() {
        Some("LOCAL") => {
            local = true;
            at += 1;
        }
        Some("SESSION") if words.keyword(at + 1).as_deref() == Some("AUTHORIZATION") => {
            return Err(not_permitted("SET SESSION AUTHORIZATION"));
        }
        Some("SESSION") if words.keyword(at + 1).as_deref() == Some("CHARACTERISTICS") => {
            return Ok(Statement::Nothing("SET"));
        }
        Some("SESSION") => at += 1,
        _ => {}
    }
    let (name, at) = match words.keyword(at).as_deref() {
        Some("ROLE") => return Err(not_permitted("SET ROLE")),
        // Nothing that it could say changes what a query sees.
        Some("TRANSACTION" | "CONSTRAINTS") => return Ok(Statement::Nothing("SET")),
        Some("TIME") if words.keyword(at + 1).as_deref() == Some("ZONE") => {
            ("TimeZone".to_string(), at + 2)
        }
        Some("NAMES") => ("client_encoding".to_string(), at + 1),
        Some(_) => {
            let equals = words.tokens[at..]
                .iter()
                .position(|token| matches!(token, Token::Eq) || is_keyword(token, Keyword::TO));
            let end = at + equals.ok_or_else(|| words.wrong())?;
            (words.name(at, end), end + 1)
        }
        None => return Err(words.wrong()),
    };
    let mut values = Vec::new();
    let mut sign = "";
    for token in words.tokens.get(at..).unwrap_or_default() {
        match token {
            Token::Comma => {}
            Token::Minus => sign = "-",
            Token::Plus => {}
            Token::Number(number, _) => {
                values.push(format!("{sign}{number}"));
                sign = "";
            }
            Token::SingleQuotedString(text) | Token::EscapedStringLiteral(text) => {
                values.push(text.clone());
            }
            Token::Word(word) => values.push(word.value.clone()),
            _ => return Err(words.wrong()),
        }
    }
    let value = match values.as_slice() {
        [] => return Err(words.wrong()),
        [one] if one.eq_ignore_ascii_case("default") => None,
        _ => Some(values.join(", ")),
    };
    Ok(Statement::Set { name, value, local })
}

fn show(words: &Words, second: &str) -> Statement {
    match second {
        "ALL" => Statement::ShowAll,
        // The engine's own.
        "TABLES" | "COLUMNS" | "FUNCTIONS" | "CREATE" | "FULL" | "EXTENDED" => {
            Statement::Query(Tag::Show)
        }
        _ => Statement::Show(words.name_from(1)),
    }
}

fn not_permitted(what: &str) -> Failure {
    Failure::error("42501", format!("permission denied: {what}"))
        .hint("who you are is settled when you connect")
}

fn is_keyword(token: &Token, keyword: Keyword) -> bool {
    matches!(token, Token::Word(word) if word.quote_style.is_none() && word.keyword == keyword)
}

/// A statement's tokens, without white space, comments and the `;` at the end.
struct Words {
    tokens: Vec<Token>,
}

impl Words {
    fn of(sql: &str) -> Result<Words, Failure> {
        let tokens = Tokenizer::new(&PostgreSqlDialect {}, sql)
            .tokenize()
            .map_err(|error| Failure::error("42601", error.to_string()))?;
        let tokens = tokens
            .into_iter()
            .filter(|token| !matches!(token, Token::Whitespace(_) | Token::SemiColon))
            .collect();
        Ok(Words { tokens })
    }

    /// An unquoted word in upper case.
    fn keyword(&self, at: usize) -> Option<String> {
        match self.tokens.get(at)? {
            Token::Word(word) if word.quote_style.is_none() => {
                Some(word.value.to_ascii_uppercase())
            }
            Token::Word(word) => Some(word.value.clone()),
            _ => None,
        }
    }

    fn has(&self, keyword: &str) -> bool {
        (0..self.tokens.len()).any(|at| self.keyword(at).as_deref() == Some(keyword))
    }

    /// A name of several parts: `a.b`, `TIME ZONE`.
    fn name(&self, from: usize, to: usize) -> String {
        let mut name = String::new();
        for token in &self.tokens[from..to] {
            match token {
                Token::Word(word) if name.is_empty() || name.ends_with('.') => {
                    name.push_str(&word.value);
                }
                Token::Word(word) => {
                    name.push(' ');
                    name.push_str(&word.value);
                }
                other => name.push_str(&other.to_string()),
            }
        }
        name
    }

    fn name_from(&self, from: usize) -> String {
        self.name(from.min(self.tokens.len()), self.tokens.len())
    }

    fn wrong(&self) -> Failure {
        let words: Vec<_> = self.tokens.iter().map(ToString::to_string).collect();
        let near = words.last().map_or("", String::as_str);
        Failure::error("42601", format!("syntax error at or near \"{near}\""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(name: &str, value: &str) -> Statement {
        Statement::Set {
            name: name.into(),
            value: Some(value.into()),
            local: false,
        }
    }

    #[test]
    fn statements_of_clients_are_told_apart() {
        // As psql, pgJDBC, pgx, npgsql and SQLAlchemy send them.
        for (sql, expected) in [
            ("", Statement::Empty),
            (" -- nothing\n", Statement::Empty),
            ("select 1", Statement::Query(Tag::Select)),
            ("(SELECT 1) UNION (SELECT 2)", Statement::Query(Tag::Select)),
            (
                "/* app */ WITH t AS (SELECT 1) SELECT * FROM t",
                Statement::Query(Tag::Select),
            ),
            ("EXPLAIN SELECT 1", Statement::Query(Tag::Explain)),
            ("SHOW TABLES", Statement::Query(Tag::Show)),
            ("show search_path", Statement::Show("search_path".into())),
            (
                "SHOW TRANSACTION ISOLATION LEVEL",
                Statement::Show("TRANSACTION ISOLATION LEVEL".into()),
            ),
            ("SET extra_float_digits = 3", set("extra_float_digits", "3")),
            (
                "SET extra_float_digits TO -1",
                set("extra_float_digits", "-1"),
            ),
            (
                "SET application_name = 'PostgreSQL JDBC Driver'",
                set("application_name", "PostgreSQL JDBC Driver"),
            ),
            (
                "SET SESSION datestyle TO 'ISO', \"MDY\"",
                set("datestyle", "ISO, MDY"),
            ),
            ("SET TIME ZONE 'UTC'", set("TimeZone", "UTC")),
            (
                "set client_encoding to utf8;",
                set("client_encoding", "utf8"),
            ),
            ("SET NAMES 'UTF8'", set("client_encoding", "UTF8")),
            (
                "SET search_path = public,\"$user\"",
                set("search_path", "public, $user"),
            ),
            ("SET a.b = on", set("a.b", "on")),
            (
                "SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE",
                Statement::Nothing("SET"),
            ),
            (
                "BEGIN TRANSACTION ISOLATION LEVEL SERIALIZABLE",
                Statement::Begin("BEGIN"),
            ),
            (
                "START TRANSACTION READ ONLY",
                Statement::Begin("START TRANSACTION"),
            ),
            ("END", Statement::Commit),
            ("ABORT", Statement::Rollback),
            ("ROLLBACK TO SAVEPOINT a", Statement::RollbackTo),
            (
                "DEALLOCATE \"s1\"",
                Statement::Deallocate(Some("s1".into())),
            ),
            ("DEALLOCATE ALL", Statement::Deallocate(None)),
            ("DISCARD ALL", Statement::DiscardAll),
            ("RESET ALL", Statement::ResetAll),
            ("UNLISTEN *", Statement::Nothing("UNLISTEN")),
        ] {
            assert_eq!(classify(sql), Ok(expected), "{sql}");
        }
        assert_eq!(
            classify("SET LOCAL statement_timeout TO DEFAULT"),
            Ok(Statement::Set {
                name: "statement_timeout".into(),
                value: None,
                local: true
            })
        );
    }

    #[test]
    fn what_changes_something_is_refused_with_its_name() {
        for (sql, code, text) in [
            ("COPY (SELECT 1) TO '/tmp/x'", "25006", "COPY"),
            ("drop table alloc_events", "25006", "DROP TABLE"),
            (
                "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '/'",
                "25006",
                "CREATE EXTERNAL",
            ),
            ("INSERT INTO stacks VALUES (1)", "25006", "INSERT"),
            ("DO $$ BEGIN END $$", "25006", "DO"),
            ("SET ROLE postgres", "42501", "SET ROLE"),
            (
                "SET SESSION AUTHORIZATION postgres",
                "42501",
                "SET SESSION AUTHORIZATION",
            ),
            ("DECLARE c CURSOR FOR SELECT 1", "0A000", "DECLARE"),
            ("SET x", "42601", "syntax error"),
            ("SELECT 'open", "42601", "string"),
        ] {
            let error = classify(sql).unwrap_err();
            assert_eq!(error.code, code, "{sql}");
            assert!(error.message.contains(text), "{sql}: {}", error.message);
        }
    }
}
