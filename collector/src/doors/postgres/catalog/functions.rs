//! Functions of PostgreSQL that its clients call while they look around.
//!
//! All of them read nothing but the catalog and the connection's own settings.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, Int32Array, Int64Array, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Int64Type};
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, TypeSignature,
    Volatility,
};
use pgwire::api::Type;

use super::system::type_name;
use super::{Asker, DATABASE, Known, OWNER, OWNER_OID};
use crate::doors::postgres::failure::Failure;
use crate::doors::postgres::rows::pg_type;
use crate::doors::postgres::settings::SERVER_VERSION;

type Body = dyn Fn(&[ArrayRef], usize) -> Result<ArrayRef> + Send + Sync;

/// A function that takes whatever it is given.
struct Function {
    name: &'static str,
    signature: Signature,
    returns: DataType,
    body: Arc<Body>,
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Function {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && Arc::ptr_eq(&self.body, &other.body)
    }
}

impl Eq for Function {}

impl Hash for Function {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl ScalarUDFImpl for Function {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _arguments: &[DataType]) -> Result<DataType> {
        Ok(self.returns.clone())
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let rows = arguments.number_rows;
        let arrays: Vec<ArrayRef> = arguments
            .args
            .iter()
            .map(|argument| argument.to_array(rows))
            .collect::<Result<_>>()?;
        Ok(ColumnarValue::Array((self.body)(&arrays, rows)?))
    }
}

fn function(
    name: &'static str,
    returns: DataType,
    body: impl Fn(&[ArrayRef], usize) -> Result<ArrayRef> + Send + Sync + 'static,
) -> Arc<ScalarUDF> {
    let signature = Signature::one_of(
        vec![TypeSignature::Nullary, TypeSignature::VariadicAny],
        Volatility::Stable,
    );
    Arc::new(ScalarUDF::new_from_impl(Function {
        name,
        signature,
        returns,
        body: Arc::new(body),
    }))
}

fn constant_text(name: &'static str, text: impl Into<String>) -> Arc<ScalarUDF> {
    let text = text.into();
    function(name, DataType::Utf8, move |_, rows| {
        Ok(Arc::new(StringArray::from(vec![text.as_str(); rows])))
    })
}

fn constant_bool(name: &'static str, value: bool) -> Arc<ScalarUDF> {
    function(name, DataType::Boolean, move |_, rows| {
        Ok(Arc::new(BooleanArray::from(vec![value; rows])))
    })
}

fn null_text(name: &'static str) -> Arc<ScalarUDF> {
    function(name, DataType::Utf8, |_, rows| {
        Ok(Arc::new(StringArray::new_null(rows)))
    })
}

/// Numbers of an argument, whatever integer or text it is.
fn numbers(arguments: &[ArrayRef], at: usize) -> Result<Option<ArrayRef>> {
    match arguments.get(at) {
        None => Ok(None),
        Some(array) => Ok(Some(cast(array, &DataType::Int64)?)),
    }
}

fn texts(arguments: &[ArrayRef], at: usize) -> Result<Option<ArrayRef>> {
    match arguments.get(at) {
        None => Ok(None),
        Some(array) => Ok(Some(cast(array, &DataType::Utf8)?)),
    }
}

fn number(array: &Option<ArrayRef>, row: usize) -> Option<i32> {
    let array = array.as_ref()?.as_primitive::<Int64Type>();
    let value = array.is_valid(row).then(|| array.value(row))?;
    i32::try_from(value).ok()
}

fn text(array: &Option<ArrayRef>, row: usize) -> Option<&str> {
    let array = array.as_ref()?.as_string::<i32>();
    array.is_valid(row).then(|| array.value(row))
}

/// A text by the OID in the first argument.
fn by_oid(
    name: &'static str,
    find: impl Fn(i32) -> Option<String> + Send + Sync + 'static,
) -> Arc<ScalarUDF> {
    function(name, DataType::Utf8, move |arguments, rows| {
        let oids = numbers(arguments, 0)?;
        let found = (0..rows).map(|row| number(&oids, row).and_then(&find));
        Ok(Arc::new(StringArray::from_iter(found)))
    })
}

/// As PostgreSQL: the next unit from 10240 on, halves rounded away from zero.
fn size_pretty(bytes: i64) -> String {
    let mut number = i128::from(bytes);
    let units = ["bytes", "kB", "MB", "GB", "TB", "PB"];
    let mut unit = 0;
    // One bit more than the unit is kept, for the rounding at the end.
    let mut halved = false;
    while unit + 1 < units.len() && number.abs() >= if halved { 20_479 } else { 10_240 } {
        number /= if halved { 1024 } else { 512 };
        halved = true;
        unit += 1;
    }
    if halved {
        number = (number + number.signum()) / 2;
    }
    format!("{number} {}", units[unit])
}

/// What may be done with anything: reading.
fn has_privilege(name: &'static str) -> Arc<ScalarUDF> {
    function(name, DataType::Boolean, |arguments, rows| {
        let wanted = texts(arguments, arguments.len().saturating_sub(1))?;
        let may = (0..rows).map(|row| {
            let wanted = text(&wanted, row)?.to_ascii_uppercase();
            let reads = ["SELECT", "USAGE", "CONNECT", "EXECUTE", "MEMBER"];
            // Any of a list will do, as in PostgreSQL.
            Some(wanted.split(',').any(|one| reads.contains(&one.trim())))
        });
        Ok(Arc::new(BooleanArray::from_iter(may)))
    })
}

/// Functions that answer everybody the same.
pub fn fixed(known: &Arc<Known>) -> Vec<Arc<ScalarUDF>> {
    let mut all = vec![
        constant_text("version", format!("PostgreSQL {SERVER_VERSION}")),
        constant_text("current_database", DATABASE),
        constant_bool("pg_is_in_recovery", false),
        function("pg_size_pretty", DataType::Utf8, |arguments, rows| {
            let bytes = numbers(arguments, 0)?;
            let bytes = bytes
                .as_ref()
                .map(|array| array.as_primitive::<Int64Type>());
            let texts = (0..rows).map(|row| {
                let bytes = bytes?;
                bytes.is_valid(row).then(|| size_pretty(bytes.value(row)))
            });
            Ok(Arc::new(StringArray::from_iter(texts)))
        }),
        function("pg_get_userbyid", DataType::Utf8, |_, rows| {
            Ok(Arc::new(StringArray::from(vec![OWNER; rows])))
        }),
        function("pg_encoding_to_char", DataType::Utf8, |arguments, rows| {
            let codes = numbers(arguments, 0)?;
            let names = (0..rows).map(|row| match number(&codes, row)? {
                6 => Some("UTF8"),
                0 => Some("SQL_ASCII"),
                _ => Some(""),
            });
            Ok(Arc::new(StringArray::from_iter(names)))
        }),
        function("format_type", DataType::Utf8, |arguments, rows| {
            let oids = numbers(arguments, 0)?;
            let names = (0..rows).map(|row| {
                let oid = u32::try_from(number(&oids, row)?).ok()?;
                Some(match (oid, Type::from_oid(oid)) {
                    (0, _) => "-".to_string(),
                    (_, Some(kind)) => type_name(&kind),
                    (_, None) => "???".to_string(),
                })
            });
            Ok(Arc::new(StringArray::from_iter(names)))
        }),
        function("pg_typeof", DataType::Utf8, |arguments, rows| {
            let name = arguments.first().map(|argument| {
                let field = Field::new("", argument.data_type().clone(), true);
                type_name(&pg_type(&Arc::new(field)))
            });
            Ok(Arc::new(StringArray::from(vec![name; rows])))
        }),
    ];
    for name in [
        "pg_table_is_visible",
        "pg_function_is_visible",
        "pg_type_is_visible",
        "pg_operator_is_visible",
        "pg_collation_is_visible",
        "pg_opclass_is_visible",
        "pg_conversion_is_visible",
        "pg_ts_config_is_visible",
        "pg_ts_dict_is_visible",
        "pg_ts_parser_is_visible",
        "pg_ts_template_is_visible",
        "pg_statistics_obj_is_visible",
    ] {
        all.push(constant_bool(name, true));
    }
    for name in [
        "has_table_privilege",
        "has_any_column_privilege",
        "has_column_privilege",
        "has_schema_privilege",
        "has_database_privilege",
        "has_function_privilege",
        "has_sequence_privilege",
        "has_tablespace_privilege",
        "has_type_privilege",
        "has_language_privilege",
        "has_foreign_data_wrapper_privilege",
        "has_server_privilege",
        "pg_has_role",
    ] {
        all.push(has_privilege(name));
    }
    for name in [
        "pg_get_indexdef",
        "pg_get_triggerdef",
        "pg_get_ruledef",
        "pg_get_constraintdef",
        "pg_get_expr",
        "pg_get_partkeydef",
        "pg_get_serial_sequence",
        "pg_get_functiondef",
        "pg_get_function_sqlbody",
        "pg_get_statisticsobjdef",
        "pg_tablespace_location",
        "shobj_description",
        "inet_client_addr",
        "inet_server_addr",
    ] {
        all.push(null_text(name));
    }
    for name in [
        "pg_database_size",
        "pg_table_size",
        "pg_indexes_size",
        "pg_relation_size",
        "pg_total_relation_size",
    ] {
        // Not measured here, and so not known.
        all.push(function(name, DataType::Int64, |_, rows| {
            Ok(Arc::new(Int64Array::new_null(rows)))
        }));
    }
    all.extend(of_catalog(known));
    all
}

fn of_catalog(known: &Arc<Known>) -> Vec<Arc<ScalarUDF>> {
    let [a, b, c, d, e, f, g] = std::array::from_fn(|_| Arc::clone(known));
    vec![
        by_oid("obj_description", move |oid| {
            a.descriptions.get(&(oid, 0)).cloned()
        }),
        function("col_description", DataType::Utf8, move |arguments, rows| {
            let (oids, columns) = (numbers(arguments, 0)?, numbers(arguments, 1)?);
            let found = (0..rows).map(|row| {
                let key = (number(&oids, row)?, number(&columns, row)?);
                b.descriptions.get(&key).cloned()
            });
            Ok(Arc::new(StringArray::from_iter(found)))
        }),
        by_oid("pg_get_viewdef", move |oid| {
            c.definitions.get(&oid).cloned()
        }),
        by_oid("pg_get_function_result", move |oid| {
            d.results.get(&oid).cloned()
        }),
        by_oid("pg_get_function_arguments", move |oid| {
            e.arguments.get(&oid).cloned()
        }),
        by_oid("pg_get_function_identity_arguments", move |oid| {
            f.arguments.get(&oid).cloned()
        }),
        function("to_regclass", DataType::Int32, move |arguments, rows| {
            let names = texts(arguments, 0)?;
            let found = (0..rows).map(|row| g.oid("regclass", text(&names, row)?));
            Ok(Arc::new(Int32Array::from_iter(found)))
        }),
    ]
}

/// Functions that say something of who asks.
pub fn of_asker(asker: &Asker) -> Vec<Arc<ScalarUDF>> {
    let settings = asker.settings.clone();
    let pid = asker.pid;
    let user = asker.user.clone();
    vec![
        constant_text("session_user", asker.user.clone()),
        constant_text("current_role", asker.user.clone()),
        function("pg_backend_pid", DataType::Int32, move |_, rows| {
            Ok(Arc::new(Int32Array::from(vec![pid; rows])))
        }),
        function("current_setting", DataType::Utf8, move |arguments, rows| {
            let names = texts(arguments, 0)?;
            let may_miss = arguments
                .get(1)
                .and_then(|array| array.as_boolean_opt())
                .is_some_and(|array| !array.is_empty() && array.value(0));
            let mut values = Vec::with_capacity(rows);
            for row in 0..rows {
                let Some(name) = text(&names, row) else {
                    values.push(None);
                    continue;
                };
                let found = settings
                    .iter()
                    .find(|(known, _)| known.eq_ignore_ascii_case(name));
                match found {
                    Some((_, value)) => values.push(Some(value.clone())),
                    None if may_miss => values.push(None),
                    None => {
                        let failure = Failure::error(
                            "42704",
                            format!("unrecognized configuration parameter \"{name}\""),
                        );
                        return Err(DataFusionError::External(Box::new(failure)));
                    }
                }
            }
            Ok(Arc::new(StringArray::from(values)))
        }),
        by_oid("pg_get_userbyid", move |oid| {
            Some(if oid == OWNER_OID + 1 {
                user.clone()
            } else {
                OWNER.to_string()
            })
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_postgresql() {
        // From PostgreSQL's own regression test (src/test/regress/expected/dbsize.out).
        for (bytes, text) in [
            (10, "10 bytes"),
            (1000, "1000 bytes"),
            (1_000_000, "977 kB"),
            (1_000_000_000, "954 MB"),
            (1_000_000_000_000, "931 GB"),
            (1_000_000_000_000_000, "909 TB"),
            (10_239, "10239 bytes"),
            (10_240, "10 kB"),
            (10_485_247, "10239 kB"),
            (10_485_248, "10 MB"),
            (-10_240, "-10 kB"),
            (-1_000_000, "-977 kB"),
        ] {
            assert_eq!(size_pretty(bytes), text, "{bytes}");
        }
    }
}
