//! What travels: spans, requests, each row once, over kills and failures.

use super::*;

/// A row a second of each of two processes, for two minutes; an OOM of the first after 90 s.
#[test]
fn an_oom_takes_the_minute_before_it_and_ten_seconds_after() {
    let mut agent = Agent::new(options());
    let mut all = Vec::new();
    for second in 0..120 {
        NOW.set(START + second * SECOND);
        let mut rows = vec![
            row(2 * second, 1, NOW.get()),
            row(2 * second + 1, 2, NOW.get()),
        ];
        all.extend(rows.clone());
        if second == 90 {
            rows.push(oom(1000, 1, NOW.get() + 1));
            assert!(agent.arrived().is_empty());
        }
        agent.flush(rows);
    }
    agent.settle();
    let at = START + 90 * SECOND + 1;
    let mut expected = of(&all, 1, at - 60 * SECOND, at + 10 * SECOND);
    // Seconds 31 to 100.
    assert_eq!(expected.len(), 70);
    expected.insert(1000);
    assert_eq!(agent.arrived(), expected);
    let report = agent.recorder().report();
    assert_eq!((report.triggers, report.travelled_rows), (1, 70));
    assert_eq!((report.rows, report.recorded_rows), (241, 241));
    assert!(agent.counts.is_empty());
}

/// Random spans, asked for by OOMs, failed allocations and a collector, that overlap at will;
/// random kills; two processes.
#[test]
fn overlapping_spans_and_kills_carry_each_row_once() {
    for seed in 1..=8u64 {
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut draw = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % below
        };
        let mut agent = Agent::new(Options {
            before: Duration::from_secs(8),
            after: Duration::from_secs(3),
            ..options()
        });
        let (mut all, mut expected) = (Vec::new(), BTreeSet::new());
        let mut spans = Vec::new();
        let mut seq = 0;
        for _ in 0..40 {
            NOW.set(NOW.get() + SECOND);
            let now = NOW.get();
            let mut rows = Vec::new();
            for _ in 0..draw(20) {
                seq += 1;
                let late = draw(1500) as i64 * 1_000_000;
                rows.push(row(seq, 1 + draw(2) as i64, now - late));
            }
            all.extend(rows.clone());
            let process = 1 + draw(2) as i64;
            seq += 1;
            match draw(12) {
                0 => {
                    rows.push(oom(seq, process, now));
                    expected.insert(seq);
                    spans.push((process, now - 8 * SECOND, now + 3 * SECOND));
                }
                1 => {
                    rows.push(failed(seq, process, now));
                    spans.push((process, now - 8 * SECOND, now + 3 * SECOND));
                }
                2 => {
                    let from = now - draw(30) as i64 * SECOND;
                    let to = from + 1 + draw(20) as i64 * SECOND;
                    agent
                        .link
                        .ask(request(&format!("r{seq}"), process, from, to));
                    spans.push((process, from, to));
                }
                _ => {}
            }
            let kill = match draw(6) {
                0 => Kill::Taken,
                1 => Kill::Shipped,
                2 => Kill::Journalled,
                _ => Kill::Never,
            };
            let asked: Vec<_> = agent.link.take();
            for request in &asked {
                agent.link.ask(request.clone());
            }
            agent.flush_killed(rows, Vec::new(), kill);
            // The collector asks again after each restart, since it has no answer.
            for request in asked {
                agent.link.ask(request);
            }
        }
        agent.settle();
        for (process, from, to) in &spans {
            expected.extend(of(&all, *process, *from, *to));
        }
        assert!(!expected.is_empty());
        assert_eq!(agent.arrived(), expected, "seed {seed}");
    }
}

/// A request over a time of which the first half is gone: what is there travels, what is gone is
/// said, and the same question again brings the same answer and no row.
#[test]
fn a_request_is_answered_with_what_is_gone() {
    let mut agent = Agent::new(Options {
        max_age: Duration::from_secs(60),
        ..options()
    });
    let mut all = Vec::new();
    for second in 0..100 {
        NOW.set(START + second * SECOND);
        let rows = vec![row(second, 7, NOW.get())];
        all.extend(rows.clone());
        agent.flush(rows);
    }
    let oldest = agent.recorder().entries[0].first_ns;
    assert!(oldest > START + 30 * SECOND);
    agent
        .link
        .ask(request("r1", 7, START, START + 150 * SECOND));
    agent
        .link
        .ask(request("r2", 7, START + 60 * SECOND, START + 60 * SECOND));
    agent.flush(Vec::new());
    assert!(
        agent
            .link
            .answers(u64::MAX)
            .iter()
            .all(|(id, _)| id == "r2")
    );
    let refusal = agent.link.answers(u64::MAX)[0].1.refused.clone();
    assert!(refusal.unwrap().contains("not behind its beginning"));
    // Rows of the span that are still to come belong to it, also after a restart.
    agent.start();
    NOW.set(START + 110 * SECOND);
    let late = row(1000, 7, NOW.get());
    all.push(late.clone());
    agent.flush(vec![late]);
    NOW.set(START + 149 * SECOND);
    agent.settle();
    let answers: BTreeMap<_, _> = agent.link.answers(u64::MAX).into_iter().collect();
    let answer = &answers["r1"];
    let expected = of(&all, 7, oldest, i64::MAX);
    assert_eq!(agent.arrived(), expected);
    assert_eq!(
        (answer.rows, answer.rows_before),
        (expected.len() as u64, 0)
    );
    let gone = of(&all, 7, START, oldest);
    assert_eq!(
        answer.overwritten,
        [Stretch {
            first_ns: START,
            last_ns: oldest - SECOND,
            rows: gone.len() as u64,
        }]
    );
    // True only when the collector has the last batch.
    assert!(answer.last_batch_seq > 0);
    assert!(
        agent
            .link
            .answers(answer.last_batch_seq)
            .iter()
            .all(|(id, _)| id != "r1")
    );
    // Another one over the same rows brings none of them again.
    agent
        .link
        .ask(request("r3", 7, START, START + 105 * SECOND));
    agent.settle();
    let answers: BTreeMap<_, _> = agent.link.answers(u64::MAX).into_iter().collect();
    assert_eq!(answers["r3"].rows, 0);
    agent.arrived();
}

/// What has travelled is not known then: it must not travel, and stays readable.
#[test]
fn a_damaged_state_lets_nothing_travel_twice() {
    let mut agent = Agent::new(options());
    agent.flush(vec![row(0, 1, START), oom(2, 1, START + 1)]);
    agent.settle();
    assert_eq!(agent.arrived(), [0, 2].into());
    let state = agent.folder.path().join(FOLDER).join(state::FILE);
    fs::write(&state, "rubbish").unwrap();
    agent.start();
    NOW.set(NOW.get() + SECOND);
    agent.flush(vec![
        row(3, 1, START + 5 * SECOND),
        failed(4, 1, START + 6 * SECOND),
    ]);
    agent.settle();
    assert_eq!(agent.arrived(), [0, 2, 3].into());
    assert_eq!(agent.recorder().report().rows, 3);
}

/// A commit that fails: the rows come again with the next flush, under the same numbers.
#[test]
fn a_commit_that_fails_keeps_no_row_twice() {
    let mut agent = Agent::new(options());
    let mut rows = Rows {
        alloc_events: vec![row(0, 1, START), oom(2, 1, START)],
        ..Rows::default()
    };
    for _ in 0..3 {
        agent.spool.next = agent.next_batch_seq;
        let mut taken = Taken::default();
        let recorder = agent.recorder.as_mut().unwrap();
        recorder
            .take(&mut rows, &mut agent.spool, &mut taken)
            .unwrap();
        recorder.ship(&mut agent.spool, &mut taken).unwrap();
        assert!(taken.must_commit);
        assert_eq!(rows.framework_events.len(), 1);
        // The spool removes what it wrote.
        let written = folder::list(agent.folder.path()).unwrap();
        assert_eq!(written.len(), 1);
        fs::remove_file(&written[0].path).unwrap();
    }
    let again = rows
        .framework_events
        .drain(..)
        .chain(rows.alloc_events.drain(..));
    agent.flush(again.collect());
    agent.settle();
    assert_eq!(agent.arrived(), [0, 2].into());
    assert_eq!(agent.recorder().report().rows, 2);
}
