//! Python frames in the place of the interpreter's own.
//!
//! One run of the evaluation function runs a group of Python frames: the one it was called for, the
//! entry, and those that were called without leaving it (3.11 on). So the innermost native frame of
//! the function stands for the innermost group, the next one for the next group, and so on outwards.

/// What a native frame is to the merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Native {
    /// In the interpreter's evaluation function.
    Evaluation,
    /// Elsewhere in the interpreter.
    Interpreter,
    Other,
}

/// What a Python frame is to the merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Python {
    Frame,
    /// The one that the evaluation function was called for, the outermost of its group.
    Entry,
    /// No frame: it stands behind the outermost of a group.
    Shim,
}

/// A frame of the result, by its place in what it came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Merged {
    Native(usize),
    Python(usize),
}

/// How the two went together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// Each group had its native frame, and each native frame of the function its group.
    Exact,
    /// Groups were left: native frames are missing.
    MoreGroups,
    /// Native frames were left, and stand for themselves: Python frames are missing.
    MoreNative,
}

/// Puts groups in the places of native frames; both innermost first, as is the result.
///
/// Python frames are all kept, in order. Groups without a native frame come right outside the last
/// one that has one; if none has, before the interpreter's innermost frame, and if there is no such
/// frame either, outside all others: it is Python that calls native code.
pub fn merge(native: &[Native], python: &[Python]) -> (Vec<Merged>, Fit) {
    let groups = groups(python);
    let places = native.iter().filter(|n| **n == Native::Evaluation).count();
    let mut groups = groups.into_iter();
    let mut merged = Vec::with_capacity(native.len() + python.len());
    // After which native frame the rest goes.
    let last_place = native.iter().rposition(|n| *n == Native::Evaluation);
    let before = native.iter().position(|n| *n == Native::Interpreter);
    let mut left_native = false;
    let mut left_groups = false;
    for (index, frame) in native.iter().enumerate() {
        if places == 0 && before == Some(index) {
            for group in groups.by_ref() {
                left_groups = true;
                merged.extend(group.into_iter().map(Merged::Python));
            }
        }
        match (frame, groups.len()) {
            (Native::Evaluation, 1..) => {
                let group = groups.next().unwrap_or_default();
                merged.extend(group.into_iter().map(Merged::Python));
            }
            (Native::Evaluation, 0) => {
                left_native = true;
                merged.push(Merged::Native(index));
            }
            _ => merged.push(Merged::Native(index)),
        }
        if last_place == Some(index) {
            for group in groups.by_ref() {
                left_groups = true;
                merged.extend(group.into_iter().map(Merged::Python));
            }
        }
    }
    for group in groups {
        left_groups = true;
        merged.extend(group.into_iter().map(Merged::Python));
    }
    let fit = match (left_groups, left_native) {
        (true, _) => Fit::MoreGroups,
        (_, true) => Fit::MoreNative,
        _ => Fit::Exact,
    };
    (merged, fit)
}

/// Frames of each run of the evaluation function. The last group has no mark if the walk was cut.
fn groups(python: &[Python]) -> Vec<Vec<usize>> {
    let mut groups = Vec::new();
    let mut group = Vec::new();
    for (index, frame) in python.iter().enumerate() {
        if *frame != Python::Shim {
            group.push(index);
        }
        if *frame != Python::Frame && !group.is_empty() {
            groups.push(std::mem::take(&mut group));
        }
    }
    if !group.is_empty() {
        groups.push(group);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::Merged::{Native as N, Python as P};
    use super::Native::{Evaluation, Interpreter, Other};
    use super::Python::{Entry, Frame, Shim};
    use super::*;
    use proptest::prelude::*;

    /// A callback: Python calls C (`sorted`), which calls Python again.
    #[test]
    fn groups_take_the_places_of_the_evaluation_functions_frames() {
        let native = [
            Other,
            Evaluation,
            Interpreter,
            Evaluation,
            Interpreter,
            Other,
        ];
        let expected = vec![N(0), P(0), P(1), N(2), P(2), N(4), N(5)];
        let marked = [Frame, Entry, Entry];
        assert_eq!(merge(&native, &marked), (expected, Fit::Exact));
        // The same of 3.12, where a shim lies outside each group.
        let shims = [Frame, Frame, Shim, Frame, Shim];
        let expected = vec![N(0), P(0), P(1), N(2), P(3), N(4), N(5)];
        assert_eq!(merge(&native, &shims), (expected, Fit::Exact));
    }

    #[test]
    fn frames_without_a_place_are_kept_in_order() {
        let python = [Entry, Entry, Entry];
        assert_eq!(
            merge(&[Other, Evaluation, Other], &python),
            (vec![N(0), P(0), P(1), P(2), N(2)], Fit::MoreGroups)
        );
        assert_eq!(
            merge(&[Other, Interpreter, Other], &python),
            (vec![N(0), P(0), P(1), P(2), N(1), N(2)], Fit::MoreGroups)
        );
        assert_eq!(
            merge(&[Other], &python),
            (vec![N(0), P(0), P(1), P(2)], Fit::MoreGroups)
        );
        assert_eq!(merge(&[], &[Frame]), (vec![P(0)], Fit::MoreGroups));
    }

    #[test]
    fn native_frames_without_a_group_stand_for_themselves() {
        assert_eq!(
            merge(&[Other, Evaluation, Evaluation, Other], &[Entry]),
            (vec![N(0), P(0), N(2), N(3)], Fit::MoreNative)
        );
        // A walk that was cut in the middle of a group.
        assert_eq!(
            merge(&[Evaluation, Evaluation], &[Entry, Frame, Frame]),
            (vec![P(0), P(1), P(2)], Fit::Exact)
        );
        assert_eq!(
            merge(&[Other, Evaluation], &[]),
            (vec![N(0), N(1)], Fit::MoreNative)
        );
    }

    proptest! {
        /// Whatever came: all Python frames but shims are there once and in order, so are all native
        /// ones but those of the evaluation function.
        #[test]
        fn nothing_is_lost(
            native in proptest::collection::vec(prop_oneof![Just(Evaluation), Just(Interpreter), Just(Other)], 0..30),
            python in proptest::collection::vec(prop_oneof![Just(Entry), Just(Frame), Just(Shim)], 0..30)
        ) {
            let (merged, fit) = merge(&native, &python);
            let of_python: Vec<usize> = merged.iter().filter_map(|m| match m { P(i) => Some(*i), N(_) => None }).collect();
            let all: Vec<usize> = (0..python.len()).filter(|i| python[*i] != Shim).collect();
            prop_assert_eq!(of_python, all);
            let of_native: Vec<usize> = merged.iter().filter_map(|m| match m { N(i) => Some(*i), P(_) => None }).collect();
            prop_assert!(of_native.is_sorted());
            let others = |i: &usize| native[*i] != Evaluation;
            prop_assert!((0..native.len()).filter(others).eq(of_native.iter().copied().filter(others)));
            let replaced = native.len() - of_native.len();
            let places = native.iter().filter(|n| **n == Evaluation).count();
            prop_assert_eq!(fit == Fit::MoreNative, replaced < places);
        }
    }
}
