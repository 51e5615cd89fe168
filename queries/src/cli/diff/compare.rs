//! Which stack of one side is which of the other, and how much more it holds.
//!
//! Invariants:
//! - a stack that both sides have by its id is the same; of the others those with the same functions
//!   are (offsets of frames without a name change with every build);
//! - every byte of both sides is in exactly one row.

use std::collections::{BTreeMap, HashSet};

use crate::frames::{Stack, Stacks};
use crate::profile::owner::{self, By};
use crate::profile::{Held, Profile, ROWS, Value};

/// One side's numbers, with the hours that they stand for.
pub struct Measured<'a> {
    pub profile: &'a Profile,
    pub stacks: &'a Stacks,
}

/// What is compared as one.
#[derive(Debug, Clone, Default)]
pub struct Pair {
    pub name: String,
    /// A stack of it.
    pub stack_id: Option<i64>,
    pub a: Held,
    pub b: Held,
    /// How its stacks of the two sides were found to be the same: stack_id, name, or which side alone
    /// has it.
    pub in_a: bool,
    pub in_b: bool,
    pub by_name: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Stack(i64),
    Name(String),
}

/// All rows, in no order that means something.
pub fn pairs(a: &Measured<'_>, b: &Measured<'_>, by: By) -> Vec<Pair> {
    let ids = |side: &Measured<'_>| -> HashSet<i64> {
        side.profile
            .held
            .keys()
            .filter_map(|key| key.stack)
            .collect()
    };
    let (in_a, in_b) = (ids(a), ids(b));
    let mut pairs: BTreeMap<Key, Pair> = BTreeMap::new();
    for (side, others, is_b) in [(a, &in_b, false), (b, &in_a, true)] {
        let (rows, rest) = side.profile.most(ROWS);
        for (key, held) in rows {
            let stack = key.stack.and_then(|id| side.stacks.get(&id));
            let name = owner::name(stack, by);
            let is_same = key.stack.is_some_and(|id| others.contains(&id));
            let found = match key.stack {
                Some(id) if by == By::Stack && is_same => Key::Stack(id),
                _ => Key::Name(owner::without_offsets(&name)),
            };
            let by_name = by == By::Stack && !is_same && stack.is_some();
            let pair = pairs.entry(found).or_default();
            pair.name = name;
            pair.stack_id = pair.stack_id.or(key.stack);
            pair.by_name |= by_name;
            pair.add(&held, is_b);
        }
        if let Some((count, held)) = rest {
            let pair = pairs.entry(Key::Name(String::new())).or_default();
            pair.name = format!("(other stacks, {count} of the last side)");
            pair.add(&held, is_b);
        }
    }
    pairs.into_values().collect()
}

impl Pair {
    fn add(&mut self, held: &Held, is_b: bool) {
        if is_b {
            self.b.add(held);
            self.in_b = true;
        } else {
            self.a.add(held);
            self.in_a = true;
        }
    }

    pub fn matched(&self) -> &'static str {
        match (self.in_a, self.in_b) {
            (true, false) => "only a",
            (false, true) => "only b",
            _ if self.by_name => "name",
            _ => "same",
        }
    }
}

/// What is compared of a side: bytes that live, else bytes an hour, so that times of different lengths
/// can be compared.
pub fn compared(held: &Held, value: Value, hours: Option<f64>) -> f64 {
    let bytes = held.value(value) as f64;
    match value {
        Value::Live => bytes,
        Value::Growth | Value::Allocated => hours.map_or(0.0, |hours| bytes / hours),
    }
}

/// The stack that a row's box in a picture is drawn for.
pub fn drawn<'a>(stack_id: Option<i64>, a: &'a Stacks, b: &'a Stacks) -> Option<&'a Stack> {
    let id = stack_id?;
    b.get(&id).or_else(|| a.get(&id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::Frame;
    use crate::profile::Key as StackOf;

    fn side(rows: &[(Option<i64>, i64)]) -> Profile {
        let mut profile = Profile::default();
        for (stack, live_bytes) in rows {
            let key = StackOf {
                stack: *stack,
                process: None,
            };
            let held = Held {
                live_bytes: *live_bytes,
                ..Held::default()
            };
            profile.held.insert(key, held);
        }
        profile
    }

    fn stacks(rows: &[(i64, &str)]) -> Stacks {
        let stack = |folded: &str| Stack {
            folded: folded.to_string(),
            frames: folded
                .rsplit(';')
                .map(|name| Frame {
                    kind: "native".to_string(),
                    module: "/opt/x.so".to_string(),
                    function: name.to_string(),
                    ..Frame::default()
                })
                .collect(),
        };
        rows.iter()
            .map(|(id, folded)| (*id, stack(folded)))
            .collect()
    }

    #[test]
    fn stacks_meet_by_id_then_by_name() {
        let a = side(&[(Some(1), 100), (Some(2), 200), (Some(4), 7), (None, 5)]);
        let b = side(&[(Some(1), 150), (Some(3), 500), (Some(5), 9), (None, 6)]);
        // 2 and 3 are one function of two builds; 1 is known by its id whatever it is called.
        let names_a = stacks(&[
            (1, "main;serve"),
            (2, "main;x.so+0x10;cudaMalloc"),
            (4, "main;gone"),
        ]);
        let names_b = stacks(&[
            (1, "main;serve"),
            (3, "main;x.so+0x20;cudaMalloc"),
            (5, "main;new"),
        ]);
        let found = pairs(
            &Measured {
                profile: &a,
                stacks: &names_a,
            },
            &Measured {
                profile: &b,
                stacks: &names_b,
            },
            By::Stack,
        );
        let mut rows: Vec<(i64, i64, &str)> = found
            .iter()
            .map(|pair| (pair.a.live_bytes, pair.b.live_bytes, pair.matched()))
            .collect();
        rows.sort_unstable();
        let expected = [
            (0, 9, "only b"),
            (5, 6, "same"),
            (7, 0, "only a"),
            (100, 150, "same"),
            (200, 500, "name"),
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn functions_are_added_up_over_their_stacks() {
        let a = side(&[(Some(1), 100), (Some(2), 200)]);
        let b = side(&[(Some(1), 400), (Some(2), 250)]);
        let names = stacks(&[
            (1, "main;serve;cudaMalloc"),
            (2, "main;warm;serve;cudaMalloc"),
        ]);
        let measured = |profile| Measured {
            profile,
            stacks: &names,
        };
        let found = pairs(&measured(&a), &measured(&b), By::Function);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "serve");
        assert_eq!((found[0].a.live_bytes, found[0].b.live_bytes), (300, 650));
    }

    #[test]
    fn rates_are_by_the_hour_and_live_bytes_are_not() {
        let held = Held {
            live_bytes: 900,
            start_bytes: 300,
            allocated_bytes: 5000,
            ..Held::default()
        };
        assert_eq!(compared(&held, Value::Live, Some(2.0)), 900.0);
        assert_eq!(compared(&held, Value::Growth, Some(2.0)), 300.0);
        assert_eq!(compared(&held, Value::Allocated, Some(2.0)), 2500.0);
    }
}
