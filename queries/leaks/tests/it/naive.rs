//! Least squares by the normal equations and Gauss-Jordan elimination: slow, and nothing in common
//! with the product's projections.

/// Coefficients, and the inverse of X'X.
pub fn least_squares(columns: &[Vec<f64>], y: &[f64]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let p = columns.len();
    let product = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let mut left: Vec<Vec<f64>> = (0..p)
        .map(|i| (0..p).map(|j| product(&columns[i], &columns[j])).collect())
        .collect();
    let mut right: Vec<Vec<f64>> = (0..p)
        .map(|i| (0..p).map(|j| f64::from(u8::from(i == j))).collect())
        .collect();
    for pivot in 0..p {
        let best = (pivot..p)
            .max_by(|a, b| left[*a][pivot].abs().total_cmp(&left[*b][pivot].abs()))
            .unwrap();
        left.swap(pivot, best);
        right.swap(pivot, best);
        let by = left[pivot][pivot];
        for column in 0..p {
            left[pivot][column] /= by;
            right[pivot][column] /= by;
        }
        for row in (0..p).filter(|row| *row != pivot) {
            let times = left[row][pivot];
            for column in 0..p {
                left[row][column] -= times * left[pivot][column];
                right[row][column] -= times * right[pivot][column];
            }
        }
    }
    let with_y: Vec<f64> = columns.iter().map(|column| product(column, y)).collect();
    let found = right.iter().map(|row| product(row, &with_y)).collect();
    (found, right)
}
