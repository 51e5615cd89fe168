//! What an answer says about its own quality: events that were lost in the data behind it.

use datafusion::sql::parser::{DFParser, Statement};
use datafusion::sql::resolve::resolve_table_references;
use vramscope_wire::Table;

use crate::views;

/// Lost events and lossy windows of everything recorded.
pub const LOSS_QUERY: &str =
    "SELECT coalesce(sum(lost), 0) AS lost, count(*) AS windows FROM agent_windows WHERE lossy";

/// The line every door adds to an answer over data with losses.
pub fn loss_note(lost: i64, windows: i64) -> String {
    let events = if lost == 1 {
        "event was"
    } else {
        "events were"
    };
    let plural = if windows == 1 { "" } else { "s" };
    format!("note: {lost} {events} lost in {windows} window{plural}; see answer_quality")
}

/// Tables and views that lost calls do not make incomplete: they say what was lost, or they are
/// made of samples and of what the system says about processes.
const NOT_MADE_OF_CALLS: &[&str] = &[
    "agent_windows",
    "answer_quality",
    "coverage",
    "current_processes",
    "devices",
    "processes",
];

/// Whether a question reads data that lost calls make incomplete. A question about the losses
/// themselves, or about nothing (`SELECT 1`), needs no note.
pub fn reads_recorded_data(sql: &str) -> bool {
    let Ok(statements) = DFParser::parse_sql(sql) else {
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
    fn the_note_counts_in_english() {
        assert_eq!(
            loss_note(1, 1),
            "note: 1 event was lost in 1 window; see answer_quality"
        );
        assert_eq!(
            loss_note(12, 2),
            "note: 12 events were lost in 2 windows; see answer_quality"
        );
    }
}
