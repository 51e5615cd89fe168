//! Arrow Flight SQL beyond a plain query: parameters, cancelling, and a client that others wrote.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{Int64Array, RecordBatch, StringArray};
use arrow_flight::{Action, CancelFlightInfoRequest, CancelFlightInfoResult, CancelStatus};
use futures::{StreamExt, TryStreamExt};
use prost::Message;
use vramscope_wire::Table;

use crate::support::*;

#[tokio::test(flavor = "multi_thread")]
async fn prepared_statements_take_parameters() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let mut client = sql_client(&collector.address).await;
    let sql = "SELECT $1 || '!' AS said, value FROM range(0, 10) WHERE value = $2".to_string();
    let mut prepared = client.prepare(sql, None).await.unwrap();
    let parameters = prepared.parameter_schema().unwrap();
    assert_eq!(parameters.fields().len(), 2);
    for (text, number) in [("'; DROP", 7_i64), ("ü", 3)] {
        let values = RecordBatch::try_from_iter([
            ("$1", Arc::new(StringArray::from(vec![text])) as _),
            ("$2", Arc::new(Int64Array::from(vec![number])) as _),
        ])
        .unwrap();
        prepared.set_parameters(values).unwrap();
        let info = prepared.execute().await.unwrap();
        let ticket = info.endpoint[0].ticket.clone().unwrap();
        let rows: Vec<_> = client
            .do_get(ticket)
            .await
            .unwrap()
            .try_collect()
            .await
            .unwrap();
        assert_eq!(lines(&rows), [format!("{text}!|{number}")]);
    }
    // Without values it says what is missing.
    let sql = "SELECT $1 + 1".to_string();
    let info = client.prepare(sql, None).await.unwrap().execute().await;
    let error = match info {
        Err(error) => error.to_string(),
        Ok(info) => {
            let ticket = info.endpoint[0].ticket.clone().unwrap();
            let rows = client.do_get(ticket).await;
            let rows: Result<Vec<_>, _> = match rows {
                Ok(rows) => rows.try_collect().await,
                Err(error) => Err(error),
            };
            rows.unwrap_err().to_string()
        }
    };
    assert!(error.contains("$1"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_is_cancelled_by_its_flight_info() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let mut client = sql_client(&collector.address).await;
    let forever = "SELECT count(*) FROM range(0, 10000000) a, range(0, 10000000) b WHERE a.value * b.value % 7 = 3";
    let info = client.execute(forever.to_string(), None).await.unwrap();
    let ticket = info.endpoint[0].ticket.clone().unwrap();
    let asking = tokio::spawn({
        let mut client = sql_client(&collector.address).await;
        async move {
            let rows = client
                .do_get(ticket)
                .await
                .map_err(|error| error.to_string())?;
            let rows: Vec<_> = rows
                .try_collect()
                .await
                .map_err(|error| error.to_string())?;
            Ok::<_, String>(rows.len())
        }
    });
    let give_up = Instant::now() + Duration::from_secs(60);
    let mut other = arrow_flight::FlightClient::new(
        tonic::transport::Channel::from_shared(collector.address.clone())
            .unwrap()
            .connect()
            .await
            .unwrap(),
    );
    loop {
        let request = CancelFlightInfoRequest::new(info.clone());
        let action = Action::new("CancelFlightInfo", request.encode_to_vec());
        let told = match other.do_action(action).await {
            Ok(mut results) => results.next().await,
            Err(error) => Some(Err(error)),
        };
        match told {
            Some(Ok(body)) => {
                let result = CancelFlightInfoResult::decode(body).unwrap();
                assert_eq!(result.status, CancelStatus::Cancelling as i32);
                break;
            }
            // It does not run yet.
            other => assert!(Instant::now() < give_up, "{other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let error = asking.await.unwrap().unwrap_err();
    assert!(error.contains("cancelled"), "{error}");
    // The place is free again.
    assert_eq!(count(&collector.address, Table::Stacks).await, 0);
}

/// The version that the figures of the documentation are for.
const ADBC: &str = "1.13.0";

/// Python with the ADBC driver, in the cache of vendors' files.
pub fn adbc_python() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let cache = variable("VRAMSCOPE_VENDOR_CACHE")
        .map(PathBuf::from)
        .or_else(|| variable("XDG_CACHE_HOME").map(|c| Path::new(&c).join("vramscope/vendor")))
        .or_else(|| variable("HOME").map(|h| Path::new(&h).join(".cache/vramscope/vendor")))?;
    let venv = cache.join(format!("adbc-{ADBC}/venv"));
    let python = venv.join("bin/python");
    let works = Command::new(&python)
        .args(["-c", "import adbc_driver_flightsql.dbapi, pyarrow"])
        .stderr(Stdio::null())
        .status();
    if works.is_ok_and(|status| status.success()) {
        return Some(python);
    }
    let venv = venv.display();
    eprintln!(
        "skipped: no ADBC; to have it: python3 -m venv {venv} && {venv}/bin/pip install adbc-driver-flightsql=={ADBC} adbc-driver-manager pyarrow"
    );
    None
}

const PROGRAM: &str = r#"
import sys
import adbc_driver_flightsql.dbapi as flight
connection = flight.connect("grpc://" + sys.argv[1], autocommit=True)
cursor = connection.cursor()
cursor.execute("SELECT count(*), sum(value) FROM range(0, 100001)")
print(cursor.fetchall())
cursor.execute("SELECT $1 + 1, upper($2)", parameters=(41, "u"))
print(cursor.fetchall())
cursor.execute("SELECT host, ts FROM traffic ORDER BY ts, host")
table = cursor.fetch_arrow_table()
print(table.num_rows, table.schema.field("ts").type)
try:
    cursor.execute("DROP TABLE traffic")
    cursor.fetchall()
except Exception as error:
    print("refused", "not allowed" in str(error))
info = connection.adbc_get_info()
print(info["vendor_name"])
objects = connection.adbc_get_objects(depth="tables", table_name_filter="traffic").read_all().to_pylist()
names = [t["table_name"] for c in objects for s in c["catalog_db_schemas"] for t in s["db_schema_tables"]]
print(names)
"#;

#[tokio::test(flavor = "multi_thread")]
async fn adbc_asks_and_is_answered() {
    let Some(python) = adbc_python() else { return };
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let (batch, _) = made(Table::Traffic, "agent-a", 1, 40);
    push(&collector.address, vec![batch]).await;
    wait_for_rows(&collector.address, Table::Traffic, 40).await;
    let address = collector
        .address
        .strip_prefix("http://")
        .unwrap()
        .to_string();
    let asked = tokio::task::spawn_blocking(move || {
        Command::new(python)
            .args(["-c", PROGRAM, &address])
            .output()
            .unwrap()
    });
    let output = asked.await.unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{told}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    // 100000 * 100001 / 2
    let expected = "[(100001, 5000050000)]\n[(42, 'U')]\n40 timestamp[us, tz=UTC]\nrefused True\nvramscope-collector\n['traffic']\n";
    assert_eq!(told, expected);
}
