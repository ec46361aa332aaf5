# SPDX-License-Identifier: Apache-2.0
"""The attention's projections: the query rank and the key, and the query from its rank.

Inputs: the normalised rows as operands; in the query projection, the published query rank. Outputs: ``qkv``,
bf16 [rows, 1280 + 512] in the workspace, published; the query with its rotary, bf16 [rows, heads, 512].

Work split: a workgroup does 8 outputs of the first projection, its waves divide the hidden size; and 32 or 64
outputs of the second, waves taking tiles of 16 outputs and, within a tile, K steps in turn. Both add through
LDS.

Numerics: fp32 sums rounded to bf16; RMSNorm of the query rank in fp32, rounded to bf16; MXFP8 as ``Run``; the
rotary in fp32 on the rounded query, rounded to bf16.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m

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
from .activations import Operand
from .context import Context
from .mx_linear import MxLinear, Run, leave_sums, publish_outputs, sum_waves, zeros
from .published import PublishedRows

_STEPS = QUERY_RANK // K_STEP


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
        leave_sums(ctx, acc)
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
        acc = [self._multiply(tile) for tile in range(g.row_tiles)]
        leave_sums(ctx, acc)
        dev.barrier()
        self._finish()

    def _multiply(self, tile: int) -> Any:
        """Two barriers."""
        ctx, lds = self.ctx, self.ctx.lds
        row = tile * TILE + ctx.row
        past = fx.Int32(dev.PAST_END)
        at = (row < ctx.geometry.rows).select(self.rows.rows.at(row), past)
        runs = [Run.load(ctx, (step < _STEPS).select(at, past), step) for step in self._mine]
        squares = fx.Float32(0.0)
        for run in runs:
            squares = run.squares(ctx, squares)
        for distance in (16, 32):
            squares = squares + dev.shuffle_xor(squares, distance)
        ctx.shared.store(lds.query_squares.at(ctx.wave, ctx.row), squares)
        dev.barrier()
        total = fx.Float32(0.0)
        for part in range(ctx.geometry.query_parts):
            where = lds.query_squares.at(part * ctx.geometry.query_tiles, ctx.row)
            total = total + dev.bits_f32(ctx.shared.load(where))
        rstd = m.reciprocal_sqrt(total * (1.0 / QUERY_RANK) + NORM_EPSILON)
        (acc,) = zeros(1)
        for step, w, run in zip(self._mine, self._weights, runs, strict=True):
            normed = run.normed(ctx, rstd, self._norm_weights(step))
            self._hand_out(normed, tile, row, step)
            x = normed.operand(ctx)
            acc = ctx.isa.mfma_fp8(w.words, w.code, x.words, x.code, acc)
            ctx.fence()
        dev.barrier()
        return acc

    def _norm_weights(self, step: Any) -> list[list[Any]]:
        """Zeros past the end, where every value is zero."""
        ctx = self.ctx
        step = (step < _STEPS).select(dev.i32(step), fx.Int32(0))
        out = []
        for half in range(2):
            at = ctx.lds.query_norm.at((step * K_STEP + half * 64 + ctx.group * 16) // 2)
            quads = [ctx.shared.load(at + quad * 16, 4) for quad in range(2)]
            out.append([quad[i] for quad in quads for i in range(4)])
        return out

    def _hand_out(self, normed: Run, tile: int, row: Any, step: Any) -> None:
        """One workgroup a tile of rows stores what an index source's indexer reads."""
        ctx = self.ctx
        asked = ctx.args.query_rank_out != 0
        mine = asked & (ctx.workgroup == tile) & (self._tile == 0) & (row < ctx.geometry.rows)

        @dev.when(mine & (step < _STEPS))
        def _() -> None:
            out = dev.Buffer(ctx.args.query_rank_out)
            for half, pairs in enumerate(normed.halves):
                at = row * (QUERY_RANK * 2) + (step * K_STEP + half * 64 + ctx.group * 16) * 2
                for quad in range(2):
                    out.store(at + quad * 16, dev.vector_i32(pairs[quad * 4 : quad * 4 + 4]))

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
        total = sum_waves(ctx, row_tile, waves)
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
