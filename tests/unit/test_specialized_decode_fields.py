# SPDX-License-Identifier: Apache-2.0
"""Every configuration inside vLLM's, every on/off field of those that a deployment always has, and what it
means for kernels that replace vLLM's code of a decode step.

An optional sub-configuration refuses by itself, unless a spec runs alongside it. A field in here does not, so
each is reviewed: it is read by a switch of ``features``, or it says why it has no part in a step of a decoder
layer. The fields are VllmConfig's own: a configuration or a field that a later vLLM adds has no entry and
fails.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.test_specialized_decode_tree import deployment

from vllm.config import VllmConfig  # isort: skip
from vllm.models.common.specialized_decode.features import (  # isort: skip
    NOT_FEATURES,
    optional_configs,
    reported_features,
)

# The configurations that every deployment has. Each one's on/off fields are reviewed below.
CONFIGS = {
    "model_config", "cache_config", "parallel_config", "scheduler_config", "device_config", "load_config",
    "offload_config", "attention_config", "aux_output_config", "mamba_config", "kernel_config",
    "structured_outputs_config", "observability_config", "logging_config", "compilation_config",
    "profiler_config", "ec_manager_config", "watchdog_config",
}  # fmt: skip

# Of those that are None unless their feature is on: the ones that a spec runs alongside.
ALONGSIDE = {
    "ec_transfer_config", "engram_config", "kv_events_config", "reasoning_config", "speculative_config",
    "watermark_config", "weight_transfer_config",
}  # fmt: skip

# Fields of VllmConfig that are no configuration, and why none is a feature of a decoder layer.
PLAIN = {
    "quant_config": "what a layer's weights are, which the layer's plan and the kernels' checks read",
    "additional_config": "for a platform of others",
    "instance_id": "names the process",
    "optimization_level": "defaults of the other configurations, in which it shows",
    "performance_mode": "defaults of the other configurations, in which it shows",
    "shutdown_timeout": "the end of the process",
}

# A switch, and the fields that turn it on.
SWITCHED = {
    "expert parallelism": {"parallel_config.enable_expert_parallel"},
    "expert load balancing": {"parallel_config.enable_eplb"},
    "hyper-connection sequence parallelism": {"parallel_config.enable_hc_sp"},
    "microbatches": {"parallel_config.enable_dbo"},
    "prefix caching": {"cache_config.enable_prefix_caching"},
    "fast prefill of shared KV": {"cache_config.kv_sharing_fast_prefill"},
    "state replay": {"cache_config.use_replayssm", "cache_config.use_kda_recoverssm"},
    "sleep mode": {"model_config.enable_sleep_mode"},
    "prompt embeddings": {"model_config.enable_prompt_embeds"},
    "disabled sliding window": {"model_config.disable_sliding_window"},
    "cumem allocator": {"model_config.enable_cumem_allocator"},
    "non-causal attention": {"attention_config.use_non_causal"},
    "layerwise NVTX tracing": {"observability_config.enable_layerwise_nvtx_tracing"},
    "routed-expert capture": {"aux_output_config.enable_return_routed_experts"},
}

# Why a field has no part, and the fields.
NO_PART = {
    "it does nothing without expert parallelism, whose switch refuses": {
        "parallel_config.enable_ep_weight_filter", "parallel_config.enable_elastic_ep",
        "parallel_config.eplb_config.log_balancedness", "parallel_config.eplb_config.use_async",
        "parallel_config.eplb_config.enable_migration_batching",
    },
    "it does nothing without data or context parallelism, whose switches refuse": {
        "parallel_config.data_parallel_external_lb", "parallel_config.data_parallel_hybrid_lb",
        "parallel_config.disable_nccl_for_dp_synchronization", "parallel_config.dcp_q_replicate",
        "parallel_config._allow_auto_resolve_cp_interleave_size", "parallel_config.enable_fault_tolerance",
    },
    "it is about processes, and what they send each other": {
        "parallel_config.enable_shm_tensor_arena", "parallel_config.ray_workers_use_nsight",
        "parallel_config.numa_bind",
    },
    "it is about sampling, after the decoder layers": {
        "parallel_config.enable_batch_sharded_sampling", "model_config.return_sampling_mask",
        "model_config.use_fp64_gumbel", "model_config.enable_trace_replay",
        "structured_outputs_config.disable_any_whitespace", "reasoning_config._enabled",
        "structured_outputs_config.disable_additional_properties",
        "structured_outputs_config.enable_in_reasoning", "watermark_config.allow_target_only_watermarking",
    },
    "it is about loading, or reading what was loaded": {
        "model_config.trust_remote_code", "model_config.skip_tokenizer_init", "model_config.hf_token",
        "model_config.allow_deprecated_quantization", "load_config.use_tqdm_on_load",
    },
    "it does nothing without sleep mode, which refuses": {
        "model_config.sleep_mode_offload_cudagraph", "model_config.enable_nccl_comm_suspend",
    },
    "it decides whether there are graphs; a step is taken in a graph and out of one": {
        "model_config.enforce_eager",
    },
    "it chooses how vLLM's own path attends to a prefix that requests share; block tables say where it is": {
        "model_config.disable_cascade_attn",
    },
    "it is about prefills, which no kernel takes": {
        "attention_config.use_prefill_query_quantization", "attention_config.sparse_mla_force_mqa",
    },
    "it is about the indexer, which vLLM's code runs between the launches": {
        "attention_config.indexer_sparse_logits",
    },
    "it is about another platform, or another model": {
        "attention_config.use_trtllm_attention", "attention_config.disable_flashinfer_q_quantization",
        "attention_config.minimax_m3_indexer_cp", "mamba_config.enable_stochastic_rounding",
        "kernel_config.enable_flashinfer_autotune", "kernel_config.enable_cutedsl_warmup",
    },
    "it tunes or warms up vLLM's own kernels": {
        "kernel_config.enable_rocm_segmented_attn_autotune", "kernel_config.enable_jit_warmup",
    },
    "it is the choice of specialised decode itself": {
        "kernel_config.monokernel", "kernel_config.specialized_decode_strict",
    },
    "it watches from outside the layers": {
        "kv_events_config.enable_kv_cache_events", "logging_config.configure_logging",
        *(
            f"observability_config.{name}"
            for name in (
                "kv_cache_metrics", "cudagraph_metrics", "enable_mfu_metrics", "enable_mm_processor_stats",
                "enable_logging_iteration_details", "jit_monitor_verbose",
            )
        ),
        *(
            f"profiler_config.{name}"
            for name in (
                "proton_graph_attribution", "torch_profiler_with_stack", "torch_profiler_with_flops",
                "torch_profiler_use_gzip", "torch_profiler_dump_cuda_time_total",
                "torch_profiler_record_shapes", "torch_profiler_with_memory", "capture_torch_profiler",
                "detailed_trace_annotation", "ignore_frontend",
            )
        ),
    },
    "it is about where the Engram tables are, whose rows reach a layer before its launch": {
        "engram_config.cpu_offload", "engram_config.embedding_across_dp", "engram_config.dp_shared_memory",
        "engram_config.use_thp",
    },
    "it chooses how vLLM's own path sums over ranks, which the kernels do themselves": {
        "parallel_config.disable_custom_all_reduce",
    },
    "it describes the model or the user's choice": {
        "parallel_config.is_moe_model", "cache_config.is_attention_free",
        "cache_config.user_specified_block_size", "cache_config._block_size_resolved",
        "scheduler_config.is_multimodal_model", "model_config.is_submodel_config",
        "model_config.word_embeddings_untied_by_checkpoint",
    },
    "it decides what is cached, in block tables that the kernels keep to": {
        "cache_config.enable_mamba_shared_prefix_checkpoint",
        "scheduler_config.disable_hybrid_kv_cache_manager",
    },
    "it reruns the last layers for prefills, which no kernel takes": {
        "cache_config.swa_bounded_replay", "compilation_config.cudagraph_decoder_replay",
    },
    "it decides which requests make up a step; a step with prefills is declined": {
        "scheduler_config.long_prefill_token_threshold_adaptive", "scheduler_config.enable_chunked_prefill",
        "scheduler_config.disable_chunked_mm_input", "scheduler_config.scheduler_reserve_full_isl",
        "scheduler_config.async_scheduling",
    },
    "it is about the vision encoder": {
        "compilation_config.compile_mm_encoder", "compilation_config.cudagraph_mm_encoder",
    },
    "it is about PIECEWISE graphs, which decline a step": {
        "compilation_config.cudagraph_copy_inputs", "compilation_config.use_inductor_graph_partition",
    },
    "it does nothing without LoRA, which refuses": {"compilation_config.cudagraph_specialize_lora"},
    "it is about how torch.compile changes the model's graph; that switch says whether there is one": {
        "compilation_config.ir_enable_torch_wrap", "compilation_config.fast_moe_cold_start",
        "compilation_config.dynamic_shapes_config.evaluate_guards",
        "compilation_config.dynamic_shapes_config.assume_32_bit_indexing",
        *(
            f"compilation_config.pass_config.{name}"
            for name in (
                "fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant", "eliminate_noops",
                "fuse_allreduce_rms", "enable_qk_norm_rope_fusion", "fuse_rope_kvcache_cat_mla",
                "fuse_act_padding", "fuse_mla_dual_rms_norm", "fuse_rope_kvcache",
                "fuse_qk_norm_rope_kvcache",
            )
        ),
    },
    "it is about which tokens are drafted; a spec names speculative_config, or that refuses": {
        "speculative_config.enforce_eager", "speculative_config.index_share_for_mtp_iteration",
        "speculative_config.disable_padded_drafter_batch", "speculative_config.disable_eagle_block_drop",
        "speculative_config.disable_lookahead_block_hashes",
        "speculative_config.use_local_argmax_reduction", "speculative_config.use_heterogeneous_vocab",
        "speculative_config.parallel_drafting", "speculative_config.enable_adaptive_verification",
    },
}  # fmt: skip


def switches(kind: type[Any], prefix: str) -> Iterator[str]:
    """The on/off fields of a configuration class and of those inside it, by dotted path."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        path = f"{prefix}.{field.name}"
        if hint is bool or bool in typing.get_args(hint):
            yield path
        elif dataclasses.is_dataclass(hint):
            yield from switches(hint, path)


def reviewed() -> list[str]:
    return [path for fields in (*SWITCHED.values(), *NO_PART.values()) for path in fields]


def fields_of(kind: type[Any]) -> tuple[dict[str, type[Any]], dict[str, type[Any]], set[str]]:
    """The fields of a configuration like VllmConfig: the configurations that are always there and those that
    are None unless their feature is on, each with its class; and the rest."""
    always, optional, plain = {}, {}, set()
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inside = [one for one in (hints[field.name], *typing.get_args(hints[field.name])) if _is_config(one)]
        if not inside:
            plain.add(field.name)
        elif field.default is None and field.name not in NOT_FEATURES:
            optional[field.name] = inside[0]
        else:
            always[field.name] = inside[0]
    return always, optional, plain


def _is_config(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def test_every_field_of_vllm_s_configuration_was_reviewed_and_no_other() -> None:
    always, optional, plain = fields_of(VllmConfig)
    assert set(always) == CONFIGS and plain == set(PLAIN)
    # Those that are None unless on refuse by themselves.
    assert set(optional) == set(optional_configs(deployment()))


def test_every_on_off_field_was_reviewed_and_no_other() -> None:
    always, optional, _ = fields_of(VllmConfig)
    found = {path for name, kind in always.items() for path in switches(kind, name)}
    # Inside the speculative one are whole models' configurations, which are those reviewed here.
    beside = {name: kind for name, kind in optional.items() if name in ALONGSIDE}
    found |= {path for name, kind in beside.items() for path in switches(kind, name) if path.count(".") == 1}
    assert found == set(reviewed())
    assert len(reviewed()) == len(found), "a field with two verdicts"


def test_a_configuration_that_vllm_adds_is_found() -> None:
    @dataclasses.dataclass
    class Telepathy:
        speed: int = 0

    @dataclasses.dataclass
    class Grown:
        always: Any
        maybe: Any = None
        name: Any = ""

    Grown.__annotations__ = {"always": Telepathy, "maybe": Telepathy | None, "name": str}
    assert fields_of(Grown) == ({"always": Telepathy}, {"maybe": Telepathy}, {"name"})


def test_a_field_that_vllm_adds_is_found() -> None:
    @dataclasses.dataclass
    class Inside:
        telepathy: bool | None = None

    @dataclasses.dataclass
    class Grown:
        inside: Inside
        levitation: bool = False
        speed: int = 0

    found = set(switches(*_resolved(Grown, Inside)))
    assert found == {"grown.inside.telepathy", "grown.levitation"}


def _resolved(kind: type[Any], inside: type[Any]) -> tuple[type[Any], str]:
    """The class with real types in place of the names that this file's annotations are."""
    inside.__annotations__ = {"telepathy": bool | None}
    kind.__annotations__ = {"inside": inside, "levitation": bool, "speed": int}
    return kind, "grown"


@pytest.mark.parametrize("path", sorted(path for fields in SWITCHED.values() for path in fields))
def test_each_switch_reads_its_field(path: str) -> None:
    (name,) = [name for name, fields in SWITCHED.items() if path in fields]
    for value in (False, True):
        config = deployment()
        owner, _, field = path.partition(".")
        setattr(getattr(config, owner), field, value)
        on, unreadable = reported_features(config)
        assert (name in on) is value and not unreadable
