//! Small statistics over series of a few dozen values.

/// The median; the mean of the two middle values if there are two. `None` without values.
pub fn median(values: &mut [f64]) -> Option<f64> {
    let n = values.len();
    if n == 0 {
        return None;
    }
    values.sort_unstable_by(f64::total_cmp);
    if n % 2 == 1 {
        Some(values[n / 2])
    } else {
        Some((values[n / 2 - 1] + values[n / 2]) / 2.0)
    }
}

/// Kendall's tau against the order of time: (pairs that rise - pairs that fall) / all pairs
/// (tau-a: a tie counts in neither). 0 for fewer than two values.
pub fn kendall_tau(values: &[f64]) -> f64 {
    let n = values.len();
    if n < 2 {
        return 0.0;
    }
    let mut balance = 0_i64;
    for (index, earlier) in values.iter().enumerate() {
        for later in &values[index + 1..] {
            balance += i64::from(later > earlier) - i64::from(later < earlier);
        }
    }
    balance as f64 / (n * (n - 1) / 2) as f64
}

/// Slope of y over x by least squares. `None` if x does not vary.
pub fn slope(x: &[f64], y: &[f64]) -> Option<f64> {
    let n = x.len().min(y.len()) as f64;
    let (mean_x, mean_y) = (x.iter().sum::<f64>() / n, y.iter().sum::<f64>() / n);
    let (mut over, mut under) = (0.0, 0.0);
    for (x, y) in x.iter().zip(y) {
        over += (x - mean_x) * (y - mean_y);
        under += (x - mean_x) * (x - mean_x);
    }
    (under > 1e-12).then(|| over / under)
}

/// Lag-1 autocorrelation of residuals, which have mean zero. 0 for residuals that are all zero.
pub fn lag_one(residuals: &[f64]) -> f64 {
    let under: f64 = residuals.iter().map(|r| r * r).sum();
    if under <= 0.0 {
        return 0.0;
    }
    let over: f64 = residuals.windows(2).map(|pair| pair[0] * pair[1]).sum();
    over / under
}

/// How far the series ever falls below its highest value so far.
pub fn drawdown(values: &[f64]) -> f64 {
    let mut highest = f64::NEG_INFINITY;
    let mut deepest = 0.0_f64;
    for value in values {
        highest = highest.max(*value);
        deepest = deepest.max(highest - value);
    }
    deepest
}

/// Sum of products.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values worked out by hand.
    #[test]
    fn small_cases() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&mut []), None);
        // Of 1 3 2: two pairs rise, one falls.
        assert_eq!(kendall_tau(&[1.0, 3.0, 2.0]), 1.0 / 3.0);
        assert_eq!(kendall_tau(&[1.0, 1.0, 2.0]), 2.0 / 3.0);
        assert_eq!(kendall_tau(&[5.0]), 0.0);
        // Anscombe's first quartet: slope 0.500.
        let x = [10.0, 8.0, 13.0, 9.0, 11.0, 14.0, 6.0, 4.0, 12.0, 7.0, 5.0];
        let y = [
            8.04, 6.95, 7.58, 8.81, 8.33, 9.96, 7.24, 4.26, 10.84, 4.82, 5.68,
        ];
        assert!((slope(&x, &y).unwrap() - 0.500).abs() < 5e-4);
        assert_eq!(slope(&[1.0, 1.0], &[1.0, 2.0]), None);
        // 1 -1 1 -1: three products of -1 over four squares.
        assert_eq!(lag_one(&[1.0, -1.0, 1.0, -1.0]), -0.75);
        assert_eq!(lag_one(&[0.0, 0.0]), 0.0);
        assert_eq!(drawdown(&[1.0, 5.0, 2.0, 6.0, 4.0]), 3.0);
    }
}
