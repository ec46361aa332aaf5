# SPDX-License-Identifier: Apache-2.0
"""The attention back with the FFN half as compiled for gfx942: resources, stages, hand-offs, and that their
checks can fail.

What the architecture changes and gfx950's tests do not see: keys transposed between lanes as bytes, codes in
the weights and in parts of the scores, records of two formats, sums of the waves in parts of the dims, LDS
that the projections' sums share with the seam.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from mono import layer_compare as layers
from mono import layer_handoffs as handoffs
from mono import scopes
from mono.handoffs import SCHEDULE_PIECES
from mono.layer_case import Shape, draft, make_layer
from mono.layer_mutations import HEADS_WORD, MUTATIONS, WORD, Mutation, outcome
from mono.layer_run import BackRun, LayerRun, back_kernel
from mono.run import same
from mono.sources import MONO, PERSISTENT, Edit, assembly, assembly_of, modules, mutated

from cdnasim import SimulationError
from cdnasim.device import LDS_BYTES
from cdnasim.program import Kernel

full = pytest.mark.full
long = pytest.mark.timeout(3600)
# One process makes each run that several tests look at.
of_one_row = pytest.mark.xdist_group("layer of one row, gfx942")
ARCH, TP = "gfx942", 4
SIZES = {"tp": TP, "experts": 384, "picks": 6}
# Its token has 700 tokens before it: compressed keys, some of them absent, and a whole window.
ONE = Shape(1, TP, arch=ARCH)
SPREAD = (0, 3, 127, 128, 511, 700, 1024, 1500)


def launched(shape: Shape, back: Kernel | None = None) -> LayerRun:
    run = LayerRun(make_layer(shape).varied(), back=back)
    run.launch()
    return run


@pytest.fixture(scope="module")
def one_row() -> LayerRun:
    return launched(ONE)


def text_of(rows: int, tp: int = TP, **more: Any) -> str:
    return assembly_of("back", ARCH, **{"rows": rows, **SIZES, "tp": tp, **more}).read_text()


# ---- resources
# Heads of a task: one, two, four; rows in one part and in parts, of one, two and three tiles, up to the most
# of a TP size.
ROWS = {4: (6, 12, 16, 17, 24, 32, 33, 42), 2: (6, 12, 16, 17, 24, 32)}
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
    experts, picks = ROUTINGS[routing]
    text = text_of(rows, tp, experts=experts, picks=picks)
    names = ("private_segment_fixed_size", "vgpr_spill_count", "group_segment_fixed_size", "vgpr_count")
    scratch, spills, lds, vgprs = (int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names)
    assert scratch == spills == 0
    assert 0 < lds <= LDS_BYTES[ARCH]
    assert 0 < vgprs <= 256, "two waves share a SIMD's 512"


@pytest.mark.parametrize(
    "rows, tp",
    [(1, 4), (1, 2), *(pytest.param(*case, marks=full) for case in [(6, 4), (17, 4), (42, 4), (32, 2)])],
)
def test_scopes(rows: int, tp: int) -> None:
    assert scopes.back_faults(text_of(rows, tp), assembly(rows, tp, ARCH).read_text(), tp) == []


@pytest.mark.parametrize("bits", ["sc1", scopes.SYSTEM])
def test_a_bit_that_one_store_lost_is_noticed(bits: str) -> None:
    text, ffn = text_of(1), assembly(1, TP, ARCH).read_text()
    store = rf"^\s+buffer_store_dwordx2 .*{'' if bits == scopes.SYSTEM else '[^0] '}{bits}$"
    lines = re.findall(store, text, re.MULTILINE)
    assert lines
    for line in lines:
        assert scopes.back_faults(text.replace(line, line.removesuffix(bits), 1), ffn, TP)


# ---- every stage
@of_one_row
def test_one_row(one_row: LayerRun) -> None:
    """The whole layer."""
    layers.check_layer(one_row)


def test_one_row_at_tp_2() -> None:
    layers.check_layer(launched(replace(ONE, tp=2)))


@full
@of_one_row
def test_later_launches_give_the_same_bits(one_row: LayerRun) -> None:
    first = one_row.outputs()
    one_row.launch()
    assert same(one_row.outputs(), first) == []


@full
@long
@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize(
    "rows, tp", [*((rows, 4) for rows in (1, 6, 12, 24, 42)), *((rows, 2) for rows in (1, 6, 12, 24, 32))]
)
def test_row_counts(rows: int, tp: int, ratio: int) -> None:
    contexts = SPREAD if rows > 8 else (1100,)
    layers.check_layer(launched(Shape(rows, tp, ratio, contexts=contexts, kind="few", arch=ARCH)))


@full
@long
@pytest.mark.parametrize(
    "rows, tp", [*((rows, 4) for rows in (7, 16, 17, 32, 33)), *((rows, 2) for rows in (8, 9, 16, 17))]
)
def test_rows_beside_those_of_a_tile(rows: int, tp: int) -> None:
    layers.check_layer(launched(Shape(rows, tp, contexts=SPREAD, kind="few", arch=ARCH)))


@full
@long
@pytest.mark.parametrize("window_block", [32, 64, 128])
@pytest.mark.parametrize("compressed_block, slack", [(32, 0), (64, 16), (128, 4096)])
def test_cache_layouts(window_block: int, compressed_block: int, slack: int) -> None:
    shape = Shape(6, TP, ratio=1, contexts=(3, 1100), kind="same", arch=ARCH)
    layers.check_layer(
        launched(replace(shape, window_block=window_block, compressed_block=compressed_block, slack=slack))
    )


@full
@long
@pytest.mark.parametrize("rows, tp", [(1, 4), (5, 4), (24, 4), (42, 4), (5, 2), (32, 2)])
def test_draft_layers(rows: int, tp: int) -> None:
    contexts = SPREAD if rows > 8 else (700,)
    layers.check_layer(launched(draft(rows, tp, contexts=contexts, kind="few", arch=ARCH)))


@full
@long
@pytest.mark.parametrize(
    "rows, tp, ratio, padded",
    [
        (5, 4, 2, (2,)),
        (17, 4, 1, (0, 7, 16)),
        (42, 4, 2, tuple(range(30, 42))),
        (32, 2, 2, tuple(range(24, 32))),
    ],
)
def test_padded_rows_are_inert(rows: int, tp: int, ratio: int, padded: tuple[int, ...]) -> None:
    """Of an index source's layer, where the ratio is 2."""
    shape = Shape(rows, tp, ratio, contexts=SPREAD, padded=padded, kind="few", hands_out=ratio == 2)
    layers.check_layer(launched(replace(shape, arch=ARCH)))


# ---- hand-offs
@pytest.mark.parametrize("tp", [TP, pytest.param(2, marks=full)])
def test_hostile_memory_changes_no_bit(tp: int) -> None:
    handoffs.check(replace(ONE, tp=tp, contexts=(0,)), 2)


@full
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("first, count", SCHEDULE_PIECES)
@pytest.mark.parametrize("rows, tp", [(6, 4), (42, 4), (1, 4), (17, 4), (6, 2), (32, 2)])
def test_two_hundred_schedules(rows: int, tp: int, first: int, count: int) -> None:
    shape = Shape(rows, tp, contexts=(3, 700), kind="few", hands_out=rows > 1, arch=ARCH)
    handoffs.check(shape, count, first=first)


# ---- the checks can fail
def failing(run: BackRun) -> set[str]:
    """The attention's stages of rank 0 out of their bounds."""
    return layers.failing_pairs(layers.back_pairs(run, 0))


@of_one_row
@pytest.mark.parametrize("weights, stage", [pytest.param("wo_a", "ranks", marks=full), ("wo_b", "wo_b")])
def test_negative_zeros_of_a_weight_are_noticed(one_row: LayerRun, weights: str, stage: str) -> None:
    """FNUZ reads OCP's -0 as a NaN: what the loader cleans."""
    want, memory = one_row.outputs(), one_row.back.ranks[0][weights].view(-1)
    before = memory[0].clone()
    try:
        memory[0] = 0x80
        one_row.back.launch()
        assert stage in failing(one_row.back)
    finally:
        memory[0] = before
        one_row.back.launch()
    assert same(one_row.outputs(), want) == []


@of_one_row
def test_the_caches_hold_what_the_architecture_changes(one_row: LayerRun) -> None:
    """-0 in compressed records, and records of two formats with codes of their own."""
    att, case = modules().attention, one_row.case
    window, compressed = case.slots(0)
    raw = case.compressed.read(compressed).data[:, : modules().geometry.POSITION_FREE]
    assert (raw == 0x80).any(1).all()
    assert (case.window.fp8, case.compressed.fp8) == (att.FNUZ, att.OCP)
    assert not (case.window.read(window).data[:, : modules().geometry.POSITION_FREE] == 0x80).any()
    assert len(compressed) < modules().geometry.SELECTED, "no key is absent"


STAGE = f"{MONO}/stages"
QUADS, KEYS = f"{PERSISTENT}/quads.py", f"{STAGE}/key_tiles.py"
ATTENTION, LINEAR = f"{STAGE}/sparse_attention.py", f"{STAGE}/mx_linear.py"
PROJECTION = f"{STAGE}/output_projection.py"
BYTES = "word = dev.permute_bytes(dev.quad_xor(word, 1), word, self._bytes)"
PLANTED: dict[str, tuple[Edit, str]] = {
    "bytes from the wrong neighbour": (Edit(QUADS, BYTES, BYTES.replace(", 1)", ", 2)")), "attended"),
    "bytes in the order of the other lanes": (
        Edit(QUADS, "_BYTES = (0x06020400, 0x03070105)", "_BYTES = (0x06020400, 0x07030501)"),
        "attended",
    ),
    "rotary dims from the wrong neighbour": (
        Edit(QUADS, "select(dev.quad_xor(high, 2), low)", "select(dev.quad_xor(high, 1), low)"),
        "attended",
    ),
    "-0 as it is": (Edit(KEYS, "[m.clear_negative_zeros(x) for x in words]", "words"), "attended"),
    "compressed bytes for half their value": (
        Edit(KEYS, "fx.Float32(2.0**bias)", "fx.Float32(1.0)"),
        "attended",
    ),
    "window bytes for twice their value": (
        Edit(KEYS, "fx.Float32(2.0**bias), fx.Float32(1.0)", "fx.Float32(2.0), fx.Float32(2.0)"),
        "attended",
    ),
    "another key's scale in the scores": (
        Edit(KEYS, "scale = [dev.quad_lane(key.scales[block], i)",
             "scale = [dev.quad_lane(key.scales[block], i ^ 1)"),
        "attended",
    ),
    "another key's scale in the sums": (
        Edit(KEYS, "exact[i] * dev.quad_lane(key.scales[block], i)",
             "exact[i] * dev.quad_lane(key.scales[block], i ^ 1)"),
        "attended",
    ),
    "another group's absent keys": (
        Edit(KEYS, "dev.row_lanes(key.valid, self.ctx.lane)",
             "dev.row_lanes(key.valid, self.ctx.lane ^ 16)"),
        "attended",
    ),
    "a quarter of the dims left out of the scores": (
        Edit(KEYS, "dev.quads_sum(score[i]) for i", "score[i] * 4.0 for i"), "attended"
    ),
    "wo_a's rows in the k order of CDNA4": (
        Edit(PROJECTION, "first * K_STEP + ctx.group * ctx.isa.group_stride",
             "first * K_STEP + ctx.group * 16"),
        "ranks",
    ),
    "wo_b's rows in the k order of CDNA4": (
        Edit(LINEAR, "k = step * K_STEP + half * ctx.isa.half_stride + ctx.group * ctx.isa.group_stride",
             "k = step * K_STEP + half * 64 + ctx.group * 16"),
        "wo_b",
    ),
    "a code of half a block": (
        Edit(LINEAR, "m.mx_code(m.largest_of_pairs(pairs))", "m.mx_code(m.largest_of_pairs(pairs[:8]))"),
        "wo_b",
    ),
}  # fmt: skip
LOST = {
    "heads": Edit(
        ATTENTION,
        "ctx.work.store(at, dev.vector_i32(words), dev.DEVICE)",
        "ctx.work.store(at, dev.vector_i32(words), dev.CACHED)",
    ),
    "words of heads": Edit(ATTENTION, HEADS_WORD, HEADS_WORD.replace("DEVICE", "CACHED")),
    "words of published rows": Edit(
        f"{STAGE}/published.py", WORD, WORD.replace("DEVICE", "CACHED")
    ),
    "an acquire of heads": Edit(
        PROJECTION, "        dev.acquire()\n        for tile, (codes, at)", "        for tile, (codes, at)"
    ),
}  # fmt: skip
# With four heads a task, whose sums LDS has not room for at once.
TWO_TURNS = {
    tp: Shape(rows, tp, ratio=0, contexts=(200,), kind="few", arch=ARCH) for tp, rows in ((4, 33), (2, 24))
}
LATER = "                if turn:\n                    dev.barrier()\n"
TURNS = {
    "the first turn's dims twice": Edit(
        ATTENTION, "range(turn * width, (turn + 1) * width)", "range(0, width)"
    ),
    "sums of the next turn before these are read": Edit(ATTENTION, LATER, ""),
    "projections' sums in the seam's place": Edit(
        PROJECTION, "leave(ctx, acc, sums=ctx.lds.projection)", "leave(ctx, acc)"
    ),
}


def test_each_edit_still_finds_its_place() -> None:
    for edit in [*(edit for edit, _ in PLANTED.values()), *LOST.values()]:
        mutated((edit,))


@full
@long
@of_one_row
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(one_row: LayerRun, name: str) -> None:
    edit, stage = PLANTED[name]
    run = BackRun(one_row.front, back_kernel(ONE, overlay=mutated((edit,))))
    run.launch()
    assert {stage, f"{stage} excess"} & failing(run)


@full
@pytest.mark.parametrize("name", LOST)
def test_a_scope_that_the_source_lost_is_noticed(name: str) -> None:
    overlay = mutated((LOST[name],))
    text = assembly_of("back", ARCH, overlay, rows=1, **SIZES).read_text()
    assert scopes.back_faults(text, assembly(1, TP, ARCH).read_text(), TP)


@full
@long
@pytest.mark.parametrize("name, tp", [*((name, TP) for name in TURNS), ("the first turn's dims twice", 2)])
def test_a_fault_of_what_shares_lds_is_found(name: str, tp: int) -> None:
    kernel = back_kernel(TWO_TURNS[tp], overlay=mutated((TURNS[name],)))
    with pytest.raises((AssertionError, SimulationError)):
        layers.check_back(launched(TWO_TURNS[tp], kernel).back, [0], whole=False)


@full
@long
@pytest.mark.parametrize("mutation", [pytest.param(m, id=m.name) for m in MUTATIONS if m.launch == "back"])
def test_a_fault_of_the_launch_is_noticed(mutation: Mutation) -> None:
    """Those of gfx950, compiled for this architecture."""
    assert outcome(mutation, ARCH) is not None
