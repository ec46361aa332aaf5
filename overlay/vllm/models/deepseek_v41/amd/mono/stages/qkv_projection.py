# SPDX-License-Identifier: Apache-2.0
"""The attention's projections: the query rank and the key, and the query from its rank.

Inputs: the normalised rows as operands; in the query projection, the published query rank. Outputs: ``qkv``,
bf16 [rows, 1280 + 512] in the workspace, published; the query with its rotary, bf16 [rows, heads, 512].

Work split: a workgroup does 8 outputs of the first projection, its waves divide the hidden size; and 32 or 64
outputs of the second, waves taking tiles of 16 outputs and, within a tile, K steps in turn. Both add through
LDS.

Numerics: fp32 sums rounded to bf16; RMSNorm of the query rank in fp32, rounded to bf16; one E8M0 code per 32
of it, e4m3 rounded to nearest even; the rotary in fp32 on the rounded query, rounded to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.isa.base import Code

from ..geometry import (
    HEAD_DIM,
    HIDDEN,
    K_STEP,
    NORM_EPSILON,
    POSITION_FREE,
    QKV,
    QUERY_RANK,
    ROTARY,
    THREADS,
    TILE,
    WAVES,
)
from .activations import HALVES, Normed, Operand
from .context import Context
from .mx_linear import MxLinear, publish_outputs, zeros
from .published import PublishedRows
from .wave_sums import add_waves, leave

_STEPS = QUERY_RANK // K_STEP
_HALF = 32  # lanes of half a wave
_HALVES = THREADS // _HALF
_PARTS = QUERY_RANK // (_HALF * 8)  # of half a wave in a row


@dataclass
class _Eighth:
    """Eight neighbours of a row: row of the tile, part of the row, index of the eight in the row."""

    there: Any
    row: Any
    part: Any
    eight: Any

    @classmethod
    def of(cls, ctx: Context, unit: Any, rows: int) -> _Eighth:
        """Those of this lane in ``unit``; the first row's where the unit is past the last row."""
        there = unit < rows * _PARTS
        unit = there.select(unit, fx.Int32(0))
        part = unit % _PARTS
        return cls(there, unit // _PARTS, part, part * _HALF + ctx.lane % _HALF)


def rotated(cos: Any, sin: Any, even: Any, odd: Any) -> tuple[Any, Any]:
    """A pair of values turned by an angle."""
    return even * cos - odd * sin, even * sin + odd * cos


class QkvProjection:
    """Outputs 8 w .. 8 w + 7 of workgroup w."""

    def __init__(self, ctx: Context, rows: PublishedRows) -> None:
        self.ctx, self.rows = ctx, rows
        g = ctx.geometry
        self._there = ctx.workgroup < g.qkv_workgroups
        self._first = ctx.workgroup * g.qkv_outputs

    def load(self) -> None:
        """Begin to load this wave's weights, which depend on nothing."""
        ctx, g = self.ctx, self.ctx.geometry
        linear = MxLinear(ctx, ctx.args.wqkv, ctx.args.wqkv_scale, QKV, HIDDEN)
        has = self._there & (ctx.row < g.qkv_outputs)
        self._weights = [
            linear.operand(self._first + ctx.row, has, ctx.wave + step * WAVES)
            for step in range(ctx.hidden_steps)
        ]

    def run(self, operands: list[list[Operand]]) -> None:
        """``operands[tile of rows][128 k]``. Two barriers."""
        ctx = self.ctx
        acc = zeros(ctx.geometry.row_tiles)
        for step, w in enumerate(self._weights):
            for tile, rows in enumerate(operands):
                x = rows[step]
                acc[tile] = ctx.isa.mfma_fp8(w.words, w.code, x.words, x.code, acc[tile])
        leave(ctx, acc)
        publish_outputs(ctx, self.rows, self._first, ctx.geometry.qkv_outputs, self._there)


class QueryProjection:
    """The query of this workgroup's outputs."""

    def __init__(self, ctx: Context, rows: PublishedRows) -> None:
        self.ctx, self.rows = ctx, rows
        g = ctx.geometry
        outputs = g.query_tiles * TILE
        self._tile, self._part = ctx.wave % g.query_tiles, ctx.wave // g.query_tiles
        self._first = ctx.workgroup * outputs
        self._mine = [self._part + i * g.query_parts for i in range(g.query_steps)]

    def load_norm(self) -> None:
        """Copy the norm's weights to LDS; visible after a barrier."""
        ctx = self.ctx

        @dev.when(ctx.thread < QUERY_RANK // 8)
        def _() -> None:
            weights = dev.Buffer(ctx.args.query_norm).load(ctx.thread * 16, 4)
            ctx.shared.store(ctx.lds.query_norm.at(ctx.thread * 4), weights)

        assert QUERY_RANK // 8 <= THREADS

    def load(self) -> None:
        """Begin to load this wave's weights, which depend on nothing."""
        ctx, g = self.ctx, self.ctx.geometry
        linear = MxLinear(ctx, ctx.args.wq_b, ctx.args.wq_b_scale, g.heads * HEAD_DIM, QUERY_RANK)
        output = self._first + self._tile * TILE + ctx.row
        self._weights = [linear.operand(output, step < _STEPS, step) for step in self._mine]

    def run(self) -> None:
        """Wait for the query rank, normalise, quantise and multiply it, turn and store the query."""
        ctx, g = self.ctx, self.ctx.geometry
        self.rows.wait(g.query_workgroups)
        acc = []
        for tile in range(g.row_tiles):
            self._quantise(tile)
            dev.barrier()
            acc.append(self._multiply(tile))
            # The next tile, or the sums, take the operands' place.
            dev.barrier()
        leave(ctx, acc)
        dev.barrier()
        self._finish()

    # ---- the query rank as operands, in LDS
    def _quantise(self, tile: int) -> None:
        """Half a wave takes 256 neighbours of a row, a lane eight of them. One barrier."""
        ctx, g, lds = self.ctx, self.ctx.geometry, self.ctx.lds
        rows = min(TILE, g.rows - tile * TILE)
        half = ctx.thread // _HALF
        places = [
            _Eighth.of(ctx, half + turn * _HALVES, rows) for turn in range(-(-rows * _PARTS // _HALVES))
        ]
        loaded = []
        for place in places:
            at = self.rows.rows.at(place.row + tile * TILE, place.eight * 4)
            words = ctx.work.load(place.there.select(at, fx.Int32(dev.PAST_END)), 4)
            loaded.append([words[i] for i in range(4)])
            squares = fx.Float32(0.0)
            for word in loaded[-1]:
                squares = ctx.isa.dot_bf16(word, word, squares)
            squares = dev.half_wave_sum(squares)

            @dev.when(place.there & (ctx.lane % _HALF == 0))
            def _(place: Any = place, squares: Any = squares) -> None:
                ctx.shared.store(lds.query_squares.at(place.row, place.part), squares)

        dev.barrier()
        for place, words in zip(places, loaded, strict=True):
            self._store_operand(place, words, tile)
            ctx.fence()

    def _store_operand(self, place: _Eighth, words: list[Any], tile: int) -> None:
        ctx, g, lds = self.ctx, self.ctx.geometry, self.ctx.lds
        total = fx.Float32(0.0)
        for part in range(_PARTS):
            total = total + dev.bits_f32(ctx.shared.load(lds.query_squares.at(place.row, part)))
        rstd = m.reciprocal_sqrt(total * (1.0 / QUERY_RANK) + NORM_EPSILON)
        weights = ctx.shared.load(lds.query_norm.at(place.eight * 4), 4)
        floats = [x for i in range(4) for x in m.unpack_bf16(weights[i])]
        normed = Normed.of(ctx.isa, words, rstd, floats)
        packed, code = normed.quantise(ctx.isa)
        block = place.eight // 4  # of 32 values
        step, group = block // 4, block % 4

        @dev.when(place.there)
        def _() -> None:
            ctx.shared.store(lds.query_operands.at(place.row, place.eight * 8), packed)

            @dev.when(ctx.lane % 4 == 0)
            def _() -> None:
                where = lds.query_codes.at(place.row, group, step % g.query_parts, step // g.query_parts)
                ctx.shared.store_byte(where, code)

        # One workgroup a tile of rows stores what an index source's indexer reads.
        @dev.when((ctx.args.query_rank_out != 0) & (ctx.workgroup == tile) & place.there)
        def _() -> None:
            at = (place.row + tile * TILE) * (QUERY_RANK * 2) + place.eight * 16
            dev.Buffer(ctx.args.query_rank_out).store(at, dev.vector_i32(normed.pairs))

    def _multiply(self, tile: int) -> Any:
        """Lanes without a row read the last row's operands; nothing of theirs is stored."""
        ctx, g, lds = self.ctx, self.ctx.geometry, self.ctx.lds
        row = fx.min(ctx.row, fx.Int32(min(TILE, g.rows - tile * TILE) - 1))
        codes_at = lds.query_codes.at(row, ctx.group, self._part)
        codes = [ctx.shared.load(codes_at + 4 * i) for i in range(-(-g.query_steps // 4))]
        (acc,) = zeros(1)
        for i, (step, w) in enumerate(zip(self._mine, self._weights, strict=True)):
            # A step past the end has weights of zero, any rows, and no code: what lies in the code's place
            # may be that of NaN.
            there = step < _STEPS
            step = there.select(dev.i32(step), fx.Int32(0))
            code = Code(there.select(codes[i // 4], fx.Int32(0)), i % 4)
            at = lds.query_operands.at(row, step * K_STEP + ctx.group * ctx.isa.group_stride)
            halves = [ctx.shared.load(at + half * ctx.isa.half_stride, 4) for half in range(HALVES)]
            words = dev.vector_i32([half[i] for half in halves for i in range(4)])
            acc = ctx.isa.mfma_fp8(w.words, w.code, words, code, acc)
        return acc

    def _finish(self) -> None:
        """A wave takes (tile of outputs, tile of rows) in turn."""
        ctx, g = self.ctx, self.ctx.geometry
        units = g.query_tiles * g.row_tiles
        for turn in range(-(-units // WAVES)):
            unit = ctx.wave + turn * WAVES

            @dev.when(unit < units)
            def _(unit: Any = unit) -> None:
                self._store(unit % g.query_tiles, unit // g.query_tiles)

    def _store(self, tile: Any, row_tile: Any) -> None:
        ctx, g = self.ctx, self.ctx.geometry
        waves = [tile + part * g.query_tiles for part in range(g.query_parts)]
        total = add_waves(ctx, row_tile, waves=waves)
        row = row_tile * TILE + ctx.row
        inside = row < g.rows
        row = inside.select(row, fx.Int32(0))
        output = self._first + tile * TILE + ctx.group * 4
        dim = output % HEAD_DIM
        turns = dim >= POSITION_FREE
        position = dev.Buffer(ctx.args.positions).load(row * 8)
        angle = turns.select((dim - POSITION_FREE) // 2, fx.Int32(0))
        table = dev.Buffer(ctx.args.cos_sin)
        at = position * (ROTARY * 4) + angle * 4
        cos, sin = table.load(at, 2).bitcast(fx.Float32), table.load(at + ROTARY * 2, 2).bitcast(fx.Float32)
        pairs = []
        for i in range(2):
            even, odd = m.round_bf16(ctx.isa, total[2 * i], total[2 * i + 1])
            x, y = rotated(cos[i], sin[i], even, odd)
            pairs.append(ctx.isa.pack_bf16(turns.select(x, even), turns.select(y, odd)))

        @dev.when(inside)
        def _() -> None:
            where = row * (g.heads * HEAD_DIM * 2) + output * 2
            dev.Buffer(ctx.args.query).store(where, dev.vector_i32(pairs))
