//! Room: what is overwritten, what is dropped, what waits, and the modes; and what recording costs.

use super::*;

/// Every row is kept, has travelled, or is counted as overwritten; nothing else.
#[test]
fn what_is_overwritten_is_counted_to_the_row() {
    let mut agent = Agent::new(Options {
        max_bytes: 300_000,
        ..options()
    });
    let mut seq = 0;
    let mut all = Vec::new();
    for second in 0..120 {
        NOW.set(START + second * SECOND);
        let mut rows: Vec<_> = (0..50)
            .map(|i| row(seq + i, 1 + i % 3, NOW.get() + i * 1000))
            .collect();
        seq += 50;
        all.extend(rows.clone());
        if second == 40 {
            seq += 1;
            rows.push(oom(seq, 2, NOW.get()));
            all.push(oom(seq, 2, NOW.get()));
            seq += 1;
        }
        let kill = if second % 17 == 5 {
            Kill::Journalled
        } else {
            Kill::Never
        };
        agent.flush_killed(rows, Vec::new(), kill);
        let on_disk: u64 = fs::read_dir(agent.folder.path().join(FOLDER))
            .unwrap()
            .map(|file| room::on_disk(file.unwrap().metadata().unwrap().len()))
            .sum();
        // The state is beside it.
        assert!(on_disk <= 300_000 + 2 * 4096, "{on_disk}");
    }
    agent.settle();
    let kept: BTreeSet<i64> = agent
        .recorder()
        .entries
        .iter()
        .flat_map(|entry| {
            let path = entry.path(&agent.folder.path().join(FOLDER));
            let all = Pick {
                process_id: None,
                from_ns: i64::MIN,
                to_ns: i64::MAX,
            };
            files::pick_all(&path, all).unwrap()
        })
        .flat_map(|batch| {
            let seqs = batch.column_by_name("seq").unwrap();
            seqs.as_primitive::<Int64Type>().values().to_vec()
        })
        .collect();
    let arrived = agent.arrived();
    let gone: Vec<&AllocRow> = all
        .iter()
        .filter(|row| !kept.contains(&row.seq) && !arrived.contains(&row.seq))
        .collect();
    assert!(!gone.is_empty() && !kept.is_empty() && !arrived.is_empty());
    let report = agent.recorder().report();
    assert_eq!(report.overwritten_rows, gone.len() as u64);
    assert_eq!(agent.counts[RECORDER_OVERWRITTEN], gone.len() as u64);
    assert_eq!(
        report.overwritten_first_ns,
        gone.iter().map(|row| row.ts_ns).min()
    );
    assert_eq!(
        report.overwritten_last_ns,
        gone.iter().map(|row| row.ts_ns).max()
    );
    // By process, and what the listing says of it.
    let wanted = Wanted {
        process: None,
        from: None,
        to: None,
    };
    let listing = view::list(agent.folder.path(), &wanted).unwrap();
    for process in 1..=3 {
        let line = listing.processes.iter().find(|l| l.process_id == process);
        let line = line.unwrap();
        let told: u64 = line.overwritten.iter().map(|stretch| stretch.rows).sum();
        let of_process = gone.iter().filter(|row| row.process_id == process);
        assert_eq!(told, of_process.count() as u64);
        let of_process = all.iter().filter(|row| row.process_id == process);
        let there = of_process.filter(|row| kept.contains(&row.seq)).count();
        assert_eq!(line.rows, there as u64);
    }
}

#[test]
fn what_finds_no_room_in_the_spool_waits() {
    let mut agent = Agent::new(options());
    agent.spool.has_room = false;
    agent.flush(vec![row(0, 1, START), oom(2, 1, START + 1)]);
    NOW.set(START + 30 * SECOND);
    agent.flush(Vec::new());
    let report = agent.recorder().report();
    assert!(report.waits_for_spool && report.open_spans == 1);
    assert_eq!(agent.arrived(), [2].into());
    agent.spool.has_room = true;
    agent.settle();
    assert_eq!(agent.arrived(), [0, 2].into());
}

/// A disk without room: the newest rows go, counted; the oldest stay; the spool goes on.
#[test]
fn a_full_disk_drops_the_newest_rows() {
    let mut agent = Agent::new(options());
    agent.flush(vec![row(0, 1, START), row(1, 1, START + 1)]);
    agent.spool.has_reserve = false;
    agent.flush(vec![row(2, 1, START + 2), failed(3, 1, START + 3)]);
    agent.spool.has_reserve = true;
    agent.flush(vec![row(4, 1, START + 4)]);
    agent.settle();
    assert_eq!(agent.counts, [(RECORDER_FULL, 1)].into());
    assert_eq!(agent.recorder().report().full_rows, 1);
    assert_eq!(agent.arrived(), [0, 1, 4].into());
}

#[test]
fn modes_do_what_they_say() {
    let rows = || vec![row(0, 1, START), oom(2, 1, START + 1)];
    let off = || Options {
        max_bytes: 0,
        ..options()
    };
    // Recorded, and stays: an OOM still travels.
    let mut agent = Agent::new(Options {
        travel: Travel::Never,
        ..options()
    });
    agent.flush(rows());
    agent.link.ask(request("r", 1, START, START + 10));
    agent.settle();
    assert_eq!(agent.arrived(), [2].into());
    assert_eq!(agent.recorder().report().rows, 2);
    let answers = agent.link.answers(u64::MAX);
    assert!(answers[0].1.refused.as_ref().unwrap().contains("never"));
    // All travels.
    let mut agent = Agent::new(Options {
        travel: Travel::Always,
        ..off()
    });
    agent.flush(rows());
    assert_eq!(agent.arrived(), [0, 2].into());
    assert_eq!(agent.recorder().report().rows, 0);
    // Neither.
    let mut agent = Agent::new(off());
    agent.flush(rows());
    agent.link.ask(request("r", 1, START, START + 10));
    agent.settle();
    assert_eq!(agent.arrived(), [2].into());
    assert_eq!(agent.counts, [(RECORDER_OFF, 1)].into());
    assert!(
        agent.link.answers(u64::MAX)[0]
            .1
            .refused
            .as_ref()
            .unwrap()
            .contains("off")
    );
}

/// How fast rows are recorded and travel, for docs/flight-recorder.md. Measures, asserts nothing
/// about time:
/// `cargo test --workspace --lib -- --ignored --nocapture recording_speed`
#[test]
#[ignore = "a measurement"]
fn recording_speed() {
    const FLUSHES: i64 = 20;
    const ROWS: i64 = 50_000;
    let mut agent = Agent::new(options());
    let mut spent = Duration::ZERO;
    let cpu_before = clock::cpu_ns();
    let mut cpu_making = 0;
    for flush in 0..FLUSHES {
        let making = clock::cpu_ns();
        // A block lives for some hundred others; 300 stacks; totals that go up and down.
        let rows: Vec<_> = (0..ROWS)
            .map(|i| {
                let seq = flush * ROWS + i;
                let mixed = (seq as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
                let bytes = 512 * (1 + (mixed % 4096) as i64);
                AllocRow {
                    ts_enter_ns: Some(START + seq * 10_000),
                    tid: Some(7),
                    device: Some(0),
                    stream: Some((mixed % 3) as i64),
                    bytes: Some(bytes),
                    requested_bytes: Some(bytes - (mixed % 512) as i64),
                    address: Some(0x7f00_0000_0000 + (mixed % (1 << 25)) as i64 * 512),
                    stack_id: Some((mixed % 300) as i64),
                    stack_quality: Some("frame_pointer"),
                    alloc_seq: (seq % 2 == 1).then_some(seq - (mixed % 400) as i64),
                    lifetime_ns: (seq % 2 == 1).then_some((mixed % 4_000_000) as i64),
                    segment_address: Some(0x7f00_0000_0000 + (mixed % 64) as i64 * (20 << 20)),
                    allocator_allocated_bytes: Some((4 << 30) + (mixed % 100_000) as i64 * 512),
                    allocator_reserved_bytes: Some((5 << 30) + (seq / 10_000) * (2 << 20)),
                    ..row(seq, 1, START + seq * 10_000)
                }
            })
            .collect();
        cpu_making += clock::cpu_ns() - making;
        NOW.set(START + flush * ROWS * 10_000);
        let begun = Instant::now();
        agent.flush(rows);
        spent += begun.elapsed();
    }
    let cpu = clock::cpu_ns() - cpu_before - cpu_making;
    let report = agent.recorder().report();
    let rows = report.recorded_rows as f64;
    println!(
        "recorded {rows} rows: {:.0} rows a second of processor, {:.0} by the clock, {:.1} bytes a row",
        rows / (cpu as f64 / 1e9),
        rows / spent.as_secs_f64(),
        report.bytes as f64 / rows
    );
    let cpu_before = clock::cpu_ns();
    agent
        .link
        .ask(request("r", 1, START, START + FLUSHES * ROWS * 10_000));
    agent.settle();
    let carried = agent.recorder().report().travelled_rows as f64;
    println!(
        "carried {carried} rows: {:.0} rows a second of processor",
        carried / ((clock::cpu_ns() - cpu_before) as f64 / 1e9)
    );
}
