# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V4.1 layer's weights as the mono kernels read them: where they are, what is kept at load, and
the copies of the base's CDNA3 kernels."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.models.common.specialized_decode.decode import Launch, LayerPlan
from vllm.models.common.specialized_decode.weights import CopyAtLoad, KeptAtLoad, as_bytes, gather, loaded
from vllm.models.deepseek_v41.amd.mono import builds
from vllm.models.deepseek_v41.amd.mono_decode_cdna3 import keep_at_load
from vllm.models.deepseek_v41.amd.mono_decode_spec import generation, gpu_architecture

if TYPE_CHECKING:
    from vllm.models.deepseek_v41.amd.mono_decode import MonoDecodeLayer

# Where the kernels' tensors are below a decoder layer. The linears have a scale beside their weight.
SEAMS = {
    "hc_attn_fn": "hc_attn_fn", "hc_attn_scale": "hc_attn_scale", "hc_attn_base": "hc_attn_base",
    "hc_ffn_fn": "hc_ffn_fn", "hc_ffn_scale": "hc_ffn_scale", "hc_ffn_base": "hc_ffn_base",
    "attn_norm": "attn_norm.weight", "ffn_norm": "ffn_norm.weight",
    "gate_w": "ffn.gate.weight", "bias": "ffn.gate.e_score_correction_bias",
}  # fmt: skip
ATTENTION = {
    "q_norm": "attn.q_norm.weight", "kv_norm": "attn.kv_norm.weight",
    "attn_sink": "attn.attn_sink", "cos_sin": "attn.rotary_emb.cos_sin_cache",
}  # fmt: skip
ATTENTION_LINEARS = {
    ("wqkv", "wqkv_scale"): "attn.fused_wqa_wkv", ("wq_b", "wq_b_scale"): "attn.wq_b",
    ("wo_a", "wo_a_scale"): "attn.wo_a", ("wo_b", "wo_b_scale"): "attn.wo_b",
}  # fmt: skip
SHARED_EXPERT = {
    ("sgu", "sgu_s"): "ffn.shared_experts.gate_up_proj",
    ("sw2", "sw2_s"): "ffn.shared_experts.down_proj",
}
LINEAR_TENSORS = ("weight", "weight_scale")
EXPERTS = "ffn.experts.routed_experts"
EXPERT_TENSORS = {
    "w13": "w13_weight", "w13_s": "w13_weight_scale", "w2": "w2_weight", "w2_s": "w2_weight_scale",
}  # fmt: skip
# A rank's part of the routed experts' width at TP 4. vLLM pads it, and the copies leave the padding out.
EXPERT_WIDTH_TP4 = 576
COPIES = "mono942"  # the attribute of a linear, or of the experts, that holds their copies


def _linears(launch: Launch | None) -> dict[tuple[str, str], str]:
    return SHARED_EXPERT | (ATTENTION_LINEARS if launch is Launch.WHOLE else {})


def kept_at_load(layer: Any, plan: LayerPlan) -> dict[str, KeptAtLoad]:
    """What our CDNA3 kernels read of the weights that vLLM processes, by the path of what is processed."""
    return keep_at_load(layer, _linears(plan.launch).values(), EXPERTS)


def copies_at_load(layer: Any, plan: LayerPlan) -> dict[str, CopyAtLoad]:
    """The copies that CDNA3 kernels read, by the path of what is copied; made when vLLM processes it."""
    copies = {path: copy_linear_at_load(attrgetter(path)(layer)) for path in _linears(plan.launch).values()}
    return copies | {EXPERTS: copy_experts_at_load(attrgetter(EXPERTS)(layer))}


def copy_linear_at_load(linear: Any) -> CopyAtLoad:
    """The copy of a dense MXFP8 linear: (weight, scale)."""
    return CopyAtLoad(linear, _copy_linear, name=COPIES)


def copy_experts_at_load(experts: Any) -> CopyAtLoad:
    """The copies of the routed experts: (w13, its scale, w2, its scale)."""
    # vLLM's MoE backend frees the scales when it converts the experts.
    return CopyAtLoad(experts, _copy_experts, name=COPIES, before=True)


def _copy_linear(linear: Any) -> tuple[Tensor, ...]:
    from vllm.models.deepseek_v41.amd.mono.weights942 import linear_copy

    return linear_copy(linear.weight, linear.weight_scale)


def _copy_experts(experts: Any) -> tuple[Tensor, ...]:
    from vllm.models.deepseek_v41.amd.mono.weights942 import moe_copies

    tensors = gather(experts, EXPERT_TENSORS)
    codes = {name: as_bytes(tensor) for name, tensor in tensors.items() if name.endswith("_s")}
    w13, w13_scale, w2, w2_scale = (tensors | codes).values()
    return moe_copies(w13, w13_scale, w2, w2_scale, EXPERT_WIDTH_TP4)


# Our kernels' names for them.
FFN_NAMES = {
    "hc_ffn_fn": "mix_projection", "hc_ffn_scale": "mix_scale", "hc_ffn_base": "mix_base",
    "ffn_norm": "norm_weight", "gate_w": "gate_weight", "bias": "gate_bias",
    "w13": "w13", "w13_s": "w13_scale", "w2": "w2", "w2_s": "w2_scale",
    "sgu": "shared_w13", "sgu_s": "shared_w13_scale", "sw2": "shared_w2", "sw2_s": "shared_w2_scale",
}  # fmt: skip
ATTENTION_NAMES = {
    "hc_attn_fn": "mix_projection", "hc_attn_scale": "mix_scale", "hc_attn_base": "mix_base",
    "attn_norm": "norm_weight", "q_norm": "query_norm", "kv_norm": "key_norm", "attn_sink": "sink",
    "cos_sin": "cos_sin",
} | {name: name for pair in ATTENTION_LINEARS for name in pair}  # fmt: skip


def _named(layer: Any, names: dict[str, str], places: dict[str, str]) -> dict[str, Tensor]:
    """The tensors at ``places`` that ``names`` names, by those names; scales as bytes.

    Raises:
        AttributeError: tensors are missing; all of them are named.
    """
    found = gather(layer, {name: path for name, path in places.items() if name in names})
    tensors = {names[name]: tensor for name, tensor in found.items()}
    return tensors | {name: as_bytes(tensor) for name, tensor in tensors.items() if name in CODES}


def _places(linears: dict[tuple[str, str], str]) -> dict[str, str]:
    """Where the tensors of some linears are."""
    return {
        name: f"{path}.{leaf}"
        for names, path in linears.items()
        for name, leaf in zip(names, LINEAR_TENSORS, strict=True)
    }


def _taken(layer: Any, mono: MonoDecodeLayer, names: dict[str, str], half: Half) -> dict[str, Tensor]:
    """The tensors of half a layer by the kernels' names, from where they are or what was kept of them.

    Raises:
        AttributeError: tensors are missing; all of them are named.
        ValueError: vLLM left weights as the kernels cannot read them; all of these are named.
    """
    if not mono.kept:
        return _named(layer, names, half.places | _places(half.linears) | half.experts)
    tensors, faults = _named(layer, names, half.places), []
    wanted = {path: dict(zip(pair, LINEAR_TENSORS, strict=True)) for pair, path in half.linears.items()}
    if half.experts:
        wanted[EXPERTS] = EXPERT_TENSORS
    for path, found_as in wanted.items():
        try:
            kept = mono.kept[path].taken(path)
        except ValueError as error:
            faults.append(str(error))
            continue
        tensors |= {names[name]: kept[leaf] for name, leaf in found_as.items()}
    if faults:
        raise ValueError("; ".join(faults))
    return tensors


@dataclass(frozen=True)
class Half:
    """Where the tensors of the attention, or of the FFN, are below a decoder layer."""

    places: dict[str, str]
    linears: dict[tuple[str, str], str]
    experts: dict[str, str]


FFN_HALF = Half(SEAMS, SHARED_EXPERT, {name: f"{EXPERTS}.{path}" for name, path in EXPERT_TENSORS.items()})
ATTENTION_HALF = Half(SEAMS | ATTENTION, ATTENTION_LINEARS, {})


def ffn_weights(layer: Any, mono: MonoDecodeLayer) -> Any:
    """The layer's weights as our FFN launch takes them, checked.

    Raises:
        AttributeError: tensors are missing; all of them are named.
        ValueError: tensors are not as the kernel reads them; all faults are named.
    """
    weights = _ffn_half(layer, mono)
    weights.check(*_read_as(mono))
    return weights


def _ffn_half(layer: Any, mono: MonoDecodeLayer) -> Any:
    from vllm.models.deepseek_v41.amd.mono.ffn_launch import FfnWeights

    return FfnWeights(layer=mono.plan.name, **_taken(layer, mono, FFN_NAMES, FFN_HALF))


def _read_as(mono: MonoDecodeLayer) -> tuple[int, int, int, str]:
    """TP size, experts, picks and the experts' layout, as the weights' checks take them."""
    layout = builds.ARCHITECTURES[gpu_architecture()].expert_layout
    return mono.decode.build.tp_size, mono.routing.experts, mono.routing.picks, layout


def whole_weights(layer: Any, mono: MonoDecodeLayer) -> Any:
    """The layer's weights as our whole-layer kernels take them, checked; raises as ``ffn_weights``."""
    from vllm.models.deepseek_v41.amd.mono.layer_launch import LayerWeights

    weights = LayerWeights(
        layer=mono.plan.name,
        ratio=layer.attn.compress_ratio,
        ffn=_ffn_half(layer, mono),
        **_taken(layer, mono, ATTENTION_NAMES, ATTENTION_HALF),
    )
    weights.check(*_read_as(mono))
    return weights


# Scales as codes; the hyper-connection's is three factors.
CODES = frozenset(
    {
        "w13_scale", "w2_scale", "shared_w13_scale", "shared_w2_scale",
        "wqkv_scale", "wq_b_scale", "wo_a_scale", "wo_b_scale",
    }
)  # fmt: skip


def layer_weights(layer: Any, mono: MonoDecodeLayer) -> Any:
    """The layer's weights as the kernels take them, checked by them."""
    if generation().own_kernels:
        return ffn_weights(layer, mono) if mono.ffn_only else whole_weights(layer, mono)
    from vllm.models.deepseek_v41.amd.mono.attention.plan import Dims
    from vllm.models.deepseek_v41.amd.mono.runner import AttnWeights, MonoLayerWeights

    tp_size, attn = mono.decode.build.tp_size, None
    whole = not mono.ffn_only
    tensors = gather(layer, SEAMS | (ATTENTION if whole else {}))
    for names, path in _linears(mono.plan.launch).items():
        tensors |= zip(names, loaded(layer, path, LINEAR_TENSORS, mono.copies), strict=True)
    tensors |= zip(EXPERT_TENSORS, loaded(layer, EXPERTS, EXPERT_TENSORS.values(), mono.copies), strict=True)
    if whole:
        own = [*ATTENTION, *(name for pair in ATTENTION_LINEARS for name in pair)]
        attn = AttnWeights(
            layer_id=layer.attn.layer_id,
            ratio=layer.attn.compress_ratio,
            **{name: tensors.pop(name) for name in own},
        )
        attn.check(Dims(tp_size))
    weights = MonoLayerWeights(attn=attn, **tensors)
    if mono.copies:
        weights.check_942(mono.routing.experts)
    else:
        weights.check(tp_size, mono.routing.experts)
    return weights
