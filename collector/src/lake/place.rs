//! Where the lake of a data folder lies, and whether other collectors write it too.
//!
//! Without the key `lake` the tables lie in the data folder and belong to the one collector that
//! holds it. With it they lie elsewhere, in a folder or a bucket, and any number of collectors may
//! write them, each out of a data folder of its own ([`super::committer`] says why every batch counts
//! once then too). What was chosen is kept in the data folder, for the commands that are given
//! nothing else, and because the log holds batches that belong there and nowhere else.
//!
//! Invariant: a lake is written by one kind of collector only. Two files keep the kinds apart: the
//! lock of a collector that has a folder to itself, and `_collectors/` of a shared one.

use std::io;
use std::path::{Path, PathBuf};

use vramscope_queries::store::{self, LAKE_FILE, Place};

use super::{LakeError, io_error};
use crate::folder;

/// Below a folder that collectors share: a file for each of them, by its id.
const COLLECTORS: &str = "_collectors";

/// Where tables lie, for who opens them.
#[derive(Debug, Clone)]
pub struct Home {
    /// The place itself.
    pub place: Place,
    /// The id of this collector, if others may write there too.
    pub shared_as: Option<String>,
}

impl Home {
    /// That of a data folder, as it was chosen.
    pub fn of(data: &Path) -> Result<Home, LakeError> {
        let place = Place::of_data(data).map_err(wrong)?;
        let is_shared = data.join(LAKE_FILE).exists();
        let shared_as = match is_shared {
            true => Some(folder::collector_id(data).map_err(io_error(data))?),
            false => None,
        };
        Ok(Home { place, shared_as })
    }

    /// Folder of the tables, if they lie in one.
    pub fn folder(&self) -> Option<&Path> {
        match &self.place {
            Place::Folder(dir) => Some(dir),
            Place::Bucket(_) => None,
        }
    }
}

fn wrong(error: vramscope_queries::Error) -> LakeError {
    refused(error.to_string())
}

fn refused(detail: String) -> LakeError {
    LakeError::Place { detail }
}

/// Makes a data folder ready for the lake that the configuration wants. For the holder of the
/// folder's lock, before anything is opened.
pub async fn settle(data: &Path, wanted: Option<&str>) -> Result<(), LakeError> {
    let chosen = match data.join(LAKE_FILE).exists() {
        true => Some(Place::of_data(data).map_err(wrong)?),
        false => None,
    };
    let place = match (wanted, chosen) {
        (None, None) => return refuse_shared(data),
        (None, Some(chosen)) => chosen,
        (Some(wanted), chosen) => {
            let wanted = made(wanted)?;
            match chosen {
                Some(chosen) if chosen != wanted => {
                    let (data, wanted) = (data.display(), wanted.spelled());
                    return Err(refused(format!(
                        "the data folder {data} belongs to another lake than {wanted}; give --lake {}, or a data folder of its own",
                        chosen.spelled()
                    )));
                }
                Some(_) => {}
                None => refuse_own_tables(data, &wanted)?,
            }
            wanted
        }
    };
    match &place {
        Place::Folder(dir) => join(data, dir)?,
        Place::Bucket(url) => store::check_conditional_put(url).await.map_err(wrong)?,
    }
    // Last: what failed up to here can be chosen differently.
    let path = data.join(LAKE_FILE);
    let text = format!("{}\n", place.spelled());
    write_durably(&path, &text).map_err(io_error(&path))
}

/// The place of that spelling. A folder is created.
fn made(wanted: &str) -> Result<Place, LakeError> {
    let place = Place::parse(Path::new(wanted)).map_err(wrong)?;
    let Place::Folder(dir) = place else {
        return Ok(place);
    };
    std::fs::create_dir_all(&dir).map_err(io_error(&dir))?;
    Ok(Place::Folder(dir.canonicalize().map_err(io_error(&dir))?))
}

/// A data folder that has tables keeps them.
fn refuse_own_tables(data: &Path, place: &Place) -> Result<(), LakeError> {
    let has_tables = vramscope_wire::Table::ALL
        .iter()
        .any(|table| data.join(table.name()).join("_delta_log").is_dir());
    if has_tables {
        return Err(refused(format!(
            "the data folder {} holds tables; move them to {}, or leave out --lake",
            data.display(),
            place.spelled()
        )));
    }
    Ok(())
}

fn write_durably(path: &Path, text: &str) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_os_string();
    temporary.push(".tmp");
    let temporary =
        folder::write_temporary(PathBuf::from(temporary), [text.as_bytes()].into_iter())?;
    std::fs::rename(&temporary, path)?;
    match path.parent() {
        Some(dir) => folder::sync_dir(dir),
        None => Ok(()),
    }
}

/// Makes a collector known in a folder that it shares.
fn join(data: &Path, dir: &Path) -> Result<(), LakeError> {
    if dir.join(folder::LOCK_FILE).exists() {
        return Err(refused(format!(
            "{} is the data folder of a collector that has its lake to itself; a shared lake needs a folder of its own",
            dir.display()
        )));
    }
    let id = folder::collector_id(data).map_err(io_error(data))?;
    let collectors = dir.join(COLLECTORS);
    folder::create_dir_durably(&collectors).map_err(io_error(&collectors))?;
    let path = collectors.join(&id);
    if path.exists() {
        return Ok(());
    }
    write_durably(&path, "").map_err(io_error(&path))
}

/// A collector that wants a folder to itself does not get one that others share.
fn refuse_shared(data: &Path) -> Result<(), LakeError> {
    if data.join(COLLECTORS).is_dir() {
        return Err(refused(format!(
            "{} is a lake that collectors share; give it as --lake, and a data folder of its own as --data",
            data.display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn kinds_of_lakes_are_kept_apart() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let folders = ["a", "b", "lake"].map(|name| root.join(name));
        folders
            .iter()
            .for_each(|dir| std::fs::create_dir(dir).unwrap());
        let [a, b, lake] = folders;
        let text = |path: &Path| path.to_str().unwrap().to_string();
        // One with a folder to itself.
        settle(&a, None).await.unwrap();
        let _lock = folder::Lock::take(&a).unwrap();
        assert_eq!(Home::of(&a).unwrap().place, Place::Folder(a.clone()));
        assert!(Home::of(&a).unwrap().shared_as.is_none());
        let error = settle(&b, Some(&text(&a))).await.unwrap_err().to_string();
        assert!(error.contains("to itself"), "{error}");
        // One that shares.
        settle(&b, Some(&text(&lake))).await.unwrap();
        settle(&b, None).await.unwrap();
        let home = Home::of(&b).unwrap();
        assert_eq!(home.place, Place::Folder(lake.clone()));
        assert_eq!(home.shared_as, Home::of(&b).unwrap().shared_as);
        let error = settle(&b, Some(&text(&root)))
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&format!("--lake {}", text(&lake))),
            "{error}"
        );
        let error = settle(&lake, None).await.unwrap_err().to_string();
        assert!(error.contains("collectors share"), "{error}");
    }
}
