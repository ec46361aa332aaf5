# SPDX-License-Identifier: Apache-2.0
"""Hand-offs of the whole layer's launches: any schedule, any order of memory, gives the same bits."""

from __future__ import annotations

import pytest
from mono import layer_handoffs as handoffs
from mono.handoffs import PAIR_PIECES, SCHEDULE_PIECES
from mono.layer_case import Shape, draft
from mono.layer_run import LayerRun
from mono.run import same
from mono.sources import modules

from cdnasim import Device

full = pytest.mark.full
long = pytest.mark.timeout(24 * 3600)
ONE = Shape(1, 2, contexts=(0,))


def test_hostile_memory_changes_no_bit() -> None:
    handoffs.check(ONE, 2)


@full
@long
@pytest.mark.parametrize("first, count", SCHEDULE_PIECES)
@pytest.mark.parametrize("rows, tp", [(6, 4), (48, 2), (1, 2), (17, 2), (48, 4)])
def test_two_hundred_schedules(rows: int, tp: int, first: int, count: int) -> None:
    shape = Shape(rows, tp, contexts=(3, 700), kind="few", hands_out=True) if rows > 1 else ONE
    handoffs.check(shape, count, first=first)


@full
@long
@pytest.mark.parametrize("rows, tp", [(6, 4), (48, 2)])
def test_schedules_of_a_draft_layer(rows: int, tp: int) -> None:
    handoffs.check(draft(rows, tp, contexts=(3, 700), kind="few", fold=False), 20)


@full
@long
@pytest.mark.parametrize("first, pairs", PAIR_PIECES)
@pytest.mark.parametrize("widths", [(6, 48), (1, 2), (6, 17)])
def test_widths_in_turn(widths: tuple[int, int], first: int, pairs: int) -> None:
    one, other = (Shape(rows, 2, contexts=(100,), kind="few") for rows in widths)
    handoffs.alternate((one, other), pairs, first=first)


@full
@long
def test_widths_that_share_their_memory_are_noticed() -> None:
    one, other = (Shape(rows, 2, contexts=(100,), kind="few") for rows in (1, 2))
    with pytest.raises(AssertionError):
        handoffs.alternate((one, other), 4, share=True)


def test_the_tag_wraps() -> None:
    """Launches that begin at the last tag: none takes another's words for its own."""
    epoch = modules().epoch
    want = handoffs.expected(ONE)
    run = LayerRun(handoffs.step(ONE, 0), Device("gfx950", ranks=2), tag=epoch.LAST_TAG)
    for number, tags in enumerate([(epoch.LAST_TAG, 1), (1, 2)]):
        before, after = tags
        assert {launch.tag(rank) for launch in (run.front, run.back) for rank in range(2)} == {before}
        run.feed(handoffs.step(ONE, number))
        run.launch()
        assert same(run.outputs(), want[number % handoffs.STEPS]) == []
        assert {launch.tag(rank) for launch in (run.front, run.back) for rank in range(2)} == {after}
