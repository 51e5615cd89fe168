//! The leak detectors' operator on its way to a worker. (Everything else of a plan the engine knows
//! how to send.)

use std::sync::Arc;

use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::physical_plan::{PhysicalExtensionCodec, PhysicalProtoConverterExtension};

use crate::leaks::LeakExec;

/// What a message of ours begins with: another codec's must not be taken for one.
const MAGIC: &[u8] = b"vramscope-leaks-1 ";

/// Sends [`LeakExec`].
#[derive(Debug)]
pub struct LeakCodec;

impl PhysicalExtensionCodec for LeakCodec {
    fn try_encode(
        &self,
        node: Arc<dyn ExecutionPlan>,
        bytes: &mut Vec<u8>,
        _converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<()> {
        let leaks = node.downcast_ref::<LeakExec>().ok_or_else(|| {
            DataFusionError::NotImplemented(format!("{} cannot be sent to a worker", node.name()))
        })?;
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(leaks.to_text().as_bytes());
        Ok(())
    }

    fn try_decode(
        &self,
        bytes: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        _context: &TaskContext,
        _converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let wrong = || DataFusionError::Internal("not an operator of the leak detectors".into());
        let text = bytes.strip_prefix(MAGIC).ok_or_else(wrong)?;
        let text = std::str::from_utf8(text).map_err(|_| wrong())?;
        let [input] = inputs else {
            return Err(wrong());
        };
        Ok(Arc::new(LeakExec::from_text(text, Arc::clone(input))?))
    }
}
