# SPDX-License-Identifier: Apache-2.0
"""Replays of FULL graphs, counted where vLLM prepares a step and where its speculator replays."""

from __future__ import annotations

import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_specialized_decode_tree import EAGER, FULL, PIECEWISE

import torch  # isort: skip
from vllm.models.common.specialized_decode import decode as decode_module, replay  # isort: skip
from vllm.models.common.specialized_decode.replay import counting, draft_replayed  # isort: skip
from vllm.models.deepseek_v41.amd.vl_model import DeepseekV41ForCausalLM  # isort: skip
from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState  # isort: skip
from vllm.v1.worker.gpu.model_states.interface import ModelState  # isort: skip
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash  # isort: skip
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator  # isort: skip


class Decode:
    """What the hooks ask of a decode."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def settle(self) -> None:
        self.asked.append("settle")

    def prepare_ahead(self) -> None:
        self.asked.append("prepare")

    def replayed(self, width: int, rows: int) -> None:
        self.asked.append((width, rows))


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Decode]:
    current = {"target": Decode(), "draft": Decode()}
    monkeypatch.setattr(decode_module, "_current", current)
    monkeypatch.setattr(replay, "_preparing", threading.local())
    return current


class State:
    def __init__(self) -> None:
        pass

    def prepare_attn(self, *arguments: Any, **options: Any) -> Any:
        return arguments, options


BATCH = SimpleNamespace(num_tokens=5, num_tokens_after_padding=6)


def prepared(mode: Any, **options: Any) -> None:
    state = counting(State)()
    for decode in decode_module._current.values():
        decode.asked.clear()
    assert state.prepare_attn(BATCH, mode, "tables", **options) == (
        (BATCH, mode, "tables"),
        {"for_capture": False} | options,
    )


def test_a_replay_is_counted_with_the_graph_s_width_and_the_step_s_own_rows(
    decodes: dict[str, Decode],
) -> None:
    prepared(FULL)
    assert decodes["target"].asked == [(6, 5)] and not decodes["draft"].asked


@pytest.mark.parametrize(("mode", "options"), [(EAGER, {}), (PIECEWISE, {}), (FULL, {"for_capture": True})])
def test_steps_that_run_the_model_s_python_count_themselves(
    decodes: dict[str, Decode], mode: Any, options: dict[str, Any]
) -> None:
    prepared(mode, **options)
    assert not decodes["target"].asked


def test_a_replay_that_strict_mode_rejects_is_not_prepared(decodes: dict[str, Decode]) -> None:
    def reject(width: int, rows: int) -> None:
        raise RuntimeError("strict")

    decodes["target"].replayed = reject  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="strict"):
        prepared(FULL)


def test_nothing_is_counted_without_a_decode(decodes: dict[str, Decode]) -> None:
    decodes.clear()
    prepared(FULL)
    draft_replayed(5, 5)


def test_a_state_is_made_once_every_layer_is_loaded_and_has_the_decodes_settle_then_prepare(
    decodes: dict[str, Decode],
) -> None:
    counting(State)()
    assert [decode.asked for decode in decodes.values()] == [["settle", "prepare"]] * 2


def test_nothing_is_prepared_where_a_decode_cannot_be_settled(
    decodes: dict[str, Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ValueError("no layer runs any kernel")

    monkeypatch.setattr(decodes["draft"], "settle", refuse)
    with pytest.raises(ValueError, match="no layer runs"):
        counting(State)()
    assert decodes["target"].asked == ["settle"]


def test_vllm_prepares_a_step_with_what_is_counted() -> None:
    """The names that ``counting`` relies on."""
    names = list(inspect.signature(ModelState.prepare_attn).parameters)
    assert names[:3] == ["self", "input_batch", "cudagraph_mode"] and "for_capture" in names


def test_the_model_s_state_counts_the_target_s_replays(
    decodes: dict[str, Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = DeepseekV41ForCausalLM.get_model_state_cls()
    assert issubclass(state, DeepseekV41ModelState)
    monkeypatch.setattr(DeepseekV41ModelState, "__init__", lambda *arguments, **options: None)
    monkeypatch.setattr(DeepseekV41ModelState, "prepare_attn", lambda *arguments, **options: {})
    state().prepare_attn(BATCH, FULL)
    assert decodes["target"].asked == ["settle", "prepare", (6, 5)]


def test_two_models_of_a_process_count_their_own_replays(decodes: dict[str, Decode]) -> None:
    first, models = counting(State)(), [dict(decodes)]
    decodes.update(target=Decode(), draft=Decode())
    second = counting(State)()
    models.append(dict(decodes))
    for state in (second, first):
        state.prepare_attn(BATCH, FULL)
        draft_replayed(4, 3)
    for model in models:
        assert [model[role].asked for role in ("target", "draft")] == [
            ["settle", "prepare", (6, 5)],
            ["settle", "prepare", (4, 3)],
        ]


def test_a_model_without_kernels_beside_one_with_them_counts_nothing(decodes: dict[str, Decode]) -> None:
    counting(State)()
    mine = dict(decodes)
    decodes.clear()
    other = counting(State)()
    other.prepare_attn(BATCH, FULL)
    draft_replayed(4, 3)
    assert [decode.asked for decode in mine.values()] == [["settle", "prepare"]] * 2


class Passive:
    """An object of which every attribute that nobody set is a callable that returns nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


@pytest.mark.parametrize(
    ("mode", "dummy", "counted"), [(FULL, False, True), (FULL, True, False), (EAGER, False, False)]
)
def test_the_speculator_counts_a_replayed_draft(
    decodes: dict[str, Decode], monkeypatch: pytest.MonkeyPatch, mode: Any, dummy: bool, counted: bool
) -> None:
    """Three requests of five drafts in a graph of four: vLLM's own ``propose``, its GPU work left out."""
    launched: list[Any] = []
    prepared(EAGER)
    width = SimpleNamespace(cg_mode=mode, num_reqs=4, num_tokens=20)
    monkeypatch.setattr(dflash, "prepare_dflash_inputs", lambda *arguments: None)
    monkeypatch.setattr(dflash, "build_slot_mappings_by_layer", lambda *arguments: {})
    monkeypatch.setattr(dflash, "dispatch_cg_and_sync_dp", lambda *arguments, **options: (width, None))

    class Speculator(Passive):
        propose = DSparkSpeculator.propose
        num_query_per_req, max_model_len, draft_kv_cache_group_id, dp_size, dp_rank = 5, 64, 0, 1, 0
        draft_kv_cache_group_ids: tuple[int, ...] = ()
        pcp_manager = None
        supports_decode_metadata_update = True
        draft_tokens = torch.zeros(4, 5)
        block_tables = SimpleNamespace(slot_mappings=torch.zeros(1, 64))
        query_cudagraph_manager = SimpleNamespace(
            run_fullgraph=lambda desc: launched.append(list(decodes["draft"].asked))
        )

    batch = SimpleNamespace(
        num_reqs=3, num_tokens=15, seq_lens_cpu_upper_bound=torch.ones(3), query_start_loc=None
    )
    Speculator().propose(batch, {}, {}, *[None] * 8, dummy_run=dummy)
    seen = [(20, 15)] if counted else []
    assert decodes["draft"].asked == seen and not decodes["target"].asked
    assert launched == ([seen] if mode is FULL else []), "counted before the launch"
