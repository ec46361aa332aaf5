# SPDX-License-Identifier: Apache-2.0
"""Both sides of the mono decode are others' files: what the model calls, and what calls the kernels get,
must be what stands there.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
import torch

from tests.unit.test_mono_decode_startup import gpu  # noqa: F401
from tests.unit.test_specialized_decode_tree import TREE

import vllm.distributed as distributed  # isort: skip
from vllm.models.deepseek_v41.amd import mono_decode  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode import KernelBuild, MonoDecodeLayer, Routing  # isort: skip

AMD = TREE / "vllm" / "models" / "deepseek_v41" / "amd"


def parsed(path: str) -> ast.Module:
    return ast.parse((AMD / path).read_text(encoding="utf-8"))


def is_mono(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "mono" and ast.unparse(node.value) == "self"


def model_calls() -> dict[str, list[str]]:
    """What the model calls of a layer's mono decode, with its arguments as they are written."""
    calls = {}
    for node in ast.walk(parsed("model.py")):
        if not isinstance(node, ast.Call):
            continue
        if is_mono(node.func):
            calls["__call__"] = list(map(ast.unparse, node.args))
        elif isinstance(node.func, ast.Attribute) and is_mono(node.func.value):
            calls[node.func.attr] = list(map(ast.unparse, node.args))
    return calls


def test_the_model_s_calls_fit() -> None:
    calls = model_calls()
    assert set(calls) == {"__call__", "ffn"}
    for name, given in calls.items():
        wanted = list(inspect.signature(getattr(MonoDecodeLayer, name)).parameters)
        # The model's names for what ours calls the layer, wo_b's output and the attention's pre-mix.
        given = [{"self": "layer", "attn_pre": "pre_mix"}.get(one, one) for one in given]
        renamed = ["part" if name == "ffn" and one == "x" else one for one in given]
        assert ["self", *renamed] == wanted


def test_the_model_reads_only_attributes_that_a_layer_has() -> None:
    read = {
        node.attr
        for node in ast.walk(parsed("model.py"))
        if isinstance(node, ast.Attribute) and is_mono(node.value)
    }
    assert read == {"ffn", "ffn_only", "unfolded_entry"}


def kernel_methods() -> dict[str, list[str]]:
    """The parameters of the kernels' methods, self left out."""
    (found,) = (
        node
        for node in parsed("mono/runner.py").body
        if isinstance(node, ast.ClassDef) and node.name == "DSV41MonoLayer"
    )
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    return {method.name: [one.arg for one in method.args.args if one.arg != "self"] for method in methods}


def test_the_kernels_have_the_methods_of_the_interface() -> None:
    methods = kernel_methods()
    assert methods["scratch"] == methods["first_pre_mix"] == ["tokens"]
    stream = ["residual", "post_mix", "res_mix", "pre_mix"]
    window = ["swa_cache", "swa_indices", "swa_lens", "token_to_req"]
    assert methods["forward"][:12] == ["w", "x", *stream, "positions", "slot_mapping", *window]
    options = {"fold", "select", "topk_indices", "comp_cache", "comp_block_table"}
    assert options <= set(methods["forward"][12:])
    assert methods["ffn"][:6] == ["w", "part", *stream] and "topk" in methods["ffn"]


@pytest.mark.parametrize(("routing", "groups"), [(Routing(384, 6), {}), (Routing(128, 3), {"ug_groups": 1})])
def test_kernels_are_opened_once_for_what_they_are_built_for(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, routing: Routing, groups: dict[str, int]  # noqa: F811
) -> None:  # fmt: skip
    opened: list[dict[str, Any]] = []
    gpu.stand_in("runner", DSV41MonoLayer=lambda **given: opened.append(given) or object())
    monkeypatch.setattr(mono_decode, "_open", {})
    monkeypatch.setattr(distributed, "get_tensor_model_parallel_rank", lambda: 3)
    monkeypatch.setattr(distributed, "get_tp_group", lambda: type("Group", (), {"cpu_group": "gloo"}))
    build = KernelBuild(4, routing, 192)
    assert mono_decode._open_kernels(build) is mono_decode._open_kernels(build)
    (given,) = opened
    assert given == {
        "tp": 4, "rank": 3, "group": "gloo", "device": torch.device("cuda", 0), "experts": routing.experts,
        "topk": routing.picks, "swa_width": 192, **groups,
    }  # fmt: skip
    assert set(given) <= set(kernel_methods()["__init__"])


def test_other_builds_are_other_kernels(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    gpu.stand_in("runner", DSV41MonoLayer=lambda **given: object())
    monkeypatch.setattr(mono_decode, "_open", {})
    monkeypatch.setattr(distributed, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_tp_group", lambda: type("Group", (), {"cpu_group": None}))
    one, other = KernelBuild(4, Routing(384, 6), 128), KernelBuild(4, Routing(128, 3), 192)
    assert mono_decode._open_kernels(one) is not mono_decode._open_kernels(other)
