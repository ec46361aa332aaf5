# SPDX-License-Identifier: Apache-2.0
"""What the DeepSeek-V4.1 mono kernels can run: deployments, GPU generations, and how much of which layer."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from vllm.models.common.amd.persistent.peers import peer_memory_reason
from vllm.models.common.specialized_decode.decode import DRAFT, TARGET, Launch, LayerPlan
from vllm.models.common.specialized_decode.spec import Check, DecodeSpec, rocm_device
from vllm.models.deepseek_v41.amd.mono import builds
from vllm.models.deepseek_v41.amd.mono.geometry import WORKGROUPS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CDNA3, CDNA4 = 3, 4


@dataclass(frozen=True)
class Routing:
    """Routed experts of a layer and how many of them a token picks."""

    experts: int
    picks: int


TARGET_ROUTING = Routing(384, 6)


@dataclass(frozen=True)
class Generation:
    """How the kernels of one CDNA generation differ from the other's.

    Args:
        architecture: their entry of ``builds.ARCHITECTURES``.
        indexer: the indexer that they run an index source with, as module and class.
        moe_backend: the ``Mxfp4MoeBackend`` in whose layout they read the routed experts.
        needs_fused_seam: whether vLLM's path must run AITER's fused seam, for both paths to round alike.
        own_top_k: whether the indexer's top-k extension is built at start-up.
        unfolded_entry: whether vLLM's path must enter the model through the unfolded seam, since no AITER
            kernel runs the folded one.
        cleans_negative_zero: whether their FP8 instructions read OCP -0 (0x80) as a NaN.
    """

    architecture: str
    indexer: tuple[str, str]
    moe_backend: str
    needs_fused_seam: bool = False
    own_top_k: bool = False
    unfolded_entry: bool = False
    cleans_negative_zero: bool = False


# By CDNA version.
GENERATIONS = {
    CDNA3: Generation(
        "gfx942", ("vllm.models.deepseek_v41.attention", "DeepseekV4Indexer"), "AITER_TRITON_MXFP4_BF16",
        own_top_k=True, unfolded_entry=True, cleans_negative_zero=True,
    ),
    CDNA4: Generation(
        "gfx950", ("vllm.models.deepseek_v41.amd.rocm", "DeepseekV41RocmMxfp4Indexer"), "AITER_MXFP4_BF16",
        needs_fused_seam=True,
    ),
}  # fmt: skip


def _generation_or_none() -> Generation | None:
    """This GPU's; None where the deployment is refused for its GPU."""
    return GENERATIONS.get(rocm_device().cdna_version or 0)


def _kernels_reason(_: VllmConfig) -> str | None:
    from vllm.models.common.amd.persistent.build import KernelBuildError

    if _generation_or_none() is None:
        return None  # refused for its GPU
    try:
        for kind in builds.KINDS.values():
            importlib.import_module(kind.module)
        builds.isa_of(gpu_architecture())
    except ImportError as error:
        return f"the kernels need FlyDSL: {error}"
    except KernelBuildError as error:
        return str(error)
    return None


def gpu_architecture() -> str:
    """This process's GPU, such as gfx950."""
    properties = torch.cuda.get_device_properties(torch.accelerator.current_device_index())
    return properties.gcnArchName.partition(":")[0].lower()


def _expert_format_reason(_: VllmConfig) -> str | None:
    if envs.VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4:
        return "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 is set: the kernels read AITER's A8W4 experts, unset it"
    return None


def _peer_memory_reason(_: VllmConfig) -> str | None:
    return peer_memory_reason()


SPEC = DecodeSpec(
    name="DeepSeek-V4.1 mono decode",
    architectures=frozenset({"DeepseekV41ForCausalLM", "DSparkV41DraftModel"}),
    dtypes=frozenset({torch.bfloat16}),
    kv_cache_dtypes=None,  # a layer of another cache keeps vLLM's attention and takes the FFN launch
    max_rows={
        cdna: builds.ARCHITECTURES[built.architecture].max_rows for cdna, built in GENERATIONS.items()
    },
    resident_workgroups=WORKGROUPS,
    graph_modes=frozenset({"NONE", "FULL"}),
    runs_alongside=frozenset(
        {
            # A DSpark draft's attention, and no target's: ``layer_checks``.
            "non-causal attention",
            # They choose, name or watch tokens, before or after the decoder layers.
            "prompt embeddings", "speculative_config", "watermark_config", "reasoning_config",
            "ec_transfer_config",
            # Their work is in the hand-over between layers, in tables or in block numbers that the kernels
            # keep to.
            "pipeline parallelism", "prefix caching", "engram_config", "kv_events_config",
            # A reload writes into the tensors whose addresses the kernels have.
            "weight_transfer_config",
            # The model is not compiled, whatever the mode.
            "torch.compile",
        }
    ),
    checks=(
        Check("the kernels", _kernels_reason),
        Check("the expert format", _expert_format_reason),
        Check("the peers' memory", _peer_memory_reason),
    ),
    device=rocm_device,
)  # fmt: skip


def layer_checks(layer: Any) -> tuple[Check, ...]:
    """What a deployment can be refused for and only a built decoder layer shows."""
    return (
        Check("the MoE backend", functools.partial(_moe_backend_reason, layer)),
        Check("the attention seam", functools.partial(_seam_reason, layer)),
        Check("the target's attention", functools.partial(_causal_reason, layer)),
    )


def _moe_backend_reason(layer: Any, _: VllmConfig) -> str | None:
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

    experts, built = _routed_experts(layer), _generation_or_none()
    if experts is None or built is None:
        return None  # a layer that runs no launch, or refused for its GPU
    seen, wanted = experts.quant_method.mxfp4_backend, Mxfp4MoeBackend[built.moe_backend]
    if seen is wanted:
        return None
    return f"MoE backend: {seen}, wanted {wanted.name} (--moe-backend aiter, with VLLM_ROCM_USE_AITER=1)"


def _routed_experts(layer: Any) -> Any:
    return getattr(getattr(layer.ffn, "experts", None), "routed_experts", None)


def _seam_reason(layer: Any, _: VllmConfig) -> str | None:
    built = _generation_or_none()
    if built is None or not built.needs_fused_seam or layer.fuse_seam_norm:
        return None
    return (
        "attention seam: vLLM's own, which rounds otherwise than the kernels, wanted AITER's fused one "
        "(aiter.ops.mhc cannot be imported)"
    )


def _causal_reason(layer: Any, config: VllmConfig) -> str | None:
    target = layer.attn.layer_id < config.model_config.hf_config.num_hidden_layers
    if target and config.attention_config.use_non_causal:
        return "non-causal attention is on, and the target's kernels run causal windows: turn it off"
    return None


def generation() -> Generation:
    """This GPU's generation; the deployment is not refused."""
    return GENERATIONS[rocm_device().cdna_version or 0]


def routing_of(vllm_config: VllmConfig, role: str) -> Routing:
    """The routed experts of the target's layers, or of the draft's."""
    config = vllm_config.model_config.hf_config
    if role == TARGET:
        return TARGET_ROUTING
    return Routing(
        getattr(config, "dspark_n_routed_experts", 0) or TARGET_ROUTING.experts,
        getattr(config, "dspark_num_experts_per_tok", 0) or TARGET_ROUTING.picks,
    )


def plan_layer(layer: Any, vllm_config: VllmConfig, role: str) -> tuple[LayerPlan, Routing]:
    """What the kernels run of a decoder layer, and its routing."""
    attn, routing = layer.attn, routing_of(vllm_config, role)
    launch: Launch | None = Launch.WHOLE
    if why := _outside_every_launch(layer, routing):
        launch = None
    elif why := _outside_whole_launch(attn, vllm_config, role):
        # The FFN launch is built for the target's routing.
        launch = None if role == DRAFT else Launch.PART
    return LayerPlan(attn.swa_cache_layer.prefix, attn.layer_id, launch, ", ".join(why)), routing


def _outside_every_launch(layer: Any, routing: Routing) -> list[str]:
    ffn = layer.ffn
    seen = (ffn.n_routed_experts, ffn.n_activated_experts, ffn.scoring_func, ffn.routed_scaling_factor)
    wanted = (routing.experts, routing.picks, "sqrtsoftplus", 1.5)
    reasons = {
        "no routed experts": _routed_experts(layer) is None,
        "sequence parallelism": layer.use_sequence_parallel,
        "no shared expert": ffn.shared_experts is None,
        "routing by token id": ffn.gate.tid2eid is not None,
        f"routing {seen}, wanted {wanted}": seen != wanted,
        "weights of the picks not renormalised": not ffn.renormalize,
        f"SwiGLU limit {ffn.swiglu_limit}, wanted 10": ffn.swiglu_limit != 10.0,
    }
    return [reason for reason, holds in reasons.items() if holds]


def _enters_later_stage(attn: Any, vllm_config: VllmConfig) -> bool:
    """Whether the layer takes what another pipeline stage hands over: one tensor of all streams, without the
    mixes that K1 folds into it or the embedding that it starts from."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return False
    from vllm.distributed import get_pp_group
    from vllm.distributed.utils import get_pp_indices

    stage, layers = get_pp_group().rank_in_group, vllm_config.model_config.hf_config.num_hidden_layers
    return stage > 0 and attn.layer_id == get_pp_indices(layers, stage, stages)[0]


def _outside_whole_launch(attn: Any, vllm_config: VllmConfig, role: str) -> list[str]:
    module, name = generation().indexer
    indexer = getattr(importlib.import_module(module), name)
    reasons = {
        "the first layer of a later pipeline stage": _enters_later_stage(attn, vllm_config),
        "a compressor without an indexer": attn.compressor is not None and attn.indexer is None,
        f"a {type(attn.indexer).__name__}": attn.indexer is not None
        and not isinstance(attn.indexer, indexer),
        f"compress ratio {attn.compress_ratio}": attn.compress_ratio not in (0, 1, 2),
        f"{'an MXFP8' if attn.kv_mxfp8 else attn.kv_cache_dtype} KV cache": attn.kv_mxfp8
        or attn.kv_cache_dtype != "fp8_ds_mla",
        "compressed keys in a draft": role == DRAFT and (attn.compress_ratio or attn.indexer is not None),
    }
    return [reason for reason, holds in reasons.items() if holds]
