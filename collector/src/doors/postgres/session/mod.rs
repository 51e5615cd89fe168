//! One client that was let in: its messages, in order, until it goes or is sent away.
//!
//! Invariants:
//! - rows are sent as they come: at most two batches and [`wire`](super::wire)'s buffer are held;
//! - a query ends when its client is gone, cancels it, or its time is over, also while it sends;
//! - what a connection keeps (prepared statements, portals) is bounded by [`MAX_KEPT`] things and
//!   [`MAX_KEPT_BYTES`];
//! - after an error in an extended query everything up to the next Sync is skipped, and after one
//!   in a transaction everything up to its end is refused, as in PostgreSQL.

mod commands;
mod extended;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use futures::StreamExt;
use futures::stream::BoxStream;
use pgwire::api::{ConnectionHandle, Type};
use pgwire::messages::PgWireBackendMessage as Out;
use pgwire::messages::extendedquery::PortalSuspended;
use pgwire::messages::response::{EmptyQueryResponse, ReadyForQuery, TransactionStatus};
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
        let (question, planner) = self.question(sql, Parameters::Bound(bound));
        let gate = self.shared.gate.clone();
        let rows = self.watched(async move { gate.answer(question).await });
        let rows = rows.await.map_err(|stop| refined(stop, &planner))?;
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
                    let Some(row) = rows.next_row() else {
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
}

/// With the planner's own word for it, if it was the planner.
fn refined(stop: Stop, planner: &PgPlanner) -> Stop {
    match stop {
        Stop::Failed(failure) => Stop::Failed(planner.failure().unwrap_or(failure)),
        gone => gone,
    }
}

fn cancelled_by_user() -> Failure {
    Failure::error("57014", "canceling statement due to user request")
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the client is gone")
}
