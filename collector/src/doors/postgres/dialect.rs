//! Reading the SQL of PostgreSQL's clients.
//!
//! Three kinds of questions:
//! - of the lake: the engine's own SQL, as at every other door; what only PostgreSQL's dialect
//!   reads is read with that;
//! - of the catalog: rewritten by the rules of `datafusion-pg-catalog` to what the engine can do;
//! - of both: as those of the catalog, without the one rule that may leave something out.

use std::ops::ControlFlow;
use std::sync::LazyLock;

use datafusion::error::DataFusionError;
use datafusion::sql::parser::{DFParser, Statement};
use datafusion::sql::resolve::resolve_table_references;
use datafusion::sql::sqlparser::ast::{self, Expr, Value, visit_expressions_mut};
use datafusion::sql::sqlparser::dialect::PostgreSqlDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::parser::Parser;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};
use datafusion_pg_catalog::sql::PostgresCompatibilityParser;
use datafusion_pg_catalog::sql::rules::{
    AliasDuplicatedProjectionRewrite, CurrentUserVariableToSessionUserFunctionCall,
    FixArrayLiteral, FixVersionColumnName, PrependUnqualifiedPgTableName,
    ResolveUnqualifiedIdentifier, RewriteArrayAnyAllOperation, RewritePgCatalogOperator,
    SqlStatementRewriteRule, StripCallableQualifier, StripCollate,
};
use vramscope_queries::{Error, complexity};

use super::catalog::{Known, is_own};
use super::failure::Failure;

/// `'name'::regclass` and its like become OIDs; what is not there is an error, as in PostgreSQL.
pub fn resolve_names(statement: &mut ast::Statement, known: &Known) -> Result<(), Error> {
    let done = visit_expressions_mut(statement, |expression| {
        let Expr::Cast {
            expr, data_type, ..
        } = &*expression
        else {
            return ControlFlow::Continue(());
        };
        let kind = data_type.to_string().to_ascii_lowercase();
        let kind = kind.strip_prefix("pg_catalog.").unwrap_or(&kind);
        if !kind.starts_with("reg") {
            return ControlFlow::Continue(());
        }
        let Some(name) = string_in(expr) else {
            return ControlFlow::Continue(());
        };
        if kind == "regproc" {
            // Columns of that type hold names here.
            let name = name.rsplit('.').next().unwrap_or_default().to_string();
            *expression = Expr::Value(Value::SingleQuotedString(name).into());
            return ControlFlow::Continue(());
        }
        match oid_of(kind, name, known) {
            Ok(oid) => {
                *expression = Expr::Value(Value::Number(oid.to_string(), false).into());
                ControlFlow::Continue(())
            }
            Err(failure) => ControlFlow::Break(failure),
        }
    });
    match done {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(failure) => Err(failure.into()),
    }
}

fn oid_of(kind: &str, name: &str, known: &Known) -> Result<i32, Failure> {
    if let Ok(oid) = name.parse() {
        return Ok(oid);
    }
    known.oid(kind, name).ok_or_else(|| {
        let (code, what) = match kind {
            "regclass" => ("42P01", "relation"),
            "regtype" => ("42704", "type"),
            "regnamespace" => ("3F000", "schema"),
            _ => ("42883", "function"),
        };
        Failure::error(code, format!("{what} \"{name}\" does not exist"))
    })
}

/// A literal string, also one that is cast to text.
fn string_in(expression: &Expr) -> Option<&str> {
    match expression {
        Expr::Value(value) => match &value.value {
            Value::SingleQuotedString(text) => Some(text),
            _ => None,
        },
        Expr::Cast { expr, .. } => string_in(expr),
        Expr::Nested(inner) => string_in(inner),
        _ => None,
    }
}

/// Words that only the catalog has an answer to, beside those that begin with `pg_`.
const OF_CATALOG: &[&str] = &[
    "array_lower",
    "array_upper",
    "col_description",
    "current_catalog",
    "current_database",
    "current_role",
    "current_schema",
    "current_schemas",
    "current_setting",
    "current_user",
    "format_type",
    "has_any_column_privilege",
    "has_column_privilege",
    "has_database_privilege",
    "has_function_privilege",
    "has_schema_privilege",
    "has_table_privilege",
    "inet_client_addr",
    "inet_server_addr",
    "information_schema",
    "obj_description",
    "quote_ident",
    "regclass",
    "regnamespace",
    "regproc",
    "regtype",
    "session_user",
    "shobj_description",
    "to_regclass",
    "version",
];

/// Whether a text names something of the catalog.
pub fn mentions_catalog(sql: &str) -> bool {
    let Ok(tokens) = Tokenizer::new(&PostgreSqlDialect {}, sql).tokenize() else {
        return false;
    };
    tokens.iter().any(|token| match token {
        Token::Word(word) => {
            let name = word.value.to_ascii_lowercase();
            name.starts_with("pg_")
                || OF_CATALOG.contains(&name.as_str())
                || matches!(word.keyword, Keyword::ANY | Keyword::USER)
        }
        _ => false,
    })
}

/// The one statement of a text.
fn only<T>(mut statements: Vec<T>) -> Result<T, Error> {
    if statements.len() == 1 {
        Ok(statements.remove(0))
    } else {
        Err(Error::StatementCount(statements.len()))
    }
}

/// Reads a question of the lake.
pub fn parse_for_lake(sql: &str) -> Result<Statement, Error> {
    complexity::check(sql)?;
    let own = DFParser::parse_sql(sql);
    let error = match own {
        Ok(statements) => return only(statements.into_iter().collect()),
        Err(error) => error,
    };
    match DFParser::parse_sql_with_dialect(sql, &PostgreSqlDialect {}) {
        Ok(statements) => only(statements.into_iter().collect()),
        Err(_) => Err(error.into()),
    }
}

static CLIENTS: LazyLock<PostgresCompatibilityParser> =
    LazyLock::new(PostgresCompatibilityParser::new);

static RULES: LazyLock<Vec<Box<dyn SqlStatementRewriteRule>>> = LazyLock::new(|| {
    vec![
        Box::new(AliasDuplicatedProjectionRewrite),
        Box::new(ResolveUnqualifiedIdentifier),
        Box::new(RewriteArrayAnyAllOperation),
        Box::new(PrependUnqualifiedPgTableName),
        Box::new(StripCallableQualifier),
        Box::new(FixArrayLiteral),
        Box::new(CurrentUserVariableToSessionUserFunctionCall),
        Box::new(StripCollate),
        Box::new(RewritePgCatalogOperator),
        Box::new(FixVersionColumnName),
    ]
});

/// Reads a question of the catalog.
pub fn parse_for_catalog(sql: &str, known: &Known) -> Result<Statement, Error> {
    complexity::check(sql)?;
    // The engine's own statements (DESCRIBE, SHOW TABLES) are none of PostgreSQL's.
    let mut parsed = match Parser::parse_sql(&PostgreSqlDialect {}, sql) {
        Ok(statements) => only(statements)?,
        Err(_) => return parse_for_lake(sql),
    };
    if let ast::Statement::Explain { .. } = parsed {
        return parse_for_lake(sql);
    }
    let reads_lake =
        resolve_table_references(&Statement::Statement(Box::new(parsed.clone())), true).is_ok_and(
            |(tables, _)| {
                tables.iter().any(|table| {
                    table.schema().is_none_or(|schema| schema == "public") && is_own(table.table())
                })
            },
        );
    if reads_lake {
        // Names become OIDs before a rule makes them questions.
        resolve_names(&mut parsed, known)?;
        let rules = RULES.iter();
        let statement = rules.fold(parsed, |statement, rule| rule.rewrite(statement));
        return Ok(Statement::Statement(Box::new(statement)));
    }
    let sql = rewritten(sql, known)?;
    let mut statement = only(CLIENTS.parse(&sql).map_err(DataFusionError::from)?)?;
    without_memberships(&mut statement);
    make_single(&mut statement);
    Ok(Statement::Statement(Box::new(statement)))
}

/// `array(SELECT …)`, which the engine has not: with it clients ask for members of roles,
/// privileges and policies, of which there are none.
fn without_memberships(statement: &mut ast::Statement) {
    let empty = Parser::new(&PostgreSqlDialect {})
        .try_with_sql("CAST(make_array() AS VARCHAR[])")
        .and_then(|mut parser| parser.parse_expr());
    let Ok(empty) = empty else {
        return;
    };
    let _ = visit_expressions_mut(statement, |expression| {
        if let Expr::Function(function) = &*expression
            && function.name.to_string().eq_ignore_ascii_case("array")
            && matches!(function.args, ast::FunctionArguments::Subquery(_))
        {
            *expression = empty.clone();
        }
        ControlFlow::<()>::Continue(())
    });
}

/// What makes one row of many.
const AGGREGATES: &[&str] = &[
    "array_agg",
    "bool_and",
    "bool_or",
    "count",
    "max",
    "min",
    "string_agg",
    "sum",
];

/// `(SELECT c.relkind = 'c' FROM pg_class c WHERE c.oid = t.typrelid)`: PostgreSQL finds out as it
/// runs that there is one row at most, the engine wants to know it before. In the catalog it is so,
/// by the keys that clients compare, and the greatest of one value is that value.
fn make_single(statement: &mut ast::Statement) {
    let _ = visit_expressions_mut(statement, |expression| {
        if let Expr::Subquery(query) = expression
            && query.limit_clause.is_none()
            && query.fetch.is_none()
            && let ast::SetExpr::Select(select) = query.body.as_mut()
            && !select.from.is_empty()
            && select.having.is_none()
            && matches!(&select.group_by, ast::GroupByExpr::Expressions(by, _) if by.is_empty())
            && let [
                ast::SelectItem::UnnamedExpr(value)
                | ast::SelectItem::ExprWithAlias { expr: value, .. },
            ] = select.projection.as_mut_slice()
            && !has_aggregate(value)
        {
            let greatest = Parser::new(&PostgreSqlDialect {})
                .try_with_sql(&format!("max({value})"))
                .and_then(|mut parser| parser.parse_expr());
            // What was read once is read again.
            if let Ok(greatest) = greatest {
                *value = greatest;
                query.order_by = None;
            }
        }
        ControlFlow::<()>::Continue(())
    });
}

fn has_aggregate(expression: &Expr) -> bool {
    let found = ast::visit_expressions(expression, |expression| match expression {
        Expr::Function(function)
            if AGGREGATES
                .iter()
                .any(|name| function.name.to_string().eq_ignore_ascii_case(name)) =>
        {
            ControlFlow::Break(())
        }
        _ => ControlFlow::Continue(()),
    });
    found.is_break()
}

/// The subquery with which Grafana asks for the schemas of the search path, as words.
const GRAFANA: &str = r#"SELECT
    CASE WHEN trim(s[i]) = '"$user"' THEN user ELSE trim(s[i]) END
    FROM generate_series(
        array_lower(string_to_array(current_setting('search_path'),','),1),
        array_upper(string_to_array(current_setting('search_path'),','),1)
    ) as i, string_to_array(current_setting('search_path'),',') s"#;

fn words_of(sql: &str) -> Option<Vec<Token>> {
    let tokens = Tokenizer::new(&PostgreSqlDialect {}, sql).tokenize().ok()?;
    let is_word = |token: &Token| !matches!(token, Token::Whitespace(_));
    Some(tokens.into_iter().filter(is_word).collect())
}

/// Words as SQL again. `None` if there is one that this does not know how to quote.
fn text_of(words: &[Token]) -> Option<String> {
    let mut text = String::new();
    for word in words {
        match word {
            Token::SingleQuotedString(string) => {
                text.push_str(&format!("'{}'", string.replace('\'', "''")));
            }
            Token::EscapedStringLiteral(string) => {
                let string = string.replace('\\', "\\\\").replace('\'', "''");
                let string = string.replace('\n', "\\n").replace('\t', "\\t");
                text.push_str(&format!("E'{string}'"));
            }
            Token::Word(word) if word.value.contains('"') => return None,
            Token::DollarQuotedString(_)
            | Token::NationalStringLiteral(_)
            | Token::UnicodeStringLiteral(_)
            | Token::HexStringLiteral(_)
            | Token::SingleQuotedByteStringLiteral(_) => return None,
            other => text.push_str(&other.to_string()),
        }
        text.push(' ');
    }
    Some(text)
}

/// A question of the catalog with what no later step could do any more: names of relations as
/// OIDs, and Grafana's search path. Everything on that path that has tables is `public`; the engine
/// cannot take an array apart beside its indices.
fn rewritten(sql: &str, known: &Known) -> Result<String, Error> {
    static PATTERN: LazyLock<Vec<Token>> = LazyLock::new(|| words_of(GRAFANA).unwrap_or_default());
    let Some(mut words) = words_of(sql) else {
        return Ok(sql.to_string());
    };
    let found = words
        .windows(PATTERN.len().max(1))
        .position(|window| window == PATTERN.as_slice());
    if let Some(at) = found {
        let public = Token::SingleQuotedString("public".to_string());
        words.splice(at..at + PATTERN.len(), [public]);
    }
    let mut at = 0;
    while at + 2 < words.len() {
        if let Some((word, length)) = name_at(&words[at..], known)? {
            words.splice(at..at + length, [word]);
        }
        at += 1;
    }
    Ok(text_of(&words).unwrap_or_else(|| sql.to_string()))
}

/// What `'name'::regclass` or `'name'::pg_catalog.regclass` at the beginning of some words is, and
/// how many words that were.
fn name_at(words: &[Token], known: &Known) -> Result<Option<(Token, usize)>, Error> {
    let [
        Token::SingleQuotedString(name),
        Token::DoubleColon,
        rest @ ..,
    ] = words
    else {
        return Ok(None);
    };
    let (kind, length) = match rest {
        [Token::Word(schema), Token::Period, Token::Word(kind), ..]
            if schema.value.eq_ignore_ascii_case("pg_catalog") =>
        {
            (kind, 5)
        }
        [Token::Word(kind), ..] => (kind, 3),
        _ => return Ok(None),
    };
    let kind = kind.value.to_ascii_lowercase();
    let word = match kind.as_str() {
        "regclass" | "regnamespace" | "regtype" => {
            Token::Number(oid_of(&kind, name, known)?.to_string(), false)
        }
        "regproc" => {
            let name = name.rsplit('.').next().unwrap_or_default();
            Token::SingleQuotedString(name.to_string())
        }
        _ => return Ok(None),
    };
    Ok(Some((word, length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_of_the_catalog_are_told_from_those_of_the_lake() {
        for of_catalog in [
            "SELECT * FROM pg_class",
            "SELECT version()",
            "select current_user",
            "SELECT 'x'::regclass",
            "SELECT * FROM information_schema.tables",
        ] {
            assert!(mentions_catalog(of_catalog), "{of_catalog}");
        }
        for of_lake in [
            "SELECT 1",
            "SELECT ts, bytes FROM alloc_events WHERE host = 'pg_class'",
            "SELECT schema_version FROM agent_windows -- version",
        ] {
            assert!(!mentions_catalog(of_lake), "{of_lake}");
        }
    }

    #[test]
    fn grafanas_search_path_is_known() {
        let sql = format!("select 'it''s' where quote_ident(x) IN (\n{GRAFANA}\n)");
        let rewritten = rewritten(&sql, &Known::default()).unwrap();
        assert!(rewritten.contains("( 'public' )"), "{rewritten}");
        assert!(!rewritten.contains("string_to_array"), "{rewritten}");
        assert!(rewritten.contains("'it''s'"), "{rewritten}");
    }

    #[test]
    fn a_value_from_another_row_is_one_value() {
        let single = |sql: &str| {
            let mut statement = Parser::parse_sql(&PostgreSqlDialect {}, sql)
                .unwrap()
                .remove(0);
            make_single(&mut statement);
            statement.to_string()
        };
        assert_eq!(
            single(
                "SELECT 1 FROM t WHERE (SELECT c.kind = 'c' FROM c WHERE c.oid = t.rel ORDER BY 1)"
            ),
            "SELECT 1 FROM t WHERE (SELECT max(c.kind = 'c') FROM c WHERE c.oid = t.rel)"
        );
        for stays in [
            "SELECT (SELECT count(*) FROM c WHERE c.oid = t.rel) FROM t",
            "SELECT (SELECT c.x FROM c LIMIT 1) FROM t",
            "SELECT (SELECT 1) FROM t",
            "SELECT 1 FROM t WHERE EXISTS (SELECT c.x FROM c WHERE c.oid = t.rel)",
        ] {
            assert_eq!(single(stays), stays);
        }
    }

    #[test]
    fn words_become_the_same_sql_again() {
        let sql = r#"SELECT 'a''b', E'c\'d\ne\\f', "G h" FROM x -- and a remark"#;
        let words = words_of(sql).unwrap();
        let again = words_of(&text_of(&words).unwrap()).unwrap();
        assert_eq!(again, words);
    }
}
