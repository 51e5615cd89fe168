//! Who asks, and what they may do.

use std::sync::Arc;

/// What a caller may do. Each may do what is named with it and nothing else, but `Admin`, who may
/// do everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Send batches: agents.
    Ingest,
    /// Ask questions: people, dashboards.
    Read,
    /// Everything.
    Admin,
}

/// Somebody who was let in. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// As in the list of users, or of an agent its id. It is what `query_log.who` says.
    pub name: Arc<str>,
    /// What they may do.
    pub role: Role,
    /// Namespaces whose rows they see; `None` is all of them.
    pub namespaces: Option<Arc<[String]>>,
}

impl Caller {
    /// Whoever comes by loopback while no credentials are configured.
    pub fn on_loopback() -> Caller {
        Caller {
            name: Arc::from("loopback"),
            role: Role::Admin,
            namespaces: None,
        }
    }

    /// Whether they may ask questions.
    pub fn may_read(&self) -> bool {
        matches!(self.role, Role::Read | Role::Admin)
    }

    /// Whether they may send batches.
    pub fn may_ingest(&self) -> bool {
        matches!(self.role, Role::Ingest | Role::Admin)
    }
}
