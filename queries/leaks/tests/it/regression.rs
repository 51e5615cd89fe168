use proptest::prelude::*;
use vramscope_leaks::Settings;
use vramscope_leaks::design::{Clock, Design};
use vramscope_leaks::series::{Bytes, Load, Span};

use crate::host::Host;
use crate::naive::least_squares;

/// Design, load and the bytes of one noisy stack, of the window of `len` blocks from `first` on.
fn window(seed: u64, first: usize, len: usize, clock: Clock) -> (Design, Load, Vec<f64>) {
    let settings = Settings::default();
    let mut host = Host::new(seed);
    let slots = host.stack(0.01, |_, n, running| 4e8 + 7e3 * n + 2e6 * running);
    let process = host.process(vec![("noisy", slots)]);
    let span = Span::of(&settings, &process).unwrap();
    let load = Load::of(&span, &process.loads);
    let bytes = Bytes::of(&settings, &span, &process.stacks[0].1, &[]);
    let design = Design::plain(&span, &load, first, len, clock).unwrap();
    (design, load, bytes.mean[first..first + len].to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Growth and its error are those of ordinary least squares, the error inflated by rho.
    #[test]
    fn the_plain_fit_is_ordinary_least_squares(
        seed in 0_u64..1000, first in 0_usize..40, len in 12_usize..48, by_time: bool,
    ) {
        let clock = if by_time { Clock::Time } else { Clock::Requests };
        let (design, load, y) = window(seed, first, len, clock);
        let fits = design.fit(&Settings::default(), &y);
        let blocks = first..first + len;
        // KV use is a multiple of running requests here: the design drops it, and so does this.
        let columns = [vec![1.0; len], load.running[blocks].to_vec(), design.u.clone()];
        let (found, inverse) = least_squares(&columns, &y);
        let fitted = |i: usize| (0..3).map(|c| found[c] * columns[c][i]).sum::<f64>();
        let residuals: Vec<f64> = (0..len).map(|i| y[i] - fitted(i)).collect();
        let squares: f64 = residuals.iter().map(|r| r * r).sum();
        let lag: f64 = residuals.windows(2).map(|w| w[0] * w[1]).sum::<f64>() / squares;
        let rho = (lag + 2.5 / len as f64).clamp(0.0, 0.9);
        let variance = squares / (len as f64 - 3.0) + 1e6;
        let error = (variance * inverse[2][2] * (1.0 + rho) / (1.0 - rho)).sqrt();
        prop_assert!((fits.plain.growth / found[2] - 1.0).abs() < 1e-6, "{} {}", fits.plain.growth, found[2]);
        prop_assert!((fits.plain.error / error - 1.0).abs() < 1e-4, "{} {}", fits.plain.error, error);
    }

    /// Growth that is exact is found exactly, whatever load lies on it.
    #[test]
    fn exact_growth_is_found(per_request in 0.0_f64..1e6, per_running in 0.0_f64..1e7, seed in 0_u64..100) {
        let settings = Settings::default();
        let mut host = Host::new(seed);
        let slots = host.stack(0.0, |_, n, running| 1e8 + per_request * n + per_running * running);
        let process = host.process(vec![("exact", slots)]);
        let span = Span::of(&settings, &process).unwrap();
        let load = Load::of(&span, &process.loads);
        let bytes = Bytes::of(&settings, &span, &process.stacks[0].1, &[]);
        let design = Design::new(&settings, &span, &load, 10, 32, Clock::Requests).unwrap();
        let fits = design.fit(&settings, &bytes.mean[10..42]);
        prop_assert!((fits.plain.growth / design.requests - per_request).abs() < 1.0 + 1e-6 * per_request);
    }
}
