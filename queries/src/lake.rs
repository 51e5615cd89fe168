//! A lake: one Delta table per folder, as a collector writes it.
//!
//! A provider made here shows one version of its table for ever: that is what makes an answer
//! consistent. Newer commits are seen by [`refresh`] and a new provider, which
//! [`Folder::session`](crate::folder::Folder::session) does before every query.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::catalog::TableProvider;
use datafusion::prelude::SessionContext;
use deltalake::{DeltaTable, DeltaTableBuilder};
use url::Url;
use vramscope_wire::Table;

use crate::Error;

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

/// Brings an open table to its newest version. True if there was a newer one.
pub async fn refresh(table: &mut DeltaTable) -> Result<bool, Error> {
    let before = table.version();
    if let Err(cause) = table.update_state().await {
        let path = table.table_url().to_file_path().unwrap_or_default();
        return Err(Error::Table {
            path,
            cause: Box::new(cause),
        });
    }
    Ok(table.version() != before)
}

/// A provider that shows the version the table is at now.
pub async fn provider(
    session: &SessionContext,
    table: &DeltaTable,
) -> Result<Arc<dyn TableProvider>, Error> {
    Ok(table
        .table_provider()
        .with_session(Arc::new(session.state()))
        .await?)
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

/// Checks that every column of the data model is there with its type. Columns the table has
/// beyond them (partition columns, columns of a newer version) are let through; a column it
/// lacks is an error, because a view over it could not be planned.
pub fn check_columns(dir: &Path, table: Table, provider: &dyn TableProvider) -> Result<(), Error> {
    let found = provider.schema();
    for wanted in table.schema().fields() {
        let detail = match found.field_with_name(wanted.name()) {
            Err(_) => format!("column {:?} is missing", wanted.name()),
            Ok(field) if !field.data_type().equals_datatype(wanted.data_type()) => {
                format!(
                    "column {:?} is {}, expected {}",
                    wanted.name(),
                    field.data_type(),
                    wanted.data_type()
                )
            }
            Ok(_) => continue,
        };
        return Err(Error::TableColumns {
            path: dir.to_path_buf(),
            detail,
        });
    }
    Ok(())
}

/// Registers a table under its name at the version it is at now, replacing an older one.
pub async fn register(
    session: &SessionContext,
    name: &str,
    table: &DeltaTable,
) -> Result<(), Error> {
    let provider = provider(session, table).await?;
    session.deregister_table(name)?;
    session.register_table(name, provider)?;
    Ok(())
}
