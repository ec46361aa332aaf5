# SPDX-License-Identifier: Apache-2.0
"""The weights that a layer's launch is handed: every one that it names, from where the layer has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.test_mono_decode_startup import Node, decoder_layer, gpu  # noqa: F401
from tests.unit.test_specialized_decode_tree import deployment

from vllm.models.deepseek_v41.amd import mono_decode_weights  # isort: skip
from vllm.models.deepseek_v41.amd.mono import layer_launch  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode import MonoDecodeLayer  # isort: skip

LINEARS = ("attn.fused_wqa_wkv", "attn.wq_b", "attn.wo_a", "attn.wo_b")
SHARED = ("ffn.shared_experts.gate_up_proj", "ffn.shared_experts.down_proj")
LINEAR_PLACES = {
    name + suffix: f"{path}.weight{suffix}"
    for name, path in zip(("wqkv", "wq_b", "wo_a", "wo_b"), LINEARS, strict=True)
    for suffix in ("", "_scale")
}
FFN_PLACES = {
    "mix_projection": "hc_ffn_fn", "mix_scale": "hc_ffn_scale", "mix_base": "hc_ffn_base",
    "norm_weight": "ffn_norm.weight", "gate_weight": "ffn.gate.weight",
    "gate_bias": "ffn.gate.e_score_correction_bias",
    "w13": "ffn.experts.routed_experts.w13_weight",
    "w13_scale": "ffn.experts.routed_experts.w13_weight_scale",
    "w2": "ffn.experts.routed_experts.w2_weight", "w2_scale": "ffn.experts.routed_experts.w2_weight_scale",
    "shared_w13": "ffn.shared_experts.gate_up_proj.weight",
    "shared_w13_scale": "ffn.shared_experts.gate_up_proj.weight_scale",
    "shared_w2": "ffn.shared_experts.down_proj.weight",
    "shared_w2_scale": "ffn.shared_experts.down_proj.weight_scale",
}  # fmt: skip
PLACES = LINEAR_PLACES | {
    "mix_projection": "hc_attn_fn", "mix_scale": "hc_attn_scale", "mix_base": "hc_attn_base",
    "norm_weight": "attn_norm.weight", "query_norm": "attn.q_norm.weight",
    "key_norm": "attn.kv_norm.weight", "sink": "attn.attn_sink", "cos_sin": "attn.rotary_emb.cos_sin_cache",
}  # fmt: skip
checked: list[Any] = []


def tagged(tag: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.zeros(1, dtype=dtype)
    tensor.tag = tag  # type: ignore[attr-defined]
    return tensor


def place(root: Node, path: str, dtype: torch.dtype = torch.float32) -> None:
    *owners, name = path.split(".")
    for owner in owners:
        if not hasattr(root, owner):
            setattr(root, owner, Node())
        root = getattr(root, owner)
    setattr(root, name, tagged(path, dtype))


def loaded(layer: Node) -> Node:
    """The layer with a tensor, tagged with its path, wherever vLLM loads one that the kernels read."""
    for seam in ("hc_attn", "hc_ffn"):
        for part in ("fn", "scale", "base"):
            place(layer, f"{seam}_{part}")
    for path in (*LINEARS, *SHARED):
        place(layer, f"{path}.weight")
        place(layer, f"{path}.weight_scale", torch.uint8)
    for path in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
        place(layer, f"ffn.experts.routed_experts.{path}", torch.uint8)
    for path in (
        "attn_norm.weight",
        "ffn_norm.weight",
        "ffn.gate.weight",
        "ffn.gate.e_score_correction_bias",
    ):
        place(layer, path)
    for path in ("q_norm.weight", "kv_norm.weight", "attn_sink", "rotary_emb.cos_sin_cache"):
        place(layer, f"attn.{path}")
    return layer


class Loose(layer_launch.LayerWeights):
    """Weights that are not looked at."""

    def check(self, *given: Any) -> None:
        checked.append(given)


def taken(layer: Any) -> Any:
    mono = MonoDecodeLayer.create(layer, deployment())
    assert mono is not None
    mono.take_weights()
    return mono


def test_each_weight_is_taken_from_its_place_and_checked(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    checked.clear()
    monkeypatch.setattr(layer_launch, "LayerWeights", Loose)
    layer = loaded(decoder_layer(21, compress_ratio=2))
    mono = taken(layer)
    weights = mono.weights
    assert {name: tensor.tag for name, tensor in weights.tensors().items()} == PLACES
    assert {name: tensor.tag for name, tensor in weights.ffn.tensors().items()} == FFN_PLACES
    assert (weights.layer, weights.ffn.layer, weights.ratio) == (mono.plan.name, mono.plan.name, 2)
    assert checked == [(4, 384, 6, "aiter_shuffle")]


def test_codes_are_handed_on_as_bytes(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(layer_launch, "LayerWeights", Loose)
    layer = loaded(decoder_layer())
    for linear in (layer.attn.wo_a, layer.ffn.shared_experts.down_proj):
        linear.weight_scale = torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weights = taken(layer).weights
    assert weights.wo_a_scale.dtype == weights.ffn.shared_w2_scale.dtype == torch.uint8
    assert weights.mix_scale.dtype == torch.float32


def test_missing_and_misshapen_weights_are_named_before_the_kernels_are_opened(gpu: Any) -> None:  # noqa: F811
    layer = loaded(decoder_layer())
    with pytest.raises(ValueError, match=r"attention of layers\.21\.window: .*wqkv has shape \(1,\)"):
        taken(layer)
    del layer.attn.q_norm.weight, layer.hc_attn_fn
    with pytest.raises(AttributeError, match=r"no tensor at hc_attn_fn, attn\.q_norm\.weight"):
        taken(layer)


def test_every_weight_of_the_kernels_has_a_place() -> None:
    fixed = set(layer_launch.expected(4)) | {"sink", "cos_sin"}
    assert set(mono_decode_weights.ATTENTION_HALF.in_place) == fixed == set(PLACES)
