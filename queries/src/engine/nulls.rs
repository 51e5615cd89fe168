//! `IGNORE NULLS` on its way to a worker.
//!
//! The engine sends window functions without it: `last_value(x) IGNORE NULLS` would come back as
//! the last value, NULL or not. Aggregate functions keep it. [`KeepIgnoreNulls`] plans `first_value`
//! and `last_value` as the aggregates of that name, which are the same over the same frame, and
//! refuses what has none: no answer is better than a wrong one.

use datafusion::common::not_impl_err;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::error::Result;
use datafusion::functions_aggregate::first_last::{first_value_udaf, last_value_udaf};
use datafusion::logical_expr::expr::{NullTreatment, WindowFunction};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::{Expr, LogicalPlan, WindowFunctionDefinition};
use datafusion::optimizer::optimizer::ApplyOrder;
use datafusion::optimizer::{OptimizerConfig, OptimizerRule};

/// The rule.
#[derive(Debug, Default)]
pub(super) struct KeepIgnoreNulls;

impl OptimizerRule for KeepIgnoreNulls {
    fn name(&self) -> &str {
        "keep_ignore_nulls"
    }

    fn apply_order(&self) -> Option<ApplyOrder> {
        Some(ApplyOrder::BottomUp)
    }

    fn supports_rewrite(&self) -> bool {
        true
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        _config: &dyn OptimizerConfig,
    ) -> Result<Transformed<LogicalPlan>> {
        if !matches!(plan, LogicalPlan::Window(_)) {
            return Ok(Transformed::no(plan));
        }
        let names = NamePreserver::new(&plan);
        plan.map_expressions(|expression| {
            let name = names.save(&expression);
            let rewritten = expression.transform_up(as_aggregate)?;
            Ok(rewritten.update_data(|data| name.restore(data)))
        })
    }
}

fn as_aggregate(expression: Expr) -> Result<Transformed<Expr>> {
    let Expr::WindowFunction(call) = &expression else {
        return Ok(Transformed::no(expression));
    };
    let WindowFunctionDefinition::WindowUDF(function) = &call.fun else {
        return Ok(Transformed::no(expression));
    };
    if call.params.null_treatment != Some(NullTreatment::IgnoreNulls) {
        return Ok(Transformed::no(expression));
    }
    let aggregate = match function.name() {
        "first_value" => first_value_udaf(),
        "last_value" => last_value_udaf(),
        other => {
            return not_impl_err!(
                "the distributed engine cannot compute {other} with IGNORE NULLS; ask the local engine"
            );
        }
    };
    let call = WindowFunction {
        fun: WindowFunctionDefinition::AggregateUDF(aggregate),
        params: call.params.clone(),
    };
    Ok(Transformed::yes(Expr::from(call)))
}
