# SPDX-License-Identifier: Apache-2.0
"""Hand-offs of our FFN launch: any schedule, any order of memory, gives the same bits."""

from __future__ import annotations

import pytest
from mono import handoffs
from mono.case import make
from mono.run import Run, same
from mono.sources import modules

from cdnasim import Device

full = pytest.mark.full


def test_hostile_memory_changes_no_bit() -> None:
    handoffs.check(1, 2, "random", 4)


@full
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("first, count", handoffs.SCHEDULE_PIECES)
@pytest.mark.parametrize("rows, tp", [(6, 4), (48, 2), (1, 2), (17, 2), (48, 4)])
def test_two_hundred_schedules(rows: int, tp: int, first: int, count: int) -> None:
    handoffs.check(rows, tp, "few", count, first=first)


@full
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("first, pairs", handoffs.PAIR_PIECES)
@pytest.mark.parametrize("widths", [(6, 48), (1, 2), (6, 17)])
def test_widths_in_turn(widths: tuple[int, int], first: int, pairs: int) -> None:
    handoffs.alternate(widths, 2, "few", pairs, first=first)


@full
@pytest.mark.timeout(3600)
def test_widths_that_share_their_memory_are_noticed() -> None:
    with pytest.raises(AssertionError):
        handoffs.alternate((1, 2), 2, "few", 4, share=True)


def test_the_tag_wraps() -> None:
    """Launches that begin two tags before the last: none takes another's words for its own."""
    epoch = modules().epoch
    want = handoffs.expected(1, 2, "random")
    run = Run(make(1, 2), Device("gfx950", ranks=2), tag=epoch.LAST_TAG - 1)
    seen = []
    for number in range(4):
        seen.append(run.tag(0))
        run.feed(handoffs.step(1, 2, "random", number))
        run.launch()
        assert same(run.outputs(), want[number % handoffs.STEPS]) == []
        assert [run.tag(rank) for rank in range(2)] == [epoch.next_tag(seen[-1])] * 2
    assert seen == [epoch.LAST_TAG - 1, epoch.LAST_TAG, 1, 2]
