# SPDX-License-Identifier: Apache-2.0
"""Where DeepSeek-V4.1's decode helpers run: by the flag and the CDNA generation, on every platform."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.specialized_decode import fake_rocm

if torch.version.hip is None:
    fake_rocm.install("gfx950")

OPS = "vllm.models.deepseek_v41.amd.ops"
# Platform: whether the CDNA3 helpers run there, and whether the SWA metadata does.
WANTED = {
    "gfx90a": (False, False),
    "gfx942": (True, True),
    "gfx950": (False, True),
    "gfx1201": (False, False),
    "gfx1250": (False, False),
    fake_rocm.CUDA: (False, False),
    fake_rocm.NONE: (False, False),
}


def record(ops: Any, flag: bool) -> None:
    """Record the flag as the mono decode layer does while the model is built."""
    ops.record_monokernel(SimpleNamespace(kernel_config=SimpleNamespace(monokernel=flag)))


def load() -> Any:
    """The gates as this platform imports them."""
    return importlib.import_module(OPS)


@pytest.mark.parametrize("platform", WANTED)
def test_the_gates_follow_the_flag_and_the_generation(platform: str) -> None:
    with fake_rocm.fake_platform(platform, reload=[OPS]):
        ops = load()
        assert (ops.enabled(), ops.swa_decode_meta_enabled()) == (False, False)
        for flag in (True, False, True):
            record(ops, flag)
            wanted = WANTED[platform] if flag else (False, False)
            assert (ops.enabled(), ops.swa_decode_meta_enabled()) == wanted


def test_a_gate_that_is_off_builds_nothing_and_imports_no_kernel() -> None:
    with fake_rocm.fake_platform("gfx1201", reload=[OPS]):
        ops = load()
        record(ops, True)
        assert ops.build_swa_decode_meta(object(), 0, object()) is None


def test_a_gate_that_is_on_hands_every_argument_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_rocm.fake_platform("gfx950", reload=[OPS]):
        ops = load()
        record(ops, True)
        from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

        monkeypatch.setattr(swa_decode_meta, "build", lambda *arguments: arguments)
        assert ops.build_swa_decode_meta("builder", 0, "batch") == ("builder", 0, "batch")


def test_the_metadata_builder_asks_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.amd import ops, rocm

    asked: list[Any] = []

    def build(*arguments: Any) -> str:
        asked.append(arguments)
        return "built"

    monkeypatch.setattr(ops, "build_swa_decode_meta", build)
    builder = object.__new__(rocm.DeepseekV41ROCMAiterSparseSWAMetadataBuilder)
    assert builder.build(0, "batch") == "built"
    assert asked and asked[0][0] is builder
