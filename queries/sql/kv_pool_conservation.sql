-- purpose: whether the pages of each KV pool add up (used + cached + free = total), and how many are free in truth
-- reads: traffic (raw)
-- parameters: none
-- columns:
--   ts | time | newest sample of the pool that names its pages
--   host | - | host name
--   process_id | - | one process lifetime; NULL when only the endpoint is known
--   endpoint | - | where the figures were read
--   engine | - | vllm, sglang, triton, trtllm, tgi
--   model | - | model name, as the engine gives it
--   page_tokens | tokens | tokens in one page
--   total_pages | pages | pages of the pool
--   used_pages | pages | pages that running requests hold
--   cached_pages | pages | pages that nobody holds and that still keep a prefix
--   free_pages | pages | pages that hold nothing: really free
--   soft_free_pages | pages | free_pages + cached_pages: what a new request can get, at the price of a cached prefix
--   usage_ratio | ratio | used_pages / total_pages: pressure; cached pages are none
--   apparent_usage_ratio | ratio | 1 - free_pages / total_pages: what it looks like to who takes cached pages for used ones
--   imbalance_pages | pages | used + cached + free - total: 0 where pages add up, above 0 where some are counted twice, below 0 where some are lost
--   violated | - | imbalance_pages is not 0
--   violated_since | time | first sample of the run of violations that lasts now; NULL if there is none
--   samples | samples | how many name their pages
--   violations | samples | how many of them do not add up
--   first_violation | time | the first of them
--   last_violation | time | the last of them
--   largest_imbalance_pages | pages | the one farthest from 0
-- formulas:
--   the rule: SELECT * FROM kv_pool_conservation WHERE violated, or violations > 0 for the past
--   an engine that reads its counters one after the other can be off by a page for one sample: trust a violation that lasts
--   samples that lack one of the four counts say nothing and are left out
WITH counted AS (
    SELECT
        ts, ts_ns, host, process_id, endpoint, engine, model, kv_page_tokens, kv_total_pages,
        kv_used_pages, kv_cached_pages, kv_free_pages,
        kv_used_pages + kv_cached_pages + kv_free_pages - kv_total_pages AS imbalance_pages
    FROM traffic
    WHERE kv_used_pages + kv_cached_pages + kv_free_pages + kv_total_pages IS NOT NULL
),
-- A run of violations begins after the last sample that added up.
marked AS (
    SELECT
        *,
        max(CASE WHEN imbalance_pages = 0 THEN ts_ns END) OVER pool AS last_sound_ns,
        row_number() OVER (
            PARTITION BY host, process_id, endpoint, engine, model ORDER BY ts_ns DESC
        ) AS newest_first,
        first_value(imbalance_pages) OVER (
            PARTITION BY host, process_id, endpoint, engine, model ORDER BY abs(imbalance_pages) DESC, ts_ns
        ) AS largest_imbalance_pages
    FROM counted
    WINDOW pool AS (PARTITION BY host, process_id, endpoint, engine, model)
)
SELECT
    max(ts) FILTER (WHERE newest_first = 1) AS ts,
    host, process_id, endpoint, engine, model,
    max(kv_page_tokens) FILTER (WHERE newest_first = 1) AS page_tokens,
    max(kv_total_pages) FILTER (WHERE newest_first = 1) AS total_pages,
    max(kv_used_pages) FILTER (WHERE newest_first = 1) AS used_pages,
    max(kv_cached_pages) FILTER (WHERE newest_first = 1) AS cached_pages,
    max(kv_free_pages) FILTER (WHERE newest_first = 1) AS free_pages,
    max(kv_free_pages + kv_cached_pages) FILTER (WHERE newest_first = 1) AS soft_free_pages,
    max(CAST(kv_used_pages AS DOUBLE) / nullif(kv_total_pages, 0)) FILTER (WHERE newest_first = 1) AS usage_ratio,
    max(1 - CAST(kv_free_pages AS DOUBLE) / nullif(kv_total_pages, 0)) FILTER (WHERE newest_first = 1) AS apparent_usage_ratio,
    max(imbalance_pages) FILTER (WHERE newest_first = 1) AS imbalance_pages,
    bool_or(newest_first = 1 AND imbalance_pages <> 0) AS violated,
    min(ts) FILTER (WHERE imbalance_pages <> 0 AND ts_ns > coalesce(last_sound_ns, -1)) AS violated_since,
    count(*) AS samples,
    count(*) FILTER (WHERE imbalance_pages <> 0) AS violations,
    min(ts) FILTER (WHERE imbalance_pages <> 0) AS first_violation,
    max(ts) FILTER (WHERE imbalance_pages <> 0) AS last_violation,
    max(largest_imbalance_pages) AS largest_imbalance_pages
FROM marked
GROUP BY host, process_id, endpoint, engine, model
