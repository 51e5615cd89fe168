//! Blocks of a framework's allocator: they lie inside memory that some driver call gave, and never
//! count as bytes of the card.
//!
//! The allocator reports every block from inside its lock, so its reports are the order and the
//! truth; the USDT probes add what was asked for. Where there are only probes (an allocator that
//! does not cache, a version that reports in a way nobody knows), they stand alone.

mod block;
mod heap;
mod sample;

use serde::{Deserialize, Serialize};
use vramscope_model::settings::Settings;

use super::change::What;
use super::rows::empty_row;
use super::{Desk, Key, Ledger, Turn};
use crate::probes::framework::{Told, What as ToldWhat};
use crate::probes::hooks::{MemoryKind, Space};
use crate::probes::record::Stack;
use crate::spool::rows::AllocRow;

pub use block::{Block, NewBlock};
pub use heap::{Heap, HeapChange, Segment, Totals, Use};
pub use sample::{Moment, Reason, Sampled};

/// Threads whose search for memory is followed at a time; of others retries are not counted.
const ATTEMPTS: usize = 4096;

/// What a thread has met since it last got a block.
///
/// PyTorch's allocator asks the driver, and if that has none gives back blocks of the request's
/// stream that are too large to be split, as many as the request needs, and asks again (only with
/// `max_split_size`), then gives back all it can and asks once more: only the last counts as a
/// retry (`num_alloc_retries`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// Calls for memory that failed.
    pub failures: u32,
    /// Given back since the first, in all and the least at once.
    pub freed_bytes: u64,
    pub least_freed: u64,
    /// The stream of all that was given back, if it is one.
    pub freed_stream: Option<i64>,
    /// The card's free bytes as the thread was told.
    pub device_free: Option<u64>,
}

impl Attempt {
    /// Whether the block that was got at last took a retry.
    fn was_retried(&self, bytes: u64, stream: Option<i64>, max_split: Option<u64>) -> bool {
        if self.failures == 0 {
            return false;
        }
        let Some(max_split) = max_split else {
            return true;
        };
        // Enough from large blocks alone: that was the middle step.
        let was_middle_step = self.failures == 1
            && self.freed_bytes >= bytes.max(max_split)
            && self.least_freed >= max_split
            && self.freed_stream == stream;
        !was_middle_step
    }
}

impl Ledger {
    /// Books one event; its rows go to the desk.
    pub fn framework(&mut self, told: &Told, stack: Stack, desk: &mut Desk<'_>) {
        let process = self.meet(told.tgid, told.at_ns, None);
        process.last_seq = process.last_seq.max(told.seq);
        if process.heap.is_none() {
            self.commit(told.tgid, What::Heap(HeapChange::Found));
        }
        match told.what {
            ToldWhat::Report if told.bytes > 0 => self.handed_out(told, stack, desk),
            ToldWhat::Report if told.bytes < 0 => self.taken_back(told, stack, desk),
            // Nothing of nothing.
            ToldWhat::Report => {}
            ToldWhat::Rest if self.completes(told) => {}
            ToldWhat::Rest | ToldWhat::Malloc => self.handed_out(told, stack, desk),
            ToldWhat::Free => self.announced_free(told, stack, desk),
            ToldWhat::Oom => self.out_of_memory(told, stack, desk),
        }
    }

    /// Takes what was asked for a block whose row is written already.
    fn completes(&mut self, told: &Told) -> bool {
        let heap = self.processes[&told.tgid].heap.as_ref();
        let is_here = heap
            .and_then(|heap| heap.blocks().get(&told.address))
            .is_some_and(|block| block.seq == told.seq);
        if let (true, Some((requested, stream))) = (is_here, told.asked) {
            let change = HeapChange::Completed {
                address: told.address,
                requested,
                stream,
            };
            self.commit(told.tgid, What::Heap(change));
        }
        is_here
    }

    fn told_row(&self, told: &Told, stack: Stack, desk: &Desk<'_>) -> AllocRow {
        let process = &self.processes[&told.tgid];
        let at_ns = desk.clock.from_monotonic(told.at_ns);
        let segment = process
            .heap
            .as_ref()
            .and_then(|heap| heap.segment_at(told.address));
        AllocRow {
            ts_ns: at_ns,
            ts_enter_ns: Some(at_ns),
            tid: Some(told.tid),
            device: told.device,
            gpu_uuid: (desk.card)(process, told.device),
            layer: "framework",
            source: "usdt",
            api: told.api(),
            memory_kind: Some(MemoryKind::FrameworkBlock.name()),
            address: Some(told.address as i64),
            stack_id: stack.id,
            stack_quality: Some(stack.quality.name()),
            seq: told.seq as i64,
            segment_address: segment.map(|segment| segment.address as i64),
            allocator_allocated_bytes: told.totals.map(|(allocated, _)| allocated as i64),
            allocator_reserved_bytes: told.totals.map(|(_, reserved)| reserved as i64),
            ..empty_row(process)
        }
    }

    fn handed_out(&mut self, told: &Told, stack: Stack, desk: &mut Desk<'_>) {
        let pid = told.tgid;
        let is_reported = told.what == ToldWhat::Report;
        let bytes = if is_reported {
            Some(told.bytes as u64)
        } else {
            self.uncached_bytes(pid, told.address)
        };
        let mut row = self.told_row(told, stack, desk);
        row.op = "alloc";
        row.result = Some(0);
        row.bytes = bytes.map(|bytes| bytes as i64);
        row.requested_bytes = told.asked.map(|(requested, _)| requested as i64);
        row.stream = told.asked.map(|(_, stream)| stream);
        // Memory cannot be handed out twice: the end of what was here has not been seen.
        let overlaps = match (&self.processes[&pid].heap, bytes) {
            (Some(heap), Some(bytes)) => heap.blocks_in(told.address, bytes),
            _ => Vec::new(),
        };
        for address in overlaps {
            self.end_block(pid, address, ("address_reuse", told.seq, told.at_ns), desk);
        }
        let has_room = self.live < self.limit;
        if let (Some(bytes @ 1..), true, true) = (bytes, has_room, told.address != 0) {
            row.counted = true;
            let block = Block::new(NewBlock {
                seq: told.seq,
                bytes,
                effect_ns: told.at_ns,
                asked: told.asked,
                stack_id: stack.id,
                device: told.device,
                reported: is_reported,
            });
            let address = told.address;
            self.commit(pid, What::Heap(HeapChange::Born { address, block }));
        } else if !has_room {
            self.live_full += 1;
        }
        desk.rows.push(row);
        self.take_totals(told);
        self.got_some(told, bytes.unwrap_or(0));
    }

    /// A block that no report told of is the whole of what the driver gave at its address.
    fn uncached_bytes(&self, pid: u32, address: u64) -> Option<u64> {
        let heap = self.processes[&pid].heap.as_ref()?;
        let segment = heap.segment_at(address)?;
        (segment.address == address && !segment.is_expandable).then_some(segment.bytes)
    }

    fn taken_back(&mut self, told: &Told, stack: Stack, desk: &mut Desk<'_>) {
        self.end_told(told, stack, Some(told.bytes.unsigned_abs()), desk);
        self.take_totals(told);
    }

    /// A probe announces what a report will tell of, if this allocator reports.
    fn announced_free(&mut self, told: &Told, stack: Stack, desk: &mut Desk<'_>) {
        let Some(heap) = &self.processes[&told.tgid].heap else {
            return;
        };
        let will_be_reported = match heap.blocks().get(&told.address) {
            Some(block) => block.is_reported(),
            None => heap.reports,
        };
        if !will_be_reported {
            self.end_told(told, stack, None, desk);
        }
    }

    /// The row of a block's end, and the end itself.
    fn end_told(&mut self, told: &Told, stack: Stack, bytes: Option<u64>, desk: &mut Desk<'_>) {
        let pid = told.tgid;
        let mut row = self.told_row(told, stack, desk);
        row.op = "free";
        row.result = Some(0);
        row.bytes = bytes.map(|bytes| bytes as i64);
        let heap = self.processes[&pid].heap.as_ref();
        let block = heap
            .and_then(|heap| heap.blocks().get(&told.address))
            .filter(|block| block.seq < told.seq)
            .copied();
        if let Some(block) = block {
            row.counted = true;
            row.bytes = Some(block.bytes as i64);
            row.requested_bytes = block.requested().map(|requested| requested as i64);
            row.stream = block.stream();
            row.device = block.device();
            row.alloc_seq = Some(block.seq as i64);
            row.alloc_stack_id = block.stack_id();
            row.lifetime_ns = Some(told.at_ns.saturating_sub(block.effect_ns) as i64);
        }
        desk.rows.push(row);
        if block.is_some() {
            let address = told.address;
            self.commit(pid, What::Heap(HeapChange::Gone { address }));
        }
    }

    fn out_of_memory(&mut self, told: &Told, stack: Stack, desk: &mut Desk<'_>) {
        let pid = told.tgid;
        let attempt = self.processes[&pid].attempts.get(&told.tid).copied();
        let mut row = self.told_row(told, stack, desk);
        row.op = "oom";
        row.address = None;
        row.segment_address = None;
        row.requested_bytes = Some(told.bytes);
        row.bytes = Some(0);
        let free = attempt.and_then(|attempt| attempt.device_free);
        row.device_free_bytes = free.map(|free| free as i64);
        desk.rows.push(row);
        let place = block::place(told.device);
        self.commit(
            pid,
            What::Failed {
                place,
                begins: true,
            },
        );
        self.take_totals(told);
        // One refusal alone: a graph is being captured, and then nothing is given back. None at
        // all: the program's own limit refused, before any driver was asked.
        let failures = attempt.map_or(0, |attempt| attempt.failures);
        if let (Some(device), true) = (told.device, failures != 1) {
            self.commit(pid, What::Heap(HeapChange::Retried { device }));
        }
        let device = told.device;
        self.commit(pid, What::Heap(HeapChange::Oom { device }));
        if attempt.is_some() {
            self.settle_attempt(pid, told.tid, None);
        }
    }

    fn take_totals(&mut self, told: &Told) {
        if let (Some((allocated, reserved)), Some(device)) = (told.totals, told.device) {
            let change = HeapChange::Reported {
                device,
                allocated,
                reserved,
            };
            self.commit(told.tgid, What::Heap(change));
        }
    }

    /// A thread got its block.
    fn got_some(&mut self, told: &Told, bytes: u64) {
        let process = &self.processes[&told.tgid];
        let Some(attempt) = process.attempts.get(&told.tid).copied() else {
            return;
        };
        let settings = process.program.allocator_settings.as_deref();
        let max_split = settings.and_then(|text| Settings::parse(text).settings.max_split_size);
        let stream = told.asked.map(|(_, stream)| stream);
        let was_retried = attempt.was_retried(bytes, stream, max_split);
        if let (true, Some(device)) = (was_retried, told.device) {
            self.commit(told.tgid, What::Heap(HeapChange::Retried { device }));
        }
        self.settle_attempt(told.tgid, told.tid, None);
    }

    fn settle_attempt(&mut self, pid: u32, tid: u32, attempt: Option<Attempt>) {
        self.commit(pid, What::Attempt { tid, attempt });
    }

    /// The driver had no memory for a thread.
    pub(super) fn had_none(&mut self, pid: u32, tid: u32) {
        let attempts = &self.processes[&pid].attempts;
        if attempts.len() >= ATTEMPTS && !attempts.contains_key(&tid) {
            return;
        }
        let mut attempt = attempts.get(&tid).copied().unwrap_or_default();
        attempt.failures += 1;
        self.settle_attempt(pid, tid, Some(attempt));
    }

    /// A thread is giving memory back to the driver.
    pub(super) fn gives_back(&mut self, pid: u32, tid: u32, address: u64, bytes: u64) {
        let process = &self.processes[&pid];
        let attempt = process.attempts.get(&tid);
        let Some(mut attempt) = attempt.filter(|attempt| attempt.failures > 0).copied() else {
            return;
        };
        let heap = process.heap.as_ref();
        let segment = heap.and_then(|heap| heap.segment_at(address));
        let stream = segment.and_then(|segment| segment.used?.stream);
        if attempt.freed_bytes == 0 {
            (attempt.least_freed, attempt.freed_stream) = (bytes, stream);
        }
        attempt.least_freed = attempt.least_freed.min(bytes);
        if attempt.freed_stream != stream {
            attempt.freed_stream = None;
        }
        attempt.freed_bytes += bytes;
        self.settle_attempt(pid, tid, Some(attempt));
    }

    /// free bytes out, all bytes out.
    pub(super) fn asked_memory(&mut self, turn: Turn<'_>) {
        let (pid, tid) = (turn.call.tgid, turn.call.tid);
        let attempts = &self.processes[&pid].attempts;
        let has_room = attempts.len() < ATTEMPTS || attempts.contains_key(&tid);
        let free = turn.call.out.filter(|_| turn.succeeded() && has_room);
        let Some(mut free) = free else { return };
        if turn.call.hook().narrow {
            free = u64::from(free as u32);
        }
        let mut attempt = attempts.get(&tid).copied().unwrap_or_default();
        attempt.device_free = Some(free);
        self.settle_attempt(pid, tid, Some(attempt));
    }

    /// Blocks cannot outlive the memory they lie in: their ends were not seen.
    pub(super) fn end_blocks_in(
        &mut self,
        pid: u32,
        (space, address): Key,
        bytes: u64,
        why: (&'static str, u64, u64),
        desk: &mut Desk<'_>,
    ) {
        let holds_blocks = matches!(space, Space::Device | Space::Mapped);
        let blocks = match &self.processes[&pid].heap {
            Some(heap) if holds_blocks => heap.blocks_in(address, bytes),
            _ => return,
        };
        for block in blocks {
            self.end_block(pid, block, why, desk);
        }
    }

    /// Ends blocks of a process that is gone, the youngest first, at most `limit`; how many.
    pub(super) fn end_blocks(
        &mut self,
        pid: u32,
        api: &'static str,
        seq: u64,
        at_ns: u64,
        limit: usize,
        desk: &mut Desk<'_>,
    ) -> usize {
        let Some(heap) = self.processes.get(&pid).and_then(|p| p.heap.as_ref()) else {
            return 0;
        };
        let mut blocks: Vec<(u64, u64)> = heap
            .blocks()
            .iter()
            .take(limit)
            .map(|(address, block)| (block.seq, *address))
            .collect();
        blocks.sort_unstable();
        for (_, address) in &blocks {
            self.end_block(pid, *address, (api, seq, at_ns), desk);
        }
        blocks.len()
    }

    fn end_block(
        &mut self,
        pid: u32,
        address: u64,
        (api, seq, at_ns): (&'static str, u64, u64),
        desk: &mut Desk<'_>,
    ) {
        let process = &self.processes[&pid];
        let Some(heap) = &process.heap else { return };
        let Some(block) = heap.blocks().get(&address) else {
            return;
        };
        let segment = heap.segment_at(address);
        desk.rows.push(AllocRow {
            ts_ns: desk.clock.from_monotonic(at_ns),
            gpu_uuid: (desk.card)(process, block.device()),
            device: block.device(),
            stream: block.stream(),
            layer: "framework",
            source: "agent",
            api,
            op: "free",
            memory_kind: Some(MemoryKind::FrameworkBlock.name()),
            address: Some(address as i64),
            bytes: Some(block.bytes as i64),
            requested_bytes: block.requested().map(|requested| requested as i64),
            counted: true,
            implicit: true,
            alloc_seq: Some(block.seq as i64),
            alloc_stack_id: block.stack_id(),
            lifetime_ns: Some(at_ns.saturating_sub(block.effect_ns) as i64),
            seq: seq as i64,
            segment_address: segment.map(|segment| segment.address as i64),
            ..empty_row(process)
        });
        self.commit(pid, What::Heap(HeapChange::Gone { address }));
    }
}
