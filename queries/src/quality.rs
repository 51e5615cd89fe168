//! What an answer says about its own quality: events that were lost in the data behind it.

use datafusion::sql::parser::Statement;
use datafusion::sql::resolve::resolve_table_references;
use vramscope_wire::Table;

use crate::{session, views};

/// What was lost in everything recorded: one row with the numbers of [`Loss`], in its order.
pub const LOSS_QUERY: &str = "\
    WITH lossy AS (SELECT lost, lost_by_cause FROM agent_windows WHERE lossy),
    causes AS (
        SELECT entry['cause'] AS cause, entry['count'] AS count
        FROM (SELECT unnest(lost_by_cause) AS entry FROM lossy)
    )
    SELECT
        (SELECT coalesce(sum(lost), 0) FROM lossy) AS lost,
        (SELECT coalesce(sum(count), 0) FROM causes WHERE cause IN ('live_full', 'stacks_full')) AS incomplete,
        (SELECT count(*) FROM causes WHERE cause = 'restart_gap') AS gaps,
        (SELECT count(*) FROM lossy) AS windows";

/// What was lost in everything recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Loss {
    /// Events by all causes.
    pub lost: i64,
    /// Those of them that are in the data, but without their stack or their end.
    pub incomplete: i64,
    /// Times that nobody watched; how much they lost is not known.
    pub gaps: i64,
    /// Windows that are lossy, by whatever cause.
    pub windows: i64,
}

impl Loss {
    /// From the row of [`LOSS_QUERY`].
    pub fn from_row(row: [i64; 4]) -> Loss {
        let [lost, incomplete, gaps, windows] = row;
        Loss {
            lost,
            incomplete,
            gaps,
            windows,
        }
    }

    /// The line every door adds to an answer over data with losses; `None` if nothing was lost.
    pub fn note(&self) -> Option<String> {
        if self.windows == 0 {
            return None;
        }
        let windows = counted(self.windows, "window", "windows");
        let mut parts = Vec::new();
        let missing = self.lost - self.incomplete;
        if missing > 0 {
            parts.push(format!(
                "{} lost",
                counted(missing, "event was", "events were")
            ));
        }
        if self.incomplete > 0 {
            let events = counted(self.incomplete, "event has", "events have");
            parts.push(format!("{events} no stack or no end"));
        }
        if self.gaps > 0 {
            let gaps = counted(self.gaps, "gap", "gaps");
            parts.push(format!("nobody watched during {gaps} (losses not known)"));
        }
        let what = if parts.is_empty() {
            "something was lost".to_string()
        } else {
            parts.join(", ")
        };
        Some(format!("note: {what} in {windows}; see answer_quality"))
    }
}

fn counted(count: i64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// Tables and views that lost calls do not make incomplete: they say what was lost, or they are
/// made of samples, of what the system says about processes and of what engines say of themselves.
const NOT_MADE_OF_CALLS: &[&str] = &[
    "agent_windows",
    "answer_quality",
    "batches",
    "coverage",
    "current_processes",
    "devices",
    "kv_pool_conservation",
    "losses",
    "processes",
    "query_log",
    "traffic",
];

/// Whether a question reads data that lost calls make incomplete. A question about the losses
/// themselves, or about nothing (`SELECT 1`), needs no note.
pub fn reads_recorded_data(sql: &str) -> bool {
    let Ok(statements) = session::parse(sql) else {
        return false;
    };
    statements.iter().flat_map(tables).any(|name| {
        let known = Table::by_name(&name).is_some() || views::View::by_name(&name).is_some();
        known && !NOT_MADE_OF_CALLS.contains(&name.as_str())
    })
}

fn tables(statement: &Statement) -> Vec<String> {
    let statement = match statement {
        // EXPLAIN shows a plan and no data.
        Statement::Explain(_) => return Vec::new(),
        other => other,
    };
    match resolve_table_references(statement, true) {
        Ok((tables, _)) => tables
            .iter()
            .map(|table| table.table().to_string())
            .collect(),
        Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_belong_to_answers_over_recorded_data() {
        assert!(reads_recorded_data("SELECT count(*) FROM alloc_events"));
        assert!(reads_recorded_data(
            "WITH t AS (SELECT * FROM tetrahedron) SELECT * FROM t"
        ));
        assert!(!reads_recorded_data("SELECT 1"));
        assert!(!reads_recorded_data("SELECT * FROM answer_quality"));
        assert!(!reads_recorded_data(
            "SELECT * FROM agent_windows JOIN coverage USING (host)"
        ));
        assert!(!reads_recorded_data("EXPLAIN SELECT * FROM alloc_events"));
    }

    #[test]
    fn the_note_says_what_is_missing_in_english() {
        let note = |row| Loss::from_row(row).note();
        assert_eq!(note([0, 0, 0, 0]), None);
        assert_eq!(
            note([1, 0, 0, 1]).unwrap(),
            "note: 1 event was lost in 1 window; see answer_quality"
        );
        assert_eq!(
            note([12, 0, 0, 2]).unwrap(),
            "note: 12 events were lost in 2 windows; see answer_quality"
        );
        // A gap loses an unknown number: never "0 events".
        assert_eq!(
            note([0, 0, 1, 1]).unwrap(),
            "note: nobody watched during 1 gap (losses not known) in 1 window; see answer_quality"
        );
        assert_eq!(
            note([9, 2, 2, 4]).unwrap(),
            "note: 7 events were lost, 2 events have no stack or no end, nobody watched during 2 \
             gaps (losses not known) in 4 windows; see answer_quality"
        );
        assert_eq!(
            note([0, 0, 0, 1]).unwrap(),
            "note: something was lost in 1 window; see answer_quality"
        );
    }
}
