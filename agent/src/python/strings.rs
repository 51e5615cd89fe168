//! CPython's strings, as they lie in memory: characters of one, two or four bytes each, whichever
//! is enough for all of them (`PyUnicodeObject`, PEP 393).

/// Bytes of a character, from the word `state`: two bits `interned`, three `kind`, one `compact`,
/// one `ascii` (CPython 3.10 to 3.13). `None` for what is no such string.
pub fn bytes_of_character(state: u32) -> Option<usize> {
    match state >> 2 & 7 {
        kind @ (1 | 2 | 4) => Some(kind as usize),
        _ => None,
    }
}

/// Whether the characters follow the shorter header.
pub fn is_ascii(state: u32) -> bool {
    state & 0x40 != 0
}

/// The text. What is no character (half of a surrogate pair, with which CPython writes bytes of a
/// file's name that are no text) becomes U+FFFD.
pub fn decode(bytes: &[u8], bytes_of_character: usize) -> String {
    match bytes_of_character {
        1 => bytes.iter().map(|byte| char::from(*byte)).collect(),
        2 => bytes
            .chunks_exact(2)
            .map(|pair| char::from_u32(u32::from(u16::from_le_bytes([pair[0], pair[1]]))))
            .map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER))
            .collect(),
        _ => bytes
            .chunks_exact(4)
            .map(|four| char::from_u32(u32::from_le_bytes([four[0], four[1], four[2], four[3]])))
            .map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER))
            .collect(),
    }
}

/// The text of a string whose first bytes were sent (the last, with `end`), of `length` characters
/// in all; `None` if it is no string. What was cut off is shown by an ellipsis.
pub fn decode_sent(sent: &[u8], length: u32, state: u32, end: bool) -> Option<String> {
    let width = bytes_of_character(state)?;
    let all = length as usize * width;
    let text = decode(&sent[..all.min(sent.len())], width);
    Some(match (all > sent.len(), end) {
        (false, _) => text,
        (true, true) => format!("…{text}"),
        (true, false) => format!("{text}…"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `state` as CPython packs it: kind in bits 2 to 4, compact 5, ascii 6.
    const ASCII: u32 = 1 << 2 | 1 << 5 | 1 << 6;
    const LATIN: u32 = 1 << 2 | 1 << 5;
    const TWO: u32 = 2 << 2 | 1 << 5;
    const FOUR: u32 = 4 << 2 | 1 << 5 | 1;

    #[test]
    fn every_width_is_decoded() {
        let two: Vec<u8> = "añ€".encode_utf16().flat_map(u16::to_le_bytes).collect();
        let four: Vec<u8> = "a🐍"
            .chars()
            .flat_map(|c| (c as u32).to_le_bytes())
            .collect();
        assert_eq!(decode_sent(b"spam.py", 7, ASCII, true).unwrap(), "spam.py");
        assert_eq!(decode_sent(&[b'n', 0xe9], 2, LATIN, true).unwrap(), "né");
        assert_eq!(decode_sent(&two, 3, TWO, true).unwrap(), "añ€");
        assert_eq!(decode_sent(&four, 2, FOUR, true).unwrap(), "a🐍");
        // A byte of a name that is no text: U+DC80 on.
        assert_eq!(
            decode_sent(&[0x80, 0xdc], 1, TWO, true).unwrap(),
            "\u{fffd}"
        );
        assert_eq!(decode_sent(b"abc", 3, 0, true), None);
        assert!(is_ascii(ASCII) && !is_ascii(LATIN));
    }

    #[test]
    fn what_was_cut_off_is_shown() {
        assert_eq!(
            decode_sent(b"lib/x.py", 99, ASCII, true).unwrap(),
            "…lib/x.py"
        );
        assert_eq!(
            decode_sent(b"long_na", 8, ASCII, false).unwrap(),
            "long_na…"
        );
    }
}
