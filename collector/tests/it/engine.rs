//! The distributed engine: two worker processes on loopback, over a seeded lake, and every query
//! of `queries/sql` compared with this process's own answer.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Float64Type};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use futures::TryStreamExt;
use vramscope_queries::engine::{Cluster, Engine, Identity};
use vramscope_queries::folder::Folder;
use vramscope_queries::session::{self, Limits, Options};
use vramscope_queries::{Error, views};

use crate::seed;
use crate::support::binary;

/// What the engine cannot run, with its reason; printed at each run. Whatever else fails, fails the
/// test, and so does one of these that has begun to work.
const CANNOT: &[(&str, &str)] = &[];

/// What engines are known to send wrongly.
const MORE: [(&str, &str); 3] = [
    (
        "the first value that is known",
        "SELECT process_id, seq, first_value(CASE WHEN op = 'free' THEN seq END) IGNORE NULLS
             OVER (PARTITION BY process_id ORDER BY seq)
         FROM alloc_events",
    ),
    (
        "two tables grouped alike, and together",
        "SELECT process_id, sum(n), count(*) FROM (
             SELECT process_id, count(*) AS n FROM alloc_events GROUP BY process_id
             UNION ALL
             SELECT process_id, count(*) AS n FROM stack_windows GROUP BY process_id
         ) GROUP BY process_id",
    ),
    (
        "a window over a column that is the same everywhere",
        "SELECT process_id, seq, row_number() OVER (PARTITION BY process_id, op ORDER BY seq)
         FROM alloc_events WHERE process_id = 401",
    ),
];

struct Worker {
    child: Child,
    url: String,
}

impl Worker {
    fn start(lake: &Path) -> Worker {
        Self::start_with(lake, &[])
    }

    fn start_with(lake: &Path, flags: &[String]) -> Worker {
        let mut child = binary()
            .args(["executor", "--listen", "127.0.0.1:0", "--data"])
            .arg(lake)
            .args(flags)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        let address = line.trim().strip_prefix("listening on ").unwrap();
        Worker {
            url: format!("http://{address}"),
            child,
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn answer(folder: &Folder, sql: &str) -> Result<Vec<RecordBatch>, Error> {
    let session = folder.session().await?;
    let rows = session::query(&session, sql, Limits::default()).await?;
    rows.try_collect().await.map_err(Error::from)
}

/// Whether workers have a part in it. EXPLAIN tells of the plan before it is cut.
async fn is_cut(folder: &Folder, sql: &str) -> bool {
    let session = folder.session().await.unwrap();
    let plan = session::plan(&session, sql).await.unwrap();
    let plan = session.state().create_physical_plan(&plan).await.unwrap();
    let plan = datafusion::physical_plan::displayable(plan.as_ref());
    plan.indent(false).to_string().contains("DistributedExec")
}

/// Rows as text, sorted. Sums of floating numbers depend on the order of adding: nine digits.
fn lines(batches: &[RecordBatch]) -> Vec<String> {
    let options = FormatOptions::default().with_null("NULL");
    let mut lines = Vec::new();
    for batch in batches {
        let cells = batch.columns().iter().map(|column| {
            let text = ArrayFormatter::try_new(column, &options).unwrap();
            let cell = |row: usize| match column.data_type() {
                DataType::Float64 if column.is_valid(row) => {
                    format!("{:.8e}", column.as_primitive::<Float64Type>().value(row))
                }
                _ => text.value(row).to_string(),
            };
            (0..batch.num_rows()).map(cell).collect::<Vec<_>>()
        });
        let cells: Vec<Vec<String>> = cells.collect();
        for row in 0..batch.num_rows() {
            let cells: Vec<&str> = cells.iter().map(|column| column[row].as_str()).collect();
            lines.push(cells.join("|"));
        }
    }
    lines.sort();
    lines
}

/// Every query: all columns of each view, and what the scripts beside the views ask.
fn queries() -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = views::ALL
        .iter()
        .map(|view| {
            (
                view.name.to_string(),
                format!("SELECT * FROM {}", view.name),
            )
        })
        .collect();
    let dir = Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap()).join("../queries/sql");
    let mut scripts: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "slt"))
        .collect();
    scripts.sort();
    for script in scripts {
        let text = std::fs::read_to_string(&script).unwrap();
        let stem = script.file_stem().unwrap().to_string_lossy().into_owned();
        for (number, record) in text.split("\n\n").enumerate() {
            let mut sql = record
                .lines()
                .skip_while(|line| !line.starts_with("query ") || line.starts_with("query error"))
                .skip(1)
                .take_while(|line| *line != "----")
                .collect::<Vec<_>>()
                .join("\n");
            if sql.is_empty() {
                continue;
            }
            // Without their order rows are compared as a set, and a LIMIT needs the order.
            if sql.ends_with(';') {
                sql.pop();
            }
            found.push((format!("{stem} {number}"), sql));
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn every_query_has_one_answer() {
    let lake = tempfile::tempdir().unwrap();
    seed::write_lake(lake.path()).await;
    let workers = [Worker::start(lake.path()), Worker::start(lake.path())];
    let urls: Vec<String> = workers.iter().map(|worker| worker.url.clone()).collect();
    let cluster = Cluster::new(&urls, None).unwrap().cutting_finely();
    let local = Folder::open(lake.path(), Options::default()).await.unwrap();
    let options = Options {
        engine: Engine::Distributed(cluster),
        ..Options::default()
    };
    let spread = Folder::open(lake.path(), options).await.unwrap();
    let (mut wrong, mut cut) = (Vec::new(), 0);
    let mut queries = queries();
    queries.extend(MORE.map(|(name, sql)| (name.to_string(), sql.to_string())));
    for (name, sql) in &queries {
        let expected = answer(&local, sql).await.unwrap();
        let found = answer(&spread, sql).await;
        if let Some((_, reason)) = CANNOT.iter().find(|(known, _)| known == name) {
            eprintln!("NOT DISTRIBUTED: {name}: {reason}");
            if found.is_ok() {
                wrong.push(format!("{name} works, and is listed as one that does not"));
            }
            continue;
        }
        match found {
            Err(error) => wrong.push(format!("{name}: {error}\n{sql}")),
            Ok(found) if lines(&found) != lines(&expected) => {
                let (found, expected) = (lines(&found), lines(&expected));
                let other = found.iter().zip(&expected).find(|(a, b)| a != b);
                wrong.push(format!(
                    "{name}: {} rows, expected {}; first difference {other:?}\n{sql}",
                    found.len(),
                    expected.len()
                ));
            }
            Ok(_) => {}
        }
        if is_cut(&spread, sql).await {
            cut += 1;
        }
    }
    eprintln!(
        "{} queries, {cut} of them cut into tasks for workers",
        queries.len()
    );
    let told = "EXPLAIN ANALYZE SELECT host, count(*) FROM alloc_events GROUP BY host";
    let told = lines(&answer(&spread, told).await.unwrap()).join("\n");
    assert!(told.contains("Stage 1"), "{told}");
    // Of what would be wrong, none.
    let lag = "SELECT lag(bytes) IGNORE NULLS OVER (ORDER BY seq) FROM alloc_events";
    let refused = answer(&spread, lag).await.unwrap_err().to_string();
    assert!(refused.contains("lag with IGNORE NULLS"), "{refused}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(
        cut * 2 > queries.len(),
        "{cut} of {} were cut",
        queries.len()
    );
}

/// A worker that is gone is named; one that is asked for other files refuses.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_gone_is_named() {
    let lake = tempfile::tempdir().unwrap();
    seed::write_lake(lake.path()).await;
    let [stays, goes] = [Worker::start(lake.path()), Worker::start(lake.path())];
    let urls = [stays.url.clone(), goes.url.clone()];
    let cluster = Cluster::new(&urls, None).unwrap().cutting_finely();
    let options = Options {
        engine: Engine::Distributed(cluster),
        ..Options::default()
    };
    let folder = Folder::open(lake.path(), options).await.unwrap();
    let sql = "SELECT host, count(*) FROM alloc_events GROUP BY host";
    answer(&folder, sql).await.unwrap();
    let address = goes.url.trim_start_matches("http://").to_string();
    drop(goes);
    let error = answer(&folder, sql).await.unwrap_err().to_string();
    assert!(error.contains(&address), "{error}");
}

#[test]
fn a_worker_listens_off_loopback_only_with_certificates() {
    let lake = tempfile::tempdir().unwrap();
    let output = binary()
        .args(["executor", "--listen", "0.0.0.0:0", "--data"])
        .arg(lake.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("--worker-cert"),
        "{text}"
    );
}

/// An authority, and what it gives to a node.
fn identity() -> Identity {
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = params.self_signed(&authority_key).unwrap();
    let issuer = rcgen::Issuer::new(params, authority_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let node = rcgen::CertificateParams::new(vec!["localhost".to_string()]).unwrap();
    let certificate = node.signed_by(&key, &issuer).unwrap();
    Identity {
        authority: authority.pem().into_bytes(),
        certificate: certificate.pem().into_bytes(),
        key: key.serialize_pem().into_bytes(),
    }
}

/// Workers with certificates talk to whoever has one of the same authority, and to nobody else.
#[tokio::test(flavor = "multi_thread")]
async fn workers_talk_to_their_own() {
    let lake = tempfile::tempdir().unwrap();
    seed::write_lake(lake.path()).await;
    let files = tempfile::tempdir().unwrap();
    let (ours, theirs) = (identity(), identity());
    let file = |name: &str, bytes: &[u8]| {
        let path = files.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_string()
    };
    let flags = [
        "--worker-ca".to_string(),
        file("ca.pem", &ours.authority),
        "--worker-cert".to_string(),
        file("node.pem", &ours.certificate),
        "--worker-key".to_string(),
        file("node.key", &ours.key),
    ];
    let workers = [1, 2].map(|_| Worker::start_with(lake.path(), &flags));
    let urls = workers.each_ref().map(|worker| {
        let port = worker.url.rsplit_once(':').unwrap().1;
        format!("https://localhost:{port}")
    });
    let sql = "SELECT host, count(*) FROM alloc_events GROUP BY host";
    let ask = async |identity: Identity| {
        let cluster = Cluster::new(&urls, Some(identity)).unwrap();
        let options = Options {
            engine: Engine::Distributed(cluster.cutting_finely()),
            ..Options::default()
        };
        let folder = Folder::open(lake.path(), options).await.unwrap();
        answer(&folder, sql).await
    };
    let local = Folder::open(lake.path(), Options::default()).await.unwrap();
    let expected = answer(&local, sql).await.unwrap();
    assert_eq!(lines(&ask(ours.clone()).await.unwrap()), lines(&expected));
    let stranger = Identity {
        authority: ours.authority.clone(),
        ..theirs.clone()
    };
    assert!(ask(stranger).await.is_err(), "a stranger was let in");
    assert!(ask(theirs).await.is_err(), "an unknown worker was believed");
    // In the clear there is nothing to be had.
    let cluster = Cluster::new(&workers.each_ref().map(|worker| worker.url.clone()), None);
    let options = Options {
        engine: Engine::Distributed(cluster.unwrap().cutting_finely()),
        ..Options::default()
    };
    let folder = Folder::open(lake.path(), options).await.unwrap();
    assert!(answer(&folder, sql).await.is_err());
}
