//! The SQL of vramscope. Every door (the `vramscope` command, a collector's SQL doors, alerts,
//! reports) answers through this crate, so that a question has one answer wherever it is asked.
//!
//! - [`folder`]: opens a data folder, and hands out sessions that each see one consistent state.
//! - [`session`]: DataFusion sessions with bounds on memory, time and rows; the read-only check.
//! - [`views`]: the views of `sql/*.sql`, their documentation, and how to register them.
//! - [`functions`]: the functions that SQL lacks, over the rules of `vramscope-model`.
//! - [`leaks`]: the leak detectors as table functions, over `vramscope-leaks`.
//! - [`lake`]: opens and refreshes Delta tables. [`trace`]: opens folders of plain Parquet files.
//! - [`engine`]: where a query is computed: in this process, or by workers on several machines.
//! - [`store`]: where tables lie: in a folder, or in a bucket of an object store.
//! - [`import`]: rows of PyTorch memory snapshots.
//! - [`reference`]: the SQL reference, made from the views' headers and the tables' columns.
//! - [`describe`], [`statements`], [`near`]: what an interactive client needs.
//!
//! The shortest way for a server:
//!
//! ```no_run
//! # async fn answer() -> Result<(), vramscope_queries::Error> {
//! use vramscope_queries::{folder::Folder, session::{Limits, Options}};
//!
//! let folder = Folder::open("/var/lib/vramscope", Options::default()).await?;
//! let session = folder.session().await?; // per query: sees the newest commit of every table
//! let rows = vramscope_queries::session::query(&session, "SELECT * FROM tetrahedron", Limits::default()).await?;
//! # Ok(()) }
//! ```

pub mod cancel;
pub mod complexity;
pub mod describe;
pub mod engine;
pub mod error;
pub mod folder;
pub mod functions;
pub mod growth;
pub mod import;
pub mod lake;
pub mod leaks;
pub mod near;
mod projections;
pub mod quality;
pub mod reference;
mod rules;
pub mod session;
mod sizes;
pub mod statements;
pub mod store;
pub mod texts;
pub mod trace;
pub mod views;
mod windows;
mod yielding;

pub use error::Error;
