//! Serving hosts with known leaks, and with everything that looks like one: what the leak detectors
//! are judged by.
//!
//! Independent of the detectors: nothing here knows how they decide, and they are not linked.
//! [`Simulator::run`] replays real request traces ([`traces`]) at a host's pace (by day and night,
//! in bursts, with quiet times) through a serving engine ([`serving`]) that is restarted and
//! redeployed, gives each of some 200 call stacks ([`stacks`]) its live bytes, may plant a leak
//! ([`leak`]), and yields what an agent would have written: rows of `stack_windows` and samples of
//! `traffic`. The truth travels beside them, never in them: stack ids and names are drawn anew for
//! every host and tell nothing.
//!
//! Invariants:
//! - a seed and a condition give the same run on every machine (with the same traces);
//! - a leaky run and its clean twin (same seed, [`Condition::clean`]) have the same load, the same
//!   restarts, the same other stacks to the byte; they differ only by what was leaked;
//! - of every stack and process, live bytes are what was allocated less what was freed.
//!
//! Seeds: whoever tunes a detector uses [`TUNING_SEEDS`]. [`REPORT_SEEDS`] are for reports alone, and
//! bring families of look-alikes that no tuning seed has.
//!
//! What is not modelled: a card that fills up. A run goes on past the memory of a real card, so that
//! slow detectors can be judged too; [`Truth::leaked_bytes`] says how much it came to.

pub mod leak;
pub mod serving;
pub mod stacks;
pub mod traces;

mod arrivals;
mod draw;
mod host;
mod levels;
mod windows;

use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub use leak::Kind;
pub use serving::TICK;
pub use stacks::Class;
pub use traces::{Error, Traces};

/// For tuning detectors, and for tests.
pub const TUNING_SEEDS: Range<u64> = 0..1_000_000;

/// For reports: never look at a single run of these while tuning.
pub const REPORT_SEEDS: Range<u64> = 1_000_000..2_000_000;

/// What a run is like.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Condition {
    /// The planted leak; none: the clean twin.
    pub leak: Option<Planted>,
    /// Something that bytes alone cannot tell from a leak is added.
    pub ambiguous: Option<Ambiguous>,
    /// The run deploys a new version within hours 6 to 16. Set for leaks of that kind and their
    /// twins; other runs are deployed to at times by chance.
    pub deploy: bool,
    /// Length, hours.
    pub hours: u32,
    /// Length of a window, seconds; a multiple of 60.
    pub window_seconds: u32,
}

/// A leak to plant.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Planted {
    /// What makes it grow.
    pub kind: Kind,
    /// Mean bytes left by a request (by all requests, also where only some leave something; a leak
    /// by time has the same bytes an hour at the host's mean pace).
    pub bytes_per_request: f64,
}

/// Cases beyond what bytes can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ambiguous {
    /// A cache that fills in a straight line for 8 to 24 hours, and then is full.
    SlowFill,
    /// Adapters that are loaded one by one over 12 to 30 hours.
    SlowStaircase,
}

impl Condition {
    /// 48 hours in windows of 5 minutes without a leak.
    pub const CLEAN: Condition = Condition {
        leak: None,
        ambiguous: None,
        deploy: false,
        hours: 48,
        window_seconds: 300,
    };

    /// The same with a leak.
    pub fn leaky(kind: Kind, bytes_per_request: f64) -> Self {
        Self {
            leak: Some(Planted {
                kind,
                bytes_per_request,
            }),
            deploy: kind == Kind::Deploy,
            ..Self::CLEAN
        }
    }

    /// The same without a leak.
    pub fn ambiguous(what: Ambiguous) -> Self {
        Self {
            ambiguous: Some(what),
            ..Self::CLEAN
        }
    }

    /// The clean twin.
    pub fn clean(self) -> Self {
        Self { leak: None, ..self }
    }
}

/// One lifetime of the host's serving process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// 63 bits.
    pub process_id: i64,
    /// Process id.
    pub pid: i32,
    /// Seconds after the run's begin.
    pub start: f64,
    /// The same; the run's end for the last one, which still lives then.
    pub end: f64,
    /// Whether it lives when the run ends.
    pub lives: bool,
    /// Counted up by each deploy.
    pub version: u32,
}

/// One call stack in one version of the program.
#[derive(Debug, Clone, PartialEq)]
pub struct StackName {
    /// 63 bits, drawn anew for every host.
    pub stack_id: i64,
    /// Function names, outermost first.
    pub functions: Vec<String>,
    /// The module of the innermost.
    pub module: String,
    /// As in `alloc_events`.
    pub memory_kind: &'static str,
    /// As in `alloc_events`.
    pub layer: &'static str,
}

/// One sample of the engine's load. Totals start at 0 with each process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Traffic {
    /// Index into [`Run::processes`].
    pub process: usize,
    /// Seconds after the run's begin.
    pub at: f64,
    /// Requests being served.
    pub running: i64,
    /// Requests that wait.
    pub waiting: i64,
    /// Requests completed so far.
    pub completed_total: i64,
    /// Tokens so far.
    pub prompt_tokens_total: i64,
    /// Tokens so far.
    pub generation_tokens_total: i64,
    /// Pages that running requests hold.
    pub kv_used_pages: i64,
    /// Pages of the pool.
    pub kv_total_pages: i64,
    /// Tokens of a page.
    pub kv_page_tokens: i64,
}

/// One row of `stack_windows`. As from an agent, a stack has a row in the windows in which it did
/// something, one when its process ends, and one every 60th window while it lives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// Index into [`Run::processes`].
    pub process: usize,
    /// Index into [`Run::stacks`].
    pub stack: usize,
    /// Start, seconds after the run's begin; the window is [`Run::window_seconds`] long.
    pub start: f64,
    /// Bytes of what began in the window.
    pub alloc_bytes: i64,
    /// How many began.
    pub alloc_count: i64,
    /// Bytes of what ended.
    pub free_bytes: i64,
    /// How many ended.
    pub free_count: i64,
    /// Live at the end.
    pub live_bytes: i64,
    /// How many live at the end.
    pub live_count: i64,
    /// Age of the oldest at the end, seconds; none lives: none.
    pub oldest_live_age: Option<f64>,
    /// Most at one moment of the window.
    pub peak_live_bytes: i64,
}

/// What is known of a run and no detector may see.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Truth {
    /// The seed.
    pub seed: u64,
    /// What was asked for.
    pub condition: Condition,
    /// The stack that leaks, or would in the leaky twin; its ids in all versions.
    pub planted_stack_ids: Vec<i64>,
    /// What that stack does besides.
    pub planted_on: Class,
    /// The stack that was added by [`Condition::ambiguous`].
    pub ambiguous_stack_ids: Vec<i64>,
    /// When the leak begins (in the leaky twin), seconds after the run's begin.
    pub onset: f64,
    /// Bytes leaked by the end, in all processes.
    pub leaked_bytes: f64,
    /// Requests completed, in all processes.
    pub requests: f64,
    /// Requests a second that the pattern means.
    pub mean_rate: f64,
    /// The trace that was replayed.
    pub trace: String,
    /// The process's lifetimes.
    pub processes: Vec<Process>,
    /// Class of each stack of [`Run::stacks`].
    pub classes: Vec<Class>,
}

/// One host's run.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Lifetimes of the serving process, in order.
    pub processes: Vec<Process>,
    /// Call stacks, in no order that tells anything.
    pub stacks: Vec<StackName>,
    /// Samples, in order of time.
    pub traffic: Vec<Traffic>,
    /// Rows, in order of time.
    pub windows: Vec<Window>,
    /// Length of a window, seconds.
    pub window_seconds: u32,
    /// For whoever judges.
    pub truth: Truth,
}

/// See the crate's text.
#[derive(Debug, Clone)]
pub struct Simulator {
    traces: Traces,
}

impl Simulator {
    /// A simulator that replays the traces of a folder (`shared/data/traces`), or made-up ones where
    /// they are missing.
    ///
    /// # Errors
    /// A trace that is there and cannot be understood.
    pub fn new(traces: Option<&Path>) -> Result<Self, Error> {
        Ok(Self {
            traces: Traces::load(traces)?,
        })
    }

    /// As [`Simulator::new`], with the folder that the environment variable `VRAMSCOPE_SHARED` or
    /// the checkout's neighbour `shared` names.
    ///
    /// # Errors
    /// As there.
    pub fn find() -> Result<Self, Error> {
        let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
        let shared = std::env::var_os("VRAMSCOPE_SHARED").map_or(beside, Into::into);
        Self::new(Some(&shared.join("data/traces")))
    }

    /// Whether real traces are replayed. If not, say so beside every figure.
    pub fn has_real_traces(&self) -> bool {
        self.traces.are_real()
    }

    /// One host's run.
    pub fn run(&self, seed: u64, condition: &Condition) -> Run {
        host::run(&self.traces, seed, condition)
    }
}
