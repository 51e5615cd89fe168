//! Random numbers in the shapes that the simulator needs. All come from seeded generators, so a run
//! is the same on every machine.

use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Poisson, StandardNormal};
use rand_pcg::Pcg64Mcg;

/// A generator for one purpose: what one part draws never moves what another part draws, so that a
/// leaky run and its clean twin differ by the leak alone.
pub(crate) fn generator(seed: u64, purpose: &[u64]) -> Pcg64Mcg {
    let mixed = purpose
        .iter()
        .fold(mix(seed), |state, word| mix(state ^ mix(*word)));
    Pcg64Mcg::seed_from_u64(mixed)
}

/// The finishing step of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Between two positive bounds, every factor of two equally likely.
pub(crate) fn log_uniform(random: &mut Pcg64Mcg, from: f64, to: f64) -> f64 {
    random.random_range(from.ln()..to.ln()).exp()
}

/// How many of something rare; 0 for a mean that is not positive.
pub(crate) fn poisson(random: &mut Pcg64Mcg, mean: f64) -> u64 {
    match Poisson::new(mean) {
        Ok(distribution) => distribution.sample(random) as u64,
        Err(_) => 0,
    }
}

/// Mean 0, standard deviation 1.
pub(crate) fn normal(random: &mut Pcg64Mcg) -> f64 {
    StandardNormal.sample(random)
}
