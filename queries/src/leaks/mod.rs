//! The leak detectors as SQL: table functions over `stack_windows` and `traffic`.
//!
//! - `leak_verdicts([settings])`: what the recording says of every stack at its end;
//! - `leak_evaluations([settings])`: every evaluation through the recording at which a stack grew;
//! - `leak_by_stack(settings)` and `leak_rate(settings)`: the views of those names, with settings.
//!
//! `slots.sql` sums the tables up to slots, one group of rows per process; [`exec`] takes them
//! process by process through `vramscope-leaks`; the views join names to what comes out. Settings
//! are a text (`block_minutes:2,warmup_minutes:2`, see [`vramscope_leaks::Settings::parse`]): table
//! functions take no named arguments.
//!
//! Invariants: memory is that of one process's slots per partition, booked in the session's pool;
//! the rest spills as any sort or aggregation does.

mod decode;
mod encode;
mod exec;

use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use datafusion::catalog::{Session, TableFunctionArgs, TableFunctionImpl, TableProvider};
use datafusion::common::ScalarValue;
use datafusion::datasource::{TableType, ViewTable};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionState;
use datafusion::logical_expr::{Expr, LogicalPlan};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_planner::{DefaultPhysicalPlanner, PhysicalPlanner};
use datafusion::prelude::SessionContext;
use futures::FutureExt;
use vramscope_leaks::Settings;

use crate::views::View;

pub(crate) use exec::LeakExec;

/// What a scan gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Output {
    Verdicts,
    Evaluations,
}

const SLOTS: &str = include_str!("slots.sql");

/// Makes the table functions known to a session. The tables and `current_processes` are looked up
/// when a function is called.
pub fn register(session: &SessionContext) {
    let functions: [(&str, Arc<dyn TableFunctionImpl>); 4] = [
        ("leak_verdicts", Arc::new(Detectors(Output::Verdicts))),
        ("leak_evaluations", Arc::new(Detectors(Output::Evaluations))),
        ("leak_by_stack", Arc::new(WithSettings("leak_by_stack"))),
        ("leak_rate", Arc::new(WithSettings("leak_rate"))),
    ];
    for (name, function) in functions {
        session.register_udtf(name, function);
    }
}

#[derive(Debug)]
struct Detectors(Output);

impl TableFunctionImpl for Detectors {
    fn call_with_args(&self, arguments: TableFunctionArgs) -> Result<Arc<dyn TableProvider>> {
        let settings = settings_of(arguments.exprs())?.0;
        let sql = SLOTS.replace("SLOT_NS", &settings.slot_ns().to_string());
        let plan = plan_now(arguments.session(), &sql)?;
        Ok(Arc::new(LeakScan {
            plan,
            settings,
            output: self.0,
            schema: encode::schema(self.0),
        }))
    }
}

/// A view with its detectors' settings put in.
#[derive(Debug)]
struct WithSettings(&'static str);

impl TableFunctionImpl for WithSettings {
    fn call_with_args(&self, arguments: TableFunctionArgs) -> Result<Arc<dyn TableProvider>> {
        let (_, text) = settings_of(arguments.exprs())?;
        // The views of these names are compiled in.
        let view = View::by_name(self.0)
            .ok_or_else(|| DataFusionError::Internal(format!("view {} is not there", self.0)))?;
        let quoted = text.replace('\'', "''");
        let sql = ["leak_verdicts", "leak_evaluations"].iter().fold(
            view.sql.to_string(),
            |sql, function| {
                sql.replace(&format!("{function}()"), &format!("{function}('{quoted}')"))
            },
        );
        let plan = plan_now(arguments.session(), &sql)?;
        Ok(Arc::new(ViewTable::new(plan, Some(sql))))
    }
}

fn settings_of(arguments: &[Expr]) -> Result<(Settings, String)> {
    let text = match arguments {
        [] => String::new(),
        [Expr::Literal(ScalarValue::Utf8(Some(text)) | ScalarValue::Utf8View(Some(text)), _)] => {
            text.clone()
        }
        _ => {
            return Err(DataFusionError::Plan(
                "leak functions take one text of settings, such as 'block_minutes:2,warmup_minutes:2'"
                    .to_string(),
            ));
        }
    };
    let settings = Settings::parse(&text).map_err(|e| DataFusionError::Plan(e.to_string()))?;
    Ok((settings, text))
}

/// Plans SQL inside of planning. Looking up a session's own tables never waits, so the future is
/// ready at once.
fn plan_now(session: &dyn Session, sql: &str) -> Result<LogicalPlan> {
    let state = session
        .as_any()
        .downcast_ref::<SessionState>()
        .ok_or_else(|| {
            DataFusionError::Plan("leak functions need a session's tables".to_string())
        })?;
    let planned = state.create_logical_plan(sql).now_or_never();
    planned.unwrap_or_else(|| {
        Err(DataFusionError::Plan(
            "leak functions cannot wait for a catalog".to_string(),
        ))
    })
}

/// The detectors over a plan of slots.
#[derive(Debug)]
struct LeakScan {
    plan: LogicalPlan,
    settings: Settings,
    output: Output,
    schema: SchemaRef,
}

#[async_trait]
impl TableProvider for LeakScan {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::View
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        _filters: &[Expr],
        _limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        // By the planner of one process: this plan becomes a part of another, and an engine cuts
        // that as a whole.
        let logical = match state.as_any().downcast_ref::<SessionState>() {
            Some(state) => state.optimize(&self.plan)?,
            None => self.plan.clone(),
        };
        let planner = DefaultPhysicalPlanner::default();
        let slots = planner.create_physical_plan(&logical, state).await?;
        let leaks = exec::LeakExec::new(slots, self.settings, self.output, projection.cloned())?;
        Ok(Arc::new(leaks))
    }
}
