//! The frames of stacks, as `stacks.frames` has them: innermost first.

use std::collections::HashMap;

use arrow::array::{Array, AsArray, StructArray};
use arrow::datatypes::{Int32Type, Int64Type};
use vramscope_queries::session::Limits;

use crate::door::Door;
use crate::rows::Row;

/// Stacks that are asked for in one question.
const STACKS_AT_ONCE: usize = 2000;

/// One frame. Text that is not known is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frame {
    pub kind: String,
    pub module: String,
    pub build_id: String,
    pub offset: Option<i64>,
    pub function: String,
    pub file: String,
    pub line: Option<i32>,
}

/// A stack as it was named.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stack {
    /// Outermost first, joined by ';'.
    pub folded: String,
    /// Innermost first.
    pub frames: Vec<Frame>,
}

pub type Stacks = HashMap<i64, Stack>;

/// The stacks of these ids. One that has no row in `stacks` (it was lost) is known by its id.
pub async fn stacks(door: &mut Door, limits: Limits, ids: &[i64]) -> anyhow::Result<Stacks> {
    let mut found = Stacks::with_capacity(ids.len());
    for some in ids.chunks(STACKS_AT_ONCE) {
        let list: Vec<String> = some.iter().map(i64::to_string).collect();
        // Each host that ran the code wrote a row: any of them tells the same.
        let sql = format!(
            "SELECT stack_id, folded, frames FROM (
                SELECT stack_id, folded, frames,
                    row_number() OVER (PARTITION BY stack_id ORDER BY folded, agent_id, batch_seq) AS nth
                FROM stacks WHERE stack_id IN ({})
             ) WHERE nth = 1",
            list.join(", ")
        );
        let rows = door.collect(&sql, limits).await?;
        for row in rows.iter() {
            if let Some(id) = row.number("stack_id")? {
                let folded = row.text("folded")?.unwrap_or_default();
                let frames = frames(row)?;
                found.insert(id, Stack { folded, frames });
            }
        }
    }
    for id in ids {
        found.entry(*id).or_insert_with(|| Stack {
            folded: format!("(stack {id}, without names)"),
            frames: Vec::new(),
        });
    }
    Ok(found)
}

/// The column `frames` of a row.
pub fn frames(row: Row<'_>) -> anyhow::Result<Vec<Frame>> {
    let Some(list) = row.list("frames")? else {
        return Ok(Vec::new());
    };
    let Some(list) = list.as_any().downcast_ref::<StructArray>() else {
        return Ok(Vec::new());
    };
    let text = |name: &str, index: usize| {
        let column = list
            .column_by_name(name)
            .and_then(|column| column.as_string_opt::<i32>());
        let column = column.filter(|column| !column.is_null(index));
        column.map_or(String::new(), |column| column.value(index).to_string())
    };
    let line = list
        .column_by_name("line")
        .and_then(|column| column.as_primitive_opt::<Int32Type>());
    let offset = list
        .column_by_name("offset")
        .and_then(|column| column.as_primitive_opt::<Int64Type>());
    Ok((0..list.len())
        .map(|index| Frame {
            kind: text("kind", index),
            module: text("module", index),
            build_id: text("build_id", index),
            offset: offset
                .filter(|column| !column.is_null(index))
                .map(|column| column.value(index)),
            function: text("function", index),
            file: text("file", index),
            line: line
                .filter(|column| !column.is_null(index))
                .map(|column| column.value(index)),
        })
        .collect())
}

impl Frame {
    /// As `folded` has it: the function, else module and offset.
    pub fn name(&self) -> String {
        match self.offset {
            _ if !self.function.is_empty() => self.function.clone(),
            Some(offset) if !self.module.is_empty() => {
                format!("{}+{offset:#x}", self.module_name())
            }
            _ => "?".to_string(),
        }
    }

    /// The module's file name.
    pub fn module_name(&self) -> &str {
        self.module.rsplit('/').next().unwrap_or_default()
    }

    pub fn is_python(&self) -> bool {
        self.kind == "python" || self.file.ends_with(".py")
    }
}
