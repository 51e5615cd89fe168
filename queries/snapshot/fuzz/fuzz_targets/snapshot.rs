#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vramscope_snapshot_fuzz::snapshot(bytes));
