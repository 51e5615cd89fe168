//! Selections of the same words upon each other, each of them computed.
//!
//! DataFusion 55.2 drops one of two projections that follow each other if their expressions are
//! equal: `SELECT x + 1 AS x FROM (SELECT x + 1 AS x FROM t)` adds one once. (Its pull request 24686
//! mends that, in no release yet.) [`ProjectionsApart`] runs the engine's rule over a plan in which
//! no two of them are equal, and takes out what it put in.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::logical_expr::expr::Alias;
use datafusion::logical_expr::{Expr, LogicalPlan, Projection};
use datafusion::optimizer::optimizer::{ApplyOrder, Optimizer};
use datafusion::optimizer::{OptimizerConfig, OptimizerRule};

/// What names that are put in begin with.
const MARK: &str = "__apart_";

/// Puts the rule in the place of the engine's.
pub(crate) fn keep_apart(mut builder: SessionStateBuilder) -> SessionStateBuilder {
    let optimizer = builder.optimizer().get_or_insert_with(Optimizer::new);
    for rule in &mut optimizer.rules {
        if rule.name() == "optimize_projections" {
            *rule = Arc::new(ProjectionsApart(Arc::clone(rule)));
        }
    }
    builder
}

#[derive(Debug)]
struct ProjectionsApart(Arc<dyn OptimizerRule + Send + Sync>);

impl OptimizerRule for ProjectionsApart {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn apply_order(&self) -> Option<ApplyOrder> {
        self.0.apply_order()
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        config: &dyn OptimizerConfig,
    ) -> Result<Transformed<LogicalPlan>> {
        if !has_chain(&plan)? {
            return self.0.rewrite(plan, config);
        }
        let mut count = 0;
        let marked = with_projections(plan, |expression| match expression {
            // Two of one column under its own name are the same in truth.
            Expr::Alias(alias) if !is_own_name(&alias) => {
                count += 1;
                let marked = alias.expr.alias(format!("{MARK}{count}"));
                Expr::Alias(Alias {
                    expr: Box::new(marked),
                    ..alias
                })
            }
            other => other,
        })?;
        let Transformed {
            data, transformed, ..
        } = self.0.rewrite(marked, config)?;
        let plan = with_projections(data, |expression| match expression {
            Expr::Alias(alias) => match *alias.expr {
                Expr::Alias(inner) if inner.name.starts_with(MARK) => Expr::Alias(Alias {
                    expr: inner.expr,
                    ..alias
                }),
                expr => Expr::Alias(Alias {
                    expr: Box::new(expr),
                    ..alias
                }),
            },
            other => other,
        })?;
        Ok(match transformed {
            true => Transformed::yes(plan),
            false => Transformed::no(plan),
        })
    }
}

fn is_own_name(alias: &Alias) -> bool {
    matches!(alias.expr.as_ref(), Expr::Column(column) if column.name == alias.name)
}

/// Whether a projection follows another.
fn has_chain(plan: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    plan.apply_with_subqueries(|node| {
        if let LogicalPlan::Projection(upper) = node {
            found |= matches!(upper.input.as_ref(), LogicalPlan::Projection(_));
        }
        Ok(match found {
            true => TreeNodeRecursion::Stop,
            false => TreeNodeRecursion::Continue,
        })
    })?;
    Ok(found)
}

/// A plan with other expressions, of the same names and types, in its projections.
fn with_projections(
    plan: LogicalPlan,
    mut change: impl FnMut(Expr) -> Expr,
) -> Result<LogicalPlan> {
    let changed = plan.transform_down_with_subqueries(|node| match node {
        LogicalPlan::Projection(Projection {
            expr,
            input,
            schema,
            ..
        }) => {
            let expr = expr.into_iter().map(&mut change).collect();
            let changed = Projection::try_new_with_schema(expr, input, schema)?;
            Ok(Transformed::yes(LogicalPlan::Projection(changed)))
        }
        other => Ok(Transformed::no(other)),
    })?;
    Ok(changed.data)
}
