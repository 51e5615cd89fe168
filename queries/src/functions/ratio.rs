//! Aggregates that are a ratio of two sums: exact, and the same in whatever order rows come.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray};
use arrow::datatypes::{DataType, Field, FieldRef, Int64Type};
use datafusion::common::ScalarValue;
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::function::{AccumulatorArgs, StateFieldsArgs};
use datafusion::logical_expr::{
    Accumulator, AggregateUDF, AggregateUDFImpl, Signature, Volatility,
};
use vramscope_model::kv::kv_page_waste;

/// What one row adds to the part and to the whole; `None` for a row that adds to neither.
type Share = fn(i64, i64) -> Option<(i64, i64)>;

#[derive(Debug)]
struct Ratio {
    name: &'static str,
    signature: Signature,
    share: Share,
}

// Names are unique.
impl PartialEq for Ratio {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Ratio {}

impl Hash for Ratio {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl AggregateUDFImpl for Ratio {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _arguments: &[DataType]) -> Result<DataType> {
        Ok(DataType::Float64)
    }

    fn accumulator(&self, _arguments: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        Ok(Box::new(Sums {
            share: self.share,
            part: 0,
            whole: 0,
        }))
    }

    fn state_fields(&self, arguments: StateFieldsArgs) -> Result<Vec<FieldRef>> {
        let field = |what: &str| {
            let name = format!("{}[{what}]", arguments.name);
            Arc::new(Field::new(name, DataType::Int64, false))
        };
        Ok(vec![field("part"), field("whole")])
    }
}

#[derive(Debug)]
struct Sums {
    share: Share,
    part: i64,
    whole: i64,
}

impl Sums {
    fn add(&mut self, part: i64, whole: i64) -> Result<()> {
        let overflow =
            || DataFusionError::Execution("the sum of sizes exceeds 63 bits".to_string());
        self.part = self.part.checked_add(part).ok_or_else(overflow)?;
        self.whole = self.whole.checked_add(whole).ok_or_else(overflow)?;
        Ok(())
    }
}

impl Accumulator for Sums {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        let [first, second] = [0, 1].map(|index| values[index].as_primitive::<Int64Type>());
        for (first, second) in first.iter().zip(second.iter()) {
            let (Some(first), Some(second)) = (first, second) else {
                continue;
            };
            if let Some((part, whole)) = (self.share)(first, second) {
                self.add(part, whole)?;
            }
        }
        Ok(())
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        let [parts, wholes] = [0, 1].map(|index| states[index].as_primitive::<Int64Type>());
        for row in 0..parts.len() {
            self.add(parts.value(row), wholes.value(row))?;
        }
        Ok(())
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        Ok(vec![self.part.into(), self.whole.into()])
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        let ratio = (self.whole > 0).then(|| self.part as f64 / self.whole as f64);
        Ok(ScalarValue::Float64(ratio))
    }

    fn size(&self) -> usize {
        size_of_val(self)
    }
}

pub(super) fn all() -> Vec<AggregateUDF> {
    let two_numbers = || {
        Signature::exact(
            vec![DataType::Int64, DataType::Int64],
            Volatility::Immutable,
        )
    };
    let functions = [
        Ratio {
            name: "kv_page_waste_ratio",
            signature: two_numbers(),
            share: page_waste,
        },
        Ratio {
            name: "unusable_free_index",
            signature: two_numbers(),
            share: unusable,
        },
    ];
    functions.into_iter().map(AggregateUDF::from).collect()
}

fn page_waste(tokens: i64, page: i64) -> Option<(i64, i64)> {
    let waste = kv_page_waste(u64::try_from(tokens).ok()?, u64::try_from(page).ok()?)?;
    Some((
        i64::try_from(waste.wasted).ok()?,
        i64::try_from(waste.allocated).ok()?,
    ))
}

fn unusable(block: i64, request: i64) -> Option<(i64, i64)> {
    let part = if block < request { block } else { 0 };
    (block >= 0).then_some((part, block))
}
