"""The treatment of each server flag by a replay, as data.

Fields are those of SGLang's ``ServerArgs``, or patterns of them, and of feather's own flags. The first group that has a
field decides, in this order: handed on, the replay's own, refused, without effect. A field of none is refused.
"""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    """Flags that are treated alike: what they are or why they are refused, and what to do instead."""

    what: str
    fields: tuple[str, ...]
    instead: str = "leave it out, or compare real servers with feather ab --engine server"


# Handed to the scheduler as they are: they decide which requests run in which step.
HANDED = (
    Group("when a prefill step may follow another", ("prefill_decode_interval*", "min_free_slots_delay")),
    Group("when prefill waits for more requests", (
        "enable_prefill_delayer", "prefill_delayer_max_*", "prefill_delayer_queue_*", "prefill_delayer_token_*")),
    Group("how much one prefill step takes", ("max_prefill_tokens", "prefill_max_requests", "enable_mixed_chunk")),
    Group("how much memory is left for decoding", ("schedule_conservativeness",)),
    Group("which request gives up memory", ("retraction_policy", "radix_eviction_policy*", "disable_radix_cache")),
    Group(
        "which request goes first",
        ("enable_priority_scheduling", "disable_priority_preemption", "default_priority_value",
         "abort_on_priority_when_disabled", "schedule_low_priority_values_first",
         "priority_scheduling_preemption_threshold"),
    ),
    Group("in which loop steps are planned", ("disable_overlap_schedule",)),
    Group("the random policy's draws", ("random_seed",)),
)  # fmt: skip

# The replay's own flags. Those of feather are taken by their names.
OWN = {
    "max_total_tokens": "kv_tokens",
    "max_running_requests": "max_running",
    "chunked_prefill_size": "chunked_prefill",
    "page_size": "page_size",
    "stream_interval": "stream_interval",
    "attention_backend": "attention",
    "decode_attention_backend": "attention",  # SGLang decodes with this one where both are given
}
PREFILL_GRAPHS_OFF = {"disable_prefill_cuda_graph": True, "cuda_graph_backend_prefill": "disabled"}

# Values of refused flags that change nothing.
RIGHT = {
    "cuda_graph_backend_decode": ("full",),
    "dtype": ("half", "float16", "bfloat16"),
    "kv_cache_dtype": ("bf16", "bfloat16"),
}

REFUSED = (
    Group("another flag sets it here", ("schedule_policy",), "use --policies"),
    Group("another flag sets it here", ("model_path",), "use --model"),
    Group("a replay reads no file of flags", ("config",), "give the flags in it instead"),
    Group(
        "a replay has one GPU",
        ("tp_size", "dp_size", "pp_size", "ep_size", "nnodes", "node_rank", "enable_dp_attention", "attn_?p_size",
         "*_dp_size", "*_tp_size", "dcp_size", "dwdp_size", "max_ep_size", "pp_async_batch_depth",
         "enable_*prefill_cp", "enable_*context_parallel", "elastic_ep_*", "ep_join_*"),
    ),
    Group(
        "a replay drafts no tokens",
        ("speculative_*", "spec_trace_dir", "decoupled_spec_*", "enable_multi_layer_eagle", "uno_lora_path"),
    ),
    Group(
        "a replay computes a request on one server",
        ("disaggregation_mode", "encoder_only", "language_only", "enable_pdmux", "enable_pd_role_switch"),
    ),
    Group("a replay has no adapters", ("enable_lora", "lora_paths")),
    Group(
        "a replay has the KV cache of one GPU alone",
        ("enable_hierarchical_cache", "hicache_storage_backend", "enable_hisparse", "enable_lmcache", "enable_flexkv",
         "enable_unified_cache_external_linker", "radix_cache_backend"),
    ),
    Group(
        "a replay's step times are those of 16-bit weights and KV",
        ("dtype", "quantization", "kv_cache_dtype", "modelopt_quant", "quantize_and_serve", "rl_quant_profile",
         "torchao_config"),
    ),
    Group(
        "a replay's step times are those of weights on the GPU",
        ("cpu_offload_gb", "offload_group_size", "kt_weight_path", "kt_method", "enable_paged_experts"),
    ),
    Group(
        "a replay's decode steps run in CUDA graphs",
        ("disable_cuda_graph", "disable_decode_cuda_graph", "cuda_graph_config", "cuda_graph_backend_decode"),
    ),
    Group(
        "a replay's step times are those of SGLang's usual kernels",
        ("enable_deterministic_inference", "rl_on_policy_target", "dllm_*", "is_embedding",
         "prefill_only_disable_kv_cache"),
    ),
    Group("a replay serves every request", ("max_queued_requests",)),
    Group("in a replay the scheduler sees each request before its next step", ("scheduler_recv_interval",)),
)  # fmt: skip

# Which requests run in which step does not depend on these.
WITHOUT_EFFECT = (
    # The server's front end
    "host", "port", "tokenizer_*", "detokenizer_*", "skip_tokenizer_init", "fastapi_*", "*grpc*", "sidecar*",
    "skip_server_warmup", "warmups", "enable_http*", "http2_*", "ssl_*", "enable_ssl_refresh", "*api_key",
    "served_model_name", "*chat_template*", "completion_template", "file_storage_path", "return_*", "strip_*",
    "enable_strict_thinking", "tool_*", "sampling_defaults", "asr_*", "preferred_sampling_params",
    "allow_auto_truncate", "stream_output", "stream_response_*", "incremental_streaming_output", "batch_notify_size",
    "*_session*", "reasoning_parser", "enable_cache_report", "enable_return_*", "*tokenizer_batch*",
    "enable_dynamic_batch_*", "dynamic_batch_*", "enable_custom_logit_processor", "*watermark*",
    "enable_response_store", "constrained_*", "grammar_backend", "disable_outlines_disk_cache",
    "sampling_mask_max_tokens", "enable_mis", "smg_*",
    # Logs, metrics and checks
    "log_*", "uvicorn_*", "crash_dump_folder", "show_time_cost", "*metric*", "load_*", "bucket_*", "*_buckets", "gc_*",
    "decode_log_interval", "enable_request_time_stats_logging", "kv_events_config", "enable_trace", "trace_modules",
    "otlp_*", "kv_canary*", "debug_*", "forward_hooks", "msprobe_*", "*watchdog*", "enable_profile_cuda_graph",
    "enable_layerwise_nvtx_marker", "collect_tokens_histogram", "*_distribution_*", "feather_allow_switch",
    # The model's files, and their loading
    "model_*", "trust_remote_code", "revision", "json_model_override_args", "weight_*", "download_dir", "*weight_load*",
    "delete_ckpt_after_loading", "decrypted_*", "checkpoint_engine_*", "modelexpress_config", "modelopt_*",
    "quantization_param_path", "*weights_cpu_backup", "enable_memory_saver", "engine_info_*",
    # The machine
    "device", "base_gpu_id", "gpu_id_step", "mlx_*", "sleep_on_idle", "use_ray", "numa_node", "nccl_port", "dist_*",
    "gated_launch_port", "enable_p2p_check", "pre_warm_nccl", "mem_fraction_static", "context_length", "*_ib_device",
    # What SGLang's scheduler does not read
    "num_continuous_decode_steps",
    # Kernels and CUDA graphs beside those of the profile, whose times are used
    "*_backend*", "*cuda_graph*", "cuda_graph_*", "enable_cudagraph_gc", "*flashinfer*", "triton_*", "*torch_compile*",
    "enable_*reduce*", "disable_*reduce*", "enable_fused_*", "enable_lean_attention", "enable_nccl_nvls",
    "enable_*symm_mem", "enable_mscclpp", "boundary_reduction", "enable_quant_communications", "enable_tf32_matmul",
    "enable_fp32_lm_head", "enable_two_batch_overlap", "enable_single_batch_overlap", "tbo_*", "sm_group_num",
    "pdmux_*", "*_megakernel", "*_monokernel", "*aiter*", "feather_pat_beside", "disable_chunked_prefix_cache",
    "feather_unproven_gpu", "enable_precise_embedding_interpolation",
    # What is for other models, or for a flag that is refused
    "*moe*", "*eplb*", "*expert*", "*deepep*", "fuseep_*", "ep_*", "*mamba*", "linear_*", "enable_linear_*", "*swa*",
    "c128_*", "*dsa*", "*nsa*", "dsv4_*", "*deepseek*", "qsa_*", "ple_*", "*mm_*", "*multimodal*",
    "allowed_media_domains", "media_*", "image_*", "disable_fast_image_processor", "hicache_*", "hisparse_*",
    "lmcache_*", "flexkv_*", "unified_cache_*", "*lora*", "max_loaded_loras", "max_loras_per_batch", "disaggregation_*",
    "num_reserved_decode_tokens", "optimistic_prefill_attempts", "encoder_*", "language_*",
    "enable_adaptive_dispatch_*", "remote_*", "custom_weight_loader", "offload_*", "kt_*", "paged_*",
    "enable_page_major_kv_layout", "enable_unified_memory", "enable_dynamic_chunking", "pp_max_micro_batch_size",
    "dcp_*", "cp_strategy", "prefill_cp_mode", "prefill_round_robin_balance", "prefill_kv_cache_dequant_dtype",
    "enable_linker_mla_dedup", "enable_*_tp*", "enable_dp_*", "enable_cp_*", "enable_kv_cache_sharding",
    "enable_layernorm_sp", "disable_attn_tp_gather", "enable_waterfill", "enable_scattered_sconv",
    "enable_*_all_to_all", "hf_*",
)  # fmt: skip
