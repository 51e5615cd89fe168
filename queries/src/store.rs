//! Where tables lie: in a folder, or in a bucket of an object store that speaks S3.
//!
//! A data folder may say that its tables lie elsewhere: its file `_lake` then holds one line, the
//! URL or path of that place. A collector writes it (its key `lake`); everything that is given the
//! data folder follows it.
//!
//! A bucket is reached with what the usual variables say: `AWS_ENDPOINT_URL`, `AWS_REGION`,
//! `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, a web identity, a container's
//! or an instance's role. Clear text needs `AWS_ALLOW_HTTP=true`. Keys are never part of a URL, a
//! message or a log line.
//!
//! Invariant: an object that must be new is put with `If-None-Match: *`. That is what makes a
//! commit of a Delta table atomic among processes, so it cannot be switched off by the
//! environment, and [`check_conditional_put`] finds a store that ignores it before anything is
//! entrusted to it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, Once, PoisonError};
use std::time::Duration;

use deltalake::logstore::{
    DeltaIOStorageBackend, IORuntime, LogStore, LogStoreFactory, ObjectStoreFactory,
    ObjectStoreRef, StorageConfig, default_logstore, logstore_factories, object_store,
    object_store_factories,
};
use deltalake::{DeltaResult, DeltaTableError};
use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig};
use url::Url;
use vramscope_wire::Table;

use crate::Error;

/// Name of the file in a data folder that says where its tables lie.
pub const LAKE_FILE: &str = "_lake";

/// Where tables lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Below a folder, an absolute path.
    Folder(PathBuf),
    /// Below a prefix of a bucket, `s3://BUCKET/PREFIX/`.
    Bucket(Url),
}

impl Place {
    /// The place that a path or URL names. A path is made absolute.
    pub fn parse(text: &Path) -> Result<Place, Error> {
        let spelled = text.to_string_lossy();
        let Some((scheme, _)) = spelled.split_once("://") else {
            let absolute = std::path::absolute(text).map_err(|cause| Error::Io {
                path: text.to_path_buf(),
                cause,
            })?;
            return Ok(Place::Folder(absolute));
        };
        let wrong = |detail: &str| Error::Store {
            place: without_secrets(&spelled),
            detail: detail.to_string(),
        };
        if scheme != "s3" {
            return Err(wrong(
                "only s3://BUCKET/PREFIX and plain paths are understood",
            ));
        }
        let mut url = Url::parse(&spelled).map_err(|error| wrong(&error.to_string()))?;
        if url.host_str().is_none_or(str::is_empty) {
            return Err(wrong("the bucket is missing: s3://BUCKET/PREFIX"));
        }
        let has_more = url.query().is_some() || url.fragment().is_some() || url.port().is_some();
        if !url.username().is_empty() || url.password().is_some() || has_more {
            return Err(wrong(
                "only bucket and prefix belong here; endpoint and keys come from AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY",
            ));
        }
        let prefix = url.path().trim_matches('/').to_string();
        if prefix.contains(['%', '#', '?']) || prefix.split('/').any(|part| part == "..") {
            return Err(wrong(
                "use letters, digits, '-', '_', '.' and '/' in the prefix",
            ));
        }
        let path = match prefix.as_str() {
            "" => "/".to_string(),
            prefix => format!("/{prefix}/"),
        };
        url.set_path(&path);
        Ok(Place::Bucket(url))
    }

    /// Where the tables of a data folder lie: in the folder itself, or where its `_lake` says. What
    /// is given may also be a bucket's URL.
    pub fn of_data(data: &Path) -> Result<Place, Error> {
        let place = Place::parse(data)?;
        let Place::Folder(dir) = &place else {
            return Ok(place);
        };
        let file = dir.join(LAKE_FILE);
        match std::fs::read_to_string(&file) {
            Ok(text) => Place::parse(Path::new(text.trim())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(place),
            // A file in place of a folder is found out elsewhere, with a text about that.
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => Ok(place),
            Err(cause) => Err(Error::Io { path: file, cause }),
        }
    }

    /// The URL of a table.
    pub fn table(&self, table: Table) -> Result<Url, Error> {
        match self {
            Place::Folder(dir) => {
                let dir = dir.join(table.name());
                crate::lake::check_path(&dir)?;
                // An absolute path always makes a file URL.
                Ok(Url::from_directory_path(&dir).expect("an absolute path"))
            }
            Place::Bucket(url) => {
                let mut url = url.clone();
                url.set_path(&format!("{}{}/", url.path(), table.name()));
                Ok(url)
            }
        }
    }

    /// As a person would write it.
    pub fn spelled(&self) -> String {
        match self {
            Place::Folder(dir) => dir.display().to_string(),
            Place::Bucket(url) => url.as_str().trim_end_matches('/').to_string(),
        }
    }

    /// For messages about a table: its folder, or its URL in the guise of a path.
    pub fn table_path(&self, table: Table) -> PathBuf {
        match self {
            Place::Folder(dir) => dir.join(table.name()),
            Place::Bucket(_) => PathBuf::from(format!("{}/{}", self.spelled(), table.name())),
        }
    }
}

/// A text that was given as a place, without what may be a password.
fn without_secrets(text: &str) -> String {
    match (text.find("://"), text.rfind('@')) {
        (Some(scheme), Some(at)) if at > scheme => {
            format!("{}://…{}", &text[..scheme], &text[at..])
        }
        _ => text.to_string(),
    }
}

/// Lets the Delta library open tables in buckets. Does so once; later calls do nothing.
pub fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let scheme = Url::parse("s3://").expect("a URL");
        object_store_factories().insert(scheme.clone(), Arc::new(Buckets));
        logstore_factories().insert(scheme, Arc::new(Buckets));
    });
}

/// The store of a bucket. One per bucket and process: it holds the connections.
pub fn bucket(url: &Url) -> Result<Arc<dyn ObjectStore>, Error> {
    static OPEN: LazyLock<Mutex<HashMap<String, Arc<dyn ObjectStore>>>> =
        LazyLock::new(Mutex::default);
    let name = url.host_str().unwrap_or_default();
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(store) = open.get(name) {
        return Ok(Arc::clone(store));
    }
    // A commit that cannot be made now is tried again soon, and a person waits for a query: no
    // need for the three minutes that the library would try for.
    let retry = RetryConfig {
        max_retries: 6,
        retry_timeout: Duration::from_secs(30),
        ..RetryConfig::default()
    };
    let store = AmazonS3Builder::from_env()
        .with_bucket_name(name)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_retry(retry)
        .build()
        .map_err(|error| failed(url, &error))?;
    // A runtime of its own: queries, commits and the Delta library have several, some of them
    // short-lived, and a connection dies with the one that it was opened on.
    let store: Arc<dyn ObjectStore> = Arc::new(store);
    let store: Arc<dyn ObjectStore> =
        Arc::new(DeltaIOStorageBackend::new(store, IORuntime::default()));
    open.insert(name.to_string(), Arc::clone(&store));
    Ok(store)
}

/// Puts an object twice that may be put once. The store is fit for a lake if it refuses the second.
pub async fn check_conditional_put(url: &Url) -> Result<(), Error> {
    let store = bucket(url)?;
    let number: u64 = std::process::id() as u64
        ^ std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos() as u64);
    let name = format!("{}_probe-{number:016x}", url.path().trim_start_matches('/'));
    let path = ObjectPath::from(name);
    let create = || PutOptions::from(PutMode::Create);
    let first = store.put_opts(&path, "1".into(), create()).await;
    first.map_err(|error| failed(url, &error))?;
    let second = store.put_opts(&path, "2".into(), create()).await;
    // A leftover is an object of a byte that nothing reads.
    let _ = store.delete(&path).await;
    match second {
        Err(object_store::Error::AlreadyExists { .. }) => Ok(()),
        Err(error) => Err(failed(url, &error)),
        Ok(_) => Err(Error::Store {
            place: url.to_string(),
            detail: "the store ignores `If-None-Match: *`: two collectors would overwrite each other's commits. Use a store that honours conditional puts".to_string(),
        }),
    }
}

fn failed(url: &Url, error: &object_store::Error) -> Error {
    use std::error::Error as _;
    let mut detail = error.to_string();
    let mut cause = error.source();
    while let Some(behind) = cause {
        let text = behind.to_string();
        if !detail.contains(&text) {
            detail = format!("{detail}: {text}");
        }
        cause = behind.source();
    }
    if detail.contains("URL scheme is not allowed") {
        detail.push_str("; the endpoint speaks clear text: AWS_ALLOW_HTTP=true allows that");
    }
    Error::Store {
        place: url.to_string(),
        detail,
    }
}

/// Opens buckets for the Delta library.
struct Buckets;

impl ObjectStoreFactory for Buckets {
    fn parse_url_opts(
        &self,
        url: &Url,
        _config: &StorageConfig,
    ) -> DeltaResult<(ObjectStoreRef, ObjectPath)> {
        let store = bucket(url).map_err(|error| DeltaTableError::Generic(error.to_string()))?;
        let path = ObjectPath::from(url.path().trim_matches('/'));
        Ok((store, path))
    }
}

impl LogStoreFactory for Buckets {
    fn with_options(
        &self,
        prefixed_store: ObjectStoreRef,
        root_store: ObjectStoreRef,
        location: &Url,
        options: &StorageConfig,
    ) -> DeltaResult<Arc<dyn LogStore>> {
        Ok(default_logstore(
            prefixed_store,
            root_store,
            location,
            options,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Place, Error> {
        Place::parse(Path::new(text))
    }

    #[test]
    fn a_bucket_has_a_prefix_or_none() {
        let url = |text: &str| Url::parse(text).unwrap();
        let lake = parse("s3://gpu/lake").unwrap();
        assert_eq!(lake, Place::Bucket(url("s3://gpu/lake/")));
        assert_eq!(parse("s3://gpu/lake/").unwrap(), lake);
        assert_eq!(parse("s3://gpu").unwrap(), Place::Bucket(url("s3://gpu/")));
        assert_eq!(
            lake.table(Table::AllocEvents).unwrap(),
            url("s3://gpu/lake/alloc_events/")
        );
        assert_eq!(lake.spelled(), "s3://gpu/lake");
    }

    #[test]
    fn keys_in_a_url_are_refused_and_not_repeated() {
        let error = parse("s3://AKIA:hush@gpu/lake").unwrap_err().to_string();
        assert!(error.contains("AWS_SECRET_ACCESS_KEY"), "{error}");
        assert!(!error.contains("hush"), "{error}");
        for wrong in ["gs://gpu/lake", "s3:///lake", "s3://gpu/lake?region=x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_data_folder_can_point_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let here = Place::Folder(dir.path().to_path_buf());
        assert_eq!(Place::of_data(dir.path()).unwrap(), here);
        std::fs::write(dir.path().join(LAKE_FILE), "s3://gpu/lake\n").unwrap();
        assert_eq!(
            Place::of_data(dir.path()).unwrap(),
            parse("s3://gpu/lake").unwrap()
        );
    }
}
