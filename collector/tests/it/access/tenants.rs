//! What a tenant sees, and every way around it that was thought of.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;

use super::*;

/// One host, two tenants. Of process 1 team-a's rows, of 2 team-b's, of 3 nobody's, of 4 both's.
async fn two_tenants(site: &Site, collector: &Collector) {
    let (agent, host) = ("a", "gpu-1");
    let ids = numbers(&[1, 2, 3, 4, 4]);
    let processes = with(
        rows(Table::Processes, agent, 1, 5),
        &[
            ("process_id", Arc::clone(&ids)),
            (
                "namespace",
                texts(&[
                    Some("team-a"),
                    Some("team-b"),
                    None,
                    Some("team-a"),
                    Some("team-b"),
                ]),
            ),
            (
                "command",
                texts(&[
                    Some("mine"),
                    Some("theirs-secret"),
                    Some("nobodys"),
                    Some("both"),
                    Some("both"),
                ]),
            ),
        ],
    );
    let processes = with(
        processes,
        &[("ended", no_times(5)), ("started", no_times(5))],
    );
    let four = numbers(&[1, 2, 3, 4]);
    let mut batches = vec![of_host(Table::Processes, agent, host, 1, processes)];
    let stack_ids = numbers(&[11, 22, 33, 44]);
    let mut seq = 1;
    for table in [
        Table::AllocEvents,
        Table::HostBuffers,
        Table::StackWindows,
        Table::DeviceWindows,
        Table::AllocatorSamples,
        Table::Segments,
        Table::Traffic,
        Table::Devices,
        Table::AgentWindows,
        Table::Stacks,
    ] {
        seq += 1;
        let mut rows = with(
            rows(table, agent, seq, 4),
            &[
                ("process_id", Arc::clone(&four)),
                ("stack_id", Arc::clone(&stack_ids)),
            ],
        );
        if table == Table::AllocEvents {
            rows = with(rows, &[("alloc_stack_id", Arc::clone(&stack_ids))]);
        }
        if table == Table::Segments {
            let none = no_blocks(&rows);
            rows = with(rows, &[("blocks", none)]);
        }
        if table == Table::Devices {
            rows = with(rows, &[("processes", device_processes())]);
        }
        if table == Table::Stacks {
            let folded = texts(&[Some("mine"), Some("theirs-secret"), Some("c"), Some("d")]);
            rows = with(rows, &[("folded", folded)]);
        }
        batches.push(of_host(table, agent, host, seq, rows));
    }
    let acks = push_as(collector, site.agent(host), batches).await.unwrap();
    assert!(
        outcomes(&acks)
            .iter()
            .all(|outcome| *outcome == Outcome::Stored),
        "{acks:?}"
    );
    eventually("all rows", async || {
        let sql = "SELECT count(*) FROM stacks";
        let rows = site.query(collector, &site.admin, sql).await.unwrap();
        (rows == ["4"]).then_some(())
    })
    .await;
}

fn no_times(rows: usize) -> ArrayRef {
    let none: Vec<Option<i64>> = vec![None; rows];
    Arc::new(arrow::array::TimestampMicrosecondArray::from(none).with_timezone("UTC"))
}

/// The same number of empty lists.
fn no_blocks(rows: &RecordBatch) -> ArrayRef {
    let column = rows.column_by_name("blocks").unwrap();
    let arrow::datatypes::DataType::List(element) = column.data_type() else {
        panic!("blocks is a list")
    };
    Arc::new(arrow::array::ListArray::new(
        Arc::clone(element),
        arrow::buffer::OffsetBuffer::from_lengths(vec![0; rows.num_rows()]),
        arrow::array::new_empty_array(element.data_type()),
        None,
    ))
}

/// On each of four samples the same three: processes 1, 2, and one that is not known.
fn device_processes() -> ArrayRef {
    use arrow::array::{Int32Array, ListArray, StructArray};
    use vramscope_wire::schema::device_process_fields;
    let pids: Vec<i32> = (0..4).flat_map(|_| [101, 102, 103]).collect();
    let ids: Vec<Option<i64>> = (0..4).flat_map(|_| [Some(1), Some(2), None]).collect();
    let used: Vec<i64> = (0..4).flat_map(|_| [7, 8, 9]).collect();
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int32Array::from(pids)),
        Arc::new(Int64Array::from(ids)),
        Arc::new(Int64Array::from(used)),
    ];
    let values = StructArray::new(device_process_fields(), columns, None);
    let schema = Table::Devices.schema();
    let field = schema.field_with_name("processes").unwrap();
    let arrow::datatypes::DataType::List(element) = field.data_type() else {
        panic!("processes is a list")
    };
    Arc::new(ListArray::new(
        Arc::clone(element),
        arrow::buffer::OffsetBuffer::from_lengths(vec![3; 4]),
        Arc::new(values),
        None,
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_sees_its_own_pods_and_no_way_around() {
    let site = Site::new();
    let a = site.token(&["a", "--namespace", "team-a"]);
    let both = site.token(&["both", "--namespace", "team-a", "--namespace", "team-b"]);
    let none = site.token(&["none", "--namespace", "team-z"]);
    let all = site.token(&["all"]);
    let collector = site.start();
    two_tenants(&site, &collector).await;
    let ask = async |token: &str, sql: &str| site.query(&collector, token, sql).await;
    let ids = "SELECT DISTINCT process_id FROM processes";
    assert_eq!(ask(&a, ids).await.unwrap(), ["1"]);
    assert_eq!(ask(&both, ids).await.unwrap(), ["1", "2", "4"]);
    assert_eq!(ask(&all, ids).await.unwrap(), ["1", "2", "3", "4"]);
    assert!(ask(&none, ids).await.unwrap().is_empty());

    for table in [
        "alloc_events",
        "host_buffers",
        "stack_windows",
        "device_windows",
        "allocator_samples",
        "segments",
        "traffic",
    ] {
        for (token, wanted) in [
            (&a, vec!["1"]),
            (&both, vec!["1", "2", "4"]),
            (&none, vec![]),
        ] {
            let rows = ask(token, &format!("SELECT process_id FROM {table}")).await;
            assert_eq!(rows.unwrap(), wanted, "{table}");
        }
        // Statistics of files know of all rows.
        for sql in [
            format!("SELECT count(*) FROM {table}"),
            format!("SELECT max(process_id) FROM {table}"),
            format!("SELECT count(*) FROM datafusion.public.{table} WHERE process_id > 0"),
        ] {
            assert_eq!(ask(&a, &sql).await.unwrap(), ["1"], "{sql}");
        }
        assert!(
            ask(&a, &format!("SELECT 1 FROM {table} WHERE process_id = 2"))
                .await
                .unwrap()
                .is_empty()
        );
    }
    assert_eq!(
        ask(&a, "SELECT stack_id, folded FROM stacks")
            .await
            .unwrap(),
        ["11|mine"]
    );
    assert_eq!(ask(&a, "SELECT count(*) FROM stacks").await.unwrap(), ["1"]);
    assert_eq!(
        ask(&all, "SELECT count(*) FROM stacks").await.unwrap(),
        ["4"]
    );

    // Of its host a tenant sees what its pods could see; of others nothing.
    let own = "SELECT DISTINCT p['process_id'], p['used_bytes'] FROM (SELECT unnest(processes) AS p FROM devices)";
    assert_eq!(ask(&a, own).await.unwrap(), ["1|7"]);
    assert_eq!(ask(&all, own).await.unwrap().len(), 3);
    assert_eq!(
        ask(&none, "SELECT count(*) FROM devices").await.unwrap(),
        ["0"]
    );
    assert_eq!(
        ask(&none, "SELECT count(*) FROM agent_windows")
            .await
            .unwrap(),
        ["0"]
    );

    // The collector's own tables.
    assert_eq!(
        ask(&a, "SELECT count(*) FROM batches").await.unwrap(),
        ["0"]
    );
    let batches = ask(&all, "SELECT count(*) > 0 FROM batches").await;
    assert_eq!(batches.unwrap(), ["true"]);
    let who = "SELECT DISTINCT who FROM query_log";
    for (token, name) in [(&a, "a"), (&all, "all")] {
        let seen = eventually("rows of query_log", async || {
            let seen = ask(token, who).await.unwrap();
            (!seen.is_empty()).then_some(seen)
        })
        .await;
        assert_eq!(seen, [name]);
    }
    let seen = ask(&site.admin, who).await.unwrap();
    assert!(seen.len() >= 4, "{seen:?}");

    // Views, and functions that read tables.
    assert_eq!(
        ask(&a, "SELECT process_id FROM current_processes")
            .await
            .unwrap(),
        ["1"]
    );
    let views = ask(&a, "SELECT table_name FROM information_schema.views")
        .await
        .unwrap();
    let admin = ask(
        &site.admin,
        "SELECT table_name FROM information_schema.views",
    )
    .await;
    assert_eq!(views, admin.unwrap());
    for function in ["leak_verdicts()", "leak_evaluations()"] {
        let sql = format!("SELECT DISTINCT process_id FROM {function}");
        let seen = ask(&a, &sql).await.unwrap();
        assert!(seen.iter().all(|id| id == "1"), "{function}: {seen:?}");
    }

    // What an error says is computed over rows, which must be visible ones.
    for sql in [
        "SELECT CAST(command AS BIGINT) FROM processes",
        "SELECT 1 FROM processes WHERE CAST(command AS BIGINT) = 1",
        "SELECT 1 FROM stacks WHERE CAST(folded AS BIGINT) = 1",
        "SELECT 1 FROM processes WHERE process_id = 2 AND CAST(command AS BIGINT) = 1",
        "SELECT 1 FROM processes ORDER BY CAST(command AS BIGINT) LIMIT 1",
        "SELECT a.process_id FROM processes a JOIN processes b ON CAST(a.command AS BIGINT) = b.process_id",
    ] {
        let text = format!("{:?}", ask(&a, sql).await);
        assert!(!text.contains("theirs"), "{sql}: {text}");
        assert!(!text.contains("nobodys"), "{sql}: {text}");
    }
    let error = ask(&a, "SELECT CAST(command AS BIGINT) FROM processes")
        .await
        .unwrap_err();
    assert!(error.contains("mine"), "{error}");
    // Plans say nothing of files, rows or hidden ids.
    for explain in ["EXPLAIN", "EXPLAIN VERBOSE", "EXPLAIN ANALYZE"] {
        let plan = ask(&a, &format!("{explain} SELECT * FROM alloc_events, stacks")).await;
        let plan = format!("{plan:?}");
        assert!(
            !plan.contains(".parquet") && !plan.contains("_delta_log"),
            "{plan}"
        );
        assert!(plan.contains("Fence"), "{plan}");
    }
    assert!(collector.stop().success());
}
