//! What clients send: frames cut out of the byte stream, and the messages in them.
//!
//! The formats are those of protocol 3 (PostgreSQL's documentation, chapter "Frontend/Backend
//! Protocol", section "Message Formats"). Reading is our own because every byte here comes from
//! somebody who is not known yet: a length is checked before anything is kept for it, a frame is
//! read from its own bytes only, and nothing panics.

use bytes::{Buf, Bytes, BytesMut};

/// Largest packet before a client is let in, as in PostgreSQL.
pub const MAX_OPENING: usize = 10_000;
/// Largest message of a client that was let in: SQL text, parameters.
pub const MAX_MESSAGE: usize = 1 << 20;

const SSL_REQUEST: u32 = 80_877_103;
const GSS_REQUEST: u32 = 80_877_104;
const CANCEL_REQUEST: u32 = 80_877_102;

/// The first packet of a connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Opening {
    /// Asks for TLS.
    Tls,
    /// Asks for GSSAPI encryption.
    Gss,
    /// Asks to end the query that another connection runs.
    Cancel {
        /// As that connection was told.
        pid: i32,
        /// As that connection was told.
        secret: Bytes,
    },
    /// Says who it is.
    Start {
        /// Protocol version: major in the upper half, minor in the lower.
        version: u32,
        /// `user`, `database`, settings.
        parameters: Vec<(String, String)>,
    },
}

/// A message of a client that said who it is.
#[derive(Debug, PartialEq, Eq)]
pub enum Message {
    /// Statements, to be answered as text.
    Query(String),
    /// A statement to be kept.
    Parse {
        /// Its name, empty for the one without.
        name: String,
        /// Its text.
        sql: String,
        /// OIDs of its parameters' types, 0 where they are not given.
        types: Vec<u32>,
    },
    /// Parameters for a kept statement.
    Bind {
        /// The portal it makes.
        portal: String,
        /// The statement.
        statement: String,
        /// Formats of the parameters: none, one for all, or one each.
        parameter_formats: Vec<i16>,
        /// Values, `None` for NULL.
        parameters: Vec<Option<Bytes>>,
        /// Formats of the columns: none, one for all, or one each.
        result_formats: Vec<i16>,
    },
    /// Asks for the columns of a statement or portal.
    Describe(Target, String),
    /// Asks for rows of a portal.
    Execute {
        /// The portal.
        portal: String,
        /// Most rows to send, all of them if it is not above 0.
        max_rows: i32,
    },
    /// Gives up a statement or portal.
    Close(Target, String),
    /// Asks for what was held back.
    Flush,
    /// Ends a group of messages.
    Sync,
    /// Says goodbye.
    Terminate,
    /// An answer to a request for a password, or a step of SASL.
    Password(Bytes),
    /// A kind that no client sends here (COPY data, function calls).
    Other(u8),
}

/// What a message is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// A prepared statement.
    Statement,
    /// A portal.
    Portal,
}

/// Bytes that are no message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A length that cannot be.
    #[error("invalid message length {0}")]
    Length(i64),
    /// A length beyond what is taken.
    #[error("a message of {0} bytes is more than the {1} that are taken")]
    TooLong(usize, usize),
    /// A body that ends too early, or has something left.
    #[error("invalid message format")]
    Body,
    /// Text that is not UTF-8.
    #[error("invalid byte sequence for encoding \"UTF8\"")]
    NotUtf8,
}

/// Takes the first packet out of what was received; `None` if it is not complete.
pub fn take_opening(input: &mut BytesMut) -> Result<Option<Opening>, Malformed> {
    let Some(mut body) = take_frame(input, 0, MAX_OPENING)? else {
        return Ok(None);
    };
    let code = body.u32()?;
    let opening = match code {
        SSL_REQUEST => Opening::Tls,
        GSS_REQUEST => Opening::Gss,
        CANCEL_REQUEST => Opening::Cancel {
            pid: body.i32()?,
            secret: body.rest(),
        },
        version => {
            let mut parameters = Vec::new();
            loop {
                let name = body.text()?;
                if name.is_empty() {
                    break;
                }
                parameters.push((name, body.text()?));
            }
            Opening::Start {
                version,
                parameters,
            }
        }
    };
    body.end()?;
    Ok(Some(opening))
}

/// Takes a message out of what was received; `None` if it is not complete.
pub fn take_message(input: &mut BytesMut, limit: usize) -> Result<Option<Message>, Malformed> {
    let Some(&kind) = input.first() else {
        return Ok(None);
    };
    let Some(mut body) = take_frame(input, 1, limit)? else {
        return Ok(None);
    };
    let message = match kind {
        b'Q' => Message::Query(body.text()?),
        b'P' => Message::Parse {
            name: body.text()?,
            sql: body.text()?,
            types: body.counted(Body::u32)?,
        },
        b'B' => Message::Bind {
            portal: body.text()?,
            statement: body.text()?,
            parameter_formats: body.counted(Body::i16)?,
            parameters: body.counted(Body::value)?,
            result_formats: body.counted(Body::i16)?,
        },
        b'D' => Message::Describe(body.target()?, body.text()?),
        b'C' => Message::Close(body.target()?, body.text()?),
        b'E' => Message::Execute {
            portal: body.text()?,
            max_rows: body.i32()?,
        },
        b'H' => Message::Flush,
        b'S' => Message::Sync,
        b'X' => Message::Terminate,
        b'p' => Message::Password(body.rest()),
        other => {
            body.rest();
            Message::Other(other)
        }
    };
    body.end()?;
    Ok(Some(message))
}

/// Cuts a frame's body out of the input: a length, which counts itself, after `skip` bytes.
fn take_frame(input: &mut BytesMut, skip: usize, limit: usize) -> Result<Option<Body>, Malformed> {
    let Some(mut length) = input.get(skip..skip + 4) else {
        return Ok(None);
    };
    let length = length.get_i32();
    let length = match usize::try_from(length) {
        Ok(length) if length >= 4 => length,
        _ => return Err(Malformed::Length(length.into())),
    };
    if length - 4 > limit {
        return Err(Malformed::TooLong(length - 4, limit));
    }
    if input.len() < skip + length {
        return Ok(None);
    }
    let mut frame = input.split_to(skip + length);
    frame.advance(skip + 4);
    Ok(Some(Body(frame.freeze())))
}

/// A frame's bytes without its length.
struct Body(Bytes);

impl Body {
    fn take(&mut self, length: usize) -> Result<Bytes, Malformed> {
        if self.0.len() < length {
            return Err(Malformed::Body);
        }
        Ok(self.0.split_to(length))
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(self.take(4)?.get_u32())
    }

    fn i32(&mut self) -> Result<i32, Malformed> {
        Ok(self.take(4)?.get_i32())
    }

    fn i16(&mut self) -> Result<i16, Malformed> {
        Ok(self.take(2)?.get_i16())
    }

    /// Text up to a zero byte.
    fn text(&mut self) -> Result<String, Malformed> {
        let end = self.0.iter().position(|byte| *byte == 0);
        let bytes = self.take(end.ok_or(Malformed::Body)?)?;
        self.take(1)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| Malformed::NotUtf8)
    }

    /// A value with its length; -1 is NULL.
    fn value(&mut self) -> Result<Option<Bytes>, Malformed> {
        match self.i32()? {
            -1 => Ok(None),
            length => {
                let length = usize::try_from(length).map_err(|_| Malformed::Body)?;
                self.take(length).map(Some)
            }
        }
    }

    /// A list with its count. Nothing is kept for items that are not there.
    fn counted<T>(
        &mut self,
        mut item: impl FnMut(&mut Body) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let count = self.take(2)?.get_u16();
        (0..count).map(|_| item(self)).collect()
    }

    fn target(&mut self) -> Result<Target, Malformed> {
        match self.take(1)?.get_u8() {
            b'S' => Ok(Target::Statement),
            b'P' => Ok(Target::Portal),
            _ => Err(Malformed::Body),
        }
    }

    fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.0)
    }

    fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed::Body)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opening(bytes: &[u8]) -> Result<Option<Opening>, Malformed> {
        take_opening(&mut BytesMut::from(bytes))
    }

    fn message(bytes: &[u8]) -> Result<Option<Message>, Malformed> {
        take_message(&mut BytesMut::from(bytes), MAX_MESSAGE)
    }

    #[test]
    fn openings_are_read_as_documented() {
        assert_eq!(
            opening(b"\0\0\0\x08\x04\xd2\x16\x2f"),
            Ok(Some(Opening::Tls))
        );
        assert_eq!(
            opening(b"\0\0\0\x08\x04\xd2\x16\x30"),
            Ok(Some(Opening::Gss))
        );
        assert_eq!(
            opening(b"\0\0\0\x10\x04\xd2\x16\x2e\0\0\0\x07\x01\x02\x03\x04"),
            Ok(Some(Opening::Cancel {
                pid: 7,
                secret: Bytes::from_static(&[1, 2, 3, 4])
            }))
        );
        let start = b"\0\0\0\x20\0\x03\0\0user\0me\0database\0lake\0\0";
        let mut expected = start.to_vec();
        expected[3] = u8::try_from(expected.len()).unwrap();
        assert_eq!(
            opening(&expected),
            Ok(Some(Opening::Start {
                version: 3 << 16,
                parameters: vec![
                    ("user".into(), "me".into()),
                    ("database".into(), "lake".into())
                ],
            }))
        );
        // Not all of it is there yet.
        assert_eq!(opening(&expected[..12]), Ok(None));
        assert_eq!(opening(&expected[..3]), Ok(None));
    }

    #[test]
    fn impossible_openings_are_refused_before_they_are_waited_for() {
        assert_eq!(opening(b"\0\0\0\x03abc"), Err(Malformed::Length(3)));
        assert_eq!(opening(b"\xff\xff\xff\xff"), Err(Malformed::Length(-1)));
        // What an HTTP client would send: "GET " as a length.
        assert!(matches!(
            opening(b"GET / HTTP/1.1\r\n"),
            Err(Malformed::TooLong(..))
        ));
        // A name without its value, text without its end, bytes after the end.
        assert_eq!(opening(b"\0\0\0\x0d\0\x03\0\0user\0"), Err(Malformed::Body));
        assert_eq!(opening(b"\0\0\0\x0c\0\x03\0\0user"), Err(Malformed::Body));
        assert_eq!(opening(b"\0\0\0\x0a\0\x03\0\0\0x"), Err(Malformed::Body));
        assert_eq!(
            opening(b"\0\0\0\x0b\0\x03\0\0\xff\0\0"),
            Err(Malformed::NotUtf8)
        );
    }

    #[test]
    fn messages_are_read_as_documented() {
        assert_eq!(
            message(b"Q\0\0\0\x0dSELECT 1\0"),
            Ok(Some(Message::Query("SELECT 1".into())))
        );
        assert_eq!(
            message(b"P\0\0\0\x10s\0 $1\0\0\x01\0\0\0\x14"),
            Ok(Some(Message::Parse {
                name: "s".into(),
                sql: " $1".into(),
                types: vec![20]
            }))
        );
        assert_eq!(
            message(b"B\0\0\0\x18\0s\0\0\x01\0\x01\0\x02\0\0\0\x01x\xff\xff\xff\xff\0\0"),
            Ok(Some(Message::Bind {
                portal: String::new(),
                statement: "s".into(),
                parameter_formats: vec![1],
                parameters: vec![Some(Bytes::from_static(b"x")), None],
                result_formats: vec![],
            }))
        );
        assert_eq!(message(b"S\0\0\0\x04"), Ok(Some(Message::Sync)));
        assert_eq!(message(b"S\0\0\0"), Ok(None));
        assert_eq!(message(b"Q\0\0\0\x0dSELECT"), Ok(None));
    }

    #[test]
    fn wrong_messages_are_refused() {
        for wrong in [
            b"Q\0\0\0\x0dSELECT 12".as_slice(),
            b"P\0\0\0\x0as\0 $1\0\x7f",
            b"B\0\0\0\x10\0s\0\0\0\0\x01\x7f\xff\xff\xff\0",
            b"B\0\0\0\x10\0s\0\0\0\0\x01\xff\xff\xff\xfe\0",
            b"S\0\0\0\x05x",
            b"D\0\0\0\x06Z\0",
        ] {
            assert_eq!(message(wrong), Err(Malformed::Body), "{wrong:?}");
        }
        assert!(matches!(
            message(b"Q\x7f\xff\xff\xff"),
            Err(Malformed::TooLong(..))
        ));
    }

    mod random {
        use proptest::prelude::*;

        use super::super::*;

        proptest! {
            /// Whatever comes, nothing panics, and a frame takes its own bytes and no others.
            #[test]
            fn any_bytes_are_read_or_refused(bytes: Vec<u8>, tail: Vec<u8>) {
                let mut input = BytesMut::from(bytes.as_slice());
                let _ = take_opening(&mut input);
                let mut input = BytesMut::from(bytes.as_slice());
                let _ = take_message(&mut input, MAX_MESSAGE);
                for kind in *b"QPBDCEHSXp" {
                    let length = u32::try_from(bytes.len() + 4).unwrap();
                    let mut framed = vec![kind];
                    framed.extend(length.to_be_bytes());
                    framed.extend(&bytes);
                    framed.extend(&tail);
                    let mut input = BytesMut::from(framed.as_slice());
                    let _ = take_message(&mut input, MAX_MESSAGE);
                    prop_assert_eq!(input.as_ref(), tail.as_slice());
                }
                let length = u32::try_from(bytes.len() + 8).unwrap();
                let mut framed = length.to_be_bytes().to_vec();
                framed.extend((3u32 << 16).to_be_bytes());
                framed.extend(&bytes);
                framed.extend(&tail);
                let mut input = BytesMut::from(framed.as_slice());
                let _ = take_opening(&mut input);
                prop_assert_eq!(input.as_ref(), tail.as_slice());
            }
        }
    }
}
