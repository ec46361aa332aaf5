# SPDX-License-Identifier: Apache-2.0
"""Every on/off field of the sub-configurations that a deployment always has, and what it means for kernels
that replace vLLM's code of a decode step.

An optional sub-configuration refuses by itself. A field in here does not, so each is reviewed: it is read by
a switch of ``features``, or it says why it has no part in a step of a decoder layer. A field that a later
vLLM adds has no entry and fails.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.test_specialized_decode_tree import deployment

from vllm.config import SpeculativeConfig, VllmConfig  # isort: skip
from vllm.models.common.specialized_decode.features import reported_features  # isort: skip

CONFIGS = (
    "parallel_config", "cache_config", "offload_config", "scheduler_config", "compilation_config",
    "aux_output_config",
)  # fmt: skip

# A switch, and the fields that turn it on.
SWITCHED = {
    "expert parallelism": {"parallel_config.enable_expert_parallel"},
    "expert load balancing": {"parallel_config.enable_eplb"},
    "hyper-connection sequence parallelism": {"parallel_config.enable_hc_sp"},
    "microbatches": {"parallel_config.enable_dbo"},
    "prefix caching": {"cache_config.enable_prefix_caching"},
    "fast prefill of shared KV": {"cache_config.kv_sharing_fast_prefill"},
    "state replay": {"cache_config.use_replayssm", "cache_config.use_kda_recoverssm"},
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
    "it is about sampling, after the decoder layers": {"parallel_config.enable_batch_sharded_sampling"},
    "it chooses how vLLM's own path sums over ranks, which the kernels do themselves": {
        "parallel_config.disable_custom_all_reduce",
    },
    "it describes the model or the user's choice": {
        "parallel_config.is_moe_model", "cache_config.is_attention_free",
        "cache_config.user_specified_block_size", "cache_config._block_size_resolved",
        "scheduler_config.is_multimodal_model",
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


def test_every_on_off_field_was_reviewed_and_no_other() -> None:
    hints = typing.get_type_hints(VllmConfig)
    found = {path for name in CONFIGS for path in switches(hints[name], name)}
    # Inside it are the configurations of whole models, which are those reviewed here.
    own = [path for path in switches(SpeculativeConfig, "speculative_config") if path.count(".") == 1]
    found |= set(own)
    assert found == set(reviewed())
    assert len(reviewed()) == len(found), "a field with two verdicts"


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
