//! Which process lifetime this is: a process number alone is reused, so it goes with the start time.

/// A process's start time in clock ticks since boot (field 22 of `/proc/PID/stat`), or `None` if
/// there is no such process.
pub fn start_ticks(pid: u32) -> Option<u64> {
    Some(stat(pid)?.1)
}

/// Whether the process lifetime still runs. A zombie does not: its memory is gone.
pub fn is_alive(pid: u32, start_ticks: u64) -> bool {
    stat(pid).is_some_and(|(state, ticks)| ticks == start_ticks && !matches!(state, 'Z' | 'X'))
}

/// State letter (field 3) and start time (field 22).
fn stat(pid: u32) -> Option<(char, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&text)
}

/// The command name (field 2) may hold blanks and brackets: the fields are counted from its end.
fn parse_stat(text: &str) -> Option<(char, u64)> {
    let after_name = &text[text.rfind(')')? + 1..];
    let mut fields = after_name.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // The next field is number 4, so number 22 is 18 further on.
    let ticks = fields.nth(18)?.parse().ok()?;
    Some((state, ticks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let text = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4321 99 100\n";
        assert_eq!(parse_stat(text), Some(('S', 4321)));
    }

    #[test]
    fn this_process_is_alive_and_another_lifetime_of_it_is_not() {
        let pid = std::process::id();
        let ticks = start_ticks(pid).unwrap();
        assert!(is_alive(pid, ticks));
        assert!(!is_alive(pid, ticks + 1));
    }
}
