//! What the fuzz target does with its bytes. It checks more than that nothing panics: what the
//! reader accepts has to keep its promises.

use vramscope_snapshot::{Error, Item, read};

/// A snapshot, as a pickle or JSON.
pub fn snapshot(bytes: &[u8]) {
    let outcome = read(bytes, bytes.len() as u64, |item, tables| {
        let stack = match &item {
            Item::Segment(segment) => {
                let mut end = segment.address;
                for block in &segment.blocks {
                    assert_eq!(block.address, end, "blocks tile their segment");
                    assert!(block.bytes > 0);
                    end += block.bytes;
                }
                assert_eq!(end, segment.address + segment.bytes);
                segment.stack
            }
            Item::Event(event) => event.stack,
        };
        if let Some(stack) = stack {
            assert!(stack.0 < tables.stack_count());
            for frame in tables.stack(stack) {
                assert!(tables.text(frame.name).len() <= bytes.len());
            }
        }
        Ok::<(), Error>(())
    });
    if let Err(error) = outcome {
        let text = error.to_string();
        assert!(text.len() < 20_000, "an error is a line: {text}");
    }
}
