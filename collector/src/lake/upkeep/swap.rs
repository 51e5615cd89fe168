//! Takes files out of a table and puts others in, in one commit.
//!
//! Delta's own check is not enough here: it lets two commits that only rearrange rows
//! (`dataChange = false`) remove the same file, and the rows would be there twice. So a commit is
//! only tried on top of a state in which every file is still there, it fails if anybody commits
//! meanwhile (`max_retries` 0), and then everything is looked at again.
//!
//! Rows that go for good are counted in the table itself, as application transactions of their own
//! ([`Count`]): they are part of the same commit, are kept by checkpoints, and tell [`fsck`] what
//! has to be there.
//!
//! [`fsck`]: super::fsck

use std::collections::{HashMap, HashSet};

use deltalake::DeltaTable;
use deltalake::DeltaTableError;
use deltalake::kernel::transaction::{CommitBuilder, CommitProperties, TransactionError};
use deltalake::kernel::{Action, Add, Transaction};
use deltalake::protocol::DeltaOperation;
use serde_json::Value;
use vramscope_wire::Table;

use super::{UpkeepError, delta_error};
use crate::lake::{Lake, committer};

/// How often a commit is tried before somebody else's turn has to end first.
const ATTEMPTS: usize = 30;

/// A number that a table's log keeps, as the version of an application transaction. No agent is
/// called so: `agent_id`s have no colon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// Rows of stacks that were there already.
    SameStacks,
    /// Rows whose time was over.
    Expired,
    /// The first moment that is kept, in microseconds since 1970.
    KeptFrom,
}

impl Count {
    fn name(self) -> &'static str {
        match self {
            Count::SameStacks => "vramscope:same_stacks",
            Count::Expired => "vramscope:expired_rows",
            Count::KeptFrom => "vramscope:kept_from",
        }
    }

    /// What a table says, 0 if it says nothing.
    pub async fn of(self, delta: &DeltaTable) -> Result<i64, DeltaTableError> {
        let found = delta
            .snapshot()?
            .transaction_version(&delta.log_store(), self.name())
            .await?;
        Ok(found.unwrap_or(0))
    }
}

/// How a count changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// By so many more.
    Add(u64),
    /// To this, if it is more.
    Raise(i64),
}

/// One exchange of files.
pub struct Swap {
    /// Paths of the files that go, as the log has them.
    pub remove: Vec<String>,
    /// The files that come. Without rows of their own: what the others held.
    pub add: Vec<Add>,
    /// Whether rows go for good.
    pub changes_data: bool,
    /// What the log calls it.
    pub operation: DeltaOperation,
    /// Counts that change with it.
    pub counts: Vec<(Count, Change)>,
    /// For people who read the log.
    pub metadata: HashMap<String, Value>,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swapped {
    /// Committed.
    Done,
    /// Somebody else has taken one of the files out meanwhile: nothing was changed.
    Overtaken,
}

/// Commits it.
pub async fn commit(lake: &Lake, table: Table, swap: &Swap) -> Result<Swapped, UpkeepError> {
    let _turn = lake.turn(table).await;
    let mut delta = lake.table(table);
    for _ in 0..ATTEMPTS {
        delta.update_state().await.map_err(delta_error(table))?;
        let Some(actions) = actions(&delta, swap).map_err(delta_error(table))? else {
            lake.set(table, delta);
            return Ok(Swapped::Overtaken);
        };
        match attempt(&mut delta, swap, actions).await {
            Ok(version) => {
                lake.set(table, delta.clone());
                if version > 0 && version.is_multiple_of(committer::CHECKPOINT_INTERVAL) {
                    committer::checkpoint(&delta, table).await;
                }
                return Ok(Swapped::Done);
            }
            Err(error) if somebody_was_faster(&error) => {}
            Err(error) => return Err(delta_error(table)(error).into()),
        }
    }
    Err(UpkeepError::Busy {
        table: table.name(),
        attempts: ATTEMPTS,
    })
}

/// What the commit does; `None` if a file that is to go is not there any more.
fn actions(delta: &DeltaTable, swap: &Swap) -> Result<Option<Vec<Action>>, DeltaTableError> {
    let mut wanted: HashSet<&str> = swap.remove.iter().map(String::as_str).collect();
    let mut actions = Vec::with_capacity(swap.remove.len() + swap.add.len());
    for file in delta.snapshot()?.log_data() {
        if wanted.remove(&*file.path()) {
            actions.push(Action::Remove(file.remove_action(swap.changes_data)));
        }
    }
    if !wanted.is_empty() {
        return Ok(None);
    }
    actions.extend(swap.add.iter().cloned().map(Action::Add));
    Ok(Some(actions))
}

async fn attempt(
    delta: &mut DeltaTable,
    swap: &Swap,
    actions: Vec<Action>,
) -> Result<u64, DeltaTableError> {
    let now = chrono::Utc::now().timestamp_millis();
    let mut transactions = Vec::with_capacity(swap.counts.len());
    for (count, change) in &swap.counts {
        let before = count.of(delta).await?;
        let after = match change {
            Change::Add(more) => before.saturating_add(i64::try_from(*more).unwrap_or(i64::MAX)),
            Change::Raise(to) => before.max(*to),
        };
        transactions.push(Transaction::new_with_last_update(
            count.name(),
            after,
            Some(now),
        ));
    }
    let properties = CommitProperties::default()
        .with_metadata(swap.metadata.clone())
        .with_application_transactions(transactions)
        .with_max_retries(0)
        .with_create_checkpoint(false)
        .with_cleanup_expired_logs(Some(false));
    let done = CommitBuilder::from(properties)
        .with_actions(actions)
        .build(
            Some(delta.snapshot()?),
            delta.log_store(),
            swap.operation.clone(),
        )
        .await?;
    delta.state = Some(done.snapshot());
    Ok(done.version())
}

/// Whether the commit surely did not happen, because another came first.
fn somebody_was_faster(error: &DeltaTableError) -> bool {
    match error {
        DeltaTableError::VersionAlreadyExists(_) => true,
        DeltaTableError::Transaction { source } => matches!(
            source,
            TransactionError::MaxCommitAttempts(_)
                | TransactionError::VersionAlreadyExists(_)
                | TransactionError::CommitConflict(_)
        ),
        _ => false,
    }
}
