# SPDX-License-Identifier: Apache-2.0
"""vLLM's own GPU test of the layers reaches into our module: what it names there exists and answers.

It needs GPUs, so it runs on none of our machines; the parts of it that read the module run here.
"""

from __future__ import annotations

import ast
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rocm_overlay.project import Project
from tests.unit.test_mono_decode_startup import decoder_layer, gpu  # noqa: F401
from tests.unit.test_mono_decode_step import ROWS, created, metadata, opened, run  # noqa: F401
from tests.unit.test_specialized_decode_tree import deployment

from vllm.models.deepseek_v41.amd import mono_decode  # isort: skip

LAYERS = Project.find().base / "tests" / "models" / "test_dsv41_mono_layers.py"


def named(file: Any) -> set[str]:
    """What a test file reads of ``mono_decode``."""
    return {
        node.attr
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mono_decode"
    }


def test_every_name_that_the_base_s_gpu_test_reads_exists(gpu: Any) -> None:  # noqa: F811
    wanted = named(LAYERS)
    assert wanted == {"ATTN_LINEARS_942", "_runner"}
    assert all(hasattr(mono_decode, name) for name in wanted)
    assert not hasattr(mono_decode, "_runners"), "a name that nobody promised"


def test_the_name_means_what_the_base_s_test_takes_it_for() -> None:
    assert mono_decode.ATTN_LINEARS_942 == ("fused_wqa_wkv", "wq_b", "wo_a", "wo_b")


def probe() -> Any:
    """``mono_layers`` of the base's worker extension, as its file has it."""
    (found,) = [
        node
        for node in ast.walk(ast.parse(LAYERS.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "mono_layers"
    ]
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), str(LAYERS), "exec"), scope)
    return scope["mono_layers"]


def test_the_base_s_probe_of_the_layers_answers(
    gpu: Any, opened: Any, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    config = deployment()
    layers = {3: decoder_layer(3), 4: decoder_layer(4, kv_cache_dtype="auto"), 5: decoder_layer(5)}
    for index in (3, 4):
        layers[index].mono = created(layers[index], config)
    layers[5].mono = None
    worker = SimpleNamespace(_decoder_layers=lambda: layers)
    monkeypatch.setitem(sys.modules, "vllm.models.deepseek_v41.amd.mono_decode", mono_decode)
    before = probe()(worker)
    assert before == {"layers": {3: ["whole", False, False], 4: ["ffn", False, False], 5: None}, "epoch": -1}
    step = metadata(layers[3]) | metadata(layers[4])
    assert run(layers[3], layers[3].mono, step) == ("whole",)
    opened[0].epoch = [7]
    after = probe()(worker)
    assert after == {"layers": {3: ["whole", True, False], 4: ["ffn", True, False], 5: None}, "epoch": 7}
