//! `trtllm-serve`, TensorRT-LLM's own server (metrics documented with TensorRT-LLM).
//!
//! - Free blocks include those that keep a prefix for reuse: neither free nor cached pages are known
//!   for themselves. With a host cache the older cache manager counts its blocks in all of them.
//! - With data-parallel attention the page tells of rank 0 only; it does not say that it does.

use super::{Load, Page, Samples, models, only, ratio, sum};

pub(super) fn read(page: &Page<'_>) -> Vec<Load> {
    let all: Samples<'_, '_> = page
        .samples
        .iter()
        .filter(|s| s.name.starts_with("trtllm_") && !s.name.ends_with("_created"))
        .collect();
    models(&all, "model_name")
        .into_iter()
        .map(|model| load(page, model))
        .collect()
}

fn load(page: &Page<'_>, model: Option<&str>) -> Load {
    let of = |names: &[&str]| -> Samples<'_, '_> {
        let mut samples = page.first_of(names);
        samples.retain(|s| s.label("model_name") == model);
        samples
    };
    let gauge = |name: &str| only(&of(&[name]));
    let mut load = Load::of("trtllm", model);
    load.running = gauge("trtllm_num_requests_running");
    load.waiting = gauge("trtllm_num_requests_waiting");
    load.completed_total = sum(&of(&[
        "trtllm_num_requests_completed_total",
        "trtllm_request_success_total",
    ]));
    load.prompt_tokens_total = sum(&of(&["trtllm_prompt_tokens_total"]));
    load.generation_tokens_total = sum(&of(&["trtllm_generation_tokens_total"]));
    load.preemptions_total = sum(&of(&["trtllm_num_preemptions_total"]));
    load.kv_page_tokens = gauge("trtllm_kv_cache_tokens_per_block");
    load.kv_total_pages = gauge("trtllm_kv_cache_max_blocks");
    load.kv_used_pages = gauge("trtllm_kv_cache_used_blocks");
    load.kv_usage_ratio = match of(&["trtllm_kv_cache_utilization"]).as_slice() {
        [only] => ratio(only.value),
        _ => None,
    };
    load
}
