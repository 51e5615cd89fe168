//! The loop that moves events along: ring → order → stacks and ledger → rows → output.
//!
//! It runs on one thread and nothing calls back into it. What is slow (searching processes, NVML,
//! sending) runs on threads of its own.

mod flush;
mod framework;
mod placement;
mod processes;
mod rollups;
mod window;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{error, warn};
use vramscope_ebpf_abi::Loss;
use vramscope_ebpf_abi::python::Lost;

use crate::Map;
use crate::config::Config;
use crate::host::clock::{self, WallClock};
use crate::host::discovery::{Discovery, Filter};
use crate::host::gpu::{self, Card, Sampler};
use crate::host::identity::Host;
use crate::host::identity::StartTime;
use crate::ledger::{Change, Desk, Ledger, Process, Turn};
use crate::output::Output;
use crate::probes::channel::Channel;
use crate::probes::order::{Ordered, Orderer, Waiting};
use crate::probes::record::{self, Decoded, PythonOf, Stack};
use crate::probes::{Event, TracedCall};
use crate::python::walks;
use crate::spool::rows::{AllocRow, DeviceRow, Rows, StackRow};
use crate::stacks::{Stacks, Taken};
use crate::traffic::Scraper;
use window::Window;
pub use window::{Counts, Losses};

/// Records taken from the ring before the rest of the loop has its turn.
const RECORDS_PER_TURN: usize = 2048;
/// Rows that wait at most before they are written, whatever the interval.
const ROWS_PER_FLUSH: usize = 50_000;
/// Share of the ring at which records are written, so that their space is given back in time.
const RING_FILL: f64 = 0.25;
/// How often processes are checked for having ended.
const SWEEP: Duration = Duration::from_millis(50);
/// How often processes are looked up that map hooked libraries.
const REPORT: Duration = Duration::from_millis(500);
/// How much longer rows wait for the names of their stacks, so that both become durable together.
const NAMES_PATIENCE: Duration = Duration::from_secs(5);
/// The same in the end, between one name and the next.
const LAST_NAMES: Duration = Duration::from_secs(10);
/// How long the loop waits when the ring is empty.
const IDLE: Duration = Duration::from_millis(10);

/// Events counted and losses seen, by name.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    pub events: u64,
    pub lost: BTreeMap<&'static str, u64>,
    /// Stacks that are less than they were to be.
    pub stacks_not_copied: u64,
}

/// Sees rows on their way out.
pub trait Observer: Send {
    fn row(&mut self, row: &AllocRow);
    fn stack(&mut self, stack: &StackRow);
}

/// Cards by process lifetime and device ordinal.
type CardCache = RefCell<Map<(i64, Option<i32>), Option<Arc<str>>>>;

/// See the module's text.
pub struct Engine {
    host: Host,
    config: Config,
    clock: WallClock,
    channel: Channel,
    discovery: Discovery,
    sampler: Sampler,
    traffic: Option<Scraper>,
    cards: Vec<Card>,
    /// The card that a process means by a device, as found before.
    card_of: CardCache,
    orderer: Orderer,
    /// When the last event that is in the books took effect, CLOCK_MONOTONIC nanoseconds.
    applied_ns: u64,
    /// When the ring was last found empty, the same clock; none while it is being read.
    emptied_ns: Option<u64>,
    ledger: Ledger,
    stacks: Stacks,
    rows: Rows,
    output: Box<dyn Output>,
    filter: Option<Box<dyn Filter>>,
    observer: Option<Box<dyn Observer>>,
    /// The mark of the hooks that a process's last row told of.
    reported_coverage: HashMap<u32, u64>,
    window: Window,
    totals: Totals,
    lost_reported: Losses,
    undecodable: u64,
    /// What the ledger reported of its limits so far.
    overflows: (u64, u64),
    windows_ended: u64,
    last_flush: Instant,
    last_sweep: Instant,
    last_report: Instant,
    flush_failed: bool,
}

/// Python frames that were not read or sent since the probes were made, by cause.
fn python_lost(channel: &Channel) -> BTreeMap<String, u64> {
    let counts = channel.python_lost().unwrap_or_else(|error| {
        error!("failed to read the counters of Python frames: {error:#}");
        Default::default()
    });
    let named = Lost::ALL.iter().zip(counts);
    named
        .filter(|(_, count)| *count > 0)
        .map(|(cause, count)| (cause.name().to_string(), count))
        .collect()
}

/// What an earlier run left.
#[derive(Default)]
pub struct Resumed {
    pub changes: Vec<Change>,
    pub stacks: Vec<i64>,
    pub waiting: Waiting,
    pub lost_reported: Vec<u64>,
    pub window: Option<Counts>,
    /// Where to go on reading, if the ring is the same one.
    pub ring_position: Option<u64>,
}

/// The parts an engine is made of.
pub struct Parts {
    pub host: Host,
    pub config: Config,
    pub channel: Channel,
    pub discovery: Discovery,
    pub sampler: Sampler,
    /// `None`: no serving engine is asked.
    pub traffic: Option<Scraper>,
    pub output: Box<dyn Output>,
    pub filter: Option<Box<dyn Filter>>,
    pub observer: Option<Box<dyn Observer>>,
}

impl Engine {
    pub fn new(parts: Parts, resumed: Resumed) -> Self {
        let Parts {
            host,
            config,
            mut channel,
            discovery,
            sampler,
            traffic,
            output,
            filter,
            observer,
        } = parts;
        let mut ledger = Ledger::new(host.clone(), config.live_limit);
        resumed
            .changes
            .iter()
            .for_each(|change| ledger.restore(change));
        ledger.restored();
        let mut stacks = Stacks::new(config.names());
        stacks.restore(resumed.stacks);
        let next_seq = if channel.fresh {
            Some(resumed.waiting.next_seq.unwrap_or(1))
        } else {
            None
        };
        let mut orderer = Orderer::new(config.hold.0, next_seq);
        let mut lost_reported = [0; Loss::COUNT as usize];
        if let Some(position) = resumed.ring_position {
            if !channel.ring.resume(position) {
                warn!(
                    position,
                    "the ring does not hold the journal's position; reading on from where the kernel stands"
                );
            }
            for (to, from) in lost_reported.iter_mut().zip(&resumed.lost_reported) {
                *to = *from;
            }
        }
        orderer.restore(resumed.waiting, clock::monotonic_ns());
        let mut engine = Self {
            clock: WallClock::new(),
            cards: Vec::new(),
            card_of: CardCache::default(),
            overflows: (0, 0),
            windows_ended: 0,
            rows: Rows::default(),
            reported_coverage: HashMap::new(),
            window: Window::open(resumed.window),
            totals: Totals::default(),
            lost_reported,
            undecodable: 0,
            last_flush: Instant::now(),
            last_sweep: Instant::now(),
            last_report: Instant::now(),
            flush_failed: false,
            host,
            config,
            channel,
            discovery,
            sampler,
            traffic,
            orderer,
            applied_ns: clock::monotonic_ns(),
            emptied_ns: None,
            ledger,
            stacks,
            output,
            filter,
            observer,
        };
        // The first events should know their cards.
        let samples = engine.sampler.wait_first(Duration::from_secs(5));
        engine.take_samples(samples);
        engine
    }

    /// One turn; sleeps a little if there was nothing to do.
    pub fn turn(&mut self) {
        let taken = self.drain();
        let samples = self.sampler.take();
        self.take_samples(samples);
        if let Some(traffic) = &self.traffic {
            self.rows.traffic.extend(traffic.take());
        }
        if self.last_sweep.elapsed() >= SWEEP {
            self.last_sweep = Instant::now();
            self.sweep();
        }
        if self.last_report.elapsed() >= REPORT {
            self.last_report = Instant::now();
            self.report_mapped();
            self.tell_traffic();
        }
        self.stacks.exchange_names();
        // Nobody knows how many calls are missed while the probes are out.
        self.window.counts.switched_off |= self.discovery.known().off().is_some();
        let patience = if self.stacks.waits_for_names() {
            NAMES_PATIENCE
        } else {
            Duration::ZERO
        };
        if self.clock.refresh() || self.window.is_over(self.config.window.0 + patience) {
            // Together, so that what this flush drops is told by this window.
            self.flush(true);
        } else if self.last_flush.elapsed() >= self.config.flush_interval.0 + patience
            || (self.is_pressed() && !self.flush_failed)
        {
            self.flush(false);
        }
        if taken == 0 {
            self.channel.ring.wait(IDLE);
        }
    }

    /// Whose load is of interest.
    fn tell_traffic(&self) {
        if let Some(traffic) = &self.traffic {
            let pids = self.ledger.processes().map(|process| process.pid);
            traffic.tell(pids, self.discovery.known().off().is_some());
        }
    }

    /// Rows take memory and unreleased records space in the ring: both are written away before
    /// they are many.
    fn is_pressed(&self) -> bool {
        self.rows.alloc_events.len() >= ROWS_PER_FLUSH || self.channel.ring.fill() > RING_FILL
    }

    /// Takes all that is there and writes it; what waits for its turn goes into the journal, for
    /// the next run. True if it was written.
    pub fn pause(&mut self) -> bool {
        while self.drain() > 0 {}
        self.sweep();
        self.report_mapped();
        self.stacks.settle(LAST_NAMES);
        self.flush(true);
        !self.flush_failed
    }

    /// As [`Self::pause`], for a run that none follows: what waits is taken as it is.
    pub fn finish(&mut self) -> bool {
        while self.drain() > 0 {}
        while let Some(ordered) = self.orderer.next(u64::MAX) {
            self.handle(&ordered);
        }
        self.pause()
    }

    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Libraries that were hooked, and how many of their functions were and could not be.
    pub fn hooked(&self) -> (Vec<String>, usize, usize) {
        let known = self.discovery.known();
        let (hooked, refused) = known.hooked();
        (known.libraries(), hooked, refused)
    }

    /// Why the probes are switched off; `None` if they are on.
    pub fn off(&self) -> Option<String> {
        self.discovery.known().off().map(str::to_string)
    }

    /// Up to when the books tell what was, CLOCK_MONOTONIC nanoseconds: they are behind the clock
    /// while events wait to be read or for their turn.
    fn known_until_ns(&self) -> u64 {
        let emptied = self.emptied_ns.filter(|_| self.orderer.is_idle());
        self.applied_ns.max(emptied.unwrap_or(0))
    }

    fn drain(&mut self) -> usize {
        let now_ns = clock::monotonic_ns();
        self.emptied_ns = None;
        let Self {
            channel: Channel { ring, copies, .. },
            orderer,
            undecodable,
            filter,
            stacks,
            discovery,
            ..
        } = self;
        let taken = ring.read(RECORDS_PER_TURN, |bytes| {
            if walks::is_record(bytes) {
                if !stacks.python.take(bytes) {
                    error!("a record of Python frames makes no sense");
                    *undecodable += 1;
                }
                return;
            }
            let Decoded {
                mut event,
                frames,
                mut cut,
                copied: is_copied,
                python,
            } = match record::decode(bytes) {
                Ok(decoded) => decoded,
                Err(error) => {
                    error!("a record was lost: {error}");
                    *undecodable += 1;
                    return;
                }
            };
            // What has to be done while the process can be asked is not left for the event's turn.
            let (tgid, probed, call) = match &event {
                Event::Call(call) => (call.tgid, call.hook().symbol, (call.tid, call.enter_ns)),
                Event::Framework(told) => (told.tgid, told.probed(), (told.tid, told.at_ns)),
                Event::Exec { tgid, .. } | Event::Exit { tgid, .. } => (*tgid, "", (0, 0)),
            };
            let wanted = |filter: &mut Box<dyn Filter>| filter.wants(tgid);
            let stack = if !frames.is_empty() && filter.as_mut().is_none_or(wanted) {
                let seen = || {
                    let known = discovery.known();
                    let seen = known.seen(tgid);
                    seen.map(|seen| seen.mappings.clone()).unwrap_or_default()
                };
                let copied = is_copied.then(|| copies.find(event.seq())).flatten();
                // The ring of copies was emptied meanwhile.
                cut |= is_copied && copied.is_none();
                let walked = match python {
                    PythonOf::Sent => stacks.python.of_call(call.0, call.1),
                    PythonOf::None | PythonOf::Lost => None,
                };
                let taken = Taken {
                    frames,
                    cut,
                    copied,
                    walked: walked.as_ref(),
                    python,
                };
                let layout = || {
                    let known = discovery.known();
                    let found = known.python(tgid)?;
                    found.layout.clone().ok()
                };
                stacks.resolve(tgid, probed, &taken, seen, layout)
            } else {
                Stack::default()
            };
            match &mut event {
                Event::Call(call) => call.stack = stack,
                Event::Framework(told) => told.stack = stack,
                Event::Exec { tgid, .. } => {
                    stacks.forget(*tgid);
                    discovery.look(*tgid);
                }
                Event::Exit { .. } => {}
            }
            orderer.push(event, now_ns);
        });
        // One by one, since a flush on the way has to find what waits.
        while let Some(ordered) = self.orderer.next(now_ns) {
            self.handle(&ordered);
        }
        let is_empty = taken < RECORDS_PER_TURN;
        self.channel.copies.end_turn(is_empty);
        self.emptied_ns = is_empty.then_some(now_ns);
        taken
    }

    fn handle(&mut self, ordered: &Ordered) {
        self.applied_ns = self.applied_ns.max(ordered.event.effect_ns());
        match &ordered.event {
            Event::Call(call) => self.handle_call(ordered, call),
            Event::Framework(told) => self.handle_told(ordered, told),
            Event::Exec { tgid, seq, at_ns } => {
                self.retire_predecessor(*tgid, true);
                self.sample_last(*tgid);
                let before = self.rows.alloc_events.len();
                self.with_desk(|ledger, desk| ledger.replaced(*tgid, *seq, *at_ns, desk));
                self.card_of.borrow_mut().clear();
                self.told_of_rows(before, true);
                // Another program under the same process.
                self.report_process(*tgid);
            }
            Event::Exit { tgid, seq, at_ns } => {
                self.ledger.exiting(*tgid, *seq, *at_ns);
                if let Some(filter) = &mut self.filter {
                    filter.forget(*tgid);
                }
            }
        }
    }

    fn handle_call(&mut self, ordered: &Ordered, call: &TracedCall) {
        if self
            .filter
            .as_mut()
            .is_some_and(|filter| !filter.wants(call.tgid))
        {
            return;
        }
        self.window.counts.uprobe_events += 1;
        self.totals.events += 1;
        self.meet(call.tgid, call.enter_ns);
        let before = self.rows.alloc_events.len();
        let turn = Turn { ordered, call };
        self.with_desk(|ledger, desk| ledger.apply(turn, desk));
        self.place_new(before);
        self.told_of_rows(before, false);
    }

    /// The books, and a desk with what the engine knows of cards and time.
    fn with_desk<T>(&mut self, work: impl FnOnce(&mut Ledger, &mut Desk<'_>) -> T) -> T {
        let (cards, cache) = (&self.cards, &self.card_of);
        let card = |process: &Process, device: Option<i32>| {
            let key = (process.process_id, device);
            if let Some(known) = cache.borrow().get(&key) {
                return known.clone();
            }
            let visible = process.program.visible_devices.as_deref();
            let order = process.program.device_order.as_deref();
            let found = device
                .and_then(|device| gpu::card_of_ordinal(cards, visible, order, device))
                .map(|card| Arc::from(card.uuid.as_str()));
            cache.borrow_mut().insert(key, found.clone());
            found
        };
        let mut desk = Desk {
            clock: &self.clock,
            card: &card,
            rows: &mut self.rows.alloc_events,
        };
        work(&mut self.ledger, &mut desk)
    }

    /// Rows from `before` on are new.
    fn told_of_rows(&mut self, before: usize, implicit: bool) {
        let new = &self.rows.alloc_events[before..];
        if implicit {
            self.window.counts.agent_events += new.len() as u64;
        }
        if let Some(observer) = &mut self.observer {
            new.iter().for_each(|row| observer.row(row));
        }
    }

    fn take_samples(&mut self, samples: Vec<gpu::Sample>) {
        for sample in samples {
            match self
                .cards
                .iter_mut()
                .find(|card| card.uuid == sample.card.uuid)
            {
                Some(card) if *card == sample.card => {}
                Some(card) => {
                    card.clone_from(&sample.card);
                    self.card_of.borrow_mut().clear();
                }
                None => {
                    self.cards.push(sample.card.clone());
                    self.card_of.borrow_mut().clear();
                }
            }
            self.take_baselines(&sample);
            let process_ids = sample
                .processes
                .iter()
                .map(|(pid, _)| {
                    let start = StartTime::of(*pid)?;
                    Some(self.host.process_id(*pid, start))
                })
                .collect();
            self.rows.devices.push(DeviceRow {
                sample,
                process_ids,
            });
        }
    }
}
