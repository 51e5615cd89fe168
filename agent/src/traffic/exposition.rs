//! Reader of Prometheus' text format (0.0.4, and what OpenMetrics adds to it), for the few metrics
//! that are wanted of what may be a large page.
//!
//! The page comes from a program that somebody else wrote: a line that makes no sense is counted and
//! passed over, and every size is bounded. `prometheus-parse` keeps all samples of a page in maps and
//! runs a regular expression on each line; a serving engine's page has thousands of histogram
//! buckets of which none is wanted, so they are dropped here before they cost anything.
//!
//! Format: <https://prometheus.io/docs/instrumenting/exposition_formats/>.

use std::borrow::Cow;
use std::collections::HashMap;

/// A line longer than this is not understood, bytes.
const MAX_LINE: usize = 64 * 1024;
/// More labels than this on one sample are not understood.
const MAX_LABELS: usize = 64;
/// Wanted samples that are kept; engines have some tens.
const MAX_SAMPLES: usize = 10_000;

/// Names and values.
pub type Labels<'a> = Vec<(&'a str, Cow<'a, str>)>;

/// One line with a value.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample<'a> {
    pub name: &'a str,
    /// In order of name.
    pub labels: Labels<'a>,
    /// As written: may be infinite or no number.
    pub value: f64,
}

impl Sample<'_> {
    pub fn label(&self, name: &str) -> Option<&str> {
        let found = self.labels.iter().find(|(label, _)| *label == name);
        found.map(|(_, value)| value.as_ref())
    }
}

/// The wanted samples of a page.
#[derive(Debug, Default)]
pub struct Page<'a> {
    pub samples: Vec<Sample<'a>>,
    /// Lines that are neither empty, nor a comment, nor a sample.
    pub bad_lines: u64,
    /// Wanted samples that were more than a page may have.
    pub left_out: u64,
}

impl<'a> Page<'a> {
    /// Reads a page. Of two samples that have name and labels in common the later one stays.
    pub fn read(text: &'a [u8], wanted: impl Fn(&str) -> bool) -> Self {
        let mut page = Self::default();
        let mut places: HashMap<(&str, Labels<'_>), usize> = HashMap::new();
        for line in text.split(|byte| *byte == b'\n') {
            if line.len() > MAX_LINE {
                page.bad_lines += 1;
                continue;
            }
            let Ok(line) = std::str::from_utf8(line) else {
                page.bad_lines += 1;
                continue;
            };
            let line = line.trim_matches([' ', '\t', '\r']);
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let Some((name, rest)) = take_name(line, is_metric_character) else {
                page.bad_lines += 1;
                continue;
            };
            if !wanted(name) {
                continue;
            }
            let Some(sample) = read_sample(name, rest) else {
                page.bad_lines += 1;
                continue;
            };
            let key = (sample.name, sample.labels.clone());
            if let Some(place) = places.get(&key) {
                page.samples[*place] = sample;
            } else if page.samples.len() >= MAX_SAMPLES {
                page.left_out += 1;
            } else {
                places.insert(key, page.samples.len());
                page.samples.push(sample);
            }
        }
        page
    }

    /// All samples of one metric.
    pub fn all<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'s Sample<'a>> {
        self.samples.iter().filter(move |s| s.name == name)
    }

    /// All samples of the first of these names that has any: newer names come first.
    pub fn first_of(&self, names: &[&str]) -> Vec<&Sample<'a>> {
        let of =
            |name: &&str| -> Vec<_> { self.samples.iter().filter(|s| s.name == *name).collect() };
        let found = names.iter().map(of).find(|samples| !samples.is_empty());
        found.unwrap_or_default()
    }
}

fn is_metric_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

fn is_label_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// A name and what follows it.
fn take_name(text: &str, is_part: impl Fn(char) -> bool) -> Option<(&str, &str)> {
    let end = text.find(|c| !is_part(c)).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let starts_well = !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit());
    starts_well.then_some((name, rest))
}

/// `rest`: what follows the name.
fn read_sample<'a>(name: &'a str, rest: &'a str) -> Option<Sample<'a>> {
    let rest = rest.trim_start();
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => read_labels(inside)?,
        None => (Vec::new(), rest),
    };
    // Behind the value may be a time, and an example of OpenMetrics.
    let mut words = rest.split_ascii_whitespace();
    let value = read_value(words.next()?)?;
    match words.next() {
        None | Some("#") => {}
        // Milliseconds, or seconds with a fraction.
        Some(time) => drop(time.parse::<f64>().ok()?),
    }
    Some(Sample {
        name,
        labels,
        value,
    })
}

fn read_value(word: &str) -> Option<f64> {
    match word {
        "+Inf" | "Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        "NaN" => Some(f64::NAN),
        // Rust reads words that the format does not have, such as "infinity".
        _ if word.contains(|c: char| c.is_ascii_alphabetic() && !matches!(c, 'e' | 'E')) => None,
        _ => word.parse().ok(),
    }
}

/// Labels up to the closing bracket, and what follows it.
fn read_labels(mut rest: &str) -> Option<(Labels<'_>, &str)> {
    let mut labels: Labels<'_> = Vec::new();
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix('}') {
            labels.sort_unstable();
            let twice = labels.windows(2).any(|pair| pair[0].0 == pair[1].0);
            return (!twice).then_some((labels, after));
        }
        if labels.len() >= MAX_LABELS {
            return None;
        }
        let (name, after) = take_name(rest, is_label_character)?;
        let quoted = after.trim_start().strip_prefix('=')?;
        let quoted = quoted.trim_start().strip_prefix('"')?;
        let (value, after) = read_quoted(quoted)?;
        labels.push((name, value));
        rest = after.trim_start();
        // A comma may also follow the last one.
        match rest.strip_prefix(',') {
            Some(after) => rest = after,
            None if rest.starts_with('}') => {}
            None => return None,
        }
    }
}

/// A value up to its closing quote, and what follows that.
fn read_quoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let end = text.find(['"', '\\'])?;
    if text.as_bytes()[end] == b'"' {
        return Some((Cow::Borrowed(&text[..end]), &text[end + 1..]));
    }
    let mut value = text[..end].to_string();
    let mut characters = text[end..].char_indices();
    while let Some((at, c)) = characters.next() {
        match c {
            '"' => return Some((Cow::Owned(value), &text[end + at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                c @ ('"' | '\\') => value.push(c),
                // Not an escape: as it is written.
                c => value.extend(['\\', c]),
            },
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Page<'_> {
        Page::read(text.as_bytes(), |_| true)
    }

    /// Lines in the forms that the format's description shows.
    #[test]
    fn lines_of_the_format() {
        let page = read(
            "# HELP a Some text with \"quotes\".\n# TYPE a counter\n\
             a{method=\"post\",code=\"200\"} 1027 1395066363000\n\
             a{method=\"post\",code=\"400\",} 3\r\n\
             \n\
             esc{path=\"C:\\\\DIR\\\\F.TXT\",error=\"no \\\"F\\\"\\nhere\"} 1.458255915e9\n\
             plain 12.47\n\
             \t odd { b = \"}\" , a=\"\" }   +Inf  \n\
             none NaN\n\
             rpc:x_total{q=\"0.5\"} 17 # {trace_id=\"x\"} 0.67 1520879607.789\n\
             # EOF\n",
        );
        assert_eq!((page.bad_lines, page.samples.len()), (0, 7));
        let values: Vec<f64> = page.samples.iter().map(|s| s.value).collect();
        assert_eq!(
            values[..5],
            [1027.0, 3.0, 1_458_255_915.0, 12.47, f64::INFINITY]
        );
        assert!(values[5].is_nan());
        let esc = page.all("esc").next().unwrap();
        assert_eq!(esc.label("path"), Some("C:\\DIR\\F.TXT"));
        assert_eq!(esc.label("error"), Some("no \"F\"\nhere"));
        let odd = page.all("odd").next().unwrap();
        assert_eq!((odd.label("b"), odd.label("a")), (Some("}"), Some("")));
        assert_eq!(page.all("a").count(), 2);
    }

    #[test]
    fn what_makes_no_sense_is_counted_and_passed_over() {
        let bad = [
            "1a 3",
            "{} 3",
            "a",
            "a{",
            "a{b} 1",
            "a{b=\"c} 1",
            "a{b=\"c\" d=\"e\"} 1",
            "a{b=\"c\",b=\"d\"} 1",
            "a twelve",
            "a infinity",
            "a 0x12",
            "a 1 yesterday",
            "<html><body>404</body></html>",
        ];
        for line in bad {
            let text = format!("x 1\n{line}\ny 2\n");
            let page = read(&text);
            assert_eq!((page.bad_lines, page.samples.len()), (1, 2), "{line}");
        }
        let many: Vec<String> = (0..=MAX_LABELS).map(|i| format!("l{i}=\"\"")).collect();
        assert_eq!(read(&format!("a{{{}}} 1", many.join(","))).bad_lines, 1);
        let long = format!("a{{b=\"{}\"}} 1", "x".repeat(MAX_LINE));
        assert_eq!(read(&long).bad_lines, 1);
        assert_eq!(Page::read(b"a{b=\"\xff\"} 1\nc 2", |_| true).bad_lines, 1);
    }

    #[test]
    fn only_wanted_samples_are_kept_and_no_more_than_a_page_may_have() {
        let text: String = (0..MAX_SAMPLES + 5)
            .map(|i| format!("a{{i=\"{i}\"}} {i}\nb 1\n"))
            .collect();
        let page = Page::read(text.as_bytes(), |name| name == "a");
        assert_eq!((page.samples.len(), page.left_out), (MAX_SAMPLES, 5));
        assert_eq!(page.bad_lines, 0);
    }

    #[test]
    fn of_one_sample_twice_the_later_value_counts() {
        let page = read("a{x=\"1\",y=\"2\"} 1\na{y=\"2\",x=\"1\"} 5\n");
        assert_eq!(page.samples.len(), 1);
        assert_eq!(page.samples[0].value, 5.0);
    }

    fn name() -> impl Strategy<Value = String> {
        "[a-zA-Z_:][a-zA-Z0-9_:]{0,20}"
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let lines = bytes.split(|b| *b == b'\n').count() as u64;
            let page = Page::read(&bytes, |_| true);
            prop_assert!(page.bad_lines + page.samples.len() as u64 <= lines);
        }

        #[test]
        fn any_line_of_the_formats_letters_is_survived(text in "[a-c{}\",=\\\\ \n0-9.eE+#-]{0,300}") {
            for sample in read(&text).samples {
                prop_assert!(!sample.name.is_empty());
                prop_assert!(sample.labels.windows(2).all(|pair| pair[0].0 < pair[1].0));
            }
        }

        /// What the format's rules write is read as it was.
        #[test]
        fn written_samples_come_back(
            name in name(),
            labels in prop::collection::btree_map("[a-zA-Z_][a-zA-Z0-9_]{0,10}", "[^\u{0}]{0,20}", 0..6),
            value in any::<f64>().prop_filter("a number", |v| v.is_finite()),
        ) {
            let escaped = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let written: Vec<_> = labels
                .iter()
                .map(|(label, value)| format!("{label}=\"{}\"", escaped(value)))
                .collect();
            let text = format!("{name}{{{}}} {value:e}\n", written.join(","));
            let page = read(&text);
            prop_assert_eq!(page.bad_lines, 0);
            let sample = &page.samples[0];
            prop_assert_eq!(sample.name, name.as_str());
            prop_assert_eq!(sample.value, value);
            prop_assert_eq!(sample.labels.len(), labels.len());
            for (label, value) in &labels {
                prop_assert_eq!(sample.label(label), Some(value.as_str()));
            }
        }
    }
}
