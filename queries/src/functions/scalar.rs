//! Functions of one row.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, StringArray};
use arrow::datatypes::{DataType, Float64Type, Int64Type};
use datafusion::error::Result;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, TypeSignature,
    Volatility,
};
use vramscope_model::kv::kv_page_waste;
use vramscope_model::oom::{Growth, OomFacts, Residence};
use vramscope_model::rules;
use vramscope_model::settings::Settings;

/// A function of arrays of the types of its signature, all of one length.
#[derive(Debug)]
struct Scalar {
    name: &'static str,
    signature: Signature,
    returns: DataType,
    body: fn(&[ArrayRef]) -> Result<ArrayRef>,
}

// Names are unique.
impl PartialEq for Scalar {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Scalar {}

impl Hash for Scalar {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl ScalarUDFImpl for Scalar {
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
        let arrays = ColumnarValue::values_to_arrays(&arguments.args)?;
        Ok(ColumnarValue::Array((self.body)(&arrays)?))
    }
}

pub(super) fn all() -> Vec<ScalarUDF> {
    use DataType::{Float64, Int64, Utf8};
    let exact = |types: &[DataType]| TypeSignature::Exact(types.to_vec());
    let oom = [vec![Int64; 7], vec![Float64]].concat();
    let oom_in_traffic = [oom.clone(), vec![Int64; 4]].concat();
    let functions = [
        Scalar {
            name: "kv_page_waste",
            signature: Signature::new(exact(&[Int64, Int64]), Volatility::Immutable),
            returns: Int64,
            body: page_waste,
        },
        Scalar {
            name: "allocator_round",
            signature: Signature::one_of(
                vec![exact(&[Int64]), exact(&[Int64, Utf8])],
                Volatility::Immutable,
            ),
            returns: Int64,
            body: round,
        },
        Scalar {
            name: "oom_class",
            signature: Signature::one_of(
                vec![exact(&oom), exact(&oom_in_traffic)],
                Volatility::Immutable,
            ),
            returns: Utf8,
            body: oom_class,
        },
    ];
    functions.into_iter().map(ScalarUDF::from).collect()
}

/// A size; NULL and what is below 0 is none.
fn size(value: Option<i64>) -> Option<u64> {
    value.and_then(|value| u64::try_from(value).ok())
}

fn signed(value: u64) -> Option<i64> {
    i64::try_from(value).ok()
}

fn page_waste(arguments: &[ArrayRef]) -> Result<ArrayRef> {
    let [tokens, page] = [0, 1].map(|index| arguments[index].as_primitive::<Int64Type>());
    let waste = |(tokens, page)| {
        let waste = kv_page_waste(size(tokens)?, size(page)?)?;
        signed(waste.wasted)
    };
    let wasted: Int64Array = tokens.iter().zip(page.iter()).map(waste).collect();
    Ok(Arc::new(wasted))
}

fn round(arguments: &[ArrayRef]) -> Result<ArrayRef> {
    let bytes = arguments[0].as_primitive::<Int64Type>();
    let texts = arguments.get(1).map(|texts| texts.as_string::<i32>());
    // Rows of one process follow each other and share their settings.
    let mut known: (Option<&str>, Settings) = (None, Settings::default());
    let mut rounded = Vec::with_capacity(bytes.len());
    for (row, value) in bytes.iter().enumerate() {
        let text = texts.and_then(|texts| (!texts.is_null(row)).then(|| texts.value(row)));
        if known.0 != text {
            let settings = text.map(|text| Settings::parse(text).settings);
            known = (text, settings.unwrap_or_default());
        }
        rounded.push(size(value).and_then(|value| signed(rules::round(value, &known.1))));
    }
    Ok(Arc::new(Int64Array::from(rounded)))
}

fn oom_class(arguments: &[ArrayRef]) -> Result<ArrayRef> {
    let growth = arguments[7].as_primitive::<Float64Type>();
    let bytes = |index: usize, row: usize| {
        let column = arguments[index].as_primitive::<Int64Type>();
        size((!column.is_null(row)).then(|| column.value(row)))
    };
    let residence = |row: usize| {
        // The last four arguments are optional.
        let [before, at_failure, queue_before, queue_at_failure] =
            [8, 9, 10, 11].map(|index| (index < arguments.len()).then(|| bytes(index, row))?);
        Some(Residence {
            live_bytes_before: before?,
            live_bytes_at_failure: at_failure?,
            queue_before,
            queue_at_failure,
            prefill_before: None,
            prefill_at_failure: None,
        })
    };
    let class = |row: usize, at_least: Option<f64>| {
        let facts = OomFacts {
            tried: bytes(0, row)?,
            driver_free: bytes(1, row),
            stranded: bytes(2, row),
            releasable: bytes(3, row),
            card_total: bytes(4, row),
            process_used: bytes(5, row),
            others_used: bytes(6, row),
            growth: at_least.map(|at_least| Growth {
                bytes_per_request: at_least,
                at_least,
            }),
            residence: residence(row),
        };
        Some(facts.classify().class.name())
    };
    let rows = growth.iter().enumerate();
    let classes: StringArray = rows.map(|(row, growth)| class(row, growth)).collect();
    Ok(Arc::new(classes))
}
