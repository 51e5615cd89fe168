//! vLLM, both generations of its engine (metrics documented at docs.vllm.ai, "Production metrics").
//!
//! - Engines behind one page (label `engine`) are summed; the older generation has no such label.
//! - `kv_cache_usage_perc` (older: `gpu_cache_usage_perc`) is the share of pages that requests hold:
//!   pages that only keep a prefix count as free in it. The page does not say how many those are, so
//!   cached and free pages stay unknown.
//! - The newer generation never gives out one of its pages (the null block) and takes the share of
//!   the rest; the older one of all. Which of the two a share is of is seen by which makes a whole
//!   number of pages.
//! - Requests completed are all that ended, whatever `finished_reason` says: also those that their
//!   clients gave up hold no memory any more.
//! - Only the older generation tells how much was swapped: `cpu_cache_usage_perc` of
//!   `swap_space_bytes`. The newer one's `kv_offload_cpu_cache_usage_perc` is the share of blocks
//!   that are on their way at this moment, and no amount that is there.

use std::collections::{BTreeMap, BTreeSet};

use super::{Load, Page, Sample, Samples, mean_ratio, models, number_in, ratio, sum, sum_known};

const USAGE: [&str; 2] = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"];
const INFO: &str = "vllm:cache_config_info";

pub(super) fn read(page: &Page<'_>) -> Vec<Load> {
    let of_load: Samples<'_, '_> = page
        .samples
        .iter()
        .filter(|s| s.name.starts_with("vllm:") && s.name != INFO && !s.name.ends_with("_created"))
        .collect();
    models(&of_load, "model_name")
        .into_iter()
        .map(|model| Reader::new(page, &of_load, model).load())
        .collect()
}

struct Reader<'p, 'a> {
    page: &'p Page<'a>,
    model: Option<&'p str>,
    /// Engines of this model that name themselves.
    engines: BTreeSet<&'p str>,
}

impl<'p, 'a> Reader<'p, 'a> {
    fn new(page: &'p Page<'a>, of_load: &[&'p Sample<'a>], model: Option<&'p str>) -> Self {
        let of_model = of_load.iter().filter(|s| s.label("model_name") == model);
        Self {
            page,
            model,
            engines: of_model.filter_map(|s| s.label("engine")).collect(),
        }
    }

    /// Samples of this model.
    fn of(&self, names: &[&str]) -> Samples<'p, 'a> {
        let mut samples = self.page.first_of(names);
        samples.retain(|s| s.label("model_name") == self.model);
        samples
    }

    /// The sum over this model's engines; `None` if one of them is missing.
    fn sum(&self, names: &[&str]) -> Option<i64> {
        let samples = self.of(names);
        let named: BTreeSet<_> = samples.iter().filter_map(|s| s.label("engine")).collect();
        let is_whole = named.is_empty() || named == self.engines;
        sum(&samples).filter(|_| is_whole)
    }

    /// What an engine says of its pool: of its own, or of the only one there is.
    fn info(&self, engine: Option<&str>) -> Option<&'p Sample<'a>> {
        let all: Samples<'_, '_> = self.page.all(INFO).collect();
        let own = all.iter().find(|s| s.label("engine") == engine);
        match (own, all.as_slice()) {
            (Some(own), _) => Some(own),
            (None, [only]) if self.engines.len() <= 1 => Some(only),
            _ => None,
        }
    }

    fn load(&self) -> Load {
        let mut load = Load::of("vllm", self.model);
        load.running = self.sum(&["vllm:num_requests_running"]);
        load.waiting = self.sum(&["vllm:num_requests_waiting"]);
        load.completed_total = self.sum(&["vllm:request_success_total", "vllm:request_success"]);
        load.prompt_tokens_total = self.sum(&["vllm:prompt_tokens_total", "vllm:prompt_tokens"]);
        load.generation_tokens_total =
            self.sum(&["vllm:generation_tokens_total", "vllm:generation_tokens"]);
        load.preemptions_total = self.sum(&["vllm:num_preemptions_total", "vllm:num_preemptions"]);
        self.fill_pool(&mut load);
        load
    }

    fn fill_pool(&self, load: &mut Load) {
        // By engine, so that each share meets its own pool.
        let usage: BTreeMap<Option<&str>, f64> = self
            .of(&USAGE)
            .iter()
            .map(|s| (s.label("engine"), s.value))
            .collect();
        let engines: Vec<Option<&str>> = if self.engines.is_empty() {
            vec![None]
        } else {
            self.engines.iter().map(|engine| Some(*engine)).collect()
        };
        let pools: Vec<Option<i64>> = engines
            .iter()
            .map(|engine| number_in(self.info(*engine)?, "num_gpu_blocks"))
            .collect();
        let page_tokens: BTreeSet<Option<i64>> = engines
            .iter()
            .map(|engine| number_in(self.info(*engine)?, "block_size"))
            .collect();
        if page_tokens.len() == 1 {
            load.kv_page_tokens = page_tokens.into_iter().next().flatten();
        }
        load.kv_total_pages = sum_known(pools.iter().copied());
        let shares: Option<Vec<f64>> = engines.iter().map(|e| usage.get(e).copied()).collect();
        let Some(shares) = shares else { return };
        let parts: Vec<_> = shares.iter().copied().zip(pools.iter().copied()).collect();
        load.kv_usage_ratio = mean_ratio(&parts);
        load.kv_used_pages = sum_known(
            parts
                .iter()
                .map(|(share, pool)| used_pages(ratio(*share)?, (*pool)?)),
        );
        load.swapped_bytes = self.swapped(&engines);
    }

    fn swapped(&self, engines: &[Option<&str>]) -> Option<i64> {
        let shares: BTreeMap<Option<&str>, f64> = self
            .of(&["vllm:cpu_cache_usage_perc"])
            .iter()
            .map(|s| (s.label("engine"), s.value))
            .collect();
        sum_known(engines.iter().map(|engine| {
            let share = ratio(*shares.get(engine)?)?;
            let space = number_in(self.info(*engine)?, "swap_space_bytes")?;
            Some((share * space as f64).round() as i64)
        }))
    }
}

/// Pages that requests hold, of a share that is of `pool` pages or of `pool` less one.
fn used_pages(share: f64, pool: i64) -> Option<i64> {
    let off_whole = |pages: f64| (pages - pages.round()).abs();
    let of_all = share * pool as f64;
    let of_rest = share * (pool - 1).max(0) as f64;
    let pages = if off_whole(of_rest) <= off_whole(of_all) {
        of_rest
    } else {
        of_all
    };
    // A rounded share names no number of pages.
    (off_whole(pages) < 0.01).then_some(pages.round() as i64)
}
