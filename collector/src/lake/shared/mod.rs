//! Several collectors on one lake: who has committed which batch.
//!
//! With one collector a batch is known by one number: of an agent's line everything up to the
//! table's mark is in the table. With several that is not so. An agent sends 5 to collector X,
//! which acknowledges it out of its log, goes on to collector Y with 6, and Y commits 6 before X
//! commits 5: a mark of 6 would lose 5. So marks are of **visits**. A visit is a run of numbers
//! without a gap that one collector took from one agent, and its mark is the application transaction
//!
//! ```text
//! AGENT@COLLECTOR:FIRST   version = LAST
//! ```
//!
//! which says of a table: whatever this collector took from FIRST to LAST and belongs here is here.
//! A number belongs to one table for ever and was taken by the collector if it lies in a visit, so
//! a table holds a batch exactly if its number lies in one of the table's visits. That needs no
//! rows, so it outlives retention and the merging of stacks. A mark without `@` is that of a lake
//! which one collector had to itself before: everything up to it is there.
//!
//! What makes it exactly once:
//! - a commit carries, beside the marks, the transaction `AGENT@` of every agent in it. It stands
//!   for nothing; it makes Delta's conflict check see two commits of one agent as a conflict, so
//!   that looking at the marks and committing are one step. Who loses reads the marks anew, drops
//!   what the other committed, and tries again. Commits of different agents pass each other;
//! - a collector commits of one agent and table in the order in which it took, so a visit's mark
//!   never passes over something that still waits in its log;
//! - a batch that rots in the log ends its visit before it and begins another after it: the mark
//!   claims nothing that was lost, and the same batch in another collector's log still counts;
//! - a commit whose answer got lost is found by its own marks, as any other.
//!
//! After a restart a collector's visits are put together from its own marks in all tables and from
//! what waits in its log, and go on where they ended: a restart adds no marks. A change of
//! collector adds one mark to each table that the agent then fills, so agents should stay with a
//! collector that answers.
//!
//! Known gap: marks of visits are never merged. A visit costs a table's checkpoint some tens of bytes.

mod transactions;
mod visits;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deltalake::{DeltaTable, DeltaTableError};
use vramscope_wire::Table;

use visits::Visits;

/// Between an agent's id and the rest of a transaction's name. No id has it.
const AT: char = '@';

/// Between two looks at a table for the sake of agents that came from elsewhere: when a collector
/// falls out, all of its agents come at once.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// What one collector knows of a lake that it shares.
#[derive(Debug)]
pub struct Shared {
    /// The collector's own id.
    collector: Arc<str>,
    tables: Mutex<HashMap<Table, Known>>,
    /// What this collector took, by agent.
    taken: Mutex<HashMap<Arc<str>, Visits>>,
    /// When agents that came from elsewhere last made it look at a table.
    looked: Mutex<HashMap<Table, Instant>>,
}

/// The marks of one table.
#[derive(Debug, Default)]
struct Known {
    /// Version up to which its log was read; `None` before the first time.
    version: Option<u64>,
    agents: HashMap<Arc<str>, Marks>,
}

/// The marks of one agent in one table.
#[derive(Debug, Default, PartialEq, Eq)]
struct Marks {
    /// Everything up to here is there: from a time with one collector.
    prefix: u64,
    /// Last number of each visit, by collector and first number.
    visits: BTreeMap<(Arc<str>, u64), u64>,
}

impl Marks {
    fn hold(&self, seq: u64) -> bool {
        let in_visit = |((_, first), last): (&(Arc<str>, u64), &u64)| *first <= seq && seq <= *last;
        seq <= self.prefix || self.visits.iter().any(in_visit)
    }
}

/// What the name of a transaction says.
#[derive(Debug, PartialEq, Eq)]
enum Name<'a> {
    /// All up to the version.
    Prefix(&'a str),
    /// Makes commits of one agent conflict.
    Token,
    Visit(&'a str, &'a str, u64),
}

/// `None` for the transaction of another program.
fn parse(name: &str) -> Option<Name<'_>> {
    let Some((agent, rest)) = name.split_once(AT) else {
        return Some(Name::Prefix(name));
    };
    if rest.is_empty() {
        return Some(Name::Token);
    }
    let (collector, first) = rest.rsplit_once(':')?;
    Some(Name::Visit(agent, collector, first.parse().ok()?))
}

impl Shared {
    /// For the collector of that id.
    pub fn new(collector: &str) -> Shared {
        Shared {
            collector: Arc::from(collector),
            tables: Mutex::default(),
            taken: Mutex::default(),
            looked: Mutex::default(),
        }
    }

    /// Whether it is time to look at a table again; says so to one that asks.
    pub fn may_look(&self, table: Table) -> bool {
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let is_recent = |last: &Instant| now.duration_since(*last) < BETWEEN_LOOKS;
        if looked.get(&table).is_some_and(is_recent) {
            return false;
        }
        looked.insert(table, now);
        true
    }

    fn tables(&self) -> MutexGuard<'_, HashMap<Table, Known>> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<Arc<str>, Visits>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the marks that a table gained since they were read last.
    pub async fn catch_up(&self, table: Table, delta: &DeltaTable) -> Result<(), DeltaTableError> {
        let Some(target) = delta.version() else {
            return Ok(());
        };
        let known = self.tables().entry(table).or_default().version;
        if known.is_some_and(|known| known >= target) {
            return Ok(());
        }
        let found = transactions::since(delta, known, target).await?;
        let mut tables = self.tables();
        let marks = tables.entry(table).or_default();
        // Marks only grow, so the order in which they are put together does not matter.
        for (name, version) in found {
            marks.add(&name, version);
        }
        marks.version = marks.version.max(Some(target));
        Ok(())
    }

    /// Whether the marks that are known say that a table holds a batch. What another collector
    /// committed since [`Shared::catch_up`] is not seen; a commit finds it.
    pub fn holds(&self, table: Table, agent: &str, seq: u64) -> bool {
        let tables = self.tables();
        let marks = tables.get(&table).and_then(|known| known.agents.get(agent));
        marks.is_some_and(|marks| marks.hold(seq))
    }

    /// Highest number of an agent that a table is known to hold, 0 if there is none.
    pub fn highest(&self, table: Table, agent: &str) -> u64 {
        let tables = self.tables();
        let marks = tables.get(&table).and_then(|known| known.agents.get(agent));
        marks.map_or(0, |marks| {
            let last = marks.visits.values().max();
            last.copied().unwrap_or(0).max(marks.prefix)
        })
    }

    /// Puts together what this collector took before it was started: from its marks in the tables,
    /// and from what waits in its log.
    pub fn recover<'a>(&self, waiting: impl Iterator<Item = (&'a Arc<str>, u64)>) {
        let mut taken = self.taken();
        for known in self.tables().values() {
            for (agent, marks) in &known.agents {
                for ((collector, first), last) in &marks.visits {
                    if *collector == self.collector {
                        let visits = taken.entry(Arc::clone(agent)).or_default();
                        visits.restore(*first, *last);
                    }
                }
            }
        }
        let mut waiting: Vec<_> = waiting.collect();
        waiting.sort_unstable();
        for (agent, seq) in waiting {
            taken.entry(Arc::clone(agent)).or_default().take(seq);
        }
    }

    /// Says that a batch is durable in this collector's log or committed by it.
    pub fn took(&self, agent: &str, seq: u64) {
        let mut taken = self.taken();
        match taken.get_mut(agent) {
            Some(visits) => visits.take(seq),
            None => taken.entry(Arc::from(agent)).or_default().take(seq),
        }
    }

    /// Whether this collector took a batch of that number.
    pub fn has_taken(&self, agent: &str, seq: u64) -> bool {
        let taken = self.taken();
        taken.get(agent).is_some_and(|visits| visits.contain(seq))
    }

    /// Whether a batch of that number would go on with a visit, rather than begin another.
    pub fn goes_on(&self, agent: &str, seq: u64) -> bool {
        let taken = self.taken();
        taken
            .get(agent)
            .is_some_and(|visits| visits.end_before(seq))
    }

    /// Says that a batch was lost in this collector's log: nothing may be claimed of it.
    pub fn lost(&self, agent: &str, seq: u64) {
        if let Some(visits) = self.taken().get_mut(agent) {
            visits.cut_out(seq);
        }
    }

    /// Names and versions of the transactions of a commit of these batches: a mark for each visit,
    /// a token for each agent.
    pub fn marks<'a>(
        &self,
        batches: impl Iterator<Item = (&'a Arc<str>, u64)>,
    ) -> HashMap<Arc<str>, u64> {
        let taken = self.taken();
        let mut marks: HashMap<Arc<str>, u64> = HashMap::new();
        for (agent, seq) in batches {
            let visits = taken.get(agent);
            // A batch of which nothing is known yet is a visit of its own.
            let first = visits
                .and_then(|visits| visits.first_of(seq))
                .unwrap_or(seq);
            for name in [
                format!("{agent}{AT}{}:{first}", self.collector),
                format!("{agent}{AT}"),
            ] {
                let last = marks.entry(Arc::from(name)).or_insert(seq);
                *last = seq.max(*last);
            }
        }
        marks
    }
}

impl Known {
    fn add(&mut self, name: &str, version: u64) {
        let (agent, visit) = match parse(name) {
            None | Some(Name::Token) => return,
            Some(Name::Prefix(agent)) => (agent, None),
            Some(Name::Visit(agent, collector, first)) => (agent, Some((collector, first))),
        };
        let marks = match self.agents.get_mut(agent) {
            Some(marks) => marks,
            None => self.agents.entry(Arc::from(agent)).or_default(),
        };
        match visit {
            None => marks.prefix = version.max(marks.prefix),
            Some((collector, first)) => {
                let last = marks.visits.entry((Arc::from(collector), first));
                let last = last.or_insert(version);
                *last = version.max(*last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(names: &[(&str, u64)]) -> Known {
        let mut known = Known::default();
        names
            .iter()
            .for_each(|(name, version)| known.add(name, *version));
        known
    }

    fn held(known: &Known, agent: &str) -> Vec<u64> {
        let marks = &known.agents[agent];
        (1..=20).filter(|seq| marks.hold(*seq)).collect()
    }

    /// The case of the module's text: X took 1 to 5 and has committed 1 to 3, Y took 6 and 7.
    #[test]
    fn a_later_visit_elsewhere_claims_nothing_of_an_earlier_one() {
        let known = known(&[("a@x:1", 3), ("a@", 7), ("a@y:6", 7), ("b@x:9", 9)]);
        assert_eq!(held(&known, "a"), [1, 2, 3, 6, 7]);
        assert_eq!(held(&known, "b"), [9]);
    }

    #[test]
    fn a_mark_of_a_lake_that_one_collector_had_holds_all_up_to_it() {
        let known = known(&[("a", 4), ("a@x:6", 8), ("a@x:6", 7)]);
        assert_eq!(held(&known, "a"), [1, 2, 3, 4, 6, 7, 8]);
    }

    #[test]
    fn names_of_other_programs_are_let_be() {
        assert_eq!(parse("a@x"), None);
        assert_eq!(parse("a@x:y"), None);
        assert_eq!(parse("a@x:7"), Some(Name::Visit("a", "x", 7)));
        assert_eq!(parse("a@"), Some(Name::Token));
        assert_eq!(parse("a"), Some(Name::Prefix("a")));
    }

    fn names(shared: &Shared, batches: &[(&str, u64)]) -> Vec<(String, u64)> {
        let batches: Vec<(Arc<str>, u64)> = batches
            .iter()
            .map(|(agent, seq)| (Arc::from(*agent), *seq))
            .collect();
        let made = shared.marks(batches.iter().map(|(agent, seq)| (agent, *seq)));
        let made = made
            .into_iter()
            .map(|(name, last)| (name.to_string(), last));
        made.collect::<BTreeMap<_, _>>().into_iter().collect()
    }

    #[test]
    fn a_commit_marks_each_visit_and_names_each_agent() {
        let shared = Shared::new("x");
        for seq in [1, 2, 3, 7, 8] {
            shared.took("a", seq);
        }
        shared.took("b", 4);
        let made = names(&shared, &[("a", 2), ("a", 3), ("a", 8), ("b", 4), ("c", 5)]);
        let expected = [
            ("a@", 8),
            ("a@x:1", 3),
            ("a@x:7", 8),
            ("b@", 4),
            ("b@x:4", 4),
            ("c@", 5),
            ("c@x:5", 5),
        ];
        assert_eq!(made, expected.map(|(name, last)| (name.to_string(), last)));
    }

    #[test]
    fn what_rotted_is_claimed_by_no_mark() {
        let shared = Shared::new("x");
        (1..=5).for_each(|seq| shared.took("a", seq));
        shared.lost("a", 3);
        let made = names(&shared, &[("a", 2), ("a", 4), ("a", 5)]);
        let visits: Vec<_> = made
            .iter()
            .map(|(name, last)| (name.as_str(), *last))
            .collect();
        assert_eq!(visits, [("a@", 5), ("a@x:1", 2), ("a@x:4", 5)]);
    }

    /// Restarted with marks up to 5 in one table and 4 in another, and 6 in the log: one visit.
    #[test]
    fn a_visit_outlives_a_restart() {
        let shared = Shared::new("x");
        for (table, last) in [(Table::AllocEvents, 5), (Table::Stacks, 4)] {
            let mine = known(&[("a@x:2", last), ("a@y:7", 9)]);
            shared.tables().insert(table, mine);
        }
        let waiting: (Arc<str>, u64) = (Arc::from("a"), 6);
        shared.recover([(&waiting.0, waiting.1)].into_iter());
        assert!(shared.has_taken("a", 2) && shared.has_taken("a", 6));
        assert!(!shared.has_taken("a", 7), "another collector took it");
        assert_eq!(names(&shared, &[("a", 6)])[1].0, "a@x:2");
    }
}
