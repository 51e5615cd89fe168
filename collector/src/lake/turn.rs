//! Whose turn the upkeep of a shared lake is.
//!
//! Two collectors that compact one table do not harm it: one of the commits finds the other's and
//! is given up. But the work is wasted, so each asks for its turn first. In a folder the turn is a
//! lock that ends with the process. In a bucket it is an object that names the collector and when
//! its turn ends, and that changes hands by a conditional put; a turn that ends while its holder
//! still works costs work and nothing else.

use std::fs::{File, OpenOptions, TryLockError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deltalake::logstore::object_store::path::Path;
use deltalake::logstore::object_store::{
    Error as StoreError, ObjectStore, ObjectStoreExt, PutMode, PutOptions, UpdateVersion,
};
use url::Url;
use vramscope_queries::store::{self, Place};

use super::LakeError;
use super::place::Home;

/// How long a turn in a bucket is, if it is not asked for again. Clocks may differ by less.
const LENGTH: Duration = Duration::from_secs(600);

/// The turn, as long as it is held.
#[derive(Debug)]
pub struct Turn {
    _lock: Option<File>,
}

/// Takes the turn if nobody else has it. Who has a lake alone has it always.
pub async fn take(home: &Home) -> Result<Option<Turn>, LakeError> {
    let Some(collector) = &home.shared_as else {
        return Ok(Some(Turn { _lock: None }));
    };
    match &home.place {
        Place::Folder(dir) => {
            let path = dir.join("_upkeep.lock");
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)
                .map_err(super::io_error(&path))?;
            match file.try_lock() {
                Ok(()) => Ok(Some(Turn { _lock: Some(file) })),
                Err(TryLockError::WouldBlock) => Ok(None),
                Err(TryLockError::Error(error)) => Err(super::io_error(&path)(error)),
            }
        }
        Place::Bucket(url) => {
            let store = store::bucket(url).map_err(|error| LakeError::Place {
                detail: error.to_string(),
            })?;
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let now = now.unwrap_or_default();
            let taken = lease(store.as_ref(), &object(url), collector, now).await;
            match taken {
                Ok(true) => Ok(Some(Turn { _lock: None })),
                Ok(false) => Ok(None),
                Err(error) => Err(LakeError::Place {
                    detail: format!("failed to ask for the turn to keep {url}: {error}"),
                }),
            }
        }
    }
}

fn object(url: &Url) -> Path {
    Path::from(format!("{}_upkeep", url.path().trim_start_matches('/')))
}

/// Takes or renews the turn. `now` is since 1970.
async fn lease(
    store: &dyn ObjectStore,
    path: &Path,
    collector: &str,
    now: Duration,
) -> Result<bool, StoreError> {
    let mode = match store.get(path).await {
        Err(StoreError::NotFound { .. }) => PutMode::Create,
        Err(error) => return Err(error),
        Ok(found) => {
            let version = UpdateVersion {
                e_tag: found.meta.e_tag.clone(),
                version: found.meta.version.clone(),
            };
            let text = found.bytes().await?;
            let text = String::from_utf8_lossy(&text);
            let (holder, end) = text.split_once(' ').unwrap_or((text.as_ref(), "0"));
            // What cannot be read has ended.
            let end = end.trim().parse().unwrap_or(0);
            if holder != collector && now.as_secs() < end {
                return Ok(false);
            }
            PutMode::Update(version)
        }
    };
    let text = format!("{collector} {}\n", (now + LENGTH).as_secs());
    match store
        .put_opts(path, text.into(), PutOptions::from(mode))
        .await
    {
        Ok(_) => Ok(true),
        // Somebody else was faster.
        Err(StoreError::AlreadyExists { .. } | StoreError::Precondition { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use deltalake::logstore::object_store::memory::InMemory;

    use super::*;

    #[tokio::test]
    async fn a_turn_in_a_bucket_changes_hands_when_it_ends() {
        let store = InMemory::new();
        let path = Path::from("lake/_upkeep");
        let take = async |who: &str, at: u64| {
            let now = Duration::from_secs(at);
            lease(&store, &path, who, now).await.unwrap()
        };
        assert!(take("x", 1000).await);
        assert!(!take("y", 1001).await);
        assert!(take("x", 1500).await, "who has it may have it longer");
        assert!(!take("y", 1601).await);
        assert!(take("y", 2100).await);
        assert!(!take("x", 2101).await);
    }

    #[tokio::test]
    async fn a_turn_in_a_folder_ends_with_its_holder() {
        let dir = tempfile::tempdir().unwrap();
        let home = |id: &str| Home {
            place: Place::Folder(dir.path().to_path_buf()),
            shared_as: Some(id.to_string()),
        };
        let turn = take(&home("x")).await.unwrap();
        assert!(turn.is_some());
        assert!(take(&home("y")).await.unwrap().is_none());
        drop(turn);
        assert!(take(&home("y")).await.unwrap().is_some());
    }
}
