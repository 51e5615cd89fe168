//! A lake: one Delta table per folder (or prefix of a bucket), as collectors write it.
//!
//! A provider made here shows one version of its table for ever: that is what makes an answer
//! consistent. Newer commits are seen by [`refresh`] and a new provider, which
//! [`Folder::session`](crate::folder::Folder::session) does before every query.

pub(crate) mod scan;
pub(crate) mod stores;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::{ScalarValue, Statistics};
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown, TableType};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::{SessionContext, lit};
use deltalake::{DeltaTable, DeltaTableBuilder};
use url::Url;
use vramscope_wire::Table;

use crate::store::{self, Place};
use crate::{Error, texts};

/// Whether the folder is a Delta table.
pub fn is_delta(dir: &Path) -> bool {
    dir.join("_delta_log").is_dir()
}

/// Refuses paths under which the Delta library panics or loses its way: it makes a host name of
/// the path, and decodes a `%20` in it twice.
pub fn check_path(dir: &Path) -> Result<(), Error> {
    let text = dir.to_string_lossy();
    match text.chars().find(|c| "[]^|\\@<>%".contains(*c)) {
        Some(character) => Err(Error::PathCharacter {
            path: dir.to_path_buf(),
            character,
        }),
        None => Ok(()),
    }
}

/// Opens the table in a folder at its newest version.
pub async fn open_table(dir: &Path) -> Result<DeltaTable, Error> {
    let absolute = std::path::absolute(dir).map_err(|cause| Error::Io {
        path: dir.to_path_buf(),
        cause,
    })?;
    check_path(&absolute)?;
    // An absolute path always makes a file URL.
    let url = Url::from_directory_path(&absolute).expect("an absolute path");
    let failed = |cause| Error::Table {
        path: dir.to_path_buf(),
        cause: Box::new(cause),
    };
    DeltaTableBuilder::from_url(url)
        .map_err(failed)?
        .load()
        .await
        .map_err(failed)
}

/// Opens a table of a place at its newest version; `None` if it is not there.
pub async fn open(place: &Place, table: Table) -> Result<Option<DeltaTable>, Error> {
    let failed = |cause| Error::Table {
        path: place.table_path(table),
        cause: Box::new(cause),
    };
    match place {
        Place::Folder(dir) => {
            let dir = dir.join(table.name());
            match is_delta(&dir) {
                true => open_table(&dir).await.map(Some),
                false => Ok(None),
            }
        }
        Place::Bucket(_) => {
            store::register();
            let mut delta = DeltaTableBuilder::from_url(place.table(table)?)
                .and_then(|builder| builder.build())
                .map_err(failed)?;
            if !delta.verify_deltatable_existence().await.map_err(failed)? {
                return Ok(None);
            }
            delta.load().await.map_err(failed)?;
            Ok(Some(delta))
        }
    }
}

/// Brings an open table to its newest version. True if there was a newer one.
pub async fn refresh(table: &mut DeltaTable) -> Result<bool, Error> {
    let before = table.version();
    if let Err(cause) = table.update_state().await {
        let url = table.table_url();
        let path = url.to_file_path();
        return Err(Error::Table {
            path: path.unwrap_or_else(|()| PathBuf::from(url.as_str())),
            cause: Box::new(cause),
        });
    }
    Ok(table.version() != before)
}

/// A provider of the Delta library, which shows the version the table is at now: for tables that
/// [`scan`] cannot read.
pub async fn provider(
    session: &SessionContext,
    table: &DeltaTable,
) -> Result<Arc<dyn TableProvider>, Error> {
    let provider = table
        .table_provider()
        .with_session(Arc::new(session.state()))
        .await?;
    Ok(Arc::new(Delta(provider)))
}

/// A table as the Delta library provides it, except that it is not given filters without columns.
/// It says that it applies those exactly and passes over one that is NULL, as `host = NULL` becomes:
/// `WHERE seq = 1 AND host = NULL` gave rows.
#[derive(Debug)]
struct Delta(Arc<dyn TableProvider>);

#[async_trait]
impl TableProvider for Delta {
    fn schema(&self) -> SchemaRef {
        self.0.schema()
    }

    fn table_type(&self) -> TableType {
        self.0.table_type()
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> datafusion::error::Result<Arc<dyn ExecutionPlan>> {
        self.0.scan(state, projection, filters, limit).await
    }

    fn supports_filters_pushdown(
        &self,
        filters: &[&Expr],
    ) -> datafusion::error::Result<Vec<TableProviderFilterPushDown>> {
        let supported = self.0.supports_filters_pushdown(filters)?;
        let each = supported.into_iter().zip(filters);
        Ok(each
            .map(
                |(supported, filter)| match filter.column_refs().is_empty() {
                    true => TableProviderFilterPushDown::Unsupported,
                    false => supported,
                },
            )
            .collect())
    }

    fn statistics(&self) -> Option<Statistics> {
        self.0.statistics()
    }
}

/// The live files of a table at the version it is at, if they lie on a local disk.
pub fn files(table: &DeltaTable) -> Vec<PathBuf> {
    let Ok(uris) = table.get_file_uris() else {
        return Vec::new();
    };
    let local = |uri: String| match Url::parse(&uri) {
        Ok(url) => url.to_file_path().ok(),
        // The library spells local files as plain paths.
        Err(_) => Some(PathBuf::from(uri)),
    };
    uris.filter_map(local).collect()
}

/// Gives a table all columns of the data model: those that came later than the table (it was
/// written by an older collector) read as NULL, as in a trace. Columns beyond the data model
/// (partition columns, columns of a newer version) are let through; a missing column that may not
/// be NULL, or one of another type, is an error.
pub fn with_all_columns(
    session: &SessionContext,
    dir: &Path,
    table: Table,
    provider: Arc<dyn TableProvider>,
) -> Result<Arc<dyn TableProvider>, Error> {
    let found = provider.schema();
    let mut missing = Vec::new();
    for wanted in table.schema().fields() {
        let detail = match found.field_with_name(wanted.name()) {
            Ok(field) if texts::same(field.data_type(), wanted.data_type()) => continue,
            Ok(field) => format!(
                "column {:?} is {}, expected {}",
                wanted.name(),
                field.data_type(),
                wanted.data_type()
            ),
            Err(_) if wanted.is_nullable() => {
                missing.push(Arc::clone(wanted));
                continue;
            }
            Err(_) => format!("column {:?} is missing", wanted.name()),
        };
        return Err(Error::TableColumns {
            path: dir.to_path_buf(),
            detail,
        });
    }
    if missing.is_empty() {
        return Ok(provider);
    }
    let mut frame = session.read_table(provider)?;
    for field in missing {
        let null = ScalarValue::try_from(field.data_type())?;
        frame = frame.with_column(field.name(), lit(null))?;
    }
    Ok(frame.into_view())
}
