# SPDX-License-Identifier: Apache-2.0
"""The weights that the kernels are handed: every one that they name, from where the layer has it."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_mono_decode_startup import (
    DRAFT_ROUTING,
    Node,
    decoder_layer,
    draft_layer,
    gpu,  # noqa: F401
    linear,
    with_drafts,
)
from tests.unit.test_specialized_decode_tree import TREE, deployment

from vllm.models.deepseek_v41.amd.mono_decode import MonoDecodeLayer  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode_weights import copy_experts_at_load  # isort: skip

LINEARS = ("attn.fused_wqa_wkv", "attn.wq_b", "attn.wo_a", "attn.wo_b")
SHARED = ("ffn.shared_experts.gate_up_proj", "ffn.shared_experts.down_proj")


def fields_of_the_kernels(name: str) -> set[str]:
    """The fields of the dataclass ``name`` of the kernels, whose module needs FlyDSL to be imported."""
    source = (TREE / "vllm/models/deepseek_v41/amd/mono/runner.py").read_text(encoding="utf-8")
    (found,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]


class Taken(SimpleNamespace):
    """What the kernels' dataclasses are given, and how they are asked to check it."""

    def check(self, *arguments: Any) -> None:
        self.checked = ("check", *arguments)

    def check_942(self, *arguments: Any) -> None:
        self.checked = ("check_942", *arguments)


@pytest.fixture
def kernels(gpu: Any) -> Any:  # noqa: F811
    def choose(cdna: int) -> None:
        gpu(cdna=cdna)
        gpu.stand_in("runner", BLOCKS=256, AttnWeights=Taken, MonoLayerWeights=Taken)
        gpu.stand_in("attention.plan", Dims=lambda tp_size: f"TP {tp_size}")
        gpu.stand_in(
            "weights942",
            linear_copy=lambda weight, scale: (("copy", weight.tag), ("copy", scale.tag)),
            moe_copies=lambda *tensors: tuple(("copy", tensor.tag) for tensor in tensors[:4]),
        )

    return choose


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


def process(layer: Node) -> None:
    """vLLM's processing after loading."""
    for module in (*vars(layer.attn).values(), *vars(layer.ffn.shared_experts).values()):
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
    experts = layer.ffn.experts.routed_experts
    experts.quant_method.process_weights_after_loading(experts)


def taken(layer: Node) -> tuple[Any, dict[str, Any]]:
    """The weights that the layer takes, and their tags by name."""
    mono = MonoDecodeLayer.create(loaded(layer), with_drafts(deployment()))
    assert mono is not None
    process(layer)
    mono.take_weights()
    attn = vars(mono.weights.attn) if mono.weights.attn else {}
    given = {**vars(mono.weights), **attn}
    return mono.weights, {name: getattr(value, "tag", value) for name, value in given.items()}


PLACES = {
    "gate_w": "ffn.gate.weight", "bias": "ffn.gate.e_score_correction_bias", "hc_attn_fn": "hc_attn_fn",
    "hc_ffn_base": "hc_ffn_base", "attn_norm": "attn_norm.weight", "ffn_norm": "ffn_norm.weight",
}  # fmt: skip
ATTENTION_PLACES = {
    "q_norm": "attn.q_norm.weight", "kv_norm": "attn.kv_norm.weight", "attn_sink": "attn.attn_sink",
    "cos_sin": "attn.rotary_emb.cos_sin_cache",
}  # fmt: skip
EXPERT_PLACES = {
    "w13": "ffn.experts.routed_experts.w13_weight", "w13_s": "ffn.experts.routed_experts.w13_weight_scale",
    "w2": "ffn.experts.routed_experts.w2_weight", "w2_s": "ffn.experts.routed_experts.w2_weight_scale",
}  # fmt: skip
SHARED_PLACES = {
    "sgu": f"{SHARED[0]}.weight",
    "sgu_s": f"{SHARED[0]}.weight_scale",
    "sw2": f"{SHARED[1]}.weight",
    "sw2_s": f"{SHARED[1]}.weight_scale",
}
LINEAR_PLACES = {
    name + suffix: f"{path}.weight{suffix}"
    for name, path in zip(("wqkv", "wq_b", "wo_a", "wo_b"), LINEARS, strict=True)
    for suffix in ("", "_scale")
}


def test_cdna3_s_copies_leave_every_other_weight_in_place(kernels: Any) -> None:
    kernels(3)
    weights, tags = taken(decoder_layer())
    wanted = PLACES | ATTENTION_PLACES
    assert {name: tags[name] for name in wanted} == wanted
    assert set(vars(weights)) - {"checked"} == fields_of_the_kernels("MonoLayerWeights")
    assert set(vars(weights.attn)) - {"checked"} == fields_of_the_kernels("AttnWeights")
    assert (tags["layer_id"], tags["ratio"]) == (21, 1)
    assert weights.attn.checked == ("check", "TP 4")


def test_cdna3_takes_its_copies_of_what_it_does_not_read_in_place(kernels: Any) -> None:
    kernels(3)
    weights, tags = taken(decoder_layer())
    copied = EXPERT_PLACES | SHARED_PLACES | LINEAR_PLACES
    assert {name: tags[name] for name in copied} == {name: ("copy", path) for name, path in copied.items()}
    in_place = PLACES | ATTENTION_PLACES
    assert {name: tags[name] for name in in_place} == in_place
    assert set(vars(weights)) - {"checked"} == fields_of_the_kernels("MonoLayerWeights")
    assert weights.checked == ("check_942", 384)


@pytest.mark.parametrize(
    "make", [lambda: decoder_layer(kv_cache_dtype="auto"), draft_layer], ids=["target", "draft"]
)
def test_the_ffn_launch_takes_no_weights_of_the_attention(kernels: Any, make: Any) -> None:
    kernels(3)
    weights, tags = taken(make())
    assert weights.attn is None and not set(tags) & set(ATTENTION_PLACES)
    assert weights.checked[-1] in (384, DRAFT_ROUTING.experts)


def test_the_experts_are_copied_with_both_scales_as_bytes(gpu: Any) -> None:  # noqa: F811
    given: list[torch.Tensor] = []
    gpu.stand_in("weights942", moe_copies=lambda *tensors: (given.extend(tensors[:4]), tensors[:4])[1])
    experts = linear()
    for name in ("w13_weight", "w2_weight"):
        setattr(experts, name, torch.zeros(2, dtype=torch.uint8))
        setattr(experts, f"{name}_scale", torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    copy_experts_at_load(experts)
    experts.quant_method.process_weights_after_loading(experts)
    assert [tensor.dtype for tensor in given] == [torch.uint8] * 4


def test_weights_that_vllm_did_not_process_have_no_copies(kernels: Any) -> None:
    kernels(3)
    mono = MonoDecodeLayer.create(layer := loaded(decoder_layer()), deployment())
    assert mono is not None and layer is not None
    with pytest.raises(ValueError, match=r"ffn\.shared_experts\.gate_up_proj was not copied"):
        mono.take_weights()


def test_a_weight_of_another_shape_is_the_kernels_to_refuse(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels(3)

    def refuse(weights: Any, *_: Any) -> None:
        raise AssertionError("MoE w13: (1,) torch.uint8, want (2,) torch.uint8")

    monkeypatch.setattr(Taken, "check_942", refuse)
    mono = MonoDecodeLayer.create(layer := loaded(decoder_layer()), deployment())
    assert mono is not None
    process(layer)
    with pytest.raises(AssertionError, match="MoE w13"):
        mono.take_weights()
