//! Contexts: which device a call is for, and what ends with them.

use super::booking::device_of;
use super::change::What;
use super::process::Primary;
use super::{Desk, Key, Ledger, Turn};
use crate::probes::hooks::{Effect, MemoryKind, Space};

impl Ledger {
    pub(super) fn context(&mut self, turn: Turn<'_>, desk: &mut Desk<'_>) {
        let call = turn.call;
        if !turn.succeeded() {
            return;
        }
        let pid = call.tgid;
        match (call.hook().effect, call.out) {
            (Effect::ContextOfDevice { device_arg, .. }, Some(context)) => {
                let device = call.args[device_arg as usize] as i32;
                self.commit(pid, What::Context { context, device });
            }
            (Effect::RetainPrimary, Some(context)) => {
                let device = call.args[1] as i32;
                let process = &self.processes[&pid];
                if process.contexts.get(&context) != Some(&device) {
                    self.commit(pid, What::Context { context, device });
                }
                let known = self.processes[&pid].primaries.get(&device);
                let retains = known.map_or(0, |primary| primary.retains) + 1;
                let primary = Primary { context, retains };
                self.commit(pid, What::Primary { device, primary });
            }
            (Effect::ReleasePrimary, _) => {
                let device = call.args[0] as i32;
                // One that was retained before anybody looked may have more retains than that.
                let Some(primary) = self.processes[&pid].primaries.get(&device).copied() else {
                    return;
                };
                let retains = primary.retains.saturating_sub(1);
                let is_last = primary.retains == 1;
                let primary = Primary { retains, ..primary };
                self.commit(pid, What::Primary { device, primary });
                if is_last {
                    self.end_context(turn, primary.context, desk);
                }
            }
            (Effect::ResetPrimary, _) => self.reset(turn, Some(call.args[0] as i32), desk),
            (Effect::ResetDevice, _) if turn.stands_for_chain() => {
                let device = device_of(&self.processes[&pid], turn.ordered, call);
                self.reset(turn, device, desk);
            }
            (Effect::EndContext, _) => {
                let context = call.args[0];
                self.end_context(turn, context, desk);
                self.commit(pid, What::ContextEnded { context });
            }
            _ => {}
        }
    }

    fn reset(&mut self, turn: Turn<'_>, device: Option<i32>, desk: &mut Desk<'_>) {
        let pid = turn.call.tgid;
        let Some(device) = device else { return };
        let Some(primary) = self.processes[&pid].primaries.get(&device).copied() else {
            return;
        };
        // A reset does not release: who retained the context still has to.
        self.end_context(turn, primary.context, desk);
    }

    /// A context is gone, and what was allocated in it. Registered memory is the program's own;
    /// pools and created memory belong to the device.
    fn end_context(&mut self, turn: Turn<'_>, context: u64, desk: &mut Desk<'_>) {
        let call = turn.call;
        let process = &self.processes[&call.tgid];
        let Some(owner) = process.owner(context) else {
            return;
        };
        let mut ended: Vec<(u64, Key)> = process
            .live
            .iter()
            .filter(|((space, _), allocation)| {
                allocation.owner == owner
                    && allocation.seq < call.seq
                    && allocation.kind != MemoryKind::Pool
                    && *space != Space::Registered
                    && *space != Space::Reserved
            })
            .map(|(key, allocation)| (allocation.seq, *key))
            .collect();
        ended.sort_unstable_by_key(|(seq, _)| *seq);
        let api = call.hook().symbol;
        for (_, key) in ended {
            self.end_implicitly(call.tgid, key, api, call.seq, call.effect_ns(), desk);
        }
    }
}
