//! What the collector cannot keep now: agents are told to come back, why, and nothing is lost.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use vramscope_wire::Table;
use vramscope_wire::proto::Outcome;

use crate::support::*;

/// Over its limit the log takes no more, and says so in a way that loses nothing: a small batch
/// behind the one put off must wait, or that one would be taken for a resend later.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_log_puts_off_in_order() {
    let data = tempfile::tempdir().unwrap();
    let small = |seq| made(Table::Stacks, "agent-a", seq, 5).0;
    let large = made(Table::Stacks, "agent-a", 2, 5000).0;
    let limit = 10 * small(1).parquet.len();
    assert!(large.parquet.len() > limit);
    let limit = limit.to_string();
    let flags = [NEVER, &["--wal-limit-bytes", &limit]].concat();
    let collector = Collector::start(data.path(), &flags);
    let acks = push(
        &collector.address,
        vec![small(1), large.clone(), small(3), large.clone(), small(3)],
    )
    .await;
    let expected = [
        Outcome::Stored,
        Outcome::Retry,
        Outcome::Retry,
        Outcome::Retry,
        Outcome::Retry,
    ];
    assert_eq!(outcomes(&acks), expected, "{acks:?}");
    assert!(
        acks[1].message.contains("wal_limit_bytes"),
        "{}",
        acks[1].message
    );
    assert!(collector.stop().success());

    // The stop has committed the log: now there is room, and on one stream the line moves on.
    let collector = Collector::start(
        data.path(),
        &[FAST, &["--wal-limit-bytes", &limit]].concat(),
    );
    let acks = push(&collector.address, vec![small(1), large, small(3)]).await;
    assert_eq!(
        outcomes(&acks)[..2],
        [Outcome::Duplicate, Outcome::Stored],
        "{acks:?}"
    );
    let (mut last, give_up) = (acks[2].outcome(), Instant::now() + Duration::from_secs(60));
    while last == Outcome::Retry {
        // Rows are to be seen a moment before the log has room again.
        assert!(Instant::now() < give_up);
        tokio::time::sleep(Duration::from_millis(20)).await;
        last = push(&collector.address, vec![small(3)]).await[0].outcome();
    }
    assert_eq!(last, Outcome::Stored);
    wait_for_rows(&collector.address, Table::Stacks, 5010).await;
}

/// A file system that refuses is a reason to come back, not to give up.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_cannot_be_written_puts_off() {
    let data = tempfile::tempdir().unwrap();
    let collector = Collector::start(data.path(), FAST);
    let in_the_way = data.path().join("_wal/00000000000000000001.wal");
    std::fs::create_dir(&in_the_way).unwrap();
    let (batch, _) = made(Table::Stacks, "agent-a", 1, 5);
    let acks = push(&collector.address, vec![batch.clone()]).await;
    assert_eq!(outcomes(&acks), [Outcome::Retry]);
    assert!(
        acks[0].message.contains("_wal/00000000000000000001.wal"),
        "{}",
        acks[0].message
    );
    std::fs::remove_dir(&in_the_way).unwrap();
    assert_eq!(
        outcomes(&push(&collector.address, vec![batch]).await),
        [Outcome::Stored]
    );
    wait_for_rows(&collector.address, Table::Stacks, 5).await;
}

/// A full disk: batches are put off, with the reason; when there is room again, the same stream of
/// batches is stored, and everything is there once.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_puts_off_and_loses_nothing() {
    let Some(disk) = SmallDisk::mount(24 << 20) else {
        eprintln!("skipped: a small file system cannot be mounted here (needs root)");
        return;
    };
    let data = disk.path().join("lake");
    let collector = Collector::start(&data, FAST);
    let (first, first_rows) = made(Table::Stacks, "agent-a", 1, 5);
    let acks = push(&collector.address, vec![first]).await;
    assert_eq!(outcomes(&acks), [Outcome::Stored]);
    wait_for_rows(&collector.address, Table::Stacks, 5).await;
    wait_for_ledger(&collector.address, 1).await;
    let filler = disk.path().join("filler");
    fill(&filler);
    let (second, second_rows) = made(Table::Stacks, "agent-a", 2, 2000);
    let acks = push(&collector.address, vec![second.clone()]).await;
    assert_eq!(outcomes(&acks), [Outcome::Retry], "{acks:?}");
    assert!(
        acks[0].message.contains("_wal/") && acks[0].message.contains("No space left"),
        "{}",
        acks[0].message
    );
    std::fs::remove_file(&filler).unwrap();
    let acks = push(&collector.address, vec![second]).await;
    assert_eq!(outcomes(&acks), [Outcome::Stored], "{acks:?}");
    wait_for_rows(&collector.address, Table::Stacks, 2005).await;
    wait_for_ledger(&collector.address, 2).await;
    assert_eq!(
        stored(&collector.address, Table::Stacks).await,
        lines(&[first_rows, second_rows])
    );
    assert!(collector.stop().success());
}

/// Writes zeros until nothing more fits.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    for piece in [1 << 20, 4096, 1] {
        while file.write_all(&vec![0; piece]).is_ok() {}
    }
}

/// A file system in memory, unmounted when dropped.
struct SmallDisk {
    folder: tempfile::TempDir,
}

impl SmallDisk {
    fn mount(bytes: u64) -> Option<SmallDisk> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args([
                "-t",
                "tmpfs",
                "-o",
                &format!("size={bytes}"),
                "vramscope-test",
            ])
            .arg(folder.path())
            .output()
            .is_ok_and(|output| output.status.success());
        mounted.then_some(SmallDisk { folder })
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount")
            .arg("-l")
            .arg(self.folder.path())
            .status();
    }
}
