//! The command against a collector, here a small Flight SQL server that hands out a batch at a
//! time and counts what it was asked. (The real collector's own tests run the command too.)

use std::pin::Pin;
use std::sync::{Arc, Mutex};

use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_server::FlightServiceServer;
use arrow_flight::sql::server::FlightSqlService;
use arrow_flight::sql::{CommandStatementQuery, ProstMessageExt, SqlInfo, TicketStatementQuery};
use arrow_flight::{FlightData, FlightDescriptor, FlightEndpoint, FlightInfo, Ticket};
use futures::{Stream, TryStreamExt};
use prost::Message;
use tonic::{Request, Response, Status};
use vramscope_queries::folder::Folder;
use vramscope_queries::session::{self, Limits, Options};

use crate::cli::{stderr, stdout, vramscope};
use crate::seed;

#[derive(Clone)]
struct Server {
    folder: Arc<Folder>,
    asked: Arc<Mutex<Vec<String>>>,
    announces_schema: bool,
}

type Answer = Response<Pin<Box<dyn Stream<Item = Result<FlightData, Status>> + Send>>>;

fn refused(error: impl std::fmt::Display) -> Status {
    Status::invalid_argument(error.to_string())
}

#[tonic::async_trait]
impl FlightSqlService for Server {
    type FlightService = Server;

    async fn get_flight_info_statement(
        &self,
        query: CommandStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let session = self.folder.session().await.map_err(refused)?;
        let plan = session::plan(&session, &query.query)
            .await
            .map_err(refused)?;
        let ticket = TicketStatementQuery {
            statement_handle: query.query.into(),
        };
        let ticket = Ticket::new(ticket.as_any().encode_to_vec());
        let mut info = FlightInfo::new()
            .with_endpoint(FlightEndpoint::new().with_ticket(ticket))
            .with_descriptor(request.into_inner());
        if self.announces_schema {
            info = info
                .try_with_schema(plan.schema().as_arrow())
                .map_err(refused)?;
        }
        Ok(Response::new(info))
    }

    async fn do_get_statement(
        &self,
        ticket: TicketStatementQuery,
        _: Request<Ticket>,
    ) -> Result<Answer, Status> {
        let sql = String::from_utf8(ticket.statement_handle.to_vec()).map_err(refused)?;
        self.asked.lock().unwrap().push(sql.clone());
        let session = self.folder.session().await.map_err(refused)?;
        let rows = session::query(&session, &sql, Limits::default())
            .await
            .map_err(refused)?;
        let schema = rows.schema();
        let rows = rows.map_err(|error| {
            FlightError::Tonic(Box::new(refused(vramscope_queries::Error::from(error))))
        });
        let encoded = FlightDataEncoderBuilder::new()
            .with_schema(schema)
            .build(rows);
        Ok(Response::new(Box::pin(encoded.map_err(Status::from))))
    }

    async fn register_sql_info(&self, _: i32, _: &SqlInfo) {}
}

/// Serves the seeded data on a free port of the loopback; returns the URL.
async fn serve(announces_schema: bool) -> (String, Server, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    seed::write_trace(dir.path());
    let folder = Arc::new(Folder::open(dir.path(), Options::default()).await.unwrap());
    let server = Server {
        folder,
        asked: Arc::default(),
        announces_schema,
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    let service = FlightServiceServer::new(server.clone());
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(incoming),
    );
    (url, server, dir)
}

async fn ask(url: &str, sql: &str) -> std::process::Output {
    let arguments: Vec<String> = ["sql", "--collector", url, "-c", sql, "--format", "csv"]
        .map(str::to_string)
        .to_vec();
    let run = move || vramscope(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(run).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_answers_like_a_folder() {
    for announces_schema in [true, false] {
        let (url, server, _guard) = serve(announces_schema).await;
        let sql = "SELECT process_id, live_bytes FROM process_totals WHERE memory_kind = 'device' ORDER BY process_id, device";
        let output = ask(&url, sql).await;
        assert_eq!(
            stdout(&output),
            "process_id,live_bytes\n101,3000\n102,0\n102,0\n200,900\n201,5000\n202,64\n301,1024\n303,700\n304,0\n401,39845888\n403,0\n404,0\n"
        );
        assert_eq!(
            stderr(&output),
            "note: 25 events were lost, 5 events have no stack or no end, nobody \
     watched during 1 gap (losses not known) in 12 windows; see answer_quality\n"
        );
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(server.asked.lock().unwrap()[0], sql);
        let none = ask(&url, "SELECT pid FROM coverage WHERE pid = 0").await;
        assert_eq!(stdout(&none), "pid\n");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collectors_refusal_reaches_the_user_in_its_words() {
    let (url, _server, _guard) = serve(true).await;
    for (sql, text) in [
        ("DROP TABLE stacks", "DROP TABLE is not allowed"),
        ("SELECT nonesuch FROM stacks", "nonesuch"),
        ("SELECT * FROM stack", "did you mean stacks?"),
        (
            "SELECT 1 / (value - 3) FROM generate_series(1, 5)",
            "Divide by zero",
        ),
    ] {
        let output = ask(&url, sql).await;
        assert_eq!(output.status.code(), Some(1), "{sql}");
        let error = stderr(&output);
        assert!(error.contains(text), "{sql}: {error}");
        // Once, and without the layers it came through.
        assert_eq!(error.matches(text).count(), 1, "{sql}: {error}");
        assert!(
            !error.contains("status") && !error.contains("tonic"),
            "{sql}: {error}"
        );
    }
}
