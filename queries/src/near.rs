//! Names near a mistyped one, for error texts.

use vramscope_wire::Table;

use crate::views;

/// Adds a suggestion to an error text about a table that does not exist. DataFusion suggests
/// columns, but not tables.
pub fn with_suggestion(text: String) -> String {
    let Some(unknown) = unknown_table(&text) else {
        return text;
    };
    let names = Table::ALL
        .iter()
        .map(|t| t.name())
        .chain(views::ALL.iter().map(|v| v.name));
    let nearest = names
        .map(|name| (distance(&unknown, name), name))
        .min()
        // Beyond a third of the name it is another word.
        .filter(|(distance, name)| *distance * 3 <= name.len());
    match nearest {
        Some((_, name)) => format!("{text}; did you mean {name}?"),
        None => format!("{text}; SHOW TABLES lists what there is"),
    }
}

/// The name in `table 'datafusion.public.NAME' not found`.
fn unknown_table(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("table '")?;
    let (path, rest) = rest.split_once('\'')?;
    let is_about_missing = rest.trim_start().starts_with("not found");
    is_about_missing.then(|| path.rsplit('.').next().unwrap_or(path).to_string())
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggests_the_nearest_table() {
        let text = "table 'datafusion.public.alloc_event' not found".to_string();
        assert!(with_suggestion(text).ends_with("did you mean alloc_events?"));
        let text = "table 'datafusion.public.zebra' not found".to_string();
        assert!(with_suggestion(text).ends_with("SHOW TABLES lists what there is"));
        assert_eq!(
            with_suggestion("something else".to_string()),
            "something else"
        );
    }

    /// Textbook values.
    #[test]
    fn distance_is_levenshteins() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", "abc"), 0);
    }
}
