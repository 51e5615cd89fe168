//! Processes come and go: who is told of, and when their books are closed.

use super::{Engine, ROWS_PER_FLUSH};
use crate::host::clock;
use crate::host::identity::StartTime;
use crate::host::procfs::{self, Program};
use crate::ledger::Process;
use crate::spool::rows::ProcessRow;

impl Engine {
    /// Enters a process in the books that has done something, if it is not there.
    pub(super) fn meet(&mut self, pid: u32, at_ns: u64) {
        match self.ledger.get(pid) {
            Some(process) if process.exiting.is_some() => self.retire_predecessor(pid, false),
            _ => {}
        }
        if self.ledger.get(pid).is_none() {
            let seen = self.discovery.known().seen(pid).cloned();
            if seen.is_none() {
                self.discovery.meet(pid);
            }
            let seen = seen.map(|seen| (seen.start, seen.program));
            self.ledger.meet(pid, at_ns, seen);
            self.report_process(pid);
        }
    }

    /// Ends processes that are gone.
    pub(super) fn sweep(&mut self) {
        let gone: Vec<u32> = self
            .ledger
            .processes()
            .filter(|process| process.is_gone())
            .map(|process| process.pid)
            .collect();
        if gone.is_empty() {
            return;
        }
        // What they did before they went is in the ring by now.
        while self.drain() > 0 {}
        for pid in gone {
            // Its last events may wait behind another process's call that is under way.
            if !self.orderer.concerns(pid) {
                self.end_process(pid, ROWS_PER_FLUSH);
            }
        }
    }

    /// Tells of processes that map hooked libraries, and of hooks that are new.
    pub(super) fn report_mapped(&mut self) {
        let mapped = self.discovery.known().pids();
        for pid in mapped {
            let is_known = self.ledger.get(pid).is_some();
            let hooks = self.discovery.known().coverage_mark(pid);
            let is_reported = self.reported_coverage.get(&pid) == Some(&hooks);
            if is_known && is_reported {
                continue;
            }
            if !is_known {
                if procfs::stat(pid).is_none() {
                    // Over before it allocated anything, unless its events are still to come.
                    self.discovery.gone_if_old(pid);
                    continue;
                }
                if self
                    .filter
                    .as_mut()
                    .is_some_and(|filter| !filter.wants(pid))
                {
                    continue;
                }
                self.ledger.meet(pid, clock::monotonic_ns(), None);
            }
            self.report_process(pid);
        }
    }

    /// Ends a process whose pid another one has by now. While no agent ran, or it was busy, a
    /// process may have ended and its pid been given out again; the ring then holds events of both.
    /// `executes`: a program begins in the process, which after its leader's exit is as good as
    /// always another one. If nobody has the pid any more, nothing else tells the two apart.
    pub(super) fn retire_predecessor(&mut self, pid: u32, executes: bool) {
        let Some(old) = self.ledger.get(pid).filter(|old| old.exiting.is_some()) else {
            return;
        };
        // A process that is gone may have events of its last threads to come.
        if StartTime::of(pid).map_or(executes, |start| start != old.start) {
            // In one piece: the event at hand is in no journal yet, so nothing may be written now.
            self.end_process(pid, usize::MAX);
        }
    }

    /// `piece`: after how many allocations' ends their rows are written.
    fn end_process(&mut self, pid: u32, piece: usize) {
        let now_ns = clock::monotonic_ns();
        self.sample_last(pid);
        loop {
            let before = self.rows.alloc_events.len();
            let is_over = self.with_desk(|ledger, desk| ledger.end_some(pid, now_ns, piece, desk));
            self.told_of_rows(before, true);
            if is_over {
                break;
            }
            // A process may leave millions of allocations: their rows are written piece by piece.
            self.flush(false);
            if self.flush_failed {
                return;
            }
        }
        self.roll_up_last(pid);
        let Some(process) = self.ledger.end(pid, now_ns) else {
            return;
        };
        let at_ns = process
            .exiting
            .map(|(_, at_ns)| self.clock.from_monotonic(at_ns));
        self.report(Reported::of(&process), at_ns);
        self.stacks.forget(pid);
        self.discovery.gone(pid);
        self.reported_coverage.remove(&pid);
        self.card_of
            .borrow_mut()
            .retain(|(process_id, _), _| *process_id != process.process_id);
    }

    pub(super) fn report_process(&mut self, pid: u32) {
        if let Some(reported) = self.ledger.get(pid).map(Reported::of) {
            self.report(reported, None);
        }
    }

    fn report(&mut self, process: Reported, ended_ns: Option<i64>) {
        let coverage = self.discovery.known().coverage(process.pid);
        let mark = self.discovery.known().coverage_mark(process.pid);
        let framework = {
            let known = self.discovery.known();
            known
                .seen(process.pid)
                .and_then(|seen| seen.framework.clone())
        };
        self.reported_coverage.insert(process.pid, mark);
        self.rows.processes.push(ProcessRow {
            ts_ns: clock::realtime_ns() as i64,
            process_id: process.process_id,
            pid: process.pid,
            exe: process.program.exe,
            command: process.program.command,
            started_ns: Some(process.start.wall_ns()),
            ended_ns,
            container: process.program.container.clone(),
            coverage,
            framework: framework.as_ref().map(|framework| framework.name),
            framework_version: framework.and_then(|framework| framework.version),
        });
    }
}

/// What a row tells of a process; the books of one may be large.
struct Reported {
    pid: u32,
    process_id: i64,
    start: StartTime,
    program: Program,
}

impl Reported {
    fn of(process: &Process) -> Self {
        Self {
            pid: process.pid,
            process_id: process.process_id,
            start: process.start,
            program: process.program.clone(),
        }
    }
}
