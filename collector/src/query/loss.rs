//! What was lost in everything recorded, kept for a while: every answer says it, and asking anew
//! for each would cost more than many of them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use futures::TryStreamExt;
use tokio::sync::Mutex;
use tokio::time::Instant;
use vramscope_queries::Error;
use vramscope_queries::quality::{LOSS_QUERY, Loss};
use vramscope_queries::session::{self, Limits};

use super::pool::Wait;
use super::{Door, Gate, Question};
use crate::access::{Caller, Role};

/// How long an answer is used.
const FRESH: Duration = Duration::from_secs(10);
/// How long is waited for one; until then it is not known.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most sets of namespaces that are kept apart.
const KEPT: usize = 64;

type Namespaces = Option<Arc<[String]>>;
type Known = Arc<Mutex<Option<(Instant, Option<Loss>)>>>;

#[derive(Default)]
pub(super) struct Losses(Mutex<HashMap<Namespaces, Known>>);

impl Losses {
    /// For what a caller sees.
    pub async fn get(&self, gate: &Gate, caller: Option<&Caller>) -> Option<Loss> {
        let namespaces = caller.and_then(|caller| caller.namespaces.clone());
        let known = {
            let mut all = self.0.lock().await;
            if all.len() >= KEPT && !all.contains_key(&namespaces) {
                all.clear();
            }
            Arc::clone(all.entry(namespaces.clone()).or_default())
        };
        // Held while it is asked: others who want the same wait for the same answer.
        let mut known = known.lock().await;
        if let Some((asked, loss)) = *known
            && asked.elapsed() < FRESH
        {
            return loss;
        }
        let loss = match ask(gate, namespaces).await {
            Ok(loss) => Some(loss),
            Err(error) => {
                tracing::warn!("whether events were lost is not known: {error}");
                None
            }
        };
        *known = Some((Instant::now(), loss));
        loss
    }
}

async fn ask(gate: &Gate, namespaces: Namespaces) -> Result<Loss, Error> {
    let caller = Caller {
        name: Arc::from("collector"),
        role: Role::Read,
        namespaces,
    };
    let question = Question::new(caller, Door::Http, LOSS_QUERY);
    let (_, never) = tokio::sync::watch::channel(false);
    let wait = Wait::new(&question.caller.name, PATIENCE, never);
    let of = gate.clone();
    let work = async move {
        let memory = of.share();
        let session = of.session_with(&question.caller, &memory).await?;
        let limits = Limits {
            time: None,
            rows: None,
        };
        let rows = session::query(&session, LOSS_QUERY, limits).await?;
        let batches: Vec<_> = rows.try_collect().await?;
        let row = batches.iter().find(|batch| batch.num_rows() == 1);
        let mut loss = [0; 4];
        for (index, number) in loss.iter_mut().enumerate() {
            let column = row.and_then(|row| row.column(index).as_primitive_opt::<Int64Type>());
            *number = column.ok_or_else(no_numbers)?.value(0);
        }
        Ok(Loss::from_row(loss))
    };
    gate.0.lane.run(wait, work).await
}

fn no_numbers() -> Error {
    let text = "the question about losses gave no numbers".to_string();
    Error::Query(datafusion::error::DataFusionError::Internal(text))
}
