//! Planning that can be ended from outside.
//!
//! The engine's planner keeps its thread until it is done, which takes minutes for a statement near
//! the limits of [`complexity`](crate::complexity) and [`growth`](crate::growth). So each of its rules
//! looks first whether anybody still waits for the plan, and gives up if not: those that the engine
//! calls for one node after another do so at each node. What one rule does at one node cannot be
//! ended.
//!
//! Who starts a query says when that is, with [`Cancel::scope`]. Outside of such a scope nothing
//! is looked at.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::Transformed;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::logical_expr::LogicalPlan;
use datafusion::optimizer::optimizer::{ApplyOrder, Optimizer};
use datafusion::optimizer::{Analyzer, AnalyzerRule, OptimizerConfig, OptimizerRule};
use datafusion::physical_optimizer::optimizer::PhysicalOptimizer;
use datafusion::physical_optimizer::{PhysicalOptimizerContext, PhysicalOptimizerRule};
use datafusion::physical_plan::ExecutionPlan;

use crate::Error;

tokio::task_local! {
    static CANCELLED: Arc<AtomicBool>;
}

/// Ends the planning in its scope.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Whatever is planned in its scope fails at the next rule.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Does work whose planning this ends.
    pub async fn scope<T>(self, work: impl Future<Output = T>) -> T {
        CANCELLED.scope(self.0, work).await
    }
}

/// An error, if nobody waits for the plan.
fn look() -> Result<()> {
    match CANCELLED.try_with(|cancelled| cancelled.load(Ordering::Relaxed)) {
        Ok(true) => Err(DataFusionError::from(Error::Cancelled)),
        Ok(false) | Err(_) => Ok(()),
    }
}

/// Makes all rules look.
pub(crate) fn look_in_rules(mut builder: SessionStateBuilder) -> SessionStateBuilder {
    let analyzer = builder.analyzer().get_or_insert_with(Analyzer::new);
    for rule in &mut analyzer.rules {
        *rule = Arc::new(Looking(Arc::clone(rule)));
    }
    let optimizer = builder.optimizer().get_or_insert_with(Optimizer::new);
    for rule in &mut optimizer.rules {
        *rule = Arc::new(Looking(Arc::clone(rule)));
    }
    let physical = builder.physical_optimizers();
    for rule in &mut physical.get_or_insert_with(PhysicalOptimizer::new).rules {
        *rule = Arc::new(Looking(Arc::clone(rule)));
    }
    builder
}

/// A rule that looks first.
#[derive(Debug)]
struct Looking<R: ?Sized>(Arc<R>);

impl AnalyzerRule for Looking<dyn AnalyzerRule + Send + Sync> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn analyze(&self, plan: LogicalPlan, options: &ConfigOptions) -> Result<LogicalPlan> {
        look()?;
        self.0.analyze(plan, options)
    }
}

impl OptimizerRule for Looking<dyn OptimizerRule + Send + Sync> {
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
        look()?;
        self.0.rewrite(plan, config)
    }
}

impl PhysicalOptimizerRule for Looking<dyn PhysicalOptimizerRule + Send + Sync> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn schema_check(&self) -> bool {
        self.0.schema_check()
    }

    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        options: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        look()?;
        self.0.optimize(plan, options)
    }

    fn optimize_with_context(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        context: &dyn PhysicalOptimizerContext,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        look()?;
        self.0.optimize_with_context(plan, context)
    }
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt;

    use super::*;
    use crate::session::{self, Limits, Options};

    /// The plan is made for whoever waits, and for nobody else: nothing is computed after a cancel.
    #[tokio::test]
    async fn nothing_is_planned_for_nobody() {
        let session = session::session(&Options::default()).unwrap();
        let sql = "SELECT value % 3 AS x, count(*) FROM range(0, 9) GROUP BY 1 ORDER BY 1";
        let ask = async || session::query(&session, sql, Limits::default()).await;
        let cancel = Cancel::default();
        let rows = cancel.clone().scope(ask()).await.unwrap();
        let rows: Vec<_> = rows.try_collect().await.unwrap();
        assert_eq!(rows.iter().map(|rows| rows.num_rows()).sum::<usize>(), 3);
        cancel.cancel();
        let error = cancel.clone().scope(ask()).await.err().unwrap();
        assert!(matches!(error.own(), Error::Cancelled), "{error}");
        assert!(ask().await.is_ok(), "others go on");
        // Each kind of rule looks by itself.
        let state = session.state();
        let plan = session::plan(&session, sql).await.unwrap();
        let analyze = async || {
            let (plan, options) = (plan.clone(), state.config_options());
            state.analyzer().execute_and_check(plan, options, |_, _| {})
        };
        let analyzed = analyze().await.unwrap();
        assert!(cancel.clone().scope(analyze()).await.is_err());
        let optimize = async || {
            let plan = analyzed.clone();
            state.optimizer().optimize(plan, &state, |_, _| {})
        };
        assert!(optimize().await.is_ok());
        assert!(cancel.clone().scope(optimize()).await.is_err());
        let optimized = state.optimize(&plan).unwrap();
        let physical = state
            .query_planner()
            .create_physical_plan(&optimized, &state);
        assert!(cancel.scope(physical).await.is_err());
    }
}
