//! The operator `||` of texts as a function.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Schema};
use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, exec_err};
use datafusion::error::Result;
use datafusion::logical_expr::expr::ScalarFunction;
use datafusion::logical_expr::type_coercion::binary::BinaryTypeCoercer;
use datafusion::logical_expr::{
    BinaryExpr, ColumnarValue, Expr, ExprSchemable, Operator, ScalarFunctionArgs, ScalarUDF,
    ScalarUDFImpl, Signature, Volatility,
};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{self, Column};

pub(super) const NAME: &str = "text_concat";

pub(super) fn function() -> ScalarUDF {
    ScalarUDF::from(Concatenate {
        signature: Signature::user_defined(Volatility::Immutable),
    })
}

/// `a || b` of texts as a call of the function; of lists the planner has made one already.
pub(super) fn rewrite(
    operator: BinaryExpr,
    function: &Arc<ScalarUDF>,
    schema: &DFSchema,
) -> Result<Transformed<Expr>> {
    if operator.op != Operator::StringConcat {
        return Ok(Transformed::no(Expr::BinaryExpr(operator)));
    }
    // What has no type is for the engine to complain of.
    let is_text = |side: &Expr| side.get_type(schema).is_ok_and(|found| !found.is_nested());
    if !is_text(&operator.left) || !is_text(&operator.right) {
        return Ok(Transformed::no(Expr::BinaryExpr(operator)));
    }
    let arguments = vec![*operator.left, *operator.right];
    let call = ScalarFunction::new_udf(Arc::clone(function), arguments);
    Ok(Transformed::yes(Expr::ScalarFunction(call)))
}

/// NULL where one side is, unlike `concat`.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Concatenate {
    signature: Signature,
}

impl ScalarUDFImpl for Concatenate {
    fn name(&self) -> &str {
        NAME
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        let [left, right] = types else {
            return exec_err!("{NAME} takes two texts");
        };
        let sides = BinaryTypeCoercer::new(left, &Operator::StringConcat, right);
        let (left, right) = sides.get_input_types()?;
        Ok(vec![left, right])
    }

    fn return_type(&self, types: &[DataType]) -> Result<DataType> {
        let [left, right] = types else {
            return exec_err!("{NAME} takes two texts");
        };
        BinaryTypeCoercer::new(left, &Operator::StringConcat, right).get_result_type()
    }

    /// As the engine's operator does it.
    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let are_constant = arguments.args.iter().all(super::is_constant);
        let rows = if are_constant {
            1
        } else {
            arguments.number_rows
        };
        let columns = arguments.args.into_iter();
        let columns = columns.map(|column| column.into_array(rows));
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let schema = Arc::new(Schema::new(arguments.arg_fields));
        let batch = RecordBatch::try_new(Arc::clone(&schema), columns)?;
        let side = |index| Arc::new(Column::new("", index)) as Arc<dyn PhysicalExpr>;
        let operator = expressions::binary(side(0), Operator::StringConcat, side(1), &schema)?;
        let made = operator.evaluate(&batch)?;
        match are_constant {
            true => {
                let one = made.into_array(1)?;
                let one = datafusion::common::ScalarValue::try_from_array(&one, 0)?;
                Ok(ColumnarValue::Scalar(one))
            }
            false => Ok(made),
        }
    }
}
