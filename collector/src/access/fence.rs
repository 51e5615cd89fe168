//! A table of which a part is seen, and the operator that keeps the rest back.
//!
//! The operator has no children as far as the engine is concerned. So no optimiser moves a caller's
//! expression below it, no statistics of hidden rows answer a question, and EXPLAIN (ANALYZE) shows
//! nothing of what lies below.

use std::fmt;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, ListArray, RecordBatch};
use arrow::buffer::OffsetBuffer;
use arrow::compute::{filter, filter_record_batch};
use arrow::datatypes::{DataType, Field, Int64Type, SchemaRef, TimestampMicrosecondType};
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{Column, JoinType, ScalarValue};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::{
    BinaryExpr, Expr, LogicalPlan, LogicalPlanBuilder, Operator, TableProviderFilterPushDown,
    TableType,
};
use datafusion::physical_expr::{EquivalenceProperties, Partitioning, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{
    Boundedness, EmissionType, ReplaceChildrenOptions,
};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
};
use datafusion::prelude::lit;
use futures::StreamExt;
use vramscope_queries::texts;

use super::filter::{Visible, scan};

/// Which rows are seen.
#[derive(Debug, Clone)]
pub(super) enum Rule {
    /// Those of visible processes.
    Processes(Arc<Visible>),
    /// Those of hosts and times where visible processes ran.
    Hosts(Arc<Visible>),
    /// Those where a column is that text.
    Text {
        /// The column.
        column: &'static str,
        /// The text.
        is: Arc<str>,
    },
    /// Those whose column is in the first column of that plan's answer.
    Among(&'static str, Arc<LogicalPlan>),
    /// None.
    Nothing,
}

impl Rule {
    /// Columns that it looks at.
    fn columns(&self) -> &'static [&'static str] {
        match self {
            Rule::Processes(_) => &["process_id"],
            Rule::Hosts(_) => &["host", "ts"],
            Rule::Text { .. } | Rule::Among(..) | Rule::Nothing => &[],
        }
    }

    /// The seen rows of some.
    fn apply(&self, batch: RecordBatch) -> Result<RecordBatch> {
        let seen = match self {
            Rule::Processes(visible) => {
                let ids = column(&batch, "process_id")?.as_primitive::<Int64Type>();
                ids.iter()
                    .map(|id| id.is_some_and(|id| visible.sees_process(id)))
                    .collect::<Vec<bool>>()
            }
            Rule::Hosts(visible) => {
                let hosts = texts::plain_column(column(&batch, "host")?)?;
                let hosts = hosts.as_string::<i32>();
                let times = column(&batch, "ts")?.as_primitive::<TimestampMicrosecondType>();
                hosts
                    .iter()
                    .zip(times.iter())
                    .map(|(host, ts)| {
                        host.zip(ts)
                            .is_some_and(|(host, ts)| visible.sees_host(host, ts))
                    })
                    .collect()
            }
            // The plan below has done it.
            Rule::Text { .. } | Rule::Among(..) => return Ok(batch),
            Rule::Nothing => return Ok(batch.slice(0, 0)),
        };
        let batch = filter_record_batch(&batch, &BooleanArray::from(seen))?;
        match self {
            Rule::Hosts(visible) => without_others(batch, visible),
            _ => Ok(batch),
        }
    }
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef> {
    batch
        .column_by_name(name)
        .ok_or_else(|| DataFusionError::Internal(format!("column {name} was not read")))
}

/// Cuts the list of a card's processes down to the visible ones.
fn without_others(batch: RecordBatch, visible: &Visible) -> Result<RecordBatch> {
    let Some((index, _)) = batch.schema().column_with_name("processes") else {
        return Ok(batch);
    };
    let list = batch.column(index).as_list::<i32>();
    let ids = list
        .values()
        .as_struct()
        .column_by_name("process_id")
        .ok_or_else(|| DataFusionError::Internal("devices.processes has no ids".into()))?
        .as_primitive::<Int64Type>();
    let seen: Vec<bool> = ids
        .iter()
        .map(|id| id.is_some_and(|id| visible.sees_process(id)))
        .collect();
    let lengths = list.offsets().windows(2).map(|ends| {
        let (from, to) = (ends[0] as usize, ends[1] as usize);
        seen[from..to].iter().filter(|seen| **seen).count()
    });
    let offsets = OffsetBuffer::from_lengths(lengths);
    // What no row's list has any more goes as well: only what lies between the offsets counts.
    let mut kept = vec![false; seen.len()];
    for ends in list.offsets().windows(2) {
        let (from, to) = (ends[0] as usize, ends[1] as usize);
        kept[from..to].copy_from_slice(&seen[from..to]);
    }
    let values = filter(list.values(), &BooleanArray::from(kept))?;
    let DataType::List(element) = list.data_type() else {
        return Err(DataFusionError::Internal(
            "devices.processes is no list".into(),
        ));
    };
    let cut = ListArray::try_new(Arc::clone(element), offsets, values, list.nulls().cloned())?;
    let mut columns = batch.columns().to_vec();
    columns[index] = Arc::new(cut);
    Ok(RecordBatch::try_new(batch.schema(), columns)?)
}

/// A table behind its fence.
#[derive(Debug)]
pub(super) struct Fenced {
    inner: Arc<dyn TableProvider>,
    rule: Rule,
}

impl Fenced {
    pub(super) fn new(inner: Arc<dyn TableProvider>, rule: Rule) -> Fenced {
        Fenced { inner, rule }
    }

    /// The plan below the fence.
    fn below(&self, columns: Vec<usize>, filters: &[Expr]) -> Result<LogicalPlan> {
        let mut plan = scan(&self.inner, columns)?;
        for filter in filters {
            // Only safe ones come here; each is looked at again, since much hangs on it.
            if is_safe(filter, &self.inner.schema()) {
                plan = plan.filter(unqualified(filter))?;
            }
        }
        plan = match &self.rule {
            Rule::Text { column, is } => {
                plan.filter(Expr::Column(Column::from_name(*column)).eq(lit(is.as_ref())))?
            }
            Rule::Among(column, among) => {
                let right = LogicalPlanBuilder::from(among.as_ref().clone()).alias("among")?;
                let named = right.schema().field(0).name().clone();
                let left = Column::new(Some("fenced"), *column);
                let right_column = Column::new(Some("among"), named);
                plan.join(
                    right.build()?,
                    JoinType::LeftSemi,
                    (vec![left], vec![right_column]),
                    None,
                )?
            }
            Rule::Processes(_) | Rule::Hosts(_) | Rule::Nothing => plan,
        };
        plan.build()
    }
}

#[async_trait]
impl TableProvider for Fenced {
    fn schema(&self) -> SchemaRef {
        self.inner.schema()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    fn supports_filters_pushdown(
        &self,
        filters: &[&Expr],
    ) -> Result<Vec<TableProviderFilterPushDown>> {
        let schema = self.schema();
        let of = |filter: &&Expr| match is_safe(filter, &schema) {
            true => TableProviderFilterPushDown::Inexact,
            false => TableProviderFilterPushDown::Unsupported,
        };
        Ok(filters.iter().map(of).collect())
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        _limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let schema = self.schema();
        let wanted = match projection {
            Some(columns) => columns.clone(),
            None => (0..schema.fields().len()).collect(),
        };
        // What the rule looks at is read besides, and so is what the semi-join compares.
        let mut read = wanted.clone();
        let mut names = self.rule.columns().to_vec();
        match &self.rule {
            Rule::Text { column, .. } | Rule::Among(column, _) => names.push(column),
            _ => {}
        }
        let filtered = filters.iter().flat_map(|filter| filter.column_refs());
        let names = names.into_iter().map(str::to_string);
        for name in names.chain(filtered.map(|column| column.name().to_string())) {
            let index = schema.index_of(&name)?;
            if !read.contains(&index) {
                read.push(index);
            }
        }
        let plan = self.below(read, filters)?;
        let input = state.create_physical_plan(&plan).await?;
        // By name: plans may put columns in another order.
        let input_schema = input.schema();
        let columns = wanted
            .iter()
            .map(|index| Ok(input_schema.index_of(schema.field(*index).name())?))
            .collect::<Result<Vec<usize>>>()?;
        let output = Arc::new(schema.project(&wanted)?);
        Ok(Arc::new(Fence::new(
            input,
            self.rule.clone(),
            columns,
            output,
        )))
    }
}

/// Whether a filter can fail on no row, so that it may look at hidden ones: comparisons of a column
/// with a constant of the same type, and what is made of such by AND and OR.
fn is_safe(filter: &Expr, schema: &SchemaRef) -> bool {
    let type_of = |expr: &Expr| match expr {
        Expr::Column(column) => {
            let field: Option<&Field> = schema.field_with_name(column.name()).ok();
            field.map(|field| field.data_type().clone())
        }
        _ => None,
    };
    let fits = |data_type: &DataType, value: &ScalarValue| {
        !data_type.is_nested() && value.data_type() == *data_type
    };
    match filter {
        Expr::BinaryExpr(BinaryExpr { left, op, right }) => match op {
            Operator::And | Operator::Or => is_safe(left, schema) && is_safe(right, schema),
            Operator::Eq
            | Operator::NotEq
            | Operator::Lt
            | Operator::LtEq
            | Operator::Gt
            | Operator::GtEq => {
                let (column, value) = match (left.as_ref(), right.as_ref()) {
                    (column, Expr::Literal(value, _)) => (column, value),
                    (Expr::Literal(value, _), column) => (column, value),
                    _ => return false,
                };
                type_of(column).is_some_and(|data_type| fits(&data_type, value))
            }
            _ => false,
        },
        Expr::InList(list) => type_of(&list.expr).is_some_and(|data_type| {
            list.list
                .iter()
                .all(|item| matches!(item, Expr::Literal(value, _) if fits(&data_type, value)))
        }),
        Expr::Between(between) => type_of(&between.expr).is_some_and(|data_type| {
            [&between.low, &between.high].into_iter().all(
                |end| matches!(end.as_ref(), Expr::Literal(value, _) if fits(&data_type, value)),
            )
        }),
        Expr::IsNull(inner) | Expr::IsNotNull(inner) => type_of(inner).is_some(),
        _ => false,
    }
}

/// The same filter over a plan where the table has another name.
fn unqualified(filter: &Expr) -> Expr {
    use datafusion::common::tree_node::{Transformed, TreeNode};
    let renamed = filter.clone().transform(|expr| {
        Ok(match expr {
            Expr::Column(column) => {
                Transformed::yes(Expr::Column(Column::from_name(column.name())))
            }
            other => Transformed::no(other),
        })
    });
    // The closure cannot fail.
    renamed.map_or_else(|_| filter.clone(), |renamed| renamed.data)
}

/// Keeps hidden rows back: see the module's text.
pub struct Fence {
    input: Arc<dyn ExecutionPlan>,
    rule: Rule,
    columns: Vec<usize>,
    properties: Arc<PlanProperties>,
}

impl Fence {
    fn new(
        input: Arc<dyn ExecutionPlan>,
        rule: Rule,
        columns: Vec<usize>,
        schema: SchemaRef,
    ) -> Fence {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema),
            Partitioning::UnknownPartitioning(input.output_partitioning().partition_count()),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Fence {
            input,
            rule,
            columns,
            properties: Arc::new(properties),
        }
    }

    /// What lies below, for the collector's own counts. Nothing of it may be shown to a caller.
    pub fn hidden(&self) -> &Arc<dyn ExecutionPlan> {
        &self.input
    }
}

/// Says nothing of what lies below.
impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fence")
    }
}

impl DisplayAs for Fence {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Fence: rows that the caller may see")
    }
}

impl ExecutionPlan for Fence {
    fn name(&self) -> &str {
        "Fence"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn apply_expressions(
        &self,
        _visit: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        _children: Vec<Arc<dyn ExecutionPlan>>,
        _options: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn with_new_children(
        self: Arc<Self>,
        _children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let input = self.input.execute(partition, context)?;
        let (rule, columns) = (self.rule.clone(), self.columns.clone());
        let batches = input.map(move |batch| Ok(rule.apply(batch?)?.project(&columns)?));
        Ok(Box::pin(RecordBatchStreamAdapter::new(
            self.schema(),
            batches,
        )))
    }
}
