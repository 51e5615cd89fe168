//! What the door does itself: settings, transactions, and what goes with a connection.

use std::io;
use std::sync::Arc;

use arrow::array::{RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use futures::StreamExt;
use pgwire::messages::PgWireBackendMessage as Out;
use pgwire::messages::response::{CommandComplete, EmptyQueryResponse, TransactionStatus};
use pgwire::messages::startup::ParameterStatus;

use super::super::failure::Failure;
use super::super::rows::Columns;
use super::super::statement::{Statement, Tag};
use super::extended::no_statement;
use super::{Answer, Session, Stop};

impl Session {
    /// In a failed transaction only its end is taken.
    pub(super) fn check_transaction(&self, statement: &Statement) -> Result<(), Failure> {
        let ends = matches!(
            statement,
            Statement::Commit | Statement::Rollback | Statement::RollbackTo
        );
        if self.status == TransactionStatus::Error && !ends {
            return Err(Failure::error(
                "25P02",
                "current transaction is aborted, commands ignored until end of transaction block",
            ));
        }
        Ok(())
    }

    /// Does what the door does itself and has no rows.
    pub(super) fn command(&mut self, statement: &Statement) -> Result<(), Stop> {
        let mut tag = "";
        let mut told = Vec::new();
        match statement {
            Statement::Empty => {
                self.wire
                    .put(Out::EmptyQueryResponse(EmptyQueryResponse::new()))?;
                return Ok(());
            }
            Statement::Set { name, value, local } => {
                tag = "SET";
                if *local && self.status == TransactionStatus::Idle {
                    self.notice(Failure::warning(
                        "25P01",
                        "SET LOCAL can only be used in transaction blocks",
                    ))?;
                } else {
                    let settings = &mut self.entered.settings;
                    told.extend(settings.set(name, value.as_deref(), *local)?);
                }
            }
            Statement::Reset(name) => {
                tag = "RESET";
                told.extend(self.entered.settings.set(name, None, false)?);
            }
            Statement::ResetAll => {
                tag = "RESET";
                told = self.entered.settings.reset_all();
            }
            Statement::DiscardAll => {
                if self.status != TransactionStatus::Idle {
                    return Err(Failure::error(
                        "25001",
                        "DISCARD ALL cannot run inside a transaction block",
                    )
                    .into());
                }
                tag = "DISCARD ALL";
                self.prepared.clear();
                self.portals.clear();
                told = self.entered.settings.reset_all();
            }
            Statement::Begin(name) => {
                tag = name;
                if self.status == TransactionStatus::Transaction {
                    self.notice(Failure::warning(
                        "25001",
                        "there is already a transaction in progress",
                    ))?;
                }
                self.entered.settings.begin();
                self.status = TransactionStatus::Transaction;
            }
            Statement::Commit | Statement::Rollback => {
                let committed =
                    *statement == Statement::Commit && self.status != TransactionStatus::Error;
                tag = if committed { "COMMIT" } else { "ROLLBACK" };
                if self.status == TransactionStatus::Idle {
                    self.notice(Failure::warning(
                        "25P01",
                        "there is no transaction in progress",
                    ))?;
                }
                told = self.entered.settings.end(committed);
                self.status = TransactionStatus::Idle;
                // The one that runs this very command is put back after it.
                self.portals.clear();
            }
            Statement::RollbackTo => {
                tag = "ROLLBACK";
                if self.status == TransactionStatus::Idle {
                    return Err(Failure::error(
                        "25P01",
                        "ROLLBACK TO SAVEPOINT can only be used in transaction blocks",
                    )
                    .into());
                }
                self.status = TransactionStatus::Transaction;
            }
            Statement::Deallocate(name) => {
                tag = match name {
                    Some(name) => {
                        if self.prepared.remove(name).is_none() {
                            return Err(no_statement(name).into());
                        }
                        "DEALLOCATE"
                    }
                    None => {
                        self.prepared.clear();
                        "DEALLOCATE ALL"
                    }
                };
            }
            Statement::Nothing(name) => tag = name,
            Statement::Query(_) | Statement::Show(_) | Statement::ShowAll => {}
        }
        for (name, value) in told {
            let status = ParameterStatus::new(name.to_string(), value);
            self.wire.put(Out::ParameterStatus(status))?;
        }
        self.complete(tag.to_string())?;
        Ok(())
    }

    pub(super) fn complete(&mut self, tag: String) -> io::Result<()> {
        self.wire
            .put(Out::CommandComplete(CommandComplete::new(tag)))
    }

    /// The columns of what the door answers itself.
    pub(super) fn columns_of_door(
        &self,
        statement: &Statement,
    ) -> Result<Option<SchemaRef>, Failure> {
        let text = |name: &str| Field::new(name, DataType::Utf8, true);
        Ok(match statement {
            Statement::Show(name) => {
                let (name, _) = self.entered.settings.show(name)?;
                Some(Arc::new(Schema::new(vec![text(name)])))
            }
            Statement::ShowAll => Some(Arc::new(Schema::new(vec![
                text("name"),
                text("setting"),
                text("description"),
            ]))),
            _ => None,
        })
    }

    pub(super) fn answer_of_door(
        &self,
        statement: &Statement,
        formats: &[i16],
    ) -> Result<Answer, Failure> {
        let settings = &self.entered.settings;
        let schema = self.columns_of_door(statement)?;
        let schema = schema.unwrap_or_else(|| Arc::new(Schema::empty()));
        let columns: Vec<Vec<&str>> = match statement {
            Statement::Show(name) => vec![vec![settings.show(name)?.1]],
            _ => {
                let (names, values): (Vec<&str>, Vec<&str>) = settings
                    .values()
                    .iter()
                    .map(|(name, value)| (*name, value.as_str()))
                    .unzip();
                let nothing = vec![""; names.len()];
                vec![names, values, nothing]
            }
        };
        let columns = columns
            .into_iter()
            .map(|texts| Arc::new(StringArray::from(texts)) as _);
        let batch = RecordBatch::try_new(Arc::clone(&schema), columns.collect())
            .map_err(|error| Failure::error("XX000", error.to_string()))?;
        Ok(Answer {
            columns: Columns::new(&schema, formats)?,
            batches: futures::stream::iter([Ok(batch)]).boxed(),
            rows: None,
            sent: 0,
            tag: Tag::Show,
            recorded: false,
        })
    }
}
