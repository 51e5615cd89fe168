//! The map as a picture: the layers on top, what colours mean, then every segment to scale, in order of
//! address, with its blocks and gaps. The text of a block appears when the pointer rests on it.
//!
//! Invariants:
//! - all text that comes from data is escaped;
//! - the file stays small: blocks that are too narrow to be seen are drawn together, and the picture says
//!   so; what is left out is said with its size.

use std::fmt::Write;

use vramscope_model::map::BlockState;

use super::Color;
use super::picture::{self, COLOURS, Names, OTHER, UNKNOWN};
use super::segments::{Cell, Map, Shown};
use super::waterfall::Waterfall;
use crate::target::Moment;
use crate::text::{age, counted, percent, size};

const WIDTH: f64 = 1280.0;
const MARGIN: f64 = 32.0;
/// Room for segments.
const ROOM: f64 = WIDTH - 2.0 * MARGIN;
const ROW: f64 = 18.0;
const ROW_STEP: f64 = 24.0;
const GAP: f64 = 4.0;
/// Shapes of the whole picture.
const MOST_SHAPES: usize = 15_000;
/// Segments that are drawn; of more, those with the most bytes.
const MOST_SEGMENTS: usize = 4_000;

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

/// Blocks of a segment that share a shape.
struct Piece<'a> {
    from: f64,
    width: f64,
    cells: &'a [Cell],
}

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

    fn pools(&mut self) {
        let mut drawn: Vec<&Shown> = self.map.segments.iter().collect();
        if drawn.len() > MOST_SEGMENTS {
            drawn.sort_by_key(|segment| (std::cmp::Reverse(segment.bytes), segment.address));
            let left: Vec<&Shown> = drawn.split_off(MOST_SEGMENTS);
            let bytes: u64 = left.iter().map(|segment| segment.bytes).sum();
            let note = format!(
                "{} of {} are not drawn: those with the fewest bytes",
                counted(left.len(), "segment"),
                size(bytes)
            );
            self.words("s", MARGIN, self.y + 14.0, &note);
            self.y += 26.0;
            drawn.sort_by_key(|segment| {
                (
                    segment.pool.clone(),
                    segment.size.clone(),
                    segment.stream,
                    segment.address,
                )
            });
        }
        let same =
            |a: &&Shown, b: &&Shown| (&a.pool, &a.size, a.stream) == (&b.pool, &b.size, b.stream);
        let groups: Vec<&[&Shown]> = drawn.chunk_by(same).collect();
        let scales: Vec<f64> = groups.iter().map(|group| scale(group)).collect();
        let least = least_width(&groups, &scales);
        if least > 1.0 {
            let note = format!(
                "Blocks narrower than {least:.0} points are drawn together; the pointer tells how many."
            );
            self.words("s", MARGIN, self.y + 14.0, &note);
            self.y += 26.0;
        }
        for (group, scale) in groups.iter().zip(scales) {
            self.pool(group, scale, least);
        }
    }

    fn pool(&mut self, group: &[&Shown], scale: f64, least: f64) {
        let Some(first) = group.first() else { return };
        let bytes: u64 = group.iter().map(|segment| segment.bytes).sum();
        let allocated: u64 = group.iter().map(|segment| segment.allocated).sum();
        let stranded: u64 = group.iter().map(|segment| segment.stranded).sum();
        let pool = if first.pool == "default" {
            "Default pool".to_string()
        } else {
            format!("Private pool {}", first.pool)
        };
        self.y += 20.0;
        self.words(
            "h",
            MARGIN,
            self.y,
            &format!("{pool}, {} requests, stream {}", first.size, first.stream),
        );
        let line = format!(
            "{} in {}: {} allocated, {} stranded",
            size(bytes),
            counted(group.len(), "segment"),
            size(allocated),
            size(stranded)
        );
        self.words("s", MARGIN + 330.0, self.y, &line);
        self.scale_bar(scale);
        self.y += 12.0;
        let mut x = 0.0;
        for segment in group {
            let width = shown_width(segment, scale);
            if x > 0.0 && x + width > ROOM {
                x = 0.0;
                self.y += ROW_STEP;
            }
            self.segment(segment, x, width, least);
            x += width + GAP;
        }
        self.y += ROW_STEP + 10.0;
    }

    /// A round size and its length, at the right.
    fn scale_bar(&mut self, scale: f64) {
        let wanted = 90.0 / scale;
        let unit = 2_f64.powf(wanted.max(1.0).log2().floor());
        let (length, right) = (unit * scale, WIDTH - MARGIN);
        let _ = writeln!(
            self.out,
            "<path d=\"M{:.1} {:.1}v-5m0 5h{length:.1}v-5\" stroke=\"#7b8794\" fill=\"none\"/>",
            right - length,
            self.y
        );
        self.words("n e", right - length - 8.0, self.y, &size(unit as u64));
    }

    fn segment(&mut self, segment: &Shown, x: f64, width: f64, least: f64) {
        let _ = writeln!(
            self.out,
            "<g transform=\"translate({:.1} {:.1})\">",
            MARGIN + x,
            self.y
        );
        let gap = if segment.stranded > 0 {
            STRANDED
        } else {
            RELEASABLE
        };
        let text = format!(
            "segment {:#x}, {}: {} allocated, {} stranded, {} could be given back{}",
            segment.address,
            size(segment.bytes),
            size(segment.allocated),
            size(segment.stranded),
            size(segment.releasable),
            if segment.expandable {
                ", expandable"
            } else {
                ""
            }
        );
        let _ = writeln!(
            self.out,
            "<rect width=\"{width:.1}\" height=\"{ROW}\" rx=\"2.5\" fill=\"{gap}\" stroke=\"#9aa5b1\" stroke-width=\".8\"><title>{}</title></rect>",
            escaped(&text)
        );
        for piece in pieces(segment, width, least) {
            self.piece(&piece);
        }
        self.out.push_str("</g>\n");
    }

    fn piece(&mut self, piece: &Piece<'_>) {
        let used: u64 = piece
            .cells
            .iter()
            .filter(|cell| cell.state != BlockState::Inactive)
            .map(|cell| cell.bytes)
            .sum();
        let bytes: u64 = piece.cells.iter().map(|cell| cell.bytes).sum();
        // A free piece shows the segment behind it; its size is told all the same.
        let largest = piece
            .cells
            .iter()
            .filter(|cell| cell.state != BlockState::Inactive)
            .max_by_key(|cell| cell.bytes);
        let (fill, opacity) = match largest {
            None => ("transparent".to_string(), 1.0),
            Some(cell) => (
                self.colour(cell),
                (used as f64 / bytes.max(1) as f64).max(0.35),
            ),
        };
        let text = match piece.cells {
            [cell] => self.told(cell),
            many => {
                let blocks = many
                    .iter()
                    .filter(|cell| cell.state != BlockState::Inactive)
                    .count();
                format!(
                    "{} and {}, {} used of {}",
                    counted(blocks, "block"),
                    counted(many.len() - blocks, "gap"),
                    size(used),
                    size(bytes)
                )
            }
        };
        // A hair of white between neighbours, where there is room.
        let inset = if piece.width > 3.0 { 0.4 } else { 0.0 };
        let opacity = if opacity < 0.995 {
            format!(" fill-opacity=\"{opacity:.2}\"")
        } else {
            String::new()
        };
        let (from, width, height) = (
            piece.from + inset,
            (piece.width - 2.0 * inset).max(0.3),
            ROW - 2.0,
        );
        let shape = format!("d=\"M{from:.1} 1h{width:.1}v{height}h-{width:.1}z\"");
        let class = self.class(fill);
        let _ = writeln!(
            self.out,
            "<path class=\"b c{class}\" {shape}{opacity}><title>{}</title></path>",
            escaped(&text)
        );
        if piece
            .cells
            .iter()
            .any(|cell| cell.state == BlockState::PendingFree)
        {
            let _ = writeln!(
                self.out,
                "<path {shape} fill=\"url(#pending)\" pointer-events=\"none\"/>"
            );
        }
    }

    fn class(&mut self, fill: String) -> usize {
        let known = self.fills.iter().position(|known| *known == fill);
        known.unwrap_or_else(|| {
            self.fills.push(fill);
            self.fills.len() - 1
        })
    }

    fn told(&self, cell: &Cell) -> String {
        let place = format!("at {:#x}", cell.address);
        if cell.state == BlockState::Inactive {
            return format!("free {} {place}", size(cell.bytes));
        }
        let mut text = format!("{} {place}", size(cell.bytes));
        if cell.state == BlockState::PendingFree {
            text.push_str(", freed, a stream may still use it");
        }
        if let Some(requested) = cell.requested.filter(|requested| *requested != cell.bytes) {
            let _ = write!(text, ", {} asked for", size(requested));
        }
        if let Some(seconds) = cell.age_seconds {
            let _ = write!(text, ", {} old", age(seconds));
        }
        let name = cell.stack.and_then(|stack| self.names.get(&stack));
        if let Some(name) = name {
            let _ = write!(text, "\n{}", name.label);
        }
        text
    }
}

/// Points a byte of a pool. Its rows grow with the root of its segments, so that few large segments and
/// many small ones both stay readable, and the largest segment is a whole part of a row, so that rows fill.
fn scale(group: &[&Shown]) -> f64 {
    let largest = group
        .iter()
        .map(|segment| segment.bytes)
        .max()
        .unwrap_or(1)
        .max(1) as f64;
    let all: f64 = group.iter().map(|segment| segment.bytes as f64).sum();
    let rows = (2.0 * (group.len() as f64).sqrt()).ceil();
    let a_row = (all / rows).max(largest);
    let parts = (a_row / largest).round().max(1.0);
    (ROOM - (parts - 1.0) * GAP) / parts / largest
}

fn shown_width(segment: &Shown, scale: f64) -> f64 {
    (segment.bytes as f64 * scale).clamp(3.0, ROOM)
}

/// The width below which blocks are drawn together, so that the picture keeps to its shapes.
fn least_width(groups: &[&[&Shown]], scales: &[f64]) -> f64 {
    let mut least = 0.6;
    loop {
        let shapes: usize = groups
            .iter()
            .zip(scales)
            .flat_map(|(group, scale)| group.iter().map(move |segment| (segment, scale)))
            .map(|(segment, scale)| 1 + pieces(segment, shown_width(segment, *scale), least).len())
            .sum();
        if shapes <= MOST_SHAPES || least > ROOM {
            return least;
        }
        least *= 1.5;
    }
}

/// The blocks of a segment, those that are narrower than `least` together with what follows them.
fn pieces(segment: &Shown, width: f64, least: f64) -> Vec<Piece<'_>> {
    let scale = width / segment.bytes.max(1) as f64;
    let place = |address: u64| address.saturating_sub(segment.address) as f64 * scale;
    let mut pieces = Vec::new();
    let mut first = 0;
    for (index, cell) in segment.cells.iter().enumerate() {
        let from = place(segment.cells[first].address);
        let to = place(cell.address.saturating_add(cell.bytes));
        let next_is_wide = segment
            .cells
            .get(index + 1)
            .is_none_or(|next| next.bytes as f64 * scale >= least);
        if to - from >= least || next_is_wide {
            pieces.push(Piece {
                from,
                width: to - from,
                cells: &segment.cells[first..=index],
            });
            first = index + 1;
        }
    }
    pieces
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
mod tests {
    use super::*;

    fn cells(count: u64, bytes: u64) -> Vec<Cell> {
        let cell = |index: u64| Cell {
            address: index * bytes,
            bytes,
            requested: None,
            state: if index % 2 == 0 {
                BlockState::Allocated
            } else {
                BlockState::Inactive
            },
            age_seconds: Some(index as f64),
            stack: Some((index % 40) as i64),
        };
        (0..count).map(cell).collect()
    }

    fn segment(address: u64, cells: Vec<Cell>) -> Shown {
        let bytes = cells.iter().map(|cell| cell.bytes).sum();
        let cells = cells
            .into_iter()
            .map(|cell| Cell {
                address: cell.address + address,
                ..cell
            })
            .collect();
        Shown {
            pool: "default".to_string(),
            size: "large".to_string(),
            stream: 0,
            expandable: false,
            address,
            bytes,
            allocated: bytes / 2,
            releasable: 0,
            stranded: bytes / 2,
            cells,
        }
    }

    fn moment() -> Moment {
        Moment {
            process_id: 1,
            pid: 2,
            host: "<host> & \"co\"".to_string(),
            device: 0,
            gpu_uuid: None,
            snapshot_id: 3,
            ts: "2026-11-29T10:00:00Z".to_string(),
            ts_ns: 0,
            reason: "oom".to_string(),
            source: "usdt".to_string(),
        }
    }

    #[test]
    fn a_map_of_many_blocks_stays_small() {
        let map = Map {
            segments: (0..100)
                .map(|index| segment(index << 40, cells(1000, 4096)))
                .collect(),
        };
        for color in [Color::Stack, Color::Age] {
            let drawing = draw(&moment(), &Waterfall::default(), &map, &Names::new(), color);
            let shapes = drawing.matches("<rect").count() + drawing.matches("<path").count();
            assert!(shapes < MOST_SHAPES + 200, "{shapes} shapes");
            assert!(drawing.len() < 4 << 20, "{} bytes", drawing.len());
            assert!(drawing.contains("drawn together"));
        }
    }

    #[test]
    fn every_block_of_a_small_map_is_drawn_and_told() {
        let map = Map {
            segments: vec![segment(1 << 40, cells(8, 1 << 20))],
        };
        let drawing = draw(
            &moment(),
            &Waterfall::default(),
            &map,
            &Names::new(),
            Color::Stack,
        );
        assert_eq!(drawing.matches("class=\"b ").count(), 8);
        assert!(drawing.contains("free 1.00 MiB at 0x10000100000"));
        assert!(drawing.contains("&lt;host&gt; &amp; &quot;co&quot;"));
        assert!(!drawing.contains("<host>"));
    }

    #[test]
    fn segments_beyond_what_can_be_drawn_are_said() {
        let map = Map {
            segments: (0..5000)
                .map(|index| segment(index << 30, cells(2, 4096)))
                .collect(),
        };
        let drawing = draw(
            &moment(),
            &Waterfall::default(),
            &map,
            &Names::new(),
            Color::Stack,
        );
        assert!(drawing.contains("1000 segments of 7.81 MiB are not drawn"));
    }

    #[test]
    fn text_of_data_is_no_markup() {
        assert_eq!(
            escaped("a<b>&\"'\u{0}\u{1b}c\n"),
            "a&lt;b&gt;&amp;&quot;&#39;c\n"
        );
    }
}
