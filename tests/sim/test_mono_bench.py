# SPDX-License-Identifier: Apache-2.0
"""The kept figures of the FFN launch beside the base's: the page says what the counts say."""

from __future__ import annotations

import pytest
from mono import bench
from mono.sources import OVERLAY, source_hash

from cdnasim import timing


def test_the_page_is_written_from_the_counts() -> None:
    """What `make bench-mono KERNEL=ffn WRITE=1` writes, from the counts beside it."""
    _, page = bench.files()
    assert page.read_text() == bench.PAGE.format(table=bench.table(bench.kept()))


def test_the_goals_that_are_met() -> None:
    """At 6 rows: fewer hand-offs than the base's, at most 40 MB past the L2, and at most 0.87 of its time."""
    cases = {name: pair for name, pair in bench.kept().items() if name.endswith(" 6 rows")}
    assert len(cases) == 2
    for pair in cases.values():
        assert pair["ours"].handoff_depth < pair["base"].handoff_depth
        assert bench.scoped(pair["ours"]) <= 40
        assert timing.model(pair["ours"]).us <= 0.87 * timing.model(pair["base"]).us


@pytest.mark.full
def test_the_counts_are_of_these_sources() -> None:
    import json

    assert json.loads(bench.files()[0].read_text())["source"] == source_hash(OVERLAY)
