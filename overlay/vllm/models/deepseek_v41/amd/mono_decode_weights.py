# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V4.1 layer's weights as the mono kernels read them: where they are, and what is kept at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.models.common.specialized_decode.decode import Launch, LayerPlan
from vllm.models.common.specialized_decode.weights import KeptAtLoad, as_bytes, gather
from vllm.models.deepseek_v41.amd.mono import builds
from vllm.models.deepseek_v41.amd.mono_decode_cdna3 import keep_at_load
from vllm.models.deepseek_v41.amd.mono_decode_spec import gpu_architecture

if TYPE_CHECKING:
    from vllm.models.deepseek_v41.amd.mono_decode import MonoDecodeLayer

EXPERTS = "ffn.experts.routed_experts"
LINEAR_TENSORS = ("weight", "weight_scale")


@dataclass(frozen=True)
class Half:
    """Where the tensors of the attention, or of the FFN, are below a decoder layer, by the kernels' names.

    Args:
        places: paths of tensors that vLLM leaves as loaded.
        linears: paths of dense MXFP8 linears, by the names of weight and scale.
        experts: tensors of the routed experts.
    """

    places: dict[str, str]
    linears: dict[tuple[str, str], str]
    experts: dict[str, str]

    @property
    def processed(self) -> dict[str, dict[str, str]]:
        """What vLLM processes, by the path of its module: the tensors' names there, by the kernels'."""
        found = {path: dict(zip(pair, LINEAR_TENSORS, strict=True)) for pair, path in self.linears.items()}
        return found | ({EXPERTS: self.experts} if self.experts else {})

    @property
    def in_place(self) -> dict[str, str]:
        """The paths of all tensors, where none is kept elsewhere."""
        processed = self.processed.items()
        return self.places | {name: f"{path}.{leaf}" for path, own in processed for name, leaf in own.items()}

    @property
    def codes(self) -> set[str]:
        """The scales that are codes; the hyper-connection's is three factors."""
        return {name for own in self.processed.values() for name in own if name.endswith("_scale")}


FFN_HALF = Half(
    places={
        "mix_projection": "hc_ffn_fn", "mix_scale": "hc_ffn_scale", "mix_base": "hc_ffn_base",
        "norm_weight": "ffn_norm.weight", "gate_weight": "ffn.gate.weight",
        "gate_bias": "ffn.gate.e_score_correction_bias",
    },
    linears={
        ("shared_w13", "shared_w13_scale"): "ffn.shared_experts.gate_up_proj",
        ("shared_w2", "shared_w2_scale"): "ffn.shared_experts.down_proj",
    },
    experts={
        "w13": "w13_weight", "w13_scale": "w13_weight_scale",
        "w2": "w2_weight", "w2_scale": "w2_weight_scale",
    },
)  # fmt: skip
ATTENTION_HALF = Half(
    places={
        "mix_projection": "hc_attn_fn", "mix_scale": "hc_attn_scale", "mix_base": "hc_attn_base",
        "norm_weight": "attn_norm.weight", "query_norm": "attn.q_norm.weight",
        "key_norm": "attn.kv_norm.weight", "sink": "attn.attn_sink",
        "cos_sin": "attn.rotary_emb.cos_sin_cache",
    },
    linears={
        ("wqkv", "wqkv_scale"): "attn.fused_wqa_wkv", ("wq_b", "wq_b_scale"): "attn.wq_b",
        ("wo_a", "wo_a_scale"): "attn.wo_a", ("wo_b", "wo_b_scale"): "attn.wo_b",
    },
    experts={},
)  # fmt: skip


def kept_at_load(layer: Any, plan: LayerPlan) -> dict[str, KeptAtLoad]:
    """What CDNA3 kernels read of the weights that vLLM processes, by the path of what is processed."""
    halves = (FFN_HALF, ATTENTION_HALF) if plan.launch is Launch.WHOLE else (FFN_HALF,)
    return keep_at_load(layer, [path for half in halves for path in half.linears.values()], EXPERTS)


def _taken(layer: Any, mono: MonoDecodeLayer, half: Half) -> dict[str, Tensor]:
    """The tensors of half a layer, from where they are or what was kept of them; codes as bytes.

    Raises:
        AttributeError: tensors are missing; all of them are named.
        ValueError: vLLM left weights as the kernels cannot read them; all of these are named.
    """
    tensors, faults = gather(layer, half.places if mono.kept else half.in_place), []
    for path, own in half.processed.items() if mono.kept else ():
        try:
            kept = mono.kept[path].taken(path)
        except ValueError as error:
            faults.append(str(error))
            continue
        tensors |= {name: kept[leaf] for name, leaf in own.items()}
    if faults:
        raise ValueError("; ".join(faults))
    return tensors | {name: as_bytes(tensors[name]) for name in half.codes}


def _ffn_half(layer: Any, mono: MonoDecodeLayer) -> Any:
    from vllm.models.deepseek_v41.amd.mono.ffn_launch import FfnWeights

    return FfnWeights(layer=mono.plan.name, **_taken(layer, mono, FFN_HALF))


def _both_halves(layer: Any, mono: MonoDecodeLayer) -> Any:
    from vllm.models.deepseek_v41.amd.mono.layer_launch import LayerWeights

    return LayerWeights(
        layer=mono.plan.name,
        ratio=layer.attn.compress_ratio,
        ffn=_ffn_half(layer, mono),
        **_taken(layer, mono, ATTENTION_HALF),
    )


def layer_weights(layer: Any, mono: MonoDecodeLayer) -> Any:
    """The layer's weights as its launch takes them, checked.

    Raises:
        AttributeError: tensors are missing; all of them are named.
        ValueError: tensors are not as the kernels read them; all faults are named.
    """
    weights = _ffn_half(layer, mono) if mono.ffn_only else _both_halves(layer, mono)
    layout = builds.ARCHITECTURES[gpu_architecture()].expert_layout
    weights.check(mono.decode.build.tp_size, mono.routing.experts, mono.routing.picks, layout)
    return weights
