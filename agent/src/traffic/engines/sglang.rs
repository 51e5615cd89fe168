//! SGLang, started with `--enable-metrics` (metrics documented at docs.sglang.io, "Production
//! metrics").
//!
//! - Schedulers of a tensor- or pipeline-parallel group say the same things: the lowest rank counts.
//!   Data-parallel ranks (`dp_rank`) are summed. A sample with a `priority` is part of the one
//!   without, and left out.
//! - The pool is counted in tokens. `kv_used`, `kv_evictable` and `kv_available` tokens (older:
//!   `num_used_tokens` alone) become pages where they are whole pages, and stay unknown where not,
//!   or where the size of a page is not told. Evictable tokens keep a prefix and can go at once:
//!   cached pages. `token_usage` leaves them out.
//! - `num_retracted_reqs` is a gauge of the last batch; only the counter `num_retracted_requests_total`
//!   is preemptions so far.

use std::collections::BTreeMap;

use super::{Load, Page, Sample, Samples, mean_ratio, models, number_in, sum, whole};

const INFO: &str = "sglang:cache_config_info";
const TOTAL_TOKENS: [&str; 1] = ["sglang:max_total_num_tokens"];

pub(super) fn read(page: &Page<'_>) -> Vec<Load> {
    let of_load: Samples<'_, '_> = page
        .samples
        .iter()
        .filter(|s| s.name.starts_with("sglang:") && !s.name.ends_with("_created"))
        .collect();
    models(&of_load, "model_name")
        .into_iter()
        .map(|model| load(page, model))
        .collect()
}

fn load(page: &Page<'_>, model: Option<&str>) -> Load {
    let of = |names: &[&str]| -> Samples<'_, '_> {
        let mut samples = page.first_of(names);
        samples.retain(|s| s.label("model_name") == model);
        once_each(samples)
    };
    let total = |names: &[&str]| sum(&of(names));
    let mut load = Load::of("sglang", model);
    load.running = total(&["sglang:num_running_reqs"]);
    load.waiting = total(&["sglang:num_queue_reqs"]);
    load.completed_total = total(&["sglang:num_requests_total"]);
    load.prompt_tokens_total = total(&["sglang:prompt_tokens_total"]);
    load.generation_tokens_total = total(&["sglang:generation_tokens_total"]);
    load.preemptions_total = total(&[
        "sglang:num_retracted_requests_total",
        "sglang:num_retracted_reqs_total",
    ]);
    let pools: BTreeMap<_, _> = of(&TOTAL_TOKENS)
        .iter()
        .map(|s| (s.label("dp_rank"), whole(s.value)))
        .collect();
    let shares: Vec<_> = of(&["sglang:token_usage"])
        .iter()
        .map(|s| (s.value, pools.get(&s.label("dp_rank")).copied().flatten()))
        .collect();
    load.kv_usage_ratio = mean_ratio(&shares);

    let info = page.all(INFO).find(|s| s.label("model_name") == model);
    let page_size = of(&["sglang:page_size"])
        .first()
        .and_then(|s| whole(s.value));
    load.kv_page_tokens = page_size
        .or_else(|| number_in(info?, "page_size"))
        .filter(|tokens| *tokens > 0);
    let pages = |tokens: Option<i64>| {
        let (tokens, size) = (tokens?, load.kv_page_tokens?);
        (tokens % size == 0).then_some(tokens / size)
    };
    let total_pages = pages(total(&TOTAL_TOKENS))
        .or_else(|| total(&["sglang:num_pages"]))
        .or_else(|| number_in(info?, "num_pages"));
    let used = pages(total(&["sglang:kv_used_tokens", "sglang:num_used_tokens"]));
    let cached = pages(total(&["sglang:kv_evictable_tokens"]));
    let free = pages(total(&["sglang:kv_available_tokens"]));
    load.kv_total_pages = total_pages;
    load.kv_used_pages = used;
    load.kv_cached_pages = cached;
    load.kv_free_pages = free;
    load
}

/// Samples that are each about another part of the load: the lowest rank of each data-parallel rank.
fn once_each<'p, 'a>(samples: Samples<'p, 'a>) -> Samples<'p, 'a> {
    let rank = |sample: &Sample<'_>| {
        ["tp_rank", "pp_rank", "moe_ep_rank"].map(|label| {
            sample
                .label(label)
                .and_then(|rank| rank.parse::<u32>().ok())
        })
    };
    let is_whole = |s: &&Sample<'_>| s.label("priority").is_none_or(str::is_empty);
    let samples: Samples<'p, 'a> = samples.into_iter().filter(is_whole).collect();
    let mut lowest: BTreeMap<Option<&str>, _> = BTreeMap::new();
    for sample in &samples {
        let of_replica = lowest
            .entry(sample.label("dp_rank"))
            .or_insert(rank(sample));
        *of_replica = rank(sample).min(*of_replica);
    }
    let is_lowest = |s: &&Sample<'_>| lowest.get(&s.label("dp_rank")) == Some(&rank(s));
    samples.into_iter().filter(is_lowest).collect()
}
