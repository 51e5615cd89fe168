//! The physical operator: slots of one process after the other in, verdicts or evaluations out.
//!
//! It asks for its input by process (`KeyPartitioned`) and in order of process, so that the engine
//! puts a sort that spills under it, and a process is whole when the next one begins.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::expressions::col;
use datafusion::physical_expr::{
    Distribution, EquivalenceProperties, LexRequirement, OrderingRequirements, PhysicalExpr,
    PhysicalSortRequirement,
};
use datafusion::physical_plan::execution_plan::{
    Boundedness, ChildrenPropertiesMode, EmissionType, ReplaceChildrenOptions,
};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties,
    InputDistributionRequirements, PlanProperties,
};
use futures::StreamExt;
use vramscope_leaks::{Settings, analyse};

use super::Output;
use super::decode::Collecting;
use super::encode;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct LeakExec {
    input: Arc<dyn ExecutionPlan>,
    settings: Settings,
    output: Output,
    projection: Option<Vec<usize>>,
    by_process: Arc<dyn PhysicalExpr>,
    properties: Arc<PlanProperties>,
}

impl LeakExec {
    pub(super) fn new(
        input: Arc<dyn ExecutionPlan>,
        settings: Settings,
        output: Output,
        projection: Option<Vec<usize>>,
    ) -> Result<Self> {
        let whole = encode::schema(output);
        let schema = match &projection {
            Some(columns) => Arc::new(whole.project(columns)?),
            None => whole,
        };
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema),
            datafusion::physical_expr::Partitioning::UnknownPartitioning(
                input.output_partitioning().partition_count(),
            ),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        let by_process = col("process_id", &input.schema())?;
        Ok(LeakExec {
            input,
            settings,
            output,
            projection,
            by_process,
            properties: Arc::new(properties),
        })
    }

    /// The operator without its input as a text, for another process: what it gives, its settings,
    /// the columns that are wanted.
    pub fn to_text(&self) -> String {
        let output = match self.output {
            Output::Verdicts => "verdicts",
            Output::Evaluations => "evaluations",
        };
        // The settings that a text can set; the others are constants.
        let settings = format!(
            "block_minutes:{},warmup_minutes:{},min_requests:{},bytes_per_request:{}",
            self.settings.block_minutes,
            self.settings.warmup_minutes,
            self.settings.min_requests,
            self.settings.bytes_per_request
        );
        let columns = self.projection.as_ref().map_or("*".to_string(), |columns| {
            let columns: Vec<String> = columns.iter().map(usize::to_string).collect();
            columns.join(",")
        });
        format!("{output} {settings} {columns}")
    }

    /// The operator of such a text.
    pub fn from_text(text: &str, input: Arc<dyn ExecutionPlan>) -> Result<Self> {
        let wrong = || DataFusionError::Internal(format!("not a leak operator: {text:?}"));
        let mut parts = text.splitn(3, ' ');
        let output = match parts.next() {
            Some("verdicts") => Output::Verdicts,
            Some("evaluations") => Output::Evaluations,
            _ => return Err(wrong()),
        };
        let settings = Settings::parse(parts.next().ok_or_else(wrong)?).map_err(|_| wrong())?;
        let projection = match parts.next().ok_or_else(wrong)? {
            "*" => None,
            "" => Some(Vec::new()),
            columns => {
                let columns = columns
                    .split(',')
                    .map(|column| column.parse().map_err(|_| wrong()));
                Some(columns.collect::<Result<Vec<usize>>>()?)
            }
        };
        LeakExec::new(input, settings, output, projection)
    }
}

impl DisplayAs for LeakExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(
            f,
            "LeakExec: {:?}, block_minutes={}",
            self.output, self.settings.block_minutes
        )
    }
}

impl ExecutionPlan for LeakExec {
    fn name(&self) -> &str {
        "LeakExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn required_input_distribution(&self) -> Vec<Distribution> {
        self.input_distribution_requirements().into_per_child()
    }

    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        InputDistributionRequirements::new(vec![Distribution::KeyPartitioned(vec![Arc::clone(
            &self.by_process,
        )])])
    }

    fn required_input_ordering(&self) -> Vec<Option<OrderingRequirements>> {
        let by_process = PhysicalSortRequirement::new(Arc::clone(&self.by_process), None);
        vec![LexRequirement::new([by_process]).map(OrderingRequirements::new)]
    }

    fn apply_expressions(
        &self,
        visit: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        visit(&self.by_process)
    }

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
        _options: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let input = children.swap_remove(0);
        let leaks = LeakExec::new(input, self.settings, self.output, self.projection.clone())?;
        Ok(Arc::new(leaks))
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
        let input = self.input.execute(partition, Arc::clone(&context))?;
        let memory = MemoryConsumer::new("leak detectors").register(context.memory_pool());
        let work = Work {
            input: Some(input),
            process: None,
            memory,
            settings: self.settings,
            output: self.output,
            projection: self.projection.clone(),
        };
        let batches = futures::stream::try_unfold(work, |mut work| async move {
            let batch = work.next().await?;
            Ok(batch.map(|batch| (batch, work)))
        });
        let schema: SchemaRef = self.schema();
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
    }
}

/// What one partition does.
struct Work {
    /// `None` once it has ended.
    input: Option<SendableRecordBatchStream>,
    process: Option<Collecting>,
    memory: MemoryReservation,
    settings: Settings,
    output: Output,
    projection: Option<Vec<usize>>,
}

impl Work {
    /// The next rows: those of the processes that were completed by one batch of input.
    async fn next(&mut self) -> Result<Option<RecordBatch>> {
        while let Some(input) = &mut self.input {
            let mut done = Vec::new();
            match input.next().await {
                None => {
                    self.input = None;
                    done.extend(self.process.take());
                }
                Some(batch) => self.take(&batch?, &mut done)?,
            }
            if !done.is_empty() {
                return self.judge(done).map(Some);
            }
        }
        Ok(None)
    }

    fn take(&mut self, batch: &RecordBatch, done: &mut Vec<Collecting>) -> Result<()> {
        let columns = super::decode::Columns::of(batch)?;
        for row in 0..batch.num_rows() {
            let id = columns.process_id(row);
            let collecting = match &mut self.process {
                Some(process) if process.id == id => process,
                process => {
                    done.extend(process.replace(Collecting::new(id, self.settings)));
                    process.get_or_insert_with(|| Collecting::new(id, self.settings))
                }
            };
            collecting.add(&columns, row);
        }
        let bytes = self
            .process
            .iter()
            .chain(done.iter())
            .map(Collecting::bytes);
        self.memory.try_resize(bytes.sum())
    }

    fn judge(&mut self, done: Vec<Collecting>) -> Result<RecordBatch> {
        let mut rows = encode::Rows::new(self.output);
        for collected in done {
            let process = collected.finish();
            let report = analyse(&self.settings, &process.input);
            rows.add(&self.settings, &process, &report);
        }
        rows.finish(self.projection.as_deref())
    }
}
