//! The map as a picture: the layers on top, what colours mean, then every segment to scale, in order of
//! address, with its blocks and gaps. The text of a block appears when the pointer rests on it.
//!
//! Invariants:
//! - all text that comes from data is escaped;
//! - the file stays small: blocks that are too narrow to be seen are drawn together, and the picture says
//!   so; what is left out is said with its size.

mod shapes;

use std::fmt::Write;

use vramscope_model::map::BlockState;

use super::Color;
use super::picture::{self, COLOURS, Names, OTHER, UNKNOWN};
use super::segments::{Cell, Map};
use super::waterfall::Waterfall;
use crate::target::Moment;
use crate::text::{age, counted, percent, size};

const WIDTH: f64 = 1280.0;
const MARGIN: f64 = 32.0;
/// Room for segments.
const ROOM: f64 = WIDTH - 2.0 * MARGIN;

const STYLE: &str = "\
text{font-family:Inter,'Segoe UI','Helvetica Neue',Arial,sans-serif;fill:#1f2933}\
.t{font-size:22px;font-weight:600}.s{font-size:13px;fill:#52606d}.h{font-size:14px;font-weight:600}\
.l{font-size:12.5px}.v{font-size:12.5px;font-variant-numeric:tabular-nums}.n{font-size:11.5px;fill:#7b8794}\
.e{text-anchor:end}.m{text-anchor:middle}\
.b:hover{stroke:#111;stroke-width:1.5}";

const PATTERNS: &str = "\
<pattern id=\"stranded\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
<rect width=\"6\" height=\"6\" fill=\"#fdf1ef\"/><rect width=\"1.6\" height=\"6\" fill=\"#ecaea3\"/></pattern>\
<pattern id=\"pending\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(-45)\">\
<rect width=\"2\" height=\"5\" fill=\"#fff\" fill-opacity=\"0.6\"/></pattern>";
const STRANDED: &str = "url(#stranded)";
const RELEASABLE: &str = "#dcefe2";

struct Drawing<'a> {
    map: &'a Map,
    names: &'a Names,
    color: Color,
    /// Stacks with a colour of their own, most bytes first.
    stacks: Vec<(Option<i64>, u64, usize)>,
    /// Fills of blocks: each is written once, as a class.
    fills: Vec<String>,
    oldest: f64,
    out: String,
    y: f64,
}

pub fn draw(moment: &Moment, fall: &Waterfall, map: &Map, names: &Names, color: Color) -> String {
    let cells = map.segments.iter().flat_map(|segment| &segment.cells);
    let oldest = cells
        .clone()
        .filter_map(|cell| cell.age_seconds)
        .fold(0.0, f64::max);
    let blocks = cells
        .filter(|cell| cell.state != BlockState::Inactive)
        .count();
    let mut drawing = Drawing {
        map,
        names,
        color,
        stacks: picture::by_stack(map),
        fills: Vec::new(),
        oldest,
        out: String::new(),
        y: 0.0,
    };
    drawing.title(moment, blocks);
    drawing.layers(fall);
    drawing.legend();
    drawing.pools();
    let height = drawing.y + MARGIN;
    let fills = drawing.fills.iter().enumerate();
    let fills: String = fills
        .map(|(index, fill)| format!(".c{index}{{fill:{fill}}}"))
        .collect();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" width=\"{WIDTH}\" height=\"{height:.0}\" role=\"img\">\
<title>{}</title><style>{STYLE}{fills}</style><defs>{PATTERNS}</defs>\
<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{}</svg>\n",
        escaped(&format!("Address map of {}", moment.title())),
        drawing.out
    )
}

impl Drawing<'_> {
    fn words(&mut self, class: &str, x: f64, y: f64, text: &str) {
        let _ = writeln!(
            self.out,
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>",
            escaped(text)
        );
    }

    fn title(&mut self, moment: &Moment, blocks: usize) {
        self.words(
            "t",
            MARGIN,
            48.0,
            &format!("Memory of {}", picture::cut(&moment.title(), 80)),
        );
        let line = format!(
            "{} in {}, map of {} ({})",
            counted(blocks, "block"),
            counted(self.map.segments.len(), "segment"),
            moment.ts,
            moment.reason
        );
        self.words("s", MARGIN, 70.0, &line);
        self.y = 92.0;
    }

    /// The layers as bars, each within the one above.
    fn layers(&mut self, fall: &Waterfall) {
        const LABEL: f64 = 190.0;
        const VALUE: f64 = 96.0;
        const BAR: f64 = 470.0;
        const FILLS: [&str; 7] = [
            "#d9e2ec", "#bcccdc", "#9fb3c8", "#829ab1", "#627d98", "#486581", "#334e68",
        ];
        let whole = fall
            .layers
            .iter()
            .find_map(|layer| layer.bytes)
            .unwrap_or(0);
        let left = MARGIN + LABEL + VALUE;
        for (index, layer) in fall.layers.iter().enumerate() {
            let y = self.y;
            self.words("l", MARGIN, y + 14.0, layer.name);
            let value = layer.bytes.map_or("not known".to_string(), size);
            self.words("v e", left - 12.0, y + 14.0, &value);
            let width = match layer.bytes {
                Some(bytes) if whole > 0 => (bytes as f64 / whole as f64 * BAR).min(BAR).max(1.0),
                _ => 0.0,
            };
            let fill = FILLS[index.min(FILLS.len() - 1)];
            let _ = writeln!(
                self.out,
                "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"16\" rx=\"2\" fill=\"{fill}\"/>",
                y + 2.0
            );
            let note = layer
                .note
                .strip_prefix("not known: ")
                .unwrap_or(&layer.note);
            self.words("n", left + BAR + 14.0, y + 14.0, note);
            self.y += 22.0;
        }
        let mut figures = Vec::new();
        if let Some(ratio) = fall.stranded_ratio {
            figures.push(format!("stranded {} of what is reserved", percent(ratio)));
        }
        if let Some(bytes) = fall.max_contiguous {
            figures.push(format!(
                "largest request that would succeed {}",
                size(bytes)
            ));
        }
        if let Some(ratio) = fall.unusable_p99 {
            figures.push(format!(
                "too small for p99 requests {} of what is free",
                percent(ratio)
            ));
        }
        if !figures.is_empty() {
            self.words("s", MARGIN, self.y + 18.0, &figures.join("  ·  "));
            self.y += 26.0;
        }
        self.y += 18.0;
    }

    fn swatch(&mut self, x: f64, y: f64, fill: &str, over: Option<&str>) {
        let mut shape = |fill: &str| {
            let _ = writeln!(
                self.out,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"14\" height=\"14\" rx=\"3\" fill=\"{fill}\" stroke=\"#00000022\"/>",
                y - 11.0
            );
        };
        shape(fill);
        if let Some(over) = over {
            shape(over);
        }
    }

    fn legend(&mut self) {
        match self.color {
            Color::Stack => self.legend_of_stacks(),
            Color::Age => self.legend_of_ages(),
        }
        let y = self.y + 12.0;
        let states: [(&str, Option<&str>, &str); 3] = [
            (STRANDED, None, "free, held by blocks in use (stranded)"),
            (RELEASABLE, None, "free, could be given back to the driver"),
            (
                "#829ab1",
                Some("url(#pending)"),
                "freed, a stream may still use it",
            ),
        ];
        for (index, (fill, over, text)) in states.into_iter().enumerate() {
            let x = MARGIN + index as f64 * 300.0;
            self.swatch(x, y, fill, over);
            self.words("l", x + 22.0, y, text);
        }
        self.y = y + 22.0;
    }

    fn legend_of_stacks(&mut self) {
        self.words(
            "h",
            MARGIN,
            self.y + 8.0,
            "Blocks by the code that allocated them",
        );
        self.y += 30.0;
        let shown: Vec<(Option<i64>, u64, usize)> =
            self.stacks.iter().take(COLOURS.len()).copied().collect();
        let top = self.y;
        let rows = shown.len().div_ceil(2).max(1);
        for (index, (stack, bytes, blocks)) in shown.iter().enumerate() {
            let x = MARGIN + (index / rows) as f64 * (ROOM / 2.0);
            let y = top + (index % rows) as f64 * 21.0;
            let fill = self.stack_colour(*stack);
            let name = stack.and_then(|stack| self.names.get(&stack));
            let label = name
                .map_or("stack not recorded", |name| name.label.as_str())
                .to_string();
            let path = name.map_or(String::new(), |name| name.path.clone());
            let _ = write!(self.out, "<g><title>{}</title>", escaped(&path));
            self.swatch(x, y, fill, None);
            self.words("l", x + 22.0, y, &picture::cut(&label, 58));
            let held = format!("{} in {}", size(*bytes), counted(*blocks, "block"));
            self.words("n e", x + ROOM / 2.0 - 28.0, y, &held);
            self.out.push_str("</g>\n");
        }
        self.y = top + rows as f64 * 21.0;
        let others = self.stacks.iter().skip(COLOURS.len());
        let (count, bytes) =
            others.fold((0, 0), |(count, bytes), stack| (count + 1, bytes + stack.1));
        if count > 0 {
            let y = self.y;
            self.swatch(MARGIN, y, OTHER, None);
            self.words(
                "l",
                MARGIN + 22.0,
                y,
                &format!("{}, {}", counted(count, "other stack"), size(bytes)),
            );
            self.y += 21.0;
        }
    }

    fn legend_of_ages(&mut self) {
        self.words(
            "h",
            MARGIN,
            self.y + 8.0,
            "Blocks by the time since they were allocated",
        );
        let y = self.y + 22.0;
        let stops: Vec<String> = (0..=10)
            .map(|step| {
                let share = f64::from(step) / 10.0;
                format!(
                    "<stop offset=\"{share}\" stop-color=\"{}\"/>",
                    picture::age_colour(share)
                )
            })
            .collect();
        let _ = writeln!(
            self.out,
            "<linearGradient id=\"ages\">{}</linearGradient><rect x=\"{MARGIN}\" y=\"{y:.1}\" width=\"360\" height=\"14\" rx=\"3\" fill=\"url(#ages)\"/>",
            stops.concat()
        );
        // Logarithmic: the middle is the root of the oldest.
        let at = |share: f64| age((1.0 + self.oldest).powf(share) - 1.0);
        let marks = [
            (0.0, "l", at(0.0)),
            (0.5, "l m", at(0.5)),
            (1.0, "l e", at(1.0)),
        ];
        for (share, class, text) in marks {
            self.words(class, MARGIN + 360.0 * share, y + 30.0, &text);
        }
        self.swatch(MARGIN + 420.0, y + 11.0, UNKNOWN, None);
        self.words(
            "l",
            MARGIN + 442.0,
            y + 11.0,
            "age not known: older than what was recorded",
        );
        self.y = y + 50.0;
    }

    fn stack_colour(&self, stack: Option<i64>) -> &'static str {
        let rank = self
            .stacks
            .iter()
            .take(COLOURS.len())
            .position(|known| known.0 == stack);
        match (stack, rank) {
            (None, _) => UNKNOWN,
            (_, Some(rank)) => COLOURS[rank],
            _ => OTHER,
        }
    }

    fn colour(&self, cell: &Cell) -> String {
        match (self.color, cell.age_seconds) {
            (Color::Stack, _) => self.stack_colour(cell.stack).to_string(),
            (Color::Age, None) => UNKNOWN.to_string(),
            (Color::Age, Some(seconds)) => {
                let scale = (1.0 + self.oldest).ln();
                let share = if scale > 0.0 {
                    (1.0 + seconds.max(0.0)).ln() / scale
                } else {
                    0.0
                };
                // In steps too fine to see, so that few classes do.
                picture::age_colour((share * 64.0).round() / 64.0)
            }
        }
    }
}

/// As text and attributes of XML want it. Characters that XML 1.0 has no place for are left out.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;
