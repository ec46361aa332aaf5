# SPDX-License-Identifier: Apache-2.0
"""The FFN's input in every workgroup: normalised, quantised, held in registers as matrix operands.

Inputs: the collapsed rows (workspace), the norm's weights. Output, in registers of each wave: the MXFP8
operands of every row for this wave's 640 of the 5120 hidden values: K steps w, w + 8, .. of wave w.

Work split: wave w takes half w % 2 of rows w // 2, w // 2 + 4, .., so a row's sum of squares is two waves'
and what a wave knows of a row is scalar; a wave's turn is 512 neighbours, a lane eight of them. The bytes
and codes go through LDS into the operand layout.

Numerics: RMSNorm in fp32 with the sum of squares of the bf16 row, rounded to bf16; one E8M0 code per 32 of
the rounded values, e4m3 rounded to nearest even. The routed and the shared experts use the same codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.isa.base import Code, Isa

from ..geometry import HIDDEN, K_STEP, NORM_EPSILON, ROW_PARTS, TILE, WAVES
from .context import Context

HALVES = 2
_TURN = 64 * 8  # values of a wave's turn
_TURNS = HIDDEN // ROW_PARTS // _TURN
_ROWS_AT_ONCE = WAVES // ROW_PARTS
# Rows of a wave whose values stay in registers from the sums of squares to the quantisation, and rows that
# are loaded together for those sums.
_KEPT, _TOGETHER = 2, 4


@dataclass
class Operand:
    """MXFP8 activations of one tile and 128 k: eight words a lane, and the lane's E8M0 code."""

    words: Any
    code: Code

    def where(self, condition: Any, other: Operand) -> Operand:
        """This one in lanes where ``condition`` holds, else ``other``, whose code is in the same byte."""
        words = dev.vector_i32([condition.select(self.words[i], other.words[i]) for i in range(8)])
        code = Code(condition.select(self.code.word, other.code.word), self.code.byte)
        return Operand(dev.pin(words), code)


@dataclass(frozen=True)
class _Part:
    """Rows of the step that are quantised together."""

    first: int
    rows: int


@dataclass
class Normed:
    """Eight neighbours of a row after its norm: four bf16 pairs, and the bits of the largest magnitude before
    rounding."""

    pairs: list[Any]
    largest: Any

    @classmethod
    def of(cls, isa: Isa, words: Any, rstd: Any, weights: list[Any]) -> Normed:
        """``words``: four bf16 pairs; ``weights``: the norm's, eight floats."""
        values = [x * rstd for i in range(4) for x in m.unpack_bf16(words[i])]
        values = [x * weight for x, weight in zip(values, weights, strict=True)]
        pairs = [isa.pack_bf16(*values[i : i + 2]) for i in range(0, 8, 2)]
        return cls(pairs, m.largest_magnitude(values))

    def quantise(self, isa: Isa) -> tuple[Any, Any]:
        """(two words of e4m3, the E8M0 code) of a block that four neighbouring lanes hold."""
        largest = self.largest
        for distance in (1, 2):
            largest = dev.unsigned_max(largest, dev.quad_xor(largest, distance))
        # The largest of the rounded values is the rounded largest.
        code = m.mx_code_of_bf16(isa.pack_bf16(dev.bits_f32(largest), fx.Float32(0.0)))
        return dev.vector_i32([isa.scale_fp8(self.pairs[i : i + 2], code) for i in (0, 2)]), code


class Activations:
    """``hand_out``: the address of a bf16 [rows, 5120] to which the workgroup of a row's number stores that
    row normalised, 0 for nowhere."""

    def __init__(self, ctx: Context, hand_out: Any = None) -> None:
        self.ctx, self._hand_out = ctx, hand_out
        self._half = ctx.wave % ROW_PARTS
        self._keep = ctx.geometry.rows <= _KEPT * _ROWS_AT_ONCE
        self._held: dict[int, list[Any]] = {}

    # ---- a wave's rows: every fourth from its first on. ``first`` is the row of wave 0.
    def _firsts(self, part: _Part) -> range:
        return range(part.first, part.first + part.rows, _ROWS_AT_ONCE)

    def _row(self, first: int) -> Any:
        """The wave's row; the last one in waves that have none."""
        row = self.ctx.wave // ROW_PARTS + first
        last = self.ctx.geometry.rows - 1
        return row if first + _ROWS_AT_ONCE - 1 <= last else fx.min(row, fx.Int32(last))

    def _where_there(self, first: int, body: Callable[[], None]) -> None:
        """Run ``body`` in the waves that have a row."""
        rows = self.ctx.geometry.rows
        if first + _ROWS_AT_ONCE <= rows:
            body()
        else:
            dev.when(self.ctx.wave // ROW_PARTS + first < rows)(body)

    def _load(self, first: int, turn: int) -> Any:
        """This lane's eight values, as four bf16 pairs."""
        ctx = self.ctx
        start = ctx.workspace.collapsed.at(self._row(first), self._half * (HIDDEN // ROW_PARTS // 2))
        return ctx.work.load(ctx.lane * 16 + turn * (_TURN * 2), 4, base=start)

    # ---- the norm
    def norms(self) -> None:
        """The sums of squares of every row, to LDS. One barrier."""
        ctx = self.ctx
        firsts = self._firsts(_Part(0, ctx.geometry.rows))
        for begin in range(0, len(firsts), _TOGETHER):
            chunk = firsts[begin : begin + _TOGETHER]
            loaded = {first: [self._load(first, turn) for turn in range(_TURNS)] for first in chunk}
            if self._keep:
                self._held = loaded
            for first, turns in loaded.items():
                self._where_there(first, partial(self._add_squares, first, turns))
            ctx.fence()
        dev.barrier()

    def _add_squares(self, first: int, turns: list[Any]) -> None:
        ctx = self.ctx
        sums = [fx.Float32(0.0)] * 2  # two chains
        for words in turns:
            for i in range(4):
                sums[i % 2] = ctx.isa.dot_bf16(words[i], words[i], sums[i % 2])
        squares = dev.last_lane_sum(sums[0] + sums[1])

        @dev.when(ctx.lane == dev.WAVE - 1)
        def _() -> None:
            ctx.shared.store(ctx.lds.squares.at(self._row(first), self._half), squares)

    def rstd(self, row: Any) -> Any:
        """1 / rms of a row, after ``norms``."""
        halves = self.ctx.shared.load(self.ctx.lds.squares.at(row), ROW_PARTS)
        total = dev.bits_f32(halves[0]) + dev.bits_f32(halves[1])
        return m.reciprocal_sqrt(total * (1.0 / HIDDEN) + NORM_EPSILON)

    # ---- the operands
    def operands(self, tile: int) -> list[Operand]:
        """The operands of one tile, one for each 128 k of this wave. Two barriers for as many rows as LDS has
        room for."""
        ctx = self.ctx
        rows = min(TILE, ctx.geometry.rows - tile * TILE)
        at_once = ctx.lds.activations.shape[0]
        out: list[Operand] = []
        for first_row in range(0, rows, at_once):
            part = _Part(tile * TILE + first_row, min(at_once, rows - first_row))
            self._quantise_part(part)
            dev.barrier()
            now = self._read(part)
            # The next rows, or partial sums, take the place of these bytes.
            dev.barrier()
            out = [x.where(ctx.row >= first_row, y) for x, y in zip(now, out, strict=True)] if out else now
        return out

    def _quantise_part(self, part: _Part) -> None:
        ctx, firsts = self.ctx, self._firsts(part)
        rstd = {first: self.rstd(self._row(first)) for first in firsts}
        loaded = {} if self._keep else {first: self._load(first, 0) for first in firsts}
        for turn in range(_TURNS):
            if self._keep:
                words = {first: dev.pin(self._held[first][turn]) for first in firsts}
            else:
                words = loaded
                # On their way while this turn's are quantised.
                loaded = {first: self._load(first, turn + 1) for first in firsts if turn + 1 < _TURNS}
            weights = self._weights(turn)
            for first in firsts:
                quantise = partial(self._quantise, part, first, turn, words[first], rstd[first], weights)
                self._where_there(first, quantise)
            ctx.fence()

    def _weights(self, turn: int) -> list[Any]:
        ctx = self.ctx
        at = ctx.lds.norm.at(self._half * (HIDDEN // ROW_PARTS // 2) + turn * (_TURN // 2) + ctx.lane * 4)
        words = ctx.shared.load(at, 4)
        return [x for i in range(4) for x in m.unpack_bf16(words[i])]

    def _quantise(
        self, part: _Part, first: int, turn: int, words: Any, rstd: Any, weights: list[Any]
    ) -> None:
        ctx, lds = self.ctx, self.ctx.lds
        row = self._row(first)
        normed = Normed.of(ctx.isa, words, rstd, weights)
        value = self._half * (HIDDEN // ROW_PARTS) + turn * _TURN
        self._store_normed(row, value, normed.pairs)
        packed, code = normed.quantise(ctx.isa)
        ctx.shared.store(lds.activations.at(row - part.first, value) + ctx.lane * 8, packed)
        # A turn is four K steps, a quarter of the wave one of them, four neighbours a code: each stores it.
        step = dev.shift_right(value, K_STEP.bit_length() - 1)
        at = lds.codes.at(
            row - part.first, (step & (WAVES - 1)) + ctx.group, ctx.lane // 4 & 3, step // WAVES
        )
        ctx.shared.store_byte(at, code)

    def _store_normed(self, row: Any, value: Any, pairs: list[Any]) -> None:
        if self._hand_out is None:
            return

        @dev.when((self._hand_out != 0) & (self.ctx.workgroup == row))
        def _() -> None:
            at = (row * HIDDEN + value) * 2 + self.ctx.lane * 16
            dev.Buffer(self._hand_out).store(at, dev.vector_i32(pairs))

    def _read(self, part: _Part) -> list[Operand]:
        """Lanes without a row read another row's operands; nothing of theirs is handed over."""
        ctx, lds = self.ctx, self.ctx.lds
        row = ctx.row - part.first % TILE if part.first % TILE else ctx.row
        row = fx.min(row, fx.Int32(part.rows - 1))
        if part.first % TILE:
            row = fx.max(row, fx.Int32(0))
        code_at = lds.codes.at(row, ctx.wave, ctx.group)
        whole = ctx.hidden_steps // 4 * 4
        codes = [ctx.shared.load(code_at + i) for i in range(0, whole, 4)]
        single = [Code(ctx.shared.load_byte(code_at + i)) for i in range(whole, ctx.hidden_steps)]
        base = lds.activations.at(row, ctx.wave * K_STEP + ctx.group * ctx.isa.group_stride)
        out = []
        for step in range(ctx.hidden_steps):
            halves = [
                ctx.shared.load(base + (step * WAVES * K_STEP + half * ctx.isa.half_stride), 4)
                for half in range(HALVES)
            ]
            words = dev.vector_i32([half[i] for half in halves for i in range(4)])
            code = Code(codes[step // 4], step % 4) if step < whole else single[step - whole]
            out.append(Operand(dev.pin(words), code))
        return out


def load_norm(ctx: Context) -> None:
    """Copy the norm's weights to LDS; visible after a barrier."""

    def one(start: Any, carried: list[Any]) -> list[Any]:
        quad = start + ctx.thread

        @dev.when(quad < HIDDEN // 8)
        def _() -> None:
            ctx.shared.store(ctx.lds.norm.at(quad * 4), dev.Buffer(ctx.args.norm_weight).load(quad * 16, 4))

        return carried

    dev.loop(0, HIDDEN // 8, 512, [], one)
