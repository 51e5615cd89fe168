//! Against tables written here from a list of what each instruction's line is, and against what
//! interpreters say of their own code.

use std::io::Write;
use std::process::Command;

use proptest::prelude::*;

use super::line;

/// Instructions of two bytes that belong to a line, or to none.
type Run = (u8, Option<i32>);

fn write_number(table: &mut Vec<u8>, mut value: u32) {
    while value >= 64 {
        table.push((value & 63) as u8 | 64);
        value >>= 6;
    }
    table.push(value as u8);
}

fn write_signed(table: &mut Vec<u8>, value: i32) {
    let size = value.unsigned_abs() << 1;
    write_number(table, if value < 0 { size | 1 } else { size });
}

/// A table of 3.11's form: of the forms that can say it, `form` chooses one.
fn entries(runs: &[(Run, u8)], first_line: i32) -> Vec<u8> {
    let mut table = Vec::new();
    let mut at = first_line;
    for ((units, line), form) in runs {
        let head = |code: u8| 0x80 | code << 3 | (units - 1);
        let Some(line) = line else {
            table.push(head(15));
            continue;
        };
        let further = line - at;
        at = *line;
        match form {
            0 if further == 0 => table.extend([head(*form), 0x35]),
            1 if (0..3).contains(&further) => {
                table.extend([head(10 + further as u8), 4, 9]);
            }
            2 => {
                table.push(head(13));
                write_signed(&mut table, further);
            }
            _ => {
                table.push(head(14));
                write_signed(&mut table, further);
                for extra in [2, 70, 5000] {
                    write_number(&mut table, extra);
                }
            }
        }
    }
    table
}

/// A table of 3.10's form.
fn pairs(runs: &[(Run, u8)], first_line: i32) -> Vec<u8> {
    let mut table = Vec::new();
    let mut at = first_line;
    for ((units, line), _) in runs {
        let Some(line) = line else {
            table.extend([2 * units, 0x80]);
            continue;
        };
        let mut further = line - at;
        at = *line;
        while !(-127..=127).contains(&further) {
            let step = further.clamp(-127, 127);
            table.extend([0, step as i8 as u8]);
            further -= step;
        }
        table.extend([2 * units, further as i8 as u8]);
    }
    table
}

fn runs() -> impl Strategy<Value = Vec<(Run, u8)>> {
    let line = prop_oneof![1 => Just(None), 6 => (1..5000i32).prop_map(Some)];
    let near = prop_oneof![
        Just(Some(100)),
        Just(Some(101)),
        Just(Some(102)),
        Just(None)
    ];
    proptest::collection::vec(((1u8..=8, prop_oneof![line, near]), 0u8..4), 1..60)
}

proptest! {
    #[test]
    fn every_instruction_has_the_line_that_was_written(runs in runs(), first in 1..4000i32) {
        let (new, old) = (entries(&runs, first), pairs(&runs, first));
        let mut unit = 0;
        for ((units, expected), _) in &runs {
            for _ in 0..*units {
                prop_assert_eq!(line(11, &new, first, 2 * unit), *expected);
                prop_assert_eq!(line(10, &old, first, unit), *expected);
                unit += 1;
            }
        }
        prop_assert_eq!(line(11, &new, first, 2 * unit), None);
        prop_assert_eq!(line(10, &old, first, unit), None);
        prop_assert_eq!(line(11, &new, first, -2), Some(first));
    }

    #[test]
    fn any_table_is_survived(
        table in proptest::collection::vec(any::<u8>(), 0..300),
        first in any::<i32>(), instruction in any::<i32>(), version in 9u32..16
    ) {
        let _ = line(version, &table, first, instruction);
    }
}

/// Code objects of the standard library as the interpreter itself sees them: table, first line, and
/// the line of every instruction.
const ORACLE: &str = r"
import sys, types, argparse, asyncio.base_events, tarfile
def codes(code):
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes(const)
for module in (argparse, asyncio.base_events, tarfile):
    source = open(module.__file__).read()
    for code in codes(compile(source, module.__file__, 'exec')):
        lines = [None] * (len(code.co_code) // 2)
        for start, end, line in code.co_lines():
            for at in range(start // 2, end // 2):
                lines[at] = line
        if sys.version_info >= (3, 11):
            assert lines == [position[0] for position in code.co_positions()]
        lines = ','.join('' if line is None else str(line) for line in lines)
        print(code.co_linetable.hex(), code.co_firstlineno, lines, sep=';')
";

#[test]
fn interpreters_agree_about_their_own_code() {
    for version in 10..=13 {
        let Some(python) = vramscope_fakes::pythons::find(version) else {
            let _ = writeln!(std::io::stderr(), "SKIPPED: no CPython 3.{version}");
            continue;
        };
        let output = Command::new(&python).args(["-c", ORACLE]).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "3.{version}: {errors}");
        let text = String::from_utf8(output.stdout).unwrap();
        let mut checked = 0;
        for code in text.lines() {
            let mut fields = code.split(';');
            let table = fields.next().unwrap();
            let table: Vec<u8> = (0..table.len() / 2)
                .map(|i| u8::from_str_radix(&table[2 * i..2 * i + 2], 16).unwrap())
                .collect();
            let first = fields.next().unwrap().parse().unwrap();
            let lines: Vec<&str> = fields.next().unwrap().split(',').collect();
            // Of the longest, some: each is found by reading the table from its start.
            let step = (lines.len() / 150).max(1);
            for (unit, expected) in lines.into_iter().enumerate().step_by(step) {
                let unit = unit as i32;
                let instruction = if version == 10 { unit } else { 2 * unit };
                let found = line(version, &table, first, instruction);
                // A module's first instruction of 3.11 and 3.12 is of line 0, which is none.
                let expected = expected.parse().ok().filter(|line| *line > 0);
                assert_eq!(found, expected, "3.{version}: {code}, unit {unit}");
                checked += 1;
            }
        }
        assert!(checked > 10_000, "3.{version}: {checked}");
    }
}
