//! What asks for a span, and how spans travel.

use std::fs;
use std::time::Instant;

use arrow::array::RecordBatch;
use vramscope_wire::{Table, parquet_file};

use super::files::{self, Entry, OOM, Picked};
use super::state::{Cause, MAX_SPANS, Span};
use super::{
    Answer, CARRY_PAUSE, Carrier, FRAMEWORK, MAX_REQUESTS, ROWS_PER_FILE, Recorder, Request, Taken,
    Travel, nanos, state, view,
};
use crate::spool::rows::AllocRow;

/// What was picked from some files and goes into one batch.
#[derive(Default)]
struct Load {
    batches: Vec<RecordBatch>,
    rows: u64,
    rows_before: u64,
    /// The last file that was searched, and the latest row in any of them.
    until: Option<(u64, i64)>,
}

impl Load {
    fn add(&mut self, entry: &Entry, picked: Picked) {
        self.batches.extend(picked.batches);
        self.rows += picked.rows;
        self.rows_before += picked.rows_before;
        let seen_ns = self.until.map_or(i64::MIN, |(_, seen_ns)| seen_ns);
        self.until = Some((entry.number, seen_ns.max(entry.last_ns)));
    }
}

impl Recorder {
    /// An OOM, or an allocation that the driver or the runtime refused.
    pub(super) fn look_for_triggers(&mut self, rows: &[AllocRow]) {
        for row in rows {
            let is_failed =
                row.op == "alloc" && row.layer != FRAMEWORK && row.result.is_some_and(|r| r != 0);
            if row.op == OOM {
                self.trigger(Cause::Oom, row.process_id, row.ts_ns);
            } else if is_failed {
                self.trigger(Cause::FailedAllocation, row.process_id, row.ts_ns);
            }
        }
    }

    /// When the last row of a span that ends then has come: rows come late by as much as an event
    /// waits for another one, or for an agent that was held up until now.
    fn over_ns(&self, to_ns: i64) -> i64 {
        let settle = nanos(self.options.settle);
        to_ns.max((self.now_ns)()).saturating_add(settle)
    }

    fn trigger(&mut self, cause: Cause, process_id: i64, ts_ns: i64) {
        self.state.triggers += 1;
        let from_ns = ts_ns.saturating_sub(nanos(self.options.before));
        let to_ns = ts_ns.saturating_add(nanos(self.options.after));
        let over_ns = self.over_ns(to_ns);
        // One that goes on is made longer, unless rows behind its end were passed by already.
        let goes_on = self.state.spans.iter_mut().find(|span| {
            let is_alike = span.process_id == process_id && span.cause == cause;
            is_alike
                && !span.is_done
                && span.from_ns <= from_ns
                && from_ns <= span.to_ns
                && (to_ns <= span.to_ns || span.seen_ns < span.to_ns)
        });
        if let Some(span) = goes_on {
            span.to_ns = span.to_ns.max(to_ns);
            span.over_ns = span.over_ns.max(over_ns);
            span.triggers += 1;
        } else if !self.add(cause, process_id, from_ns, to_ns) {
            self.state.triggers_refused += 1;
        }
    }

    fn add(&mut self, cause: Cause, process_id: i64, from_ns: i64, to_ns: i64) -> bool {
        if self.state.spans.len() >= MAX_SPANS {
            return false;
        }
        let over_ns = self.over_ns(to_ns);
        let span = Span {
            cause,
            process_id,
            from_ns,
            to_ns,
            triggers: 1,
            next_file: self.state.horizon.max(self.state.floor),
            seen_ns: i64::MIN,
            is_done: false,
            rows: 0,
            rows_before: 0,
            last_batch_seq: 0,
            gone: Vec::new(),
            over_ns,
        };
        if span.of_request().is_some() {
            // It came from elsewhere, so it does not depend on whether this flush comes to count.
            self.committed.spans.push(span.clone());
        }
        self.state.spans.push(span);
        true
    }

    /// Takes a request on, or refuses it.
    pub(super) fn accept(&mut self, request: Request) {
        let of_request = |span: &&Span| span.of_request() == Some(&request.id);
        if self.state.spans.iter().any(|span| of_request(&span)) {
            return;
        }
        let open = |span: &&Span| !span.is_done && span.of_request().is_some();
        let open = self.state.spans.iter().filter(open).count();
        let why = if request.from_ns >= request.to_ns {
            Some("its end is not behind its beginning".to_string())
        } else if self.options.travel == Travel::Never {
            Some("raw framework events stay on this host (framework_events = \"never\"); use `vramscope-agent recorder export` there".to_string())
        } else if self.options.travel == Travel::Always && self.entries.is_empty() {
            Some("this agent records nothing: raw framework events travel anyway (framework_events = \"always\")".to_string())
        } else if self.options.is_off() {
            Some(
                "this agent's recorder is off (recorder_bytes or recorder_minutes is 0)"
                    .to_string(),
            )
        } else if request.to_ns.saturating_sub((self.now_ns)()) > nanos(self.options.max_age) {
            Some("it ends further in the future than the recorder reaches".to_string())
        } else if open >= MAX_REQUESTS {
            Some(format!(
                "{MAX_REQUESTS} requests are open already; ask again later"
            ))
        } else {
            None
        };
        let Request {
            id,
            process_id,
            from_ns,
            to_ns,
            reason,
        } = request;
        let why = match why {
            Some(why) => why,
            None => {
                let cause = Cause::Request {
                    id: id.clone(),
                    reason,
                };
                if self.add(cause, process_id, from_ns, to_ns) {
                    return;
                }
                format!("{MAX_SPANS} spans are remembered already; ask again later")
            }
        };
        // The collector keeps refusals; here the last ones do.
        while self.refusals.len() >= MAX_REQUESTS {
            self.refusals.pop_first();
        }
        self.refusals.insert(id, Answer::refusal(why));
    }

    /// Carries rows of open spans into the spool, for a while, and writes down how far they came.
    pub fn ship(&mut self, carrier: &mut dyn Carrier, taken: &mut Taken) -> anyhow::Result<()> {
        self.waits_for_spool = false;
        if self.paused.is_some_and(|at| at.elapsed() < CARRY_PAUSE) {
            return Ok(());
        }
        let end = Instant::now() + self.carry_time;
        let mut carried = None;
        for index in 0..self.state.spans.len() {
            if !self.state.spans[index].is_done {
                self.ship_span(index, carrier, end, &mut carried)?;
            }
        }
        taken.must_commit |= carried.is_some();
        if self.state != self.committed {
            // Without a batch it is true at once.
            let staged = (carried.unwrap_or(0), &self.state);
            if let Err(error) = state::save(&self.folder, &self.committed, Some(staged)) {
                // What was carried must not count then. Without it the next flush goes on.
                self.paused = Some(Instant::now());
                if carried.is_some() {
                    return Err(error);
                }
                self.complain(&error);
            }
            self.is_staged = carried.is_some();
        }
        Ok(())
    }

    /// Carries what files have of a span, oldest first: some files together, as they may be small.
    fn ship_span(
        &mut self,
        index: usize,
        carrier: &mut dyn Carrier,
        end: Instant,
        carried: &mut Option<u64>,
    ) -> anyhow::Result<()> {
        let span = self.state.spans[index].clone();
        let mut load = Load::default();
        let mut at = self
            .entries
            .partition_point(|entry| entry.number < span.next_file);
        while at < self.entries.len() && Instant::now() < end {
            match self.pick(at, &span, carrier.origin().batch_seq as u64) {
                Ok(picked) => load.add(&self.entries[at], picked),
                // It must not hold up the others.
                Err(error) => {
                    self.give_up(at, &error);
                    continue;
                }
            }
            at += 1;
            if load.rows >= ROWS_PER_FILE as u64 / 2
                && !self.unload(index, &mut load, carrier, carried)?
            {
                return Ok(());
            }
        }
        let is_through = at >= self.entries.len();
        if self.unload(index, &mut load, carrier, carried)? && is_through {
            self.state.spans[index].is_done = (self.now_ns)() >= span.over_ns;
        }
        Ok(())
    }

    fn pick(&mut self, at: usize, span: &Span, batch_seq: u64) -> anyhow::Result<Picked> {
        let pick = span.pick();
        let entry = &mut self.entries[at];
        let travelled = self.state.travelled(entry.number, span.process_id);
        let contents = entry.contents(&self.folder)?;
        if !contents.iter().any(|content| pick.meets(content)) {
            return Ok(Picked::default());
        }
        files::pick_untravelled(&entry.path(&self.folder), pick, &travelled, batch_seq)
    }

    /// Carries what was picked, and notes how far the span came. False if there was no room.
    fn unload(
        &mut self,
        index: usize,
        load: &mut Load,
        carrier: &mut dyn Carrier,
        carried: &mut Option<u64>,
    ) -> anyhow::Result<bool> {
        let load = std::mem::take(load);
        let Some((number, seen_ns)) = load.until else {
            return Ok(true);
        };
        let batch_seq = carrier.origin().batch_seq as u64;
        if load.rows > 0 {
            let bytes = parquet_file::encode(Table::AllocEvents, &load.batches)?;
            if !carrier.has_room(bytes.len() as u64) || !carrier.carry(&bytes)? {
                self.waits_for_spool = true;
                return Ok(false);
            }
            self.uncommitted_from.get_or_insert(batch_seq);
            *carried = Some(batch_seq);
            self.state.travelled_rows += load.rows;
        }
        let span = &mut self.state.spans[index];
        if load.rows > 0 {
            span.last_batch_seq = batch_seq;
        }
        span.rows += load.rows;
        span.rows_before += load.rows_before;
        span.next_file = number + 1;
        span.seen_ns = span.seen_ns.max(seen_ns);
        Ok(true)
    }

    /// A file that cannot be read is gone: it counts as overwritten, as a whole.
    fn give_up(&mut self, at: usize, error: &anyhow::Error) {
        self.complain(error);
        let entry = self.entries.remove(at);
        let stretch = entry.stretch();
        for state in [&mut self.state, &mut self.committed] {
            state.overwrite_whole(stretch);
            for span in &mut state.spans {
                let is_late = !span.is_done && span.next_file <= entry.number;
                if is_late && span.from_ns <= stretch.last_ns && span.to_ns > stretch.first_ns {
                    span.lose(stretch);
                }
            }
        }
        let _ = fs::remove_file(entry.path(&self.folder));
    }

    pub(super) fn publish(&self) {
        let mut answers = self.refusals.clone();
        for span in &self.committed.spans {
            if let (Some(id), true) = (span.of_request(), span.is_done) {
                answers.insert(id.to_string(), self.answer(span));
            }
        }
        self.link.publish(answers);
    }

    fn answer(&self, span: &Span) -> Answer {
        let state = &self.committed;
        let holds = match (self.entries.first(), self.entries.last()) {
            (Some(first), Some(last)) => format!(
                "the recorder holds {} to {}",
                view::time(first.first_ns),
                view::time(last.last_ns)
            ),
            _ => "the recorder is empty".to_string(),
        };
        let doubt = if state.floor > state.horizon {
            "; files from before its state was damaged do not travel"
        } else {
            ""
        };
        Answer {
            refused: None,
            remark: format!("{holds}{doubt}"),
            rows: span.rows,
            rows_before: span.rows_before,
            last_batch_seq: span.last_batch_seq,
            overwritten: state.overwritten_in(span.process_id, span.from_ns, span.to_ns),
        }
    }
}
