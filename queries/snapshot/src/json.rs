//! JSON, taken apart by serde_json and put together by the same machine as pickles.

use std::fmt;
use std::io::Read;

use serde::de::{DeserializeSeed, MapAccess, SeqAccess, Visitor};

use crate::input::Input;
use crate::machine::{Machine, Value};
use crate::tables::Tables;
use crate::{Error, Item};

/// Reads a whole JSON text.
pub(crate) fn read<E: From<Error>>(
    input: &mut Input<impl Read>,
    machine: &mut Machine,
    sink: &mut impl FnMut(Item, &Tables) -> Result<(), E>,
) -> Result<(), E> {
    if input.peek()?.starts_with(b"\xef\xbb\xbf") {
        input.skip(3, "JSON")?;
    }
    let mut at = Position::default();
    let mut failure = None;
    let reader = Bytes {
        input,
        at: &at.0,
        failure: &mut at.1,
    };
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    let mut driver = Driver {
        machine,
        sink,
        at: &at.0,
        failure: &mut failure,
    };
    let outcome = Any(&mut driver)
        .deserialize(&mut deserializer)
        .and_then(|()| deserializer.end());
    drop(deserializer);
    if let Some(failure) = failure {
        return Err(failure);
    }
    if let Some(failure) = at.1 {
        return Err(failure.into());
    }
    let offset = at.0.get();
    match outcome {
        Ok(()) => {}
        Err(error) if error.is_eof() => {
            return Err(Error::CutOff {
                offset,
                expected: "the rest of the JSON",
            }
            .into());
        }
        Err(error) => {
            return Err(Error::Json {
                offset,
                reason: error.to_string(),
            }
            .into());
        }
    }
    machine.at(offset);
    machine.finish()?;
    machine.drain(sink)
}

/// How many bytes the parser has taken, and what went wrong with reading them.
#[derive(Default)]
struct Position(std::cell::Cell<u64>, Option<Error>);

/// Hands the parser its bytes.
struct Bytes<'a, R> {
    input: &'a mut Input<R>,
    at: &'a std::cell::Cell<u64>,
    failure: &'a mut Option<Error>,
}

impl<R: Read> Read for Bytes<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let (Some(first), Ok(byte)) = (
            buffer.first_mut(),
            self.input.next().map_err(|error| {
                *self.failure = Some(error);
            }),
        ) else {
            return Ok(0);
        };
        let Some(byte) = byte else { return Ok(0) };
        *first = byte;
        self.at.set(self.input.offset());
        Ok(1)
    }
}

struct Driver<'a, S, E> {
    machine: &'a mut Machine,
    sink: &'a mut S,
    at: &'a std::cell::Cell<u64>,
    /// Why the driver stopped the parser.
    failure: &'a mut Option<E>,
}

impl<S, E> Driver<'_, S, E>
where
    E: From<Error>,
    S: FnMut(Item, &Tables) -> Result<(), E>,
{
    /// Takes a step, and hands out what it made ready.
    fn step<J: serde::de::Error>(
        &mut self,
        step: impl FnOnce(&mut Machine) -> Result<(), Error>,
    ) -> Result<(), J> {
        self.machine.at(self.at.get());
        let outcome = step(self.machine)
            .map_err(E::from)
            .and_then(|()| self.machine.drain(self.sink));
        outcome.map_err(|error| {
            *self.failure = Some(error);
            J::custom("refused")
        })
    }
}

/// Any JSON value.
struct Any<'d, 'a, S, E>(&'d mut Driver<'a, S, E>);

impl<'de, S, E> DeserializeSeed<'de> for Any<'_, '_, S, E>
where
    E: From<Error>,
    S: FnMut(Item, &Tables) -> Result<(), E>,
{
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, S, E> Visitor<'de> for Any<'_, '_, S, E>
where
    E: From<Error>,
    S: FnMut(Item, &Tables) -> Result<(), E>,
{
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<J: serde::de::Error>(self) -> Result<(), J> {
        self.0.step(|machine| machine.push(Value::None))
    }

    fn visit_bool<J: serde::de::Error>(self, value: bool) -> Result<(), J> {
        self.0.step(|machine| machine.push(Value::Bool(value)))
    }

    fn visit_i64<J: serde::de::Error>(self, value: i64) -> Result<(), J> {
        self.0.step(|machine| machine.push(Value::Int(value)))
    }

    fn visit_u64<J: serde::de::Error>(self, value: u64) -> Result<(), J> {
        let value = i64::try_from(value).map_or(Value::Uint(value), Value::Int);
        self.0.step(|machine| machine.push(value))
    }

    fn visit_f64<J: serde::de::Error>(self, value: f64) -> Result<(), J> {
        self.0.step(|machine| machine.push(Value::Float(value)))
    }

    fn visit_str<J: serde::de::Error>(self, value: &str) -> Result<(), J> {
        self.0.step(|machine| machine.push_text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        self.0.step(|machine| {
            machine.open_list()?;
            machine.mark()
        })?;
        while elements.next_element_seed(Any(self.0))?.is_some() {}
        self.0.step(Machine::append_all)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        self.0.step(|machine| {
            machine.open_dict()?;
            machine.mark()
        })?;
        while entries.next_key_seed(Any(self.0))?.is_some() {
            entries.next_value_seed(Any(self.0))?;
        }
        self.0.step(Machine::set_all)
    }
}
