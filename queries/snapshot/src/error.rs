//! Why a snapshot is refused. Every error says where; the caller adds the file's name.

/// What is wrong, and at which byte.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes could not be read.
    #[error("failed to read at byte {offset}")]
    Read {
        /// Bytes read before.
        offset: u64,
        /// What the system says.
        #[source]
        cause: std::io::Error,
    },
    /// The file ends too early.
    #[error("the file ends at byte {offset}, where {expected} was expected: it is cut off")]
    CutOff {
        /// Size of what is there.
        offset: u64,
        /// What should have followed.
        expected: &'static str,
    },
    /// A pickle that asks for more than data.
    #[error(
        "opcode {opcode} at byte {offset} would make Python run code: a memory snapshot is plain data, this is something else"
    )]
    Code {
        /// Where it stands.
        offset: u64,
        /// Name in Python's `pickletools`.
        opcode: &'static str,
    },
    /// Bytes that no snapshot has.
    #[error("byte {offset}: expected {expected}, found {found}")]
    Unexpected {
        /// Where it stands.
        offset: u64,
        /// What a snapshot has there.
        expected: &'static str,
        /// What this one has.
        found: String,
    },
    /// More than any snapshot needs: a file made to use up memory.
    #[error("byte {offset}: {what}, more than the {limit} allowed for a file of this size")]
    Limit {
        /// Where it stands.
        offset: u64,
        /// Of what there is too much, and how much.
        what: String,
        /// How much is allowed.
        limit: u64,
    },
    /// JSON that does not parse.
    #[error("byte {offset}: not valid JSON: {reason}")]
    Json {
        /// About where it stands.
        offset: u64,
        /// What the parser says.
        reason: String,
    },
    /// A file of another kind.
    #[error("not a PyTorch memory snapshot: {0}")]
    NotASnapshot(String),
}

impl Error {
    pub(crate) fn unexpected(
        offset: u64,
        expected: &'static str,
        found: impl Into<String>,
    ) -> Self {
        Error::Unexpected {
            offset,
            expected,
            found: found.into(),
        }
    }
}
