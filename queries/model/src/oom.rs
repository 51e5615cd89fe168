//! Why an allocation failed: a class, the numbers that led to it, and what lies near.
//!
//! With T the bytes tried, F the driver's free bytes, S the allocator's stranded and R its
//! releasable bytes, the classes are decided in this order:
//! 0. other processes hold most of the card: *external process*;
//! 1. F >= T: *driver refused*;
//! 2. F + R + S >= T: *fragmentation*;
//! 3. otherwise *leak* if live bytes per request grew, *burst* if live bytes jumped within one
//!    request's residence while queue or prefill tokens rose, else *capacity*.
//!
//! Invariant: a number that is not known decides nothing. Where a class would need one, the class
//! is *unknown*, and the missing number is named.

use std::fmt;

/// What is known of a failed allocation. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OomFacts {
    /// T: as the allocator asked the driver, after rounding.
    pub tried: u64,
    /// F: free on the card, as the driver said.
    pub driver_free: Option<u64>,
    /// S: reserved by the allocator, inactive, held by blocks in use.
    pub stranded: Option<u64>,
    /// R: reserved by the allocator, in segments that hold nothing.
    pub releasable: Option<u64>,
    /// The card's capacity.
    pub card_total: Option<u64>,
    /// All that this process holds on the card, the framework's and its context's.
    pub process_used: Option<u64>,
    /// What other processes hold; where not known it follows from capacity, free and
    /// `process_used`.
    pub others_used: Option<u64>,
    /// How live bytes grew per request, where that was measured.
    pub growth: Option<Growth>,
    /// What happened within the residence of the request that failed, where that is known.
    pub residence: Option<Residence>,
}

/// Growth of live bytes per request. It counts as growth where the lower bound is above 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Growth {
    pub bytes_per_request: f64,
    /// The lower end of the confidence interval.
    pub at_least: f64,
}

/// From a request's arrival to the failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residence {
    pub live_bytes_before: u64,
    pub live_bytes_at_failure: u64,
    /// Requests waiting.
    pub queue_before: Option<u64>,
    pub queue_at_failure: Option<u64>,
    /// Prompt tokens in work.
    pub prefill_before: Option<u64>,
    pub prefill_at_failure: Option<u64>,
}

/// Why it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OomClass {
    ExternalProcess,
    DriverRefused,
    Fragmentation,
    Leak,
    Burst,
    Capacity,
    /// A number that the decision needs is missing.
    Unknown,
}

impl OomClass {
    /// As tables spell it.
    pub const fn name(self) -> &'static str {
        match self {
            OomClass::ExternalProcess => "external process",
            OomClass::DriverRefused => "driver refused",
            OomClass::Fragmentation => "fragmentation",
            OomClass::Leak => "leak",
            OomClass::Burst => "burst",
            OomClass::Capacity => "capacity",
            OomClass::Unknown => "unknown",
        }
    }
}

impl fmt::Display for OomClass {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A comparison that was made, in the order of the decision. Its text gives bytes as bytes.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Evidence {
    #[error("other processes hold {others} of the card's {total} bytes")]
    Others { others: u64, total: u64 },
    #[error("the driver had {free} bytes free, {tried} were tried")]
    DriverFree { free: u64, tried: u64 },
    #[error(
        "free, releasable and stranded bytes were {free} + {releasable} + {stranded}, {tried} were tried"
    )]
    Reach {
        free: u64,
        releasable: u64,
        stranded: u64,
        tried: u64,
    },
    #[error("live bytes grew by {bytes_per_request:.0} a request, at least {at_least:.0}")]
    Growth {
        bytes_per_request: f64,
        at_least: f64,
    },
    #[error("live bytes rose by {jump} within one request's residence, {missing} were missing")]
    Jump { jump: u64, missing: u64 },
    #[error("the queue went from {before} to {after} requests")]
    Queue { before: u64, after: u64 },
    #[error("prompt tokens in work went from {before} to {after}")]
    Prefill { before: u64, after: u64 },
    #[error("not known: {what}")]
    Missing { what: &'static str },
}

/// Another class that the numbers nearly gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Near {
    pub class: OomClass,
    /// By so many bytes the comparison that separates the two went the way it did.
    pub margin: u64,
}

/// The decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    pub class: OomClass,
    /// Live bytes per request grew, whatever the class: the failure will come back.
    pub with_growth: bool,
    /// How many bytes the comparison that decided had to spare; `None` where none was decided by
    /// bytes.
    pub margin: Option<u64>,
    /// Classes that 5 % more or less of the compared bytes would have given.
    pub near: Vec<Near>,
    pub evidence: Vec<Evidence>,
}

impl OomFacts {
    /// What PyTorch's message says: "Tried to allocate T … of which F is free … R is reserved by
    /// PyTorch but unallocated". PyTorch has flushed its cache by then, so what is reserved and
    /// unallocated is stranded.
    pub fn from_message(tried: u64, free: u64, reserved_unallocated: u64) -> Self {
        Self {
            tried,
            driver_free: Some(free),
            stranded: Some(reserved_unallocated),
            releasable: Some(0),
            ..Self::default()
        }
    }

    /// What other processes hold, told or worked out.
    fn others(&self) -> Option<u64> {
        self.others_used.or_else(|| {
            let rest = self.card_total?.checked_sub(self.driver_free?)?;
            rest.checked_sub(self.process_used?)
        })
    }

    /// F + R + S: all that is free in some way.
    fn reach(&self) -> Option<u64> {
        let cached = self.releasable?.saturating_add(self.stranded?);
        Some(self.driver_free?.saturating_add(cached))
    }

    /// Decides the class.
    pub fn classify(&self) -> Verdict {
        let mut verdict = Verdict {
            class: OomClass::Unknown,
            with_growth: self.growth.is_some_and(|growth| growth.at_least > 0.0),
            margin: None,
            near: Vec::new(),
            evidence: Vec::new(),
        };
        if let Some(growth) = self.growth {
            verdict.evidence.push(Evidence::Growth {
                bytes_per_request: growth.bytes_per_request,
                at_least: growth.at_least,
            });
        }
        verdict.class = self.decide(&mut verdict);
        verdict
    }

    fn decide(&self, verdict: &mut Verdict) -> OomClass {
        let tried = self.tried;
        if let (Some(others), Some(total)) = (self.others(), self.card_total) {
            verdict.evidence.push(Evidence::Others { others, total });
            let most = total / 2 + 1;
            if verdict.compare(OomClass::ExternalProcess, others, most, || {
                self.among_our_own()
            }) {
                return OomClass::ExternalProcess;
            }
        } else {
            verdict.missing("what other processes hold");
        }
        let Some(free) = self.driver_free else {
            verdict.missing("the driver's free bytes");
            return OomClass::Unknown;
        };
        verdict.evidence.push(Evidence::DriverFree { free, tried });
        if verdict.compare(OomClass::DriverRefused, free, tried, || {
            self.had_less_been_free()
        }) {
            return OomClass::DriverRefused;
        }
        let (Some(releasable), Some(stranded)) = (self.releasable, self.stranded) else {
            verdict.missing("what the allocator had reserved without use");
            return OomClass::Unknown;
        };
        let reach = free.saturating_add(releasable).saturating_add(stranded);
        verdict.evidence.push(Evidence::Reach {
            free,
            releasable,
            stranded,
            tried,
        });
        if verdict.compare(OomClass::Fragmentation, reach, tried, || {
            self.beyond_reach(1, &mut Vec::new())
        }) {
            return OomClass::Fragmentation;
        }
        self.beyond_reach(tried - reach, &mut verdict.evidence)
    }

    /// The class if other processes did not matter.
    fn among_our_own(&self) -> OomClass {
        match (self.driver_free, self.reach()) {
            (Some(free), _) if free >= self.tried => OomClass::DriverRefused,
            (_, Some(reach)) if reach >= self.tried => OomClass::Fragmentation,
            (_, Some(reach)) => self.beyond_reach(self.tried - reach, &mut Vec::new()),
            _ => OomClass::Unknown,
        }
    }

    /// The class if the driver had had one byte less than was tried.
    fn had_less_been_free(&self) -> OomClass {
        match (self.releasable, self.stranded) {
            (Some(0), Some(0)) => self.beyond_reach(1, &mut Vec::new()),
            (Some(_), Some(_)) => OomClass::Fragmentation,
            _ => OomClass::Unknown,
        }
    }

    /// Not even all that was free would have done; `missing` bytes were lacking.
    fn beyond_reach(&self, missing: u64, evidence: &mut Vec<Evidence>) -> OomClass {
        if self.growth.is_some_and(|growth| growth.at_least > 0.0) {
            return OomClass::Leak;
        }
        match self.residence {
            Some(residence) if residence.is_burst(missing, evidence) => OomClass::Burst,
            _ => OomClass::Capacity,
        }
    }
}

impl Residence {
    /// Live bytes jumped by at least what was missing, while the queue or the prompt tokens rose.
    fn is_burst(&self, missing: u64, evidence: &mut Vec<Evidence>) -> bool {
        let jump = self
            .live_bytes_at_failure
            .saturating_sub(self.live_bytes_before);
        evidence.push(Evidence::Jump { jump, missing });
        let mut load_rose = false;
        if let (Some(before), Some(after)) = (self.queue_before, self.queue_at_failure) {
            evidence.push(Evidence::Queue { before, after });
            load_rose |= after > before;
        }
        if let (Some(before), Some(after)) = (self.prefill_before, self.prefill_at_failure) {
            evidence.push(Evidence::Prefill { before, after });
            load_rose |= after > before;
        }
        jump >= missing && load_rose
    }
}

impl Verdict {
    fn missing(&mut self, what: &'static str) {
        self.evidence.push(Evidence::Missing { what });
    }

    /// Whether `have` reaches `need`, which means `class`. What lies within 5 % of `need` is noted
    /// as near: `otherwise` if it was reached, `class` if not.
    fn compare(
        &mut self,
        class: OomClass,
        have: u64,
        need: u64,
        otherwise: impl FnOnce() -> OomClass,
    ) -> bool {
        let reached = have >= need;
        let margin = have.abs_diff(need);
        self.margin = Some(margin);
        if margin <= need / 20 {
            let class = if reached { otherwise() } else { class };
            self.near.push(Near { class, margin });
        }
        reached
    }
}

#[cfg(test)]
mod tests;
