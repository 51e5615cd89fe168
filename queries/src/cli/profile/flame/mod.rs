//! A flame graph as one SVG file: boxes as wide as their bytes, what was called on top of who called.
//! It is readable as it is; in a browser, its own script adds zoom, search and reset.
//!
//! Own code and no library: the known one is under a licence (CDDL) that would travel with the script
//! inside every picture.
//!
//! Invariants:
//! - the file needs nothing from elsewhere, and all text from data is escaped;
//! - widths are true: a box is as wide as its share of the whole, and what a box has beyond its
//!   children is its own;
//! - boxes too narrow to be seen are left out, and the picture says how many.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::frames::{Frame, Stack};
use crate::map::svg::escaped;
use crate::text::{percent, size};

const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 10.0;
const ROW: f64 = 18.0;
const TOP: f64 = 76.0;
const BOTTOM: f64 = 30.0;
/// Narrower boxes are not drawn.
const NARROWEST: f64 = 0.2;
/// Width of a character of the labels.
const CHARACTER: f64 = 6.6;
/// Deeper frames are drawn as one box: a picture of thousands of rows helps nobody.
const DEEPEST: usize = 400;

const SCRIPT: &str = include_str!("script.js");
const STYLE: &str = include_str!("style.css");

/// What is drawn.
pub struct Picture<'a> {
    pub title: &'a str,
    /// What the bytes are and when.
    pub subtitle: &'a str,
    /// Colours tell the difference to before instead of the kind of code.
    pub differential: bool,
}

/// A function in its place, with what it and all that it called hold.
#[derive(Debug, Default)]
pub struct Node {
    kind: Code,
    value: u64,
    before: u64,
    callees: BTreeMap<String, Node>,
}

/// Whose code a frame is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Code {
    #[default]
    Native,
    Python,
    Kernel,
    Driver,
    Framework,
    Unknown,
}

impl Code {
    fn class(self) -> &'static str {
        match self {
            Code::Native => "n",
            Code::Python => "p",
            Code::Kernel => "k",
            Code::Driver => "d",
            Code::Framework => "f",
            Code::Unknown => "u",
        }
    }

    fn of(frame: &Frame) -> Code {
        let function = frame.function.as_str();
        let module = frame.module_name();
        let starts = |names: &[&str], text: &str| names.iter().any(|name| text.starts_with(name));
        if frame.is_python() {
            Code::Python
        } else if frame.kind == "kernel" {
            Code::Kernel
        } else if starts(&["libcuda", "libnvidia", "libnccl"], module)
            || starts(
                &[
                    "cuda",
                    "cuMem",
                    "cuArray",
                    "cuMipmapped",
                    "cuIpc",
                    "cuCtx",
                    "nccl",
                ],
                function,
            )
        {
            Code::Driver
        } else if starts(&["c10::", "at::", "torch::", "pytorch:"], function)
            || starts(&["libtorch", "libc10"], module)
        {
            Code::Framework
        } else if function.is_empty() {
            Code::Unknown
        } else {
            Code::Native
        }
    }
}

impl Node {
    /// Adds a stack's bytes, those of now and those of before.
    pub fn add(&mut self, stack: Option<&Stack>, value: u64, before: u64) {
        self.value += value;
        self.before += before;
        let mut node = self;
        for (name, kind) in path(stack).into_iter().take(DEEPEST) {
            node = node.callees.entry(name).or_insert_with(|| Node {
                kind,
                ..Node::default()
            });
            node.value += value;
            node.before += before;
        }
    }

    pub fn value(&self) -> u64 {
        self.value
    }
}

/// Outermost first.
fn path(stack: Option<&Stack>) -> Vec<(String, Code)> {
    match stack {
        None => vec![("(no stack)".to_string(), Code::Unknown)],
        Some(stack) if stack.frames.is_empty() => {
            let names = stack.folded.split(';');
            names.map(|name| (name.to_string(), Code::Native)).collect()
        }
        Some(stack) => {
            let frames = stack.frames.iter().rev();
            frames
                .map(|frame| (frame.name(), Code::of(frame)))
                .collect()
        }
    }
}

/// The picture, of which the root stands for everything.
pub fn draw(picture: &Picture<'_>, root: &Node) -> String {
    let mut drawing = Drawing {
        picture,
        total: root.value,
        scale: if root.value > 0 {
            (WIDTH - 2.0 * MARGIN) / root.value as f64
        } else {
            0.0
        },
        most: most_change(root).max(1),
        boxes: Vec::new(),
        narrow: 0,
        deepest: 0,
    };
    drawing.place("all", root, MARGIN, 0);
    drawing.finish()
}

/// The largest change of one box: the strongest colour.
fn most_change(root: &Node) -> u64 {
    let mut most = 0;
    let mut open = vec![root];
    while let Some(node) = open.pop() {
        most = most.max(node.value.abs_diff(node.before));
        open.extend(node.callees.values());
    }
    most
}

struct Drawn {
    text: String,
    title: String,
    class: &'static str,
    fill: Option<String>,
    x: f64,
    width: f64,
    depth: usize,
}

struct Drawing<'a> {
    picture: &'a Picture<'a>,
    total: u64,
    scale: f64,
    most: u64,
    boxes: Vec<Drawn>,
    narrow: usize,
    deepest: usize,
}

impl Drawing<'_> {
    /// Not recursive: stacks come from data.
    fn place(&mut self, name: &str, root: &Node, x: f64, depth: usize) {
        let mut open = vec![(name.to_string(), root, x, depth)];
        while let Some((name, node, x, depth)) = open.pop() {
            let width = node.value as f64 * self.scale;
            if width < NARROWEST {
                self.narrow += 1;
                continue;
            }
            self.deepest = self.deepest.max(depth);
            let mut left = x;
            for (callee, inner) in &node.callees {
                open.push((callee.clone(), inner, left, depth + 1));
                left += inner.value as f64 * self.scale;
            }
            self.boxes.push(Drawn {
                title: self.title_of(&name, node),
                class: if depth == 0 { "r" } else { node.kind.class() },
                fill: (self.picture.differential && depth > 0).then(|| self.change_colour(node)),
                text: name,
                x,
                width,
                depth,
            });
        }
    }

    fn title_of(&self, name: &str, node: &Node) -> String {
        let share = percent(node.value as f64 / self.total.max(1) as f64);
        if !self.picture.differential {
            return format!("{name}: {}, {share}", size(node.value));
        }
        let change = node.value.abs_diff(node.before);
        let sign = if node.value >= node.before { '+' } else { '-' };
        format!(
            "{name}: {}, {share}; before {}, change {sign}{}",
            size(node.value),
            size(node.before),
            size(change)
        )
    }

    /// White where nothing changed, red where it grew, blue where it shrank.
    fn change_colour(&self, node: &Node) -> String {
        let strength = node.value.abs_diff(node.before) as f64 / self.most as f64;
        let pale = (245.0 - 165.0 * strength.sqrt()).round() as u8;
        if node.value >= node.before {
            format!("rgb(245,{pale},{pale})")
        } else {
            format!("rgb({pale},{pale},245)")
        }
    }

    fn finish(&self) -> String {
        let height = TOP + (self.deepest + 1) as f64 * ROW + BOTTOM;
        let mut out = String::with_capacity(self.boxes.len() * 220 + SCRIPT.len() + STYLE.len());
        // Writing to a String cannot fail, here and below.
        let _ = write!(
            out,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
             <svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
             data-margin=\"{MARGIN}\" data-character=\"{CHARACTER}\">\n\
             <style>{STYLE}</style>\n\
             <rect class=\"bg\" width=\"100%\" height=\"100%\"/>\n\
             <text class=\"t\" x=\"{MARGIN}\" y=\"24\">{}</text>\n\
             <text class=\"s\" x=\"{MARGIN}\" y=\"42\">{}</text>\n",
            escaped(self.picture.title),
            escaped(self.picture.subtitle)
        );
        self.legend(&mut out);
        let right = WIDTH - MARGIN;
        let _ = write!(
            out,
            "<text id=\"reset\" class=\"c\" x=\"{}\" y=\"24\">reset zoom</text>\
             <text id=\"search\" class=\"c\" x=\"{right}\" y=\"24\">search (Ctrl-F)</text>\
             <text id=\"found\" class=\"s e\" x=\"{right}\" y=\"42\"></text>\n\
             <text id=\"about\" class=\"s\" x=\"{MARGIN}\" y=\"{}\">{}</text>\n<g id=\"boxes\">\n",
            right - 120.0,
            height - 10.0,
            escaped(&self.about()),
        );
        for each in &self.boxes {
            self.draw_box(each, height, &mut out);
        }
        let _ = write!(
            out,
            "</g>\n<script type=\"text/javascript\"><![CDATA[{SCRIPT}]]></script>\n</svg>\n"
        );
        out
    }

    fn about(&self) -> String {
        match self.narrow {
            0 => String::new(),
            1 => "1 box is too narrow to be drawn".to_string(),
            narrow => format!("{narrow} boxes are too narrow to be drawn, and what they called"),
        }
    }

    fn legend(&self, out: &mut String) {
        let entries: &[(&str, &str)] = if self.picture.differential {
            &[
                ("grown", "rgb(245,80,80)"),
                ("shrunk", "rgb(80,80,245)"),
                ("unchanged", "rgb(245,245,245)"),
            ]
        } else {
            &[
                ("Python", "#5b8fd6"),
                ("native", "#e8a33d"),
                ("framework", "#6fb07f"),
                ("driver", "#d9705f"),
                ("without a name", "#b4bac2"),
            ]
        };
        let mut x = MARGIN;
        for (name, colour) in entries {
            let _ = write!(
                out,
                "<rect x=\"{x}\" y=\"52\" width=\"11\" height=\"11\" rx=\"2\" fill=\"{colour}\"/>\
                 <text class=\"s\" x=\"{}\" y=\"62\">{name}</text>",
                x + 16.0
            );
            x += 36.0 + name.len() as f64 * 6.5;
        }
        out.push('\n');
    }

    fn draw_box(&self, each: &Drawn, height: f64, out: &mut String) {
        let y = height - BOTTOM - (each.depth + 1) as f64 * ROW;
        let fill = match &each.fill {
            Some(fill) => format!(" style=\"fill:{fill}\""),
            None => String::new(),
        };
        let _ = write!(
            out,
            "<g class=\"{}\"><title>{}</title><rect x=\"{:.2}\" y=\"{y}\" width=\"{:.2}\" height=\"{}\"{fill}/>",
            each.class,
            escaped(&each.title),
            each.x,
            each.width,
            ROW - 1.0
        );
        let label = fitting(&each.text, each.width);
        if !label.is_empty() {
            let _ = write!(
                out,
                "<text x=\"{:.2}\" y=\"{}\">{}</text>",
                each.x + 3.0,
                y + 12.5,
                escaped(&label)
            );
        }
        out.push_str("</g>\n");
    }
}

/// As much of a name as a box has room for; nothing where that would say nothing.
fn fitting(name: &str, width: f64) -> String {
    let room = ((width - 6.0) / CHARACTER).floor();
    if room < 3.0 {
        return String::new();
    }
    crate::map::cut(name, room as usize)
}

#[cfg(test)]
mod tests;
