# SPDX-License-Identifier: Apache-2.0
"""The SWA metadata kernel on a real GPU, AMD or NVIDIA: the CPU tests' cases at a server's buffer sizes.

On a machine without vLLM's needs: ``FAKE_ROCM_BARE=TREE PYTHONPATH=src:tests/harness python -m pytest
-p fake_rocm_plugin tests/device``, TREE holding ``vllm/`` with the overlay laid over it.
"""

from __future__ import annotations

import os

import pytest
import torch

from rocm_overlay import bench_swa
from tests import swa_cases

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 would keep kernels off the GPU"
    ),
]


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "draft"])
@pytest.mark.parametrize("drafts", swa_cases.DRAFTS)
def test_equal_to_vllm_on_random_batches(drafts: int, noncausal: bool) -> None:
    failed = swa_cases.compare(
        2024, drafts=drafts, noncausal=noncausal, device="cuda", max_tokens=bench_swa.MAX_TOKENS
    )
    assert failed == []


@pytest.mark.parametrize("old, new, noncausal", swa_cases.FAULTS.values(), ids=swa_cases.FAULTS)
def test_planted_fault_is_found(old: str, new: str, noncausal: bool) -> None:
    failed = swa_cases.compare_mutant(old, new, 5, drafts=5, noncausal=noncausal, count=40, device="cuda")
    assert failed


@pytest.mark.parametrize("context", bench_swa.CONTEXTS)
@pytest.mark.parametrize("rows", bench_swa.ROWS)
def test_equal_to_vllm_on_the_batches_that_are_timed(rows: int, context: int) -> None:
    batch = bench_swa.serving_batch("cuda", rows, context)
    groups = bench_swa.step_groups("cuda")
    for group in (groups[0], groups[-1]):
        assert swa_cases.differences(batch, group) == []


def test_one_launch_a_group() -> None:
    batch = bench_swa.serving_batch("cuda", rows=48, context=1024)
    group = bench_swa.step_groups("cuda")[0]
    bench_swa.build_with_ours(batch, group)
    bench_swa.device_events(lambda: None)
    events = bench_swa.device_events(lambda: bench_swa.build_with_ours(batch, group))
    assert len(events) == 1
