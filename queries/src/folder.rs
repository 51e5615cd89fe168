//! A data folder: a lake (a Delta table per folder, written by a collector; also on an object store)
//! or a trace (plain Parquet files per table, written by an agent).
//!
//! Invariants:
//! - a session shows one state of the folder: a query that reads a table twice sees the same
//!   rows twice, also while somebody writes;
//! - [`Folder::session`] is called once per query and sees everything committed before the call;
//! - a table that is not there is registered without rows, so that every view can be planned;
//! - a damaged file is never passed over in silence.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::prelude::SessionContext;
use deltalake::DeltaTable;
use tokio::sync::Mutex;
use vramscope_wire::Table;

use crate::engine::Engine;
use crate::error::DamagedFile;
use crate::lake::scan;
use crate::lake::stores::Tables;
use crate::session::{self, Options};
use crate::store::Place;
use crate::trace::TraceFile;
use crate::{Error, lake, trace, views};

/// An open data folder. Cheap to share behind an `Arc`; sessions are made one at a time.
pub struct Folder {
    /// As it was given.
    dir: PathBuf,
    /// Where its tables lie.
    place: Place,
    runtime: Arc<RuntimeEnv>,
    skip_damaged: bool,
    engine: Engine,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The session of the last call, valid while nothing has changed.
    session: Option<SessionContext>,
    delta: BTreeMap<Table, DeltaTable>,
    files: BTreeMap<Table, Vec<TraceFile>>,
    checked: HashSet<TraceFile>,
    skipped: BTreeMap<TraceFile, DamagedFile>,
}

impl Folder {
    /// Opens a folder and checks that it can be read. A lake on an object store is given by its
    /// URL (`s3://BUCKET/PREFIX`), or by the data folder of a collector that writes it.
    pub async fn open(dir: impl AsRef<Path>, options: Options) -> Result<Folder, Error> {
        let dir = dir.as_ref().to_path_buf();
        let place = Place::of_data(&dir)?;
        if let Place::Folder(tables) = &place {
            check_folder(tables)?;
        }
        let runtime = session::runtime(&options)?;
        Tables::of(&place)?.register_in(&runtime);
        let folder = Folder {
            dir,
            place,
            runtime,
            skip_damaged: options.skip_damaged,
            engine: options.engine,
            state: Mutex::default(),
        };
        folder.session().await?;
        Ok(folder)
    }

    /// The folder's path, or the lake's URL, as it was given.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// What queries hold in the spill folder now, in bytes.
    pub fn spilled_bytes(&self) -> u64 {
        self.runtime.disk_manager.used_disk_space()
    }

    /// A session with all tables and views as they are on disk now. Without a change since the
    /// last call it is the same session.
    pub async fn session(&self) -> Result<SessionContext, Error> {
        let mut state = self.state.lock().await;
        let changed = self.look(&mut state).await? || state.session.is_none();
        if !changed && let Some(session) = &state.session {
            return Ok(session.clone());
        }
        let session = self.engine.plan_with(session::session_on(&self.runtime))?;
        for table in Table::ALL {
            let provider = match (state.delta.get(&table), state.files.get(&table)) {
                (Some(delta), _) => {
                    let provider = match (scan::provider(table, delta)?, &self.engine) {
                        (Some(plain), _) => plain,
                        (None, Engine::Local) => lake::provider(&session, delta).await?,
                        (None, Engine::Distributed(_)) => {
                            return Err(Error::Workers(format!(
                                "table {} was written with features of Delta that only the local engine reads (--engine local)",
                                table.name()
                            )));
                        }
                    };
                    lake::with_all_columns(
                        &session,
                        &self.place.table_path(table),
                        table,
                        provider,
                    )?
                }
                (None, Some(files)) => {
                    if matches!(self.engine, Engine::Distributed(_)) && !files.is_empty() {
                        return Err(Error::Workers(format!(
                            "{:?} is a trace; the distributed engine reads lakes",
                            self.dir
                        )));
                    }
                    trace::provider(&session, table, files)?
                }
                (None, None) => trace::empty(table)?,
            };
            session.register_table(table.name(), provider)?;
        }
        views::register(&session).await?;
        state.session = Some(session.clone());
        Ok(session)
    }

    /// Damaged files that were left out (only with `skip_damaged`).
    pub async fn skipped(&self) -> Vec<DamagedFile> {
        self.state.lock().await.skipped.values().cloned().collect()
    }

    /// Reads every file from end to end and returns the damaged ones. For the moment after a
    /// query failed: the error itself does not always name the file.
    pub async fn find_damage(&self) -> Vec<DamagedFile> {
        let paths: Vec<PathBuf> = {
            let state = self.state.lock().await;
            let of_trace = state.files.values().flatten().map(|file| file.path.clone());
            of_trace
                .chain(state.delta.values().flat_map(lake::files))
                .collect()
        };
        let check = move || {
            paths
                .iter()
                .filter_map(|path| trace::check_decodes(path).err())
                .collect()
        };
        tokio::task::spawn_blocking(check).await.unwrap_or_default()
    }

    /// Looks at every table where it lies; true if one is not what it was.
    async fn look(&self, state: &mut State) -> Result<bool, Error> {
        let tables = match &self.place {
            Place::Folder(dir) => dir,
            Place::Bucket(_) => return self.look_in_bucket(state).await,
        };
        let mut changed = false;
        for table in Table::ALL {
            changed |= self.update(state, tables, table).await?;
        }
        Ok(changed)
    }

    /// All tables at once: each look is a few requests that take their time.
    async fn look_in_bucket(&self, state: &mut State) -> Result<bool, Error> {
        // Taken out, so that a look that fails half-way leaves no table behind that is older than
        // another: the next look opens them anew.
        let mut known = std::mem::take(&mut state.delta);
        let looks = Table::ALL.map(|table| {
            let known = known.remove(&table);
            async move {
                match known {
                    Some(mut delta) => lake::refresh(&mut delta)
                        .await
                        .map(|changed| (table, Some(delta), changed)),
                    None => lake::open(&self.place, table).await.map(|found| {
                        let is_new = found.is_some();
                        (table, found, is_new)
                    }),
                }
            }
        });
        let mut changed = false;
        for (table, found, is_other) in futures::future::try_join_all(looks).await? {
            changed |= is_other;
            if let Some(delta) = found {
                state.delta.insert(table, delta);
            }
        }
        if state.delta.is_empty() {
            return Err(Error::NoTables {
                folder: PathBuf::from(self.place.spelled()),
            });
        }
        Ok(changed)
    }

    /// Looks at one table on disk; true if it is not what it was.
    async fn update(&self, state: &mut State, tables: &Path, table: Table) -> Result<bool, Error> {
        let dir = tables.join(table.name());
        if let Some(delta) = state.delta.get_mut(&table) {
            return lake::refresh(delta).await;
        }
        if lake::is_delta(&dir) {
            state.delta.insert(table, lake::open_table(&dir).await?);
            state.files.remove(&table);
            return Ok(true);
        }
        let files = self.sound_files(state, table, trace::list(&dir)?)?;
        if state.files.get(&table) == Some(&files) {
            return Ok(false);
        }
        state.files.insert(table, files);
        Ok(true)
    }

    /// Checks the files that were not checked before.
    fn sound_files(
        &self,
        state: &mut State,
        table: Table,
        listed: Vec<TraceFile>,
    ) -> Result<Vec<TraceFile>, Error> {
        let mut sound = Vec::with_capacity(listed.len());
        let mut damage = Vec::new();
        for file in listed {
            if state.skipped.contains_key(&file) {
                continue;
            }
            if state.checked.contains(&file) {
                sound.push(file);
                continue;
            }
            // Whoever goes on without damaged files must know all of them now: damage behind
            // a sound footer would fail the query later.
            let result = if self.skip_damaged {
                trace::check_rows(table, &file.path)
            } else {
                trace::check_footer(table, &file.path)
            };
            match result {
                Ok(()) => {
                    state.checked.insert(file.clone());
                    sound.push(file);
                }
                // Gone since it was listed: an agent deletes a file once a collector has it.
                Err(_) if !file.path.exists() => {}
                Err(found) if self.skip_damaged => {
                    state.skipped.insert(file, found);
                }
                Err(found) => damage.push(found),
            }
        }
        if damage.is_empty() {
            Ok(sound)
        } else {
            Err(Error::Damaged(damage))
        }
    }
}

/// Says clearly what is wrong with a folder that holds no tables.
fn check_folder(dir: &Path) -> Result<(), Error> {
    let metadata = match std::fs::metadata(dir) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::NoFolder(dir.to_path_buf()));
        }
        Err(cause) => {
            return Err(Error::Io {
                path: dir.to_path_buf(),
                cause,
            });
        }
    };
    if !metadata.is_dir() {
        return Err(Error::NotAFolder(dir.to_path_buf()));
    }
    let has_tables = Table::ALL
        .iter()
        .any(|table| dir.join(table.name()).is_dir());
    if !has_tables {
        return Err(Error::NoTables {
            folder: dir.to_path_buf(),
        });
    }
    Ok(())
}
