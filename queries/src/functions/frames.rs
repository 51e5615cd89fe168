//! Which frame of a stack is to blame: the innermost one that belongs to no driver, runtime or
//! allocator.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, StringArray, StringBuilder, StructArray};
use arrow::datatypes::DataType;
use datafusion::common::ScalarValue;
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};

/// Libraries whose frames lie under whoever allocates.
const UNDER: [&str; 10] = [
    "libcuda",
    "libcudart",
    "libnvidia",
    "libcupti",
    "libc10",
    "libtorch",
    "libcaffe2",
    "libc.so",
    "libpython",
    "ld-linux",
];
/// Python packages likewise, as parts of a file's path.
const UNDER_PACKAGES: [&str; 2] = ["site-packages/torch/", "dist-packages/torch/"];
/// Functions likewise, wherever they are linked in.
const UNDER_FUNCTIONS: [&str; 10] = [
    "cuda",
    "cuMem",
    "cuArray",
    "cuMipmapped",
    "c10::",
    "at::",
    "aten::",
    "torch::",
    "malloc",
    "operator new",
];

#[derive(Debug, PartialEq, Eq)]
struct AllocatingFrame(Signature);

impl Hash for AllocatingFrame {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

pub(super) fn all() -> Vec<ScalarUDF> {
    let signature = Signature::any(2, Volatility::Immutable);
    vec![ScalarUDF::from(AllocatingFrame(signature))]
}

impl ScalarUDFImpl for AllocatingFrame {
    fn name(&self) -> &str {
        "allocating_frame"
    }

    fn signature(&self) -> &Signature {
        &self.0
    }

    fn return_type(&self, _arguments: &[DataType]) -> Result<DataType> {
        Ok(DataType::Utf8)
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let field = match &arguments.args[1] {
            ColumnarValue::Scalar(
                ScalarValue::Utf8(Some(field)) | ScalarValue::Utf8View(Some(field)),
            ) if ["function", "module", "build_id"].contains(&field.as_str()) => field.clone(),
            _ => {
                return Err(DataFusionError::Plan(
                    "allocating_frame takes the frames of a stack and 'function', 'module' or 'build_id'"
                        .to_string(),
                ));
            }
        };
        let frames = arguments.args[0].to_array(arguments.number_rows)?;
        let wrong = || DataFusionError::Plan("allocating_frame takes stacks.frames".to_string());
        let lists = frames.as_list_opt::<i32>().ok_or_else(wrong)?;
        let mut found = StringBuilder::new();
        for row in 0..lists.len() {
            let frames = lists.is_valid(row).then(|| lists.value(row));
            let value = match &frames {
                Some(frames) => blamed(frames.as_struct_opt().ok_or_else(wrong)?, &field),
                None => None,
            };
            found.append_option(value);
        }
        let found: ArrayRef = Arc::new(found.finish());
        Ok(ColumnarValue::Array(found))
    }
}

/// The field of the frame to blame; of the innermost frame if all lie under.
fn blamed(frames: &StructArray, field: &str) -> Option<String> {
    let text = |name: &str| -> Option<&StringArray> {
        frames.column_by_name(name)?.as_string_opt::<i32>()
    };
    let (function, module) = (text("function")?, text("module")?);
    let value =
        |column: &StringArray, at: usize| column.is_valid(at).then(|| column.value(at).to_string());
    let lies_under = |at: usize| {
        let function = value(function, at).unwrap_or_default();
        let module = value(module, at).unwrap_or_default();
        let file = module.rsplit('/').next().unwrap_or_default();
        UNDER_FUNCTIONS
            .iter()
            .any(|start| function.starts_with(start))
            || UNDER.iter().any(|start| file.starts_with(start))
            || UNDER_PACKAGES.iter().any(|part| module.contains(part))
    };
    let at = (0..frames.len()).find(|at| !lies_under(*at)).unwrap_or(0);
    (at < frames.len())
        .then(|| value(text(field)?, at))
        .flatten()
}
