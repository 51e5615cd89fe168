//! The HTTP door, by real requests.

use std::collections::BTreeSet;
use std::io::Cursor;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow::ipc::reader::StreamReader;
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;

use crate::support::*;

pub const LOG_FAST: &[&str] = &["--commit-interval", "50ms", "--query-log-interval", "100ms"];

/// A collector with an open HTTP door, and the door's address.
pub fn start(data: &std::path::Path, flags: &[&str]) -> (Collector, String) {
    let flags: Vec<_> = [&["--http-listen", "127.0.0.1:0"], flags].concat();
    let mut collector = Collector::start(data, &flags);
    let http = format!("http://{}", collector.announced("http on "));
    (collector, http)
}

pub async fn ask(http: &str, question: Value) -> Response {
    let request = Client::new().post(format!("{http}/api/v1/sql"));
    request.json(&question).send().await.unwrap()
}

async fn get(http: &str, path: &str) -> (StatusCode, String) {
    let answer = Client::new()
        .get(format!("{http}{path}"))
        .send()
        .await
        .unwrap();
    (answer.status(), answer.text().await.unwrap())
}

/// Rows of a whole answer.
pub async fn rows_of(http: &str, sql: &str) -> Vec<Value> {
    let answer = ask(http, json!({ "sql": sql })).await;
    assert_eq!(answer.status(), 200, "{sql}");
    let answer: Value = answer.json().await.unwrap();
    answer["rows"].as_array().unwrap().clone()
}

/// Asks until there are rows.
async fn wait_for(http: &str, sql: &str) -> Vec<Value> {
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        let rows = rows_of(http, sql).await;
        if !rows.is_empty() {
            return rows;
        }
        assert!(Instant::now() < give_up, "no rows: {sql}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_come_in_every_format() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), FAST);
    let sql =
        "SELECT * FROM (VALUES (1, 'a\"b', [1, 2]), (NULL, 'ü', NULL)) AS t(n, s, l) ORDER BY n";
    let answer = ask(&http, json!({ "sql": sql })).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()["vramscope-lossy"], "false");
    let id = answer.headers()["vramscope-query-id"]
        .to_str()
        .unwrap()
        .to_string();
    assert_eq!(id.len(), 32, "{id}");
    let expected = json!({
        "columns": [
            {"name": "n", "type": "BIGINT", "nullable": true},
            {"name": "s", "type": "VARCHAR", "nullable": false},
            {"name": "l", "type": "BIGINT[]", "nullable": true},
        ],
        "rows": [[1, "a\"b", [1, 2]], [null, "ü", null]],
        "lossy": false,
        "row_count": 2,
    });
    let answer: Value = answer.json().await.unwrap();
    assert_eq!(answer, expected);

    let csv = ask(&http, json!({"sql": sql, "format": "csv"})).await;
    assert_eq!(
        csv.text().await.unwrap(),
        "n,s,l\n1,\"a\"\"b\",\"[1,2]\"\n,ü,\n"
    );
    let by_line = ask(&http, json!({"sql": sql, "format": "ndjson"})).await;
    assert_eq!(
        by_line.text().await.unwrap(),
        "{\"n\":1,\"s\":\"a\\\"b\",\"l\":[1,2]}\n{\"n\":null,\"s\":\"ü\",\"l\":null}\n"
    );
    // Arrow through Accept, the statement as text; the same rows as by Flight SQL.
    let arrow = Client::new()
        .post(format!("{http}/api/v1/sql"))
        .header(CONTENT_TYPE, "text/plain")
        .header(ACCEPT, "application/vnd.apache.arrow.stream")
        .body(sql)
        .send()
        .await
        .unwrap();
    let bytes = arrow.bytes().await.unwrap();
    let stream = StreamReader::try_new(Cursor::new(bytes), None).unwrap();
    let batches: Vec<RecordBatch> = stream.map(Result::unwrap).collect();
    let flight = crate::support::sql(&collector.address, sql).await.unwrap();
    assert_eq!(lines(&batches), lines(&flight));
    // No rows at all are an answer too.
    let none = ask(
        &http,
        json!({"sql": "SELECT 1 AS a WHERE false", "format": "csv"}),
    )
    .await;
    assert_eq!(none.text().await.unwrap(), "a\n");
    let none: Value = ask(&http, json!({"sql": "SELECT 1 AS a WHERE false"}))
        .await
        .json()
        .await
        .unwrap();
    assert_eq!((&none["rows"], &none["row_count"]), (&json!([]), &json!(0)));
    // Values of parameters are values, whatever is in them.
    let bound = json!({"sql": "SELECT $1 AS a, $2 + 1 AS b", "parameters": ["'; DROP", 41]});
    let bound: Value = ask(&http, bound).await.json().await.unwrap();
    assert_eq!(bound["rows"], json!([["'; DROP", 42]]));
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_a_status_a_code_and_a_sqlstate() {
    let data = tempfile::tempdir().unwrap();
    let flags = ["--query-memory-bytes", "64MiB", "--query-timeout", "20s"];
    let (_collector, http) = start(data.path(), &flags);
    let hungry = "SELECT array_agg(repeat('x', 1000) || value) FROM range(0, 10000000)";
    let forever = "SELECT count(*) FROM range(0, 10000000) a, range(0, 10000000) b WHERE a.value * b.value % 7 = 3";
    for (question, status, code, sqlstate) in [
        (json!({"sql": "SELEC 1"}), 400, "syntax", "42601"),
        (json!({"sql": "SELECT 1; SELECT 2"}), 400, "syntax", "42601"),
        (
            json!({"sql": "SELECT * FROM nonesuch"}),
            400,
            "no_table",
            "42P01",
        ),
        (
            json!({"sql": "SELECT nonesuch FROM stacks"}),
            400,
            "no_column",
            "42703",
        ),
        (
            json!({"sql": "SELECT 1 / (value - 1) FROM range(0, 3)"}),
            422,
            "value",
            "22000",
        ),
        (
            json!({"sql": "DROP TABLE stacks"}),
            403,
            "read_only",
            "25006",
        ),
        (
            json!({"sql": forever, "timeout_ms": 500}),
            408,
            "time_limit",
            "57014",
        ),
        (json!({"sql": hungry}), 507, "memory_limit", "53200"),
    ] {
        let answer = ask(&http, question.clone()).await;
        assert_eq!(answer.status(), status, "{question}");
        let error: Value = answer.json().await.unwrap();
        assert_eq!(error["error"]["code"], code, "{error}");
        assert_eq!(error["error"]["sqlstate"], sqlstate, "{error}");
        assert!(!error["error"]["message"].as_str().unwrap().is_empty());
    }
    for (question, status, code) in [
        (json!({"sql": "SELECT 1", "max_row": 1}), 400, "request"),
        (
            json!({"sql": "SELECT $1", "parameters": [[1]]}),
            400,
            "request",
        ),
        (json!({"sql": "SELECT 1", "query_id": "x"}), 400, "request"),
    ] {
        let answer = ask(&http, question.clone()).await;
        assert_eq!(answer.status(), status, "{question}");
        let error: Value = answer.json().await.unwrap();
        assert_eq!(error["error"]["code"], code, "{error}");
    }
    let client = Client::new();
    let sql = format!("{http}/api/v1/sql");
    let sent =
        |request: reqwest::RequestBuilder| async move { request.send().await.unwrap().status() };
    assert_eq!(sent(client.post(&sql).body("SELECT 1")).await, 415);
    let picture = client
        .post(&sql)
        .header(ACCEPT, "image/png")
        .json(&json!({"sql": "SELECT 1"}));
    assert_eq!(sent(picture).await, 406);
    assert_eq!(sent(client.get(&sql)).await, 405);
    assert_eq!(sent(client.get(format!("{http}/nonesuch"))).await, 404);
    // A page in a browser, and one that made up a name for this address.
    let page = client
        .post(&sql)
        .header("origin", "https://evil.example")
        .json(&json!({"sql": "SELECT 1"}));
    assert_eq!(sent(page).await, 403);
    let rebound = client
        .post(&sql)
        .header("host", "evil.example")
        .json(&json!({"sql": "SELECT 1"}));
    assert_eq!(sent(rebound).await, 403);
}

/// Bytes until the transfer ends, and whether it ended as it should.
pub async fn until_it_breaks(mut answer: Response) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    loop {
        match answer.chunk().await {
            Ok(Some(chunk)) => bytes.extend_from_slice(&chunk),
            Ok(None) => return (bytes, true),
            Err(_) => return (bytes, false),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_breaks_off_does_not_look_whole() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, http) = start(data.path(), &[]);
    let question = |format: &str| json!({"sql": "SELECT value FROM range(0, 100000)", "max_rows": 50000, "format": format});
    let answer = ask(&http, question("json")).await;
    assert_eq!(answer.status(), 200);
    let (bytes, whole) = until_it_breaks(answer).await;
    assert!(!whole);
    let answer: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(answer["rows"].as_array().unwrap().len(), 50_000);
    assert_eq!(answer["error"]["code"], "row_limit");
    assert!(answer.get("row_count").is_none());

    let (bytes, whole) = until_it_breaks(ask(&http, question("ndjson")).await).await;
    assert!(!whole);
    let last = bytes.split(|byte| *byte == b'\n').rev().nth(1).unwrap();
    let last: Value = serde_json::from_slice(last).unwrap();
    assert_eq!(last["error"]["sqlstate"], "54000");

    let (_, whole) = until_it_breaks(ask(&http, question("csv")).await).await;
    assert!(!whole);
    let (bytes, whole) = until_it_breaks(ask(&http, question("arrow")).await).await;
    assert!(!whole);
    assert!(!bytes.ends_with(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]));
    let whole_answer = ask(&http, json!({"sql": "SELECT 1", "format": "arrow"})).await;
    let bytes = whole_answer.bytes().await.unwrap();
    assert!(bytes.ends_with(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_described_is_there_and_its_examples_work() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, http) = start(data.path(), &[]);
    let (status, text) = get(&http, "/api/v1/openapi.json").await;
    assert_eq!(status, 200);
    let described: Value = serde_json::from_str(&text).unwrap();
    assert!(described["openapi"].as_str().unwrap().starts_with("3."));
    let mut tried = BTreeSet::new();
    for (path, operations) in described["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            tried.insert(path.as_str());
            let example = |parameter: &Value| {
                (
                    parameter["name"].as_str().unwrap().to_string(),
                    parameter["example"].as_str().unwrap().to_string(),
                )
            };
            let mut url = format!("{http}{path}");
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let (name, value) = example(parameter);
                url = url.replace(&format!("{{{name}}}"), &value);
            }
            let method = method.to_uppercase().parse().unwrap();
            let request = || Client::new().request(reqwest::Method::clone(&method), &url);
            let bodies = operation["requestBody"]["content"].as_object();
            let mut requests = Vec::new();
            for (kind, body) in bodies.into_iter().flatten() {
                let body = match &body["example"] {
                    Value::String(text) => text.clone(),
                    other => other.to_string(),
                };
                requests.push(request().header(CONTENT_TYPE, kind).body(body));
            }
            if requests.is_empty() {
                requests.push(request());
            }
            for request in requests {
                let status = request.send().await.unwrap().status().as_u16();
                let known = &operation["responses"][status.to_string()];
                assert!(known.is_object(), "{path} answered {status}");
                // The only example that cannot succeed: no query has that id.
                assert!(status == 200 || path.contains("{id}"), "{path} {status}");
            }
        }
    }
    assert!(tried.len() >= 6, "{tried:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_are_those_of_the_documentation() {
    let data = tempfile::tempdir().unwrap();
    // What is asked here is not among the rows that are counted.
    let flags = [FAST, &["--query-log-interval", "1h"]].concat();
    let (collector, http) = start(data.path(), &flags);
    let (batch, _) = made(Table::Traffic, "agent-a", 1, 7);
    let acks = push(&collector.address, vec![batch]).await;
    assert_eq!(outcomes(&acks), [Outcome::Stored]);
    wait_for_rows(&collector.address, Table::Traffic, 7).await;
    wait_for_ledger(&collector.address, 1).await;
    rows_of(&http, "SELECT 1").await;
    let (status, text) = get(&http, "/metrics").await;
    assert_eq!(status, 200);
    assert!(text.ends_with("# EOF\n"));
    let page = std::path::Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap())
        .join("../docs/collector-metrics.md");
    let page = std::fs::read_to_string(page).unwrap();
    let documented: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(|name| name.starts_with("vramscope_"))
        .collect();
    // A family is announced without the suffix of its samples.
    let announced: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .map(|line| {
            let (name, kind) = line.split_once(' ').unwrap();
            match kind {
                "counter" => format!("{name}_total"),
                "info" => format!("{name}_info"),
                _ => name.to_string(),
            }
        })
        .collect();
    let announced: BTreeSet<&str> = announced.iter().map(String::as_str).collect();
    assert_eq!(documented, announced);
    let value = |wanted: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(wanted));
        let line = line.unwrap_or_else(|| panic!("no {wanted}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(value("vramscope_ready "), 1.0);
    assert_eq!(
        value("vramscope_commits_total{table=\"traffic\",outcome=\"ok\"}"),
        1.0
    );
    // Seven rows and their line in `batches`.
    assert_eq!(value("vramscope_commit_rows_sum"), 8.0);
    assert_eq!(
        value("vramscope_queries_total{door=\"http\",outcome=\"ok\"}"),
        1.0
    );
    assert!(value("vramscope_queries_total{door=\"flight\",outcome=\"ok\"}") >= 1.0);
    assert_eq!(
        value("vramscope_http_requests_total{path=\"/api/v1/sql\",status=\"200\"}"),
        1.0
    );
    assert!(value("vramscope_disk_free_bytes") > 0.0);
    assert!(value("vramscope_resident_memory_bytes") > 1e6);
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_says_what_is_wrong() {
    let data = tempfile::tempdir().unwrap();
    let (collector, http) = start(data.path(), &[]);
    let (status, text) = get(&http, "/readyz").await;
    let ready: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (status.as_u16(), &ready["ready"]),
        (200, &json!(true)),
        "{text}"
    );
    assert_eq!(
        get(&http, "/healthz").await,
        (StatusCode::OK, "ok\n".to_string())
    );
    assert!(collector.stop().success());

    // More room than any disk has, and a log that one batch fills.
    let flags = [
        "--min-disk-free-bytes",
        "8000000TiB",
        "--wal-limit-bytes",
        "1000",
        "--commit-interval",
        "1h",
    ];
    let (collector, http) = start(data.path(), &flags);
    let (batch, _) = made(Table::Traffic, "agent-a", 1, 500);
    let _ = push(&collector.address, vec![batch]).await;
    let (status, text) = get(&http, "/readyz").await;
    assert_eq!(status, 503, "{text}");
    let ready: Value = serde_json::from_str(&text).unwrap();
    let causes: Vec<_> = ready["reasons"]
        .as_array()
        .unwrap()
        .iter()
        .map(|reason| reason["cause"].as_str().unwrap())
        .collect();
    assert!(causes.contains(&"disk"), "{text}");
    let (status, _) = get(&http, "/healthz").await;
    assert_eq!(status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_is_cancelled_by_its_id_and_by_going_away() {
    let data = tempfile::tempdir().unwrap();
    let (_collector, http) = start(data.path(), LOG_FAST);
    let forever = "SELECT count(*) FROM range(0, 10000000) a, range(0, 10000000) b WHERE a.value * b.value % 7 = 3";
    let id = "00112233445566778899aabbccddeeff";
    let asking = tokio::spawn({
        let (http, question) = (http.clone(), json!({"sql": forever, "query_id": id}));
        async move {
            let answer = ask(&http, question).await;
            (
                answer.status().as_u16(),
                answer.json::<Value>().await.unwrap(),
            )
        }
    });
    let give_up = Instant::now() + Duration::from_secs(60);
    let delete = || {
        Client::new()
            .delete(format!("{http}/api/v1/queries/{id}"))
            .send()
    };
    while delete().await.unwrap().status() != 204 {
        assert!(Instant::now() < give_up);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (status, error) = asking.await.unwrap();
    assert_eq!(
        (status, &error["error"]["code"]),
        (409, &json!("cancelled")),
        "{error}"
    );
    assert_eq!(error["error"]["query_id"], id);

    // A client that gives up.
    let gone = Client::builder()
        .timeout(Duration::from_millis(300))
        .build()
        .unwrap();
    let request = gone.post(format!("{http}/api/v1/sql"));
    let question = json!({"sql": format!("{forever} -- and goes")});
    assert!(request.json(&question).send().await.is_err());
    let rows = wait_for(
        &http,
        "SELECT who, door, outcome, error IS NOT NULL, rows FROM query_log WHERE outcome = 'cancelled' AND sql LIKE '%and goes'",
    )
    .await;
    assert_eq!(rows, [json!(["loopback", "http", "cancelled", true, 0])]);
}
