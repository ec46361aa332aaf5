# SPDX-License-Identifier: Apache-2.0
"""What the option turns on beside the mono layers: CDNA3's indexer, and the draft's sampling in one launch a
step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit import test_specialized_decode_tree as tree  # noqa: F401

import vllm.platforms.rocm as rocm_platform  # isort: skip
from vllm.models.deepseek_v41.amd import dspark, rocm  # isort: skip
from vllm.models.deepseek_v41.amd.ops import fused_markov, sparse_indexer  # isort: skip
from vllm.models.deepseek_v41.attention import DeepseekV4Indexer  # isort: skip
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator  # isort: skip

# (prefills, decodes) of the step's indexer metadata, and what else is unlike a step that CDNA3's own path
# takes.
STEPS = {
    "decode": ((0, 1), {}, True),
    "profiling": (None, {}, False),
    "prefill": ((1, 0), {}, False),
    "mixed": ((1, 1), {}, False),
    "empty": ((0, 0), {}, False),
    "own-keys": ((0, 1), {"skip_k_cache_insert": False}, False),
    "off": ((0, 1), {"enabled": False}, False),
}


@pytest.mark.parametrize("name", STEPS)
def test_only_decode_steps_leave_vllm_s_indexer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, changes, own_path = STEPS[name]
    changes = dict(changes)
    enabled = changes.pop("enabled", True)
    metadata = None
    if counts is not None:
        metadata = {"keys": SimpleNamespace(num_prefills=counts[0], num_decodes=counts[1])}
    seen: dict[str, Any] = {}
    replacements = {
        "DeepseekV32IndexerMetadata": SimpleNamespace,
        "get_forward_context": lambda: SimpleNamespace(attn_metadata=metadata),
        "enabled": lambda: enabled,
        "rocm_aiter_sparse_attn_indexer": lambda *given, **options: seen.update(vllm=(given, options)),
        "_decode_step": lambda *given: seen.update(own=given),
    }
    for attribute, value in replacements.items():
        monkeypatch.setattr(sparse_indexer, attribute, value)
    given = (torch.zeros(6, 4), "keys", *[torch.zeros(1)] * 2, None, torch.zeros(1), 128, "ue8m0", 512, 128)
    given += (1024, 1024, torch.zeros(6, 512, dtype=torch.int32))
    options = {
        "skip_k_cache_insert": True, "compress_ratio": 4, "candidate_blocks": None,
        "candidate_block_size": 0, "candidate_write": False,
    } | changes  # fmt: skip
    sparse_indexer.gfx942_sparse_attn_indexer(*given, **options)
    assert list(seen) == ["own" if own_path else "vllm"]
    if not own_path:
        assert seen["vllm"] == (given, options), "vLLM's operation must get the same arguments"


@pytest.mark.parametrize(("on", "cdna3"), [(True, True), (True, False), (False, True)])
def test_the_attention_builds_cdna3_s_indexer_with_the_option(
    on: bool, cdna3: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built before the layers record the option, so it reads the configuration that is current then."""
    current = SimpleNamespace(kernel_config=SimpleNamespace(monokernel=on))
    monkeypatch.setattr(rocm, "get_current_vllm_config", lambda: current)
    monkeypatch.setattr(rocm_platform, "on_gfx942", lambda: cdna3)
    attention = object.__new__(rocm.DeepseekV41ROCMAiterMLAAttention)
    chosen = attention._indexer_cls(SimpleNamespace(rocm_mxfp4=False))
    assert chosen is (rocm.DeepseekV41Gfx942Indexer if on and cdna3 else DeepseekV4Indexer)
    assert rocm.DeepseekV41Gfx942Indexer.attn_cls is sparse_indexer.Gfx942SparseAttnIndexer


def test_the_speculator_lets_the_draft_model_sample() -> None:
    """The stub has none of the loop's buffers, so the loop would fail."""
    asked: list[Any] = []
    speculator = object.__new__(DSparkSpeculator)
    speculator._draft_topk = None
    speculator.model = SimpleNamespace(sample_sequential=lambda *given: asked.append(given) or True)
    hidden = torch.zeros(2, 3)
    speculator._sample_sequential(1, hidden)
    assert asked == [(speculator, 1, hidden)]


@pytest.mark.parametrize("taken", [True, False])
def test_the_draft_model_samples_with_the_fused_launches(
    taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(fused_markov, "sample_sequential", lambda *given: asked.append(given) or taken)
    hidden = torch.zeros(2, 3)
    answer = dspark.DSparkDeepseekV4ForCausalLM.sample_sequential(None, "speculator", 1, hidden)
    assert answer is taken and asked == [("speculator", 1, hidden)]
