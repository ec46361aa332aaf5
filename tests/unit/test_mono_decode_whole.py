# SPDX-License-Identifier: Apache-2.0
"""Our whole-layer kernels in the model's mono decode: the weights that they are handed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.test_mono_decode_ffn import PLACES as FFN_PLACES
from tests.unit.test_mono_decode_startup import decoder_layer, gpu  # noqa: F401
from tests.unit.test_mono_decode_weights import LINEAR_PLACES, loaded
from tests.unit.test_specialized_decode_tree import deployment

from vllm.models.deepseek_v41.amd import mono_decode_weights  # isort: skip
from vllm.models.deepseek_v41.amd.mono import layer_launch  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode import MonoDecodeLayer  # isort: skip

PLACES = LINEAR_PLACES | {
    "mix_projection": "hc_attn_fn", "mix_scale": "hc_attn_scale", "mix_base": "hc_attn_base",
    "norm_weight": "attn_norm.weight", "query_norm": "attn.q_norm.weight",
    "key_norm": "attn.kv_norm.weight", "sink": "attn.attn_sink", "cos_sin": "attn.rotary_emb.cos_sin_cache",
}  # fmt: skip
checked: list[Any] = []


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
    assert set(mono_decode_weights.ATTENTION_NAMES.values()) == fixed == set(PLACES)
