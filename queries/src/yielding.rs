//! Plans that can be stopped: joins, which make many rows of few, give way now and then.
//!
//! The engine lets go of a processor, and notices that a query was cancelled, where rows are read
//! and where tasks meet. A join makes as many rows as it likes of those it has read: `count(*)` over
//! the pairs of two large tables would hold a thread for hours after its client has gone, and the
//! next query would find none. [`yield_after_joins`] counts the batches that come out of joins, too.

use std::sync::Arc;

use datafusion::common::tree_node::Transformed;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::union::{InterleaveExec, UnionExec};

use crate::rules::Changed;

/// Puts a counter on top of every join.
pub(crate) fn yield_after_joins(node: Arc<dyn ExecutionPlan>) -> Changed {
    // A union passes on what it is given.
    let joins =
        node.children().len() > 1 && !node.is::<UnionExec>() && !node.is::<InterleaveExec>();
    Ok(match joins {
        true => Transformed::yes(Arc::new(CooperativeExec::new(node))),
        false => Transformed::no(node),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::StreamExt;

    use crate::session::{Options, session};

    /// One thread for all: who never gives way is never cancelled, and nobody else gets on.
    #[test]
    fn pairs_without_end_can_be_stopped() {
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(async {
                for sql in [
                    "SELECT count(*) FROM range(0, 100000) a, range(0, 1000000000) b
                     WHERE a.value * b.value % 7 = 3",
                    "SELECT count(*) FROM range(0, 100000) a
                     JOIN range(0, 1000000000) b ON a.value % 2 = b.value % 2",
                ] {
                    let context = session(&Options::default()).unwrap();
                    let mut state = context.state();
                    state.config_mut().options_mut().execution.target_partitions = 1;
                    let plan = state.create_logical_plan(sql).await.unwrap();
                    let plan = state.create_physical_plan(&plan).await.unwrap();
                    let mut rows = plan.execute(0, context.task_ctx()).unwrap();
                    let asked = tokio::time::timeout(Duration::from_millis(100), rows.next());
                    assert!(asked.await.is_err(), "{sql}");
                }
            });
            done.send(()).unwrap();
        });
        is_done
            .recv_timeout(Duration::from_secs(120))
            .expect("a query held its thread");
    }
}
