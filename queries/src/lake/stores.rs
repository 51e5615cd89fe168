//! The tables of a lake as object stores, one per table, that can only be read.
//!
//! Their URLs are `vramscope://TABLE`: the same for whoever plans and for whoever reads, wherever
//! the lake lies for each.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use datafusion::error::{DataFusionError, Result as QueryResult};
use datafusion::execution::object_store::ObjectStoreRegistry;
use datafusion::execution::runtime_env::RuntimeEnv;
use deltalake::logstore::object_store as os;
use futures::StreamExt;
use futures::stream::BoxStream;
use os::local::LocalFileSystem;
use os::path::Path;
use os::prefix::PrefixStore;
use os::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use url::Url;
use vramscope_wire::Table;

use crate::Error;
use crate::store::{self, Place};

const SCHEME: &str = "vramscope";

/// The URL of a table's store.
pub fn url(table: Table) -> Url {
    // Names of tables are letters and underscores.
    Url::parse(&format!("{SCHEME}://{}", table.name())).expect("a URL")
}

/// The stores of a place's tables; as a registry, the only ones that a runtime has.
#[derive(Debug)]
pub struct Tables(BTreeMap<Url, Arc<dyn ObjectStore>>);

impl Tables {
    /// Those of a place. Tables that are not there yet are among them.
    pub fn of(place: &Place) -> std::result::Result<Tables, Error> {
        let mut stores: BTreeMap<Url, Arc<dyn ObjectStore>> = BTreeMap::new();
        for table in Table::ALL {
            let (store, root): (Arc<dyn ObjectStore>, Path) = match place {
                Place::Folder(dir) => {
                    let dir = std::path::absolute(dir.join(table.name()));
                    let dir = dir.map_err(|cause| Error::Io {
                        path: place.table_path(table),
                        cause,
                    })?;
                    let root = Path::from_absolute_path(&dir).map_err(|error| Error::Store {
                        place: dir.display().to_string(),
                        detail: error.to_string(),
                    })?;
                    (Arc::new(LocalFileSystem::new()), root)
                }
                Place::Bucket(bucket) => {
                    let root = place.table(table)?;
                    let root = Path::from(root.path().trim_matches('/'));
                    (store::bucket(bucket)?, root)
                }
            };
            let store = ReadOnly(PrefixStore::new(store, root));
            stores.insert(url(table), Arc::new(store));
        }
        Ok(Tables(stores))
    }

    /// Registers them beside the other stores of a runtime.
    pub fn register_in(self, runtime: &RuntimeEnv) {
        for (url, store) in self.0 {
            runtime.register_object_store(&url, store);
        }
    }
}

impl ObjectStoreRegistry for Tables {
    /// Ignored: a worker has its lake and nothing else.
    fn register_store(
        &self,
        _url: &Url,
        _store: Arc<dyn ObjectStore>,
    ) -> Option<Arc<dyn ObjectStore>> {
        None
    }

    fn get_store(&self, wanted: &Url) -> QueryResult<Arc<dyn ObjectStore>> {
        // Of a file's URL only the table counts; some spell it with a `/` behind.
        let table = match wanted.scheme() {
            SCHEME => wanted.host_str().and_then(Table::by_name),
            _ => None,
        };
        let store = table.and_then(|table| self.0.get(&url(table)));
        store.map(Arc::clone).ok_or_else(|| {
            DataFusionError::Execution(format!(
                "{wanted} is not a table of the lake; a worker reads nothing else"
            ))
        })
    }
}

/// A store that refuses to be changed.
#[derive(Debug)]
struct ReadOnly(PrefixStore<Arc<dyn ObjectStore>>);

fn refused<T>() -> Result<T> {
    Err(os::Error::NotSupported {
        source: "queries only read".into(),
    })
}

impl fmt::Display for ReadOnly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadOnly({})", self.0)
    }
}

#[async_trait]
impl ObjectStore for ReadOnly {
    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        refused()
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        refused()
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.0.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.0.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        locations.map(|_| refused()).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        refused()
    }
}

#[cfg(test)]
mod tests {
    use datafusion::execution::object_store::ObjectStoreUrl;
    use deltalake::logstore::object_store::ObjectStoreExt;

    use super::*;

    #[tokio::test]
    async fn a_worker_reads_its_tables_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("stacks")).unwrap();
        std::fs::write(dir.path().join("stacks/1.parquet"), "x").unwrap();
        std::fs::write(dir.path().join("secret"), "x").unwrap();
        let tables = Tables::of(&Place::parse(dir.path()).unwrap()).unwrap();
        let stacks = tables.get_store(&url(Table::Stacks)).unwrap();
        // As DataFusion asks.
        let object_store = ObjectStoreUrl::parse(url(Table::Stacks)).unwrap();
        assert!(tables.get_store(object_store.as_ref()).is_ok());
        let file = stacks.get(&Path::from("1.parquet")).await.unwrap();
        assert_eq!(file.bytes().await.unwrap(), "x");
        for elsewhere in ["../secret", "/etc/passwd", "etc/passwd"] {
            assert!(stacks.get(&Path::from(elsewhere)).await.is_err());
        }
        let put = stacks.put(&Path::from("2.parquet"), "x".into()).await;
        assert!(put.is_err() && !dir.path().join("stacks/2.parquet").exists());
        assert!(stacks.delete(&Path::from("1.parquet")).await.is_err());
        assert!(dir.path().join("stacks/1.parquet").exists());
        for other in ["file:///", "s3://bucket/", "vramscope://secret"] {
            assert!(
                tables.get_store(&Url::parse(other).unwrap()).is_err(),
                "{other}"
            );
        }
    }
}
