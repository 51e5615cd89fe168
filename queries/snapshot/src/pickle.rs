//! Pickles, opcode by opcode. Numbers and meaning of the opcodes: `pickletools` of CPython 3.11.

use std::io::Read;

use crate::input::Input;
use crate::machine::{Kind, Machine, Value};
use crate::tables::Tables;
use crate::{Error, Item};

/// Reads a whole pickle; the first byte is the PROTO opcode.
pub(crate) fn read<E: From<Error>>(
    input: &mut Input<impl Read>,
    machine: &mut Machine,
    sink: &mut impl FnMut(Item, &Tables) -> Result<(), E>,
) -> Result<(), E> {
    loop {
        machine.at(input.offset());
        if step(input, machine)? {
            break;
        }
        machine.drain(sink)?;
    }
    machine.finish()?;
    machine.drain(sink)?;
    let end = input.offset();
    if input.next()?.is_some() {
        let error = Error::unexpected(end, "the end of the file", "more bytes behind the pickle");
        return Err(error.into());
    }
    Ok(())
}

/// One opcode; true at the last.
fn step(input: &mut Input<impl Read>, machine: &mut Machine) -> Result<bool, Error> {
    let offset = input.offset();
    let Some(opcode) = input.next()? else {
        return Err(input.cut_off("another opcode or the pickle's end"));
    };
    match opcode {
        // The most frequent first.
        b'j' => machine.recall(u32::from_le_bytes(input.array("a memo number")?))?,
        b'h' => machine.recall(u32::from(u8::from_le_bytes(input.array("a memo number")?)))?,
        0x94 => machine.memoize(machine.next_memo())?,
        b'r' => machine.memoize(u32::from_le_bytes(input.array("a memo number")?))?,
        b'q' => machine.memoize(u32::from(u8::from_le_bytes(input.array("a memo number")?)))?,
        b'(' => machine.mark()?,
        b'e' | 0x90 => machine.append_all()?,
        b'a' => machine.append_one()?,
        b'u' => machine.set_all()?,
        b's' => machine.set_one()?,
        b'}' => machine.open_dict()?,
        b']' | 0x8f => machine.open_list()?,
        b')' => machine.tuple(0)?,
        0x85 => machine.tuple(1)?,
        0x86 => machine.tuple(2)?,
        0x87 => machine.tuple(3)?,
        b't' | 0x91 => machine.gather_marked(Kind::Tuple)?,
        b'l' => machine.gather_marked(Kind::List)?,
        b'd' => machine.gather_marked(Kind::Dict)?,
        b'N' => machine.push(Value::None)?,
        0x88 => machine.push(Value::Bool(true))?,
        0x89 => machine.push(Value::Bool(false))?,
        b'K' => {
            let [number] = input.array("a number")?;
            machine.push(Value::Int(i64::from(number)))?;
        }
        b'M' => {
            let number = u16::from_le_bytes(input.array("a number")?);
            machine.push(Value::Int(i64::from(number)))?;
        }
        b'J' => {
            let number = i32::from_le_bytes(input.array("a number")?);
            machine.push(Value::Int(i64::from(number)))?;
        }
        0x8a => {
            let [count] = input.array("the length of a number")?;
            long(input, machine, u64::from(count))?;
        }
        0x8b => {
            let count = i32::from_le_bytes(input.array("the length of a number")?);
            let Ok(count) = u64::try_from(count) else {
                return Err(Error::unexpected(
                    offset,
                    "the length of a number",
                    count.to_string(),
                ));
            };
            long(input, machine, count)?;
        }
        b'G' => {
            let number = f64::from_be_bytes(input.array("a number")?);
            machine.push(Value::Float(number))?;
        }
        0x8c | b'U' => {
            let [count] = input.array("the length of a text")?;
            text(input, machine, u64::from(count))?;
        }
        b'X' | b'T' => {
            let count = u32::from_le_bytes(input.array("the length of a text")?);
            text(input, machine, u64::from(count))?;
        }
        0x8d => {
            let count = u64::from_le_bytes(input.array("the length of a text")?);
            text(input, machine, count)?;
        }
        b'C' => {
            let [count] = input.array("the length of bytes")?;
            bytes(input, machine, u64::from(count))?;
        }
        b'B' => {
            let count = u32::from_le_bytes(input.array("the length of bytes")?);
            bytes(input, machine, u64::from(count))?;
        }
        0x8e | 0x96 => {
            let count = u64::from_le_bytes(input.array("the length of bytes")?);
            bytes(input, machine, count)?;
        }
        0x80 => {
            let [protocol] = input.array("the pickle's protocol")?;
            if offset != 0 {
                return Err(Error::unexpected(offset, "an opcode", "a second PROTO"));
            }
            if !(2..=5).contains(&protocol) {
                return Err(Error::unexpected(
                    offset,
                    "pickle protocol 2 to 5",
                    protocol.to_string(),
                ));
            }
        }
        0x95 => {
            // Frames only tell a reader how much to fetch at once; what they hold is checked as
            // it comes.
            let _: [u8; 8] = input.array("the length of a frame")?;
        }
        b'.' => return Ok(true),
        other => return Err(refused(other, offset)),
    }
    Ok(false)
}

/// What no snapshot has, by name.
fn refused(opcode: u8, offset: u64) -> Error {
    let code = match opcode {
        b'c' => "GLOBAL",
        0x93 => "STACK_GLOBAL",
        b'R' => "REDUCE",
        b'b' => "BUILD",
        b'i' => "INST",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        0x82 => "EXT1",
        0x83 => "EXT2",
        0x84 => "EXT4",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        _ => {
            let found = match opcode {
                b'0' => "POP".to_string(),
                b'1' => "POP_MARK".to_string(),
                b'2' => "DUP".to_string(),
                b'p' | b'g' | b'I' | b'L' | b'F' | b'S' | b'V' => {
                    format!("{:?}, of protocols 0 and 1", char::from(opcode))
                }
                _ => format!("byte {opcode:#04x}, which is no opcode"),
            };
            return Error::unexpected(offset, "an opcode that PyTorch's snapshots have", found);
        }
    };
    Error::Code {
        offset,
        opcode: code,
    }
}

/// A whole number of any length, little-endian two's complement.
fn long(input: &mut Input<impl Read>, machine: &mut Machine, count: u64) -> Result<(), Error> {
    if count > 16 {
        input.skip(count, "a number")?;
        return machine.push(Value::Other);
    }
    let bytes = input.bytes(count, "a number")?;
    let is_negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut wide = if is_negative { [0xff; 16] } else { [0; 16] };
    wide[..bytes.len()].copy_from_slice(bytes);
    let number = i128::from_le_bytes(wide);
    let value = match (i64::try_from(number), u64::try_from(number)) {
        (Ok(number), _) => Value::Int(number),
        (_, Ok(number)) => Value::Uint(number),
        _ => Value::Other,
    };
    machine.push(value)
}

fn text(input: &mut Input<impl Read>, machine: &mut Machine, count: u64) -> Result<(), Error> {
    let bytes = input.bytes(count, "a text")?;
    match std::str::from_utf8(bytes) {
        Ok(text) => machine.push_text(text),
        // Python writes lone surrogates of file names that are no UTF-8.
        Err(_) => machine.push_text(&String::from_utf8_lossy(bytes)),
    }
}

fn bytes(input: &mut Input<impl Read>, machine: &mut Machine, count: u64) -> Result<(), Error> {
    input.skip(count, "bytes")?;
    machine.push(Value::Other)
}
