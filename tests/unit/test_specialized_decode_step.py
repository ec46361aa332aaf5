# SPDX-License-Identifier: Apache-2.0
"""One decision a step: when it is made, what it depends on, what it needs, and what is counted. On the toy
model."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_specialized_decode_tree import EAGER, FULL, PIECEWISE, context, deployment, in_step

import vllm.forward_context as forward_context  # isort: skip
from tests import toy_model  # isort: skip
from vllm.models.common.specialized_decode import decode as decode_module  # isort: skip
from vllm.models.common.specialized_decode.report import ranges  # isort: skip
from vllm.models.common.specialized_decode.spec import SpecializedDecodeError  # isort: skip

DECODE = {"toy": toy_model.ToyMetadata(num_prefills=0)}


def toy(strict: bool = False, **model: Any) -> toy_model.ToyModel:
    config = deployment(tensor_parallel_size=1)
    config.model_config = SimpleNamespace(
        architectures=["ToyForCausalLM"],
        dtype=torch.float32,
        enable_sleep_mode=False,
        disable_sliding_window=False,
        enable_cumem_allocator=False,
        enable_prompt_embeds=False,
        hf_config=SimpleNamespace(**{"bias": 0.5, **model}),
    )
    config.kernel_config.specialized_decode_strict = strict
    return toy_model.ToyModel(config)


def rows(count: int) -> torch.Tensor:
    return torch.arange(count * toy_model.WIDTH, dtype=torch.float32).view(count, toy_model.WIDTH)


def on_vllm(x: torch.Tensor) -> torch.Tensor:
    for layer in range(3):
        x = x * (2.0 + layer) + 0.5
    return x


def launches(model: toy_model.ToyModel) -> list[tuple[str, int]]:
    kernels = model.decode._kernels
    return [] if kernels is None else kernels.launches


@pytest.mark.parametrize("mode", [EAGER, FULL])
def test_a_second_model_decodes_on_its_kernels_with_equal_results(mode: Any) -> None:
    model = toy()
    with in_step(DECODE, mode):
        out = model(rows(3))
    assert torch.equal(out, on_vllm(rows(3)))
    assert launches(model) == [("whole", 3), ("part", 3)]
    assert model.decode.kernels.widths == [3]


@pytest.mark.parametrize(
    ("metadata", "mode", "count", "reason"),
    [
        (DECODE, PIECEWISE, 3, "graph mode"),
        (DECODE, EAGER, toy_model.MAX_ROWS + 1, "rows"),
        (DECODE, EAGER, 0, "rows"),
        (None, EAGER, 3, "no attention metadata"),
        ({}, EAGER, 3, "no attention metadata"),
        ([DECODE, DECODE], EAGER, 3, "no attention metadata"),
        ({"toy": toy_model.ToyMetadata(num_prefills=1)}, EAGER, 3, "not decode only"),
        ({"other": DECODE["toy"]}, EAGER, 3, "metadata missing"),
    ],
    ids=["piecewise", "rows", "no-rows", "profile", "dummy", "microbatches", "prefill", "missing"],
)
def test_other_steps_take_vllm_s_path(metadata: Any, mode: Any, count: int, reason: str) -> None:
    model = toy()
    with in_step(metadata, mode):
        out = model(rows(count))
    assert torch.equal(out, on_vllm(rows(count)))
    assert launches(model) == []
    assert model.decode.counters.values() == {
        ("taken_steps", ""): 0, ("taken_rows", ""): 0, ("declined_steps", reason): 1,
    }  # fmt: skip


@pytest.mark.parametrize("assertions", [True, False])
def test_a_call_outside_a_step_takes_vllm_s_path_and_is_no_step(
    assertions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not assertions:
        monkeypatch.setattr(decode_module, "get_forward_context", lambda: None)
    model = toy()
    assert torch.equal(model(rows(3)), on_vllm(rows(3)))
    assert launches(model) == [] and not model.decode.counters.declines


def test_a_launch_can_take_a_step_that_the_other_declines() -> None:
    model = toy()
    with in_step({"toy": toy_model.ToyMetadata(num_prefills=0, whole_layers=False)}):
        out = model(rows(3))
    assert torch.equal(out, on_vllm(rows(3)))
    assert launches(model) == [("part", 3)]
    assert model.decode.counters.declines == {"part only": 1} and model.decode.counters.taken_steps == 1


def test_a_step_is_decided_once_and_the_next_one_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy()
    seen = []
    read = toy_model.ToyDecode.read_step
    monkeypatch.setattr(
        toy_model.ToyDecode,
        "read_step",
        lambda self, metadata, count: (seen.append(metadata), read(self, metadata, count))[1],
    )
    with in_step(DECODE):
        model(rows(3))
        model(rows(3))
    assert seen == [DECODE]
    prefill = {"toy": toy_model.ToyMetadata(num_prefills=1)}
    with in_step(prefill):
        model(rows(3))
    assert seen == [DECODE, prefill]
    assert launches(model) == [("whole", 3), ("part", 3)] * 2


def test_a_context_inside_a_step_has_a_decision_of_its_own() -> None:
    """As SWA bounded replay runs its layers: with fewer rows, and metadata of their own."""
    model = toy()
    with in_step(DECODE):
        model.layers[0](rows(3))
        with in_step({"toy": toy_model.ToyMetadata(num_prefills=1)}):
            model.layers[0](rows(2))
        model.layers[0](rows(3))
        model.layers[0](rows(2))
    assert launches(model) == [("whole", 3), ("whole", 3), ("whole", 2)]
    assert model.decode.kernels.widths == [3, 2]


def test_other_rows_in_the_same_context_are_decided_anew() -> None:
    model = toy()
    with in_step(DECODE):
        for count in (3, toy_model.MAX_ROWS + 1, 4):
            model.layers[0](rows(count))
    assert launches(model) == [("whole", 3), ("whole", 4)] and model.decode.kernels.widths == [3, 4]


def test_a_decision_dies_with_its_step() -> None:
    model = toy()
    step = context(DECODE)
    with forward_context.override_forward_context(step):
        model(rows(3))
    dead = weakref.ref(step)
    del step
    gc.collect()
    assert dead() is None, "the decode keeps the forward context, and with it the step's tensors"


def test_two_decodes_do_not_read_each_other_s_decision() -> None:
    one, other = toy(), toy()
    with in_step(DECODE):
        one(rows(3))
        other(rows(3))
    assert launches(one) == launches(other) == [("whole", 3), ("part", 3)]


def test_a_width_first_reached_in_a_capture_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = toy()
    with in_step(DECODE):
        model(rows(3))
    monkeypatch.setattr(decode_module, "_capturing", lambda: True)
    with in_step(DECODE, FULL):
        model(rows(3))
    with in_step(DECODE, FULL), pytest.raises(RuntimeError, match=r"toy decode \(target\): a step of 5 rows"):
        model(rows(5))


def test_kernels_first_reached_in_a_capture_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy()
    monkeypatch.setattr(decode_module, "_capturing", lambda: True)
    with (
        in_step(DECODE, FULL),
        pytest.raises(RuntimeError, match="a step of 3 rows was first reached inside"),
    ):
        model(rows(3))
    assert model.decode._kernels is None


@pytest.mark.parametrize("initialised", [True, False])
@pytest.mark.parametrize("recording", [True, False])
def test_the_stream_says_whether_a_step_is_recorded_once_there_is_one(
    initialised: bool, recording: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    assert decode_module._capturing() is (initialised and recording)


def ahead(monkeypatch: pytest.MonkeyPatch, *widths: int) -> None:
    monkeypatch.setattr(toy_model.ToyDecode, "widths_ahead", lambda self: widths)


def test_widths_that_are_known_ahead_are_prepared_at_start_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead(monkeypatch, 2, 3)
    model = toy()
    model.decode.settle()
    model.decode.prepare_ahead()
    assert model.decode.kernels.widths == [2, 3], "before any step"
    for count in (3, 4):
        with in_step(DECODE):
            model(rows(count))
    assert model.decode.kernels.widths == [2, 3, 4]


def test_weights_that_the_kernels_cannot_read_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead(monkeypatch, 2)
    model = toy()
    model.layers[0].scale.data = torch.ones(3)
    model.decode.settle()
    with pytest.raises(SpecializedDecodeError, match=r"toy\.layers\.0: scale \(3,\), wanted \(4,\)"):
        model.decode.prepare_ahead()


def test_a_decode_without_layers_or_widths_opens_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = toy()
    idle.decode.settle()
    idle.decode.prepare_ahead()
    assert idle.decode.opened is None, "no width is known"
    ahead(monkeypatch, 2)
    unsettled = toy()
    unsettled.decode.prepare_ahead()
    assert unsettled.decode.opened is None


def test_weights_are_taken_at_the_first_step_all_at_once() -> None:
    model = toy()
    for layer in model.layers:
        layer.scale = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    with in_step(DECODE), pytest.raises(SpecializedDecodeError) as error:
        model(rows(3))
    # The third layer has no launch, so its weights are nobody's business.
    for layer in (0, 1):
        assert f"\n  - toy.layers.{layer}: scale (2,), wanted (4,)" in str(error.value)
    assert "2 reason(s)" in str(error.value) and model.decode._kernels is None


def test_rows_of_the_generation_limit_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cdna3 = toy_model.Device(cdna_version=3, compute_units=2)
    monkeypatch.setattr(toy_model, "SPEC", dataclasses.replace(toy_model.SPEC, device=lambda: cdna3))
    model = toy()
    for count, taken in ((4, True), (5, False)):
        with in_step(DECODE):
            model(rows(count))
        assert (("whole", count) in launches(model)) is taken


def test_taken_steps_and_rows_are_counted_once_a_step() -> None:
    model = toy()
    for count in (3, 5):
        with in_step(DECODE):
            model(rows(count))
    counters = model.decode.counters
    assert (counters.taken_steps, counters.taken_rows) == (2, 8) and not counters.declines


def captured(model: toy_model.ToyModel, metadata: Any, count: int, mode: Any = EAGER) -> None:
    """Run a step as vLLM captures its FULL graph: an eager one first, then once more in graph mode NONE
    while the stream records."""
    with in_step(metadata, mode):
        model(rows(count))
    with pytest.MonkeyPatch.context() as patch, in_step(metadata, mode):
        patch.setattr(decode_module, "_capturing", lambda: True)
        model(rows(count))


@pytest.mark.parametrize("mode", [EAGER, FULL])
def test_a_graph_counts_its_replays_and_not_its_capture(mode: Any) -> None:
    model = toy()
    captured(model, DECODE, 4, mode)
    counters = model.decode.counters
    assert (counters.taken_steps, counters.taken_rows) == (1, 4)
    model.decode.replayed(width=4, rows=3)
    assert (counters.taken_steps, counters.taken_rows) == (2, 7) and not counters.declines
    model.decode.replayed(width=6, rows=5)
    assert counters.declines == {"captured on vLLM's path": 1} and counters.taken_steps == 2


def test_a_graph_of_one_launch_counts_the_other_s_decline_at_each_replay() -> None:
    model = toy()
    captured(model, {"toy": toy_model.ToyMetadata(num_prefills=0, whole_layers=False)}, 4)
    model.decode.replayed(width=4, rows=4)
    counters = model.decode.counters
    assert counters.declines == {"part only": 2} and counters.taken_steps == 2


def test_a_graph_that_is_captured_again_counts_as_the_last_one() -> None:
    """As the graphs that vLLM captures to size memory, and then once more to keep."""
    model = toy()
    captured(model, DECODE, 4)
    captured(model, {"toy": toy_model.ToyMetadata(num_prefills=1)}, 4)
    model.decode.replayed(width=4, rows=4)
    assert model.decode.counters.declines == {"not decode only": 1, "captured on vLLM's path": 1}


def test_a_piecewise_capture_says_nothing_of_a_full_graph_s_replay() -> None:
    model = toy(strict=True)
    captured(model, DECODE, 4)
    captured(model, DECODE, 4, PIECEWISE)
    model.decode.replayed(width=4, rows=4)
    assert model.decode.counters.taken_steps == 2


@pytest.mark.parametrize(("width", "raises"), [(toy_model.MAX_ROWS, True), (toy_model.MAX_ROWS + 1, False)])
def test_strict_mode_rejects_the_replay_of_a_graph_without_the_kernels(width: int, raises: bool) -> None:
    decode = toy(strict=True).decode
    if raises:
        with pytest.raises(RuntimeError, match=r"should have taken .* path: a FULL graph of 8 rows"):
            decode.replayed(width, rows=3)
    else:
        decode.replayed(width, rows=3)
    assert decode.counters.declines == {"captured on vLLM's path": 1}
    toy().decode.replayed(width, rows=3)


@pytest.mark.parametrize(
    ("metadata", "count", "mode", "reason"),
    [
        ({"toy": toy_model.ToyMetadata(num_prefills=1)}, 3, EAGER, "not decode only"),
        (None, 3, EAGER, "no attention metadata"),
        ({"toy": toy_model.ToyMetadata(0, whole_layers=False)}, 3, EAGER, "part only"),
        (DECODE, toy_model.MAX_ROWS + 1, EAGER, None),
        (DECODE, 3, PIECEWISE, None),
    ],
    ids=["prefill", "no-metadata", "one-launch", "rows", "piecewise"],
)
def test_strict_mode_rejects_what_a_full_graph_would_replay_on_vllm_s_path(
    metadata: Any, count: int, mode: Any, reason: str | None
) -> None:
    """The same steps are on vLLM's path rightly where no graph keeps them."""
    model = toy(strict=True)
    if reason is None:
        captured(model, metadata, count, mode)
        return
    with pytest.raises(RuntimeError, match=f"should have taken .*: {reason}"):
        captured(model, metadata, count, mode)
    assert model.decode.counters.declines == {reason: 1}, "the eager step before the capture"


@pytest.mark.parametrize(
    ("metadata", "mode", "raises"),
    [
        ({"other": DECODE["toy"]}, EAGER, True),
        ({"toy": toy_model.ToyMetadata(num_prefills=1)}, EAGER, False),
        (DECODE, PIECEWISE, False),
        (None, EAGER, False),
        (None, FULL, True),
    ],
    ids=["missing", "prefill", "piecewise", "profile", "full-graph-without-metadata"],
)
def test_strict_mode_rejects_only_silent_fallbacks(metadata: Any, mode: Any, raises: bool) -> None:
    model = toy(strict=True)
    with in_step(metadata, mode):
        if raises:
            with pytest.raises(RuntimeError, match=r"should have taken .* metadata"):
                model(rows(3))
        else:
            assert torch.equal(model(rows(3)), on_vllm(rows(3)))


def test_the_table_says_which_layers_run_what_and_why() -> None:
    assert decode_module.launch_table(toy().decode).splitlines() == [
        "toy decode (target): decode steps of 1 to 8 rows, graph mode FULL or NONE",
        "  launch             layers  why not the whole layer",
        "  whole layer        0",
        "  part of the layer  1       an odd scale",
        "  vLLM's path        2       an odd scale",
    ]


def test_a_layer_added_after_the_launches_were_settled_is_an_error() -> None:
    decode = toy().decode
    decode.settle()
    with pytest.raises(RuntimeError, match=r"layer toy\.layers\.7 was added after"):
        toy_model.ToyLayer(7, decode_module.Launch.WHOLE, decode)
    assert len(decode.plans) == 3


def test_a_stage_without_layers_is_not_refused() -> None:
    config = deployment(tensor_parallel_size=1)
    decode = toy_model.ToyDecode(toy_model.SPEC, "target", config)
    decode.settle()
    decode.replayed(3, 3)
    assert not decode.counters.declines


def test_layer_numbers_are_ranges_in_whatever_order_the_layers_came() -> None:
    assert ranges([7, 2, 0, 1, 2]) == "0-2,7"


def test_the_table_is_logged_once_before_the_first_step_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy()
    logged = []
    monkeypatch.setattr(
        decode_module.logger, "info", lambda message, *values: logged.append(message % values)
    )
    for metadata in (None, DECODE):
        with in_step(metadata):
            model(rows(3))
    assert len(logged) == 1 and logged[0].startswith("toy decode (target): decode steps of 1 to 8 rows")


def test_only_one_rank_logs_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "reports", lambda: False)
    monkeypatch.setattr(decode_module.logger, "info", lambda *_: pytest.fail("logged"))
    with in_step(DECODE):
        toy()(rows(3))


def test_a_layer_outside_the_kernels_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = []
    monkeypatch.setattr(
        decode_module.logger, "info_once", lambda message, *values: logged.append(message % values)
    )
    toy()
    assert logged == [
        "toy decode (target): part of the layer for layers with an odd scale",
        "toy decode (target): vLLM's path for layers with an odd scale",
    ]


def test_a_model_can_be_freed() -> None:
    model = toy()
    with in_step(DECODE):
        model(rows(3))
    decode, dead = model.decode, weakref.ref(model.layers[0])
    del model
    gc.collect()
    assert dead() is None and decode.plans
