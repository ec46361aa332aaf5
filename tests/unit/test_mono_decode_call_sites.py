# SPDX-License-Identifier: Apache-2.0
"""What the model calls of a layer's mono decode stands in a file of others: it must be what stands there."""

from __future__ import annotations

import ast
import inspect

from tests.unit.test_specialized_decode_tree import TREE

from vllm.models.deepseek_v41.amd.mono_decode import MonoDecodeLayer  # isort: skip

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
