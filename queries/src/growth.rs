//! How large a plan becomes when it is written out.
//!
//! A step that uses the one below it twice doubles it: of `WITH b AS (SELECT x + x AS x FROM a), c AS
//! (SELECT x + x AS x FROM b), …` the last column is a sum of 2^n parts as soon as the engine moves a
//! filter below the steps, and `… FROM a UNION ALL … FROM a` is a plan of 2^n steps. A few lines
//! would take more memory than there is, which no pool counts. So both sizes are calculated before
//! anything is written out: steps on the statement (`check_statement`), since the planner copies what
//! it has of a plan at every step, and both on the plan as it was asked for
//! ([`check`]), where what is used twice is still one and the same.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;

use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::common::{Column, DFSchemaRef};
use datafusion::error::Result as DataFusionResult;
use datafusion::execution::SessionState;
use datafusion::logical_expr::{Expr, LogicalPlan};
use datafusion::sql::parser::Statement;
use datafusion::sql::planner::IdentNormalizer;
use datafusion::sql::sqlparser::ast::{Ident, ObjectName, Query, Visit, Visitor};

use crate::Error;

/// Steps that a plan may have, written out.
pub const MOST_STEPS: u64 = 10_000;

/// Parts (columns, constants, operators, calls) that an expression may have, written out in columns
/// of tables.
pub const MOST_PARTS: u64 = 100_000;

/// Refuses a statement whose named steps and views, written out wherever they are used, are more
/// queries than a plan may have steps.
pub(crate) async fn check_statement(
    state: &SessionState,
    statement: &Statement,
) -> Result<(), Error> {
    if let Statement::Explain(explain) = statement {
        return Box::pin(check_statement(state, &explain.statement)).await;
    }
    let Statement::Statement(sql) = statement else {
        return Ok(());
    };
    let views = views_of(state, statement).await?;
    if queries_of(sql.as_ref(), &views) > MOST_STEPS {
        return Err(Error::TooLarge {
            what: "steps",
            limit: MOST_STEPS,
        });
    }
    Ok(())
}

/// Steps of the views that a statement names.
async fn views_of(
    state: &SessionState,
    statement: &Statement,
) -> DataFusionResult<HashMap<String, u64>> {
    let mut views = HashMap::new();
    // What has no names of tables the planner answers or refuses by itself.
    let names = state.resolve_table_references(statement);
    for name in names.unwrap_or_default() {
        let Ok(schema) = state.schema_for_ref(name.clone()) else {
            continue;
        };
        if let Some(table) = schema.table(name.table()).await?
            && let Some(plan) = table.get_logical_plan()
        {
            let steps = Sizes::default().of(&plan)?.steps;
            views.insert(name.to_string(), steps);
        }
    }
    Ok(views)
}

/// Queries and tables in a part of a statement, with each named step and view counted wherever it is
/// used.
fn queries_of(part: &impl Visit, views: &HashMap<String, u64>) -> u64 {
    let mut queries = Queries {
        open: vec![Open::default()],
        named: HashMap::new(),
        views,
    };
    // Nothing in it breaks off.
    let _ = part.visit(&mut queries);
    queries.open.first().map_or(0, |open| open.size)
}

/// A query that is being walked through: its size so far, and those of its named steps.
#[derive(Default)]
struct Open {
    size: u64,
    steps: HashMap<String, u64>,
}

struct Queries<'a> {
    open: Vec<Open>,
    /// Names of queries that are named steps, by where they lie.
    named: HashMap<*const Query, String>,
    views: &'a HashMap<String, u64>,
}

impl Visitor for Queries<'_> {
    type Break = ();

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
        for step in query.with.iter().flat_map(|with| &with.cte_tables) {
            let place: *const Query = step.query.as_ref();
            self.named.insert(place, spelled([&step.alias.name]));
        }
        self.open.push(Open {
            size: 1,
            ..Open::default()
        });
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
        let size = self.open.pop().map_or(0, |open| open.size);
        let place: *const Query = query;
        let name = self.named.remove(&place);
        if let Some(outer) = self.open.last_mut() {
            match name {
                Some(name) => {
                    outer.steps.insert(name, size);
                }
                None => outer.size = outer.size.saturating_add(size),
            }
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_relation(&mut self, relation: &ObjectName) -> ControlFlow<()> {
        let name = spelled(relation.0.iter().filter_map(|part| part.as_ident()));
        let mut open = self.open.iter().rev();
        let step = open.find_map(|open| open.steps.get(&name).copied());
        let size = step.or_else(|| self.views.get(&name).copied());
        if let Some(open) = self.open.last_mut() {
            open.size = open.size.saturating_add(size.unwrap_or(1));
        }
        ControlFlow::Continue(())
    }
}

/// A name as the planner compares it: `A` is `a`, and `"A"` is not; a step called `"s.t"` answers to
/// `s.t`.
fn spelled<'a>(parts: impl IntoIterator<Item = &'a Ident>) -> String {
    let normalizer = IdentNormalizer::default();
    let parts = parts.into_iter();
    let parts: Vec<_> = parts
        .map(|part| normalizer.normalize(part.clone()))
        .collect();
    parts.join(".")
}

/// Refuses a plan that becomes larger than that.
pub fn check(plan: &LogicalPlan) -> Result<(), Error> {
    let mut sizes = Sizes::default();
    let steps = sizes.of(plan)?.steps;
    if steps > MOST_STEPS {
        return Err(Error::TooLarge {
            what: "steps",
            limit: MOST_STEPS,
        });
    }
    if sizes.largest > MOST_PARTS {
        return Err(Error::TooLarge {
            what: "parts in one expression",
            limit: MOST_PARTS,
        });
    }
    Ok(())
}

/// Of a plan: its steps, and the parts of each of its columns.
#[derive(Debug)]
struct Size {
    steps: u64,
    columns: Vec<u64>,
}

/// What an expression takes columns from.
type Input = (DFSchemaRef, Rc<Size>);

/// Sizes of the plans that were looked at, by where they lie: a plan that is used twice is looked at
/// once.
#[derive(Debug, Default)]
struct Sizes {
    known: HashMap<*const LogicalPlan, Rc<Size>>,
    /// What a subquery, or the right side of a LATERAL, may take columns from: it is written out there.
    outer: Vec<Input>,
    /// Parts of the largest expression.
    largest: u64,
}

impl Sizes {
    fn of(&mut self, plan: &LogicalPlan) -> DataFusionResult<Rc<Size>> {
        let place: *const LogicalPlan = plan;
        if let Some(known) = self.known.get(&place) {
            return Ok(Rc::clone(known));
        }
        let depth = self.outer.len();
        let mut inputs: Vec<Input> = Vec::new();
        for input in plan.inputs() {
            let size = self.of(input)?;
            inputs.push((Arc::clone(input.schema()), size));
            self.outer.extend(inputs.last().cloned());
        }
        // Below, they are what subqueries of this plan's expressions look into.
        let mut steps: u64 = 1;
        for (_, input) in &inputs {
            steps = steps.saturating_add(input.steps);
        }
        let mut parts = Vec::new();
        plan.apply_expressions(|expression| {
            let (own, below) = self.parts(expression, &inputs)?;
            steps = steps.saturating_add(below);
            self.largest = self.largest.max(own);
            parts.push(own);
            Ok(TreeNodeRecursion::Continue)
        })?;
        self.outer.truncate(depth);
        let columns = columns(plan, &inputs, &parts);
        let size = Rc::new(Size { steps, columns });
        self.known.insert(place, Rc::clone(&size));
        Ok(size)
    }

    /// Parts of an expression, and steps of the subqueries in it.
    fn parts(&mut self, expression: &Expr, inputs: &[Input]) -> DataFusionResult<(u64, u64)> {
        let (mut parts, mut steps) = (0_u64, 0_u64);
        expression.apply(|part| {
            let (own, below) = match part {
                Expr::Column(column) => (of_column(column, inputs), 0),
                Expr::OuterReferenceColumn(_, column) => (of_column(column, &self.outer), 0),
                Expr::ScalarSubquery(query) => self.subquery(&query.subquery)?,
                Expr::Exists(exists) => self.subquery(&exists.subquery.subquery)?,
                Expr::InSubquery(within) => self.subquery(&within.subquery.subquery)?,
                Expr::SetComparison(compared) => self.subquery(&compared.subquery.subquery)?,
                _ => (1, 0),
            };
            parts = parts.saturating_add(own);
            steps = steps.saturating_add(below);
            Ok(TreeNodeRecursion::Continue)
        })?;
        Ok((parts, steps))
    }

    fn subquery(&mut self, plan: &LogicalPlan) -> DataFusionResult<(u64, u64)> {
        let size = self.of(plan)?;
        Ok((largest(&size.columns), size.steps))
    }
}

fn largest(columns: &[u64]) -> u64 {
    columns.iter().copied().max().unwrap_or(1)
}

/// Of several that have such a column the largest counts; one that none has belongs to nothing.
fn of_column(column: &Column, inputs: &[Input]) -> u64 {
    let found = inputs.iter().filter_map(|(schema, size)| {
        let index = schema.maybe_index_of_column(column)?;
        size.columns.get(index).copied()
    });
    found.max().unwrap_or(1)
}

/// Parts of a plan's columns, from those of its inputs and of its own expressions.
fn columns(plan: &LogicalPlan, inputs: &[Input], parts: &[u64]) -> Vec<u64> {
    let width = plan.schema().fields().len();
    let of_input = |index: usize| inputs.get(index).map(|(_, size)| size.columns.clone());
    let told = match plan {
        LogicalPlan::Projection(_) => parts.to_vec(),
        // What an aggregate or a window computes is moved nowhere.
        LogicalPlan::Aggregate(aggregate) => {
            let mut columns: Vec<u64> = parts.to_vec();
            columns.truncate(aggregate.group_expr.len());
            columns.resize(width.max(columns.len()), 1);
            columns
        }
        LogicalPlan::Window(_) => {
            let mut columns = of_input(0).unwrap_or_default();
            columns.resize(width.max(columns.len()), 1);
            columns
        }
        LogicalPlan::Union(_) => {
            let mut columns = vec![1; width];
            for (_, input) in inputs {
                for (column, other) in columns.iter_mut().zip(&input.columns) {
                    *column = (*column).max(*other);
                }
            }
            columns
        }
        _ => {
            let all = inputs.iter().flat_map(|(_, size)| size.columns.clone());
            all.collect()
        }
    };
    if told.len() == width {
        return told;
    }
    // Some of them, or in another order: as large as the largest may be.
    let most = inputs.iter().map(|(_, size)| largest(&size.columns)).max();
    vec![most.unwrap_or(1); width]
}

#[cfg(test)]
mod tests {
    use datafusion::datasource::ViewTable;

    use super::*;
    use crate::session;

    async fn sizes(sql: &str) -> (u64, u64) {
        let session = session::session(&session::Options::default()).unwrap();
        let mut statements = session::parse(sql).unwrap();
        let state = session.state();
        let plan = state.statement_to_plan(statements.remove(0)).await.unwrap();
        let mut sizes = Sizes::default();
        let steps = sizes.of(&plan).unwrap().steps;
        (steps, sizes.largest)
    }

    fn steps(times: usize, step: &str) -> String {
        let first = "WITH a0 AS (SELECT value AS x FROM range(0, 3))".to_string();
        let all = (1..=times).fold(first, |sql, n| {
            format!(
                "{sql}, a{n} AS ({})",
                step.replace("BELOW", &format!("a{}", n - 1))
            )
        });
        format!("{all} SELECT x FROM a{times}")
    }

    /// Of the n-th `x + x AS x` is 2^n columns, 2^n - 1 signs, and a name for each of the n steps' sums;
    /// the one below has a name as well.
    #[tokio::test]
    async fn sums_of_sums_double() {
        let named = |n: u64| (1..=n).fold(2_u64, |below, _| 2 * below + 2);
        for n in [1, 5, 10] {
            let (_, largest) = sizes(&steps(n as usize, "SELECT x + x AS x FROM BELOW")).await;
            assert_eq!(largest, named(n), "{n}");
        }
        let (_, saturated) = sizes(&steps(100, "SELECT x + x AS x FROM BELOW")).await;
        assert_eq!(saturated, u64::MAX);
        // Beyond a filter, a sort and a join they are what they were.
        let through =
            "SELECT l.x + r.x AS x FROM BELOW l JOIN BELOW r ON l.x = r.x WHERE l.x > 1 ORDER BY 1";
        let (_, largest) = sizes(&steps(5, through)).await;
        assert!(largest >= named(5), "{largest}");
        // A subquery is written out where it stands.
        for correlated in [
            "SELECT (SELECT b.x + b.x) AS x FROM BELOW b",
            "SELECT l.x FROM BELOW b, LATERAL (SELECT b.x + b.x AS x) l",
        ] {
            let (_, largest) = sizes(&steps(5, correlated)).await;
            assert!(largest >= named(5), "{correlated}: {largest}");
        }
        // A sum over rows is one value.
        let summed = "SELECT sum(x) + sum(x) AS x FROM BELOW";
        let (_, largest) = sizes(&steps(50, summed)).await;
        assert!(largest < 10, "{largest}");
    }

    /// Each step has two of the one below: more than twice as many.
    #[tokio::test]
    async fn plans_of_plans_double() {
        let twice = "SELECT x FROM BELOW UNION ALL SELECT x FROM BELOW";
        let (six, _) = sizes(&steps(6, twice)).await;
        let (seven, _) = sizes(&steps(7, twice)).await;
        assert!(six > 1 << 6 && seven > 2 * six, "{six} {seven}");
        let within = "SELECT x + (SELECT max(x) FROM BELOW) AS x FROM BELOW";
        let (six, _) = sizes(&steps(6, within)).await;
        assert!(six > 1 << 6, "{six}");
    }

    /// The first step is a query of one function; the n-th is a query of two of the one below.
    #[test]
    fn statements_are_counted_as_if_written_out() {
        let count = |sql: &str| match &session::parse(sql).unwrap()[0] {
            Statement::Statement(statement) => queries_of(statement.as_ref(), &HashMap::new()),
            other => panic!("{other}"),
        };
        let twice = "SELECT x FROM BELOW UNION ALL SELECT x FROM BELOW";
        let within = "SELECT x FROM BELOW WHERE x IN (SELECT x FROM BELOW)";
        let mut expected = 0;
        for n in 0..8_usize {
            // The function in FROM is a relation as well.
            expected = if n == 0 { 2 } else { 1 + 2 * expected };
            assert_eq!(count(&steps(n, twice)), 1 + expected, "{n}");
            // The inner query is one more.
            assert!(count(&steps(n, within)) > expected, "{n}");
        }
        assert_eq!(count(&steps(90, twice)), u64::MAX);
        assert_eq!(count("SELECT 1"), 1);
        assert_eq!(count("SELECT * FROM a, b JOIN c ON true"), 4);
        // A step is seen where it is defined and within, and the inner of two names counts.
        let shadowed = "WITH a AS (SELECT * FROM t, t, t) SELECT * FROM a, (WITH a AS (SELECT 1) SELECT * FROM a, a)";
        assert_eq!(count(shadowed), 1 + 4 + (1 + 1 + 1));
        // Quotes make a name another one, and a point in them makes no schema.
        let quoted =
            "WITH \"A\" AS (SELECT * FROM t, t, t), a AS (SELECT 1) SELECT * FROM \"A\", A";
        assert_eq!(count(quoted), 1 + 4 + 1);
        let pointed = "WITH \"s.t\" AS (SELECT * FROM t, t, t) SELECT * FROM s.t, S.T, t";
        assert_eq!(count(pointed), 1 + 4 + 4 + 1);
    }

    /// A view counts with all its steps before the planner copies them.
    #[tokio::test]
    async fn views_are_counted_as_if_written_out() {
        let twice = "SELECT x FROM BELOW UNION ALL SELECT x FROM BELOW";
        let session = session::session(&session::Options::default()).unwrap();
        let plan = session::plan(&session, &steps(6, twice)).await.unwrap();
        let view = Arc::new(ViewTable::new(plan, None));
        session.register_table("v", view).unwrap();
        let over = |times: usize, name: &str| {
            let first = "range(0, 3)";
            steps(times, twice).replace(
                &format!("SELECT value AS x FROM {first}"),
                &format!("SELECT x FROM {name}"),
            )
        };
        // Some 2^6 steps and 2^2 times as many; 2^8 times.
        assert!(session::plan(&session, &over(2, "v")).await.is_ok());
        for name in ["v", "V", "public.v", "datafusion.public.v"] {
            let statement = &session::parse(&over(8, name)).unwrap()[0];
            let error = check_statement(&session.state(), statement)
                .await
                .unwrap_err();
            assert!(matches!(error, Error::TooLarge { .. }), "{name}: {error}");
        }
    }
}
