//! `information_schema`, as the SQL standard has it and PostgreSQL spells it.

use std::sync::Arc;

use datafusion::catalog::{SchemaProvider, TableProvider};
use datafusion::error::Result;
use vramscope_queries::functions;

use super::system::type_name;
use super::table::{Row, batch, provider, schema};
use super::{DATABASE, OWNER, Relation, schema_of};
use crate::doors::postgres::rows::pg_type;

/// Columns of the tables that have rows, and of those that clients join and find empty.
const SCHEMATA: &[(&str, char)] = &[
    ("catalog_name", 't'),
    ("schema_name", 't'),
    ("schema_owner", 't'),
    ("default_character_set_catalog", 't'),
    ("default_character_set_schema", 't'),
    ("default_character_set_name", 't'),
    ("sql_path", 't'),
];
const TABLES: &[(&str, char)] = &[
    ("table_catalog", 't'),
    ("table_schema", 't'),
    ("table_name", 't'),
    ("table_type", 't'),
    ("self_referencing_column_name", 't'),
    ("reference_generation", 't'),
    ("user_defined_type_catalog", 't'),
    ("user_defined_type_schema", 't'),
    ("user_defined_type_name", 't'),
    ("is_insertable_into", 't'),
    ("is_typed", 't'),
    ("commit_action", 't'),
];
const VIEWS: &[(&str, char)] = &[
    ("table_catalog", 't'),
    ("table_schema", 't'),
    ("table_name", 't'),
    ("view_definition", 't'),
    ("check_option", 't'),
    ("is_updatable", 't'),
    ("is_insertable_into", 't'),
    ("is_trigger_updatable", 't'),
    ("is_trigger_deletable", 't'),
    ("is_trigger_insertable_into", 't'),
];
const COLUMNS: &[(&str, char)] = &[
    ("table_catalog", 't'),
    ("table_schema", 't'),
    ("table_name", 't'),
    ("column_name", 't'),
    ("ordinal_position", 'i'),
    ("column_default", 't'),
    ("is_nullable", 't'),
    ("data_type", 't'),
    ("character_maximum_length", 'i'),
    ("character_octet_length", 'i'),
    ("numeric_precision", 'i'),
    ("numeric_precision_radix", 'i'),
    ("numeric_scale", 'i'),
    ("datetime_precision", 'i'),
    ("interval_type", 't'),
    ("interval_precision", 'i'),
    ("character_set_name", 't'),
    ("collation_name", 't'),
    ("domain_name", 't'),
    ("udt_catalog", 't'),
    ("udt_schema", 't'),
    ("udt_name", 't'),
    ("is_self_referencing", 't'),
    ("is_identity", 't'),
    ("is_generated", 't'),
    ("generation_expression", 't'),
    ("is_updatable", 't'),
];
const ROUTINES: &[(&str, char)] = &[
    ("specific_catalog", 't'),
    ("specific_schema", 't'),
    ("specific_name", 't'),
    ("routine_catalog", 't'),
    ("routine_schema", 't'),
    ("routine_name", 't'),
    ("routine_type", 't'),
    ("data_type", 't'),
    ("routine_definition", 't'),
    ("external_language", 't'),
];
const TABLE_CONSTRAINTS: &[(&str, char)] = &[
    ("constraint_catalog", 't'),
    ("constraint_schema", 't'),
    ("constraint_name", 't'),
    ("table_catalog", 't'),
    ("table_schema", 't'),
    ("table_name", 't'),
    ("constraint_type", 't'),
    ("is_deferrable", 't'),
    ("initially_deferred", 't'),
    ("enforced", 't'),
];
const KEY_COLUMN_USAGE: &[(&str, char)] = &[
    ("constraint_catalog", 't'),
    ("constraint_schema", 't'),
    ("constraint_name", 't'),
    ("table_catalog", 't'),
    ("table_schema", 't'),
    ("table_name", 't'),
    ("column_name", 't'),
    ("ordinal_position", 'i'),
    ("position_in_unique_constraint", 'i'),
];
const CONSTRAINT_COLUMN_USAGE: &[(&str, char)] = &[
    ("table_catalog", 't'),
    ("table_schema", 't'),
    ("table_name", 't'),
    ("column_name", 't'),
    ("constraint_catalog", 't'),
    ("constraint_schema", 't'),
    ("constraint_name", 't'),
];
const REFERENTIAL_CONSTRAINTS: &[(&str, char)] = &[
    ("constraint_catalog", 't'),
    ("constraint_schema", 't'),
    ("constraint_name", 't'),
    ("unique_constraint_catalog", 't'),
    ("unique_constraint_schema", 't'),
    ("unique_constraint_name", 't'),
    ("match_option", 't'),
    ("update_rule", 't'),
    ("delete_rule", 't'),
];
const TABLE_PRIVILEGES: &[(&str, char)] = &[
    ("grantor", 't'),
    ("grantee", 't'),
    ("table_catalog", 't'),
    ("table_schema", 't'),
    ("table_name", 't'),
    ("privilege_type", 't'),
    ("is_grantable", 't'),
    ("with_hierarchy", 't'),
];

/// The schema with its tables.
pub fn tables(relations: &[Relation]) -> Result<Arc<dyn SchemaProvider>> {
    let own: Vec<&Relation> = relations
        .iter()
        .filter(|relation| relation.schema == "public")
        .collect();
    let of = |columns, rows: Vec<Row>| -> Result<Arc<dyn TableProvider>> {
        provider(vec![batch(&schema(columns), &rows)?])
    };
    schema_of(vec![
        ("schemata", of(SCHEMATA, schemata())?),
        ("tables", of(TABLES, relations.iter().map(table).collect())?),
        (
            "views",
            of(
                VIEWS,
                own.iter().filter_map(|relation| view(relation)).collect(),
            )?,
        ),
        (
            "columns",
            of(COLUMNS, relations.iter().flat_map(columns).collect())?,
        ),
        ("routines", of(ROUTINES, routines())?),
        (
            "table_privileges",
            of(
                TABLE_PRIVILEGES,
                own.iter().map(|relation| privilege(relation)).collect(),
            )?,
        ),
        ("table_constraints", of(TABLE_CONSTRAINTS, Vec::new())?),
        ("key_column_usage", of(KEY_COLUMN_USAGE, Vec::new())?),
        (
            "constraint_column_usage",
            of(CONSTRAINT_COLUMN_USAGE, Vec::new())?,
        ),
        (
            "referential_constraints",
            of(REFERENTIAL_CONSTRAINTS, Vec::new())?,
        ),
    ])
}

fn schemata() -> Vec<Row> {
    ["information_schema", "pg_catalog", "public"]
        .into_iter()
        .map(|name| {
            vec![
                ("catalog_name", DATABASE.into()),
                ("schema_name", name.into()),
                ("schema_owner", OWNER.into()),
            ]
        })
        .collect()
}

fn table(relation: &Relation) -> Row {
    let kind = match relation.kind {
        "v" => "VIEW",
        _ => "BASE TABLE",
    };
    vec![
        ("table_catalog", DATABASE.into()),
        ("table_schema", relation.schema.into()),
        ("table_name", relation.name.clone().into()),
        ("table_type", kind.into()),
        ("is_insertable_into", "NO".into()),
        ("is_typed", "NO".into()),
    ]
}

fn view(relation: &Relation) -> Option<Row> {
    let definition = relation.definition?;
    Some(vec![
        ("table_catalog", DATABASE.into()),
        ("table_schema", relation.schema.into()),
        ("table_name", relation.name.clone().into()),
        ("view_definition", definition.into()),
        ("check_option", "NONE".into()),
        ("is_updatable", "NO".into()),
        ("is_insertable_into", "NO".into()),
        ("is_trigger_updatable", "NO".into()),
        ("is_trigger_deletable", "NO".into()),
        ("is_trigger_insertable_into", "NO".into()),
    ])
}

fn columns(relation: &Relation) -> Vec<Row> {
    let fields = relation.columns.fields().iter().zip(1..);
    fields
        .map(|(field, position)| {
            let kind = pg_type(field);
            let mut row: Row = vec![
                ("table_catalog", DATABASE.into()),
                ("table_schema", relation.schema.into()),
                ("table_name", relation.name.clone().into()),
                ("column_name", field.name().clone().into()),
                ("ordinal_position", position.into()),
                (
                    "is_nullable",
                    if field.is_nullable() { "YES" } else { "NO" }.into(),
                ),
                ("data_type", type_name(&kind).into()),
                ("udt_catalog", DATABASE.into()),
                ("udt_schema", "pg_catalog".into()),
                ("udt_name", kind.name().into()),
                ("is_self_referencing", "NO".into()),
                ("is_identity", "NO".into()),
                ("is_generated", "NEVER".into()),
                ("is_updatable", "NO".into()),
            ];
            let precision = match kind.name() {
                "int2" => Some(16),
                "int4" => Some(32),
                "int8" => Some(64),
                "float4" => Some(24),
                "float8" => Some(53),
                _ => None,
            };
            if let Some(precision) = precision {
                row.push(("numeric_precision", precision.into()));
                row.push(("numeric_precision_radix", 2.into()));
            }
            match kind.name() {
                "int2" | "int4" | "int8" => row.push(("numeric_scale", 0.into())),
                "timestamp" | "timestamptz" => row.push(("datetime_precision", 6.into())),
                "date" => row.push(("datetime_precision", 0.into())),
                _ => {}
            }
            row
        })
        .collect()
}

fn routines() -> Vec<Row> {
    functions::ALL
        .iter()
        .map(|function| {
            vec![
                ("specific_catalog", DATABASE.into()),
                ("specific_schema", "public".into()),
                ("specific_name", function.name.into()),
                ("routine_catalog", DATABASE.into()),
                ("routine_schema", "public".into()),
                ("routine_name", function.name.into()),
                ("routine_type", "FUNCTION".into()),
                ("data_type", function.returns.to_ascii_lowercase().into()),
            ]
        })
        .collect()
}

fn privilege(relation: &Relation) -> Row {
    vec![
        ("grantor", OWNER.into()),
        ("grantee", "PUBLIC".into()),
        ("table_catalog", DATABASE.into()),
        ("table_schema", relation.schema.into()),
        ("table_name", relation.name.clone().into()),
        ("privilege_type", "SELECT".into()),
        ("is_grantable", "NO".into()),
        ("with_hierarchy", "YES".into()),
    ]
}
