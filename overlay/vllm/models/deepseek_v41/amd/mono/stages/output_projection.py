# SPDX-License-Identifier: Apache-2.0
"""The attention's output projection: wo_a a group of heads, wo_b over all groups' ranks.

Inputs: the attended heads (mailbox, MXFP8); in wo_b, the published outputs of wo_a, bf16 [rows, groups x
1024]. Output: one bf16 word (two columns) of this rank's partial a lane, for the all-reduce.

Work split: a workgroup does 8 or 16 outputs of wo_a, whose 4096 k its waves divide; and its 20 columns of
wo_b, as 16 and 4 outputs of two tiles, whose K steps the waves take in turn. Both add through LDS.

Numerics: fp32 sums; wo_a's are rounded to bf16 and quantised as ``Run``; wo_b's are rounded to bf16.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent.handoff import Receiver
from vllm.models.common.amd.persistent.isa.base import Code

from ..geometry import GROUP_K, HEAD_DIM, HIDDEN, K_STEP, OUTPUT_RANK, TILE, WAVES, WORKGROUPS
from .activations import HALVES
from .context import Context
from .mx_linear import MxLinear, Run, publish_outputs, zeros
from .published import PublishedRows
from .wave_sums import leave

_PARTS = 2  # the 16 and the 4 outputs of wo_b
_STEPS = GROUP_K // K_STEP // WAVES  # of one wave in wo_a


class OutputProjection:
    """``stage_attended`` and ``stage_ranks`` are the stage numbers of the waits."""

    def __init__(self, ctx: Context, stage_attended: int, stage_ranks: int) -> None:
        self.ctx, self.stage_attended = ctx, stage_attended
        g = ctx.geometry
        self.ranks = PublishedRows(ctx, ctx.workspace.ranks, ctx.workspace.ranks_ready, stage_ranks)
        self._first = ctx.workgroup * g.rank_outputs
        self._group = self._first // OUTPUT_RANK
        linear = MxLinear(ctx, ctx.args.wo_a, ctx.args.wo_a_scale, g.rank_columns, GROUP_K)
        has = ctx.row < g.rank_outputs
        self._wo_a = [
            linear.operand(self._first + ctx.row, has, ctx.wave * _STEPS + step) for step in range(_STEPS)
        ]

    # ---- wo_a
    def ranks_of_heads(self) -> None:
        """wo_a on the attended heads. Two barriers, and ``leave``'s."""
        ctx, g = self.ctx, self.ctx.geometry
        acc = zeros(g.row_tiles)
        waited = [self._wait(tile) for tile in range(g.row_tiles)]
        dev.acquire()
        for tile, (codes, at) in enumerate(waited):
            for step in range(_STEPS):
                w, words = self._wo_a[step], self._bytes(at, step)
                acc[tile] = ctx.isa.mfma_fp8(w.words, w.code, words, codes[step], acc[tile])
            ctx.fence()
        sums = ctx.lds.projection
        leave(ctx, acc, sums=sums)
        publish_outputs(ctx, self.ranks, self._first, g.rank_outputs, ctx.workgroup >= 0, sums)

    def _wait(self, tile: int) -> tuple[list[Code], Any]:
        """Wait for this wave's blocks of a tile's rows: their codes, and the offset of the bytes, past the
        end in lanes without a row."""
        ctx = self.ctx
        row = tile * TILE + ctx.row
        inside = row < ctx.geometry.rows
        row = inside.select(row, fx.Int32(0))
        first = ctx.wave * _STEPS
        at = ctx.workspace.attended_ready.at(row, self._group, ctx.group, first)
        pairs = Receiver(ctx.launch, self.stage_attended).pairs(
            ctx.work,
            [at + 16 * i for i in range(_STEPS // 2)],
            inside,
            # The block of 32 in the group.
            lambda load, word: (first + 2 * load + word) * 4 + ctx.group,
        )
        codes = [Code(pair[i]) for pair in pairs for i in (1, 3)]
        k = self._group * GROUP_K + first * K_STEP + ctx.group * ctx.isa.group_stride
        heads = ctx.workspace.attended.at(row, k)
        return codes, inside.select(heads, fx.Int32(dev.PAST_END))

    def _bytes(self, at: Any, step: int) -> Any:
        stride = self.ctx.isa.half_stride
        halves = [self.ctx.work.load(at + step * K_STEP + half * stride, 4) for half in range(HALVES)]
        return dev.vector_i32([half[i] for half in halves for i in range(4)])

    # ---- wo_b
    def load(self) -> None:
        """Begin to load this wave's weights of wo_b, which depend on nothing."""
        ctx, g = self.ctx, self.ctx.geometry
        linear = MxLinear(ctx, ctx.args.wo_b, ctx.args.wo_b_scale, HIDDEN, g.rank_columns)
        self._mine = [ctx.wave + i * WAVES for i in range(g.rank_columns // K_STEP // WAVES)]
        columns = [ctx.row + part * TILE for part in range(_PARTS)]
        # By part, a step of this wave after the other.
        self._wo_b = [
            [
                linear.operand(ctx.slice_idx * g.columns + column, column < g.columns, step)
                for step in self._mine
            ]
            for column in columns
        ]

    def partial(self) -> None:
        """wo_b's sums, left in LDS. One barrier after the wait's, and ``leave``'s."""
        ctx, g = self.ctx, self.ctx.geometry
        self.ranks.wait(WORKGROUPS)
        acc = zeros(g.row_tiles * _PARTS)
        for tile in range(g.row_tiles):
            row = tile * TILE + ctx.row
            at = (row < g.rows).select(self.ranks.rows.at(row), fx.Int32(dev.PAST_END))
            for i, step in enumerate(self._mine):
                x = Run.load(ctx, at, step).operand(ctx)
                words = ctx.isa.ready(x.words, x.code)
                for part in range(_PARTS):
                    w, where = self._wo_b[part][i], tile * _PARTS + part
                    acc[where] = ctx.isa.mfma_fp8(w.words, w.code, words, x.code, acc[where])
            ctx.fence()
        leave(ctx, acc, sums=ctx.lds.projection)
        dev.barrier()


assert HEAD_DIM % K_STEP == 0
