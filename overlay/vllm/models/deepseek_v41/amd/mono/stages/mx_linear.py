# SPDX-License-Identifier: Apache-2.0
"""MXFP8 linears: row-major weights and bf16 rows as operands of the scaled matrix instruction.

Weights: e4m3 [outputs, k], one E8M0 code per 32 x 32. Rows: bf16 in the workspace, quantised in the registers
of the wave that multiplies them: one code per 32 k, e4m3 rounded to nearest even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.isa.base import Code
from vllm.models.common.amd.persistent.regions import Region

from ..geometry import K_STEP, MX_BLOCK, TILE
from .activations import HALVES, Operand
from .context import Context
from .wave_sums import add_waves


class MxLinear:
    """The weights of one linear; loads past ``outputs`` or ``k`` give zeros."""

    def __init__(self, ctx: Context, weights: Any, codes: Any, outputs: int, k: int) -> None:
        self.ctx, self.k = ctx, k
        self._weights = dev.Buffer(weights, outputs * k)
        self._codes = dev.Buffer(codes, outputs // MX_BLOCK * (k // MX_BLOCK))

    def operand(self, output: Any, has: Any, step: Any) -> Operand:
        """This lane's part of 128 k of its row ``output`` of the weights, zeros where not ``has``."""
        ctx, past = self.ctx, fx.Int32(dev.PAST_END)
        at = has.select(output * self.k + step * K_STEP + ctx.group * ctx.isa.group_stride, past)
        halves = [
            self._weights.load(at + half * ctx.isa.half_stride, 4, dev.STREAM) for half in range(HALVES)
        ]
        block = step * (K_STEP // MX_BLOCK) + ctx.group
        code_at = has.select(output // MX_BLOCK * (self.k // MX_BLOCK) + block, past)
        words = dev.vector_i32([half[i] for half in halves for i in range(4)])
        return Operand(words, Code(self._codes.load_byte(code_at)))


@dataclass
class Run:
    """32 values of one row in two halves of 16: those of a lane's operand of 128 k, as bf16 pairs."""

    halves: list[list[Any]]

    @classmethod
    def load(cls, ctx: Context, at: Any, step: Any) -> Run:
        """Of the row at byte ``at`` of the workspace."""
        halves = []
        for half in range(HALVES):
            k = step * K_STEP + half * ctx.isa.half_stride + ctx.group * ctx.isa.group_stride
            where = at + k * 2
            quads = [ctx.work.load(where + quad * 16, 4) for quad in range(2)]
            halves.append([quad[i] for quad in quads for i in range(4)])
        return cls(halves)

    def operand(self, ctx: Context) -> Operand:
        """The values quantised. Where they are not a block, a half's block of 32 is that of two neighbouring
        groups of lanes, and a lane's code is that of the block of its group's number."""
        if ctx.isa.group_stride == MX_BLOCK:
            return self._block(ctx)
        words, both = [], None
        for half, pairs in enumerate(self.halves):
            amax = m.largest_of_pairs(pairs)
            code = m.mx_code(dev.unsigned_max(amax, dev.shuffle_xor(amax, 16)))
            words += [ctx.isa.scale_fp8(pairs[i : i + 2], code) for i in range(0, len(pairs), 2)]
            both = code if both is None else both | (code << (8 * half))
        # Block g of four is half g // 2 of groups 2 (g % 2) and the next.
        there = dev.shuffle_from(both, ctx.group % 2 * 32 + ctx.row)
        return Operand(dev.vector_i32(words), Code(dev.shift_right(there, ctx.group // 2 * 8)))

    def _block(self, ctx: Context) -> Operand:
        pairs = [pair for half in self.halves for pair in half]
        code = m.mx_code(m.largest_of_pairs(pairs))
        words = [ctx.isa.scale_fp8(pairs[i : i + 2], code) for i in range(0, len(pairs), 2)]
        return Operand(dev.vector_i32(words), Code(code))


def zeros(count: int) -> list[Any]:
    """Accumulators."""
    return [dev.vector_f32([fx.Float32(0.0)] * 4)] * count


def publish_outputs(
    ctx: Context, rows: Any, first: Any, count: int, there: Any, sums: Region | None = None
) -> None:
    """Sum the waves' ``sums`` (``partial``) of ``count`` (8 or 16) outputs from ``first`` on, a wave a tile
    of rows, round them to bf16 and publish them in ``rows``. Two barriers."""
    dev.barrier()

    @dev.when(there & (ctx.wave < ctx.geometry.row_tiles))
    def _() -> None:
        total = add_waves(ctx, ctx.wave, sums=sums)
        pairs = [ctx.isa.pack_bf16(total[i], total[i + 1]) for i in (0, 2)]
        row = ctx.wave * TILE + ctx.row

        @dev.when((row < ctx.geometry.rows) & (ctx.group * 4 < count))
        def _() -> None:
            rows.store(row, first // 2 + ctx.group * 2, dev.vector_i32(pairs))

    rows.announce(there)
