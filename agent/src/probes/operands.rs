//! Where a USDT probe's arguments lie, from the assembler text of its note.
//!
//! An argument is `[-]N@OPERAND`: N bytes, with a sign if negative. On x86-64 the operand is a
//! constant (`$5`), a register of any width (`%al`, `%r12d`), or memory (`-56(%rbp)`,
//! `8(%rax,%rcx,4)`). What this module does not know it refuses with the text, so that nobody
//! takes a wrong number for a right one.

use vramscope_ebpf_abi::framework::{
    NO_REGISTER, OPERAND_CONSTANT, OPERAND_MEMORY, OPERAND_REGISTER, OPERANDS, Operand, Site,
};

/// Why a probe's arguments cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OperandError {
    #[error("argument {0:?} is not of the form SIZE@OPERAND")]
    Form(String),
    #[error("argument {0:?} has {1:?} bytes, and 1, 2, 4 or 8 can be read")]
    Size(String, String),
    #[error("argument {0:?}: {1} is no x86-64 register that can be read")]
    Register(String, String),
    #[error("argument {0:?} is not a constant, a register, or memory at a register")]
    Unknown(String),
    #[error("argument {0:?} is written as on arm64, and this agent reads x86-64")]
    Arm64(String),
    #[error("{found} arguments in {text:?} where {wanted} are needed")]
    Count {
        text: String,
        found: usize,
        wanted: usize,
    },
}

/// 64-bit general registers in the order of `struct pt_regs` (x86-64), by their word in it.
const REGISTERS: [(u8, &str); 17] = [
    (0, "r15"),
    (1, "r14"),
    (2, "r13"),
    (3, "r12"),
    (4, "bp"),
    (5, "bx"),
    (6, "r11"),
    (7, "r10"),
    (8, "r9"),
    (9, "r8"),
    (10, "ax"),
    (11, "cx"),
    (12, "dx"),
    (13, "si"),
    (14, "di"),
    (16, "ip"),
    (19, "sp"),
];

/// The first `wanted` arguments of a note.
pub fn site(text: &str, wanted: usize) -> Result<Site, OperandError> {
    let arguments = split(text);
    if arguments.len() < wanted || wanted > OPERANDS {
        return Err(OperandError::Count {
            text: text.to_string(),
            found: arguments.len(),
            wanted,
        });
    }
    let mut site = Site::default();
    for (operand, argument) in site.operands.iter_mut().zip(arguments).take(wanted) {
        *operand = parse(argument)?;
    }
    Ok(site)
}

/// Arguments are set apart by blanks; on arm64 there are blanks inside brackets as well.
fn split(text: &str) -> Vec<&str> {
    let mut arguments = Vec::new();
    let (mut start, mut depth) = (0, 0usize);
    for (at, character) in text.char_indices() {
        match character {
            '[' | '(' => depth += 1,
            ']' | ')' => depth = depth.saturating_sub(1),
            c if c.is_whitespace() && depth == 0 => {
                arguments.push(&text[start..at]);
                start = at + c.len_utf8();
            }
            _ => {}
        }
    }
    arguments.push(&text[start..]);
    arguments.retain(|argument| !argument.is_empty());
    arguments
}

/// One argument.
pub fn parse(argument: &str) -> Result<Operand, OperandError> {
    let own = || argument.to_string();
    let (size, operand) = argument
        .split_once('@')
        .ok_or_else(|| OperandError::Form(own()))?;
    let (signed, digits) = match size.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, size),
    };
    let bytes: u8 = match digits {
        "1" => 1,
        "2" => 2,
        "4" => 4,
        "8" => 8,
        _ => return Err(OperandError::Size(own(), size.to_string())),
    };
    let mut place = place(operand).map_err(|error| match error {
        Place::Register(name) => OperandError::Register(own(), name),
        Place::Unknown if is_arm64(operand) => OperandError::Arm64(own()),
        Place::Unknown => OperandError::Unknown(own()),
    })?;
    place.spare_bits = 64 - 8 * bytes;
    place.signed = u8::from(signed);
    Ok(place)
}

/// Why an operand is not one.
enum Place {
    Register(String),
    Unknown,
}

fn place(operand: &str) -> Result<Operand, Place> {
    if let Some(constant) = operand.strip_prefix('$') {
        return Ok(Operand {
            kind: OPERAND_CONSTANT,
            index: NO_REGISTER,
            value: number(constant).ok_or(Place::Unknown)?,
            ..Operand::default()
        });
    }
    if operand.starts_with('%') && !operand.contains(':') {
        let (register, from_bit) = register(operand)?;
        return Ok(Operand {
            kind: OPERAND_REGISTER,
            register,
            index: NO_REGISTER,
            from_bit,
            ..Operand::default()
        });
    }
    let (displacement, rest) = operand.split_once('(').ok_or(Place::Unknown)?;
    let inside = rest.strip_suffix(')').ok_or(Place::Unknown)?;
    let value = match displacement.trim() {
        "" => 0,
        text => number(text).ok_or(Place::Unknown)?,
    };
    let mut parts = inside.split(',').map(str::trim);
    let base = parts.next().filter(|base| !base.is_empty());
    let index = parts.next().filter(|index| !index.is_empty());
    let scale = parts.next();
    if parts.next().is_some() {
        return Err(Place::Unknown);
    }
    // Without a base there is no register to begin with; compilers do not write that.
    let register = pointer(base.ok_or(Place::Unknown)?)?;
    let shift = match scale {
        None | Some("1" | "") => 0,
        Some("2") => 1,
        Some("4") => 2,
        Some("8") => 3,
        Some(_) => return Err(Place::Unknown),
    };
    Ok(Operand {
        kind: OPERAND_MEMORY,
        register,
        index: index.map_or(Ok(NO_REGISTER), pointer)?,
        shift,
        value,
        ..Operand::default()
    })
}

/// A register that is part of an address: a whole one. What is relative to the instruction would
/// need the next instruction's place.
fn pointer(name: &str) -> Result<u8, Place> {
    let (word, _) = register(name)?;
    let is_whole = name.starts_with("%r") && !name.ends_with(['d', 'w', 'b']);
    if is_whole && name != "%rip" {
        Ok(word)
    } else {
        Err(Place::Register(name.to_string()))
    }
}

/// A register's word in `pt_regs`, and the bit its value begins at.
fn register(name: &str) -> Result<(u8, u8), Place> {
    let unknown = || Place::Register(name.to_string());
    let short = name.strip_prefix('%').ok_or_else(unknown)?;
    let is_numbered = short
        .strip_prefix('r')
        .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()));
    let (canonical, from_bit) = if is_numbered {
        (short.trim_end_matches(['d', 'w', 'b']).to_string(), 0)
    } else {
        match short {
            "al" | "bl" | "cl" | "dl" => (format!("{}x", &short[..1]), 0),
            "ah" | "bh" | "ch" | "dh" => (format!("{}x", &short[..1]), 8),
            "sil" | "dil" | "bpl" | "spl" => (short[..2].to_string(), 0),
            // %rax, %eax, %ax.
            _ if short.len() == 3 && short.starts_with(['r', 'e']) => (short[1..].to_string(), 0),
            _ => (short.to_string(), 0),
        }
    };
    REGISTERS
        .iter()
        .find(|(_, register)| *register == canonical)
        .map(|(word, _)| (*word, from_bit))
        .ok_or_else(unknown)
}

fn number(text: &str) -> Option<i64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let value = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    // A constant may be written as the unsigned form of a negative one.
    let value = value as i64;
    Some(if negative {
        value.wrapping_neg()
    } else {
        value
    })
}

/// `x0`, `w19`, `sp`, `[x29, -8]`, `[sp]`, `[x0, x1]`.
fn is_arm64(operand: &str) -> bool {
    let name = operand.trim_start_matches('[');
    let name = name.split([',', ']']).next().unwrap_or_default().trim();
    let is_numbered = name
        .strip_prefix(['x', 'w'])
        .is_some_and(|number| number.parse::<u8>().is_ok_and(|number| number <= 31));
    is_numbered || matches!(name, "sp" | "xzr" | "wzr") || operand.starts_with('[')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel side's reading of an operand, with registers and memory given.
    fn read(operand: &Operand, registers: &[u64; 21], memory: impl Fn(u64) -> u64) -> i128 {
        let bits = 64 - u32::from(operand.spare_bits);
        let raw = match operand.kind {
            OPERAND_CONSTANT => operand.value as u64,
            OPERAND_REGISTER => registers[operand.register as usize] >> operand.from_bit,
            _ => {
                let index = match operand.index {
                    NO_REGISTER => 0,
                    index => registers[index as usize] << operand.shift,
                };
                let base = registers[operand.register as usize];
                memory(base.wrapping_add(index).wrapping_add(operand.value as u64))
            }
        };
        let mask = u64::MAX >> (64 - bits);
        let value = i128::from(raw & mask);
        let is_negative = operand.signed != 0 && raw >> (bits - 1) & 1 == 1;
        if is_negative {
            value - (1i128 << bits)
        } else {
            value
        }
    }

    /// Values by hand: rbp (word 4) = 0x1000, rax (word 10) = -2, rcx (word 11) = 3, the rest 7;
    /// memory holds its own address.
    #[test]
    fn every_form_gives_the_value_that_the_compiler_meant() {
        let mut registers = [7u64; 21];
        registers[4] = 0x1000;
        registers[10] = (-2i64) as u64;
        registers[11] = 3;
        for (text, expected) in [
            ("-8@%rax", -2),
            ("8@%rax", 0xffff_ffff_ffff_fffe),
            ("-4@%eax", -2),
            ("4@%eax", 0xffff_fffe),
            ("-2@%ax", -2),
            ("-1@%al", -2),
            ("1@%al", 0xfe),
            ("1@%ah", 0xff),
            ("-1@%r12b", 7),
            ("-4@%r8d", 7),
            ("8@%rsp", 7),
            ("1@%sil", 7),
            ("-4@$-1", -1),
            ("8@$0x10", 16),
            ("-8@-56(%rbp)", 0x1000 - 56),
            ("8@(%rbp)", 0x1000),
            ("-8@16(%rbp,%rcx,8)", 0x1000 + 16 + 24),
            ("4@(%rbp,%rcx)", 0x1003),
            ("1@0x20(%rbp)", 0x20),
        ] {
            let operand = parse(text).unwrap();
            let value = read(&operand, &registers, |address| address);
            assert_eq!(value, expected, "{text}");
        }
    }

    /// What readelf prints of libc10_cuda.so 2.15.0.
    #[test]
    fn the_notes_of_a_real_library_are_read() {
        for text in [
            "-8@%rbp -1@%al -8@%r12 -8@56(%rsp)",
            "-8@%rax -1@%dl -8@%r14 -8@-56(%rbp)",
        ] {
            site(text, 4).unwrap();
        }
        let free = site("-8@%rdi", 1).unwrap();
        assert_eq!((free.operands[0].register, free.operands[1].kind), (14, 0));
    }

    #[test]
    fn what_is_not_known_is_refused_with_its_text() {
        for (text, part) in [
            ("%rax", "not of the form SIZE@OPERAND"),
            ("16@%xmm0", "1, 2, 4 or 8"),
            ("8f@%xmm0", "1, 2, 4 or 8"),
            ("8@%xmm0", "%xmm0 is no x86-64 register"),
            ("8@8(%rip)", "%rip is no x86-64 register"),
            ("8@symbol(%rip)", "not a constant, a register"),
            ("8@%fs:8", "not a constant, a register"),
            ("8@(%eax)", "%eax is no x86-64 register"),
            ("8@(,%rax,8)", "not a constant, a register"),
            ("8@(%rax,%rcx,3)", "not a constant, a register"),
            ("8@x0", "as on arm64"),
            ("-4@w19", "as on arm64"),
            ("8@[sp, 16]", "as on arm64"),
            ("8@[x29, -8]", "as on arm64"),
            ("8@", "not a constant, a register"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
            assert!(error.contains(text), "{text}: {error}");
        }
        let error = site("8@[x29, -8] 4@w1", 2).unwrap_err().to_string();
        assert!(error.contains("\"8@[x29, -8]\""), "{error}");
        let error = site("8@%rax", 4).unwrap_err().to_string();
        assert!(
            error.contains("1 arguments") && error.contains("4 are needed"),
            "{error}"
        );
    }
}
