-- purpose: every evaluation of the growth detector through the recording at which a stack grew, with the test's figures
-- reads: stack_windows (windows), traffic (raw), processes (raw, by current_processes), stacks (raw)
-- parameters: none; as a function it takes settings: leak_rate('block_minutes:2,warmup_minutes:2,min_requests:100')
-- columns:
--   evaluated_at | time | end of the window; one every two hours
--   window_start | time | its start
--   window_hours | h | its length: of all windows of the evaluation, the one that tells most
--   host | - | host name
--   process_id | - | one process lifetime
--   exe | - | path of the executable
--   pod | - | Kubernetes pod
--   device | - | device ordinal as the process sees it; NULL if not certain
--   memory_kind | - | kind of memory
--   layer | - | driver, runtime or framework
--   stack_id | - | stack that allocated; joins stacks
--   folded | - | function names, outermost first, joined by ';'
--   clock | - | what growth is measured against: requests, or time
--   requests | requests | completed in the window; NULL without traffic
--   bytes_per_request | bytes | growth_bytes / requests
--   bytes_per_request_low | bytes | growth_low_bytes / requests
--   bytes_per_hour | bytes/h | growth_bytes / window_hours
--   growth_bytes | bytes | growth over the window, load in service taken off
--   standard_error_bytes | bytes | its standard error, inflated for residuals that resemble the one before
--   growth_low_bytes | bytes | smallest lower bound (three standard errors) beside all rival explanations
--   growth_high_bytes | bytes | upper bound without a rival
--   detectable_bytes | bytes | growth that would just have passed
--   kendall_tau | - | rank correlation of the block medians with time, -1..1
--   residual_correlation | - | correlation of a residual with the one before, by which the error was inflated
--   remaining_share | ratio | smallest growth beside any rival / growth_bytes; passes above 0.6
--   largest_rise_share | ratio | largest rise of one block / growth_bytes; passes below 0.15
--   block_slope_share | ratio | median slope from block to block / growth; passes above 0.4
--   four_block_slope_share | ratio | median slope over four blocks / growth; passes above 0.5
--   drawdown_share | ratio | largest fall below the highest so far / growth; passes below 0.4
--   last_third_share | ratio | slope in the last third / growth; passes above 0.5
--   new_high_share | ratio | rise over everything before the window / growth; passes above 0.3; NULL if nothing is before
--   monotonic_share | ratio | share of the steps from block to block that do not fall
--   rival | - | the explanation that leaves the smallest lower bound; NULL: none beside load and growth
--   passes | - | the window passes every part of the rule
--   suspect | - | the faster rule passes in this evaluation
--   confirming | - | a window that may confirm passes in this evaluation
--   passes_in_a_row | evaluations | how many have been confirming in a row; three confirm
--   fails | - | the first part of the rule that does not hold; NULL if all do
-- formulas:
--   a stack has no row at evaluations where its first look found nothing: last three medians less first three at most 1200 bytes per request, or tau at most 0.2
--   docs/leaks.md tells the method and the source of each constant
WITH stack_names AS (
    SELECT stack_id, min(folded) AS folded FROM stacks GROUP BY stack_id
)
SELECT
    e.evaluated_at, e.window_start, e.window_hours, p.host, e.process_id, p.exe, p.pod,
    e.device, e.memory_kind, e.layer, e.stack_id, s.folded, e.clock, e.requests,
    e.growth_bytes / e.requests AS bytes_per_request,
    e.growth_low_bytes / e.requests AS bytes_per_request_low,
    e.growth_bytes / e.window_hours AS bytes_per_hour,
    e.growth_bytes, e.standard_error_bytes, e.growth_low_bytes, e.growth_high_bytes,
    e.detectable_bytes, e.kendall_tau, e.residual_correlation, e.remaining_share,
    e.largest_rise_share, e.block_slope_share, e.four_block_slope_share, e.drawdown_share,
    e.last_third_share, e.new_high_share, e.monotonic_share, e.rival, e.passes, e.suspect,
    e.confirming, e.passes_in_a_row, e.fails
FROM leak_evaluations() AS e
LEFT JOIN current_processes AS p ON p.process_id = e.process_id
LEFT JOIN stack_names AS s ON s.stack_id = e.stack_id
