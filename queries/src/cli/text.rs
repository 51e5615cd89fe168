//! How people read sizes, ages and shares.

/// 1536 -> `1.5 KiB`. Whole bytes below 1 KiB.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // What would be written as 1024.0 is 1.0 of the next unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value < 10.0 { 2 } else { 1 };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// 0.267 -> `26.7 %`.
pub fn percent(ratio: f64) -> String {
    format!("{:.1} %", ratio * 100.0)
}

/// 75.0 -> `1 min 15 s`.
pub fn age(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    match whole {
        0..1 => format!("{:.0} ms", seconds.max(0.0) * 1e3),
        1..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

/// `1 block`, `2 blocks`.
pub fn counted(count: usize, one: &str) -> String {
    if count == 1 {
        format!("{count} {one}")
    } else {
        format!("{count} {one}s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_keep_about_three_digits() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1536), "1.50 KiB");
        assert_eq!(size(20 << 20), "20.0 MiB");
        assert_eq!(size((1 << 30) - 1), "1.00 GiB");
        assert_eq!(size(u64::MAX), "16.0 EiB");
    }

    #[test]
    fn ages_have_two_units_at_most() {
        assert_eq!(age(0.012), "12 ms");
        assert_eq!(age(-1.0), "0 ms");
        assert_eq!(age(29.0), "29.0 s");
        assert_eq!(age(75.0), "1 min 15 s");
        assert_eq!(age(7300.0), "2 h 1 min");
        assert_eq!(age(200_000.0), "2 d 7 h");
        assert_eq!(percent(0.267), "26.7 %");
        assert_eq!(counted(1, "block"), "1 block");
        assert_eq!(counted(0, "block"), "0 blocks");
    }
}
