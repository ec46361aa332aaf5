# SPDX-License-Identifier: Apache-2.0
"""The FFN's input in every workgroup: normalised, quantised, held in registers as matrix operands.

Inputs: the collapsed rows (workspace), the norm's weights. Output, in registers of each wave: the MXFP8
operands of every row for this wave's 640 of the 5120 hidden values: K steps w, w + 8, .. of wave w.

Work split: the 512 lanes divide the values of a tile of 16 rows evenly, eight neighbours of a row a lane and
turn; a wave's turn is 512 neighbours of one row. The bytes and codes go through LDS into the operand layout.

Numerics: RMSNorm in fp32 with the sum of squares of the bf16 row, rounded to bf16; one E8M0 code per 32 of
the rounded values, e4m3 rounded to nearest even. The routed and the shared experts use the same codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.isa.base import Code

from ..geometry import HIDDEN, K_STEP, NORM_EPSILON, TILE, WAVES
from .context import Context

HALVES = 2
_TURN = 64 * 8  # values of a wave's turn
TURNS_A_ROW = HIDDEN // _TURN


@dataclass
class Operand:
    """MXFP8 activations of one tile and 128 k: eight words a lane, and the lane's E8M0 code."""

    words: Any
    code: Code


class Activations:
    """Turns of every row, dealt to the waves in order. ``hand_out``: the address of a bf16 [rows, 5120] to
    which the workgroup of a row's number stores that row normalised, 0 for nowhere."""

    def __init__(self, ctx: Context, hand_out: Any = None) -> None:
        self.ctx, self._hand_out = ctx, hand_out
        # Values of the sums of squares are kept for the quantisation while they fit the registers.
        self._held: dict[int, Any] = {}
        self._keep = ctx.geometry.rows * TURNS_A_ROW <= 10 * WAVES

    def _turns(self, tile: int) -> list[int]:
        rows = min(TILE, self.ctx.geometry.rows - tile * TILE)
        return list(range(tile * TILE * TURNS_A_ROW, (tile * TILE + rows) * TURNS_A_ROW, WAVES))

    def _place(self, first: int) -> tuple[Any, Any, Any]:
        """(turn, row, index of this lane's eight values in the row) of this wave among eight turns."""
        ctx = self.ctx
        turn = ctx.wave + first
        row = turn // TURNS_A_ROW
        return turn, row, turn % TURNS_A_ROW * 64 + ctx.lane

    def _is_turn(self, first: int, turn: Any) -> Any:
        """Whether the wave has a turn; None if all waves have."""
        total = self.ctx.geometry.rows * TURNS_A_ROW
        return None if first + WAVES <= total else turn < total

    def load(self, first: int) -> Any:
        """This lane's eight values, as four bf16 pairs."""
        ctx = self.ctx
        _, row, eight = self._place(first)
        # A turn past the last row reads past the end: zeros.
        return ctx.work.load(ctx.workspace.collapsed.at(row, eight * 4), 4)

    def norms(self) -> None:
        """1 / rms of every row, to LDS. Two barriers."""
        ctx, lds = self.ctx, self.ctx.lds
        all_turns = [first for tile in range(ctx.geometry.row_tiles) for first in self._turns(tile)]
        at_once = 10
        for begin in range(0, len(all_turns), at_once):
            chunk = all_turns[begin : begin + at_once]
            loaded = {first: self.load(first) for first in chunk}
            if self._keep:
                self._held.update(loaded)
            for first, words in loaded.items():
                squares = fx.Float32(0.0)
                for i in range(4):
                    squares = ctx.isa.dot_bf16(words[i], words[i], squares)
                squares = dev.last_lane_sum(squares)
                turn, row, _ = self._place(first)

                @dev.when(ctx.lane == 63)
                def _(row: Any = row, turn: Any = turn, squares: Any = squares) -> None:
                    ctx.shared.store(lds.squares.at(row, turn % TURNS_A_ROW), squares)

            ctx.fence()
        dev.barrier()

        @dev.when(ctx.thread < ctx.geometry.rows)
        def _finish() -> None:
            total = fx.Float32(0.0)
            for i in range(TURNS_A_ROW):
                total = total + dev.bits_f32(ctx.shared.load(lds.squares.at(ctx.thread, i)))
            rstd = m.reciprocal_sqrt(total * (1.0 / HIDDEN) + NORM_EPSILON)
            ctx.shared.store(lds.rstd.at(ctx.thread), rstd)

        dev.barrier()

    def operands(self, tile: int) -> list[Operand]:
        """The operands of one tile, one for each 128 k of this wave. Two barriers."""
        ctx = self.ctx
        for first in self._turns(tile):
            self._quantise(tile, first)
            ctx.fence()
        dev.barrier()
        out = self._read(tile)
        # The next tile, or partial sums, take the place of these bytes.
        dev.barrier()
        return out

    def _quantise(self, tile: int, first: int) -> None:
        ctx, lds = self.ctx, self.ctx.lds
        turn, row, eight = self._place(first)
        words = dev.pin(self._held[first]) if self._keep else self.load(first)
        weights = ctx.shared.load(lds.norm.at(eight * 4), 4)
        rstd = dev.bits_f32(ctx.shared.load(lds.rstd.at(fx.min(row, fx.Int32(ctx.geometry.rows - 1)))))
        pairs = []
        for i in range(4):
            low, high = m.unpack_bf16(words[i])
            low_weight, high_weight = m.unpack_bf16(weights[i])
            pairs.append(ctx.isa.pack_bf16(low * rstd * low_weight, high * rstd * high_weight))
        self._store_normed(row, eight, pairs)
        amax = m.largest_of_pairs(pairs)
        for distance in (1, 2):
            amax = dev.unsigned_max(amax, dev.quad_xor(amax, distance))
        code = m.mx_code(amax)
        packed = dev.vector_i32([ctx.isa.scale_fp8(pairs[i : i + 2], code) for i in (0, 2)])
        tile_row = row - tile * TILE
        block = eight // 4  # of 32 values
        step, group = block // 4, block % 4

        def store() -> None:
            ctx.shared.store(lds.activations.at(tile_row, eight * 8), packed)

            @dev.when(ctx.lane % 4 == 0)
            def _() -> None:
                at = lds.codes.at(tile_row, step % WAVES, group, step // WAVES)
                ctx.shared.store_byte(at, code)

        there = self._is_turn(first, turn)
        if there is None:
            store()
        else:
            dev.when(there)(store)

    def _store_normed(self, row: Any, eight: Any, pairs: list[Any]) -> None:
        if self._hand_out is None:
            return

        @dev.when((self._hand_out != 0) & (self.ctx.workgroup == row) & (row < self.ctx.geometry.rows))
        def _() -> None:
            dev.Buffer(self._hand_out).store(row * (HIDDEN * 2) + eight * 16, dev.vector_i32(pairs))

    def _read(self, tile: int) -> list[Operand]:
        """Lanes without a row read the last row's operands; nothing of theirs is handed over."""
        ctx, lds = self.ctx, self.ctx.lds
        last = min(TILE, ctx.geometry.rows - tile * TILE) - 1
        row = fx.min(ctx.row, fx.Int32(last))
        code_at = lds.codes.at(row, ctx.wave, ctx.group)
        whole = ctx.hidden_steps // 4 * 4
        codes = [ctx.shared.load(code_at + i) for i in range(0, whole, 4)]
        single = [Code(ctx.shared.load_byte(code_at + i)) for i in range(whole, ctx.hidden_steps)]
        base = lds.activations.at(row, ctx.wave * K_STEP + ctx.group * 16)
        out = []
        for step in range(ctx.hidden_steps):
            halves = [
                ctx.shared.load(base + (step * WAVES * K_STEP + half * 64), 4) for half in range(HALVES)
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
