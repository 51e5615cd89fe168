//! A Delta table as a plain scan of its Parquet files, which any engine can take apart and send.
//!
//! The Delta library's own scan cannot be sent, and puts an operator of its own between the files
//! and what filters them. What it can do beyond a plain one (deletion vectors, renamed columns) the
//! tables of a collector do not use.
//!
//! Invariants:
//! - it shows the one version of the table that it was made of;
//! - files are left out by their statistics only where these prove that no row can match;
//! - of the table's log only the number of rows is taken for exact, so that it may answer a
//!   `count(*)`: least and greatest texts are cut short in it.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::cast;
use arrow::datatypes::{Field, Fields, Schema, SchemaRef, UInt64Type};
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::pruning::PruningStatistics;
use datafusion::common::stats::Precision;
use datafusion::common::{Column, DFSchema, ScalarValue, Statistics};
use datafusion::datasource::TableType;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{FileGroup, FileScanConfigBuilder, ParquetSource};
use datafusion::datasource::source::DataSourceExec;
use datafusion::datasource::table_schema::TableSchema;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::object_store::ObjectStoreUrl;
use datafusion::logical_expr::utils::conjunction;
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_optimizer::pruning::PruningPredicateBuilder;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::empty::EmptyExec;
use deltalake::DeltaTable;
use vramscope_wire::Table;

use super::stores;
use crate::texts;

/// A provider over the files of a table at the version it is at now; `None` if the table has what a
/// plain scan cannot do.
pub fn provider(table: Table, delta: &DeltaTable) -> Result<Option<Arc<dyn TableProvider>>> {
    let snapshot = delta.snapshot().map_err(DataFusionError::from)?;
    // Version 1 of the protocol for readers has none of it.
    if snapshot.protocol().min_reader_version() > 1 {
        return Ok(None);
    }
    let partitions = snapshot.metadata().partition_columns();
    let is_partition = |field: &&Arc<Field>| partitions.contains(field.name());
    let whole = snapshot.snapshot().arrow_schema();
    // Of a partition the engine keeps one text for a file as it is.
    let viewed = whole
        .fields()
        .iter()
        .map(|field| match is_partition(&field) {
            true => Arc::clone(field),
            false => texts::viewed_field(field),
        });
    let whole = Arc::new(Schema::new(viewed.collect::<Fields>()));
    let fields = whole.fields().iter();
    let file_schema = Schema::new(
        fields
            .clone()
            .filter(|field| !is_partition(field))
            .cloned()
            .collect::<Vec<_>>(),
    );
    let partition_fields = fields.filter(is_partition).cloned().collect::<Vec<_>>();
    let columns = TableSchema::builder(Arc::new(file_schema))
        .with_table_partition_cols(partition_fields)
        .build();
    Ok(Some(Arc::new(Files {
        table,
        delta: delta.clone(),
        schema: Arc::clone(&whole),
        columns,
    })))
}

#[derive(Debug)]
struct Files {
    table: Table,
    delta: DeltaTable,
    /// The table's columns in its own order.
    schema: SchemaRef,
    /// The same, those of the files before those that partition it.
    columns: TableSchema,
}

impl Files {
    /// The files that may hold rows for a predicate, with statistics of the columns that are read.
    fn files(
        &self,
        predicate: Option<&Arc<dyn PhysicalExpr>>,
        read: &Schema,
    ) -> Result<Vec<PartitionedFile>> {
        let snapshot = self.delta.snapshot().map_err(DataFusionError::from)?;
        let log = snapshot.log_data();
        let may_match = match predicate {
            Some(predicate) => {
                let schema = Arc::clone(self.columns.table_schema());
                let pruning = PruningPredicateBuilder::new()
                    .with_file_schema(schema)
                    .try_build(Arc::clone(predicate))?;
                pruning.prune(&log)?
            }
            None => Vec::new(),
        };
        let file_schema = self.columns.file_schema();
        let ranges: Vec<Option<Range>> = file_schema
            .fields()
            .iter()
            .map(|field| match read.field_with_name(field.name()) {
                Ok(_) => Range::read(&log, field),
                Err(_) => None,
            })
            .collect();
        let mut files = Vec::new();
        for (index, file) in log.iter().enumerate() {
            if !may_match.get(index).copied().unwrap_or(true) {
                continue;
            }
            let size = u64::try_from(file.size()).unwrap_or(0);
            let mut found = PartitionedFile::new(String::new(), size);
            found.object_meta.location = file.object_store_path();
            let values = file.partition_values_map();
            for field in self.columns.table_partition_cols() {
                let text = values.get(field.name()).cloned().flatten();
                found.partition_values.push(match text {
                    Some(text) => ScalarValue::try_from_string(text, field.data_type())?,
                    None => ScalarValue::try_from(field.data_type())?,
                });
            }
            let mut statistics = Statistics::new_unknown(file_schema);
            if let Some(rows) = file.num_records() {
                statistics.num_rows = Precision::Exact(rows);
            }
            // Of the file as it lies there: the engine compares sides of a join by it.
            let bytes = usize::try_from(size).unwrap_or(usize::MAX);
            statistics.total_byte_size = Precision::Inexact(bytes);
            for (range, column) in ranges.iter().zip(&mut statistics.column_statistics) {
                if let Some(range) = range {
                    column.min_value = known(ScalarValue::try_from_array(&range.least, index)?);
                    column.max_value = known(ScalarValue::try_from_array(&range.greatest, index)?);
                    if range.nulls.is_valid(index) {
                        let nulls = range.nulls.as_primitive::<UInt64Type>().value(index);
                        let nulls = usize::try_from(nulls).unwrap_or(usize::MAX);
                        column.null_count = Precision::Inexact(nulls);
                    }
                }
            }
            files.push(found.with_statistics(Arc::new(statistics)));
        }
        Ok(files)
    }
}

/// What the table's log tells of a column in each file.
struct Range {
    least: ArrayRef,
    greatest: ArrayRef,
    nulls: ArrayRef,
}

impl Range {
    /// `None` for what has none. Texts have, but of them nothing is estimated.
    fn read(log: &impl PruningStatistics, field: &Field) -> Option<Range> {
        if !field.data_type().is_primitive() {
            return None;
        }
        let column = Column::from_name(field.name());
        let typed = |values: ArrayRef| cast(&values, field.data_type()).ok();
        Some(Range {
            least: log.min_values(&column).and_then(typed)?,
            greatest: log.max_values(&column).and_then(typed)?,
            nulls: log.null_counts(&column)?,
        })
    }
}

fn known(value: ScalarValue) -> Precision<ScalarValue> {
    match value.is_null() {
        true => Precision::Absent,
        false => Precision::Inexact(value),
    }
}

#[async_trait]
impl TableProvider for Files {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    fn supports_filters_pushdown(
        &self,
        filters: &[&Expr],
    ) -> Result<Vec<TableProviderFilterPushDown>> {
        Ok(vec![TableProviderFilterPushDown::Inexact; filters.len()])
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let schema = DFSchema::try_from(Arc::clone(self.columns.table_schema()))?;
        let predicate = conjunction(filters.iter().cloned())
            .map(|filter| state.create_physical_expr(filter, &schema))
            .transpose()?;
        let wanted = match projection {
            Some(columns) => self.schema.project(columns)?,
            None => self.schema.as_ref().clone(),
        };
        let files = self.files(predicate.as_ref(), &wanted)?;
        let columns = wanted.fields().iter();
        let columns = columns.map(|field| self.columns.table_schema().index_of(field.name()));
        let columns = columns.collect::<std::result::Result<Vec<usize>, _>>()?;
        if files.is_empty() {
            return Ok(Arc::new(EmptyExec::new(Arc::new(wanted))));
        }
        let options = state.default_table_options().parquet;
        let mut source =
            ParquetSource::new(self.columns.clone()).with_table_parquet_options(options);
        if let Some(predicate) = predicate {
            source = source.with_predicate(predicate);
        }
        let each = files.iter().filter_map(|file| file.statistics.as_deref());
        let statistics = Statistics::try_merge_iter(each, self.columns.table_schema())?;
        let groups = balanced(files, state.config().target_partitions());
        let url = ObjectStoreUrl::parse(stores::url(self.table))?;
        let config = FileScanConfigBuilder::new(url, Arc::new(source))
            .with_file_groups(groups)
            .with_statistics(statistics)
            .with_projection_indices(Some(columns))?
            // A filter is left to do: a limit on unfiltered rows would cut too early.
            .with_limit(limit.filter(|_| filters.is_empty()))
            .build();
        Ok(DataSourceExec::from_data_source(config))
    }
}

/// Files in groups of about equal bytes, at most so many.
fn balanced(mut files: Vec<PartitionedFile>, most: usize) -> Vec<FileGroup> {
    files.sort_by_key(|file| std::cmp::Reverse(file.object_meta.size));
    let count = most.clamp(1, files.len().max(1));
    let mut groups: Vec<(u64, Vec<PartitionedFile>)> = vec![(0, Vec::new()); count];
    for file in files {
        // There is at least one group.
        if let Some(smallest) = groups.iter_mut().min_by_key(|(bytes, _)| *bytes) {
            smallest.0 += file.object_meta.size.max(1);
            smallest.1.push(file);
        }
    }
    groups
        .into_iter()
        .map(|(_, files)| FileGroup::new(files))
        .collect()
}
