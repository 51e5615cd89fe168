//! Functions that make much of little, with what they make in the books of the query's memory.
//!
//! The engine books what operators keep, not what a single call makes: `range(0, 1000000000)` is
//! eight gigabytes, `repeat('x', 1900000000)` two, and `s || s` doubles a text as often as it stands
//! there. These functions ask the query's memory pool before they make anything of size, and what
//! they made stays booked until the last part of it is let go ([`hold`]).
//!
//! Invariants:
//! - a result is what the engine's own function gives;
//! - at most [`PIECE`] bytes a thread are made without being booked: calls whose result may be larger
//!   ([`bounds`]) are made for fewer rows at a time, and for a single row they are booked first;
//! - constants are booked as long as the functions live, which are made for a query: the plan that
//!   holds them does not say when it is gone.

mod bounds;
mod concat;
mod hold;

use std::any::Any;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef};
use arrow::datatypes::{DataType, FieldRef};
use datafusion::common::ExprSchema;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::common::{DFSchema, config::ConfigOptions};
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool, MemoryReservation};
use datafusion::logical_expr::expr::ScalarFunction;
use datafusion::logical_expr::expr_rewriter::FunctionRewrite;
use datafusion::logical_expr::interval_arithmetic::Interval;
use datafusion::logical_expr::simplify::{ExprSimplifyResult, SimplifyContext};
use datafusion::logical_expr::sort_properties::{ExprProperties, SortProperties};
use datafusion::logical_expr::{
    ColumnarValue, Documentation, Expr, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF,
    ScalarUDFImpl, Signature,
};
use datafusion::optimizer::Analyzer;

use crate::sizes;
use bounds::{Bound, Call};

/// Results below this are not booked.
const SMALL: u64 = 16 << 10;
/// What is made at a time.
const PIECE: u64 = 16 << 20;

/// Replaces the functions of a session in the making by ones that book in a pool.
pub(super) fn book(
    mut builder: SessionStateBuilder,
    pool: &Arc<dyn MemoryPool>,
) -> SessionStateBuilder {
    let books = Books {
        pool: Arc::clone(pool),
        constants: Arc::new(MemoryConsumer::new("constants").register(pool)),
    };
    let functions = builder.scalar_functions().get_or_insert_default();
    if !functions.iter().any(|known| known.name() == concat::NAME) {
        functions.push(Arc::new(concat::function()));
    }
    let mut ours = Vec::new();
    for function in functions {
        if let Some(booked) = books.booked(function) {
            *function = Arc::clone(&booked);
            ours.push(booked);
        }
    }
    let analyzer = builder.analyzer().get_or_insert_with(Analyzer::new);
    let rewrites = &mut analyzer.function_rewrites;
    rewrites.retain(|rewrite| rewrite.name() != Rewrite::NAME);
    rewrites.push(Arc::new(Rewrite(ours)));
    builder
}

/// Puts this session's functions where a plan has the engine's own (a view that another session
/// planned, `[1] || [2]`), and a function in the place of the operator `||`.
#[derive(Debug)]
struct Rewrite(Vec<Arc<ScalarUDF>>);

impl Rewrite {
    const NAME: &'static str = "book_functions";

    fn ours(&self, name: &str) -> Option<&Arc<ScalarUDF>> {
        self.0.iter().find(|function| function.name() == name)
    }
}

impl FunctionRewrite for Rewrite {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn rewrite(
        &self,
        expression: Expr,
        schema: &DFSchema,
        _config: &ConfigOptions,
    ) -> Result<Transformed<Expr>> {
        match expression {
            Expr::ScalarFunction(ScalarFunction { func, args }) => {
                Ok(match self.ours(func.name()) {
                    Some(ours) => Transformed::yes(ScalarFunction::new_udf(Arc::clone(ours), args)),
                    None => Transformed::no(ScalarFunction { func, args }),
                }
                .update_data(Expr::ScalarFunction))
            }
            Expr::BinaryExpr(operator) => match self.ours(concat::NAME) {
                Some(ours) => concat::rewrite(operator, ours, schema),
                None => Ok(Transformed::no(Expr::BinaryExpr(operator))),
            },
            other => Ok(Transformed::no(other)),
        }
    }
}

/// Where a query's functions book.
#[derive(Clone)]
struct Books {
    pool: Arc<dyn MemoryPool>,
    constants: Arc<MemoryReservation>,
}

impl Books {
    /// A function that books here, if it is one that can make much of little.
    fn booked(&self, function: &ScalarUDF) -> Option<Arc<ScalarUDF>> {
        let bound = bounds::of(function.name())?;
        let found = function.inner();
        let inner = match (found.as_ref() as &dyn Any).downcast_ref::<Booked>() {
            Some(booked) => Arc::clone(&booked.inner),
            None => Arc::clone(found),
        };
        Some(Arc::new(ScalarUDF::new_from_impl(Booked {
            inner,
            bound,
            books: self.clone(),
        })))
    }
}

/// A function of the engine's, booked.
struct Booked {
    inner: Arc<dyn ScalarUDFImpl>,
    bound: Bound,
    books: Books,
}

impl Booked {
    /// Evaluates rows, as many at a time as may be made, and books what comes out.
    fn evaluate(
        &self,
        arguments: ScalarFunctionArgs,
        memory: &MemoryReservation,
        pieces: &mut Vec<ArrayRef>,
    ) -> Result<()> {
        let rows = arguments.number_rows;
        let bound = (self.bound)(&Call::new(&arguments.args, rows)?);
        if bound > PIECE && rows > 1 {
            let half = rows / 2;
            for (from, count) in [(0, half), (half, rows - half)] {
                self.evaluate(part(&arguments, from, count), memory, pieces)?;
            }
            return Ok(());
        }
        let before = memory.size();
        memory.try_grow(usize::try_from(bound).unwrap_or(usize::MAX))?;
        let piece = self.inner.invoke_with_args(arguments)?.into_array(rows)?;
        self.check(&piece, bound);
        memory.try_resize(before + piece.get_array_memory_size())?;
        pieces.push(piece);
        Ok(())
    }

    /// A bound that is too low is a mistake of ours; tests run with this.
    fn check(&self, made: &ArrayRef, bound: u64) {
        let name = self.inner.name();
        debug_assert!(
            sizes::bytes(made) <= bound,
            "{name}: more than {bound} bytes"
        );
    }

    fn constant(&self, arguments: ScalarFunctionArgs, bound: u64) -> Result<ColumnarValue> {
        let most = usize::try_from(bound).unwrap_or(usize::MAX);
        let constants = &self.books.constants;
        constants.try_grow(most)?;
        let made = self.inner.invoke_with_args(arguments);
        let size = match &made {
            Ok(ColumnarValue::Scalar(value)) => value.size(),
            Ok(ColumnarValue::Array(array)) => array.get_array_memory_size(),
            Err(_) => 0,
        };
        // Other calls book here too: only the difference is ours to give back.
        constants.shrink(most.saturating_sub(size));
        made
    }
}

/// Some rows of a call.
fn part(arguments: &ScalarFunctionArgs, from: usize, count: usize) -> ScalarFunctionArgs {
    let cut = |argument: &ColumnarValue| match argument {
        ColumnarValue::Array(array) => ColumnarValue::Array(array.slice(from, count)),
        ColumnarValue::Scalar(value) => ColumnarValue::Scalar(value.clone()),
    };
    ScalarFunctionArgs {
        args: arguments.args.iter().map(cut).collect(),
        number_rows: count,
        ..arguments.clone()
    }
}

fn is_constant(argument: &ColumnarValue) -> bool {
    matches!(argument, ColumnarValue::Scalar(_))
}

impl ScalarUDFImpl for Booked {
    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let is_constant = arguments.args.iter().all(is_constant);
        let rows = if is_constant {
            1
        } else {
            arguments.number_rows
        };
        let bound = (self.bound)(&Call::new(&arguments.args, rows)?);
        if bound <= SMALL {
            let made = self.inner.invoke_with_args(arguments)?;
            if let ColumnarValue::Array(array) = &made {
                self.check(array, bound);
            }
            return Ok(made);
        }
        if is_constant {
            return self.constant(arguments, bound);
        }
        let memory = MemoryConsumer::new(self.inner.name()).register(&self.books.pool);
        let mut pieces = Vec::new();
        self.evaluate(arguments, &memory, &mut pieces)?;
        let made = match pieces.as_slice() {
            [whole] => Arc::clone(whole),
            _ => {
                let size = memory.size();
                memory.try_grow(size)?;
                let parts: Vec<&dyn Array> = pieces.iter().map(AsRef::as_ref).collect();
                let whole = arrow::compute::concat(&parts)?;
                drop(pieces);
                memory.try_resize(whole.get_array_memory_size())?;
                whole
            }
        };
        Ok(ColumnarValue::Array(hold::hold(&made, memory)?))
    }

    /// What it becomes books as well: `concat_ws('', a, b)` is made a plain `concat`.
    fn simplify(&self, arguments: Vec<Expr>, info: &SimplifyContext) -> Result<ExprSimplifyResult> {
        let simpler = match self.inner.simplify(arguments, info)? {
            ExprSimplifyResult::Simplified(simpler) => simpler,
            original => return Ok(original),
        };
        let booked = simpler.transform_up(|part| match part {
            Expr::ScalarFunction(ScalarFunction { func, args }) => {
                let ours = self.books.booked(&func);
                let func = ours.unwrap_or(func);
                Ok(Transformed::yes(Expr::ScalarFunction(
                    ScalarFunction::new_udf(func, args),
                )))
            }
            other => Ok(Transformed::no(other)),
        })?;
        Ok(ExprSimplifyResult::Simplified(booked.data))
    }

    // The rest is as it was.

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn aliases(&self) -> &[String] {
        self.inner.aliases()
    }

    fn schema_name(&self, arguments: &[Expr]) -> Result<String> {
        self.inner.schema_name(arguments)
    }

    fn signature(&self) -> &Signature {
        self.inner.signature()
    }

    fn return_type(&self, types: &[DataType]) -> Result<DataType> {
        self.inner.return_type(types)
    }

    fn return_field_from_args(&self, arguments: ReturnFieldArgs) -> Result<FieldRef> {
        self.inner.return_field_from_args(arguments)
    }

    #[expect(deprecated)]
    fn display_name(&self, arguments: &[Expr]) -> Result<String> {
        self.inner.display_name(arguments)
    }

    #[expect(deprecated)]
    fn is_nullable(&self, arguments: &[Expr], schema: &dyn ExprSchema) -> bool {
        self.inner.is_nullable(arguments, schema)
    }

    fn is_strict(&self) -> bool {
        self.inner.is_strict()
    }

    fn short_circuits(&self) -> bool {
        self.inner.short_circuits()
    }

    fn evaluate_bounds(&self, input: &[&Interval]) -> Result<Interval> {
        self.inner.evaluate_bounds(input)
    }

    fn propagate_constraints(
        &self,
        interval: &Interval,
        inputs: &[&Interval],
    ) -> Result<Option<Vec<Interval>>> {
        self.inner.propagate_constraints(interval, inputs)
    }

    fn output_ordering(&self, inputs: &[ExprProperties]) -> Result<SortProperties> {
        self.inner.output_ordering(inputs)
    }

    fn preserves_lex_ordering(&self, inputs: &[ExprProperties]) -> Result<bool> {
        self.inner.preserves_lex_ordering(inputs)
    }

    fn strictly_order_preserving(&self, inputs: &[ExprProperties]) -> Result<bool> {
        self.inner.strictly_order_preserving(inputs)
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        self.inner.coerce_types(types)
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.inner.documentation()
    }
}

// Two of a name differ in nothing that a plan could tell.
impl PartialEq for Booked {
    fn eq(&self, other: &Self) -> bool {
        self.inner.name() == other.inner.name()
    }
}

impl Eq for Booked {}

impl Hash for Booked {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.inner.name().hash(state);
    }
}

impl fmt::Debug for Booked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
