//! `same_text`: whether a text is a word, without a call for every row.
//!
//! Questions over events compare texts of a few words (`op = 'free'`, `memory_kind = 'device'`) in
//! every row. The general comparison looks up two lengths and calls `memcmp` for each; here eight
//! bytes are one number. [`SameTextInsteadOfEquals`] puts it in place of `column = 'word'` once all
//! else is planned: what prunes files by statistics still sees the comparison.
//!
//! Invariant: NULL stays NULL, and the answer is the comparison's.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, StringArray};
use arrow::buffer::BooleanBuffer;
use arrow::compute::kernels::cmp;
use arrow::datatypes::{DataType, Field, FieldRef, Schema};
use datafusion::common::ScalarValue;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::Result;
use datafusion::logical_expr::{
    ColumnarValue, Operator, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl,
    Signature, Volatility,
};
use datafusion::physical_expr::expressions::{BinaryExpr, Column, Literal};
use datafusion::physical_expr::{PhysicalExpr, ScalarFunctionExpr};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};

/// The function.
pub(super) fn function() -> ScalarUDF {
    let texts = vec![DataType::Utf8, DataType::Utf8];
    ScalarUDF::new_from_impl(SameText {
        signature: Signature::exact(texts, Volatility::Immutable),
    })
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct SameText {
    signature: Signature,
}

impl ScalarUDFImpl for SameText {
    fn name(&self) -> &str {
        "same_text"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _arguments: &[DataType]) -> Result<DataType> {
        Ok(DataType::Boolean)
    }

    /// As the comparison that it stands for: a plan's columns may not change by it.
    fn return_field_from_args(&self, arguments: ReturnFieldArgs) -> Result<FieldRef> {
        let nullable = arguments.arg_fields.iter().any(|field| field.is_nullable());
        Ok(Arc::new(Field::new(
            self.name(),
            DataType::Boolean,
            nullable,
        )))
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        if let [
            ColumnarValue::Array(texts),
            ColumnarValue::Scalar(ScalarValue::Utf8(Some(word))),
        ] = arguments.args.as_slice()
        {
            let same = same(texts.as_string(), word.as_bytes());
            return Ok(ColumnarValue::Array(Arc::new(same)));
        }
        let arrays = ColumnarValue::values_to_arrays(&arguments.args)?;
        let same = cmp::eq(arrays[0].as_string::<i32>(), arrays[1].as_string::<i32>())?;
        Ok(ColumnarValue::Array(Arc::new(same) as ArrayRef))
    }
}

fn same(texts: &StringArray, word: &[u8]) -> BooleanArray {
    const BYTES: usize = size_of::<u64>();
    let (offsets, bytes) = (texts.value_offsets(), texts.value_data());
    let head = word.len().min(BYTES);
    let mut wanted = [0; BYTES];
    wanted[..head].copy_from_slice(&word[..head]);
    let wanted = u64::from_le_bytes(wanted);
    // Of no byte there is nothing to keep, and a shift by all bits is none.
    let kept = u64::MAX.checked_shr(64 - 8 * head as u32).unwrap_or(0);
    // Without a branch on what a row holds: half of the rows are one word and half another, in no
    // order, and a wrong guess costs more than all the rest.
    let same = BooleanBuffer::collect_bool(texts.len(), move |row| {
        let (from, to) = (offsets[row] as usize, offsets[row + 1] as usize);
        let mut number = [0; BYTES];
        match bytes.get(from..from + BYTES) {
            Some(first) => number.copy_from_slice(first),
            None => number[..bytes.len() - from].copy_from_slice(&bytes[from..]),
        }
        let is_head = u64::from_le_bytes(number) & kept == wanted;
        let same = (to - from == word.len()) & is_head;
        same && (word.len() <= BYTES || bytes[from + BYTES..to] == word[BYTES..])
    });
    BooleanArray::new(same, texts.nulls().cloned())
}

/// Puts `same_text` in place of comparisons in projections. Not in filters: a column that a filter
/// compares with a word is a constant to the planner, which has left it out of sort orders.
#[derive(Debug)]
pub(crate) struct SameTextInsteadOfEquals {
    function: Arc<ScalarUDF>,
}

impl Default for SameTextInsteadOfEquals {
    fn default() -> Self {
        Self {
            function: Arc::new(function()),
        }
    }
}

impl PhysicalOptimizerRule for SameTextInsteadOfEquals {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let config = Arc::new(config.clone());
        plan.transform_up(|plan| self.of_node(plan, &config)).data()
    }

    fn name(&self) -> &str {
        "same_text_instead_of_equals"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

impl SameTextInsteadOfEquals {
    fn of_node(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &Arc<ConfigOptions>,
    ) -> Result<Transformed<Arc<dyn ExecutionPlan>>> {
        if let Some(projection) = plan.downcast_ref::<ProjectionExec>() {
            let schema = projection.input().schema();
            let mut changed = false;
            let mut columns = Vec::with_capacity(projection.expr().len());
            for column in projection.expr() {
                let quick = self.quick(Arc::clone(&column.expr), &schema, config)?;
                changed |= quick.transformed;
                columns.push(ProjectionExpr {
                    expr: quick.data,
                    alias: column.alias.clone(),
                });
            }
            if changed {
                let quick = ProjectionExec::try_new(columns, Arc::clone(projection.input()))?;
                return Ok(Transformed::yes(Arc::new(quick)));
            }
        }
        Ok(Transformed::no(plan))
    }

    fn quick(
        &self,
        expression: Arc<dyn PhysicalExpr>,
        schema: &Schema,
        config: &Arc<ConfigOptions>,
    ) -> Result<Transformed<Arc<dyn PhysicalExpr>>> {
        expression.transform_up(|inner| {
            let Some([column, word]) = column_and_word(&inner, schema) else {
                return Ok(Transformed::no(inner));
            };
            let arguments = vec![Arc::clone(column), Arc::clone(word)];
            let function = Arc::clone(&self.function);
            let config = Arc::clone(config);
            let call = ScalarFunctionExpr::try_new(function, arguments, schema, config)?;
            Ok(Transformed::yes(Arc::new(call)))
        })
    }
}

/// Of `column = 'word'`, either way round; both are `Utf8`.
fn column_and_word<'a>(
    expression: &'a Arc<dyn PhysicalExpr>,
    schema: &Schema,
) -> Option<[&'a Arc<dyn PhysicalExpr>; 2]> {
    let comparison = expression
        .downcast_ref::<BinaryExpr>()
        .filter(|binary| *binary.op() == Operator::Eq)?;
    let (left, right) = (comparison.left(), comparison.right());
    let is_text = |side: &Arc<dyn PhysicalExpr>| {
        let column = side.downcast_ref::<Column>();
        column.is_some_and(|column| {
            let field = schema.fields().get(column.index());
            field.is_some_and(|field| *field.data_type() == DataType::Utf8)
        })
    };
    let is_word = |side: &Arc<dyn PhysicalExpr>| {
        let literal = side.downcast_ref::<Literal>();
        literal.is_some_and(|literal| matches!(literal.value(), ScalarValue::Utf8(Some(_))))
    };
    if is_text(left) && is_word(right) {
        Some([left, right])
    } else if is_word(left) && is_text(right) {
        Some([right, left])
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use arrow::util::pretty::pretty_format_batches;
    use datafusion::execution::SessionStateBuilder;
    use datafusion::prelude::SessionContext;

    use super::*;

    const WORDS: [&str; 12] = [
        "",
        "a",
        "free",
        "freed",
        "fre",
        "alloc",
        "12345678",
        "123456789",
        "12345678x",
        "ünïcode",
        "device\0",
        "vmm_physical_of_some_length",
    ];

    /// Every word against every other, at every place of an array and of a slice of it.
    #[test]
    fn words_are_compared_whole() {
        let texts: StringArray = WORDS.iter().flat_map(|word| [Some(*word), None]).collect();
        for start in 0..texts.len() {
            let slice = texts.slice(start, texts.len() - start);
            for word in WORDS {
                let got: Vec<Option<bool>> = same(&slice, word.as_bytes()).iter().collect();
                let wanted: Vec<Option<bool>> = slice
                    .iter()
                    .map(|text| text.map(|text| text == word))
                    .collect();
                assert_eq!(got, wanted, "{word:?} from {start}");
            }
        }
    }

    #[tokio::test]
    async fn answers_stay() {
        let state = SessionStateBuilder::new().with_default_features();
        let state =
            state.with_physical_optimizer_rule(Arc::new(SameTextInsteadOfEquals::default()));
        let with = SessionContext::new_with_state(state.build());
        let plain = SessionContext::new();
        let data = "(VALUES ('free', 1), ('alloc', 2), (NULL, 3), ('freed', 4)) AS t(op, n)";
        for (sql, calls) in [
            (
                "SELECT n FROM t WHERE op = 'free' OR op = 'alloc' ORDER BY n",
                false,
            ),
            (
                "SELECT op = 'free' AS is_free, NOT op = 'free', n FROM t ORDER BY n",
                true,
            ),
            ("SELECT count(*) FROM t WHERE 'free' = op AND n < 9", false),
            ("SELECT n FROM t WHERE op = NULL", false),
            ("SELECT n FROM t WHERE op <> 'free' ORDER BY n", false),
            ("SELECT n FROM t WHERE n = 2", false),
        ] {
            for session in [&with, &plain] {
                let table = format!("CREATE OR REPLACE TABLE t AS SELECT * FROM {data}");
                // Not known before it runs, so that nothing is computed while it is planned.
                session.sql(&table).await.unwrap().collect().await.unwrap();
            }
            let lines = async |session: &SessionContext, sql: &str| {
                let batches = session.sql(sql).await.unwrap().collect().await.unwrap();
                pretty_format_batches(&batches).unwrap().to_string()
            };
            assert_eq!(lines(&with, sql).await, lines(&plain, sql).await, "{sql}");
            let plan = lines(&with, &format!("EXPLAIN {sql}")).await;
            assert_eq!(plan.contains("same_text("), calls, "{plan}");
        }
    }
}
