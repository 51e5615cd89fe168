//! Which hosts are simulated: every kind of leak at every size, each with its clean twin.

use clap::ValueEnum;
use serde_json::{Value, json};

/// Which seeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Seeds {
    /// For tuning detectors. Their figures are no report.
    Tuning,
    /// For reports alone, with look-alikes that tuning never saw.
    Report,
}

impl Seeds {
    /// The first seed, as `vramscope-leaksim` documents it.
    fn first(self) -> u64 {
        match self {
            Seeds::Tuning => 0,
            Seeds::Report => 1_000_000,
        }
    }
}

/// As `vramscope_leaksim::Kind` spells them.
pub const KINDS: [&str; 5] = ["request", "error", "hour", "late", "deploy"];

/// Bytes per request; none: drawn log-uniformly from 1 KB to 1 MB.
pub const SIZES: [Option<f64>; 5] = [
    Some(10_000.0),
    Some(30_000.0),
    Some(100_000.0),
    Some(1_000_000.0),
    None,
];

/// Seeds of ambiguous cases lie this far from those of pairs.
const AMBIGUOUS: u64 = 500_000;

/// A leaky host and its clean twin.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// Both have this name, in folders of their own.
    pub host: String,
    /// Both have this seed.
    pub seed: u64,
    /// One of [`KINDS`].
    pub kind: &'static str,
    /// The cell: one of [`SIZES`].
    pub size: Option<f64>,
    /// What is planted.
    pub bytes_per_request: f64,
}

/// One host.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// Its name.
    pub host: String,
    seed: u64,
    leak: Option<(&'static str, f64)>,
    /// One of the ambiguous conditions.
    pub ambiguous: Option<&'static str>,
    deploy: bool,
}

/// All hosts.
#[derive(Debug)]
pub struct Plan {
    /// As many as asked for, over all cells in turn.
    pub pairs: Vec<Pair>,
    /// Hosts with something that bytes alone cannot tell from a leak.
    pub ambiguous: Vec<Host>,
}

impl Plan {
    /// A plan of so many pairs.
    pub fn draw(runs: usize, seeds: Seeds) -> Self {
        let cells: Vec<_> = SIZES
            .iter()
            .flat_map(|size| KINDS.iter().map(move |kind| (*kind, *size)))
            .collect();
        let pair = |index: usize| {
            let (kind, size) = cells[index % cells.len()];
            Pair {
                host: format!("sim-{index:04}"),
                seed: seeds.first() + index as u64,
                kind,
                size,
                bytes_per_request: size.unwrap_or_else(|| log_uniform(index)),
            }
        };
        let ambiguous = |index: usize| Host {
            host: format!("sim-{index:04}"),
            seed: seeds.first() + AMBIGUOUS + index as u64,
            leak: None,
            ambiguous: Some(["slow_fill", "slow_staircase"][index % 2]),
            deploy: false,
        };
        Self {
            pairs: (0..runs).map(pair).collect(),
            ambiguous: (0..runs.div_ceil(10)).map(ambiguous).collect(),
        }
    }
}

/// From 1 KB to 1 MB: multiples of the golden ratio fill the range evenly from any number of draws.
fn log_uniform(index: usize) -> f64 {
    let golden = (5.0f64.sqrt() - 1.0) / 2.0;
    let place = (index as f64 * golden).fract();
    1000.0 * 1000.0f64.powf(place)
}

impl Pair {
    /// The host that leaks.
    pub fn leaky(&self) -> Host {
        Host {
            leak: Some((self.kind, self.bytes_per_request)),
            ..self.clean()
        }
    }

    /// The same without the leak.
    pub fn clean(&self) -> Host {
        Host {
            host: self.host.clone(),
            seed: self.seed,
            leak: None,
            ambiguous: None,
            deploy: self.kind == "deploy",
        }
    }
}

impl Host {
    /// As `vramscope-bench leak-hosts` reads it: 48 hours in windows of 5 minutes.
    pub fn to_json(&self) -> Value {
        let leak = self
            .leak
            .map(|(kind, bytes)| json!({"kind": kind, "bytes_per_request": bytes}));
        json!({
            "host": self.host,
            "seed": self.seed,
            "condition": {
                "leak": leak, "ambiguous": self.ambiguous, "deploy": self.deploy,
                "hours": 48, "window_seconds": 300,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_has_its_share() {
        let plan = Plan::draw(75, Seeds::Report);
        for kind in KINDS {
            for size in SIZES {
                let cell = plan
                    .pairs
                    .iter()
                    .filter(|p| p.kind == kind && p.size == size);
                assert_eq!(cell.count(), 3, "{kind} {size:?}");
            }
        }
        assert!(plan.pairs.iter().all(|pair| pair.seed >= 1_000_000));
        let drawn = plan.pairs.iter().filter(|pair| pair.size.is_none());
        assert!(
            drawn
                .clone()
                .all(|p| (1e3..1e6).contains(&p.bytes_per_request))
        );
        let small = drawn
            .clone()
            .filter(|p| p.bytes_per_request < 31_623.0)
            .count();
        assert!((5..=10).contains(&small), "{small} of {}", drawn.count());
    }
}
