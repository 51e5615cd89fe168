//! One client that was let in: its messages, in order, until it goes or is sent away.
//!
//! Invariants:
//! - rows are sent as they come: at most two batches and [`wire`](super::wire)'s buffer are held;
//! - a query ends when its client is gone, cancels it, or its time is over, also while it sends;
//! - what a connection keeps (prepared statements, portals) is bounded by [`MAX_KEPT`] things and
//!   [`MAX_KEPT_BYTES`];
//! - after an error in an extended query everything up to the next Sync is skipped, and after one
//!   in a transaction everything up to its end is refused, as in PostgreSQL.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use arrow::array::{RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use futures::StreamExt;
use futures::stream::BoxStream;
use pgwire::api::{ConnectionHandle, Type};
use pgwire::messages::PgWireBackendMessage as Out;
use pgwire::messages::data::{NoData, ParameterDescription};
use pgwire::messages::extendedquery::{
    BindComplete, CloseComplete, ParseComplete, PortalSuspended,
};
use pgwire::messages::response::{
    CommandComplete, EmptyQueryResponse, ReadyForQuery, TransactionStatus,
};
use pgwire::messages::startup::ParameterStatus;
use tokio::time::timeout;
use vramscope_queries::{Error, statements};

use super::Shared;
use super::catalog::Asker;
use super::failure::Failure;
use super::frame::{Message, Target};
use super::planner::{Parameters, PgPlanner};
use super::rows::{Columns, Rows};
use super::settings::Settings;
use super::statement::{Statement, Tag, classify};
use super::values::Bound;
use super::wire::{Broken, Wire};
use crate::access::Caller;
use crate::query::{Door, Question};

/// Prepared statements, and portals, that a connection keeps at most.
const MAX_KEPT: usize = 1000;
/// Bytes of their texts and parameters.
const MAX_KEPT_BYTES: usize = 4 << 20;

/// Who was let in, and what they agreed on.
pub struct Entered {
    /// Who.
    pub caller: Caller,
    /// The user name they came with.
    pub user: String,
    /// Settings of the connection.
    pub settings: Settings,
    /// What cancels name.
    pub pid: i32,
    /// Where cancels arrive.
    pub cancel: Arc<ConnectionHandle>,
}

/// Why a message was not answered to its end.
enum Stop {
    /// The client is told.
    Failed(Failure),
    /// There is nobody to tell.
    Gone(io::Error),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Failed(failure)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error.into())
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Gone(error)
    }
}

/// A statement that was parsed.
struct Prepared {
    sql: String,
    statement: Statement,
    types: Vec<Type>,
    /// Columns of its answer, if it has any.
    columns: Option<SchemaRef>,
}

/// A statement with its parameters.
struct Portal {
    prepared: Arc<Prepared>,
    bound: Vec<Bound>,
    formats: Vec<i16>,
    bytes: usize,
    progress: Progress,
}

enum Progress {
    New,
    Open(Box<Answer>),
    Done,
}

/// An answer on its way.
struct Answer {
    columns: Columns,
    batches: BoxStream<'static, Result<RecordBatch, Error>>,
    rows: Option<Rows>,
    sent: u64,
    tag: Tag,
    /// Whether losses behind it have to be told.
    recorded: bool,
}

/// The client's side of the conversation.
pub struct Session {
    shared: Arc<Shared>,
    wire: Wire,
    entered: Entered,
    status: TransactionStatus,
    prepared: HashMap<String, Arc<Prepared>>,
    portals: HashMap<String, Portal>,
    /// An error came since the last Sync.
    skipping: bool,
}

impl Session {
    /// Of a client that was told that it is in.
    pub fn new(shared: Arc<Shared>, wire: Wire, entered: Entered) -> Session {
        Session {
            shared,
            wire,
            entered,
            status: TransactionStatus::Idle,
            prepared: HashMap::new(),
            portals: HashMap::new(),
            skipping: false,
        }
    }

    /// Answers until the client goes.
    pub async fn run(mut self) {
        let mut stopping = self.shared.stopping.clone();
        let end = loop {
            let next = tokio::select! {
                next = timeout(self.shared.idle, self.wire.message()) => next,
                _ = stopping.wait_for(|stopping| *stopping) => {
                    break Some(Failure::fatal("57P01", "terminating connection: the collector stops"));
                }
            };
            let message = match next {
                Err(_) => {
                    break Some(Failure::fatal(
                        "57P05",
                        "terminating connection due to idle-session timeout",
                    ));
                }
                Ok(Ok(Some(message))) => message,
                Ok(Ok(None) | Err(Broken::Io(_))) => return,
                Ok(Err(Broken::Malformed(malformed))) => {
                    break Some(Failure::fatal("08P01", malformed.to_string()));
                }
            };
            if message == Message::Terminate {
                return;
            }
            if self.answer(message).await.is_err() {
                return;
            }
        };
        if let Some(failure) = end {
            let _ = self.wire.put(Out::ErrorResponse(failure.into()));
            self.wire.close().await;
        }
    }

    /// An error means that the connection is gone.
    async fn answer(&mut self, message: Message) -> io::Result<()> {
        match message {
            Message::Sync => {
                self.skipping = false;
                if self.status == TransactionStatus::Idle {
                    self.portals.clear();
                }
                return self.ready().await;
            }
            _ if self.skipping => return Ok(()),
            Message::Query(text) => return self.simple(&text).await,
            _ => {}
        }
        let done = match message {
            Message::Parse { name, sql, types } => self.parse(name, sql, &types).await,
            Message::Bind {
                portal,
                statement,
                parameter_formats,
                parameters,
                result_formats,
            } => self.bind(
                portal,
                &statement,
                &parameter_formats,
                parameters,
                result_formats,
            ),
            Message::Describe(Target::Statement, name) => self.describe_statement(&name),
            Message::Describe(Target::Portal, name) => self.describe_portal(&name),
            Message::Execute { portal, max_rows } => self.execute(&portal, max_rows).await,
            Message::Close(target, name) => self.close(target, &name),
            Message::Flush => self.wire.flush().await.map_err(Stop::from),
            // Left over from a COPY that was refused: PostgreSQL passes it over as well.
            Message::Other(b'd' | b'c' | b'f') => Ok(()),
            Message::Other(kind) => {
                Err(Failure::error("08P01", format!("invalid frontend message type {kind}")).into())
            }
            Message::Password(_) => {
                Err(Failure::error("08P01", "unexpected password message").into())
            }
            Message::Query(_) | Message::Sync | Message::Terminate => Ok(()),
        };
        match done {
            Ok(()) => Ok(()),
            Err(Stop::Gone(error)) => Err(error),
            Err(Stop::Failed(failure)) => {
                self.skipping = true;
                self.failed(failure)?;
                self.wire.flush().await
            }
        }
    }

    fn failed(&mut self, failure: Failure) -> io::Result<()> {
        if self.status == TransactionStatus::Transaction {
            self.status = TransactionStatus::Error;
        }
        self.wire.put(Out::ErrorResponse(failure.into()))
    }

    async fn ready(&mut self) -> io::Result<()> {
        self.wire
            .put(Out::ReadyForQuery(ReadyForQuery::new(self.status)))?;
        self.wire.flush().await
    }

    fn notice(&mut self, notice: Failure) -> io::Result<()> {
        self.wire.put(Out::NoticeResponse(notice.into()))
    }

    /// Statements of one message, one after the other; an error ends them.
    async fn simple(&mut self, text: &str) -> io::Result<()> {
        let parts = statements::split(text);
        if parts.is_empty() {
            self.wire
                .put(Out::EmptyQueryResponse(EmptyQueryResponse::new()))?;
        }
        for sql in parts {
            match self.simple_statement(sql).await {
                Ok(()) => {}
                Err(Stop::Gone(error)) => return Err(error),
                Err(Stop::Failed(failure)) => {
                    self.failed(failure)?;
                    break;
                }
            }
        }
        self.ready().await
    }

    async fn simple_statement(&mut self, sql: &str) -> Result<(), Stop> {
        let statement = classify(sql)?;
        self.check_transaction(&statement)?;
        match (&statement, self.columns_of_door(&statement)?) {
            (Statement::Query(tag), _) => {
                let mut answer = self.ask(sql, *tag, Vec::new(), &[]).await?;
                let description = answer.columns.description();
                self.wire.put(Out::RowDescription(description))?;
                self.send(&mut answer, None).await?;
                Ok(())
            }
            (_, Some(_)) => {
                let mut answer = self.answer_of_door(&statement, &[])?;
                let description = answer.columns.description();
                self.wire.put(Out::RowDescription(description))?;
                self.send(&mut answer, None).await?;
                Ok(())
            }
            (_, None) => self.command(&statement),
        }
    }

    /// In a failed transaction only its end is taken.
    fn check_transaction(&self, statement: &Statement) -> Result<(), Failure> {
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
    fn command(&mut self, statement: &Statement) -> Result<(), Stop> {
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

    fn complete(&mut self, tag: String) -> io::Result<()> {
        self.wire
            .put(Out::CommandComplete(CommandComplete::new(tag)))
    }

    /// The columns of what the door answers itself.
    fn columns_of_door(&self, statement: &Statement) -> Result<Option<SchemaRef>, Failure> {
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

    fn answer_of_door(&self, statement: &Statement, formats: &[i16]) -> Result<Answer, Failure> {
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

    fn question(&self, sql: &str, parameters: Parameters) -> (Question, Arc<PgPlanner>) {
        let asker = Asker {
            user: self.entered.user.clone(),
            pid: self.entered.pid,
            settings: self.entered.settings.values().clone(),
        };
        let catalogs = Arc::clone(&self.shared.catalogs);
        let planner = Arc::new(PgPlanner::new(catalogs, asker, parameters));
        let caller = self.entered.caller.clone();
        let mut question = Question::new(caller, Door::Postgres, sql);
        question.time = self.entered.settings.statement_timeout();
        question.planner = Some(Arc::clone(&planner) as _);
        (question, planner)
    }

    /// Does something that takes long, unless the client cancels it or goes.
    async fn watched<T>(
        &mut self,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Stop> {
        let cancelled = self.entered.cancel.start_query().await;
        tokio::select! {
            done = work => Ok(done?),
            _ = cancelled => Err(cancelled_by_user().into()),
            () = self.wire.gone() => Err(gone().into()),
        }
    }

    /// Puts a question to the gate.
    async fn ask(
        &mut self,
        sql: &str,
        tag: Tag,
        bound: Vec<Bound>,
        formats: &[i16],
    ) -> Result<Answer, Stop> {
        let (question, _) = self.question(sql, Parameters::Bound(bound));
        let gate = self.shared.gate.clone();
        let rows = self
            .watched(async move { gate.answer(question).await })
            .await?;
        Ok(Answer {
            columns: Columns::new(&rows.schema, formats)?,
            batches: rows.into_stream().boxed(),
            rows: None,
            sent: 0,
            tag,
            recorded: vramscope_queries::quality::reads_recorded_data(sql),
        })
    }

    /// Sends rows, at most so many. Whether that was all of them.
    async fn send(&mut self, answer: &mut Answer, most: Option<u64>) -> Result<bool, Stop> {
        let mut cancelled = self.entered.cancel.start_query().await;
        let mut sent = 0;
        loop {
            if let Some(rows) = &mut answer.rows {
                while most.is_none_or(|most| sent < most) {
                    let Some(row) = rows.next() else {
                        answer.rows = None;
                        break;
                    };
                    self.wire.put(Out::DataRow(row?))?;
                    sent += 1;
                    answer.sent += 1;
                    if self.wire.is_full() {
                        tokio::select! {
                            done = self.wire.flush() => done?,
                            _ = &mut cancelled => return Err(gone().into()),
                        }
                    }
                }
                if most == Some(sent) {
                    self.wire
                        .put(Out::PortalSuspended(PortalSuspended::new()))?;
                    return Ok(false);
                }
            }
            let batch = tokio::select! {
                batch = answer.batches.next() => batch,
                _ = &mut cancelled => return Err(cancelled_by_user().into()),
                () = self.wire.gone() => return Err(gone().into()),
            };
            match batch {
                Some(batch) => answer.rows = Some(answer.columns.rows(&batch?)?),
                None => break,
            }
        }
        if answer.recorded && self.entered.settings.notices() {
            let note = self.shared.note(&self.entered.caller).await;
            if !note.is_empty() {
                self.notice(Failure::notice(note.trim_start_matches("note: ")))?;
            }
        }
        self.complete(match answer.tag {
            Tag::Select => format!("SELECT {}", answer.sent),
            Tag::Show => "SHOW".to_string(),
            Tag::Explain => "EXPLAIN".to_string(),
        })?;
        Ok(true)
    }

    async fn parse(&mut self, name: String, sql: String, types: &[u32]) -> Result<(), Stop> {
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
            prepared.columns = Some(self.watched(shape).await?);
            prepared.types = planner.types();
        }
        self.prepared.insert(name, Arc::new(prepared));
        self.wire.put(Out::ParseComplete(ParseComplete::new()))?;
        Ok(())
    }

    /// Refuses one thing more than a connection may keep.
    fn make_room(&self, bytes: usize) -> Result<(), Failure> {
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

    fn bind(
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

    fn describe_statement(&mut self, name: &str) -> Result<(), Stop> {
        let prepared = self.prepared.get(name).ok_or_else(|| no_statement(name))?;
        let types = prepared.types.iter().map(Type::oid).collect();
        let columns = describe(prepared, &[])?;
        self.wire
            .put(Out::ParameterDescription(ParameterDescription::new(types)))?;
        self.wire.put(columns)?;
        Ok(())
    }

    fn describe_portal(&mut self, name: &str) -> Result<(), Stop> {
        let portal = self.portals.get(name).ok_or_else(|| no_portal(name))?;
        let columns = describe(&portal.prepared, &portal.formats)?;
        self.wire.put(columns)?;
        Ok(())
    }

    async fn execute(&mut self, name: &str, max_rows: i32) -> Result<(), Stop> {
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

    fn close(&mut self, target: Target, name: &str) -> Result<(), Stop> {
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

fn no_statement(name: &str) -> Failure {
    Failure::error(
        "26000",
        format!("prepared statement \"{name}\" does not exist"),
    )
}

fn no_portal(name: &str) -> Failure {
    Failure::error("34000", format!("portal \"{name}\" does not exist"))
}

fn cancelled_by_user() -> Failure {
    Failure::error("57014", "canceling statement due to user request")
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the client is gone")
}
