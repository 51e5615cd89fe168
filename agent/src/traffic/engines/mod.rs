//! What each serving engine's metrics say of its load, in the terms of the table `traffic`.
//!
//! Pure: a page goes in, rows come out. Three rules hold for every engine:
//! - What a page does not tell is `None`, never 0.
//! - A page may hold several models: each has a row. Several engines of one model behind one page
//!   (data parallel replicas) are summed; a sum that lacks one of them is `None`. Copies of one
//!   engine's figures (the ranks of a tensor-parallel group) count once.
//! - Pages of the KV pool are told apart as far as the engine does. Where free pages are not told
//!   from those that only keep a prefix, both are `None`.
//!
//! A counter that starts anew (the engine restarted) is a lower value: readers take care of that.

mod sglang;
#[cfg(test)]
mod tests;
mod tgi;
mod triton;
mod trtllm;
mod vllm;

use std::collections::BTreeSet;

use super::exposition::{Page, Sample};

/// Rows of one page at most: a server of many models has tens.
const MAX_ROWS: usize = 256;

/// One row of `traffic`, without when and where.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Load {
    /// vllm, sglang, triton, trtllm, tgi.
    pub engine: &'static str,
    pub model: Option<String>,
    pub running: Option<i64>,
    pub waiting: Option<i64>,
    pub completed_total: Option<i64>,
    pub prompt_tokens_total: Option<i64>,
    pub generation_tokens_total: Option<i64>,
    /// 0..1.
    pub kv_usage_ratio: Option<f64>,
    pub kv_page_tokens: Option<i64>,
    pub kv_total_pages: Option<i64>,
    pub kv_used_pages: Option<i64>,
    pub kv_cached_pages: Option<i64>,
    pub kv_free_pages: Option<i64>,
    pub preemptions_total: Option<i64>,
    pub swapped_bytes: Option<i64>,
}

impl Load {
    /// Whether a page told anything but that it is an engine's.
    fn has_figures(&self) -> bool {
        let nothing = Self {
            engine: self.engine,
            model: self.model.clone(),
            ..Self::default()
        };
        *self != nothing
    }

    fn of(engine: &'static str, model: Option<&str>) -> Self {
        Self {
            engine,
            model: model.map(str::to_string),
            ..Self::default()
        }
    }
}

/// Whether any engine's reader looks at a metric of that name.
pub fn is_wanted(name: &str) -> bool {
    const PREFIXES: [&str; 7] = [
        "vllm:",
        "sglang:",
        "nv_trt_llm_",
        "nv_inference_request_success",
        "nv_llm_",
        "trtllm_",
        "tgi_",
    ];
    // Histograms are most of a page, and only their sums and counts are of use.
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && !name.ends_with("_bucket")
}

/// The rows of a page; none if it is no serving engine's.
pub fn read(page: &Page<'_>) -> Vec<Load> {
    let mut loads = [
        vllm::read(page),
        sglang::read(page),
        triton::read(page),
        trtllm::read(page),
        tgi::read(page),
    ]
    .concat();
    loads.retain(Load::has_figures);
    loads.truncate(MAX_ROWS);
    loads
}

type Samples<'p, 'a> = Vec<&'p Sample<'a>>;

/// The models that these samples are about; one without a name if they name none.
fn models<'p>(samples: &[&'p Sample<'_>], label: &str) -> BTreeSet<Option<&'p str>> {
    let mut models: BTreeSet<_> = samples.iter().map(|s| s.label(label)).collect();
    if models.len() > 1 {
        // Samples that name no model are about all of them.
        models.remove(&None);
    }
    models
}

/// A figure as a whole number; `None` where it is none.
fn whole(value: f64) -> Option<i64> {
    // 2^63 is a value that f64 has, and the first that i64 has not.
    (value.is_finite() && (0.0..9_223_372_036_854_775_808.0).contains(&value))
        .then_some(value as i64)
}

/// The sum over samples, `None` if there is none or one of them is no count.
fn sum(samples: &[&Sample<'_>]) -> Option<i64> {
    if samples.is_empty() {
        return None;
    }
    let whole: Option<Vec<i64>> = samples.iter().map(|s| whole(s.value)).collect();
    whole?.into_iter().try_fold(0i64, i64::checked_add)
}

/// The value of the only sample; `None` if there are several that say different things.
fn only(samples: &[&Sample<'_>]) -> Option<i64> {
    let mut values = samples.iter().map(|s| whole(s.value));
    let first = values.next()??;
    values.all(|value| value == Some(first)).then_some(first)
}

/// A share, 0..1.
fn ratio(value: f64) -> Option<f64> {
    (0.0..=1.0).contains(&value).then_some(value)
}

/// The mean of shares, weighted by the pools they are shares of where those are known. `None` if one
/// is no share.
fn mean_ratio(parts: &[(f64, Option<i64>)]) -> Option<f64> {
    let shares: Option<Vec<f64>> = parts.iter().map(|(share, _)| ratio(*share)).collect();
    let shares = shares?;
    if let [only] = shares.as_slice() {
        // As the engine wrote it.
        return Some(*only);
    }
    if shares.is_empty() {
        return None;
    }
    let weights: Option<Vec<i64>> = parts
        .iter()
        .map(|(_, pool)| pool.filter(|p| *p > 0))
        .collect();
    let weights = weights.unwrap_or_else(|| vec![1; shares.len()]);
    let total: f64 = weights.iter().map(|weight| *weight as f64).sum();
    let weighted = shares
        .iter()
        .zip(&weights)
        .map(|(share, weight)| share * *weight as f64);
    Some(weighted.sum::<f64>() / total)
}

/// All of them, added; `None` if one is not known or there is none.
fn sum_known(parts: impl IntoIterator<Item = Option<i64>>) -> Option<i64> {
    let parts: Option<Vec<i64>> = parts.into_iter().collect();
    let parts = parts.filter(|parts| !parts.is_empty())?;
    parts.into_iter().try_fold(0i64, i64::checked_add)
}

/// A number in a label, as in an info metric; engines write `None` for what is not set.
fn number_in(sample: &Sample<'_>, label: &str) -> Option<i64> {
    sample
        .label(label)?
        .parse()
        .ok()
        .filter(|number| *number >= 0)
}
