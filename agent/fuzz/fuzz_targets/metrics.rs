#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vramscope_agent_fuzz::metrics(bytes));
