//! The extended protocol: statements that are kept, their parameters, and rows in portions.

use std::sync::Arc;

use pgwire::api::Type;
use pgwire::messages::PgWireBackendMessage as Out;
use pgwire::messages::data::{NoData, ParameterDescription};
use pgwire::messages::extendedquery::{BindComplete, CloseComplete, ParseComplete};
use vramscope_queries::statements;

use super::super::failure::Failure;
use super::super::frame::Target;
use super::super::planner::Parameters;
use super::super::rows::Columns;
use super::super::statement::{Statement, classify};
use super::super::values::Bound;
use super::{MAX_KEPT, MAX_KEPT_BYTES, Portal, Prepared, Progress, Session, Stop, refined};

impl Session {
    pub(super) async fn parse(
        &mut self,
        name: String,
        sql: String,
        types: &[u32],
    ) -> Result<(), Stop> {
        let parts = statements::split(&sql);
        let text = match parts.as_slice() {
            [] => "",
            [one] => one,
            _ => {
                return Err(Failure::error(
                    "42601",
                    "cannot insert multiple commands into a prepared statement",
                )
                .into());
            }
        };
        let statement = classify(text)?;
        self.check_transaction(&statement)?;
        if !name.is_empty() && self.prepared.contains_key(&name) {
            let text = format!("prepared statement \"{name}\" already exists");
            return Err(Failure::error("42P05", text).into());
        }
        self.prepared.remove(&name);
        self.make_room(name.len() + sql.len())?;
        let mut prepared = Prepared {
            sql: text.to_string(),
            columns: self.columns_of_door(&statement)?,
            statement,
            types: Vec::new(),
        };
        if matches!(prepared.statement, Statement::Query(_)) {
            let given = types
                .iter()
                .map(|oid| known_type(*oid))
                .collect::<Result<_, _>>()?;
            let (question, planner) = self.question(&prepared.sql, Parameters::Given(given));
            let gate = self.shared.gate.clone();
            let shape = async move { gate.schema(&question).await };
            let shape = self.watched(shape).await;
            prepared.columns = Some(shape.map_err(|stop| refined(stop, &planner))?);
            prepared.types = planner.types();
        }
        self.prepared.insert(name, Arc::new(prepared));
        self.wire.put(Out::ParseComplete(ParseComplete::new()))?;
        Ok(())
    }

    /// Refuses one thing more than a connection may keep.
    pub(super) fn make_room(&self, bytes: usize) -> Result<(), Failure> {
        let of_statements = self.prepared.iter();
        let of_statements: usize = of_statements
            .map(|(name, prepared)| name.len() + prepared.sql.len())
            .sum();
        let of_portals: usize = self.portals.values().map(|portal| portal.bytes).sum();
        let kept = of_statements + of_portals + bytes;
        if self.prepared.len() >= MAX_KEPT || self.portals.len() >= MAX_KEPT {
            return Err(Failure::error(
                "53400",
                format!("more than {MAX_KEPT} prepared statements or portals on one connection"),
            )
            .hint("close those that are done with, or DISCARD ALL"));
        }
        if kept > MAX_KEPT_BYTES {
            return Err(Failure::error(
                "53400",
                format!(
                    "prepared statements and parameters of more than {MAX_KEPT_BYTES} bytes on \
                     one connection"
                ),
            )
            .hint("close those that are done with, or DISCARD ALL"));
        }
        Ok(())
    }

    pub(super) fn bind(
        &mut self,
        portal: String,
        statement: &str,
        parameter_formats: &[i16],
        parameters: Vec<Option<bytes::Bytes>>,
        formats: Vec<i16>,
    ) -> Result<(), Stop> {
        let prepared = self
            .prepared
            .get(statement)
            .ok_or_else(|| no_statement(statement))?;
        let prepared = Arc::clone(prepared);
        self.check_transaction(&prepared.statement)?;
        let count = parameters.len();
        if count != prepared.types.len() {
            return Err(Failure::error(
                "08P01",
                format!(
                    "bind message supplies {count} parameters, but prepared statement \
                     \"{statement}\" requires {}",
                    prepared.types.len()
                ),
            )
            .into());
        }
        if parameter_formats.len() > 1 && parameter_formats.len() != count {
            return Err(Failure::error(
                "08P01",
                format!(
                    "bind message has {} parameter formats but {count} parameters",
                    parameter_formats.len()
                ),
            )
            .into());
        }
        if !portal.is_empty() && self.portals.contains_key(&portal) {
            let text = format!("cursor \"{portal}\" already exists");
            return Err(Failure::error("42P03", text).into());
        }
        self.portals.remove(&portal);
        let bytes = portal.len()
            + parameters
                .iter()
                .flatten()
                .map(|value| value.len())
                .sum::<usize>();
        self.make_room(bytes)?;
        let format_of = |index: usize| match parameter_formats {
            [] => 0,
            [one] => *one,
            each => each[index],
        };
        let mut bound = Vec::with_capacity(count);
        for (index, (value, kind)) in parameters.into_iter().zip(&prepared.types).enumerate() {
            let parameter = Bound {
                kind: kind.clone(),
                binary: format_of(index) == 1,
                // A copy: what came in the same message would stay with it.
                value: value.map(|value| bytes::Bytes::copy_from_slice(&value)),
            };
            parameter.literal()?;
            bound.push(parameter);
        }
        if let Some(schema) = &prepared.columns {
            Columns::new(schema, &formats)?;
        }
        self.portals.insert(
            portal,
            Portal {
                prepared,
                bound,
                formats,
                bytes,
                progress: Progress::New,
            },
        );
        self.wire.put(Out::BindComplete(BindComplete::new()))?;
        Ok(())
    }

    pub(super) fn describe_statement(&mut self, name: &str) -> Result<(), Stop> {
        let prepared = self.prepared.get(name).ok_or_else(|| no_statement(name))?;
        let types = prepared.types.iter().map(Type::oid).collect();
        let columns = describe(prepared, &[])?;
        self.wire
            .put(Out::ParameterDescription(ParameterDescription::new(types)))?;
        self.wire.put(columns)?;
        Ok(())
    }

    pub(super) fn describe_portal(&mut self, name: &str) -> Result<(), Stop> {
        let portal = self.portals.get(name).ok_or_else(|| no_portal(name))?;
        let columns = describe(&portal.prepared, &portal.formats)?;
        self.wire.put(columns)?;
        Ok(())
    }

    pub(super) async fn execute(&mut self, name: &str, max_rows: i32) -> Result<(), Stop> {
        let most = u64::try_from(max_rows).ok().filter(|most| *most > 0);
        // Out of the map while it runs; a portal that failed stays out.
        let mut portal = self.portals.remove(name).ok_or_else(|| no_portal(name))?;
        let prepared = Arc::clone(&portal.prepared);
        self.check_transaction(&prepared.statement)?;
        let progress = std::mem::replace(&mut portal.progress, Progress::Done);
        let mut answer = match (progress, &prepared.statement) {
            (Progress::Open(answer), _) => answer,
            (Progress::New, Statement::Query(tag)) => {
                let bound = portal.bound.clone();
                let answer = self.ask(&prepared.sql, *tag, bound, &portal.formats);
                Box::new(answer.await?)
            }
            (Progress::New, statement) if prepared.columns.is_some() => {
                Box::new(self.answer_of_door(statement, &portal.formats)?)
            }
            (Progress::New, statement) => {
                self.command(statement)?;
                self.portals.insert(name.to_string(), portal);
                return Ok(());
            }
            (Progress::Done, Statement::Query(_)) => {
                self.complete("SELECT 0".to_string())?;
                self.portals.insert(name.to_string(), portal);
                return Ok(());
            }
            (Progress::Done, _) => {
                let text = format!("portal \"{name}\" cannot be run");
                return Err(Failure::error("55000", text).into());
            }
        };
        let all = self.send(&mut answer, most).await?;
        portal.progress = if all {
            Progress::Done
        } else {
            Progress::Open(answer)
        };
        self.portals.insert(name.to_string(), portal);
        Ok(())
    }

    pub(super) fn close(&mut self, target: Target, name: &str) -> Result<(), Stop> {
        match target {
            Target::Statement => {
                self.prepared.remove(name);
            }
            Target::Portal => {
                self.portals.remove(name);
            }
        }
        self.wire.put(Out::CloseComplete(CloseComplete::new()))?;
        Ok(())
    }
}

fn describe(prepared: &Prepared, formats: &[i16]) -> Result<Out, Failure> {
    Ok(match &prepared.columns {
        Some(schema) => Out::RowDescription(Columns::new(schema, formats)?.description()),
        None => Out::NoData(NoData::new()),
    })
}

/// The type behind an OID that a client gives; 0 leaves it open.
fn known_type(oid: u32) -> Result<Option<Type>, Failure> {
    match (oid, Type::from_oid(oid)) {
        (0, _) => Ok(None),
        // Written as text, of a type that only shows from where it stands.
        (_, Some(Type::UNKNOWN)) => Ok(None),
        (_, Some(kind)) => Ok(Some(kind)),
        (_, None) => Err(Failure::error(
            "42704",
            format!("type with OID {oid} does not exist"),
        )),
    }
}

pub(super) fn no_statement(name: &str) -> Failure {
    Failure::error(
        "26000",
        format!("prepared statement \"{name}\" does not exist"),
    )
}

fn no_portal(name: &str) -> Failure {
    Failure::error("34000", format!("portal \"{name}\" does not exist"))
}
