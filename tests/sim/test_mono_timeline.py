# SPDX-License-Identifier: Apache-2.0
"""Timeline builds: the same results, a clock of every part, and no instruction of it in other builds."""

from __future__ import annotations

import pytest
from mono import timeline
from mono.case import make
from mono.layer_case import Shape, make_layer
from mono.layer_run import LayerRun, back_kernel, front_kernel
from mono.run import Run, same
from mono.sources import Edit, modules, mutated

from cdnasim import Device

CLOCK = "s_memrealtime"
FFN_SOURCE = "models/deepseek_v41/amd/mono/kernels/ffn.py"


def reads_of_the_clock(kernel: object) -> int:
    return sum(text.startswith(CLOCK) for text in kernel.texts)  # type: ignore[attr-defined]


def check_stamps(run: Run) -> None:
    """Every workgroup of every rank has a rising clock of every part, and they begin in order."""
    names = timeline.stamps(run)
    for rank in range(run.case.tp):
        parts = timeline.timeline.parts_of(timeline.clocks(run, rank), names)
        assert [part.name for part in parts] == list(names[:-1])
        assert [part.middle for part in parts] == sorted(part.middle for part in parts)
        # A launch crosses workgroups, so that nobody is at its end before everybody has begun.
        assert min(row[-1] for row in timeline.clocks(run, rank)) > max(
            row[0] for row in timeline.clocks(run, rank)
        )


def test_ffn() -> None:
    run, plain = timeline.ffn(1, 2), Run(make(1, 2), Device("gfx950", ranks=2))
    for one in (run, plain):
        one.launch()
        one.launch()
    assert same(run.outputs(), plain.outputs()) == []
    check_stamps(run)
    assert reads_of_the_clock(run.kernel) == len(timeline.stamps(run))
    assert reads_of_the_clock(plain.kernel) == 0


@pytest.mark.full
def test_whole_layer() -> None:
    front, back = timeline.layer(1, 2)
    plain = LayerRun(make_layer(Shape(1, 2)))
    for _ in range(2):
        front.launch()
        back.launch()
        plain.launch()
    assert same(front.outputs(), plain.front.outputs()) == []
    assert same(back.outputs(), plain.back.outputs()) == []
    for run in (front, back):
        check_stamps(run)
        assert reads_of_the_clock(run.kernel) == len(timeline.stamps(run))
    assert reads_of_the_clock(front_kernel(Shape(1, 2))) == reads_of_the_clock(back_kernel(Shape(1, 2))) == 0


@pytest.mark.full
def test_a_part_that_the_kernel_does_not_stamp_is_noticed() -> None:
    overlay = mutated((Edit(FFN_SOURCE, '    ctx.stamp("choose")\n', ""),))
    run = timeline.ffn(1, 2, overlay)
    run.launch()
    run.launch()
    with pytest.raises(ValueError, match="no stamp of choose"):
        check_stamps(run)


def test_the_plain_builds_memory_has_no_clocks() -> None:
    g, regions = modules().geometry, modules().regions
    names = {region.name for region in regions.workspace(g.FfnGeometry(6, 4))}
    assert "timeline" not in names
    timed = g.FfnGeometry(6, 4, timeline=True)
    assert {region.name for region in regions.workspace(timed)} == names | {"timeline"}
    assert regions.workspace(timed).timeline.shape == (g.WORKGROUPS, len(timed.stamps))


@pytest.mark.parametrize("kind", ["FfnGeometry", "FrontGeometry", "BackGeometry"])
def test_parts_have_their_stages_names(kind: str) -> None:
    """But for what is no stage: loads ahead, the wait for the collapsed rows with their norm, the end."""
    tables = modules().stage_table
    geometry = getattr(modules().geometry, kind)(6, 4)
    stages = {one.name for one in getattr(tables, f"{kind.removesuffix('Geometry').lower()}_stages")()}
    assert set(geometry.stamps) - stages == {"loads", "normalised rows", "end"} - (
        {"loads"} if kind == "FrontGeometry" else set()
    )
    assert len(set(geometry.stamps)) == len(geometry.stamps)


ROW = [5, 7, 9]


@pytest.mark.parametrize(
    "clocks, wanted",
    [
        ([ROW, [5, 7]], "workgroup 1 has 2 stamps, wanted 3"),
        ([ROW, [5, 0, 9]], "workgroup 1 has no stamp of b: wanted the clocks"),
        ([ROW, [5, 9, 7]], "workgroup 1 has clocks that do not rise"),
    ],
)
def test_clocks_that_are_no_launchs_are_refused(clocks: list[list[int]], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        timeline.timeline.parts_of(clocks, ("a", "b", "end"))


def test_parts_are_counted_from_the_launchs_first_stamp() -> None:
    a, b = timeline.timeline.parts_of([[10, 14, 20], [11, 12, 30], [13, 19, 21]], ("a", "b", "end"))
    assert (a.first, a.middle, a.last, a.mean_ticks, a.longest_ticks) == (0, 1, 3, 11 / 3, 6)
    assert (b.first, b.middle, b.last, b.mean_ticks, b.longest_ticks) == (2, 4, 9, 26 / 3, 18)
    assert "| b | 1.0 | 2.0 | 4.5 | 4.3 | 9.0 |" in timeline.timeline.markdown([a, b], ticks=2, unit="us")
