//! Values for a statement's parameters.

use std::sync::Arc;

use async_trait::async_trait;
use datafusion::common::ScalarValue;
use datafusion::error::DataFusionError;
use datafusion::logical_expr::LogicalPlan;
use datafusion::prelude::SessionContext;
use vramscope_queries::{Error, session};

use super::Planner;

/// Plans the engine's own SQL with values for `$1`, `$2`, ….
#[derive(Debug)]
pub struct Bound(Vec<ScalarValue>);

impl Bound {
    /// A planner for a question, if there are values.
    pub fn planner(values: Vec<ScalarValue>) -> Option<Arc<dyn Planner>> {
        (!values.is_empty()).then(|| Arc::new(Bound(values)) as Arc<dyn Planner>)
    }
}

#[async_trait]
impl Planner for Bound {
    async fn plan(&self, session: &SessionContext, sql: &str) -> Result<LogicalPlan, Error> {
        let plan = session::plan(session, sql).await?;
        let wanted = super::shape_of(&plan)?.parameters.len();
        if wanted != self.0.len() {
            let text = format!(
                "the statement has {wanted} parameters, {} values were given",
                self.0.len()
            );
            return Err(DataFusionError::Plan(text).into());
        }
        Ok(plan.with_param_values(self.0.clone())?)
    }
}
