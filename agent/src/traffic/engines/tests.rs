//! Pages as the engines' documentation describes them, and what a person reads in them: each
//! expected figure was worked out by hand from the page.

use super::*;

fn loads(text: &str) -> Vec<Load> {
    let page = Page::read(text.as_bytes(), is_wanted);
    assert_eq!(page.bad_lines, 0);
    read(&page)
}

fn one(text: &str) -> Load {
    let loads = loads(text);
    assert_eq!(loads.len(), 1, "{loads:?}");
    loads.into_iter().next().unwrap()
}

/// One engine of the newer generation: 75 of 300 pages that can be given out are held; one more is
/// the null block.
#[test]
fn vllm() {
    let text = r#"
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 12345.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="org/m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="org/m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="org/m"} 800.0
vllm:prefix_cache_hits_total{engine="0",model_name="org/m"} 600.0
vllm:num_preemptions_total{engine="0",model_name="org/m"} 4.0
vllm:num_preemptions_created{engine="0",model_name="org/m"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="org/m"} 8.128902e+06
vllm:generation_tokens_total{engine="0",model_name="org/m"} 7557.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="org/m"} 100.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="org/m"} 20.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="org/m"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="org/m"} 0.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="org/m"} 6.5
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="301",num_cpu_blocks="None",swap_space_bytes="4294967296"} 1.0
"#;
    assert_eq!(
        one(text),
        Load {
            engine: "vllm",
            model: Some("org/m".into()),
            running: Some(3),
            waiting: Some(2),
            completed_total: Some(123),
            prompt_tokens_total: Some(8_128_902),
            generation_tokens_total: Some(7557),
            kv_usage_ratio: Some(0.25),
            kv_page_tokens: Some(16),
            kv_total_pages: Some(301),
            kv_used_pages: Some(75),
            preemptions_total: Some(4),
            ..Load::default()
        }
    );
}

/// The older generation: no engine label, the older name, a share of all pages, and a swap space.
#[test]
fn vllm_of_the_older_generation() {
    let text = r#"
vllm:cache_config_info{block_size="16",num_cpu_blocks="2048",num_gpu_blocks="1000",swap_space_bytes="4294967296"} 1.0
vllm:num_requests_running{model_name="m"} 5.0
vllm:num_requests_swapped{model_name="m"} 1.0
vllm:num_requests_waiting{model_name="m"} 0.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.125
vllm:cpu_cache_usage_perc{model_name="m"} 0.5
vllm:request_success_total{finished_reason="stop",model_name="m"} 7.0
"#;
    let load = one(text);
    assert_eq!(load.kv_used_pages, Some(125), "of all 1000");
    assert_eq!(load.swapped_bytes, Some(2 << 30));
    assert_eq!(load.preemptions_total, None, "not on the page");
    assert_eq!((load.kv_cached_pages, load.kv_free_pages), (None, None));
    assert_eq!(load.waiting, Some(0));
}

/// Two data-parallel engines of unlike pools: counts add up, the share is of both pools together.
#[test]
fn vllm_replicas_are_summed() {
    let text = r#"
vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_running{engine="1",model_name="m"} 4
vllm:num_requests_waiting{engine="0",model_name="m"} 1
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="101"} 1
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="301"} 1
"#;
    let load = one(text);
    assert_eq!(load.running, Some(7));
    assert_eq!(load.waiting, None, "one engine does not tell");
    assert_eq!(
        (load.kv_total_pages, load.kv_used_pages),
        (Some(402), Some(50 + 75))
    );
    let usage = load.kv_usage_ratio.unwrap();
    assert!((usage - (0.5 * 101.0 + 0.25 * 301.0) / 402.0).abs() < 1e-12);
}

#[test]
fn vllm_without_a_known_pool_has_a_share_and_no_pages() {
    let text = r#"
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="None"} 1
"#;
    let load = one(text);
    assert_eq!(load.kv_usage_ratio, Some(0.5));
    assert_eq!((load.kv_total_pages, load.kv_used_pages), (None, None));
}

#[test]
fn two_models_are_two_rows() {
    let text = "vllm:num_requests_running{model_name=\"a\"} 1\nvllm:num_requests_running{model_name=\"b\"} 2\n";
    let rows: Vec<_> = loads(text)
        .into_iter()
        .map(|l| (l.model.unwrap(), l.running))
        .collect();
    assert_eq!(
        rows,
        [("a".to_string(), Some(1)), ("b".to_string(), Some(2))]
    );
}

/// A newer SGLang: tensor parallel, so each figure twice; priorities are parts of the whole.
#[test]
fn sglang() {
    let text = r#"
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 3
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="10",tp_rank="0"} 2
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="1"} 3
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 1
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.3
sglang:max_total_num_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 1000000
sglang:page_size{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 16
sglang:num_pages{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 62500
sglang:kv_available_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 600000
sglang:kv_evictable_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 100000
sglang:kv_used_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 300000
sglang:num_retracted_reqs{engine_type="unified",model_name="m",pid="7",tp_rank="0"} 1
sglang:num_retracted_requests_total{engine_type="unified",model_name="m",tp_rank="0"} 48
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 5000
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 6000
sglang:generation_tokens_total{model_name="m"} 700
sglang:num_requests_total{is_streaming="true",model_name="m"} 300
sglang:num_requests_total{is_streaming="false",model_name="m"} 200
sglang:num_aborted_requests_total{model_name="m"} 11
"#;
    assert_eq!(
        one(text),
        Load {
            engine: "sglang",
            model: Some("m".into()),
            running: Some(3),
            waiting: Some(1),
            completed_total: Some(500),
            prompt_tokens_total: Some(11_000),
            generation_tokens_total: Some(700),
            kv_usage_ratio: Some(0.3),
            kv_page_tokens: Some(16),
            kv_total_pages: Some(62_500),
            kv_used_pages: Some(18_750),
            kv_cached_pages: Some(6_250),
            kv_free_pages: Some(37_500),
            preemptions_total: Some(48),
            swapped_bytes: None,
        }
    );
}

/// The page of its documentation: used tokens alone, the page size in an info metric.
#[test]
fn sglang_of_an_older_version() {
    let text = r#"
sglang:num_used_tokens{model_name="m"} 123859.0
sglang:token_usage{model_name="m"} 0.28
sglang:cache_hit_rate{model_name="m"} 0.0075
sglang:num_running_reqs{model_name="m"} 162.0
sglang:num_queue_reqs{model_name="m"} 2826.0
sglang:cache_config_info{model_name="m",num_pages="442353",page_size="1"} 1.0
"#;
    let load = one(text);
    assert_eq!((load.running, load.waiting), (Some(162), Some(2826)));
    assert_eq!(
        (load.kv_page_tokens, load.kv_used_pages),
        (Some(1), Some(123_859))
    );
    assert_eq!(load.kv_total_pages, Some(442_353));
    assert_eq!((load.kv_cached_pages, load.kv_free_pages), (None, None));
    let without_size = "sglang:num_used_tokens 10\nsglang:num_queue_reqs 0\n";
    assert_eq!(
        one(without_size).kv_used_pages,
        None,
        "10 tokens of how many a page?"
    );
    let part_of_a_page =
        "sglang:num_used_tokens 10\nsglang:page_size 16\nsglang:num_queue_reqs 0\n";
    assert_eq!(one(part_of_a_page).kv_used_pages, None);
}

/// Ranks of data parallelism that are also ranks of tensor parallelism add up.
#[test]
fn sglang_replicas_are_summed() {
    let text = r#"
sglang:num_running_reqs{dp_rank="0",model_name="m",tp_rank="0"} 3
sglang:num_running_reqs{dp_rank="0",model_name="m",tp_rank="1"} 3
sglang:num_running_reqs{dp_rank="1",model_name="m",tp_rank="2"} 5
sglang:num_running_reqs{dp_rank="1",model_name="m",tp_rank="3"} 5
"#;
    assert_eq!(one(text).running, Some(8));
}

/// The backend's model has a row; the steps around it have none.
#[test]
fn triton() {
    let text = r#"
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="ensemble",version="1"} 40
nv_inference_request_success{model="preprocessing",version="1"} 40
nv_inference_request_success{model="tensorrt_llm",version="1"} 41
nv_inference_request_failure{model="tensorrt_llm",reason="OTHER",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 7
nv_trt_llm_runtime_memory_metrics{memory_type="pinned",model="tensorrt_llm",version="1"} 0
nv_trt_llm_runtime_memory_metrics{memory_type="gpu",model="tensorrt_llm",version="1"} 1610236
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.125
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 780
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 5460
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6240
nv_llm_input_token_len_bucket{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1",le="50"} 3
nv_llm_input_token_len_sum{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1"} 1234
nv_llm_output_token_len_sum{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 567
"#;
    assert_eq!(
        one(text),
        Load {
            engine: "triton",
            model: Some("tensorrt_llm".into()),
            running: Some(5),
            waiting: Some(2),
            completed_total: Some(41),
            prompt_tokens_total: Some(1234),
            generation_tokens_total: Some(567),
            kv_usage_ratio: Some(0.125),
            kv_page_tokens: Some(64),
            kv_total_pages: Some(6240),
            kv_used_pages: Some(780),
            ..Load::default()
        }
    );
}

/// An older backend has neither `waiting` nor `fraction`.
#[test]
fn triton_of_an_older_version() {
    let text = r#"
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="m",request_type="active",version="1"} 7
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m",version="1"} 25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 100
"#;
    let load = one(text);
    assert_eq!((load.running, load.waiting), (Some(5), Some(2)));
    assert_eq!(load.kv_usage_ratio, Some(0.25));
    assert_eq!((load.completed_total, load.kv_page_tokens), (None, None));
}

#[test]
fn trtllm_serve() {
    let text = r#"
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 4
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 0
trtllm_request_success_total{engine_type="trtllm",finished_reason="stop",model_name="m"} 9
trtllm_request_success_total{engine_type="trtllm",finished_reason="length",model_name="m"} 2
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.5
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 200
trtllm_kv_cache_used_blocks{engine_type="trtllm",model_name="m"} 100
trtllm_kv_cache_free_blocks{engine_type="trtllm",model_name="m"} 100
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32
"#;
    let load = one(text);
    assert_eq!(
        (load.engine, load.running, load.waiting),
        ("trtllm", Some(4), Some(0))
    );
    assert_eq!(load.completed_total, Some(11));
    let pool = (load.kv_page_tokens, load.kv_total_pages, load.kv_used_pages);
    assert_eq!(pool, (Some(32), Some(200), Some(100)));
    assert_eq!((load.kv_usage_ratio, load.kv_free_pages), (Some(0.5), None));
}

#[test]
fn tgi() {
    let text = r#"
# TYPE tgi_request_count counter
tgi_request_count 101
# TYPE tgi_request_success counter
tgi_request_success 98
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 6
tgi_batch_current_max_tokens 12000
tgi_queue_size 2
tgi_request_input_length_sum 5000
tgi_request_input_length_count 98
tgi_request_generated_tokens_sum 2500
tgi_request_generated_tokens_count 98
"#;
    assert_eq!(
        one(text),
        Load {
            engine: "tgi",
            running: Some(6),
            waiting: Some(2),
            completed_total: Some(98),
            prompt_tokens_total: Some(5000),
            generation_tokens_total: Some(2500),
            ..Load::default()
        }
    );
}

#[test]
fn other_pages_are_no_engines() {
    assert_eq!(
        loads("go_goroutines 7\nprocess_cpu_seconds_total 1.5\n"),
        []
    );
    assert_eq!(
        loads("nv_inference_request_success{model=\"resnet\",version=\"1\"} 4\n"),
        []
    );
    assert_eq!(
        loads("trtllm_model_config_info{model_name=\"m\"} 1\n"),
        [],
        "no figures"
    );
}

#[test]
fn what_is_no_count_is_not_known() {
    for value in ["NaN", "-1", "+Inf", "1e300"] {
        let text =
            format!("vllm:num_requests_running{{model_name=\"m\"}} {value}\ntgi_queue_size 1\n");
        assert_eq!(
            loads(&text).iter().map(|l| l.engine).collect::<Vec<_>>(),
            ["tgi"]
        );
    }
    assert_eq!(
        one("vllm:kv_cache_usage_perc 1.5\nvllm:num_requests_running 0\n").kv_usage_ratio,
        None
    );
}
