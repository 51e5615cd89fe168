//! From the SQL of PostgreSQL's clients to plans.
//!
//! Three kinds of questions:
//! - of the lake: the engine's own SQL, as at every other door; what only PostgreSQL's dialect
//!   reads is read with that;
//! - of the catalog: planned over the [`Catalog`] beside the lake's tables, rewritten by the rules of
//!   `datafusion-pg-catalog` to what the engine can do;
//! - of both: as those of the catalog, without the one rule that may leave something out.
//!
//! Parameters become literals in the parsed statement ([`values`](super::values)).

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use arrow::datatypes::Field;
use async_trait::async_trait;
use datafusion::error::DataFusionError;
use datafusion::logical_expr::LogicalPlan;
use datafusion::prelude::SessionContext;
use datafusion::sql::parser::{DFParser, Statement};
use datafusion::sql::resolve::resolve_table_references;
use datafusion::sql::sqlparser::ast::{
    self, Expr, Value, visit_expressions, visit_expressions_mut,
};
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
use pgwire::api::Type;
use tokio::sync::OnceCell;
use vramscope_queries::{Error, session};

use super::catalog::{Asker, Catalog, Known, is_own};
use super::failure::Failure;
use super::rows::pg_type;
use super::values::Bound;
use crate::query::Planner;

/// Most parameters of a statement, as in PostgreSQL.
const MAX_PARAMETERS: usize = 65_535;

/// The catalog, made when it is first asked for.
#[derive(Debug, Default)]
pub struct Catalogs(OnceCell<Catalog>);

impl Catalogs {
    /// Plans every view the first time. That goes on if whoever asked gives up, or nobody with a
    /// short time limit would ever see it done.
    async fn get(self: &Arc<Self>, session: &SessionContext) -> Result<&Catalog, Error> {
        if self.0.get().is_none() {
            let (cell, session) = (Arc::clone(self), session.clone());
            let made = tokio::spawn(async move {
                let made = cell.0.get_or_try_init(|| Catalog::of(&session)).await;
                made.map(|_| ())
            });
            made.await
                .map_err(|died| DataFusionError::External(Box::new(died)))??;
        }
        let none = || DataFusionError::Internal("the catalog is not made".to_string());
        Ok(self.0.get().ok_or_else(none)?)
    }
}

/// What is known of a statement's parameters.
#[derive(Debug, Clone)]
pub enum Parameters {
    /// Types, where the client gives them: the statement is only described.
    Given(Vec<Option<Type>>),
    /// Values.
    Bound(Vec<Bound>),
}

/// Plans one question of one connection.
#[derive(Debug)]
pub struct PgPlanner {
    catalogs: Arc<Catalogs>,
    asker: Asker,
    parameters: Parameters,
    types: Mutex<Vec<Type>>,
}

impl PgPlanner {
    /// For a question of somebody.
    pub fn new(catalogs: Arc<Catalogs>, asker: Asker, parameters: Parameters) -> PgPlanner {
        PgPlanner {
            catalogs,
            asker,
            parameters,
            types: Mutex::default(),
        }
    }

    /// Types of the parameters of the statement that was planned last.
    pub fn types(&self) -> Vec<Type> {
        let types = self.types.lock().unwrap_or_else(PoisonError::into_inner);
        types.clone()
    }

    fn keep(&self, types: Vec<Type>) {
        *self.types.lock().unwrap_or_else(PoisonError::into_inner) = types;
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error::Query(DataFusionError::External(Box::new(failure)))
    }
}

#[async_trait]
impl Planner for PgPlanner {
    async fn plan(&self, lake: &SessionContext, sql: &str) -> Result<LogicalPlan, Error> {
        let beside;
        let (session, known, statement) = if mentions_catalog(sql) {
            let catalog = self.catalogs.get(lake).await?;
            let known = catalog.known();
            beside = catalog.beside(lake, &self.asker)?;
            (&beside, Some(known), parse_for_catalog(sql, known)?)
        } else {
            (lake, None, parse_for_lake(sql)?)
        };
        let count = count_parameters(&statement)?;
        match &self.parameters {
            Parameters::Bound(bound) if bound.len() == count => {
                plan_with(session, known, statement, bound).await
            }
            Parameters::Bound(bound) => Err(Failure::error(
                "08P01",
                format!(
                    "bind message supplies {} parameters, but the statement requires {count}",
                    bound.len()
                ),
            )
            .into()),
            Parameters::Given(given) => {
                let mut types = given.clone();
                types.resize(count.max(given.len()), None);
                let types = infer(session, known, &statement, types).await?;
                let nulls: Vec<Bound> = types.iter().cloned().map(Bound::null).collect();
                self.keep(types);
                plan_with(session, known, statement, &nulls).await
            }
        }
    }
}

async fn plan_with(
    session: &SessionContext,
    known: Option<&Known>,
    mut statement: Statement,
    bound: &[Bound],
) -> Result<LogicalPlan, Error> {
    put_literals(&mut statement, |index| {
        bound.get(index).map(Bound::literal).transpose()
    })?;
    if let (Some(known), Some(inner)) = (known, inner(&mut statement)) {
        resolve_names(inner, known)?;
    }
    session::plan_statement(session, statement).await
}

/// Types of all parameters: those that are given, those that follow from where a parameter stands,
/// and text.
async fn infer(
    session: &SessionContext,
    known: Option<&Known>,
    statement: &Statement,
    given: Vec<Option<Type>>,
) -> Result<Vec<Type>, Error> {
    let mut found = HashMap::new();
    if given.iter().any(Option::is_none) {
        let mut open = statement.clone();
        put_literals(&mut open, |index| match given.get(index) {
            Some(Some(kind)) => Bound::null(kind.clone()).literal().map(Some),
            _ => Ok(None),
        })?;
        if let (Some(known), Some(inner)) = (known, inner(&mut open)) {
            resolve_names(inner, known)?;
        }
        // Whatever is wrong with it is said when it is planned with its types.
        if let Ok(plan) = session::plan_statement(session, open).await {
            found = plan.get_parameter_types().unwrap_or_default();
        }
    }
    let types = given.into_iter().enumerate().map(|(index, given)| {
        given.unwrap_or_else(|| {
            let kind = found.get(&format!("${}", index + 1)).cloned().flatten();
            match kind {
                Some(kind) if !kind.is_null() => pg_type(&Arc::new(Field::new("", kind, true))),
                _ => Type::TEXT,
            }
        })
    });
    Ok(types.collect())
}

/// The statement below EXPLAIN, if it is one of the parser's.
fn inner(statement: &mut Statement) -> Option<&mut ast::Statement> {
    match statement {
        Statement::Statement(statement) => Some(statement),
        Statement::Explain(explain) => inner(&mut explain.statement),
        _ => None,
    }
}

fn number_of(expression: &Expr) -> Option<&str> {
    match expression {
        Expr::Value(value) => match &value.value {
            Value::Placeholder(name) => Some(name),
            _ => None,
        },
        _ => None,
    }
}

/// How many parameters a statement has: the highest number.
fn count_parameters(statement: &Statement) -> Result<usize, Error> {
    let mut statement = statement.clone();
    let Some(statement) = inner(&mut statement) else {
        return Ok(0);
    };
    let mut count = 0;
    let mut wrong = None;
    let _ = visit_expressions(statement, |expression| {
        if let Some(name) = number_of(expression) {
            match name.strip_prefix('$').and_then(|text| text.parse().ok()) {
                Some(number) if (1..=MAX_PARAMETERS).contains(&number) => {
                    count = count.max(number);
                }
                _ => wrong = Some(name.to_string()),
            }
        }
        ControlFlow::<()>::Continue(())
    });
    match wrong {
        None => Ok(count),
        Some(name) => Err(Failure::error("42P02", format!("there is no parameter {name}")).into()),
    }
}

/// Puts literals in the places of parameters.
fn put_literals(
    statement: &mut Statement,
    mut literal: impl FnMut(usize) -> Result<Option<Expr>, Failure>,
) -> Result<(), Error> {
    let Some(statement) = inner(statement) else {
        return Ok(());
    };
    let done = visit_expressions_mut(statement, |expression| {
        let number = number_of(expression)
            .and_then(|name| name.strip_prefix('$'))
            .and_then(|number| number.parse::<usize>().ok());
        if let Some(number) = number {
            match literal(number - 1) {
                Ok(Some(value)) => *expression = value,
                Ok(None) => {}
                Err(failure) => return ControlFlow::Break(failure),
            }
        }
        ControlFlow::Continue(())
    });
    match done {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(failure) => Err(failure.into()),
    }
}

/// `'name'::regclass` and its like become OIDs; what is not there is an error, as in PostgreSQL.
fn resolve_names(statement: &mut ast::Statement, known: &Known) -> Result<(), Error> {
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

fn mentions_catalog(sql: &str) -> bool {
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

fn parse_for_lake(sql: &str) -> Result<Statement, Error> {
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

fn parse_for_catalog(sql: &str, known: &Known) -> Result<Statement, Error> {
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
    fn parameters_are_counted_and_replaced() {
        let mut statement = parse_for_lake("SELECT $2, (SELECT $1 WHERE a = $2)").unwrap();
        assert_eq!(count_parameters(&statement).unwrap(), 2);
        put_literals(&mut statement, |index| {
            Bound {
                kind: Type::UNKNOWN,
                binary: false,
                value: Some(format!("'{index}").into()),
            }
            .literal()
            .map(Some)
        })
        .unwrap();
        assert_eq!(count_parameters(&statement).unwrap(), 0);
        let explained = parse_for_lake("EXPLAIN SELECT $1").unwrap();
        assert_eq!(count_parameters(&explained).unwrap(), 1);
        let wrong = parse_for_lake("SELECT $0").unwrap();
        assert!(count_parameters(&wrong).is_err());
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
    fn words_become_the_same_sql_again() {
        let sql = r#"SELECT 'a''b', E'c\'d\ne\\f', "G h" FROM x -- and a remark"#;
        let words = words_of(sql).unwrap();
        let again = words_of(&text_of(&words).unwrap()).unwrap();
        assert_eq!(again, words);
    }
}
