//! From the SQL of PostgreSQL's clients to plans: read by [`dialect`](super::dialect), planned over
//! the lake's tables, and over the [`Catalog`] beside them if it is named.
//!
//! Parameters become literals in the parsed statement ([`values`](super::values)).

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use arrow::datatypes::Field;
use async_trait::async_trait;
use datafusion::error::DataFusionError;
use datafusion::logical_expr::LogicalPlan;
use datafusion::prelude::SessionContext;
use datafusion::sql::parser::Statement;
use datafusion::sql::sqlparser::ast::{
    self, Expr, Value, Visit, Visitor, visit_expressions, visit_expressions_mut,
};
use pgwire::api::Type;
use tokio::sync::OnceCell;
use vramscope_queries::{Error, session};

use super::catalog::{Asker, Catalog, Known};
use super::dialect::{mentions_catalog, parse_for_catalog, parse_for_lake, resolve_names};
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
    failure: Mutex<Option<Failure>>,
}

impl PgPlanner {
    /// For a question of somebody.
    pub fn new(catalogs: Arc<Catalogs>, asker: Asker, parameters: Parameters) -> PgPlanner {
        PgPlanner {
            catalogs,
            asker,
            parameters,
            types: Mutex::default(),
            failure: Mutex::default(),
        }
    }

    /// Types of the parameters of the statement that was planned last.
    pub fn types(&self) -> Vec<Type> {
        let types = self.types.lock().unwrap_or_else(PoisonError::into_inner);
        types.clone()
    }

    /// Why the last statement was not planned, with its own code, if it was refused here.
    pub fn failure(&self) -> Option<Failure> {
        let failure = self.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
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
        let planned = self.try_plan(lake, sql).await;
        match planned.as_ref().err().and_then(Failure::within) {
            None => planned,
            Some(failure) => {
                // For the gate, which counts and logs: what was asked is wrong, not the collector.
                let text = failure.message.clone();
                let kept = &mut *self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                *kept = Some(failure.clone());
                Err(DataFusionError::Plan(text).into())
            }
        }
    }
}

impl PgPlanner {
    async fn try_plan(&self, lake: &SessionContext, sql: &str) -> Result<LogicalPlan, Error> {
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
    let mut given = given;
    for index in limits_of(statement) {
        if let Some(open @ None) = given.get_mut(index) {
            *open = Some(Type::INT8);
        }
    }
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

/// Parameters that are a LIMIT or an OFFSET, from 0: the engine does not say of what type those are.
fn limits_of(statement: &Statement) -> Vec<usize> {
    struct Limits(Vec<usize>);
    impl Visitor for Limits {
        type Break = ();
        fn pre_visit_query(&mut self, query: &ast::Query) -> ControlFlow<()> {
            if let Some(ast::LimitClause::LimitOffset { limit, offset, .. }) = &query.limit_clause {
                let offset = offset.as_ref().map(|offset| &offset.value);
                let numbers = limit.iter().chain(offset).filter_map(index_of);
                self.0.extend(numbers);
            }
            ControlFlow::Continue(())
        }
    }
    let mut statement = statement.clone();
    let mut limits = Limits(Vec::new());
    if let Some(statement) = inner(&mut statement) {
        let _ = Visit::visit(statement, &mut limits);
    }
    limits.0
}

/// The number of a parameter, from 0.
fn index_of(expression: &Expr) -> Option<usize> {
    let number: usize = number_of(expression)?.strip_prefix('$')?.parse().ok()?;
    number.checked_sub(1)
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
        if let Some(index) = index_of(expression) {
            match literal(index) {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
