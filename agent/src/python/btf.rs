//! Where the kernel keeps a thread's fs base, from its own type information
//! (`/sys/kernel/btf/vmlinux`; format: Documentation/bpf/btf.rst in the kernel's sources).

use std::path::Path;

/// The kernel's own type information.
pub const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

// Kinds of types.
const INT: u32 = 1;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const FUNC_PROTO: u32 = 13;
const VAR: u32 = 14;
const DATASEC: u32 = 15;
const DECL_TAG: u32 = 17;
const ENUM64: u32 = 19;

/// Offset of `task_struct.thread.fsbase`, bytes. An error says what is missing.
pub fn fsbase(path: &Path) -> Result<u32, String> {
    let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let types = Types::parse(&bytes).ok_or_else(|| format!("{} is damaged", path.display()))?;
    let member = |of: &str, name: &str| {
        types
            .member(of, name)
            .ok_or_else(|| format!("this kernel has no {of}.{name}"))
    };
    Ok(member("task_struct", "thread")? + member("thread_struct", "fsbase")?)
}

struct Types<'a> {
    types: &'a [u8],
    strings: &'a [u8],
}

impl<'a> Types<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let header = word(bytes, 4)? as usize;
        let part = |at: usize| {
            let start = header.checked_add(word(bytes, at)? as usize)?;
            bytes.get(start..start.checked_add(word(bytes, at + 4)? as usize)?)
        };
        if bytes.get(..2)? != 0xeb9f_u16.to_le_bytes() {
            return None;
        }
        Some(Self {
            types: part(8)?,
            strings: part(16)?,
        })
    }

    fn is_named(&self, offset: u32, name: &str) -> bool {
        let text = self.strings.get(offset as usize..).unwrap_or_default();
        text.strip_prefix(name.as_bytes())
            .is_some_and(|rest| rest.first() == Some(&0))
    }

    /// Offset of a structure's member, bytes.
    fn member(&self, structure: &str, name: &str) -> Option<u32> {
        let mut at = 0;
        loop {
            let (own_name, info) = (word(self.types, at)?, word(self.types, at + 4)?);
            let (kind, count) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
            if kind == STRUCT && self.is_named(own_name, structure) {
                for index in 0..count {
                    let member = at + 12 + 12 * index;
                    if self.is_named(word(self.types, member)?, name) {
                        let bits = word(self.types, member + 8)?;
                        // With bit fields in the structure the upper byte is a field's width.
                        let bits = if info >> 31 == 1 {
                            bits & 0xff_ffff
                        } else {
                            bits
                        };
                        return Some(bits / 8);
                    }
                }
            }
            at += 12
                + match kind {
                    INT | VAR | DECL_TAG => 4,
                    ARRAY => 12,
                    STRUCT | UNION | DATASEC | ENUM64 => 12 * count,
                    ENUM | FUNC_PROTO => 8 * count,
                    _ => 0,
                };
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn file(types: &[u8], strings: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x9f, 0xeb, 1, 0];
        let (types_len, strings_len) = (types.len() as u32, strings.len() as u32);
        bytes.extend(entry(&[24, 0, types_len, types_len, strings_len]));
        bytes.extend_from_slice(types);
        bytes.extend_from_slice(strings);
        bytes
    }

    /// Written by hand after the kernel's documentation of the format.
    #[test]
    fn members_are_found_behind_other_types() {
        let strings = b"\0int\0task_struct\0thread\0thread_struct\0fsbase\0";
        let (int, task, thread, inner, fsbase_name) = (1, 5, 17, 24, 38);
        let types = [
            entry(&[int, INT << 24, 4, 1 << 24 | 32]),
            entry(&[0, FUNC_PROTO << 24 | 2, 1, 0, 1, 0, 1]),
            // With the flag for bit fields, and a width of 3 in the upper byte.
            entry(&[
                task,
                1 << 31 | STRUCT << 24 | 1,
                5000,
                thread,
                4,
                (3 << 24) | (4992 * 8),
            ]),
            entry(&[
                inner,
                STRUCT << 24 | 2,
                64,
                int,
                1,
                0,
                fsbase_name,
                1,
                40 * 8,
            ]),
        ]
        .concat();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vmlinux");
        std::fs::write(&path, file(&types, strings)).unwrap();
        assert_eq!(fsbase(&path), Ok(4992 + 40));
        std::fs::write(&path, file(&types[..types.len() - 36], strings)).unwrap();
        assert_eq!(
            fsbase(&path),
            Err("this kernel has no thread_struct.fsbase".into())
        );
        std::fs::write(&path, b"no BTF").unwrap();
        assert!(fsbase(&path).unwrap_err().ends_with("is damaged"));
    }
}
