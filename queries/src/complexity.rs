//! How deep a statement can become, told from its text before anything is built of it.
//!
//! A parser, a planner and what frees their trees call themselves once for every level, and a stack
//! that overflows ends the process with everybody's queries. Parentheses are counted by the parser,
//! which takes fifty levels; a chain (`1 + 1 + …`, a hundred thousand joins) has none. So what can
//! make a level is counted here, and threads that plan have stacks for that many ([`STACK_BYTES`]).

use datafusion::sql::sqlparser::dialect::{Dialect, GenericDialect, PostgreSqlDialect};
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};

use crate::Error;

/// Links that a statement may have: an operator is one, a clause that becomes a step of the plan
/// (SELECT, JOIN, UNION and the like) is [`STEP`].
pub const MOST_LINKS: usize = 3_000;

/// Links of a step of the plan.
pub const STEP: usize = 10;

/// Stack of a thread that plans statements, in bytes: what [`MOST_LINKS`] needs in a debug build,
/// several times over. Memory is taken as far as it is used.
pub const STACK_BYTES: usize = 256 << 20;

/// Stack of a thread that parses statements, and frees what it parsed.
pub const PARSER_STACK_BYTES: usize = 64 << 20;

/// Refuses a statement, or several, with more links than that.
pub fn check(sql: &str) -> Result<(), Error> {
    // Doors parse in either dialect, and what is a text in one can be a chain in the other.
    let generic = links(&GenericDialect {}, sql);
    match generic.max(links(&PostgreSqlDialect {}, sql)) {
        links if links > MOST_LINKS => Err(Error::TooDeep {
            links,
            limit: MOST_LINKS,
        }),
        _ => Ok(()),
    }
}

fn links(dialect: &dyn Dialect, sql: &str) -> usize {
    let mut tokenizer = Tokenizer::new(dialect, sql);
    // What is not even tokens the parser refuses before it builds anything.
    let Ok(tokens) = tokenizer.tokenize() else {
        return 0;
    };
    let mut links = 0;
    // For every open parenthesis whether a comma there is a join.
    let mut in_from = vec![false];
    let mut last = Token::Comma;
    // Of one name: `(x).a.b.c` takes a field of a field.
    let mut periods = 0;
    for token in tokens {
        match &token {
            Token::Whitespace(_) => continue,
            Token::LParen => in_from.push(false),
            Token::RParen if in_from.len() > 1 => {
                in_from.pop();
            }
            Token::Comma if in_from.last() == Some(&true) => links += STEP,
            Token::VerticalBarRightAngleBracket => links += STEP,
            Token::Period => {
                periods += 1;
                // A column has three: of its catalog, schema and table.
                links += usize::from(periods > 3);
            }
            // The sign of a number in a list.
            Token::Minus if matches!(last, Token::Comma | Token::LParen) => {}
            Token::Word(word) if word.quote_style.is_none() => {
                let kind = kind(word.keyword);
                links += match kind {
                    Kind::Step | Kind::Select => STEP,
                    Kind::Operator => 1,
                    Kind::From | Kind::Clause | Kind::Other => 0,
                };
                if let Some(here) = in_from.last_mut()
                    && matches!(kind, Kind::From | Kind::Clause | Kind::Select)
                {
                    *here = matches!(kind, Kind::From);
                }
            }
            Token::Word(_)
            | Token::Number(..)
            | Token::SingleQuotedString(_)
            | Token::DoubleQuotedString(_)
            | Token::DollarQuotedString(_)
            | Token::EscapedStringLiteral(_)
            | Token::Placeholder(_)
            | Token::Comma
            | Token::RParen
            | Token::SemiColon
            | Token::EOF => {}
            _ => links += 1,
        }
        if !matches!(token, Token::Period) && !matches!(last, Token::Period) {
            periods = 0;
        }
        last = token;
    }
    links
}

enum Kind {
    /// Begins a step, and a list whose commas are none.
    Select,
    /// A step.
    Step,
    /// Begins a list of joins.
    From,
    /// Ends it.
    Clause,
    Operator,
    Other,
}

fn kind(keyword: Keyword) -> Kind {
    match keyword {
        Keyword::SELECT => Kind::Select,
        Keyword::JOIN
        | Keyword::APPLY
        | Keyword::UNION
        | Keyword::EXCEPT
        | Keyword::INTERSECT
        | Keyword::MINUS
        | Keyword::PIVOT
        | Keyword::UNPIVOT
        | Keyword::LATERAL
        | Keyword::EXPLAIN => Kind::Step,
        Keyword::FROM => Kind::From,
        Keyword::WHERE
        | Keyword::GROUP
        | Keyword::HAVING
        | Keyword::ORDER
        | Keyword::LIMIT
        | Keyword::OFFSET
        | Keyword::WINDOW
        | Keyword::QUALIFY
        | Keyword::VALUES => Kind::Clause,
        Keyword::AND
        | Keyword::OR
        | Keyword::XOR
        | Keyword::NOT
        | Keyword::IS
        | Keyword::NOTNULL
        | Keyword::IN
        | Keyword::BETWEEN
        | Keyword::LIKE
        | Keyword::ILIKE
        | Keyword::RLIKE
        | Keyword::REGEXP
        | Keyword::SIMILAR
        | Keyword::ESCAPE
        | Keyword::DIV
        | Keyword::COLLATE
        | Keyword::AT
        | Keyword::OVERLAPS => Kind::Operator,
        _ => Kind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_count_and_lists_do_not() {
        let counted = [
            ("SELECT a, -1, 'x AND y', \"and\" FROM t", 10),
            ("SELECT a + -1 || b::TEXT -- + + +\nFROM t", 13 + 1),
            ("SELECT 1 UNION ALL SELECT 2", 30),
            (
                "SELECT * FROM a, b JOIN c ON a.x = b.x, (SELECT 1, 2) d WHERE f(a, b) IN (1, -2, 3)",
                10 + 1 + 10 + 10 + 1 + 10 + 10 + 1,
            ),
            ("SELECT x FROM t GROUP BY a, b ORDER BY a, b", 10),
            ("SELECT '", 0),
        ];
        for (sql, expected) in counted {
            assert_eq!(links(&GenericDialect {}, sql), expected, "{sql}");
        }
        // A name of a column is none; a backslash ends a text in one dialect and not in the other,
        // and a backtick is a quote in one of them.
        let columns = format!("SELECT {}1", "c.s.t.x, ".repeat(50_000));
        assert!(check(&columns).is_ok());
        for hidden in [
            format!("SELECT '\\'{}, ''", "+1".repeat(MOST_LINKS)),
            format!("SELECT 1{} `", "+1".repeat(MOST_LINKS)),
            format!("SELECT (x){}", ".a".repeat(MOST_LINKS)),
            format!("{}SELECT 1", "EXPLAIN ".repeat(MOST_LINKS)),
            format!("FROM t {}", "|> WHERE x ".repeat(MOST_LINKS)),
        ] {
            assert!(check(&hidden).is_err(), "{}", &hidden[..20]);
        }
        let wide = format!("SELECT * FROM t WHERE x IN ({}-1)", "-1, ".repeat(200_000));
        assert!(check(&wide).is_ok());
        let deep = format!("SELECT 1{}", " + 1".repeat(MOST_LINKS));
        let error = check(&deep).unwrap_err().to_string();
        assert!(error.contains("3010"), "{error}");
    }
}
