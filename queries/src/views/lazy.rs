//! Views that are planned when a query first names them. Planning all of them takes longer than
//! most queries, and a query names one or two.
//!
//! Invariants:
//! - a view is planned over the providers that its session held when [`register`] was called, at
//!   most once, and so shows the same state of the data as every other table of the session;
//! - lists of names (`SHOW TABLES`, `information_schema.tables`) plan nothing; whatever asks for a
//!   view's columns (`SHOW COLUMNS`, `DESCRIBE`) plans what it asks for.

use std::sync::{Arc, OnceLock, Weak};

use async_trait::async_trait;
use datafusion::catalog::{
    CatalogProvider, CatalogProviderList, MemoryCatalogProvider, MemoryCatalogProviderList,
    MemorySchemaProvider, SchemaProvider, TableProvider,
};
use datafusion::datasource::ViewTable;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::context::SessionState;
use datafusion::logical_expr::TableType;
use datafusion::prelude::SessionContext;

use super::View;
use crate::{Error, session};

/// Registers every view in a session that holds all tables of the data model (a missing table
/// can be registered empty, see [`crate::trace::empty`]). Tables that are replaced later stay what
/// they were in views that are planned already: such a session needs its views registered again.
pub async fn register(session: &SessionContext) -> std::result::Result<(), Error> {
    let state = session.state();
    let names = &state.config_options().catalog;
    let (catalog, schema) = (&names.default_catalog, &names.default_schema);
    let found = session.catalog(catalog).zip(
        session
            .catalog(catalog)
            .and_then(|catalog| catalog.schema(schema)),
    );
    // A session made by this crate has its default catalog and schema.
    let (of_session, tables) = found.expect("the default schema");
    let known = Arc::new(MemorySchemaProvider::new());
    for name in tables.table_names() {
        if View::by_name(&name).is_none()
            && let Some(table) = tables.table(&name).await?
        {
            known.register_table(name, table)?;
        }
    }
    let inner = Arc::new(Inner::default());
    let views = Arc::new(Views {
        planner: planner(&state, Arc::clone(&inner) as Arc<dyn SchemaProvider>)?,
        known,
    });
    // Set here for the first time.
    let _ = inner.0.set(Arc::downgrade(&views));
    of_session.register_schema(schema, views)?;
    Ok(())
}

/// A state like the session's, in which views are planned.
fn planner(state: &SessionState, inner: Arc<dyn SchemaProvider>) -> Result<SessionState> {
    let names = &state.config_options().catalog;
    let catalog = MemoryCatalogProvider::new();
    catalog.register_schema(&names.default_schema, inner)?;
    let catalogs = MemoryCatalogProviderList::new();
    catalogs.register_catalog(names.default_catalog.clone(), Arc::new(catalog));
    Ok(SessionStateBuilder::new_from_existing(state.clone())
        .with_catalog_list(Arc::new(catalogs))
        .build())
}

/// The schema of a session: its tables, and every view.
#[derive(Debug)]
struct Views {
    planner: SessionState,
    /// Tables, and the views that are planned.
    known: Arc<MemorySchemaProvider>,
}

/// The same schema as views see it while they are planned. It does not keep the schema: a planner
/// that held its own views would never be freed.
#[derive(Debug, Default)]
struct Inner(OnceLock<Weak<Views>>);

impl Inner {
    fn views(&self) -> Option<Arc<Views>> {
        self.0.get().and_then(Weak::upgrade)
    }
}

impl Views {
    /// Plans a view and, on the way, the views that it reads: those before it in the list, so this
    /// ends.
    async fn plan(&self, view: &View) -> std::result::Result<(), Error> {
        let mut statements = session::parse(view.sql)?;
        let statement = match statements.len() {
            1 => statements.remove(0),
            count => return Err(Error::StatementCount(count)),
        };
        let plan = session::plan_in(&self.planner, statement).await?;
        let provider = ViewTable::new(plan, Some(view.sql.to_string()));
        // Another query may have planned the same in the meantime: either will do.
        if !self.known.table_exist(view.name) {
            let _ = self
                .known
                .register_table(view.name.to_string(), Arc::new(provider));
        }
        Ok(())
    }
}

#[async_trait]
impl SchemaProvider for Views {
    fn table_names(&self) -> Vec<String> {
        let views = super::ALL.iter().map(|view| view.name.to_string());
        let is_table = |name: &String| View::by_name(name).is_none();
        let tables = self.known.table_names().into_iter().filter(is_table);
        tables.chain(views).collect()
    }

    async fn table(&self, name: &str) -> Result<Option<Arc<dyn TableProvider>>> {
        if let Some(view) = View::by_name(name)
            && !self.known.table_exist(name)
        {
            self.plan(view).await.map_err(DataFusionError::from)?;
        }
        self.known.table(name).await
    }

    async fn table_type(&self, name: &str) -> Result<Option<TableType>> {
        match View::by_name(name) {
            Some(_) => Ok(Some(TableType::View)),
            None => self.known.table_type(name).await,
        }
    }

    fn register_table(
        &self,
        name: String,
        table: Arc<dyn TableProvider>,
    ) -> Result<Option<Arc<dyn TableProvider>>> {
        self.known.register_table(name, table)
    }

    fn deregister_table(&self, name: &str) -> Result<Option<Arc<dyn TableProvider>>> {
        self.known.deregister_table(name)
    }

    fn table_exist(&self, name: &str) -> bool {
        View::by_name(name).is_some() || self.known.table_exist(name)
    }
}

#[async_trait]
impl SchemaProvider for Inner {
    fn table_names(&self) -> Vec<String> {
        self.views().map_or(Vec::new(), |views| views.table_names())
    }

    async fn table(&self, name: &str) -> Result<Option<Arc<dyn TableProvider>>> {
        match self.views() {
            Some(views) => views.table(name).await,
            None => Ok(None),
        }
    }

    fn table_exist(&self, name: &str) -> bool {
        self.views().is_some_and(|views| views.table_exist(name))
    }
}
