//! The regressors of one window, shared by all stacks of a process.
//!
//! Y = a + b1 R + b2 K + g u, where R is the mean of running requests, K the use of the KV pool and
//! u the share of the window's requests (or of its time) that has gone by; and the same with one
//! nuisance shape s more: Y = a + b1 R + b2 K + g u + c s.
//!
//! By the theorem of Frisch, Waugh and Lovell, g and c are those of the regression of what is left
//! of Y on what is left of u and s after [1, R, K]. So [1, R, K] is made orthonormal once, u and
//! every s are freed of it once, and a fit is a few sums of products per stack.

use crate::series::{Load, Span};
use crate::settings::Settings;
use crate::stats::dot;

/// What runs from 0 to 1 over a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Share of the window's requests: leaks per request.
    Requests,
    /// Share of the window's time: leaks per hour.
    Time,
}

impl Clock {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Clock::Requests => "requests",
            Clock::Time => "time",
        }
    }
}

/// Another explanation of growth.
#[derive(Debug, Clone)]
pub struct Shape {
    /// What it is, for people.
    pub name: ShapeName,
    /// What is left of it after [1, R, K].
    left: Vec<f64>,
    /// left . left
    own: f64,
    /// left . what is left of u
    with_clock: f64,
}

/// Which other explanation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ShapeName {
    /// Requests completed in the last so many minutes: what lives that long.
    Recent(f64),
    /// A cache that fills: 1 - exp(-u / share).
    Saturating(f64),
    /// log(1 + requests / n).
    Logarithm(f64),
    /// Square root of the requests.
    Root,
    /// Most requests at once so far.
    RunningHigh,
    /// Most use of the KV pool so far.
    KvHigh,
    /// A jump at a block.
    Step(usize),
    /// Growth that stops at a block.
    Stop(usize),
    /// Growth that begins at a block.
    Onset(usize),
}

impl std::fmt::Display for ShapeName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ShapeName::Recent(minutes) => write!(f, "what lives for {minutes:.0} min"),
            ShapeName::Saturating(share) => {
                write!(f, "a cache that fills within {share} of the window")
            }
            ShapeName::Logarithm(n) => write!(f, "growth by the logarithm of requests (n0 {n})"),
            ShapeName::Root => f.write_str("growth by the square root of requests"),
            ShapeName::RunningHigh => f.write_str("the most requests at once so far"),
            ShapeName::KvHigh => f.write_str("the highest KV use so far"),
            ShapeName::Step(block) => write!(f, "a step at block {block}"),
            ShapeName::Stop(block) => write!(f, "growth that stops at block {block}"),
            ShapeName::Onset(block) => write!(f, "growth that begins at block {block}"),
        }
    }
}

/// Time constants of filling caches, as shares of the window.
const SATURATING: [f64; 5] = [0.15, 0.3, 0.6, 1.2, 2.5];
/// Requests after which a logarithm bends.
const LOGARITHM: [f64; 4] = [200.0, 1000.0, 5000.0, 20_000.0];
/// Lifetimes of what requests leave for a while, minutes, for blocks of 30 minutes; they scale
/// with the block.
const RECENT: [f64; 5] = [15.0, 30.0, 60.0, 120.0, 240.0];

/// The regressors of one window and clock.
#[derive(Debug, Clone)]
pub struct Design {
    /// First block of the window.
    pub first: usize,
    /// Blocks of the window.
    pub len: usize,
    /// What u is a share of.
    pub clock: Clock,
    /// Requests completed in the window.
    pub requests: f64,
    /// u by block: the mean over the block.
    pub u: Vec<f64>,
    basis: Basis,
    u_left: Vec<f64>,
    u_own: f64,
    shapes: Vec<Shape>,
}

/// An orthonormal basis of [1, R, K], and how to get back to them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Basis {
    vectors: Vec<Vec<f64>>,
    /// Which of 1, R, K each vector came from, and its combination of them.
    combinations: Vec<[f64; 3]>,
}

/// A column is dropped when less than this share of its square is its own.
const COLLINEAR: f64 = 1e-9;

impl Basis {
    pub(crate) fn of(columns: [&[f64]; 3]) -> Basis {
        let mut basis = Basis::default();
        for (index, column) in columns.into_iter().enumerate() {
            let mut left = column.to_vec();
            let mut combination = [0.0; 3];
            combination[index] = 1.0;
            // Twice, for what rounding leaves the first time.
            for _ in 0..2 {
                for (vector, of) in basis.vectors.iter().zip(&basis.combinations) {
                    let share = dot(vector, &left);
                    subtract(&mut left, share, vector);
                    for (own, other) in combination.iter_mut().zip(of) {
                        *own -= share * other;
                    }
                }
            }
            let (own, whole) = (dot(&left, &left), dot(column, column));
            if own <= COLLINEAR * whole || own <= 0.0 {
                continue;
            }
            let length = own.sqrt();
            left.iter_mut().for_each(|v| *v /= length);
            combination.iter_mut().for_each(|c| *c /= length);
            basis.vectors.push(left);
            basis.combinations.push(combination);
        }
        basis
    }

    /// What is left of a column.
    pub(crate) fn free(&self, column: &[f64]) -> Vec<f64> {
        let mut left = column.to_vec();
        for vector in &self.vectors {
            let share = dot(vector, &left);
            subtract(&mut left, share, vector);
        }
        left
    }

    /// Coefficients of 1, R and K in the projection of a column.
    fn coefficients(&self, column: &[f64]) -> [f64; 3] {
        let mut found = [0.0; 3];
        for (vector, combination) in self.vectors.iter().zip(&self.combinations) {
            let share = dot(vector, column);
            for (total, part) in found.iter_mut().zip(combination) {
                *total += share * part;
            }
        }
        found
    }
}

fn subtract(from: &mut [f64], times: f64, vector: &[f64]) {
    for (value, part) in from.iter_mut().zip(vector) {
        *value -= times * part;
    }
}

/// An estimate of g with its error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Growth over the window, bytes.
    pub growth: f64,
    /// Its standard error.
    pub error: f64,
}

/// A stack's fits in one window.
#[derive(Debug, Clone)]
pub struct Fits {
    /// Without a nuisance shape.
    pub plain: Estimate,
    /// Of all fits, the one with the smallest lower bound.
    pub lowest: Estimate,
    /// Which shape that was; `None`: the plain fit.
    pub lowest_shape: Option<ShapeName>,
    /// The smallest growth of all fits, and its shape.
    pub least_growth: (f64, Option<ShapeName>),
    /// The largest error of all fits.
    pub largest_error: f64,
    /// The plain fit's correlation of one residual with the next, as it inflates the error.
    pub rho: f64,
    /// Coefficients of R and K in the plain fit.
    pub load: [f64; 2],
    /// Mean square of the plain fit's residuals.
    pub residual: f64,
}

impl Design {
    /// The design of the window of `len` blocks that starts at `first`. `None` if its clock stands
    /// still.
    pub fn new(
        settings: &Settings,
        span: &Span,
        load: &Load,
        first: usize,
        len: usize,
        clock: Clock,
    ) -> Option<Design> {
        let mut design = Design::plain(span, load, first, len, clock)?;
        design.add_shapes(settings, span, load);
        Some(design)
    }

    /// The same without nuisance shapes.
    pub fn plain(
        span: &Span,
        load: &Load,
        first: usize,
        len: usize,
        clock: Clock,
    ) -> Option<Design> {
        let blocks = first..first + len;
        let (from, to) = (span.first_slot(first), span.first_slot(first + len));
        let requests = load.completed[to] - load.completed[from];
        let u: Vec<f64> = match clock {
            Clock::Requests if requests <= 0.0 => return None,
            Clock::Requests => blocks
                .clone()
                .map(|b| (load.completed_mean[b] - load.completed[from]) / requests)
                .collect(),
            Clock::Time => (0..len).map(|i| (i as f64 + 0.5) / len as f64).collect(),
        };
        let ones = vec![1.0; len];
        let basis = Basis::of([&ones, &load.running[blocks.clone()], &load.kv[blocks]]);
        let u_left = basis.free(&u);
        let u_own = dot(&u_left, &u_left);
        if u_own <= COLLINEAR * dot(&u, &u) {
            return None;
        }
        Some(Design {
            first,
            len,
            clock,
            requests,
            u,
            basis,
            u_left,
            u_own,
            shapes: Vec::new(),
        })
    }

    fn add_shapes(&mut self, settings: &Settings, span: &Span, load: &Load) {
        let (first, len) = (self.first, self.len);
        let blocks = first..first + len;
        let slot_minutes = settings.slot_ns() as f64 / 6e10;
        if load.completed.last().is_some_and(|total| *total > 0.0) {
            for minutes in RECENT {
                let minutes = minutes * f64::from(settings.block_minutes) / 30.0;
                let back = minutes / slot_minutes;
                let recent = blocks.clone().map(|block| {
                    let slots = span.first_slot(block)..span.first_slot(block + 1);
                    slots
                        .map(|s| load.at(s as f64 + 0.5) - load.at(s as f64 + 0.5 - back))
                        .sum()
                });
                let recent: Vec<f64> = recent.collect();
                self.add(ShapeName::Recent(minutes), &recent);
            }
            let total = &load.completed_mean[blocks.clone()];
            for n in LOGARITHM {
                let bent: Vec<f64> = total.iter().map(|t| (1.0 + t / n).ln()).collect();
                self.add(ShapeName::Logarithm(n), &bent);
            }
            let root: Vec<f64> = total.iter().map(|t| t.sqrt()).collect();
            self.add(ShapeName::Root, &root);
            self.add(ShapeName::RunningHigh, &load.running_high[blocks.clone()]);
            self.add(ShapeName::KvHigh, &load.kv_high[blocks]);
        }
        for share in SATURATING {
            let filling: Vec<f64> = self.u.iter().map(|u| 1.0 - (-u / share).exp()).collect();
            self.add(ShapeName::Saturating(share), &filling);
        }
        for at in 1..len {
            let step: Vec<f64> = (0..len).map(|i| if i >= at { 1.0 } else { 0.0 }).collect();
            self.add(ShapeName::Step(first + at), &step);
        }
        // A knee in the later half would leave too little to tell the growth after it.
        for at in 1..=len / 2 {
            let knee = self.u[at];
            let stop: Vec<f64> = self.u.iter().map(|u| u.min(knee)).collect();
            self.add(ShapeName::Stop(first + at), &stop);
        }
    }

    fn add(&mut self, name: ShapeName, column: &[f64]) {
        let left = self.basis.free(column);
        let own = dot(&left, &left);
        let with_clock = dot(&left, &self.u_left);
        let is_new = own > COLLINEAR * dot(column, column)
            && own * self.u_own - with_clock * with_clock > 1e-6 * own * self.u_own;
        if is_new {
            self.shapes.push(Shape {
                name,
                left,
                own,
                with_clock,
            });
        }
    }

    /// Fits one stack: `bytes` are its means by block, of the window.
    pub fn fit(&self, settings: &Settings, bytes: &[f64]) -> Fits {
        let left = self.basis.free(bytes);
        let with_clock = dot(&left, &self.u_left);
        let growth = with_clock / self.u_own;
        let mut residuals = left.clone();
        subtract(&mut residuals, growth, &self.u_left);
        let parameters = self.basis.vectors.len() + 1;
        let (variance, rho) = noise(settings, &residuals, parameters);
        let plain = Estimate {
            growth,
            error: (variance / self.u_own).sqrt(),
        };
        let mut without_clock = bytes.to_vec();
        subtract(&mut without_clock, growth, &self.u);
        let [_, of_running, of_kv] = self.basis.coefficients(&without_clock);
        let mut fits = Fits {
            plain,
            lowest: plain,
            lowest_shape: None,
            least_growth: (growth, None),
            largest_error: plain.error,
            rho,
            load: [of_running, of_kv],
            residual: dot(&residuals, &residuals) / self.len as f64,
        };
        for shape in &self.shapes {
            let Some(estimate) = self.fit_with(settings, shape, &left, with_clock, &mut residuals)
            else {
                continue;
            };
            let bound = |e: &Estimate| e.growth - settings.standard_errors * e.error;
            if bound(&estimate) < bound(&fits.lowest) {
                (fits.lowest, fits.lowest_shape) = (estimate, Some(shape.name));
            }
            if estimate.growth < fits.least_growth.0 {
                fits.least_growth = (estimate.growth, Some(shape.name));
            }
            fits.largest_error = fits.largest_error.max(estimate.error);
        }
        fits
    }

    /// The fit with one shape more; `None` if the stack has none of it.
    fn fit_with(
        &self,
        settings: &Settings,
        shape: &Shape,
        left: &[f64],
        with_clock: f64,
        residuals: &mut [f64],
    ) -> Option<Estimate> {
        let with_shape = dot(left, &shape.left);
        let determinant = self.u_own * shape.own - shape.with_clock * shape.with_clock;
        let of_shape = (self.u_own * with_shape - shape.with_clock * with_clock) / determinant;
        if of_shape <= 0.0 {
            return None;
        }
        let growth = (shape.own * with_clock - shape.with_clock * with_shape) / determinant;
        for (index, residual) in residuals.iter_mut().enumerate() {
            *residual = left[index] - growth * self.u_left[index] - of_shape * shape.left[index];
        }
        let (variance, _) = noise(settings, residuals, self.basis.vectors.len() + 2);
        let of_shape_error = (variance * self.u_own / determinant).sqrt();
        if of_shape < settings.rival_errors * of_shape_error {
            return None;
        }
        Some(Estimate {
            growth,
            error: (variance * shape.own / determinant).sqrt(),
        })
    }
}

/// Variance of one observation, inflated for residuals that resemble the one before, and the
/// correlation it was inflated by.
fn noise(settings: &Settings, residuals: &[f64], parameters: usize) -> (f64, f64) {
    let (n, p) = (residuals.len() as f64, parameters as f64);
    let squares = dot(residuals, residuals);
    let variance = squares / (n - p).max(1.0) + settings.noise_bytes * settings.noise_bytes;
    let rho = (crate::stats::lag_one(residuals) + (1.0 + p / 2.0) / n).clamp(0.0, 0.9);
    (variance * (1.0 + rho) / (1.0 - rho), rho)
}
