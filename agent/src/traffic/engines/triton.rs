//! Triton Inference Server with the TensorRT-LLM backend (metrics documented in the backend's README
//! and in Triton's "Metrics").
//!
//! - Only models that have metrics of the backend have a row: the steps before and after it, and the
//!   ensemble around it, would count each request again. Versions of a model are summed.
//! - `scheduled` requests are those of the running batch; `waiting` are the active ones that are not
//!   in it (older backends do not give that figure, and it is `active` less `scheduled`).
//! - `free` blocks include those that keep a prefix for reuse, so that neither free nor cached pages
//!   are known for themselves. The backend counts no preemptions.

use super::{Load, Page, Samples, models, ratio, sum, whole};

const BLOCKS: &str = "nv_trt_llm_kv_cache_block_metrics";
const REQUESTS: &str = "nv_trt_llm_request_metrics";

pub(super) fn read(page: &Page<'_>) -> Vec<Load> {
    let of_backend: Samples<'_, '_> = page
        .samples
        .iter()
        .filter(|s| s.name == BLOCKS || s.name == REQUESTS)
        .collect();
    models(&of_backend, "model")
        .into_iter()
        .map(|model| load(page, model))
        .collect()
}

fn load(page: &Page<'_>, model: Option<&str>) -> Load {
    let of = |name: &str| -> Samples<'_, '_> {
        let of_model = page.samples.iter().filter(|s| s.label("model") == model);
        of_model.filter(|s| s.name == name).collect()
    };
    let kind = |name: &str, label: &str, kind: &str| -> Samples<'_, '_> {
        let mut samples = of(name);
        samples.retain(|s| s.label(label) == Some(kind));
        samples
    };
    let blocks = |which: &str| kind(BLOCKS, "kv_cache_block_type", which);
    let requests = |which: &str| sum(&kind(REQUESTS, "request_type", which));

    let mut load = Load::of("triton", model);
    load.running = requests("scheduled");
    load.waiting = requests("waiting").or_else(|| {
        let (active, scheduled) = (requests("active")?, requests("scheduled")?);
        Some((active - scheduled).max(0))
    });
    load.completed_total = sum(&of("nv_inference_request_success"));
    load.prompt_tokens_total = sum(&of("nv_llm_input_token_len_sum"));
    load.generation_tokens_total = sum(&of("nv_llm_output_token_len_sum"));
    let sizes: Vec<_> = blocks("tokens_per")
        .iter()
        .map(|s| whole(s.value))
        .collect();
    if sizes.windows(2).all(|pair| pair[0] == pair[1]) {
        load.kv_page_tokens = sizes.first().copied().flatten();
    }
    load.kv_total_pages = sum(&blocks("max"));
    load.kv_used_pages = sum(&blocks("used"));
    load.kv_usage_ratio = match blocks("fraction").as_slice() {
        [only] => ratio(only.value),
        _ => None,
    }
    .or_else(|| {
        let total = load.kv_total_pages.filter(|total| *total > 0)?;
        ratio(load.kv_used_pages? as f64 / total as f64)
    });
    load
}
