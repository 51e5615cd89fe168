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
    async fn get(&self, session: &SessionContext) -> Result<&Catalog, DataFusionError> {
        self.0.get_or_try_init(|| Catalog::of(session)).await
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
        let (statement, of_catalog) = if mentions_catalog(sql) {
            (parse_for_catalog(sql)?, true)
        } else {
            (parse_for_lake(sql)?, false)
        };
        let count = count_parameters(&statement)?;
        let beside;
        let (session, known) = if of_catalog {
            let catalog = self.catalogs.get(lake).await?;
            beside = catalog.beside(lake, &self.asker)?;
            (&beside, Some(catalog.known()))
        } else {
            (lake, None)
        };
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
    if let Some(known) = known {
        resolve_names(&mut statement, known)?;
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
        if let Some(known) = known {
            resolve_names(&mut open, known)?;
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
fn resolve_names(statement: &mut Statement, known: &Known) -> Result<(), Error> {
    let Some(statement) = inner(statement) else {
        return Ok(());
    };
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
        let oid = match name.parse::<i32>() {
            Ok(oid) => Some(oid),
            Err(_) => known.oid(kind, name),
        };
        let Some(oid) = oid else {
            let (code, what) = match kind {
                "regclass" => ("42P01", "relation"),
                "regtype" => ("42704", "type"),
                "regnamespace" => ("3F000", "schema"),
                _ => ("42883", "function"),
            };
            let failure = Failure::error(code, format!("{what} \"{name}\" does not exist"));
            return ControlFlow::Break(failure);
        };
        *expression = Expr::Value(Value::Number(oid.to_string(), false).into());
        ControlFlow::Continue(())
    });
    match done {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(failure) => Err(failure.into()),
    }
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

fn parse_for_catalog(sql: &str) -> Result<Statement, Error> {
    // The engine's own statements (DESCRIBE, SHOW TABLES) are none of PostgreSQL's.
    let parsed = match Parser::parse_sql(&PostgreSqlDialect {}, sql) {
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
    let statement = if reads_lake {
        RULES
            .iter()
            .fold(parsed, |statement, rule| rule.rewrite(statement))
    } else {
        let sql = search_path_of_grafana(sql);
        only(CLIENTS.parse(&sql).map_err(DataFusionError::from)?)?
    };
    Ok(Statement::Statement(Box::new(statement)))
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

/// The engine cannot take an array apart beside its indices. Everything that can be on the search
/// path and has tables is `public`.
fn search_path_of_grafana(sql: &str) -> String {
    static PATTERN: LazyLock<Vec<Token>> = LazyLock::new(|| words_of(GRAFANA).unwrap_or_default());
    let Some(words) = words_of(sql) else {
        return sql.to_string();
    };
    let found = words
        .windows(PATTERN.len().max(1))
        .position(|window| window == PATTERN.as_slice());
    let Some(at) = found else {
        return sql.to_string();
    };
    let text = |tokens: &[Token]| {
        let texts: Vec<String> = tokens.iter().map(ToString::to_string).collect();
        texts.join(" ")
    };
    format!(
        "{} 'public' {}",
        text(&words[..at]),
        text(&words[at + PATTERN.len()..])
    )
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
        let sql = format!("select 1 where quote_ident(x) IN (\n{GRAFANA}\n)");
        let rewritten = search_path_of_grafana(&sql);
        assert!(rewritten.contains("( 'public' )"), "{rewritten}");
        assert!(!rewritten.contains("string_to_array"), "{rewritten}");
    }
}
