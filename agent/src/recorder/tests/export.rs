//! What a person takes out of a ring, and the stacks that its rows refer to.

use super::*;

fn folded(folder: &Path) -> Vec<String> {
    let mut texts = Vec::new();
    let Ok(files) = fs::read_dir(folder.join("stacks")) else {
        return texts;
    };
    for file in files {
        let opened = fs::File::open(file.unwrap().path()).unwrap();
        for batch in parquet_file::decode(Table::Stacks, opened).unwrap() {
            let column = batch.column_by_name("folded").unwrap().as_string::<i32>();
            texts.extend((0..batch.num_rows()).map(|i| column.value(i).to_string()));
        }
    }
    texts.sort();
    texts
}

/// Stacks come one by one over 300 flushes and are used again much later, while the ring
/// overwrites and the agent restarts: an export has each that its rows refer to, once.
#[test]
fn an_export_has_rows_and_stacks() {
    let mut agent = Agent::new(Options {
        max_age: Duration::from_secs(100),
        ..options()
    });
    let mut all = Vec::new();
    for second in 0..300 {
        NOW.set(START + second * SECOND);
        let new = 100 + second;
        // Its own, one that was named long before, and one of all.
        let used = [new, 100 + second / 2, 100];
        let rows: Vec<_> = (0..3)
            .map(|i| AllocRow {
                stack_id: Some(used[i as usize]),
                ..row(10 * second + i, 1 + i % 2, NOW.get())
            })
            .collect();
        all.extend(rows.clone());
        let kill = if second % 50 == 25 {
            Kill::Shipped
        } else {
            Kill::Never
        };
        agent.flush_killed(rows, vec![stack(new)], kill);
    }
    let stacks = fs::read_dir(agent.folder.path().join(FOLDER)).unwrap();
    let stacks = stacks.filter(|file| {
        let name = file.as_ref().unwrap().file_name();
        name.to_str().unwrap().starts_with("stacks-")
    });
    assert!(stacks.count() <= 65);
    let to = tempfile::tempdir().unwrap();
    let (from_ns, to_ns) = (START + 250 * SECOND, START + 280 * SECOND);
    let wanted = Wanted {
        process: Some(Who::Pid(1)),
        from: Some(Moment(from_ns)),
        to: Some(Moment(to_ns)),
    };
    let exported = view::export(agent.folder.path(), &wanted, to.path()).unwrap();
    let expected = of(&all, 1, from_ns, to_ns);
    assert_eq!(exported.rows, expected.len() as u64);
    let ids: BTreeSet<i64> = all
        .iter()
        .filter(|row| expected.contains(&row.seq))
        .filter_map(|row| row.stack_id)
        .collect();
    let mut names: Vec<_> = ids.iter().map(|id| format!("f{id}")).collect();
    names.sort();
    assert_eq!(folded(to.path()), names);
    assert_eq!(
        (exported.stacks, exported.stacks_missing),
        (ids.len() as u64, 0)
    );
    let again = view::export(agent.folder.path(), &wanted, to.path()).unwrap_err();
    assert!(again.to_string().contains("not empty"), "{again}");
    let nothing = view::list(to.path(), &wanted).unwrap_err();
    assert!(nothing.to_string().contains("no recorder"), "{nothing}");
}

/// A stack that was named before the recorder was there is asked for, once.
#[test]
fn stacks_that_are_missing_are_asked_for() {
    let mut agent = Agent::new(options());
    let with_stack = |seq| AllocRow {
        stack_id: Some(5),
        ..row(seq, 1, START + seq)
    };
    let mut asked = Vec::new();
    for seq in 0..3 {
        let mut rows = Rows {
            alloc_events: vec![with_stack(seq)],
            ..Rows::default()
        };
        let mut taken = Taken::default();
        let recorder = agent.recorder.as_mut().unwrap();
        recorder
            .take(&mut rows, &mut agent.spool, &mut taken)
            .unwrap();
        recorder.committed();
        asked.push(taken.stacks);
    }
    assert_eq!(asked, [vec![5], vec![], vec![]]);
}
