//! Bytes of a file, with the offset, from a buffer of fixed size.

use std::io::Read;

use crate::Error;

const BUFFER: usize = 64 << 10;

pub(crate) struct Input<R> {
    source: R,
    buffer: Box<[u8]>,
    at: usize,
    end: usize,
    /// Offset of the buffer's first byte.
    base: u64,
    /// Size of the file as its owner says.
    size: u64,
    /// What did not fit the buffer.
    long: Vec<u8>,
}

impl<R: Read> Input<R> {
    pub fn new(source: R, size: u64) -> Self {
        Self {
            source,
            buffer: vec![0; BUFFER].into_boxed_slice(),
            at: 0,
            end: 0,
            base: 0,
            size,
            long: Vec::new(),
        }
    }

    /// Where the next byte stands.
    pub fn offset(&self) -> u64 {
        self.base + self.at as u64
    }

    /// Moves what is left to the front and reads more. False at the end.
    fn fill(&mut self) -> Result<bool, Error> {
        self.buffer.copy_within(self.at..self.end, 0);
        self.base += self.at as u64;
        self.end -= self.at;
        self.at = 0;
        loop {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    self.end += count;
                    return Ok(true);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(cause) => {
                    return Err(Error::Read {
                        offset: self.base + self.end as u64,
                        cause,
                    });
                }
            }
        }
    }

    /// The bytes that come next, as many as are at hand; none at the end.
    pub fn peek(&mut self) -> Result<&[u8], Error> {
        if self.at == self.end {
            self.fill()?;
        }
        Ok(&self.buffer[self.at..self.end])
    }

    /// The next byte; `None` at the end.
    #[inline]
    pub fn next(&mut self) -> Result<Option<u8>, Error> {
        if self.at == self.end && !self.fill()? {
            return Ok(None);
        }
        let byte = self.buffer[self.at];
        self.at += 1;
        Ok(Some(byte))
    }

    /// The next few bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self, expected: &'static str) -> Result<[u8; N], Error> {
        while self.end - self.at < N {
            if !self.fill()? {
                return Err(self.cut_off(expected));
            }
        }
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.buffer[self.at..self.at + N]);
        self.at += N;
        Ok(bytes)
    }

    /// That many bytes. No memory is taken for bytes that are not there.
    #[inline]
    pub fn bytes(&mut self, count: u64, expected: &'static str) -> Result<&[u8], Error> {
        if count <= (self.end - self.at) as u64 {
            let from = self.at;
            self.at += count as usize;
            return Ok(&self.buffer[from..self.at]);
        }
        self.check_left(count, expected)?;
        if count <= BUFFER as u64 {
            while ((self.end - self.at) as u64) < count {
                if !self.fill()? {
                    return Err(self.cut_off(expected));
                }
            }
            let from = self.at;
            self.at += count as usize;
            return Ok(&self.buffer[from..self.at]);
        }
        self.long.clear();
        self.long.shrink_to(BUFFER);
        let mut left = count;
        while left > 0 {
            if self.at == self.end && !self.fill()? {
                return Err(self.cut_off(expected));
            }
            let take = left.min((self.end - self.at) as u64) as usize;
            self.long
                .extend_from_slice(&self.buffer[self.at..self.at + take]);
            self.at += take;
            left -= take as u64;
        }
        Ok(&self.long)
    }

    /// Passes over that many bytes.
    pub fn skip(&mut self, count: u64, expected: &'static str) -> Result<(), Error> {
        self.check_left(count, expected)?;
        let mut left = count;
        while left > 0 {
            if self.at == self.end && !self.fill()? {
                return Err(self.cut_off(expected));
            }
            let take = left.min((self.end - self.at) as u64) as usize;
            self.at += take;
            left -= take as u64;
        }
        Ok(())
    }

    fn check_left(&self, count: u64, expected: &'static str) -> Result<(), Error> {
        let left = self.size.saturating_sub(self.offset());
        if count > left {
            return Err(Error::unexpected(
                self.offset(),
                expected,
                format!("a length of {count} bytes where {left} are left"),
            ));
        }
        Ok(())
    }

    pub fn cut_off(&self, expected: &'static str) -> Error {
        Error::CutOff {
            offset: self.base + self.end as u64,
            expected,
        }
    }
}
