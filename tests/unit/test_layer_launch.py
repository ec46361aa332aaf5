# SPDX-License-Identifier: Apache-2.0
"""Whole layers on the host: what the two kernels are handed, and what is refused before they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.test_ffn_launch import alone, inputs, meta_weights, small_weights, stamped
from tests.unit.test_peers import CPU, Heap

from vllm.models.common.amd.persistent.fail_stop import KernelWaitError  # isort: skip
from vllm.models.common.amd.persistent.handoff import ErrorRecord  # isort: skip
from vllm.models.deepseek_v41.amd.mono import builds, ffn_launch, layer_launch, regions  # isort: skip
from vllm.models.deepseek_v41.amd.mono.ffn_launch import Deployment  # isort: skip
from vllm.models.deepseek_v41.amd.mono.geometry import BackGeometry, FfnGeometry, FrontGeometry  # isort: skip
from vllm.models.deepseek_v41.amd.mono.kernels import attention_back_ffn, attention_front  # isort: skip
from vllm.models.deepseek_v41.amd.mono.layer_launch import Keys, LayerLaunch, LayerWeights, Makers  # isort: skip

LAYERS = ("layers.3", "layers.39")
WINDOW, BLOCK, RECORD = 128, 64, 584
FRONT = set(attention_front.FrontArguments.__annotations__)
BACK = set(attention_back_ffn.BackArguments.__annotations__)


class Kernels:
    """Both kernels, in the order in which they are launched, with what they were handed."""

    def __init__(self) -> None:
        self.made: list[FfnGeometry] = []
        self.calls: list[tuple[str, dict[str, int]]] = []

    def makers(self) -> Makers:
        def maker(half: str) -> Any:
            def make(geometry: FfnGeometry) -> Any:
                self.made.append(geometry)
                return lambda arguments, stream: self.calls.append((half, arguments))

            return make

        return Makers(maker("front"), maker("back"))


def launch(kernels: Kernels, rank: int = 0, window: int = WINDOW, experts: int = 384) -> LayerLaunch:
    place = Deployment(alone(rank), CPU, "gfx950", experts, 6 if experts == 384 else 3, LAYERS)
    return LayerLaunch(place, window, kernels.makers(), Heap(rank))


def attention(layer: str = LAYERS[0], ratio: int = 1, **changes: Any) -> LayerWeights:
    """Distinct addresses; what the tensors hold is not looked at after they were checked."""
    names = [n for n in LayerWeights.__dataclass_fields__ if n not in ("layer", "ratio", "ffn")]
    tensors = {name: torch.zeros(4) for name in names} | changes
    return LayerWeights(layer, ratio, small_weights(layer), **tensors)


def loaded(tp: int = 4, **changes: Any) -> LayerWeights:
    """Weights as vLLM loads them, without their memory."""
    wanted = layer_launch.expected(tp) | {
        "sink": ((64,), torch.float32),
        "cos_sin": ((1000, 64), torch.float32),
    }
    tensors = {name: torch.empty(s, dtype=d, device="meta") for name, (s, d) in wanted.items()}
    fields = {"layer": "layers.3", "ratio": 1, "ffn": meta_weights(tp)} | tensors | changes
    return LayerWeights(**fields)


def cache(stride: int = BLOCK * RECORD, block: int = BLOCK) -> torch.Tensor:
    raw = torch.zeros(3 * stride, dtype=torch.uint8)
    return torch.as_strided(raw, (3, block, RECORD), (stride, RECORD, 1))


def keys(rows: int, window: int = WINDOW, **changes: Any) -> Keys:
    given: dict[str, Any] = {
        "positions": torch.arange(rows),
        "slots": torch.arange(rows),
        "window_cache": cache(BLOCK * RECORD + 32),
        "window_indices": torch.zeros(rows, 1, window, dtype=torch.int32),
        "window_lens": torch.zeros(rows, dtype=torch.int32),
        "requests": torch.zeros(rows, dtype=torch.int32),
        "selected": torch.zeros(rows, 512, dtype=torch.int32),
        "compressed_cache": cache(32 * RECORD, 32),
        "block_table": torch.zeros(2, 7, dtype=torch.int32),
    }
    return Keys(**given | changes)


def uncompressed(rows: int, **changes: Any) -> Keys:
    return keys(rows, **({"selected": None, "compressed_cache": None, "block_table": None} | changes))


def run(layer: LayerLaunch, rows: int = 6, read: Keys | None = None, **options: Any) -> tuple[Any, ...]:
    layer.prepare(rows)
    return layer(attention(), inputs(rows), read or keys(rows), **options)


def test_the_kernels_get_every_address_by_its_own_name() -> None:
    kernels = Kernels()
    layer = launch(kernels, rank=3)
    layer.prepare(6)
    weights, given, read = attention(), inputs(6), keys(6)
    outputs = layer(weights, given, read)
    assert [half for half, _ in kernels.calls] == ["front", "back"]
    front, back = (arguments for _, arguments in kernels.calls)
    assert set(front) == FRONT and set(back) == BACK
    named = dict(zip(("x", "residual_in", "post_in", "comb_in", "pre_in"), given, strict=True))
    own = {name: tensor for name, tensor in weights.tensors().items() if name in FRONT}
    named |= own | {name: getattr(read, name) for name in ("positions", "slots", "window_cache")}
    assert {name: front[name] for name in named} == {name: t.data_ptr() for name, t in named.items()}
    named = dict(zip(("out", "residual_out", "post_out", "comb_out", "pre_out"), outputs, strict=True))
    named |= weights.ffn.tensors()
    named |= {name: weights.tensors()[name] for name in ("wo_a", "wo_a_scale", "wo_b", "wo_b_scale", "sink")}
    named |= {n: getattr(read, n) for n in Keys._fields} | {"cos_sin": weights.cos_sin}
    assert {name: back[name] for name in named} == {name: t.data_ptr() for name, t in named.items()}
    assert front["rank"] == back["rank"] == 3


def test_what_the_front_stores_is_what_the_back_reads() -> None:
    kernels = Kernels()
    run(launch(kernels))
    front, back = (arguments for _, arguments in kernels.calls)
    assert front["query"] == back["query"]
    for name in ("residual", "post", "comb", "pre"):
        assert front[f"{name}_out"] == back[f"{name}_in"]
    assert front["workspace"] != back["workspace"] and front["peers"] != back["peers"]


def test_sizes_of_the_caches_and_keys_are_numbers() -> None:
    kernels = Kernels()
    layer = launch(kernels)
    run(layer, read=keys(6))
    (_, front), (_, back) = kernels.calls
    numbers = {
        "window_stride": BLOCK * RECORD + 32, "window_block": BLOCK, "compressed_stride": 32 * RECORD,
        "compressed_block": 32, "table_stride": 7, "ratio": 1, "window": WINDOW, "selected_keys": 512,
    }  # fmt: skip
    assert {name: back[name] for name in numbers} == numbers
    assert (front["window_stride"], front["window_block"]) == (BLOCK * RECORD + 32, BLOCK)


def test_a_layer_without_compressed_keys_has_none_selected() -> None:
    kernels = Kernels()
    layer = launch(kernels)
    layer.prepare(6)
    layer(attention(ratio=0), inputs(6), uncompressed(6))
    (_, back) = kernels.calls[1]
    assert set(back) == BACK and (back["selected_keys"], back["ratio"], back["compressed_block"]) == (0, 1, 1)


@pytest.mark.parametrize("fold", [True, False])
def test_the_front_is_told_whether_the_residual_owes(fold: bool) -> None:
    kernels = Kernels()
    run(launch(kernels), fold=fold)
    assert kernels.calls[0][1]["fold"] == fold


def test_an_index_source_selects_between_the_kernels() -> None:
    kernels, order = Kernels(), []
    layer = launch(kernels)

    def select(normed: torch.Tensor, rank: torch.Tensor) -> None:
        order.append([half for half, _ in kernels.calls])
        front = kernels.calls[0][1]
        assert (normed.data_ptr(), rank.data_ptr()) == (front["normed_out"], front["query_rank_out"])
        assert normed.shape == (6, 5120) and rank.shape == (6, 1280)

    run(layer, select=select)
    assert order == [["front"]] and len(kernels.calls) == 2
    kernels.calls.clear()
    run(layer)
    assert (kernels.calls[0][1]["normed_out"], kernels.calls[0][1]["query_rank_out"]) == (0, 0)


def test_outputs_are_shaped_as_the_decoder_layer_hands_them_on() -> None:
    layer = launch(Kernels())
    layer.prepare(6)
    x, residual, _, comb, pre = inputs(6)
    first = layer.first_pre_mix(6)
    outputs = layer(attention(), (x, residual, first, first, first), keys(6), fold=False)
    assert [t.shape for t in outputs] == [t.shape for t in (x, residual, torch.zeros(6, 4, 1), comb, pre)]
    assert first.tolist() == [[1, 0, 0, 0]] * 6 and layer.first_pre_mix(6) is first


def test_a_width_has_memory_of_its_own_that_stays() -> None:
    kernels = Kernels()
    layer = launch(kernels)
    for rows in (6, 48, 6):
        run(layer, rows, keys(rows))
    assert [type(g) for g in kernels.made] == [FrontGeometry, BackGeometry] * 2
    places = [(c["workspace"], c["peers"], c["query"]) for _, c in kernels.calls]
    assert places[:2] == places[4:] and not set(places[0]) & set(places[2])


def test_timelines_of_both_kernels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ffn_launch.TIMELINE_VARIABLE, "1")
    kernels = Kernels()
    layer = launch(kernels)
    layer.prepare(6)
    front, back = kernels.made
    assert (front, back) == (FrontGeometry(6, 4, timeline=True), BackGeometry(6, 4, timeline=True))
    width = layer._widths[6]
    stamped(width.front.workspace, regions.front_workspace(front).timeline, len(front.stamps))
    with pytest.raises(ValueError, match="no stamp of sparse attention"):
        layer.timelines(6)
    stamped(width.back.workspace, regions.back_workspace(back).timeline, len(back.stamps))
    found = layer.timelines(6)
    assert {half: [part.name for part in parts] for half, parts in found.items()} == {
        "front": list(front.stamps[:-1]),
        "back": list(back.stamps[:-1]),
    }


def test_timelines_that_nobody_asked_for_say_how_to() -> None:
    layer = launch(Kernels())
    layer.prepare(6)
    with pytest.raises(RuntimeError, match="start the process with VLLM_MONO_TIMELINE=1"):
        layer.timelines(6)
    with pytest.raises(RuntimeError, match="no memory was made for steps of 7 rows"):
        layer.timelines(7)


@pytest.mark.parametrize("rows", [1, 6, 17, 48])
@pytest.mark.parametrize("experts", [384, 128])
def test_memory_is_as_large_as_the_layouts_and_starts_as_it_needs(rows: int, experts: int) -> None:
    layer = launch(Kernels(), experts=experts)
    layer.prepare(rows)
    width, shape = layer._widths[rows], (rows, 4, experts, 6 if experts == 384 else 3)
    for half, symmetric, workspace in (
        (width.front, regions.front_symmetric(FrontGeometry(*shape)), regions.front_workspace),
        (width.back, regions.back_symmetric(BackGeometry(*shape)), regions.back_workspace),
    ):
        geometry = (FrontGeometry if half is width.front else BackGeometry)(*shape)
        assert half.workspace.numel() == workspace(geometry).size and not half.workspace.any()
        local = half.symmetric.local
        assert local.numel() == symmetric.size and not local[16:].any()
        assert local[:16].view(torch.int32).tolist() == ffn_launch.start_words()


REFUSED = {
    "positions": ({"positions": torch.zeros(6, dtype=torch.int32)}, "positions is torch.int32"),
    "slots": ({"slots": torch.zeros(6)}, "slots is torch.float32, wanted torch.int64"),
    "lens": ({"window_lens": torch.zeros(6)}, "window_lens is torch.float32"),
    "width": (
        {"window_indices": torch.zeros(6, 1, 192, dtype=torch.int32)},
        "window_indices has rows 192 apart, wanted 128",
    ),
    "topk": ({"selected": torch.zeros(6, 256, dtype=torch.int32)}, "selected has rows 256 apart, wanted 512"),
    "table": ({"block_table": torch.zeros(2, 7)}, "block_table is torch.float32"),
    "stride": ({"window_cache": cache(BLOCK * RECORD + 8)}, "window_cache has blocks 37384 bytes apart"),
    "block": (
        {"compressed_cache": cache(48 * RECORD, 48)},
        "compressed_cache has blocks of 48 records, wanted a power of two",
    ),
    "half": ({"block_table": None}, "selected, compressed_cache and block_table go together"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_the_kernels_misread_are_refused(name: str) -> None:
    changes, reason = REFUSED[name]
    kernels = Kernels()
    with pytest.raises(ValueError, match=r"attention of layers\.3: ") as refusal:
        run(launch(kernels), read=keys(6, **changes))
    assert reason in str(refusal.value) and not kernels.calls


def test_every_fault_of_the_keys_is_named_at_once() -> None:
    changes = {name: value for case, _ in REFUSED.values() for name, value in case.items()}
    faults = keys(6, **changes).faults(WINDOW)
    assert len(faults) == len(changes)


def test_widths_and_windows_that_there_are_no_kernels_for_are_refused() -> None:
    with pytest.raises(RuntimeError, match="no memory was made for steps of 6 rows"):
        launch(Kernels())(attention(), inputs(6), keys(6))
    with pytest.raises(ValueError, match=r"rows is 49, the launch does 1\.\.48"):
        launch(Kernels()).prepare(49)
    for window in (0, 130, 272):
        with pytest.raises(ValueError, match=f"windows of {window} keys, wanted a multiple of 16"):
            launch(Kernels(), window=window)


@pytest.mark.parametrize("tp", [2, 4])
def test_weights_as_vllm_loads_them_pass(tp: int) -> None:
    loaded(tp).check(tp, 384, 6)


@pytest.mark.parametrize("name", [*layer_launch.expected(4), "sink", "cos_sin"])
def test_every_weight_is_checked(name: str) -> None:
    good = loaded()
    tensor = getattr(good, name)
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    for bad in (tensor.new_empty((3, 3)), tensor.to(other)):
        with pytest.raises(ValueError, match=f"attention of layers.3: .*{name} "):
            replace(good, **{name: bad}).check(4, 384, 6)
    if tensor.dim() == 2:
        with pytest.raises(ValueError, match=f"{name} has strides"):
            replace(good, **{name: tensor.new_empty(tensor.shape[::-1]).t()}).check(4, 384, 6)


def test_ratios_and_the_ffn_s_weights_are_checked() -> None:
    with pytest.raises(ValueError, match="compress ratio 3, wanted 0, 1, 2"):
        loaded(ratio=3).check(4, 384, 6)
    with pytest.raises(ValueError, match=r"FFN launch of layers\.3: w2 "):
        ffn = meta_weights(4, w2=torch.empty(3, device="meta"))
        loaded(ffn=ffn).check(4, 384, 6)


def test_a_failure_of_either_kernel_stops_the_server_and_names_layer_and_stage() -> None:
    for half, number, words in (
        (
            "front",
            attention_front.QKV_ROWS,
            "attention front .*layers.39, the query rank and key: workgroup 5",
        ),
        ("back", attention_back_ffn.ATTENDED, "attention back .*layers.39, the attended heads: workgroup 5"),
    ):
        kernels = Kernels()
        layer = launch(kernels)
        layer.prepare(6)
        for name in LAYERS:
            layer(attention(name), inputs(6), keys(6))
        layer.check()
        control = getattr(layer._widths[6], half).symmetric.local[:16].view(torch.int32)
        # Two launches, of which the second failed.
        control[:] = torch.tensor([3, 9, number << 24 | 5 << 12 | 7, 2], dtype=torch.int32)
        assert ErrorRecord.decode(*control[2:].tolist()) is not None
        layer(attention(LAYERS[-1]), inputs(6), keys(6))
        with pytest.raises(KernelWaitError, match=words):
            layer.check()


def test_every_stage_of_the_kernels_has_a_name() -> None:
    front = {attention_front.MIXES, attention_front.COLLAPSED, attention_front.QKV_ROWS}
    assert set(layer_launch.FRONT_STAGES) == front
    back = {attention_back_ffn.ATTENDED, attention_back_ffn.RANKS}
    assert set(layer_launch.BACK_STAGES) - set(ffn_launch.STAGES) == back


def test_the_epoch_counts_layers_of_every_width() -> None:
    layer = launch(Kernels())
    assert layer.epoch == [0]
    for rows, tag in ((6, 4), (48, 3)):
        layer.prepare(rows)
        layer._widths[rows].back.symmetric.local[:4].view(torch.int32)[0] = tag
    assert layer.epoch == [5]


def test_the_kernels_of_a_process_are_of_both_kinds() -> None:
    makers = Makers.of_process("gfx950")
    assert {maker.kind for maker in (makers.front, makers.back)} == set(builds.KINDS) - {"ffn"}  # type: ignore[attr-defined]
