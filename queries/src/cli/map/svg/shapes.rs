//! The segments of a map to scale, pool by pool, with their blocks and gaps.

use std::fmt::Write;

use vramscope_model::map::BlockState;

use super::super::segments::{Cell, Shown};
use super::{Drawing, MARGIN, RELEASABLE, ROOM, STRANDED, WIDTH, escaped};
use crate::text::{age, counted, size};

const ROW: f64 = 18.0;
const ROW_STEP: f64 = 24.0;
const GAP: f64 = 4.0;
/// Shapes of the whole picture.
pub(super) const MOST_SHAPES: usize = 15_000;
/// Segments that are drawn; of more, those with the most bytes.
const MOST_SEGMENTS: usize = 4_000;

/// Blocks of a segment that share a shape.
struct Piece<'a> {
    from: f64,
    width: f64,
    cells: &'a [Cell],
}

impl Drawing<'_> {
    pub(super) fn pools(&mut self) {
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
