//! What a run of the crash harness did and found, and how it is told.

use std::path::Path;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::agent::Shared;
use super::collector::tail;
use super::disk::Reason;
use super::model::Verdict;

/// What was done and found.
#[derive(Debug, Default)]
pub struct Tally {
    /// Rounds that were begun.
    pub rounds: usize,
    /// SIGKILLs to the collector.
    pub kills: u64,
    /// Power cuts, torn ones too.
    pub power_cuts: u64,
    /// Files of which a piece of an unsynced tail was left.
    pub torn_tails: u64,
    /// Names that appeared or went though no sync covered them.
    pub moved_names: u64,
    /// Cuts and late deliveries.
    pub network_cuts: u64,
    /// Full disks.
    pub disks_filled: u64,
    /// Agents killed.
    pub agent_kills: u64,
    /// Kills that met a compaction or vacuum at work.
    pub compactions_met: u64,
    /// The longest wait until SQL showed what was acknowledged.
    pub visible_ms: f64,
    /// The last comparison.
    pub verdict: Verdict,
    /// What is wrong beside rows.
    pub faults: Vec<String>,
}

impl Tally {
    /// As JSON, with what the agents know.
    pub fn report(&self, shared: &Shared, seed: u64, log: &Path, skipped: Option<Reason>) -> Value {
        let model = shared.model();
        let mut findings = self.faults.clone();
        findings.extend(model.broken.iter().take(10).cloned());
        findings.extend(self.verdict.examples.iter().cloned());
        if !findings.is_empty() {
            findings.push(format!("the collector's log ends:\n{}", tail(log)));
        }
        let acknowledged: u64 = model.acknowledged_rows().values().sum();
        let mut answers: Vec<_> = model.answers.iter().collect();
        answers.sort();
        json!({
            // As a text: numbers of JSON are not exact beyond 2^53.
            "seed": seed.to_string(),
            "lost": self.verdict.lost,
            "doubled": self.verdict.doubled,
            "foreign": self.verdict.foreign,
            "changed": self.verdict.changed,
            "broken": model.broken.len() + self.faults.len(),
            "findings": findings,
            "rounds": self.rounds,
            "kills": self.kills,
            "power_cuts": self.power_cuts,
            "torn_tails": self.torn_tails,
            "moved_names": self.moved_names,
            "network_cuts": self.network_cuts,
            "disks_filled": self.disks_filled,
            "agent_kills": self.agent_kills,
            "compactions_met": self.compactions_met,
            "sent_batches": model.batches(),
            "acknowledged_batches": model.acknowledged().len(),
            "acknowledged_rows": acknowledged,
            "resent_batches": shared.resent.load(Ordering::Relaxed),
            "forged_batches": shared.forged.load(Ordering::Relaxed),
            "forged_rejected": shared.forged_rejected.load(Ordering::Relaxed),
            "answers": answers,
            "visible_after_ms": self.visible_ms,
            "skipped": skipped,
        })
    }
}
