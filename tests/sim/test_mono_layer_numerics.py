# SPDX-License-Identifier: Apache-2.0
"""Our whole-layer launches against float64: every stage on its own input, the layer's output, ranks alike.

Bounds: ``mono.layer_compare.BOUNDS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from mono import compare
from mono import layer_compare as layers
from mono.layer_case import Shape, draft, make_layer
from mono.layer_run import LayerRun
from mono.run import same
from mono.sources import modules

full = pytest.mark.full
long = pytest.mark.timeout(3600)
# One process makes each run that several tests look at.
of_one_row = pytest.mark.xdist_group("layer of one row")
of_six_rows = pytest.mark.xdist_group("layer of six rows")


def launched(shape: Shape, seed: int = 0) -> LayerRun:
    run = LayerRun(make_layer(shape, seed))
    run.launch()
    return run


@pytest.fixture(scope="module")
def one_row() -> LayerRun:
    """Its token has no compressed key, and one of its window: the first of a prompt, and itself."""
    return launched(Shape(1, 2, contexts=(0,)))


@pytest.fixture(scope="module")
def six_rows() -> LayerRun:
    """An index source's layer of two requests, one at its start, with padded rows, whose blocks lie apart."""
    shape = Shape(6, 4, ratio=2, hands_out=True, contexts=(0, 1100), padded=(1, 4), kind="same")
    return launched(replace(shape, window_block=128, compressed_block=32, slack=48))


@of_one_row
def test_one_row(one_row: LayerRun) -> None:
    layers.check_layer(one_row)


@of_six_rows
def test_six_rows(six_rows: LayerRun) -> None:
    layers.check_layer(six_rows)


def test_a_wave_whose_last_k_step_is_past_the_end() -> None:
    """Some waves of the query projection have one step less; NaN of a padded row lies where its codes
    would."""
    run = LayerRun(make_layer(Shape(5, 4, ratio=2, contexts=(0, 140), padded=(2,))))
    run.front.launch()
    layers.check_front(run.front)


def test_a_draft_layer_whose_residual_is_settled() -> None:
    """More rows than one tile; no compressed keys; windows of up to 133 tokens that see the step's own."""
    shape = draft(17, 2, contexts=(3, 200, 900), fold=False, window_block=32, kind="few")
    layers.check_layer(launched(shape))


# ---- every width, ratio and layout
WIDTHS = (1, 2, 5, 6, 7, 12, 24, 47, 48)
CONTEXTS = {1: (700,), 2: (700,), 5: (0,), 6: (1100,), 7: (125,)}
SPREAD = (0, 3, 127, 128, 511, 700, 1024, 1500)


@full
@long
@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("rows", WIDTHS)
def test_row_counts(rows: int, tp: int, ratio: int) -> None:
    """Few experts where there are many rows, so that the reference ends in minutes."""
    contexts = CONTEXTS.get(rows, SPREAD)
    layers.check_layer(launched(Shape(rows, tp, ratio, contexts=contexts, kind="few")))


@full
@long
@pytest.mark.parametrize("window_block", [32, 64, 128])
@pytest.mark.parametrize("compressed_block, slack", [(32, 0), (64, 16), (128, 4096)])
def test_cache_layouts(window_block: int, compressed_block: int, slack: int) -> None:
    shape = Shape(6, 4, ratio=1, contexts=(3, 1100), kind="same")
    layers.check_layer(
        launched(replace(shape, window_block=window_block, compressed_block=compressed_block, slack=slack))
    )


@full
@long
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("fold, hands_out", [(False, False), (False, True), (True, True)])
def test_entries_and_index_sources(tp: int, fold: bool, hands_out: bool) -> None:
    shape = Shape(7, tp, ratio=2, fold=fold, hands_out=hands_out, contexts=(125,), kind="few")
    layers.check_layer(launched(shape))


@full
@long
@pytest.mark.parametrize("rows, tp", [(1, 2), (5, 4), (6, 2), (24, 4), (48, 2), (48, 4)])
def test_draft_layers(rows: int, tp: int) -> None:
    contexts = SPREAD if rows > 8 else (700,)
    layers.check_layer(launched(draft(rows, tp, contexts=contexts, kind="few")))


@full
@long
@pytest.mark.parametrize(
    "rows, tp, ratio, padded", [(17, 2, 1, (0, 7, 16)), (48, 4, 2, tuple(range(30, 48)))]
)
def test_padded_rows_are_inert(rows: int, tp: int, ratio: int, padded: tuple[int, ...]) -> None:
    shape = Shape(rows, tp, ratio, contexts=SPREAD, padded=padded, kind="few", hands_out=ratio == 2)
    layers.check_layer(launched(shape))


@full
@long
def test_a_step_of_padded_rows_alone_writes_no_key() -> None:
    run = launched(Shape(2, 2, padded=(0, 1)))
    assert torch.equal(run.front.ranks[0]["window_cache"], run.case.window.raw)
    run.outputs()


@of_one_row
def test_later_launches_give_the_same_bits(one_row: LayerRun) -> None:
    first = one_row.outputs()
    one_row.launch()
    assert same(one_row.outputs(), first) == []


@full
@long
@pytest.mark.parametrize("rows, tp", [(6, 4), (48, 2)])
def test_later_launches_give_the_same_bits_with_more_rows(rows: int, tp: int) -> None:
    test_later_launches_give_the_same_bits(launched(Shape(rows, tp, contexts=(100,), kind="few")))


# ---- the comparison can fail
@of_one_row
def test_a_routed_scale_off_by_three_percent_fails(one_row: LayerRun) -> None:
    back = one_row.back
    back.case = back.ffn_case()
    got = back.ranks[0]["out"].double()
    for factor, holds in ((1.0, True), (1.03, False), (0.97, False)):
        scaling = modules().geometry.ROUTED_SCALING * factor
        want = compare.whole_launch(back, modules().reference.VLLM, scaling=scaling)
        assert compare.BOUNDS["launch"].holds(compare.Error.of(got, want)) == holds


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def errors(run: LayerRun, rank: int = 0) -> dict[str, compare.Error]:
    pairs = layers.front_pairs(run.front, rank) | layers.back_pairs(run.back, rank)
    return {name: compare.Error.of(*pair) for name, pair in pairs.items()}


ATTENTION = {"attended", "attended excess"}
att = modules().attention


def _other_way(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    return rotate(x, cos_sin, not inverse)


def _halves(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Pairs of dims 32 apart."""
    order = torch.cat([torch.arange(448), 448 + torch.arange(64).view(2, 32).T.flatten()])
    out = torch.empty_like(x)
    out[..., order] = rotate(x[..., order], cos_sin, inverse)
    return out


def _no_sink(queries: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    return attend(queries, keys, sink - 100)


def _without_one_key(queries: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    return attend(queries, keys[:-1] if len(keys) > 1 else keys, sink)


def _another_scale(queries: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    return attend(queries * 1.03, keys, sink)


rotate, attend = att.rotate, att.attend
WRONG = {
    "the rotary turns the other way": ("rotate", _other_way, {"query", "record", *ATTENTION}),
    "the rotary pairs halves": ("rotate", _halves, {"query", "record", *ATTENTION}),
    "the sink is left out": ("attend", _no_sink, ATTENTION),
    "a key is left out": ("attend", _without_one_key, {"attended excess"}),
    "scores are 3 % off": ("attend", _another_scale, {"attended excess"}),
}


@of_six_rows
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_operation_fails_its_stages(six_rows: LayerRun, fault: str) -> None:
    """The reference made wrong, which is what a wrong launch looks like to the comparison."""
    name, wrong, stages = WRONG[fault]
    assert layers.failing(errors(six_rows)) == set()
    with changed(att, name, wrong):
        assert layers.failing(errors(six_rows)) >= stages


def untouched_word(run: Any) -> int:
    """A word of the cache in a record that the step does not store."""
    case = run.layer
    slot = next(slot for slot in range(case.window.block) if slot not in case.step["slots"])
    return slot * modules().geometry.RECORD_DATA // 4


FRONT_WORDS = {"residual_out": "residual", "query": "query", "normed_out": "normed_out"}
FRONT_WORDS |= {"query_rank_out": "query_rank_out", "window_cache": "cache"}


@of_six_rows
@pytest.mark.parametrize("name", [*FRONT_WORDS, "collapsed", "seam_sums", "qkv", "attended", "ranks"])
def test_a_wrong_word_fails_its_stage(six_rows: LayerRun, name: str) -> None:
    """One word of each region changed: the comparison names the stage that wrote it."""
    run = six_rows.back if name in ("attended", "ranks") else six_rows.front
    if name in FRONT_WORDS:
        memory = run.ranks[0][name].view(torch.uint8).flatten().view(torch.int32)
        at = 77 if name != "window_cache" else untouched_word(run)
    else:
        memory = run.ranks[0]["workspace"].view(torch.int32)
        at = getattr(run.workspace, name).offset // 4
    before = memory[at].clone()
    memory[at] = before ^ 0x40400040
    try:
        assert FRONT_WORDS.get(name, name) in layers.failing(errors(six_rows))
    finally:
        memory[at] = before
