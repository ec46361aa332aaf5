# SPDX-License-Identifier: Apache-2.0
"""The launches' memory: a rank's symmetric memory, its workspace, a workgroup's LDS."""

from __future__ import annotations

from vllm.models.common.amd.persistent.handoff import CONTROL_BYTES, mailbox
from vllm.models.common.amd.persistent.regions import Layout, Overlap, Region

from .geometry import (
    GROUP_K,
    HEAD_DIM,
    HIDDEN,
    K_STEP,
    MIXES,
    QKV,
    QUERY_RANK,
    ROW_PARTS,
    SELECTED,
    STREAMS,
    TILE,
    WAVES,
    WINDOW,
    WORKGROUPS,
    BackGeometry,
    FfnGeometry,
    FrontGeometry,
)

# Mixes of a seam, and the residual's sum of squares.
SEAM_SUMS = MIXES + 1
NO_SLOT = 0xFF
# Codes of one lane: a byte for each 128 k of its wave.
CODE_BYTES = 8
# A row of operands starts four banks after the one before.
OPERAND_ROW = HIDDEN + 16


def symmetric(g: FfnGeometry) -> Layout:
    """What peers write: the control block, and the two all-reduces' mailboxes by source rank."""
    exchange = (g.tp, WORKGROUPS, g.rows * g.pairs)
    return Layout(
        [
            Region("control", (CONTROL_BYTES,), 1),
            mailbox("attention", *exchange),
            mailbox("moe", *exchange),
        ]
    )


def workspace(g: FfnGeometry) -> Layout:
    """Mailboxes between a rank's workgroups."""
    return Layout([*_ffn_workspace(g), *_timeline(g)])


def _timeline(g: FfnGeometry) -> list[Region]:
    """Clocks of each workgroup, in a timeline build."""
    return [Region("timeline", (WORKGROUPS, len(g.stamps)), 8)] if g.timeline else []


def _ffn_workspace(g: FfnGeometry) -> list[Region]:
    return [
        Region("collapsed", (g.rows, HIDDEN // 2), 4),
        mailbox("collapsed_ready", WORKGROUPS),
        mailbox("seam_sums", g.rows, SEAM_SUMS, WORKGROUPS),
        mailbox("logits", g.rows, g.experts),
        Region("intermediate", (g.rows, g.slots, g.share), 1),
        # The word of block 4 step + group: its code in the aux bits. Two words are one load.
        mailbox("blocks_ready", g.rows, g.slots, 4, -(-g.down_steps // 2) * 2),
    ]


def lds(g: FfnGeometry, num_bytes: int = 160 * 1024) -> Layout:
    """LDS of a workgroup that has ``num_bytes``: the roomy layout, or the compact one with as many rows
    quantised at once as fit.

    Raises:
        ValueError: the geometry does not fit.
    """
    layouts = [Layout(_ffn_lds(g)), *(Layout(_compact_ffn_lds(g, rows)) for rows in _rows_at_once(g))]
    return _first_that_fits("an FFN launch", g, layouts, num_bytes)


def _rows_at_once(g: FfnGeometry) -> list[int]:
    """Rows that may be quantised at once, the most first. The waves take four at once, so parts are of whole
    rounds of them."""
    most = min(g.rows, TILE)
    return [most, *(rows for rows in (12, 8, 4) if rows < most)]


def _first_that_fits(what: str, g: FfnGeometry, layouts: list[Layout], num_bytes: int) -> Layout:
    for layout in layouts:
        if layout.size <= num_bytes:
            return layout
    raise ValueError(
        f"{what} of {g.rows} rows at TP {g.tp} needs {layouts[-1].size} bytes of LDS, a workgroup has "
        f"{num_bytes}: take fewer rows a step"
    )


def _ffn_lds(g: FfnGeometry, *before: Region) -> list[Region | Overlap]:
    """``before``: regions that are read for the last time before rows are quantised."""
    return [
        Overlap(
            (
                (_partial(g, "partial"),),
                *((region,) for region in before),
                (Region("router_sums", (WAVES, 4 * g.row_tiles, 64, 4), 4),),
                # Operands on their way to registers.
                _operand_lds(min(g.rows, TILE)),
            )
        ),
        *_seam_lds(g),
        *_pick_lds(g),
        *_active_lds(g),
        Region("index_of", (g.experts,), 4),
    ]


def _partial(g: FfnGeometry, name: str) -> Region:
    """Partial sums of the waves: gate/up is the largest user (four tiles of 16 outputs). With one tile of
    rows there are two sets, for turns that overlap."""
    return Region(name, (1 + (g.row_tiles == 1), WAVES, 4 * g.row_tiles, 64, 4), 4)


def _compact_ffn_lds(g: FfnGeometry, rows_at_once: int, *before: Region) -> list[Region | Overlap]:
    """What the launch needs until the seam's sums are sent, and what it needs from then on, share their
    place; so do sums of half of the waves each (``stages/wave_sums.py``). ``before``: as in ``_ffn_lds``."""
    router = (Region("router_sums", (WAVES, g.row_tiles, 64, 4), 4),)
    seam: tuple[Region | Overlap, ...] = (
        *_seam_lds(g),
        Overlap((router, _operand_lds(rows_at_once), *((region,) for region in before))),
    )
    sums = Region("partial", (1 + (g.row_tiles == 1), WAVES // 2, 4 * g.row_tiles, 64, 4), 4)
    # The index is read before the first of the routed experts' sums.
    experts: tuple[Region | Overlap, ...] = (
        Overlap(((sums,), (Region("index_of", (g.experts,), 4),))),
        *_active_lds(g),
    )
    return [Overlap((seam, experts)), *_pick_lds(g)]


def _operand_lds(rows: int) -> tuple[Region, ...]:
    """Rows as matrix operands, and their codes."""
    return (
        Region("activations", (rows, OPERAND_ROW), 1),
        Region("codes", (rows, WAVES, 4, CODE_BYTES), 1),
    )


def _pick_lds(g: FfnGeometry) -> list[Region]:
    return [
        Region("pick_expert", (g.rows, g.picks), 4),
        Region("pick_weight", (g.rows, g.picks), 4),
        Region("active_bits", (g.experts // 32,), 4),
    ]


def _active_lds(g: FfnGeometry) -> list[Region]:
    return [
        Region("active", (g.max_active,), 4),
        # Slot of an active expert for a row; NO_SLOT if the row has not picked it.
        Region("slot_of", (g.max_active, g.row_tiles * TILE), 1),
    ]


def _seam_lds(g: FfnGeometry) -> list[Region]:
    """What a seam and the normalisation behind it keep."""
    return [
        Region("norm", (HIDDEN // 2,), 4),
        Region("streams", (g.rows, STREAMS, g.columns), 4),
        # A row of weights starts four banks after the one before.
        Region("mix_weights", (MIXES, STREAMS * g.columns + 4), 4),
        Region("squares", (g.rows, ROW_PARTS), 4),
        Region("mixes", (32,), 4),
    ]


# ---- the attention front
def front_symmetric(_: FrontGeometry) -> Layout:
    """The control block alone: no rank waits for another."""
    return Layout([Region("control", (CONTROL_BYTES,), 1)])


def front_workspace(g: FrontGeometry) -> Layout:
    """Between a rank's workgroups."""
    return Layout(
        [
            Region("collapsed", (g.rows, HIDDEN // 2), 4),
            mailbox("collapsed_ready", WORKGROUPS),
            mailbox("seam_sums", g.rows, SEAM_SUMS, WORKGROUPS),
            # The first projection's outputs, bf16: the query rank, then the key.
            Region("qkv", (g.rows, QKV // 2), 4),
            mailbox("qkv_ready", g.qkv_workgroups),
            *_timeline(g),
        ]
    )


def front_lds(g: FrontGeometry, num_bytes: int = 160 * 1024) -> Layout:
    """LDS of a workgroup that has ``num_bytes``, with as many rows quantised at once as fit.

    Raises:
        ValueError: the geometry does not fit.
    """
    layouts = [Layout(_front_lds(g, rows)) for rows in _rows_at_once(g)]
    return _first_that_fits("an attention front", g, layouts, num_bytes)


def _front_lds(g: FrontGeometry, rows_at_once: int) -> list[Region | Overlap]:
    return [
        Overlap(
            (
                (Region("partial", (1, WAVES, g.row_tiles, 64, 4), 4),),
                _operand_lds(rows_at_once),
                _query_operand_lds(g, rows_at_once),
            )
        ),
        *_seam_lds(g),
        Region("query_norm", (QUERY_RANK // 2,), 4),
        Region("query_squares", (min(g.rows, TILE), 5), 4),
    ]


def _query_operand_lds(g: FrontGeometry, rows_at_once: int) -> tuple[Region, ...]:
    """The query rank as operands, a row four banks after the one before, and codes by K step's part of the
    waves. A lane reads its codes in whole words, which hold bytes of steps that it has not: they are not
    used, and lie where a row of activations was stored, behind the operands or else before them."""
    rows = min(g.rows, TILE)
    operands = Region("query_operands", (rows, QUERY_RANK + 16), 1)
    codes = Region("query_codes", (rows, 4, g.query_parts, CODE_BYTES), 1)
    row, place = divmod(Layout([operands, codes]).query_codes.offset, OPERAND_ROW)
    fits = row < rows_at_once and place + codes.size <= HIDDEN
    return (operands, codes) if fits else (codes, operands)


# ---- the attention back
def back_symmetric(g: BackGeometry) -> Layout:
    """As the FFN launch's."""
    return symmetric(g)


def back_workspace(g: BackGeometry) -> Layout:
    """The attention's, and the FFN's."""
    return Layout(
        [
            # Heads' outputs, e4m3. The word of block 4 step + group of an output group, its code in the aux
            # bits.
            Region("attended", (g.rows, g.heads * HEAD_DIM), 1),
            mailbox("attended_ready", g.rows, g.groups, 4, GROUP_K // K_STEP),
            # What invalid keys read; nobody writes it.
            Region("zeros", (1024,), 1),
            # wo_a's outputs, bf16.
            Region("ranks", (g.rows, g.rank_columns // 2), 4),
            mailbox("ranks_ready", WORKGROUPS),
            *_ffn_workspace(g),
            *_timeline(g),
        ]
    )


# A row of values in LDS starts eight banks after the one before.
VALUE_ROW = HEAD_DIM + 16


def back_lds(g: BackGeometry, num_bytes: int = 160 * 1024) -> Layout:
    """LDS of a workgroup that has ``num_bytes``: the attention's first, then the FFN half's in its place.
    Roomy, the attention's has a tile of values a wave; compact, it has none, and the waves' sums of a part of
    the dims at a time, the largest that fits.

    Raises:
        ValueError: the geometry does not fit.
    """
    # A tile of keys a wave, bf16; then, in its place, a wave's sums of its keys, f32 by head.
    values = Region("values", (WAVES, TILE, VALUE_ROW), 2)
    in_place = Region("sums", (WAVES, TILE * VALUE_ROW // 2), 4)
    roomy: tuple[Region | Overlap, ...] = (Overlap(((values,), (in_place,))), *_attention_lds(g))
    layouts = [Layout([Overlap((roomy, tuple(_ffn_lds(g, _partial(g, "projection")))))])]
    # wo_a's sums, and wo_b's of its two tiles of outputs.
    projection = Region("projection", (1, WAVES // 2, 2 * g.row_tiles, 64, 4), 4)
    for rounds in (1, 2, 4):
        sums = Region("sums", (WAVES, g.task_heads * HEAD_DIM // rounds), 4)
        attention: tuple[Region | Overlap, ...] = (sums, *_attention_lds(g))
        layouts += [
            Layout([Overlap((attention, tuple(_compact_ffn_lds(g, rows, projection))))])
            for rows in _rows_at_once(g)
        ]
    return _first_that_fits("an attention back", g, layouts, num_bytes)


def _attention_lds(g: BackGeometry) -> tuple[Region, ...]:
    return (
        Region("query", (g.task_heads, VALUE_ROW), 2),
        # Addresses of a key's data and of its codes.
        Region("keys", (SELECTED + 2 * WINDOW, 4), 4),
        # Largest score and sum of weights of a wave's keys, by head.
        Region("softmax", (WAVES, g.task_heads, 2), 4),
    )
