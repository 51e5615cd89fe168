//! Functions that SQL needs and does not have, over the rules of `vramscope-model`: what a page of
//! a KV pool wastes, how an allocator rounds a request, how much of its free memory a request
//! cannot use, why an allocation failed.
//!
//! Invariants:
//! - a NULL where a value is needed gives NULL; a negative number, which no size is, likewise;
//! - no function reads or writes anything: they are immutable.

mod booked;
mod frames;
mod pick;
mod ratio;
mod scalar;

use std::sync::Arc;

use datafusion::execution::SessionStateBuilder;
use datafusion::execution::memory_pool::MemoryPool;
use datafusion::prelude::SessionContext;

/// A function as the reference describes it.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    /// Its name in SQL.
    pub name: &'static str,
    /// How it is called.
    pub call: &'static str,
    /// Type of what it returns.
    pub returns: &'static str,
    /// Whether it takes many rows to one value.
    pub aggregate: bool,
    /// What it returns, with units.
    pub meaning: &'static str,
    /// A query that shows it.
    pub example: &'static str,
}

/// Every function, by name.
pub const ALL: &[Function] = &[
    Function {
        name: "allocating_frame",
        call: "allocating_frame(frames, field)",
        returns: "VARCHAR",
        aggregate: false,
        meaning: "of a stack's frames the innermost one that belongs to no driver, runtime or allocator (of CUDA or PyTorch), the innermost one if all do: its function, module or build_id, as field says",
        example: "SELECT allocating_frame(frames, 'function') FROM stacks",
    },
    Function {
        name: "allocator_round",
        call: "allocator_round(bytes [, settings])",
        returns: "BIGINT",
        aggregate: false,
        meaning: "bytes of the block that PyTorch's allocator makes of a request: multiples of 512, or the steps of roundup_power2_divisions in settings (the text of PYTORCH_CUDA_ALLOC_CONF; what is not understood in it changes nothing)",
        example: "SELECT allocator_round(1000), allocator_round(1200000, 'roundup_power2_divisions:4')",
    },
    Function {
        name: "kv_page_waste",
        call: "kv_page_waste(tokens, page)",
        returns: "BIGINT",
        aggregate: false,
        meaning: "tokens' room that the last page of a sequence leaves empty, for a sequence of so many tokens in pages of so many tokens; NULL for pages of 0 tokens",
        example: "SELECT kv_page_waste(418, 16)",
    },
    Function {
        name: "kv_page_waste_ratio",
        call: "kv_page_waste_ratio(tokens, page)",
        returns: "DOUBLE",
        aggregate: true,
        meaning: "over many sequences: room left empty / room of all their pages, 0..1; sequences of unknown length are left out; NULL without any",
        example: "SELECT kv_page_waste_ratio(prompt_tokens + output_tokens, 16) FROM requests",
    },
    Function {
        name: "leak_by_stack",
        call: "leak_by_stack(settings)",
        returns: "table",
        aggregate: false,
        meaning: "the view leak_by_stack with other settings than the default ones: a text of block_minutes (30), warmup_minutes (30), min_requests (2000 in a window), bytes_per_request (1500, what the lower bound has to exceed). Short blocks are for short recordings: rates of false alarms were measured with the default ones",
        example: "SELECT * FROM leak_by_stack('block_minutes:2,warmup_minutes:2,min_requests:100')",
    },
    Function {
        name: "leak_rate",
        call: "leak_rate(settings)",
        returns: "table",
        aggregate: false,
        meaning: "the view leak_rate with other settings, as leak_by_stack(settings)",
        example: "SELECT * FROM leak_rate('block_minutes:5') WHERE stack_id = 7",
    },
    Function {
        name: "leak_verdicts",
        call: "leak_verdicts([settings])",
        returns: "table",
        aggregate: false,
        meaning: "what the detectors say of every stack at the end of the recording, also of those that do not leak (tier clear); leak_by_stack is made of it",
        example: "SELECT tier, count(*) FROM leak_verdicts() GROUP BY tier",
    },
    Function {
        name: "leak_evaluations",
        call: "leak_evaluations([settings])",
        returns: "table",
        aggregate: false,
        meaning: "every evaluation at which a stack grew; leak_rate is made of it",
        example: "SELECT * FROM leak_evaluations()",
    },
    Function {
        name: "oom_class",
        call: "oom_class(tried, driver_free, stranded, releasable, card_total, process_used, others_used, growth_at_least[, live_before, live_at_failure, queue_before, queue_at_failure])",
        returns: "VARCHAR",
        aggregate: false,
        meaning: "why an allocation failed: external process, driver refused, fragmentation, leak, burst, capacity, or unknown where a number is missing that decides. Bytes; growth_at_least in bytes per request, NULL if not measured; others_used may be NULL where it follows from the rest; the last four tell what happened within one request's residence, NULL or left out if not known",
        example: "SELECT oom_class(2104533976, 1159641170, 1964947538, 0, NULL, NULL, NULL, NULL)",
    },
    Function {
        name: "pick",
        call: "pick(condition, yes, no)",
        returns: "as yes",
        aggregate: false,
        meaning: "CASE WHEN condition THEN yes ELSE no END of two numbers or times of one type. Nobody needs to write it: a CASE of columns and constants is planned so, and EXPLAIN shows it",
        example: "SELECT pick(op = 'free', -bytes, bytes) FROM alloc_events",
    },
    Function {
        name: "unusable_free_index",
        call: "unusable_free_index(block_bytes, request)",
        returns: "DOUBLE",
        aggregate: true,
        meaning: "over free blocks: bytes of those smaller than the request / bytes of all, 0 good, 1 bad (Linux's definition); request after rounding (allocator_round); NULL without free blocks, or without a request",
        example: "SELECT unusable_free_index(bytes, allocator_round(20000000)) FROM memory_map WHERE state = 'inactive' AND is_newest",
    },
];

/// Plans with the function that answers faster than what SQL has for the same. A session that runs
/// such plans has to know the function too: see [`register`].
pub fn plan_with(builder: SessionStateBuilder) -> SessionStateBuilder {
    builder.with_optimizer_rule(Arc::new(pick::PickInsteadOfCase::default()))
}

/// Books what the engine's own functions make in a memory pool, from here on, whatever they booked in
/// before.
pub fn book(builder: SessionStateBuilder, pool: &Arc<dyn MemoryPool>) -> SessionStateBuilder {
    booked::book(builder, pool)
}

/// Makes every function known to a session.
pub fn register(session: &SessionContext) {
    session.register_udf(pick::function());
    for function in frames::all() {
        session.register_udf(function);
    }
    for function in scalar::all() {
        session.register_udf(function);
    }
    for function in ratio::all() {
        session.register_udaf(function);
    }
}
