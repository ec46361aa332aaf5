# SPDX-License-Identifier: Apache-2.0
"""The FFN launch as compiled for gfx942: resources, stages, hand-offs, and that their checks can fail.

What the architecture changes and gfx950's tests do not see: experts in row-major memory, FNUZ conversions,
rows quantised in parts, sums of half of the waves in LDS.
"""

from __future__ import annotations

import re

import pytest
import torch
from mono import compare, handoffs, scopes
from mono.case import make
from mono.handoffs import SCHEDULE_PIECES
from mono.run import Run, same
from mono.sources import MONO, PERSISTENT, Edit, assembly, compiled, mutated

from cdnasim import Device, SimulationError
from cdnasim.device import LDS_BYTES

full = pytest.mark.full
ARCH, TP = "gfx942", 4
ISA, KERNEL = f"{PERSISTENT}/isa/gfx942.py", f"{MONO}/kernels/ffn.py"
DOWN, ROUTED = f"{MONO}/stages/down.py", f"{MONO}/stages/routed_weights.py"


def launched(rows: int, kind: str, kernel: object = None, tp: int = TP, **sizes: int) -> Run:
    run = Run(make(rows, tp, kind, arch=ARCH, **sizes), Device(ARCH, ranks=tp), kernel)
    run.launch()
    return run


@pytest.fixture(scope="module")
def one_row() -> Run:
    return launched(1, "random")


# Rows in one part, in parts of one tile, in two and in three tiles, up to the most of a TP size.
ROWS = {4: (6, 12, 16, 24, 33, 42), 2: (6, 12, 16, 17, 24, 32)}
ROUTINGS = {"target": (384, 6), "draft": (128, 3)}


@pytest.mark.parametrize(
    "rows, tp, routing",
    [
        *((1, tp, "target") for tp in ROWS),
        *(pytest.param(r, tp, "target", marks=full) for tp, rows in ROWS.items() for r in rows),
        *(pytest.param(r, 2, "draft", marks=full) for r in (1, *ROWS[2])),
    ],
)
def test_no_scratch_and_a_workgroup_fits_its_compute_unit(rows: int, tp: int, routing: str) -> None:
    text = assembly(rows, tp, ARCH, *ROUTINGS[routing]).read_text()
    names = ("private_segment_fixed_size", "vgpr_spill_count", "group_segment_fixed_size", "vgpr_count")
    scratch, spills, lds, vgprs = (int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names)
    assert scratch == spills == 0
    assert 0 < lds <= LDS_BYTES[ARCH]
    assert 0 < vgprs <= 256, "two waves share a SIMD's 512"


@pytest.mark.parametrize("tp", ROWS)
def test_system_scope(tp: int) -> None:
    assert scopes.faults(assembly(1, tp, ARCH).read_text(), tp) == []


def test_one_row(one_row: Run) -> None:
    compare.check_run(one_row)


def test_one_row_at_tp_2() -> None:
    compare.check_run(launched(1, "random", tp=2))


KINDS = [
    (6, "same"),
    (6, "random"),
    (7, "few"),
    (9, "few"),
    (12, "same"),
    (24, "few"),
    (33, "few"),
    (42, "few"),
]
KINDS_TP_2 = [(6, "random"), (12, "same"), (17, "few"), (24, "few"), (32, "few")]


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "rows, kind, tp", [*((*case, TP) for case in KINDS), *((*case, 2) for case in KINDS_TP_2)]
)
def test_row_counts(rows: int, kind: str, tp: int) -> None:
    compare.check_run(launched(rows, kind, tp=tp))


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["tiny-blocks", "zero-rows", "tied", "near-tie", "distinct"])
def test_routing_and_values(kind: str) -> None:
    compare.check_run(launched(6, kind))


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rows, tp", [(1, TP), (5, TP), (17, TP), (5, 2)])
def test_draft_layers(rows: int, tp: int) -> None:
    compare.check_run(launched(rows, "few" if rows > 7 else "random", tp=tp, experts=128, picks=3))


@pytest.mark.parametrize("tp", [TP, pytest.param(2, marks=full)])
def test_hostile_memory_changes_no_bit(tp: int) -> None:
    handoffs.check(1, tp, "random", 2, arch=ARCH)


@full
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("first, count", SCHEDULE_PIECES)
@pytest.mark.parametrize("rows, tp", [(6, TP), (42, TP), (1, TP), (17, TP), (6, 2), (32, 2)])
def test_two_hundred_schedules(rows: int, tp: int, first: int, count: int) -> None:
    handoffs.check(rows, tp, "few", count, first=first, arch=ARCH)


# ---- the checks can fail
def test_negative_zeros_of_a_dense_weight_are_noticed(one_row: Run) -> None:
    """FNUZ reads OCP's -0 as a NaN: what the loader cleans."""
    want, args = one_row.outputs(), [rank["shared_w2"] for rank in one_row.ranks]
    kept = [x.clone() for x in args]
    try:
        for x in args:
            x.view(-1)[0] = 0x80
        one_row.launch()
        assert same(one_row.outputs(), want) == ["out"]
        assert torch.isnan(one_row.ranks[0]["out"].float()).any()
    finally:
        for x, before in zip(args, kept, strict=True):
            x.copy_(before)
        one_row.launch()
    assert same(one_row.outputs(), want) == []


FAULTS = {
    "rows for half their value": (Edit(ISA, "(_code(code) + 1) << 23", "_code(code) << 23"), "intermediate"),
    "a magnitude of e2m1": (Edit(ISA, "both + 0x00C00080", "both + 0x00800080"), "intermediate"),
    "products in another order than the rows'": (
        Edit(ISA, "((0, 2), (4, 6), (1, 3), (5, 7))", "((0, 1), (2, 3), (4, 5), (6, 7))"),
        "intermediate",
    ),
    "products of another K step are kept": (
        Edit(DOWN, "ctx.group == place", "ctx.group >= place"),
        "partial",
    ),
    "lane groups that are not added": (Edit(DOWN, "in (16, 32)", "in (16,)"), "partial"),
    "codes of another K step": (
        Edit(ROUTED, "select(block * HIDDEN + row", "select(self.ctx.group * HIDDEN + row"),
        "partial",
    ),
}


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name, tp", [*((name, TP) for name in FAULTS), ("a magnitude of e2m1", 2)])
def test_a_planted_fault_of_the_arithmetic_is_found(name: str, tp: int) -> None:
    edit, stage = FAULTS[name]
    run = launched(1, "random", compiled(1, tp, ARCH, overlay=mutated((edit,))), tp)
    errors = compare.Stages(run, 0).errors()
    with pytest.raises(AssertionError, match=stage):
        compare.check({stage: errors[stage]})


@full
@pytest.mark.timeout(3600)
def test_sums_that_take_the_streams_place_too_early_are_found() -> None:
    """Without the barrier between the seam's last read and the shared expert's sums."""
    barrier = Edit(
        KERNEL, 'if ctx.lds.overlap("streams", "partial"):\n        dev.barrier()', "if False:\n        pass"
    )
    with pytest.raises(SimulationError, match="lds"):
        launched(1, "random", compiled(1, TP, ARCH, overlay=mutated((barrier,))))
