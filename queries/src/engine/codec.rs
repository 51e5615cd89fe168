//! Our own operators on their way to a worker. (Everything else of a plan the engine knows how to
//! send.)

use std::sync::Arc;

use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::physical_plan::{PhysicalExtensionCodec, PhysicalProtoConverterExtension};

use crate::leaks::LeakExec;
use crate::windows::BookedExec;

/// What messages of ours begin with: another codec's must not be taken for one.
const LEAKS: &[u8] = b"vramscope-leaks-1 ";
const BOOKED: &[u8] = b"vramscope-booked-1 ";

/// Sends [`LeakExec`] and [`BookedExec`].
#[derive(Debug)]
pub struct OurCodec;

impl PhysicalExtensionCodec for OurCodec {
    fn try_encode(
        &self,
        node: Arc<dyn ExecutionPlan>,
        bytes: &mut Vec<u8>,
        _converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<()> {
        if let Some(leaks) = node.downcast_ref::<LeakExec>() {
            bytes.extend_from_slice(LEAKS);
            bytes.extend_from_slice(leaks.to_text().as_bytes());
        } else if node.is::<BookedExec>() {
            bytes.extend_from_slice(BOOKED);
        } else {
            return Err(DataFusionError::NotImplemented(format!(
                "{} cannot be sent to a worker",
                node.name()
            )));
        }
        Ok(())
    }

    fn try_decode(
        &self,
        bytes: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        _context: &TaskContext,
        _converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let wrong = || DataFusionError::Internal("not an operator of vramscope".into());
        let [input] = inputs else {
            return Err(wrong());
        };
        let input = Arc::clone(input);
        if bytes == BOOKED {
            return Ok(Arc::new(BookedExec::new(input)));
        }
        let text = bytes.strip_prefix(LEAKS).ok_or_else(wrong)?;
        let text = std::str::from_utf8(text).map_err(|_| wrong())?;
        Ok(Arc::new(LeakExec::from_text(text, input)?))
    }
}
