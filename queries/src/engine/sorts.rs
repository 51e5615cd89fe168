//! Sorts that say all of their order.
//!
//! A planner leaves out of a sort what is the same in every row: of `process_id, ts` the
//! `process_id`, where a filter below says `process_id = 7`. Once a plan is cut, the filter may be
//! in another stage than the sort, whose worker then sees a window over processes and a sort by time
//! alone, and refuses the plan. [`WholeSorts`] gives every sort below a window the whole order that
//! the window wants; the constant columns cost a comparison each.

use std::sync::Arc;

use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::Result;
use datafusion::physical_expr::{LexOrdering, PhysicalSortExpr};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::windows::{BoundedWindowAggExec, WindowAggExec};
use datafusion::physical_plan::{ChildrenPropertiesMode, ExecutionPlan, ReplaceChildrenOptions};

/// The rule; after all others.
#[derive(Debug, Default)]
pub(super) struct WholeSorts;

impl PhysicalOptimizerRule for WholeSorts {
    fn name(&self) -> &str {
        "whole_sorts"
    }

    fn schema_check(&self) -> bool {
        true
    }

    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _options: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|node| {
            if !node.is::<BoundedWindowAggExec>() && !node.is::<WindowAggExec>() {
                return Ok(Transformed::no(node));
            }
            let Some(order) = wanted(&node) else {
                return Ok(Transformed::no(node));
            };
            let input = Arc::clone(node.children()[0]);
            let unsorted = match input.downcast_ref::<SortExec>() {
                Some(sort) if sort.fetch().is_none() => Arc::clone(sort.input()),
                _ => input,
            };
            let sort = SortExec::new(order, unsorted).with_preserve_partitioning(true);
            let how = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
            Ok(Transformed::yes(
                node.replace_children(vec![Arc::new(sort)], how)?,
            ))
        })
        .data()
    }
}

/// The order that a window wants of its input, all of it.
fn wanted(window: &Arc<dyn ExecutionPlan>) -> Option<LexOrdering> {
    let required = window.required_input_ordering();
    let required = required.into_iter().next()??.into_single();
    LexOrdering::new(required.into_iter().map(PhysicalSortExpr::from))
}
