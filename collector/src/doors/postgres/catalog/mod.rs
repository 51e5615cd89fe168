//! The catalog that PostgreSQL's clients look things up in: `pg_catalog` and `information_schema`.
//!
//! `datafusion-pg-catalog` has PostgreSQL's own types, functions and operators, and the functions
//! that go with them. What concerns this lake (relations, columns, descriptions, functions) is
//! made here, once, because a collector's tables and views are the same while it runs.
//!
//! Invariants:
//! - OIDs are the same for every question of every connection, and for every start of one version;
//! - a type in the catalog is the type that answers have ([`rows::pg_type`]);
//! - the session that the gate hands out is not changed: catalog questions get a view of it with
//!   other schemas beside `public`, on the same memory pool.

mod functions;
mod information;
mod system;
mod table;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::datatypes::{DataType, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::{
    CatalogProvider, CatalogProviderList, MemoryCatalogProvider, MemoryCatalogProviderList,
    MemorySchemaProvider, SchemaProvider, TableFunction, TableProvider,
};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::logical_expr::{ScalarUDF, TableType};
use datafusion::prelude::SessionContext;
use datafusion_pg_catalog::pg_catalog::context::EmptyContextProvider;
use datafusion_pg_catalog::pg_catalog::oid_type_planner::PgOidTypePlanner;
use datafusion_pg_catalog::pg_catalog::{
    PG_CATALOG_TABLES, PgCatalogSchemaProvider, PgCatalogStaticTables, setup_pg_catalog,
};
use vramscope_queries::views::{self, View};
use vramscope_wire::Table;

use super::settings::Values;

/// The one database.
pub const DATABASE: &str = "vramscope";
/// Owner of everything.
pub const OWNER: &str = "vramscope";
/// The superuser that PostgreSQL starts with.
pub const OWNER_OID: i32 = 10;
/// As in PostgreSQL.
const PUBLIC_OID: i32 = 2200;
/// As in PostgreSQL.
const PG_CATALOG_OID: i32 = 11;
const INFORMATION_OID: i32 = 13_000;
const DATABASE_OID: i32 = 5;
/// Where PostgreSQL's own objects end.
const FIRST_OID: i32 = 16_384;
/// OIDs of functions, apart from those of relations so that neither moves the other.
const FIRST_FUNCTION_OID: i32 = 26_384;

/// Who asks, as the catalog shows it.
#[derive(Debug, Clone)]
pub struct Asker {
    /// Name of the user.
    pub user: String,
    /// What `pg_backend_pid()` says.
    pub pid: i32,
    /// Settings of the connection.
    pub settings: Values,
}

/// A table or view.
#[derive(Debug)]
struct Relation {
    oid: i32,
    schema: &'static str,
    namespace: i32,
    name: String,
    kind: &'static str,
    columns: SchemaRef,
    description: Option<String>,
    column_descriptions: Vec<Option<String>>,
    /// The SELECT of a view.
    definition: Option<&'static str>,
}

/// The parts of the catalog that do not change.
#[derive(Debug)]
pub struct Catalog {
    system: Arc<Overlay>,
    information: Arc<dyn SchemaProvider>,
    functions: Vec<Arc<ScalarUDF>>,
    table_functions: Vec<Arc<TableFunction>>,
    known: Arc<Known>,
}

/// OIDs by names, and texts by OIDs.
#[derive(Debug, Default)]
pub struct Known {
    relations: HashMap<(String, String), i32>,
    types: HashMap<String, i32>,
    procedures: HashMap<String, i32>,
    descriptions: HashMap<(i32, i32), String>,
    definitions: HashMap<i32, String>,
    arguments: HashMap<i32, String>,
    results: HashMap<i32, String>,
}

impl Known {
    /// The OID behind `'name'::kind`; `None` if there is no such thing, or no such kind.
    pub fn oid(&self, kind: &str, name: &str) -> Option<i32> {
        let parts: Vec<String> = name
            .split('.')
            .map(|part| match part.trim().strip_prefix('"') {
                Some(quoted) => quoted.trim_end_matches('"').to_string(),
                None => part.trim().to_ascii_lowercase(),
            })
            .collect();
        let (schema, name) = match parts.as_slice() {
            [name] => (None, name),
            [schema, name] => (Some(schema), name),
            [_, schema, name] => (Some(schema), name),
            _ => return None,
        };
        match kind {
            "regclass" => match schema {
                Some(schema) => self.relations.get(&(schema.clone(), name.clone())).copied(),
                // As PostgreSQL searches: its own catalog first.
                None => ["pg_catalog", "public"].into_iter().find_map(|schema| {
                    let key = (schema.to_string(), name.clone());
                    self.relations.get(&key).copied()
                }),
            },
            "regnamespace" => match name.as_str() {
                "public" => Some(PUBLIC_OID),
                "pg_catalog" => Some(PG_CATALOG_OID),
                "information_schema" => Some(INFORMATION_OID),
                _ => None,
            },
            "regtype" => self.types.get(type_alias(name)).copied(),
            "regproc" | "regprocedure" => self.procedures.get(name).copied(),
            _ => None,
        }
    }
}

/// Names of types that are not those of `pg_type`.
fn type_alias(name: &str) -> &str {
    match name {
        "integer" | "int" => "int4",
        "bigint" => "int8",
        "smallint" => "int2",
        "boolean" => "bool",
        "double precision" => "float8",
        "real" => "float4",
        "character varying" => "varchar",
        "timestamp with time zone" => "timestamptz",
        "timestamp without time zone" => "timestamp",
        other => other,
    }
}

impl Catalog {
    /// Of the tables and views of a session.
    pub async fn of(session: &SessionContext) -> Result<Catalog> {
        let statics = Arc::new(PgCatalogStaticTables::try_new()?);
        let nothing: Arc<dyn CatalogProviderList> = Arc::new(MemoryCatalogProviderList::new());
        let base =
            PgCatalogSchemaProvider::try_new(nothing, Arc::clone(&statics), EmptyContextProvider)?;
        let mut relations = own_relations(session).await?;
        for name in PG_CATALOG_TABLES {
            if let Some(table) = base.build_table_by_name(name)? {
                relations.push(system::relation(name, relations.len(), table.schema()));
            }
        }
        let information = information::tables(&relations)?;
        let known = Arc::new(system::known(&relations, &statics));
        let tables = system::tables(&relations, &base, &statics)?;
        let (mut functions, table_functions) = functions_of_library()?;
        functions.extend(functions::fixed(&known));
        Ok(Catalog {
            system: Arc::new(Overlay {
                base: Arc::new(base),
                tables,
            }),
            information,
            functions,
            table_functions,
            known,
        })
    }

    /// OIDs by names.
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// A session with the catalog beside its tables.
    pub fn beside(&self, session: &SessionContext, asker: &Asker) -> Result<SessionContext> {
        let state = session.state();
        let names = &state.config_options().catalog;
        let public = session
            .catalog(&names.default_catalog)
            .and_then(|catalog| catalog.schema(&names.default_schema))
            .ok_or_else(|| DataFusionError::Internal("the session has no tables".to_string()))?;
        let database = MemoryCatalogProvider::new();
        database.register_schema("public", public)?;
        let mut system = self.system.as_ref().clone();
        system.tables.extend(system::of_asker(asker)?);
        database.register_schema("pg_catalog", Arc::new(system))?;
        database.register_schema("information_schema", Arc::clone(&self.information))?;
        let catalogs = MemoryCatalogProviderList::new();
        catalogs.register_catalog(DATABASE.to_string(), Arc::new(database));

        let mut config = state.config().clone();
        let options = config.options_mut();
        options.catalog.default_catalog = DATABASE.to_string();
        options.catalog.default_schema = "public".to_string();
        // The engine's own would hide ours.
        options.catalog.information_schema = false;
        let state = SessionStateBuilder::new_from_existing(state)
            .with_config(config)
            .with_catalog_list(Arc::new(catalogs))
            .with_type_planner(Arc::new(PgOidTypePlanner))
            .build();
        let view = SessionContext::new_with_state(state);
        for function in &self.functions {
            view.register_udf(function.as_ref().clone());
        }
        for function in &self.table_functions {
            view.register_udtf(function.name(), Arc::clone(function.function()));
        }
        for function in functions::of_asker(asker) {
            view.register_udf(function.as_ref().clone());
        }
        Ok(view)
    }
}

type Functions = (Vec<Arc<ScalarUDF>>, Vec<Arc<TableFunction>>);

/// The functions that `datafusion-pg-catalog` brings.
fn functions_of_library() -> Result<Functions> {
    let session = SessionContext::new();
    let before: Vec<String> = session.state().scalar_functions().keys().cloned().collect();
    let name = session
        .state()
        .config_options()
        .catalog
        .default_catalog
        .clone();
    setup_pg_catalog(&session, &name, EmptyContextProvider).map_err(|error| *error)?;
    let state = session.state();
    let functions = state
        .scalar_functions()
        .iter()
        .filter(|(name, _)| !before.contains(name))
        .map(|(_, function)| Arc::clone(function))
        .collect();
    let table_functions = ["pg_get_keywords", "generate_series", "range"]
        .into_iter()
        .filter_map(|name| state.table_functions().get(name).cloned())
        .collect();
    Ok((functions, table_functions))
}

/// The lake's tables, then its views, each by name.
async fn own_relations(session: &SessionContext) -> Result<Vec<Relation>> {
    let state = session.state();
    let names = &state.config_options().catalog;
    let schema = session
        .catalog(&names.default_catalog)
        .and_then(|catalog| catalog.schema(&names.default_schema))
        .ok_or_else(|| DataFusionError::Internal("the session has no tables".to_string()))?;
    let mut tables: BTreeMap<(bool, String), Arc<dyn TableProvider>> = BTreeMap::new();
    for name in schema.table_names() {
        if let Some(table) = schema.table(&name).await? {
            let is_view = View::by_name(&name).is_some() || table.table_type() == TableType::View;
            tables.insert((is_view, name), table);
        }
    }
    let relations = tables.into_iter().zip(FIRST_OID..);
    Ok(relations
        .map(|(((is_view, name), table), oid)| own_relation(oid, is_view, name, table.schema()))
        .collect())
}

fn own_relation(oid: i32, is_view: bool, name: String, columns: SchemaRef) -> Relation {
    let view = View::by_name(&name);
    let header = view.and_then(|view| view.header().ok());
    let table = Table::by_name(&name);
    let of_table: HashMap<String, &str> = table
        .map(|table| table.columns())
        .unwrap_or_default()
        .iter()
        .map(|column| (column.field.name().clone(), column.doc))
        .collect();
    let described = |column: &str| match &header {
        Some(header) => {
            let found = header.columns.iter().find(|known| known.name == column);
            found.map(|column| match column.unit.as_str() {
                "" | "-" => column.meaning.clone(),
                unit => format!("{} [{unit}]", column.meaning),
            })
        }
        None => of_table.get(column).map(|doc| (*doc).to_string()),
    };
    let purpose = header.as_ref().map(|header| header.purpose.clone());
    Relation {
        oid,
        schema: "public",
        namespace: PUBLIC_OID,
        kind: if is_view { "v" } else { "r" },
        column_descriptions: columns
            .fields()
            .iter()
            .map(|field| described(field.name()))
            .collect(),
        columns,
        description: purpose.or_else(|| table.map(|table| format!("a row is {}", table.doc()))),
        definition: view.map(|view| view.sql),
        name,
    }
}

/// Whether a name is that of a table or view with rows of the lake.
pub fn is_own(name: &str) -> bool {
    Table::by_name(name).is_some() || views::View::by_name(name).is_some()
}

/// Tables over the tables of another schema.
#[derive(Debug, Clone)]
struct Overlay {
    base: Arc<dyn SchemaProvider>,
    tables: BTreeMap<String, Arc<dyn TableProvider>>,
}

#[async_trait]
impl SchemaProvider for Overlay {
    fn table_names(&self) -> Vec<String> {
        let mut names = self.base.table_names();
        names.extend(self.tables.keys().cloned());
        names.sort();
        names.dedup();
        names
    }

    async fn table(&self, name: &str) -> Result<Option<Arc<dyn TableProvider>>> {
        match self.tables.get(name) {
            Some(table) => Ok(Some(Arc::clone(table))),
            None => self.base.table(name).await,
        }
    }

    fn table_exist(&self, name: &str) -> bool {
        self.tables.contains_key(name) || self.base.table_exist(name)
    }
}

/// A schema of fixed tables.
fn schema_of(tables: Vec<(&str, Arc<dyn TableProvider>)>) -> Result<Arc<dyn SchemaProvider>> {
    let schema = MemorySchemaProvider::new();
    for (name, table) in tables {
        schema.register_table(name.to_string(), table)?;
    }
    Ok(Arc::new(schema))
}

/// Whether a column holds text, for `attcollation`.
fn is_text(kind: &DataType) -> bool {
    matches!(
        kind,
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View
    )
}
