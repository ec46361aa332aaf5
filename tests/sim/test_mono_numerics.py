# SPDX-License-Identifier: Apache-2.0
"""Our FFN launch against float64: every stage on its own input, the whole launch, ranks and launches alike.

Bounds: ``mono.compare.BOUNDS``.
"""

from __future__ import annotations

import pytest
import torch
from mono import compare
from mono.case import KINDS, make
from mono.run import Run, same
from mono.sources import modules

from cdnasim import Device

full = pytest.mark.full
DRAFT = {"experts": 128, "picks": 3}
ROWS = (1, 2, 5, 6, 7, 12, 16, 17, 24, 33, 47, 48)


def launched(rows: int, tp: int, kind: str, **sizes: int) -> Run:
    run = Run(make(rows, tp, kind, **sizes), Device("gfx950", ranks=tp))
    run.launch()
    return run


@pytest.fixture(scope="module")
def one_row() -> Run:
    return launched(1, 2, "random")


def test_one_row(one_row: Run) -> None:
    compare.check_run(one_row)


@pytest.mark.parametrize("rows, tp, kind", [(6, 4, "same")])
def test_six_rows(rows: int, tp: int, kind: str) -> None:
    compare.check_run(launched(rows, tp, kind))


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("rows", ROWS)
def test_row_counts(rows: int, tp: int) -> None:
    """Few experts where there are many rows, so that the reference ends in minutes."""
    compare.check_run(launched(rows, tp, "random" if rows <= 7 else "few"))


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "random"])
def test_routing_and_values(kind: str) -> None:
    compare.check_run(launched(6, 2, kind))


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "rows, tp, kind", [(1, 4, "random"), (5, 2, "random"), (6, 4, "tied"), (17, 2, "few")]
)
def test_draft_layers(rows: int, tp: int, kind: str) -> None:
    compare.check_run(launched(rows, tp, kind, **DRAFT))


def test_ties_go_to_the_lowest_expert() -> None:
    """What "tied" and "tied-groups" ask of the choice, by the reference that judges the launch."""
    for kind, rows in (("tied", 2), ("tied-groups", 2)):
        case = make(rows, 2, kind)
        logits = modules().reference.router_logits(case.normed(), case.router["gate_weight"])
        picks = modules().reference.choose(logits, case.router["gate_bias"], case.picks).experts
        if kind == "tied":
            assert picks.tolist() == [list(range(case.picks))] * rows
        else:  # a run of the best group, and the lowest of its next one, which has its equals in one lane
            lane = case.experts // 64
            for p in picks.tolist():
                assert p[:5] == list(range(p[0], p[0] + 5)) and p[0] < 40 and p[5] == p[0] + 40
                assert p[5] // lane == (p[5] + 1) // lane


GARBAGE = (float("nan"), float("inf"), -float("inf"))


@pytest.mark.parametrize("rows, tp, kind, padded", [(6, 4, "same", [1, 4, 5])])
def test_garbage_rows_are_inert(rows: int, tp: int, kind: str, padded: list[int]) -> None:
    """Rows of padding hold anything; the others' results are as good as ever."""
    case = make(rows, tp, kind)
    for row, value in zip(padded, GARBAGE, strict=True):
        case = case.with_rows(
            [row], partial=value, residual_in=value, post_in=value, comb_in=value, pre_in=value
        )
    run = Run(case, Device("gfx950", ranks=tp))
    run.launch()
    compare.check_run(run, [row for row in range(rows) if row not in padded])


@full
@pytest.mark.timeout(3600)
def test_garbage_rows_are_inert_among_published_rows() -> None:
    test_garbage_rows_are_inert(17, 2, "few", [0, 7, 16])


def test_later_launches_give_the_same_bits(one_row: Run) -> None:
    first = one_row.outputs()
    for _ in range(2):
        one_row.launch()
        assert same(one_row.outputs(), first) == []


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rows, tp", [(6, 4), (48, 2)])
def test_later_launches_give_the_same_bits_with_more_rows(rows: int, tp: int) -> None:
    test_later_launches_give_the_same_bits(launched(rows, tp, "few"))


# ---- the comparison can fail
def test_a_routed_scale_off_by_three_percent_fails(one_row: Run) -> None:
    scaling = modules().geometry.ROUTED_SCALING
    got = one_row.ranks[0]["out"].double()
    for factor, holds in ((1.0, True), (1.03, False), (0.97, False)):
        want = compare.whole_launch(one_row, modules().reference.VLLM, scaling=scaling * factor)
        assert compare.BOUNDS["launch"].holds(compare.Error.of(got, want)) == holds


@pytest.mark.parametrize(
    "stage", ["residual_out", "collapsed", "seam_sums", "logits", "intermediate", "moe", "out"]
)
def test_a_wrong_word_fails_its_stage(one_row: Run, stage: str) -> None:
    """One word of each region changed: the comparison names the stage that wrote it."""
    names = {"residual_out": "residual", "moe": "partial"}
    if stage.endswith("out"):
        memory = one_row.ranks[0][stage].view(torch.int32)
        at = (0, *[0] * (memory.dim() - 2), 700)
    else:
        layout, memory = (
            (one_row.symmetric, one_row.peers[0])
            if stage == "moe"
            else (one_row.workspace, one_row.ranks[0]["workspace"])
        )
        memory, at = memory.view(torch.int32), (getattr(layout, stage).offset // 4,)
    before = memory[at].clone()
    memory[at] = before ^ 0x40400040
    try:
        errors = compare.Stages(one_row, 0).errors()
        stage = names.get(stage, stage)
        with pytest.raises(AssertionError, match=stage):
            compare.check({name: e for name, e in errors.items() if name == stage})
    finally:
        memory[at] = before
    compare.check(compare.Stages(one_row, 0).errors())
