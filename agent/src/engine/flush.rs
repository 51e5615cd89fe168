//! The end of a stretch: what was lost is counted, and what is there is written.

use std::time::Instant;

use tracing::{error, warn};
use vramscope_ebpf_abi::Loss;

use super::{Engine, python_lost};
use crate::output::Checkpoint;
use crate::spool::room;

impl Engine {
    pub(super) fn take_losses(&mut self) {
        match self.channel.lost() {
            Ok(counts) => {
                for (index, cause) in Loss::ALL.iter().enumerate() {
                    let new = counts[index].saturating_sub(self.lost_reported[index]);
                    if new > 0 {
                        self.window.counts.lost[index] += new;
                        if *cause == Loss::StackNotCopied {
                            self.totals.stacks_not_copied += new;
                        } else {
                            *self.totals.lost.entry(cause.name()).or_default() += new;
                        }
                    }
                }
                self.lost_reported = counts;
            }
            Err(error) => error!("failed to read the loss counters: {error:#}"),
        }
        let (live_full, stacks_full) = self.ledger.overflows();
        let new = (live_full - self.overflows.0, stacks_full - self.overflows.1);
        self.overflows = (live_full, stacks_full);
        self.window.counts.live_full += new.0;
        self.window.counts.stacks_full += new.1;
        for (cause, count) in [("live_full", new.0), ("stacks_full", new.1)] {
            if count > 0 {
                *self.totals.lost.entry(cause).or_default() += count;
            }
        }
        if self.undecodable > 0 {
            self.window.counts.undecodable += self.undecodable;
            *self.totals.lost.entry("undecodable").or_default() += self.undecodable;
            self.undecodable = 0;
        }
    }

    /// Writes what is there. `end_window`: and closes the window, whatever its age.
    pub(super) fn flush(&mut self, end_window: bool) {
        self.last_flush = Instant::now();
        let stacks = self.stacks.name_new();
        if let Some(observer) = &mut self.observer {
            stacks.iter().for_each(|stack| observer.stack(stack));
        }
        self.rows.stacks.extend(stacks);
        // `status` follows the kernel's counters at every flush, not only at a window's end.
        self.take_losses();
        if end_window {
            self.roll_up_all();
        }
        let dropped = match self.output.stage(&mut self.rows) {
            Ok(dropped) => dropped,
            Err(error) => return self.flush_has_failed(&error),
        };
        self.window.counts.drop_rows(&dropped.rows);
        self.window.counts.drop_rows(&dropped.recorder);
        let of_recorder = dropped.recorder.iter();
        let losses = of_recorder.filter(|(cause, _)| room::is_loss(cause));
        for (cause, rows) in dropped.rows.iter().chain(losses) {
            *self.totals.lost.entry(cause).or_default() += rows;
        }
        self.stacks.unwritten(&dropped.stacks);
        if end_window && !dropped.window_waits {
            let row = self.window.close(&mut self.clock);
            self.rows.agent_windows.push(row);
        }
        let position = self.channel.ring.position();
        let waiting = self.orderer.waiting();
        // Other processes of the host start and end all the time: their records take space in
        // the ring and are worth no write.
        let idle = self.rows.is_empty()
            && waiting.is_empty()
            && !self.ledger.has_changes()
            && dropped.rows.is_empty()
            && dropped.recorder.is_empty()
            && !dropped.must_commit;
        let checkpoint = Checkpoint {
            generation: self.channel.generation,
            ring_position: position,
            waiting,
            lost_reported: &self.lost_reported,
            python_lost: python_lost(&self.channel),
            window: &self.window.counts,
            ledger: &mut self.ledger,
            stacks: &self.stacks,
            totals: &self.totals,
            ring_fill: self.channel.ring.fill(),
            discovery: &self.discovery,
            traffic: self.traffic.as_ref(),
        };
        let result = if idle {
            self.output.idle(&checkpoint);
            Ok(())
        } else {
            self.output.commit(&self.rows, checkpoint)
        };
        match result {
            Ok(()) => {
                self.channel.release(position);
                self.rows.clear();
                if self.flush_failed {
                    warn!("events are written again");
                }
                self.flush_failed = false;
            }
            Err(error) => self.flush_has_failed(&error),
        }
    }

    /// Nothing is lost yet: rows wait here and events in the ring, which bounds both. Once the
    /// ring is full the kernel side counts what it drops.
    fn flush_has_failed(&mut self, error: &anyhow::Error) {
        if !self.flush_failed {
            error!("failed to write events, trying again: {error:#}");
        }
        self.flush_failed = true;
    }
}
