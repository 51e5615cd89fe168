//! Rules of the planner that look at one operator at a time.

use std::fmt;
use std::sync::Arc;

use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;

/// An operator, as it was or another.
pub(crate) type Changed = Result<Transformed<Arc<dyn ExecutionPlan>>>;

/// A rule that changes the operators of a plan from its leaves up; their columns stay as they are.
pub(crate) fn rule(
    name: &'static str,
    change: fn(Arc<dyn ExecutionPlan>) -> Changed,
) -> Arc<dyn PhysicalOptimizerRule + Send + Sync> {
    Arc::new(OfOperators { name, change })
}

struct OfOperators {
    name: &'static str,
    change: fn(Arc<dyn ExecutionPlan>) -> Changed,
}

impl PhysicalOptimizerRule for OfOperators {
    fn name(&self) -> &str {
        self.name
    }

    fn schema_check(&self) -> bool {
        true
    }

    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _options: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(self.change).data()
    }
}

impl fmt::Debug for OfOperators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
