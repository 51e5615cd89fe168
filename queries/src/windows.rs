//! Windows over whole partitions, with the rows that they keep in the books of the query's memory.
//!
//! An operator for `sum(x) OVER (PARTITION BY host)` keeps all rows of its input until the partition
//! ends, and then copies them into one batch; the engine books neither. [`book_windows`] puts an operator
//! below it that books every batch twice, until the last one has gone through.

use std::fmt;
use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryConsumer;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::windows::WindowAggExec;
use datafusion::physical_plan::{
    ChildrenPropertiesMode, DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties,
    ReplaceChildrenOptions,
};
use futures::StreamExt;

use crate::rules::Changed;
use crate::sizes;

/// The rule.
pub(crate) fn book_windows(node: Arc<dyn ExecutionPlan>) -> Changed {
    if !node.is::<WindowAggExec>() {
        return Ok(Transformed::no(node));
    }
    let input = Arc::clone(node.children()[0]);
    let booked: Arc<dyn ExecutionPlan> = Arc::new(BookedExec::new(input));
    let how = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Keep);
    Ok(Transformed::yes(node.replace_children(vec![booked], how)?))
}

/// Passes rows on, and books them as held by who takes them.
#[derive(Debug)]
pub(crate) struct BookedExec {
    input: Arc<dyn ExecutionPlan>,
}

impl BookedExec {
    pub fn new(input: Arc<dyn ExecutionPlan>) -> Self {
        BookedExec { input }
    }
}

impl DisplayAs for BookedExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "BookedExec")
    }
}

impl ExecutionPlan for BookedExec {
    fn name(&self) -> &str {
        "BookedExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.input.properties()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(Arc::new(BookedExec::new(children.swap_remove(0))))
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        self.replace_children(
            children,
            ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute),
        )
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let memory =
            MemoryConsumer::new(format!("Window[{partition}]")).register(context.memory_pool());
        let rows = self.input.execute(partition, context)?;
        let schema = rows.schema();
        let booked = rows.map(move |batch| {
            let batch = batch?;
            let bytes: u64 = batch.columns().iter().map(sizes::bytes).sum();
            memory.try_grow(usize::try_from(bytes * 2).unwrap_or(usize::MAX))?;
            Ok(batch)
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, booked)))
    }
}
