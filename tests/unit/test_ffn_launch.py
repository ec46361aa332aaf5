# SPDX-License-Identifier: Apache-2.0
"""The FFN launch on the host: what a kernel is handed, and what is refused before it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.test_peers import CPU, Heap, Ranks

from vllm.models.common.amd.persistent.fail_stop import KernelWaitError  # isort: skip
from vllm.models.common.amd.persistent.handoff import ErrorRecord  # isort: skip
from vllm.models.common.amd.persistent.peers import Group, PeerMemoryError  # isort: skip
from vllm.models.deepseek_v41.amd.mono import builds, ffn_launch, regions  # isort: skip
from vllm.models.deepseek_v41.amd.mono.ffn_launch import Deployment, FfnLaunch, FfnWeights  # isort: skip
from vllm.models.deepseek_v41.amd.mono.geometry import HIDDEN, FfnGeometry  # isort: skip
from vllm.models.deepseek_v41.amd.mono.kernels.ffn import FfnArguments  # isort: skip

LAYERS = ("layers.3", "layers.39")


def alone(rank: int = 0, size: int = 4) -> Group:
    return Group(rank, size, lambda value: [value] * size)


class Kernels:
    """Kernels that keep what they were handed."""

    def __init__(self) -> None:
        self.made: list[FfnGeometry] = []
        self.calls: list[tuple[FfnGeometry, dict[str, int], Any]] = []

    def __call__(self, geometry: FfnGeometry) -> Any:
        self.made.append(geometry)
        return lambda arguments, stream: self.calls.append((geometry, arguments, stream))


def launch(kernels: Kernels, rank: int = 0, experts: int = 384, picks: int = 6) -> FfnLaunch:
    place = Deployment(alone(rank), CPU, "gfx950", experts, picks, LAYERS)
    return FfnLaunch(place, kernels, Heap(rank))


def meta_weights(tp: int = 4, experts: int = 384, picks: int = 6, **changes: Any) -> FfnWeights:
    """Weights as vLLM loads them, without their memory."""
    wanted = ffn_launch.expected(FfnGeometry(1, tp, experts, picks))
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in wanted.items()
    }
    return FfnWeights("layers.3", **(tensors | changes))


def small_weights(layer: str = LAYERS[0]) -> FfnWeights:
    """Distinct addresses; what the tensors hold is not looked at after they were checked."""
    names = [name for name in FfnWeights.__dataclass_fields__ if name != "layer"]
    return FfnWeights(layer, **{name: torch.zeros(4) for name in names})


def inputs(rows: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.zeros(rows, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(rows, 4, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(rows, 4, 1),
        torch.zeros(rows, 4, 4),
        torch.zeros(rows, 4),
    )


def test_the_kernel_gets_every_address_by_its_own_name_and_order() -> None:
    kernels = Kernels()
    ffn = launch(kernels, rank=3)
    ffn.prepare(6)
    weights, given = small_weights(), inputs(6)
    outputs = ffn(weights, *given)
    geometry, arguments, _ = kernels.calls[0]
    assert geometry == FfnGeometry(6, 4)
    assert set(arguments) == set(FfnArguments.__annotations__)
    named = dict(zip(("partial", "residual_in", "post_in", "comb_in", "pre_in"), given, strict=True))
    named |= weights.tensors()
    named |= dict(zip(("out", "residual_out", "post_out", "comb_out", "pre_out"), outputs, strict=True))
    assert {name: arguments[name] for name in named} == {name: t.data_ptr() for name, t in named.items()}
    width = ffn._widths[6]
    assert arguments["workspace"] == width.workspace.data_ptr()
    assert arguments["peers"] == width.symmetric.addresses.data_ptr() and arguments["rank"] == 3
    assert [t.shape for t in outputs] == [t.shape for t in given]
    assert [t.dtype for t in outputs] == [t.dtype for t in given]


def test_a_width_has_memory_of_its_own_that_stays() -> None:
    kernels = Kernels()
    ffn = launch(kernels)
    for rows in (6, 48, 6):
        ffn.prepare(rows)
        ffn(small_weights(), *inputs(rows))
    assert [g.rows for g in kernels.made] == [6, 48]
    places = [(call[1]["workspace"], call[1]["peers"]) for call in kernels.calls]
    assert places[0] == places[2] and not set(places[0]) & set(places[1])


@pytest.mark.parametrize("rows", [1, 6, 17, 48])
@pytest.mark.parametrize(("experts", "picks"), [(384, 6), (128, 3)])
def test_memory_is_as_large_as_the_kernels_layouts_and_starts_as_it_needs(
    rows: int, experts: int, picks: int
) -> None:
    ffn = launch(Kernels(), experts=experts, picks=picks)
    ffn.prepare(rows)
    geometry, width = FfnGeometry(rows, 4, experts, picks), ffn._widths[rows]
    assert width.workspace.numel() == regions.workspace(geometry).size and not width.workspace.any()
    local = width.symmetric.local
    assert local.numel() == regions.symmetric(geometry).size
    assert local[:16].view(torch.int32).tolist() == ffn_launch.start_words() and not local[16:].any()


def test_a_width_that_was_not_prepared_is_named() -> None:
    with pytest.raises(RuntimeError, match="no memory was made for steps of 6 rows"):
        launch(Kernels())(small_weights(), *inputs(6))


def stamped(workspace: torch.Tensor, region: Any, stamps: int) -> None:
    """The clocks of a launch whose workgroups begin a tick after one another and take two a part."""
    words = workspace[region.offset : region.offset + region.size].view(torch.int64).view(region.shape)
    words[:] = 1000 + torch.arange(256)[:, None] + 2 * torch.arange(stamps)


def test_a_timeline_build_is_read_from_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ffn_launch.TIMELINE_VARIABLE, "1")
    kernels = Kernels()
    ffn = launch(kernels)
    ffn.prepare(6)
    (geometry,) = kernels.made
    assert geometry == FfnGeometry(6, 4, timeline=True)
    with pytest.raises(ValueError, match="workgroup 0 has no stamp of loads"):
        ffn.timeline(6)
    stamped(ffn._widths[6].workspace, regions.workspace(geometry).timeline, len(geometry.stamps))
    parts = ffn.timeline(6)
    assert [part.name for part in parts] == list(geometry.stamps[:-1])
    assert [(part.first, part.last, part.longest_ticks) for part in parts[:2]] == [(0, 255, 2), (2, 257, 2)]


def test_a_timeline_that_nobody_asked_for_says_how_to() -> None:
    ffn = launch(Kernels())
    ffn.prepare(6)
    with pytest.raises(RuntimeError, match="start the process with VLLM_MONO_TIMELINE=1"):
        ffn.timeline(6)
    with pytest.raises(RuntimeError, match="no memory was made for steps of 7 rows"):
        ffn.timeline(7)


@pytest.mark.parametrize("told", ["true", "on", "yes", " 1", "", "2"])
def test_a_timeline_is_asked_for_by_one_word(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    """Anything else is refused at start-up: a run for a timeline that has none is found out at its end."""
    monkeypatch.setenv(ffn_launch.TIMELINE_VARIABLE, told)
    with pytest.raises(ValueError, match=f"VLLM_MONO_TIMELINE is {told!r}, wanted 1 .* 0 or unset"):
        launch(Kernels())


@pytest.mark.parametrize("told", ["0", None])
def test_no_timeline_is_asked_for(monkeypatch: pytest.MonkeyPatch, told: str | None) -> None:
    monkeypatch.delenv(ffn_launch.TIMELINE_VARIABLE, raising=False)
    if told:
        monkeypatch.setenv(ffn_launch.TIMELINE_VARIABLE, told)
    assert not launch(Kernels()).deployment.timeline


def test_a_timeline_build_has_a_name_of_its_own() -> None:
    plain, timed = (builds.ffn_build(FfnGeometry(6, 4, timeline=on), "gfx950") for on in (False, True))
    assert "timeline" not in plain.title and timed.title == f"{plain.title}_timeline1"
    assert plain.digest != timed.digest


def test_a_width_that_the_kernels_do_not_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows is 49, the launch does 1\.\.48"):
        launch(Kernels()).prepare(49)


def test_other_dtypes_are_refused() -> None:
    ffn = launch(Kernels())
    ffn.prepare(6)
    part, *rest = inputs(6)
    with pytest.raises(TypeError, match=r"part torch\.float32"):
        ffn(small_weights(), part.float(), *rest)


def test_no_rank_makes_peer_memory_before_its_kernel_is_there() -> None:
    events: list[str] = []
    ranks = Ranks(2)

    def body(rank: int, group: Group) -> None:
        gather = group.gather

        def gathered(value: Any) -> Any:
            events.append("exchange")
            return gather(value)

        def make(geometry: FfnGeometry) -> Any:
            events.append("kernel")
            return lambda arguments, stream: None

        place = Deployment(replace(group, gather=gathered), CPU, "gfx950", 384, 6, LAYERS)
        FfnLaunch(place, make, Heap(rank)).prepare(6)

    assert ranks.run(body) == [None, None]
    assert "kernel" not in events[events.index("exchange") + 4 :] and events.count("kernel") == 2


def test_a_rank_without_peer_memory_leaves_no_width_behind() -> None:
    place = Deployment(alone(), CPU, "gfx950", 384, 6, LAYERS)
    ffn = FfnLaunch(place, Kernels(), Heap(0, "allocate"))
    with pytest.raises(PeerMemoryError, match="out of memory"):
        ffn.prepare(6)
    assert not ffn._widths


def test_the_step_is_watched_behind_its_last_layer_alone() -> None:
    kernels = Kernels()
    ffn = launch(kernels)
    ffn.prepare(6)
    local = ffn._widths[6].symmetric.local[:16].view(torch.int32)
    local[2], local[3] = (5 << 24) | (7 << 12) | 1, 1
    ffn(small_weights(LAYERS[0]), *inputs(6))
    ffn.fail_stop.check()
    local[0] = 3
    ffn(small_weights(LAYERS[1]), *inputs(6))
    with pytest.raises(
        KernelWaitError, match=r"layer layers\.3, the experts' intermediate rows: workgroup 7"
    ):
        ffn.fail_stop.check()


def test_the_record_is_the_hand_offs() -> None:
    assert launch(Kernels()).fail_stop._record is ErrorRecord


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("experts", "picks"), [(384, 6), (128, 3)])
def test_weights_as_vllm_loads_them_are_taken(tp: int, experts: int, picks: int) -> None:
    meta_weights(tp, experts, picks).check(tp, experts, picks)


def test_the_padded_share_of_tp4_is_the_loaders() -> None:
    wanted = ffn_launch.expected(FfnGeometry(1, 4))
    assert wanted["w13"][0] == (384, 1280, 2560) and wanted["w2"][0] == (384, 5120, 320)
    assert wanted["w2_scale"][0] == (384 * 5120, 24) and wanted["shared_w2_scale"][0] == (160, 18)


NAMES = [name for name in FfnWeights.__dataclass_fields__ if name != "layer"]


@pytest.mark.parametrize("name", NAMES)
def test_each_weight_of_another_shape_dtype_or_stride_is_named(name: str) -> None:
    shape, dtype = ffn_launch.expected(FfnGeometry(1, 4))[name]

    def fault(tensor: torch.Tensor) -> str:
        with pytest.raises(ValueError, match=r"FFN launch of layers\.3: ") as caught:
            meta_weights(**{name: tensor}).check(4, 384, 6)
        assert str(caught.value).count(";") == 0, "nothing else is wrong"
        return str(caught.value)

    longer = (*shape[:-1], shape[-1] + 1)
    assert f"{name} has shape {longer}, wanted {shape}" in fault(
        torch.empty(longer, dtype=dtype, device="meta")
    )
    other = torch.float16
    assert f"{name} is {other}, wanted {dtype}" in fault(torch.empty(shape, dtype=other, device="meta"))
    apart = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype, device="meta")[..., ::2]
    assert f"{name} has strides" in fault(apart)


def test_all_faults_are_in_one_error() -> None:
    bad = torch.empty(3, dtype=torch.float16, device="meta")
    with pytest.raises(ValueError) as caught:
        meta_weights(w13=bad, gate_bias=bad).check(4, 384, 6)
    assert all(
        f"{name} {what}" in str(caught.value) for name in ("w13", "gate_bias") for what in ("has", "is")
    )


def test_the_kernels_of_a_process_come_from_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    given: list[Any] = []

    class Cache:
        def launcher(self, build: Any) -> Any:
            asked.append(build.title)
            return lambda arguments, stream: given.append((arguments, stream))

    monkeypatch.setattr(ffn_launch.KernelCache, "of_process", lambda: Cache())
    kernel = ffn_launch.KernelsOfProcess("ffn", "gfx950")(FfnGeometry(6, 4))
    numbers = {name: place for place, name in enumerate(FfnArguments.__annotations__)}
    kernel(numbers, "the stream")
    assert asked == [builds.ffn_build(FfnGeometry(6, 4), "gfx950").title]
    arguments, stream = given[0]
    assert isinstance(arguments, FfnArguments) and stream == "the stream"
