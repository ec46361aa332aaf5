# SPDX-License-Identifier: Apache-2.0
"""A kernel's wait that ended: named, before a token of its step is returned, and at every step after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_specialized_decode_tree import TREE  # noqa: F401

from vllm.models.common.amd.persistent.epoch import LAST_TAG, next_tag  # isort: skip
from vllm.models.common.amd.persistent.fail_stop import FailStop, KernelWaitError  # isort: skip
from vllm.models.common.amd.persistent.handoff import (  # isort: skip
    AWAITED_MASK,
    CONTROL_BYTES,
    CONTROL_ERROR,
    CONTROL_LIMIT,
    CONTROL_TAG,
    STAGE_SHIFT,
    WORKGROUP_SHIFT,
    ErrorRecord,
)
from vllm.models.common.specialized_decode import fail_stop as before_output  # isort: skip
from vllm.models.deepseek_v41.amd.mono import ffn_launch  # isort: skip

LAYERS = ("layers.3", "layers.17", "layers.39")
STAGES = {5: ("the experts' intermediate rows", "slot")}


def control() -> torch.Tensor:
    return torch.tensor([1, 100, 0, 0], dtype=torch.int32)


def watching(*widths: int, rank: int = 2) -> tuple[FailStop, dict[int, torch.Tensor]]:
    stop = FailStop(rank, "the kernels", LAYERS, STAGES, ErrorRecord)
    blocks = {width: control() for width in widths}
    for width, block in blocks.items():
        stop.add(width, block)
    return stop, blocks


def fail(block: torch.Tensor, tag: int, stage: int = 5, workgroup: int = 200, awaited: int = 9) -> None:
    """What a kernel stores, by the hand-off's own numbers."""
    block[CONTROL_ERROR // 4] = (stage << STAGE_SHIFT) | (workgroup << WORKGROUP_SHIFT) | awaited
    block[CONTROL_ERROR // 4 + 1] = tag


def run_step(block: torch.Tensor, launches: int = len(LAYERS)) -> None:
    for _ in range(launches):
        block[CONTROL_TAG // 4] = next_tag(int(block[CONTROL_TAG // 4]))


def test_good_steps_raise_nothing() -> None:
    stop, blocks = watching(6, 48)
    for width in (6, 48, 6):
        run_step(blocks[width])
        stop.watch(width)
        stop.check()


@pytest.mark.parametrize("place", range(len(LAYERS)))
@pytest.mark.parametrize("first", [1, 1000, LAST_TAG - 1, LAST_TAG])
def test_the_error_names_rank_layer_stage_workgroup_and_what_was_awaited(place: int, first: int) -> None:
    stop, blocks = watching(6, 48)
    blocks[48][CONTROL_TAG // 4] = first
    tag = first
    for _ in range(place):
        tag = next_tag(tag)
    fail(blocks[48], tag)
    run_step(blocks[48])
    stop.watch(48)
    with pytest.raises(KernelWaitError) as caught:
        stop.check()
    wanted = (
        f"rank 2: step of 48 rows, layer {LAYERS[place]}, the experts' intermediate rows: workgroup 200 "
        "waited for slot 9, which did not arrive"
    )
    assert wanted in str(caught.value)


def test_it_is_raised_at_every_later_step_too() -> None:
    stop, blocks = watching(6, 48)
    fail(blocks[6], 1)
    run_step(blocks[6])
    stop.watch(6)
    for _ in range(3):
        with pytest.raises(KernelWaitError, match="step of 6 rows"):
            stop.check()
        blocks[6][:] = control()
        stop.watch(48)


def test_a_failure_shows_no_earlier_than_its_copy() -> None:
    stop, blocks = watching(6)
    fail(blocks[6], 1)
    stop.check()
    stop.watch(6)
    with pytest.raises(KernelWaitError):
        stop.check()


def test_a_record_of_another_step_says_so() -> None:
    stop, blocks = watching(6)
    fail(blocks[6], 5)
    blocks[6][CONTROL_TAG // 4] = 50
    stop.watch(6)
    with pytest.raises(KernelWaitError, match=r"launch 5 \(not of the copied step"):
        stop.check()


def test_an_unknown_stage_is_given_by_its_number() -> None:
    stop, blocks = watching(6)
    fail(blocks[6], 1, stage=77)
    stop.watch(6)
    with pytest.raises(KernelWaitError, match=r"stage 77: workgroup 200 waited for number 9"):
        stop.check()


def test_the_largest_record_is_read() -> None:
    """The code is unsigned on the device and signed in torch."""
    stop, blocks = watching(6)
    blocks[6][CONTROL_ERROR // 4] = -1
    blocks[6][CONTROL_ERROR // 4 + 1] = 1
    stop.watch(6)
    with pytest.raises(KernelWaitError, match=f"stage 255.* workgroup {AWAITED_MASK} .* {AWAITED_MASK},"):
        stop.check()


def test_a_control_block_of_another_form_is_refused() -> None:
    stop, _ = watching()
    with pytest.raises(ValueError, match=r"control block: \(16,\) torch.uint8, wanted \(4,\) torch.int32"):
        stop.add(6, torch.zeros(16, dtype=torch.uint8))


def test_the_layout_is_the_hand_offs() -> None:
    assert (CONTROL_TAG, CONTROL_LIMIT, CONTROL_ERROR, CONTROL_BYTES) == (0, 4, 8, 16)
    assert len(ffn_launch.start_words()) * 4 == CONTROL_BYTES
    assert ffn_launch.start_words()[:2] == [1, ffn_launch.WAIT_LIMIT] and 0 < ffn_launch.WAIT_LIMIT < 1 << 31


def test_every_stage_that_waits_has_a_name() -> None:
    from vllm.models.deepseek_v41.amd.mono.kernels import ffn

    numbers = {ffn.ATTENTION_REDUCE, ffn.MIXES, ffn.COLLAPSED, ffn.LOGITS, ffn.INTERMEDIATE, ffn.MOE_REDUCE}
    assert set(ffn_launch.STAGES) == numbers


def output(monkeypatch: pytest.MonkeyPatch, event: Any) -> Any:
    """The output of a step as vLLM makes it, with one token."""
    from vllm.v1.worker.gpu import async_utils

    made = object.__new__(async_utils.AsyncOutput)
    made.copy_event = event
    made.__dict__.update(
        sampled_token_ids=torch.tensor([[7]]).numpy(), num_sampled_tokens_np=torch.tensor([1]).numpy(),
        model_runner_output=SimpleNamespace(req_ids=["a"]), sampling_mask_tensors=None, num_nans=None,
        logprobs_tensors=None, prompt_logprobs_dict={}, prompt_token_id_logprobs_dict={},
    )  # fmt: skip
    return made


def test_no_token_of_a_failed_step_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_output, "_checks", [])
    stop, blocks = watching(6)
    before_output.before_tokens(stop.check)

    # The step's work arrives while its output is waited for.
    def arrive() -> None:
        fail(blocks[6], 1)
        run_step(blocks[6])
        stop.watch(6)

    made = output(monkeypatch, SimpleNamespace(synchronize=arrive))
    with pytest.raises(KernelWaitError, match=r"layer layers\.3"):
        made.get_output()
    assert not hasattr(made.model_runner_output, "sampled_token_ids")


def test_a_model_without_kernels_of_its_own_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_output, "_checks", [])
    before_output.raise_if_kernels_failed()
