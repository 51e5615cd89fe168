//! Text Generation Inference (metrics documented with it, "Metrics"). One model a server, which the
//! page does not name; nothing of the KV pool. Token counts are the sums of histograms over requests
//! that are done.

use super::{Load, Page, sum};

pub(super) fn read(page: &Page<'_>) -> Vec<Load> {
    let is_there = [
        "tgi_batch_current_size",
        "tgi_queue_size",
        "tgi_request_count",
    ]
    .iter()
    .any(|name| page.all(name).next().is_some());
    if !is_there {
        return Vec::new();
    }
    let total = |names: &[&str]| sum(&page.first_of(names));
    let mut load = Load::of("tgi", None);
    load.running = total(&["tgi_batch_current_size"]);
    load.waiting = total(&["tgi_queue_size"]);
    load.completed_total = total(&["tgi_request_success", "tgi_request_success_total"]);
    load.prompt_tokens_total = total(&["tgi_request_input_length_sum"]);
    load.generation_tokens_total = total(&["tgi_request_generated_tokens_sum"]);
    vec![load]
}
