//! Sorts that say all of their order.
//!
//! A planner leaves out of a sort what is the same in every row: of `process_id, ts` the
//! `process_id`, where a filter below says `process_id = 7`. Once a plan is cut, the filter may be
//! in another stage than the sort, whose worker then sees a window over processes and a sort by time
//! alone, and refuses the plan. [`whole_sorts`] gives every sort below a window the whole order that
//! the window wants; the constant columns cost a comparison each.

use std::sync::Arc;

use datafusion::common::tree_node::Transformed;
use datafusion::physical_expr::{LexOrdering, PhysicalSortExpr};
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::windows::{BoundedWindowAggExec, WindowAggExec};
use datafusion::physical_plan::{ChildrenPropertiesMode, ExecutionPlan, ReplaceChildrenOptions};

use crate::rules::Changed;

/// The rule; after all others.
pub(super) fn whole_sorts(node: Arc<dyn ExecutionPlan>) -> Changed {
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
}

/// The order that a window wants of its input, all of it.
fn wanted(window: &Arc<dyn ExecutionPlan>) -> Option<LexOrdering> {
    let required = window.required_input_ordering();
    let required = required.into_iter().next()??.into_single();
    LexOrdering::new(required.into_iter().map(PhysicalSortExpr::from))
}
