# SPDX-License-Identifier: Apache-2.0
"""The attention front as compiled for gfx942: resources, stages, hand-offs, and that their checks can fail.

What the architecture changes and gfx950's tests do not see: operands whose 32 values are one block, FNUZ
conversions, rows quantised in parts, the window's records in FNUZ.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from mono import layer_compare as layers
from mono import layer_handoffs as handoffs
from mono import scopes
from mono.handoffs import SCHEDULE_PIECES
from mono.layer_case import Shape, draft, make_layer
from mono.layer_mutations import MUTATIONS, PUBLISHED, STORE, Mutation, outcome
from mono.layer_run import LayerRun, front_kernel
from mono.run import same
from mono.sources import MONO, PERSISTENT, Edit, assembly_of, mutated

from cdnasim.device import LDS_BYTES
from cdnasim.program import Kernel

full = pytest.mark.full
long = pytest.mark.timeout(3600)
# One process makes each run that several tests look at.
of_one_row = pytest.mark.xdist_group("front of one row, gfx942")
ARCH, TP = "gfx942", 4
ISA, STAGE = f"{PERSISTENT}/isa/gfx942.py", f"{MONO}/stages"
ONE = Shape(1, TP, contexts=(0,), hands_out=True, arch=ARCH)
SPREAD = (0, 3, 127, 128, 511, 700, 1024, 1500)


def launched(shape: Shape, kernel: Kernel | None = None) -> LayerRun:
    run = LayerRun(make_layer(shape), front=kernel, only_front=True)
    run.launch()
    return run


@pytest.fixture(scope="module")
def one_row() -> LayerRun:
    return launched(ONE)


# ---- resources, in what a workgroup of two waves a SIMD has
def used(text: str) -> dict[str, int]:
    names = ("private_segment_fixed_size", "vgpr_spill_count", "group_segment_fixed_size", "vgpr_count")
    return {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names}


# Rows in one part and in parts, of one, two and three tiles.
ROWS = (6, 12, 16, 24, 32, 33, 42)


@pytest.mark.parametrize(
    "rows, tp", [(1, TP), (17, TP), *(pytest.param(r, tp, marks=full) for r in ROWS for tp in (4, 2))]
)
def test_no_scratch_and_a_workgroup_fits_its_compute_unit(rows: int, tp: int) -> None:
    text = assembly_of("front", ARCH, rows=rows, tp=tp).read_text()
    numbers = used(text)
    assert numbers["private_segment_fixed_size"] == numbers["vgpr_spill_count"] == 0
    assert 0 < numbers["group_segment_fixed_size"] <= LDS_BYTES[ARCH]
    assert 0 < numbers["vgpr_count"] <= 256, "two waves share a SIMD's 512"


@pytest.mark.parametrize("rows", [1, 17, *(pytest.param(rows, marks=full) for rows in (6, 42))])
def test_scopes(rows: int) -> None:
    assert scopes.front_faults(assembly_of("front", ARCH, rows=rows, tp=TP).read_text(), TP) == []


@pytest.mark.parametrize("bits", ["sc1", scopes.SYSTEM])
def test_a_bit_that_one_store_lost_is_noticed(bits: str) -> None:
    text = assembly_of("front", ARCH, rows=1, tp=TP).read_text()
    store = rf"^\s+buffer_store_dwordx2 .*{'' if bits == scopes.SYSTEM else '[^0] '}{bits}$"
    for line in re.findall(store, text, re.MULTILINE):
        assert scopes.front_faults(text.replace(line, line.removesuffix(bits), 1), TP)


# ---- every stage
@of_one_row
def test_one_row(one_row: LayerRun) -> None:
    layers.check_front(one_row.front)


@of_one_row
def test_later_launches_give_the_same_bits(one_row: LayerRun) -> None:
    first = one_row.outputs()
    one_row.launch()
    assert same(one_row.outputs(), first) == []


def test_two_tiles_of_rows_with_padded_ones() -> None:
    """An index source's layer whose residual is settled; blocks that lie apart."""
    shape = Shape(17, TP, fold=False, hands_out=True, contexts=(3, 200, 900), padded=(3, 16), arch=ARCH)
    layers.check_front(launched(replace(shape, window_block=32, slack=48)).front)


@full
@long
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 16, 24, 33, 42])
def test_row_counts(rows: int, tp: int) -> None:
    contexts = SPREAD if rows > 8 else (125,)
    layers.check_front(launched(Shape(rows, tp, contexts=contexts, arch=ARCH)).front)


@full
@long
@pytest.mark.parametrize("rows", [6, 12, 24, 42])
@pytest.mark.parametrize("fold, hands_out", [(False, False), (False, True), (True, True)])
def test_entries_and_index_sources(rows: int, fold: bool, hands_out: bool) -> None:
    shape = Shape(rows, TP, ratio=2, fold=fold, hands_out=hands_out, contexts=(125,), arch=ARCH)
    layers.check_front(launched(shape).front)


@full
@long
@pytest.mark.parametrize("rows", [1, 5, 24, 42])
def test_draft_layers(rows: int) -> None:
    layers.check_front(launched(draft(rows, TP, contexts=(3, 700), arch=ARCH)).front)


@full
@long
@pytest.mark.parametrize("rows, padded", [(5, (2,)), (24, (0, 7, 23)), (42, tuple(range(30, 42)))])
def test_padded_rows_are_inert(rows: int, padded: tuple[int, ...]) -> None:
    shape = Shape(rows, TP, contexts=(3, 700), padded=padded, hands_out=True, arch=ARCH)
    layers.check_front(launched(shape).front)


@full
@long
@pytest.mark.parametrize("kind", ["tiny-blocks", "zero-rows"])
def test_values(kind: str) -> None:
    layers.check_front(launched(Shape(6, TP, kind=kind, fold=False, hands_out=True, arch=ARCH)).front)


# ---- hand-offs
def test_hostile_memory_changes_no_bit() -> None:
    handoffs.check(ONE, 2, only_front=True)


@full
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("first, count", SCHEDULE_PIECES)
@pytest.mark.parametrize("rows", [6, 42, 1, 17])
def test_two_hundred_schedules(rows: int, first: int, count: int) -> None:
    handoffs.check(replace(ONE, rows=rows), count, first=first, only_front=True)


# ---- the checks can fail
def failing(run: LayerRun) -> set[str]:
    """Stages of rank 0 out of their bounds."""
    return layers.failing_pairs(layers.front_pairs(run.front, 0))


@of_one_row
@pytest.mark.parametrize("weights, stages", [("wqkv", {"qkv"}), ("wq_b", {"query"})])
def test_negative_zeros_of_a_weight_are_noticed(one_row: LayerRun, weights: str, stages: set[str]) -> None:
    """FNUZ reads OCP's -0 as a NaN: what the loader cleans."""
    want = one_row.outputs()
    memory = one_row.front.ranks[0][weights].view(-1)
    before = memory[0].clone()
    try:
        memory[0] = 0x80
        one_row.launch()
        assert stages <= failing(one_row)
        assert torch.isnan(one_row.front.ranks[0]["query"].float()).any()
    finally:
        memory[0] = before
        one_row.launch()
    assert same(one_row.outputs(), want) == []


LINEAR, QKV, ACTIVATIONS = (f"{STAGE}/{name}.py" for name in ("mx_linear", "qkv_projection", "activations"))
FAULTS: dict[str, tuple[Edit, set[str]]] = {
    "e4m3 for half its value": (Edit(ISA, "(_code(code) + 1) << 23", "_code(code) << 23"), {"qkv", "query"}),
    "the k order of CDNA4 in one operand": (
        Edit(LINEAR, "ctx.group * ctx.isa.group_stride, past)", "ctx.group * 16, past)"),
        {"qkv", "query"},
    ),
    "the k order of CDNA4 in the query rank": (
        Edit(QKV, "+ half * ctx.isa.half_stride, 4)", "+ half * 64, 4)"),
        {"query"},
    ),
    "the next step's code byte": (Edit(QKV, "fx.Int32(0)), i % 4)", "fx.Int32(0)), (i + 1) % 4)"), {"query"}),
    "records with codes of OCP values": (
        Edit(ISA, "record_code_bias = 1", "record_code_bias = 0"),
        {"codes"},
    ),
    "published rows kept in the XCD's own L2": (
        Edit(PUBLISHED, STORE, STORE.replace("DEVICE", "CACHED")),
        {"scopes"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_edit_still_finds_its_place(name: str) -> None:
    mutated((FAULTS[name][0],))


@full
@long
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    edit, stages = FAULTS[name]
    kernel = front_kernel(ONE, overlay=mutated((edit,)))
    if stages == {"scopes"}:
        text = assembly_of("front", ARCH, mutated((edit,)), **ONE.front).read_text()
        assert scopes.front_faults(text, TP)
    else:
        assert stages <= failing(launched(ONE, kernel))


@full
@long
def test_rows_merged_with_another_parts_are_found() -> None:
    """17 rows are quantised in parts of eight and fewer."""
    edit = Edit(ACTIVATIONS, "x.where(ctx.row >= first_row, y)", "x.where(ctx.row > first_row, y)")
    shape = Shape(17, TP, contexts=(3,), arch=ARCH)
    assert "qkv" in failing(launched(shape, front_kernel(shape, overlay=mutated((edit,)))))


@full
@long
@pytest.mark.parametrize("mutation", [pytest.param(m, id=m.name) for m in MUTATIONS if m.launch == "front"])
def test_a_fault_of_the_launch_is_noticed(mutation: Mutation) -> None:
    """Those of gfx950, compiled for this architecture."""
    assert outcome(mutation, ARCH) is not None
