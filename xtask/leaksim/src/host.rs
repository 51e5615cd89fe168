//! One host's run: the load, the process's lifetimes, the stacks, the planted leak.

use rand::RngExt;
use rand::seq::SliceRandom;
use rand_pcg::Pcg64Mcg;

use crate::arrivals::{Pattern, replay};
use crate::draw::generator;
use crate::leak::{Leak, Leaked};
use crate::levels::{Level, Past};
use crate::serving::{Engine, Load, PAGE_TOKENS, TICK, serve};
use crate::stacks::{Class, Stack};
use crate::windows::Books;
use crate::{
    Condition, Kind, Process, REPORT_SEEDS, Run, StackName, Traces, Traffic, Truth, Window,
};

const HOUR: f64 = 3600.0;

/// What the parts draw from generators of their own for.
mod purpose {
    pub(super) const HOST: u64 = 1;
    pub(super) const ARRIVALS: u64 = 2;
    pub(super) const STACKS: u64 = 3;
    pub(super) const NAMES: u64 = 4;
    pub(super) const NOISE: u64 = 5;
    pub(super) const LEAK: u64 = 6;
    pub(super) const LEAKING: u64 = 7;
    pub(super) const SCRAPES: u64 = 8;
    pub(super) const AMBIGUOUS: u64 = 9;
}

/// A window in this many is written although nothing happened, as agents do.
const HEARTBEAT: usize = 60;

pub(crate) fn run(traces: &Traces, seed: u64, condition: &Condition) -> Run {
    let seconds = f64::from(condition.hours) * HOUR;
    let mut random = generator(seed, &[purpose::HOST]);
    let trace = &traces.all()[random.random_range(0..traces.all().len())];
    let pattern = Pattern::draw(&mut random, seconds);
    let engine = Engine::draw(&mut random, pattern.mean_rate(), &trace.requests);
    let processes = lifetimes(&mut random, condition, seconds);
    let requests = {
        let mut random = generator(seed, &[purpose::ARRIVALS]);
        replay(trace, &pattern, seconds, &mut random)
    };

    let pace = pattern.mean_rate();
    let mut stacks = draw_stacks(seed, pace);
    let planted = draw_planted(seed, &stacks);
    let onset = onset(seed, condition, &processes);
    let leak = condition.leak.map(|leak| {
        let mut random = generator(seed, &[purpose::LEAK]);
        Leak::draw(leak.kind, leak.bytes_per_request, onset, pace, &mut random)
    });
    if let Some(what) = condition.ambiguous {
        let mut random = generator(seed, &[purpose::AMBIGUOUS]);
        stacks.push(Stack::ambiguous(what, pace, &mut random));
    }
    let names = Names::draw(seed, stacks.len(), &processes);

    let mut host = Host {
        condition,
        seed,
        stacks: &stacks,
        names: &names,
        planted,
        leak,
        engine: &engine,
        traffic: Vec::new(),
        windows: Vec::new(),
        leaked_bytes: 0.0,
        requests: 0.0,
    };
    for (index, process) in processes.iter().enumerate() {
        let loading = random.random_range(120.0..400.0);
        let loads = serve(&engine, &requests, process.start, loading, process.end);
        host.live(index, process, loading, &loads);
    }
    let (traffic, mut windows) = (host.traffic, host.windows);
    // Processes follow each other, and so do their windows; within one by time.
    windows.sort_by(|a, b| a.start.total_cmp(&b.start));
    let ids = |slot: usize| {
        names.of_slot[slot]
            .iter()
            .map(|name| names.all[*name].stack_id)
    };
    let mut planted_stack_ids: Vec<i64> = ids(planted).collect();
    planted_stack_ids.dedup();
    let truth = Truth {
        seed,
        condition: *condition,
        planted_stack_ids,
        planted_on: stacks[planted].class,
        ambiguous_stack_ids: match condition.ambiguous {
            Some(_) => ids(stacks.len() - 1).collect(),
            None => Vec::new(),
        },
        onset,
        leaked_bytes: host.leaked_bytes,
        requests: host.requests,
        mean_rate: pace,
        trace: trace.name.to_string(),
        processes: processes.clone(),
        classes: names.slots.iter().map(|slot| stacks[*slot].class).collect(),
    };
    Run {
        processes,
        stacks: names.all,
        traffic,
        windows,
        window_seconds: condition.window_seconds,
        truth,
    }
}

/// Restarted once in a quarter of the runs and deployed to in a seventh, at any hour from 6 to 6
/// before the end; where a deploy is asked for, within hours 6 to 16.
fn lifetimes(random: &mut Pcg64Mcg, condition: &Condition, seconds: f64) -> Vec<Process> {
    let latest = (seconds - 6.0 * HOUR).max(6.5 * HOUR);
    let mut moment = |from: f64, to: f64| (random.random_range(from..to) / TICK).floor() * TICK;
    let (restart, deploy) = (moment(6.0 * HOUR, latest), moment(6.0 * HOUR, latest));
    let asked = moment(6.0 * HOUR, 16.0 * HOUR);
    let restarts = random.random_bool(0.25);
    let deploys = random.random_bool(0.15);
    let mut ends = Vec::new();
    if restarts {
        ends.push((restart, 0));
    }
    if condition.deploy {
        ends.push((asked, 1));
    } else if deploys {
        ends.push((deploy, 1));
    }
    // Two within an hour are one.
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    if ends.len() == 2 && ends[1].0 - ends[0].0 < HOUR {
        ends.retain(|end| end.1 == 1);
    }
    ends.retain(|end| end.0 < seconds - HOUR);
    let mut processes = Vec::new();
    let (mut start, mut version) = (0.0, 0);
    for (end, deployed) in ends.into_iter().chain([(seconds, 0)]) {
        processes.push(Process {
            process_id: (random.random::<u64>() >> 1) as i64,
            pid: random.random_range(300..4_000_000),
            start,
            end,
            lives: end >= seconds,
            version,
        });
        start = end + TICK * f64::from(random.random_range(1..5));
        version += deployed;
    }
    processes
}

fn draw_stacks(seed: u64, pace: f64) -> Vec<Stack> {
    let mut random = generator(seed, &[purpose::STACKS]);
    let held_back = REPORT_SEEDS.contains(&seed);
    let mut classes = Vec::new();
    for (class, count) in Class::USUAL {
        // Twelve make place for those held back.
        let fewer = match class {
            Class::PerRequest if held_back => 6,
            Class::Cache if held_back => 4,
            Class::Log if held_back => 2,
            _ => 0,
        };
        classes.extend(std::iter::repeat_n(class, count - fewer));
    }
    if held_back {
        classes.extend(
            Class::HELD_BACK
                .into_iter()
                .flat_map(|class| [class, class]),
        );
    }
    classes.shuffle(&mut random);
    let draw = |class| Stack::draw(class, pace, &mut random);
    classes.into_iter().map(draw).collect()
}

/// Every class is as likely, and within it every stack.
fn draw_planted(seed: u64, stacks: &[Stack]) -> usize {
    let mut random = generator(seed, &[purpose::LEAK, 1]);
    let mut classes: Vec<Class> = stacks.iter().map(|stack| stack.class).collect();
    classes.sort_unstable();
    classes.dedup();
    let class = classes[random.random_range(0..classes.len())];
    let of_class: Vec<usize> = (0..stacks.len())
        .filter(|i| stacks[*i].class == class)
        .collect();
    of_class[random.random_range(0..of_class.len())]
}

/// When the leak begins, in the leaky run as in its twin.
fn onset(seed: u64, condition: &Condition, processes: &[Process]) -> f64 {
    let mut random = generator(seed, &[purpose::LEAK, 2]);
    let late = random.random_range(4.0..14.0) * HOUR;
    if condition.deploy {
        let deployed = processes.iter().find(|process| process.version > 0);
        return deployed.map_or(0.0, |process| process.start);
    }
    match condition.leak {
        Some(leak) if leak.kind == Kind::Late => late,
        _ => 0.0,
    }
}

/// Stacks as the tables name them: a stack whose code a deploy moved has another id from then on.
struct Names {
    all: Vec<StackName>,
    /// The slot of each of `all`.
    slots: Vec<usize>,
    /// Of each slot, its name by version.
    of_slot: Vec<Vec<usize>>,
}

/// Parts of function names, put together at random: a name tells nothing of what its stack does.
const VERBS: [&str; 12] = [
    "prepare", "forward", "schedule", "update", "fetch", "merge", "apply", "collect", "launch",
    "resolve", "append", "dispatch",
];
const NOUNS: [&str; 16] = [
    "batch",
    "hidden_states",
    "request",
    "buffer",
    "sampler",
    "tokens",
    "layer",
    "session",
    "plan",
    "output",
    "embedding",
    "mask",
    "block_table",
    "logits",
    "response",
    "stage",
];
const MODULES: [&str; 6] = [
    "libengine.so",
    "libtorch_cuda.so",
    "libkernels.so",
    "librouter.so",
    "libplugins.so",
    "serve",
];

impl Names {
    fn draw(seed: u64, slots: usize, processes: &[Process]) -> Self {
        let mut random = generator(seed, &[purpose::NAMES]);
        let versions = processes.last().map_or(0, |process| process.version) as usize + 1;
        let mut names = Self {
            all: Vec::new(),
            slots: Vec::new(),
            of_slot: Vec::new(),
        };
        for slot in 0..slots {
            let mut of_version = vec![names.add(slot, None, &mut random)];
            for version in 1..versions {
                let before = of_version[version - 1];
                let moved = random.random_bool(0.08);
                of_version.push(match moved {
                    true => names.add(slot, Some(before), &mut random),
                    false => before,
                });
            }
            names.of_slot.push(of_version);
        }
        names
    }

    fn add(&mut self, slot: usize, like: Option<usize>, random: &mut Pcg64Mcg) -> usize {
        let stack_id = (random.random::<u64>() >> 1) as i64;
        let name = match like {
            Some(like) => StackName {
                stack_id,
                ..self.all[like].clone()
            },
            None => Self::draw_name(stack_id, random),
        };
        self.all.push(name);
        self.slots.push(slot);
        self.all.len() - 1
    }

    fn draw_name(stack_id: i64, random: &mut Pcg64Mcg) -> StackName {
        let depth = random.random_range(4..14);
        let function = |random: &mut Pcg64Mcg| {
            let verb = VERBS[random.random_range(0..VERBS.len())];
            let noun = NOUNS[random.random_range(0..NOUNS.len())];
            format!("{verb}_{noun}_{}", random.random_range(0..1000))
        };
        let above = ["main", "serve_forever"].map(str::to_string);
        let below: Vec<String> = (0..depth).map(|_| function(random)).collect();
        let (memory_kind, layer) = match random.random_range(0..100) {
            0..80 => ("device", "driver"),
            80..92 => ("framework_block", "framework"),
            _ => ("pinned_host", "driver"),
        };
        StackName {
            stack_id,
            functions: above.into_iter().chain(below).collect(),
            module: MODULES[random.random_range(0..MODULES.len())].to_string(),
            memory_kind,
            layer,
        }
    }
}

struct Host<'a> {
    condition: &'a Condition,
    seed: u64,
    stacks: &'a [Stack],
    names: &'a Names,
    planted: usize,
    leak: Option<Leak>,
    engine: &'a Engine,
    traffic: Vec<Traffic>,
    windows: Vec<Window>,
    leaked_bytes: f64,
    requests: f64,
}

impl Host<'_> {
    /// One lifetime of the process.
    fn live(&mut self, index: usize, process: &Process, loading: f64, loads: &[Load]) {
        self.scrape(index, process, loading, loads);
        let mut leaked = Leaked::default();
        let mut leaking = generator(self.seed, &[purpose::LEAKING, index as u64]);
        // Cumulative, so that one stack at a time can be written.
        let leak_of_tick: Vec<Leaked> = loads
            .iter()
            .map(|load| {
                if let Some(leak) = &self.leak {
                    leak.step(&mut leaked, load, process.start + load.age, &mut leaking);
                }
                leaked.clone()
            })
            .collect();
        self.leaked_bytes += leaked.bytes;
        self.requests += loads.last().map_or(0.0, |load| load.completed);
        for slot in 0..self.stacks.len() {
            let leaks = (slot == self.planted).then_some(&leak_of_tick);
            self.write_stack(slot, index, process, loads, leaks);
        }
    }

    fn write_stack(
        &mut self,
        slot: usize,
        index: usize,
        process: &Process,
        loads: &[Load],
        leaks: Option<&Vec<Leaked>>,
    ) {
        let stack = &self.stacks[slot];
        let name = self.names.of_slot[slot][process.version as usize];
        let mut random = generator(self.seed, &[purpose::NOISE, slot as u64, index as u64]);
        let mut level = Level::new(stack);
        let mut books = Books::new(stack.block);
        let window = f64::from(self.condition.window_seconds);
        let none = Leaked::default();
        for tick in 0..loads.len() {
            let clock = process.start + loads[tick].age;
            let past = Past {
                loads: &loads[..=tick],
                clock,
            };
            let sample = level.step(stack, &past, &mut random);
            let leaked = leaks.map_or(&none, |leaks| &leaks[tick]);
            books.tick(&sample, leaked, clock);
            let is_last = tick + 1 == loads.len();
            let dies = is_last && !process.lives;
            if dies {
                books.end_all();
            }
            // A tick never spans two windows.
            let number = ((clock - TICK / 2.0) / window) as usize;
            let is_over = (clock / window).fract() == 0.0;
            if is_over || is_last {
                let heartbeat = (number + 1).is_multiple_of(HEARTBEAT);
                let start = number as f64 * window;
                self.windows
                    .extend(books.close(index, name, start, heartbeat || dies));
            }
        }
    }

    fn scrape(&mut self, index: usize, process: &Process, loading: f64, loads: &[Load]) {
        let mut random = generator(self.seed, &[purpose::SCRAPES, index as u64]);
        let page = PAGE_TOKENS as f64;
        for load in loads {
            // The endpoint is up once the model is loaded; a scrape in two hundred fails.
            let fails = random.random_bool(0.005);
            if load.age < loading || fails {
                continue;
            }
            // Half of each request's last page is empty on average.
            let used = (load.kv_tokens / page + load.running / 2.0).ceil();
            let total = (self.engine.pool_tokens / page).ceil();
            self.traffic.push(Traffic {
                process: index,
                at: process.start + load.age,
                running: load.running as i64,
                waiting: load.waiting as i64,
                completed_total: load.completed as i64,
                prompt_tokens_total: load.prompt_tokens as i64,
                generation_tokens_total: load.output_tokens as i64,
                kv_used_pages: used.min(total) as i64,
                kv_total_pages: total as i64,
                kv_page_tokens: PAGE_TOKENS,
            });
        }
    }
}
