//! Line numbers out of a code object's table.
//!
//! CPython 3.10 has pairs of bytes, how far the instructions of a line reach and how many lines
//! further it is (`Objects/lnotab_notes.txt`); 3.11 and later have entries of one byte and what its
//! form asks for (`Objects/locations.md`). Tables are another program's memory: any bytes give some
//! line or none.

/// The line of an instruction; `None` if it belongs to none, or the table ends before it.
/// `version`: the minor one. `instruction`: as `vramscope_ebpf_abi::python::Frame` has it.
pub fn line(version: u32, table: &[u8], first_line: i32, instruction: i32) -> Option<i32> {
    if instruction < 0 {
        return Some(first_line);
    }
    let instruction = i64::from(instruction);
    let line = if version <= 10 {
        of_pairs(table, first_line, instruction * 2)
    } else {
        of_entries(table, first_line, instruction)
    };
    line.filter(|line| *line > 0)
}

/// `at`: bytes from the code's start.
fn of_pairs(table: &[u8], first_line: i32, at: i64) -> Option<i32> {
    /// Instructions that belong to no line.
    const NO_LINE: i8 = -128;
    let (mut line, mut end) = (first_line, 0);
    for pair in table.chunks_exact(2) {
        let (bytes, lines) = (pair[0], pair[1] as i8);
        end += i64::from(bytes);
        if lines != NO_LINE {
            line = line.wrapping_add(i32::from(lines));
        }
        if end > at {
            return (lines != NO_LINE).then_some(line);
        }
    }
    None
}

fn of_entries(table: &[u8], first_line: i32, at: i64) -> Option<i32> {
    let mut bytes = table.iter().copied();
    let (mut line, mut end) = (first_line, 0);
    while let Some(first) = bytes.next() {
        let units = i64::from(first & 7) + 1;
        let mut has_line = true;
        match first >> 3 & 15 {
            // No location.
            15 => has_line = false,
            // A line, its end and two columns.
            14 => {
                line = line.wrapping_add(signed(&mut bytes)?);
                for _ in 0..3 {
                    number(&mut bytes)?;
                }
            }
            // A line.
            13 => line = line.wrapping_add(signed(&mut bytes)?),
            // None to two lines further, and two columns.
            form @ 10..=12 => {
                line = line.wrapping_add(i32::from(form) - 10);
                bytes.nth(1)?;
            }
            // The same line, and columns in one byte.
            _ => {
                bytes.next()?;
            }
        }
        end += 2 * units;
        if end > at {
            return has_line.then_some(line);
        }
    }
    None
}

/// Six bits to a byte, the lowest first; bit 6 says that there are more.
fn number(bytes: &mut impl Iterator<Item = u8>) -> Option<u32> {
    let (mut value, mut shift) = (0u32, 0);
    loop {
        let byte = bytes.next()?;
        if shift < 32 {
            value |= u32::from(byte & 63) << shift;
        }
        shift += 6;
        if byte & 64 == 0 {
            return Some(value);
        }
    }
}

/// The sign is in the lowest bit.
fn signed(bytes: &mut impl Iterator<Item = u8>) -> Option<i32> {
    let value = number(bytes)?;
    let size = (value >> 1) as i32;
    Some(if value & 1 == 1 {
        size.wrapping_neg()
    } else {
        size
    })
}

#[cfg(test)]
#[path = "lines_tests.rs"]
mod tests;
