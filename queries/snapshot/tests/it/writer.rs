//! Writes Python values as pickles and as JSON, so that the project has small snapshots of its own.
//!
//! Two hands: CPython's `pickle.dump` (what `_dump_snapshot` calls) gives every container a memo
//! number and writes batches of 1000; PyTorch's C++ pickler (`_memory_snapshot_pickled`) writes
//! protocol 2, one batch for each container, and numbers only for what comes more than once.

// Shared with the tests of other crates, of which none needs all of it.
#![allow(dead_code)]

use std::collections::HashMap;
use std::rc::Rc;

/// A Python value.
#[derive(Debug, Clone)]
pub enum Py {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(String),
    List(Vec<Py>),
    Tuple(Vec<Py>),
    Dict(Vec<(Py, Py)>),
    /// One object in several places.
    Shared(Rc<Py>),
}

impl From<&str> for Py {
    fn from(text: &str) -> Py {
        Py::Str(text.to_string())
    }
}

// The only whole number, so that a literal is taken for one.
impl From<i64> for Py {
    fn from(number: i64) -> Py {
        Py::Int(number.into())
    }
}

impl From<bool> for Py {
    fn from(yes: bool) -> Py {
        Py::Bool(yes)
    }
}

impl From<Vec<Py>> for Py {
    fn from(elements: Vec<Py>) -> Py {
        Py::List(elements)
    }
}

/// `dict!{"key" => value, …}`.
#[macro_export]
macro_rules! dict {
    ($($key:literal => $value:expr),* $(,)?) => {
        $crate::writer::Py::Dict(vec![
            $(($crate::writer::Py::from($key), $crate::writer::Py::from($value))),*
        ])
    };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hand {
    /// CPython, with that protocol.
    Python(u8),
    /// PyTorch's C++ pickler.
    Torch,
}

pub const HANDS: [Hand; 5] = [
    Hand::Python(2),
    Hand::Python(3),
    Hand::Python(4),
    Hand::Python(5),
    Hand::Torch,
];

pub fn pickle(value: &Py, hand: Hand) -> Vec<u8> {
    let protocol = match hand {
        Hand::Python(protocol) => protocol,
        Hand::Torch => 2,
    };
    let mut pickler = Pickler {
        hand,
        protocol,
        out: Vec::new(),
        memo: 0,
        texts: HashMap::new(),
        shared: HashMap::new(),
    };
    pickler.write(value);
    pickler.out.push(b'.');
    let body = pickler.out;
    let mut file = vec![0x80, protocol];
    if protocol >= 4 {
        file.push(0x95);
        file.extend((body.len() as u64).to_le_bytes());
    }
    file.extend(body);
    file
}

struct Pickler {
    hand: Hand,
    protocol: u8,
    out: Vec<u8>,
    memo: u32,
    texts: HashMap<String, u32>,
    shared: HashMap<*const Py, u32>,
}

impl Pickler {
    fn memoize(&mut self) -> u32 {
        let number = self.memo;
        self.memo += 1;
        if self.protocol >= 4 {
            self.out.push(0x94);
        } else {
            self.numbered(b'q', b'r', number);
        }
        number
    }

    fn numbered(&mut self, short: u8, long: u8, number: u32) {
        match u8::try_from(number) {
            Ok(number) => self.out.extend([short, number]),
            Err(_) => {
                self.out.push(long);
                self.out.extend(number.to_le_bytes());
            }
        }
    }

    /// CPython numbers every container, the C++ pickler only what it will refer to.
    fn container(&mut self) {
        if let Hand::Python(_) = self.hand {
            self.memoize();
        }
    }

    fn write(&mut self, value: &Py) {
        match value {
            Py::None => self.out.push(b'N'),
            Py::Bool(true) => self.out.push(0x88),
            Py::Bool(false) => self.out.push(0x89),
            Py::Int(number) => self.int(*number),
            Py::Float(number) => {
                self.out.push(b'G');
                self.out.extend(number.to_be_bytes());
            }
            Py::Str(text) => self.text(text),
            Py::List(elements) => {
                self.out.push(b']');
                self.container();
                self.elements(elements);
            }
            Py::Dict(entries) => {
                self.out.push(b'}');
                self.container();
                self.entries(entries);
            }
            Py::Tuple(elements) => self.tuple(elements),
            Py::Shared(object) => match self.shared.get(&Rc::as_ptr(object)) {
                Some(number) => self.numbered(b'h', b'j', *number),
                None => self.shared(object),
            },
        }
    }

    fn shared(&mut self, object: &Rc<Py>) {
        // The number is given when the container begins.
        let number = self.memo;
        match &**object {
            Py::List(elements) => {
                self.out.push(b']');
                self.memoize();
                self.shared.insert(Rc::as_ptr(object), number);
                self.elements(elements);
            }
            Py::Dict(entries) => {
                self.out.push(b'}');
                self.memoize();
                self.shared.insert(Rc::as_ptr(object), number);
                self.entries(entries);
            }
            other => self.write(other),
        }
    }

    fn batch(&self) -> usize {
        match self.hand {
            Hand::Python(_) => 1000,
            Hand::Torch => usize::MAX,
        }
    }

    fn elements(&mut self, elements: &[Py]) {
        for batch in elements.chunks(self.batch()) {
            if let ([one], Hand::Python(_)) = (batch, self.hand) {
                self.write(one);
                self.out.push(b'a');
                continue;
            }
            self.out.push(b'(');
            batch.iter().for_each(|element| self.write(element));
            self.out.push(b'e');
        }
    }

    fn entries(&mut self, entries: &[(Py, Py)]) {
        for batch in entries.chunks(self.batch()) {
            if let ([(key, value)], Hand::Python(_)) = (batch, self.hand) {
                self.write(key);
                self.write(value);
                self.out.push(b's');
                continue;
            }
            self.out.push(b'(');
            for (key, value) in batch {
                self.write(key);
                self.write(value);
            }
            self.out.push(b'u');
        }
    }

    fn tuple(&mut self, elements: &[Py]) {
        if elements.len() > 3 {
            self.out.push(b'(');
        }
        elements.iter().for_each(|element| self.write(element));
        match elements.len() {
            0 => return self.out.push(b')'),
            count @ 1..=3 => self.out.push(0x84 + count as u8),
            _ => self.out.push(b't'),
        }
        self.container();
    }

    fn int(&mut self, number: i128) {
        if let Ok(number) = u8::try_from(number) {
            self.out.extend([b'K', number]);
        } else if let Ok(number) = u16::try_from(number) {
            self.out.push(b'M');
            self.out.extend(number.to_le_bytes());
        } else if let Ok(number) = i32::try_from(number) {
            self.out.push(b'J');
            self.out.extend(number.to_le_bytes());
        } else {
            let mut bytes = number.to_le_bytes().to_vec();
            let fill = if number < 0 { 0xff } else { 0 };
            // The shortest form whose last bit still tells the sign.
            while bytes.len() > 1
                && bytes[bytes.len() - 1] == fill
                && (bytes[bytes.len() - 2] & 0x80 != 0) == (number < 0)
            {
                bytes.pop();
            }
            self.out.extend([0x8a, bytes.len() as u8]);
            self.out.extend(bytes);
        }
    }

    fn text(&mut self, text: &str) {
        if let Some(number) = self.texts.get(text) {
            return self.numbered(b'h', b'j', *number);
        }
        match u8::try_from(text.len()) {
            Ok(length) if self.protocol >= 4 => self.out.extend([0x8c, length]),
            _ => {
                self.out.push(b'X');
                self.out.extend((text.len() as u32).to_le_bytes());
            }
        }
        self.out.extend(text.as_bytes());
        let number = self.memoize();
        self.texts.insert(text.to_string(), number);
    }
}

/// The same as JSON; tuples become arrays, as in Python's `json.dump`.
pub fn json(value: &Py) -> String {
    match value {
        Py::None => "null".to_string(),
        Py::Bool(yes) => yes.to_string(),
        Py::Int(number) => number.to_string(),
        Py::Float(number) => format!("{number:?}"),
        Py::Str(text) => quoted(text),
        Py::List(elements) | Py::Tuple(elements) => {
            let elements: Vec<String> = elements.iter().map(json).collect();
            format!("[{}]", elements.join(", "))
        }
        Py::Dict(entries) => {
            let entries: Vec<String> = entries
                .iter()
                .map(|(key, value)| format!("{}: {}", json(key), json(value)))
                .collect();
            format!("{{{}}}", entries.join(", "))
        }
        Py::Shared(object) => json(object),
    }
}

fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => out.extend(['\\', character]),
            control if control < ' ' => out.push_str(&format!("\\u{:04x}", control as u32)),
            other => out.push(other),
        }
    }
    out.push('"');
    out
}
