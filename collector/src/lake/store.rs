//! A local object store whose writes are durable when they return.
//!
//! `object_store`'s own local store never fsyncs, so after a power cut a committed Delta log
//! entry could be there without its bytes, or name data files that are not. All writes of the
//! lake (data files, log entries, checkpoints) go through this wrapper instead, so that the
//! order in which the Delta library writes is the order in which things become durable.
//!
//! Invariants:
//! - a name appears only after the bytes behind it were fsynced (whole puts), or is fsynced
//!   before anything can refer to it (multipart uploads: data files, which only a later log
//!   entry names);
//! - a write returns after every folder from the file up to the root was fsynced;
//! - temporary names end in `#` and digits, which the local store leaves out of its listings.

use std::fmt;
use std::io;
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use async_trait::async_trait;
use deltalake::logstore::object_store as os;
use futures::stream::BoxStream;
use os::local::LocalFileSystem;
use os::path::Path;
use os::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
    UploadPart,
};

use crate::folder;

/// Local files, written durably. Paths are absolute, as in a `file://` URL.
#[derive(Debug)]
pub struct DurableStore {
    local: LocalFileSystem,
    /// Folders are fsynced up to here; it exists before the store does.
    root: PathBuf,
    /// Of temporary names: keeps stores of several processes, also of several hosts, apart.
    salt: u32,
    temporaries: AtomicU64,
}

impl DurableStore {
    /// A store for files below `root`, an absolute path.
    pub fn new(root: &FsPath) -> Arc<DurableStore> {
        Arc::new(DurableStore {
            local: LocalFileSystem::new(),
            root: root.to_path_buf(),
            // Cut: ten digits.
            salt: folder::random() as u32,
            temporaries: AtomicU64::new(0),
        })
    }

    fn temporary_name(&self, path: &FsPath) -> PathBuf {
        let number = self.temporaries.fetch_add(1, Ordering::Relaxed);
        let mut name = path.as_os_str().to_os_string();
        name.push(format!(
            "#{}{:010}{number:06}",
            std::process::id(),
            self.salt
        ));
        name.into()
    }
}

/// Removes what a killed process left half-written below a folder. Only for the holder of the
/// data folder's lock.
pub fn remove_temporaries(dir: &FsPath) -> io::Result<()> {
    each_temporary(dir, &mut |path| std::fs::remove_file(path))
}

/// What was left half-written below a folder before a moment, with its bytes.
pub fn old_temporaries(dir: &FsPath, before: SystemTime) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    each_temporary(dir, &mut |path| {
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) => metadata,
            // It was finished meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if metadata.modified()? < before {
            found.push((path.to_path_buf(), metadata.len()));
        }
        Ok(())
    })?;
    Ok(found)
}

fn each_temporary(dir: &FsPath, work: &mut dyn FnMut(&FsPath) -> io::Result<()>) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_temporary = name
            .to_str()
            .and_then(|name| name.rsplit_once('#'))
            .is_some_and(|(_, digits)| {
                !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
            });
        if entry.file_type()?.is_dir() {
            each_temporary(&entry.path(), work)?;
        } else if is_temporary {
            work(&entry.path())?;
        }
    }
    Ok(())
}

impl fmt::Display for DurableStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DurableStore({})", self.root.display())
    }
}

fn failed(source: io::Error) -> os::Error {
    os::Error::Generic {
        store: "DurableStore",
        source: Box::new(source),
    }
}

/// Says why a write failed: the Delta library's writer panics over it, which hides the cause.
fn report(location: &Path, error: &os::Error) {
    if !matches!(error, os::Error::AlreadyExists { .. }) {
        tracing::error!(%location, %error, "failed to write a file of the lake");
    }
}

/// Runs file work where it may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|source| os::Error::JoinError { source })?
}

/// Makes every name from a file's folder up to `root` durable.
fn sync_folders(path: &FsPath, root: &FsPath) -> io::Result<()> {
    for dir in path
        .ancestors()
        .skip(1)
        .take_while(|dir| dir.starts_with(root))
    {
        folder::sync_dir(dir)?;
    }
    Ok(())
}

fn put(
    path: &FsPath,
    temporary: PathBuf,
    root: &FsPath,
    payload: &PutPayload,
    mode: &PutMode,
) -> Result<PutResult> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(failed)?;
    }
    let pieces = payload.iter().map(|piece| piece.as_ref());
    let temporary = folder::write_temporary(temporary, pieces).map_err(failed)?;
    let named = match mode {
        // A hard link fails if the name is taken, which is what makes a Delta commit atomic.
        PutMode::Create => {
            let linked = std::fs::hard_link(&temporary, path);
            let _ = std::fs::remove_file(&temporary);
            linked
        }
        _ => std::fs::rename(&temporary, path).inspect_err(|_| {
            let _ = std::fs::remove_file(&temporary);
        }),
    };
    match named {
        Ok(()) => {}
        Err(source) if source.kind() == io::ErrorKind::AlreadyExists => {
            return Err(os::Error::AlreadyExists {
                path: path.display().to_string(),
                source: Box::new(source),
            });
        }
        Err(source) => return Err(failed(source)),
    }
    sync_folders(path, root).map_err(failed)?;
    Ok(PutResult {
        e_tag: None,
        version: None,
    })
}

#[async_trait]
impl ObjectStore for DurableStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        if matches!(options.mode, PutMode::Update(_)) {
            return self.local.put_opts(location, payload, options).await;
        }
        let path = self.local.path_to_filesystem(location)?;
        let temporary = self.temporary_name(&path);
        let root = self.root.clone();
        let put = blocking(move || put(&path, temporary, &root, &payload, &options.mode)).await;
        put.inspect_err(|error| report(location, error))
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let path = self.local.path_to_filesystem(location)?;
        let upload = self.local.put_multipart_opts(location, options).await?;
        Ok(Box::new(DurableUpload {
            upload,
            location: location.clone(),
            path,
            root: self.root.clone(),
        }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.local.get_opts(location, options).await
    }

    async fn get_ranges(
        &self,
        location: &Path,
        ranges: &[std::ops::Range<u64>],
    ) -> Result<Vec<bytes::Bytes>> {
        self.local.get_ranges(location, ranges).await
    }

    /// Not made durable: a file that comes back after a power cut is one that nothing names.
    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.local.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.local.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.local.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.local.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.local.copy_opts(from, to, options).await?;
        self.sync(to).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.local.rename_opts(from, to, options).await?;
        self.sync(to).await
    }
}

impl DurableStore {
    async fn sync(&self, location: &Path) -> Result<()> {
        let path = self.local.path_to_filesystem(location)?;
        let root = self.root.clone();
        blocking(move || sync_file(&path, &root)).await
    }
}

fn sync_file(path: &FsPath, root: &FsPath) -> Result<()> {
    let synced = std::fs::File::open(path).and_then(|file| file.sync_all());
    synced
        .and_then(|()| sync_folders(path, root))
        .map_err(failed)
}

#[derive(Debug)]
struct DurableUpload {
    upload: Box<dyn MultipartUpload>,
    location: Path,
    path: PathBuf,
    root: PathBuf,
}

#[async_trait]
impl MultipartUpload for DurableUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.upload.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let completed = self.upload.complete().await;
        let (path, root) = (self.path.clone(), self.root.clone());
        let done = match completed {
            Ok(result) => blocking(move || sync_file(&path, &root))
                .await
                .map(|()| result),
            Err(error) => Err(error),
        };
        done.inspect_err(|error| report(&self.location, error))
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_is_created_once_and_leaves_no_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let store = DurableStore::new(&root);
        let path = Path::from_absolute_path(root.join("t/_delta_log/0.json")).unwrap();
        let create = PutOptions {
            mode: PutMode::Create,
            ..Default::default()
        };
        store
            .put_opts(&path, "one".into(), create.clone())
            .await
            .unwrap();
        let again = store
            .put_opts(&path, "two".into(), create)
            .await
            .unwrap_err();
        assert!(matches!(again, os::Error::AlreadyExists { .. }), "{again}");
        assert_eq!(
            std::fs::read(root.join("t/_delta_log/0.json")).unwrap(),
            b"one"
        );
        store
            .put_opts(&path, "three".into(), PutOptions::default())
            .await
            .unwrap();
        assert_eq!(
            std::fs::read(root.join("t/_delta_log/0.json")).unwrap(),
            b"three"
        );
        assert_eq!(
            std::fs::read_dir(root.join("t/_delta_log"))
                .unwrap()
                .count(),
            1
        );
    }

    #[test]
    fn leftovers_go_and_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("date=2026-11-29/hour=3")).unwrap();
        let keep = dir.path().join("date=2026-11-29/hour=3/part-0.parquet");
        let gone = dir.path().join("date=2026-11-29/hour=3/part-1.parquet#12");
        std::fs::write(&keep, "x").unwrap();
        std::fs::write(&gone, "x").unwrap();
        remove_temporaries(dir.path()).unwrap();
        assert!(keep.exists() && !gone.exists());
    }
}
