//! Splits a text into SQL statements at `;`, outside quotes and comments. Done on the text and
//! not on the parsed tree, because a statement has to reach a collector as it was written.

/// The statements of a text, without their `;`. Empty ones are dropped.
pub fn split(text: &str) -> Vec<&str> {
    let mut statements = Vec::new();
    let mut start = 0;
    for end in terminators(text).positions {
        statements.push(&text[start..end]);
        start = end + 1;
    }
    statements.push(&text[start..]);
    statements.retain(|statement| has_words(statement));
    statements
}

/// Whether a text typed so far ends in `;` (and not inside a quote or comment).
pub fn is_complete(text: &str) -> bool {
    let found = terminators(text);
    match found.positions.last() {
        Some(last) => !found.open && !has_words(&text[last + 1..]),
        None => !found.open && !has_words(text),
    }
}

struct Terminators {
    positions: Vec<usize>,
    /// The text ends inside a quote or a block comment.
    open: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Code,
    Quote(u8),
    LineComment,
    /// Depth: PostgreSQL's block comments nest.
    BlockComment(u32),
}

fn terminators(text: &str) -> Terminators {
    let mut positions = Vec::new();
    let state = scan(text, |index, byte| {
        if byte == b';' {
            positions.push(index);
        }
    });
    let open = matches!(state, State::Quote(_) | State::BlockComment(_));
    Terminators { positions, open }
}

/// Whether there is anything but white space and comments.
fn has_words(text: &str) -> bool {
    let mut found = false;
    let state = scan(text, |_, byte| {
        found |= !byte.is_ascii_whitespace() && byte != b';'
    });
    found || matches!(state, State::Quote(_) | State::BlockComment(_))
}

/// Calls `code` for every byte that is neither in a quote nor in a comment, and for the bytes
/// that open and close a quote. All delimiters are ASCII, so bytes of other characters pass.
fn scan(text: &str, mut code: impl FnMut(usize, u8)) -> State {
    let bytes = text.as_bytes();
    let mut state = State::Code;
    let mut index = 0;
    while index < bytes.len() {
        let byte = bytes[index];
        let pair = (byte, bytes.get(index + 1).copied());
        state = match (state, pair) {
            (State::Code, (b'-', Some(b'-'))) => State::LineComment,
            (State::Code, (b'/', Some(b'*'))) => {
                index += 1;
                State::BlockComment(1)
            }
            (State::Code, (b'\'' | b'"', _)) => {
                code(index, byte);
                State::Quote(byte)
            }
            (State::Code, _) => {
                code(index, byte);
                State::Code
            }
            // A doubled quote closes and opens again at once.
            (State::Quote(quote), _) if byte == quote => {
                code(index, byte);
                State::Code
            }
            (State::LineComment, (b'\n', _)) => State::Code,
            (State::BlockComment(depth), (b'/', Some(b'*'))) => {
                index += 1;
                State::BlockComment(depth + 1)
            }
            (State::BlockComment(depth), (b'*', Some(b'/'))) => {
                index += 1;
                if depth == 1 {
                    State::Code
                } else {
                    State::BlockComment(depth - 1)
                }
            }
            (other, _) => other,
        };
        index += 1;
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_only_at_semicolons_of_code() {
        let text = "SELECT ';' AS \"a;b\" -- c;\n; /* ; /* ; */ ; */ ;; SELECT 'it''s;'";
        assert_eq!(
            split(text),
            vec!["SELECT ';' AS \"a;b\" -- c;\n", " SELECT 'it''s;'"]
        );
    }

    #[test]
    fn knows_when_a_statement_is_complete() {
        for complete in [
            "",
            "  -- only a comment",
            "SELECT 1;",
            "SELECT 1; -- done\n",
            "SELECT 'ü';",
        ] {
            assert!(is_complete(complete), "{complete:?}");
        }
        for open in [
            "SELECT 1",
            "SELECT ';",
            "SELECT 1 /* ;",
            "SELECT 1; SELECT",
            "SELECT 1 -- ;",
        ] {
            assert!(!is_complete(open), "{open:?}");
        }
    }
}
