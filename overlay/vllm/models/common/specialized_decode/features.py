# SPDX-License-Identifier: Apache-2.0
"""The vLLM features that a deployment has on, by name.

A specialised decode replaces vLLM's code for a step, and with it whatever a feature of vLLM does inside that
code. So it names the features that it was made to run alongside, and every other one refuses it. For the list
to stay closed when vLLM grows, an optional sub-configuration of ``VllmConfig`` needs no entry here: it is on
where it is set, under its own name. A switch inside a sub-configuration that is always there needs an
entry; the test that lists those switches fails until a new one is reviewed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import vllm.envs as envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Every deployment has these; a spec has fields for what matters in them.
NOT_FEATURES = frozenset({"model_config", "quant_config"})
NO_OFFLOAD = 0

Switch = Callable[["VllmConfig"], Any]

# Features that are a value inside a sub-configuration which is always there, or an environment variable.
SWITCHES: dict[str, Switch] = {
    "pipeline parallelism": lambda config: config.parallel_config.pipeline_parallel_size > 1,
    "data parallelism": lambda config: config.parallel_config.data_parallel_size > 1,
    "expert parallelism": lambda config: config.parallel_config.enable_expert_parallel,
    "expert load balancing": lambda config: config.parallel_config.enable_eplb,
    "decode context parallelism": lambda config: config.parallel_config.decode_context_parallel_size > 1,
    "prefill context parallelism": lambda config: config.parallel_config.prefill_context_parallel_size > 1,
    "microbatches": lambda config: config.parallel_config.use_ubatching,
    "sequence-parallel MoE": lambda config: config.parallel_config.use_sequence_parallel_moe,
    "hyper-connection sequence parallelism": lambda config: config.parallel_config.enable_hc_sp,
    "fast prefill of shared KV": lambda config: config.cache_config.kv_sharing_fast_prefill,
    "state replay": lambda config: (
        config.cache_config.use_replayssm or config.cache_config.use_kda_recoverssm
    ),
    "prefix caching": lambda config: config.cache_config.enable_prefix_caching,
    "KV cache offloading": lambda config: config.cache_config.kv_offloading_size is not None,
    "weight offloading": lambda config: (
        config.offload_config.uva.cpu_offload_gb > NO_OFFLOAD
        or config.offload_config.prefetch.offload_group_size > NO_OFFLOAD
    ),
    "layerwise NVTX tracing": lambda config: config.observability_config.enable_layerwise_nvtx_tracing,
    "batch invariance": lambda config: envs.VLLM_BATCH_INVARIANT,
    "non-causal attention": lambda config: config.attention_config.use_non_causal,
    "disabled sliding window": lambda config: config.model_config.disable_sliding_window,
    "cumem allocator": lambda config: config.model_config.enable_cumem_allocator,
    "sleep mode": lambda config: config.model_config.enable_sleep_mode,
    "prompt embeddings": lambda config: config.model_config.enable_prompt_embeds,
    "routed-expert capture": lambda config: config.aux_output_config.enable_return_routed_experts,
    "torch.compile": lambda config: config.compilation_config.mode.name != "NONE",
}


def reported_features(config: VllmConfig) -> tuple[dict[str, str], tuple[str, ...]]:
    """What the configuration says is on.

    Returns:
        Each feature that is on, with what shows it; and one line for every feature that could not be read.
    """
    on: dict[str, str] = {}
    unreadable = []
    for name, is_on in SWITCHES.items():
        try:
            if is_on(config):
                on[name] = "on"
        except Exception as error:  # whatever the probe hits is the finding
            unreadable.append(f"{name} cannot be read from the configuration: {error!r}")
    try:
        on |= {name: "set" for name in optional_configs(config) if getattr(config, name) is not None}
    except Exception as error:
        unreadable.append(f"the optional configurations cannot be read: {error!r}")
    return on, tuple(unreadable)


def optional_configs(config: VllmConfig) -> tuple[str, ...]:
    """The fields of the configuration that are None unless their feature is on."""
    return tuple(
        field.name
        for field in dataclasses.fields(config)
        if field.default is None and field.name not in NOT_FEATURES
    )
