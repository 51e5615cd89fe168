use super::*;

fn stack(folded: &str) -> Stack {
    Stack {
        folded: folded.to_string(),
        frames: Vec::new(),
    }
}

fn picture(differential: bool) -> Picture<'static> {
    Picture {
        title: "a <title>",
        subtitle: "what & when",
        differential,
    }
}

/// Title, x and width of every box.
fn boxes(svg: &str) -> Vec<(String, f64, f64)> {
    let attribute = |text: &str, name: &str| {
        let from = text.find(&format!(" {name}=\"")).unwrap() + name.len() + 3;
        let length = text[from..].find('"').unwrap();
        text[from..from + length].parse::<f64>().unwrap()
    };
    svg.lines()
        .filter(|line| line.starts_with("<g class") && line.contains("<title>"))
        .map(|line| {
            let title = line.split("<title>").nth(1).unwrap();
            let (title, rect) = title.split_once("</title>").unwrap();
            (
                title.to_string(),
                attribute(rect, "x"),
                attribute(rect, "width"),
            )
        })
        .collect()
}

#[test]
fn boxes_are_as_wide_as_their_share() {
    let mut root = Node::default();
    root.add(Some(&stack("main;a;x")), 600, 0);
    root.add(Some(&stack("main;b")), 300, 0);
    root.add(None, 100, 0);
    let svg = draw(&picture(false), &root);
    let found = boxes(&svg);
    // 1180 units of room for 1000 bytes.
    let expected = [
        ("all: 1000 B, 100.0 %", 10.0, 1180.0),
        ("main: 900 B, 90.0 %", 128.0, 1062.0),
        ("b: 300 B, 30.0 %", 836.0, 354.0),
        ("a: 600 B, 60.0 %", 128.0, 708.0),
        ("x: 600 B, 60.0 %", 128.0, 708.0),
        ("(no stack): 100 B, 10.0 %", 10.0, 118.0),
    ];
    let expected = expected.map(|(title, x, width)| (title.to_string(), x, width));
    assert_eq!(found, expected);
    assert!(
        svg.contains("a &lt;title&gt;") && svg.contains("what &amp; when"),
        "{svg}"
    );
}

#[test]
fn what_cannot_be_seen_is_counted() {
    let mut root = Node::default();
    root.add(Some(&stack("big")), 1_000_000, 0);
    root.add(Some(&stack("small;smaller")), 10, 0);
    let svg = draw(&picture(false), &root);
    assert_eq!(boxes(&svg).len(), 2);
    assert!(svg.contains("1 box is too narrow to be drawn"), "{svg}");
    let empty = draw(&picture(false), &Node::default());
    assert_eq!(boxes(&empty).len(), 0);
}

#[test]
fn changes_have_colours_and_both_numbers() {
    let mut root = Node::default();
    root.add(Some(&stack("main;grown")), 3000, 1000);
    root.add(Some(&stack("main;shrunk")), 500, 2500);
    root.add(Some(&stack("main;same")), 700, 700);
    let svg = draw(&picture(true), &root);
    let fill = |name: &str| {
        let line = svg
            .lines()
            .find(|line| line.contains(&format!("<title>{name}:")));
        let line = line.unwrap_or_else(|| panic!("{name} in {svg}"));
        let from = line.find("fill:").unwrap() + 5;
        line[from..].split('"').next().unwrap().to_string()
    };
    // The strongest changes: 245 - 165.
    assert_eq!(fill("grown"), "rgb(245,80,80)");
    assert_eq!(fill("shrunk"), "rgb(80,80,245)");
    assert_eq!(fill("same"), "rgb(245,245,245)");
    assert!(
        svg.contains("grown: 2.93 KiB, 71.4 %; before 1000 B, change +1.95 KiB"),
        "{svg}"
    );
}

#[test]
fn hostile_names_stay_text_and_deep_stacks_end() {
    let mut root = Node::default();
    root.add(Some(&stack("]]></script><script>\u{1}alert(1)")), 10, 0);
    root.add(Some(&stack(&vec!["f"; 100_000].join(";"))), 10, 0);
    let svg = draw(&picture(false), &root);
    assert_eq!(svg.matches("<script").count(), 1, "only its own");
    assert!(!svg.contains('\u{1}'));
    assert!(boxes(&svg).len() <= DEEPEST + 2);
}

#[test]
fn names_are_cut_to_their_room() {
    assert_eq!(fitting("function", 200.0), "function");
    assert_eq!(fitting("function", 40.0), "func…");
    assert_eq!(fitting("function", 20.0), "");
}
