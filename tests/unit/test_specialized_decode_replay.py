# SPDX-License-Identifier: Apache-2.0
"""Replays of FULL graphs, counted where vLLM prepares a step."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_specialized_decode_tree import EAGER, FULL, PIECEWISE

from vllm.models.common.specialized_decode.metrics import StepCounters  # isort: skip
from vllm.models.common.specialized_decode.replay import counting  # isort: skip
from vllm.models.deepseek_v41.amd import mono_decode  # isort: skip
from vllm.models.deepseek_v41.amd.vl_model import DeepseekV41ForCausalLM  # isort: skip
from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState  # isort: skip
from vllm.v1.worker.gpu.model_states.interface import ModelState  # isort: skip


class State:
    def prepare_attn(self, *arguments: Any, **options: Any) -> Any:
        return arguments, options


BATCH = SimpleNamespace(num_tokens=5, num_tokens_after_padding=6)


def counted(captured: set[int], mode: Any, **options: Any) -> StepCounters:
    counters = StepCounters("kernels", "target")
    counters.captured_widths |= captured
    state = counting(State, lambda: counters)()
    assert state.prepare_attn(BATCH, mode, "tables", **options) == (
        (BATCH, mode, "tables"),
        {"for_capture": False} | options,
    )
    return counters


def test_a_replay_counts_the_step_s_own_rows() -> None:
    counters = counted({6}, FULL)
    assert (counters.taken_steps, counters.taken_rows) == (1, 5) and not counters.declines


def test_a_replay_of_a_graph_of_vllm_s_path_is_a_declined_step() -> None:
    counters = counted({12}, FULL)
    assert counters.taken_steps == 0 and counters.declines == {"captured on vLLM's path": 1}


@pytest.mark.parametrize(("mode", "options"), [(EAGER, {}), (PIECEWISE, {}), (FULL, {"for_capture": True})])
def test_steps_that_run_the_model_s_python_count_themselves(mode: Any, options: dict[str, Any]) -> None:
    counters = counted({6}, mode, **options)
    assert counters.taken_steps == 0 and not counters.declines


def test_nothing_is_counted_without_a_decode() -> None:
    assert counting(State, lambda: None)().prepare_attn(BATCH, FULL)


def test_vllm_prepares_a_step_with_what_is_counted() -> None:
    """The names that ``counting`` relies on."""
    names = list(inspect.signature(ModelState.prepare_attn).parameters)
    assert names[:3] == ["self", "input_batch", "cudagraph_mode"] and "for_capture" in names


def test_the_model_s_state_counts_the_target_s_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    state = DeepseekV41ForCausalLM.get_model_state_cls()
    assert issubclass(state, DeepseekV41ModelState)
    counters = StepCounters("kernels", "target")
    monkeypatch.setattr(mono_decode, "_decodes", {"target": SimpleNamespace(counters=counters)})
    monkeypatch.setattr(DeepseekV41ModelState, "prepare_attn", lambda *arguments, **options: {})
    object.__new__(state).prepare_attn(BATCH, FULL)
    assert counters.declines == {"captured on vLLM's path": 1}
