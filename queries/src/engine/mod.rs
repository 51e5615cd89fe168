//! Where a query is computed: in this process, or by workers on several machines.
//!
//! The distributed engine is `datafusion-distributed`: a plan is cut into stages, workers run their
//! tasks of a stage over a part of the files each, and what passes between stages goes from worker
//! to worker. Functions, views and table functions are the same in both: a question has one
//! answer.
//!
//! A worker has the tables of one lake and nothing else ([`crate::lake::stores`]): a plan names
//! files by table and path below it, so workers may reach the lake by other paths or keys than
//! whoever asks, and a plan that names anything else is refused. It reads only.
//!
//! Invariants:
//! - a plan that the engine cannot cut runs where it was asked for; that is still the same answer.
//!   A plan that cannot be sent fails, and the error says so: nothing is silently computed over
//!   fewer rows;
//! - workers bound memory as a session of this process does, and spill as it does.

mod codec;
mod net;
mod nulls;
mod sorts;

use std::sync::Arc;

use async_trait::async_trait;
use datafusion::error::Result;
use datafusion::execution::{SessionState, SessionStateBuilder};
use datafusion::prelude::SessionContext;
use datafusion_distributed::{
    DistributedExt, SessionStateBuilderExt, Worker, WorkerQueryContext, WorkerResolver,
    WorkerSessionBuilder,
};
use url::Url;

pub use net::Identity;

use crate::lake::stores::Tables;
use crate::rules::rule;
use crate::session::{self, Options};
use crate::store::Place;
use crate::{Error, functions};

/// Bytes of Parquet files for each partition of a task. A query over less than this times the
/// partitions of a worker runs on one.
const BYTES_PER_PARTITION: usize = 16 << 20;

/// What computes.
#[derive(Debug, Clone, Default)]
pub enum Engine {
    /// This process.
    #[default]
    Local,
    /// Workers.
    Distributed(Cluster),
}

/// Workers, and how to reach them.
#[derive(Debug, Clone)]
pub struct Cluster {
    workers: Vec<Url>,
    net: net::Net,
    bytes_per_partition: usize,
}

impl Cluster {
    /// The workers at these addresses (`http://HOST:PORT`, or `https://` with an identity).
    pub fn new(workers: &[String], identity: Option<Identity>) -> std::result::Result<Self, Error> {
        if workers.is_empty() {
            return Err(Error::Workers(
                "the distributed engine needs workers; give --workers URL[,URL…], each a `vramscope-collector executor`".to_string(),
            ));
        }
        let net = net::Net::new(identity)?;
        let workers = workers
            .iter()
            .map(|worker| net.check(worker))
            .collect::<std::result::Result<Vec<Url>, Error>>()?;
        Ok(Cluster {
            workers,
            net,
            bytes_per_partition: BYTES_PER_PARTITION,
        })
    }

    /// Cuts even small scans, so that tests have something to see.
    pub fn cutting_finely(mut self) -> Self {
        self.bytes_per_partition = 1;
        self
    }
}

impl WorkerResolver for Cluster {
    fn get_urls(&self) -> Result<Vec<Url>> {
        Ok(self.workers.clone())
    }
}

impl Engine {
    /// A session's state, made to plan for this engine.
    pub(crate) fn plan_with(&self, session: SessionContext) -> Result<SessionContext> {
        let Engine::Distributed(cluster) = self else {
            return Ok(session);
        };
        let state = SessionStateBuilder::new_from_existing(session.state())
            .with_optimizer_rule(Arc::new(nulls::KeepIgnoreNulls))
            .with_physical_optimizer_rule(rule("whole_sorts", sorts::whole_sorts))
            .with_distributed_worker_resolver(cluster.clone())
            .with_distributed_channel_resolver(cluster.net.clone())
            .with_distributed_planner()
            .with_distributed_user_codec(codec::OurCodec)
            .with_distributed_file_scan_config_bytes_per_partition(cluster.bytes_per_partition)?
            .build();
        Ok(SessionContext::new_with_state(state))
    }
}

/// How a worker's sessions are made.
#[derive(Clone)]
struct Sessions {
    net: net::Net,
}

#[async_trait]
impl WorkerSessionBuilder for Sessions {
    async fn build_session_state(&self, context: WorkerQueryContext) -> Result<SessionState> {
        let state = context
            .builder
            .with_distributed_channel_resolver(self.net.clone())
            .with_distributed_user_codec(codec::OurCodec)
            .build();
        // Registered by name, as in any session: a plan names its functions.
        let pool = Arc::clone(&state.runtime_env().memory_pool);
        let state = functions::book(SessionStateBuilder::new_from_existing(state), &pool);
        let session = SessionContext::new_with_state(state.build());
        functions::register(&session);
        Ok(session.state())
    }
}

/// A worker over the tables of a place. It is a service for a gRPC server
/// ([`Worker::into_worker_server`]).
pub fn worker(
    place: &Place,
    options: &Options,
    identity: Option<Identity>,
) -> std::result::Result<Worker, Error> {
    let tables = Arc::new(Tables::of(place)?);
    let runtime = session::runtime_over(options, tables)?;
    let sessions = Sessions {
        net: net::Net::new(identity)?,
    };
    let worker = Worker::from_session_builder(sessions)
        .with_runtime_env(runtime)
        .with_version(env!("CARGO_PKG_VERSION"));
    Ok(worker)
}
