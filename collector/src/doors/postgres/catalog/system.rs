//! `pg_catalog`: the tables that are about this lake.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::array::{Array, AsArray, RecordBatch, new_null_array};
use arrow::datatypes::{Int32Type, SchemaRef};
use datafusion::catalog::{CatalogProviderList, TableProvider};
use datafusion::error::Result;
use datafusion_pg_catalog::pg_catalog::context::EmptyContextProvider;
use datafusion_pg_catalog::pg_catalog::{PgCatalogSchemaProvider, PgCatalogStaticTables};
use pgwire::api::Type;
use vramscope_queries::functions;

use super::table::{Cell, Row, batch, provider, schema, with_lists};
use super::{
    Asker, DATABASE, DATABASE_OID, FIRST_FUNCTION_OID, INFORMATION_OID, Known, OWNER, OWNER_OID,
    PG_CATALOG_OID, PUBLIC_OID, Relation, is_text,
};
use crate::doors::postgres::rows::pg_type;

type Base = PgCatalogSchemaProvider<Arc<dyn CatalogProviderList>, EmptyContextProvider>;

/// OID of `pg_class`, which descriptions of relations name; as in PostgreSQL.
const PG_CLASS_OID: i32 = 1259;
/// OIDs that PostgreSQL gives its own relations and clients rely on.
const FIXED: &[(&str, i32)] = &[
    ("pg_class", PG_CLASS_OID),
    ("pg_type", 1247),
    ("pg_attribute", 1249),
    ("pg_proc", 1255),
    ("pg_namespace", 2615),
    ("pg_database", 1262),
    ("pg_constraint", 2606),
    ("pg_attrdef", 2604),
    ("pg_description", 2609),
    ("pg_index", 2610),
];
/// Where the others begin: beyond PostgreSQL's own, below those of the lake.
const FIRST_OF_OTHERS: i32 = 14_000;
/// The language of functions that are part of the server.
const INTERNAL: i32 = 12;

/// A relation of `pg_catalog` itself.
pub fn relation(name: &str, index: usize, columns: SchemaRef) -> Relation {
    let fixed = FIXED.iter().find(|(known, _)| *known == name);
    // A hundred tables at most.
    let other = FIRST_OF_OTHERS + i32::try_from(index).unwrap_or(0);
    Relation {
        oid: fixed.map_or(other, |(_, oid)| *oid),
        schema: "pg_catalog",
        namespace: PG_CATALOG_OID,
        name: name.to_string(),
        kind: "r",
        column_descriptions: vec![None; columns.fields().len()],
        columns,
        description: None,
        definition: None,
    }
}

/// The SQL name of a type, as `format_type` has it.
pub fn type_name(kind: &Type) -> String {
    let name = kind.name();
    match name {
        "bool" => "boolean".to_string(),
        "int2" => "smallint".to_string(),
        "int4" => "integer".to_string(),
        "int8" => "bigint".to_string(),
        "float4" => "real".to_string(),
        "float8" => "double precision".to_string(),
        "bpchar" => "character".to_string(),
        "varchar" => "character varying".to_string(),
        "char" => "\"char\"".to_string(),
        "time" => "time without time zone".to_string(),
        "timestamp" => "timestamp without time zone".to_string(),
        "timestamptz" => "timestamp with time zone".to_string(),
        _ => match name.strip_prefix('_').and_then(array_element) {
            Some(element) => format!("{}[]", type_name(&element)),
            None => name.to_string(),
        },
    }
}

fn array_element(name: &str) -> Option<Type> {
    let elements = [
        Type::BOOL,
        Type::BYTEA,
        Type::INT2,
        Type::INT4,
        Type::INT8,
        Type::FLOAT4,
        Type::FLOAT8,
        Type::NUMERIC,
        Type::TEXT,
        Type::VARCHAR,
        Type::NAME,
        Type::OID,
        Type::DATE,
        Type::TIME,
        Type::TIMESTAMP,
        Type::TIMESTAMPTZ,
        Type::JSON,
    ];
    elements.into_iter().find(|element| element.name() == name)
}

/// OIDs by names, and texts by OIDs.
pub fn known(relations: &[Relation], statics: &PgCatalogStaticTables) -> Known {
    let mut known = Known {
        types: oids_by_name(statics.pg_type.data(), "typname"),
        procedures: oids_by_name(statics.pg_proc.data(), "proname"),
        ..Known::default()
    };
    for relation in relations {
        let key = (relation.schema.to_string(), relation.name.clone());
        known.relations.insert(key, relation.oid);
        if let Some(text) = &relation.description {
            known.descriptions.insert((relation.oid, 0), text.clone());
        }
        for (text, position) in relation.column_descriptions.iter().zip(1..) {
            if let Some(text) = text {
                let key = (relation.oid, position);
                known.descriptions.insert(key, text.clone());
            }
        }
        if let Some(sql) = relation.definition {
            known.definitions.insert(relation.oid, sql.to_string());
        }
    }
    for (function, oid) in functions::ALL.iter().zip(FIRST_FUNCTION_OID..) {
        known.procedures.insert(function.name.to_string(), oid);
        known.arguments.insert(oid, arguments_of(function.call));
        known
            .results
            .insert(oid, function.returns.to_ascii_lowercase());
        known
            .descriptions
            .insert((oid, 0), function.meaning.to_string());
    }
    known
}

/// What stands between the parentheses of a call.
fn arguments_of(call: &str) -> String {
    let inner = call.split_once('(').map_or("", |(_, inner)| inner);
    inner.strip_suffix(')').unwrap_or(inner).to_string()
}

fn oids_by_name(batches: &[RecordBatch], column: &str) -> HashMap<String, i32> {
    let mut oids = HashMap::new();
    for batch in batches {
        let (Some(names), Some(numbers)) =
            (batch.column_by_name(column), batch.column_by_name("oid"))
        else {
            continue;
        };
        let (Some(names), Some(numbers)) = (
            names.as_string_opt::<i32>(),
            numbers.as_primitive_opt::<Int32Type>(),
        ) else {
            continue;
        };
        for row in 0..batch.num_rows() {
            if names.is_valid(row) && numbers.is_valid(row) {
                // Of several functions with one name the first, as PostgreSQL would not say.
                oids.entry(names.value(row).to_string())
                    .or_insert(numbers.value(row));
            }
        }
    }
    oids
}

/// The tables that are about this lake.
pub fn tables(
    relations: &[Relation],
    base: &Base,
    statics: &PgCatalogStaticTables,
) -> Result<BTreeMap<String, Arc<dyn TableProvider>>> {
    let columns_of = |name: &str| -> Result<SchemaRef> {
        let table = base.build_table_by_name(name)?;
        let columns = table.map_or_else(|| schema(&[]), |table| table.schema());
        Ok(match name {
            "pg_namespace" => with_lists(&columns, &["nspacl"]),
            "pg_class" => with_lists(&columns, &["relacl", "reloptions"]),
            "pg_database" => with_lists(&columns, &["datacl"]),
            _ => columns,
        })
    };
    let own: Vec<&Relation> = relations
        .iter()
        .filter(|relation| relation.schema == "public")
        .collect();
    let mut tables = BTreeMap::new();
    let mut add = |name: &str, batches: Vec<RecordBatch>| -> Result<()> {
        tables.insert(name.to_string(), provider(batches)?);
        Ok(())
    };
    let rows = |name: &str, rows: Vec<Row>| batch(&columns_of(name)?, &rows);

    add("pg_namespace", vec![rows("pg_namespace", namespaces())?])?;
    add(
        "pg_class",
        vec![rows("pg_class", relations.iter().map(class).collect())?],
    )?;
    add(
        "pg_attribute",
        vec![rows(
            "pg_attribute",
            relations.iter().flat_map(attributes).collect(),
        )?],
    )?;
    add("pg_database", vec![rows("pg_database", vec![database()])?])?;
    add(
        "pg_tables",
        vec![rows(
            "pg_tables",
            of_kind(relations, "r").map(table_row).collect(),
        )?],
    )?;
    add(
        "pg_views",
        vec![rows(
            "pg_views",
            of_kind(relations, "v").map(view_row).collect(),
        )?],
    )?;
    add(
        "pg_stat_user_tables",
        vec![rows("pg_stat_user_tables", Vec::new())?],
    )?;

    let mut descriptions = Vec::new();
    for relation in own {
        if let Some(text) = &relation.description {
            descriptions.push(description(relation.oid, PG_CLASS_OID, 0, text));
        }
        for (text, position) in relation.column_descriptions.iter().zip(1..) {
            if let Some(text) = text {
                descriptions.push(description(relation.oid, PG_CLASS_OID, position, text));
            }
        }
    }
    let mut batches = loosened(statics.pg_description.data(), &[])?;
    batches.push(batch(&statics.pg_description.schema(), &descriptions)?);
    add("pg_description", batches)?;

    let lists = ["proacl", "proconfig"];
    let mut batches = loosened(statics.pg_proc.data(), &lists)?;
    let functions: Vec<Row> = functions::ALL
        .iter()
        .zip(FIRST_FUNCTION_OID..)
        .map(|(function, oid)| procedure(function, oid))
        .collect();
    let columns = with_lists(&statics.pg_proc.schema(), &lists);
    batches.push(batch(&columns, &functions)?);
    add("pg_proc", batches)?;
    Ok(tables)
}

/// The same batches with columns that may be NULL, as those that are made here, and some without
/// values: lists that came as text.
fn loosened(batches: &[RecordBatch], lists: &[&str]) -> Result<Vec<RecordBatch>> {
    batches
        .iter()
        .map(|rows| {
            let columns = with_lists(&rows.schema(), lists);
            let empty = batch(&columns, &[])?;
            let values = rows.columns().iter().zip(columns.fields());
            let values =
                values.map(
                    |(column, field)| match lists.contains(&field.name().as_str()) {
                        true => new_null_array(field.data_type(), rows.num_rows()),
                        false => Arc::clone(column),
                    },
                );
            Ok(RecordBatch::try_new(empty.schema(), values.collect())?)
        })
        .collect()
}

/// The tables that are about who asks.
pub fn of_asker(asker: &Asker) -> Result<BTreeMap<String, Arc<dyn TableProvider>>> {
    let settings = asker.settings.iter().map(|(name, value)| {
        let row: Row = vec![
            ("name", (*name).into()),
            ("setting", value.clone().into()),
            ("category", "vramscope".into()),
            ("context", "user".into()),
            ("vartype", "string".into()),
            ("source", "session".into()),
            ("reset_val", value.clone().into()),
            ("pending_restart", false.into()),
        ];
        row
    });
    let settings = batch(&schema(SETTINGS), &settings.collect::<Vec<_>>())?;
    let owner = (OWNER, OWNER_OID);
    // Whoever asks: not the owner, whatever their name is.
    let user = (asker.user.as_str(), OWNER_OID + 1);
    let roles: Vec<Row> = [owner, user]
        .into_iter()
        .map(|(name, oid)| {
            vec![
                ("rolname", name.into()),
                ("rolsuper", false.into()),
                ("rolinherit", true.into()),
                ("rolcreaterole", false.into()),
                ("rolcreatedb", false.into()),
                ("rolcanlogin", (oid != OWNER_OID).into()),
                ("rolreplication", false.into()),
                ("rolconnlimit", Cell::Number(-1)),
                ("rolbypassrls", false.into()),
                ("oid", oid.into()),
                ("usename", name.into()),
                ("usesysid", oid.into()),
                ("usecreatedb", false.into()),
                ("usesuper", false.into()),
            ]
        })
        .collect();
    let one = |columns: &[(&str, char)]| provider(vec![batch(&schema(columns), &roles)?]);
    let none = |columns: &[(&str, char)]| provider(vec![batch(&schema(columns), &[])?]);
    Ok(BTreeMap::from([
        ("pg_settings".to_string(), provider(vec![settings])?),
        ("pg_roles".to_string(), one(ROLES)?),
        ("pg_authid".to_string(), one(ROLES)?),
        ("pg_user".to_string(), one(USERS)?),
        // What others do is nobody's business here; `query_log` is for those who may see it.
        ("pg_stat_activity".to_string(), none(ACTIVITY)?),
        ("pg_locks".to_string(), none(LOCKS)?),
        ("pg_indexes".to_string(), none(INDEXES)?),
        ("pg_sequences".to_string(), none(SEQUENCES)?),
        ("pg_shadow".to_string(), none(USERS)?),
        ("pg_group".to_string(), none(GROUPS)?),
    ]))
}

const SETTINGS: &[(&str, char)] = &[
    ("name", 't'),
    ("setting", 't'),
    ("unit", 't'),
    ("category", 't'),
    ("short_desc", 't'),
    ("extra_desc", 't'),
    ("context", 't'),
    ("vartype", 't'),
    ("source", 't'),
    ("min_val", 't'),
    ("max_val", 't'),
    ("enumvals", 't'),
    ("boot_val", 't'),
    ("reset_val", 't'),
    ("sourcefile", 't'),
    ("sourceline", 'i'),
    ("pending_restart", 'b'),
];
const ROLES: &[(&str, char)] = &[
    ("rolname", 't'),
    ("rolsuper", 'b'),
    ("rolinherit", 'b'),
    ("rolcreaterole", 'b'),
    ("rolcreatedb", 'b'),
    ("rolcanlogin", 'b'),
    ("rolreplication", 'b'),
    ("rolconnlimit", 'i'),
    ("rolpassword", 't'),
    ("rolvaliduntil", 't'),
    ("rolbypassrls", 'b'),
    ("rolconfig", 't'),
    ("oid", 'i'),
];
const USERS: &[(&str, char)] = &[
    ("usename", 't'),
    ("usesysid", 'i'),
    ("usecreatedb", 'b'),
    ("usesuper", 'b'),
    ("passwd", 't'),
];
const ACTIVITY: &[(&str, char)] = &[
    ("datid", 'i'),
    ("datname", 't'),
    ("pid", 'i'),
    ("usesysid", 'i'),
    ("usename", 't'),
    ("application_name", 't'),
    ("client_addr", 't'),
    ("state", 't'),
    ("query", 't'),
];
const LOCKS: &[(&str, char)] = &[
    ("locktype", 't'),
    ("database", 'i'),
    ("relation", 'i'),
    ("pid", 'i'),
    ("mode", 't'),
    ("granted", 'b'),
];
const INDEXES: &[(&str, char)] = &[
    ("schemaname", 't'),
    ("tablename", 't'),
    ("indexname", 't'),
    ("tablespace", 't'),
    ("indexdef", 't'),
];
const SEQUENCES: &[(&str, char)] = &[("schemaname", 't'), ("sequencename", 't')];
const GROUPS: &[(&str, char)] = &[("groname", 't'), ("grosysid", 'i')];

fn of_kind<'a>(relations: &'a [Relation], kind: &'a str) -> impl Iterator<Item = &'a Relation> {
    relations
        .iter()
        .filter(move |relation| relation.kind == kind)
}

fn namespaces() -> Vec<Row> {
    [
        (PG_CATALOG_OID, "pg_catalog"),
        (PUBLIC_OID, "public"),
        (INFORMATION_OID, "information_schema"),
    ]
    .into_iter()
    .map(|(oid, name)| {
        vec![
            ("oid", oid.into()),
            ("nspname", name.into()),
            ("nspowner", OWNER_OID.into()),
        ]
    })
    .collect()
}

fn class(relation: &Relation) -> Row {
    let columns = i64::try_from(relation.columns.fields().len()).unwrap_or(0);
    vec![
        ("oid", relation.oid.into()),
        ("relname", relation.name.clone().into()),
        ("relnamespace", relation.namespace.into()),
        ("relowner", OWNER_OID.into()),
        // Not counted: PostgreSQL says -1 of what was never analysed.
        ("reltuples", Cell::Number(-1)),
        ("relkind", relation.kind.into()),
        ("relpersistence", "p".into()),
        ("relnatts", Cell::Number(columns)),
        ("relispopulated", true.into()),
        ("relreplident", "n".into()),
    ]
}

fn attributes(relation: &Relation) -> Vec<Row> {
    let fields = relation.columns.fields().iter().zip(1..);
    fields
        .map(|(field, position)| {
            let kind = pg_type(field);
            let collation = if is_text(field.data_type()) { 100 } else { 0 };
            let width = match kind.name() {
                "bool" | "char" => 1,
                "int2" => 2,
                "int4" | "float4" | "date" | "oid" => 4,
                "int8" | "float8" | "timestamp" | "timestamptz" | "time" => 8,
                _ => -1,
            };
            vec![
                ("attrelid", relation.oid.into()),
                ("attname", field.name().clone().into()),
                ("atttypid", Cell::Number(i64::from(kind.oid()))),
                ("attlen", width.into()),
                ("attnum", position.into()),
                ("attstattarget", Cell::Number(-1)),
                ("attcacheoff", Cell::Number(-1)),
                ("atttypmod", Cell::Number(-1)),
                ("attbyval", (width > 0).into()),
                ("attalign", if width == 8 { "d" } else { "i" }.into()),
                ("attstorage", if width > 0 { "p" } else { "x" }.into()),
                ("attnotnull", (!field.is_nullable()).into()),
                ("attislocal", true.into()),
                ("attcollation", collation.into()),
            ]
        })
        .collect()
}

fn database() -> Row {
    vec![
        ("oid", DATABASE_OID.into()),
        ("datname", DATABASE.into()),
        ("datdba", OWNER_OID.into()),
        ("encoding", 6.into()),
        ("datlocprovider", "c".into()),
        ("datcollate", "C".into()),
        ("datctype", "C".into()),
        ("datallowconn", true.into()),
        ("datconnlimit", Cell::Number(-1)),
        ("dattablespace", 1663.into()),
    ]
}

fn table_row(relation: &Relation) -> Row {
    vec![
        ("schemaname", relation.schema.into()),
        ("tablename", relation.name.clone().into()),
        ("tableowner", OWNER.into()),
    ]
}

fn view_row(relation: &Relation) -> Row {
    vec![
        ("schemaname", relation.schema.into()),
        ("viewname", relation.name.clone().into()),
        ("viewowner", OWNER.into()),
        ("definition", relation.definition.unwrap_or_default().into()),
    ]
}

fn description(object: i32, class: i32, column: i32, text: &str) -> Row {
    vec![
        ("objoid", object.into()),
        ("classoid", class.into()),
        ("objsubid", column.into()),
        ("description", text.into()),
    ]
}

fn procedure(function: &functions::Function, oid: i32) -> Row {
    vec![
        ("oid", oid.into()),
        ("proname", function.name.into()),
        ("pronamespace", PUBLIC_OID.into()),
        ("proowner", OWNER_OID.into()),
        ("prolang", INTERNAL.into()),
        ("prokind", if function.aggregate { "a" } else { "f" }.into()),
        ("proretset", (function.returns == "table").into()),
        ("provolatile", "i".into()),
        ("proparallel", "s".into()),
        // The type `record`: what it returns is a text of the reference.
        ("prorettype", 2249.into()),
        ("prosrc", function.name.into()),
    ]
}
