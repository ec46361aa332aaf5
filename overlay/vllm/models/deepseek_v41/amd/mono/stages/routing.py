# SPDX-License-Identifier: Apache-2.0
"""Router: logits by some workgroups, the choice of experts by every one.

Inputs: the collapsed rows (workspace), the norm's and the gate's weights, bias f32 [experts].
Outputs: logits f32 (mailbox); in LDS of every workgroup the picks of every row, their weights, and the list
of experts that some row picked, in ascending order.

Work split: a workgroup does 8 experts, its waves divide the hidden size; up to 8 rows leave half of a matrix
instruction's rows and columns, which then do another part of the hidden size. Choosing 6 of 384 for a few
rows is little, so every workgroup does it and none waits for the result.

Numerics: bf16 products summed in fp32; score = sqrt(softplus(logit)); chosen by score + bias, ties to the
lowest expert id; weight = score / sum of the chosen scores x 1.5. A NaN ranks below every number, so that a
row of padding picks valid experts whatever it holds.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.handoff import Receiver, send, tag_word

from ..geometry import HIDDEN, NORM_EPSILON, ROUTED_SCALING, ROUTER_EXPERTS, THREADS, TILE, WAVES
from ..regions import NO_SLOT
from .context import Context

# Keys of the choice are order-preserving integers; these two rank below every number.
_TAKEN = -(1 << 31)
_NOT_A_NUMBER = _TAKEN + 1


class Router:
    """``stage_choose`` is the stage number of the wait for logits."""

    def __init__(self, ctx: Context, stage_choose: int) -> None:
        self.ctx, self.stage_choose = ctx, stage_choose

    # ---- logits
    def _fold(self) -> tuple[int, Any, Any]:
        """(parts side by side, this lane's row or expert of them, the first k of its part and group)."""
        ctx = self.ctx
        fold = ctx.geometry.router_fold
        across = TILE // fold
        k = ctx.wave * ctx.geometry.wave_k + ctx.row // across * (ctx.geometry.wave_k // fold)
        return fold, ctx.row % across, k + ctx.group * 16

    def _gate(self) -> tuple[dev.Buffer, Any]:
        """The gate's weights, and where this lane's begin; past the end in lanes without an expert."""
        ctx = self.ctx
        _, which, k = self._fold()
        at = ((ctx.workgroup * ROUTER_EXPERTS + which) * HIDDEN + k) * 2
        at = (which < ROUTER_EXPERTS).select(at, fx.Int32(dev.PAST_END))
        return dev.Buffer(ctx.args.gate_weight, ctx.geometry.experts * HIDDEN * 2), at

    def _halves(self) -> int:
        """Halves of 64 k of one lane."""
        return self.ctx.geometry.wave_k // self.ctx.geometry.router_fold // 64

    def warm_gate(self) -> None:
        """Bring this workgroup's gate weights to the XCD's L2 while the attention output is on its way."""
        ctx = self.ctx
        gate, base = self._gate()

        @dev.when(ctx.workgroup < ctx.geometry.router_tiles)
        def _() -> None:
            for half in range(self._halves()):
                gate.warm(base + half * 128)

    def send_logits(self) -> None:
        """Logits of this workgroup's experts for every row, if it has experts."""
        ctx = self.ctx

        @dev.when(ctx.workgroup < ctx.geometry.router_tiles)
        def _() -> None:
            for tile in range(ctx.geometry.row_tiles):
                self._tile_logits(tile)

    def _tile_logits(self, tile: int) -> None:
        """Three barriers."""
        ctx, g, lds = self.ctx, self.ctx.geometry, self.ctx.lds
        fold, which, k = self._fold()
        gate, gate_at = self._gate()
        row = which + tile * TILE
        at = (row < g.rows).select(ctx.workspace.collapsed.at(row, k // 2), fx.Int32(dev.PAST_END))
        held = g.rows <= TILE  # otherwise the rows are read again below
        runs = [self._run(at, half) for half in range(self._halves())]
        squares = fx.Float32(0.0)
        for run in runs:
            for word in run:
                low, high = m.unpack_bf16(word)
                squares = m.fused(high, high, m.fused(low, low, squares))
            ctx.fence()
        rstd = self._reciprocal_norm(squares, fold)
        acc = dev.vector_f32([fx.Float32(0.0)] * 4)
        for half in range(self._halves()):
            words = dev.pin(dev.vector_i32(runs[half])) if held else self._run(at, half)
            normed = self._normed(words, k + half * 64, rstd)
            for part in range(2):
                weights = gate.load(gate_at + half * 128 + part * 16, 4)
                operand = dev.vector_i32(normed[part * 4 : part * 4 + 4])
                acc = ctx.isa.mfma_bf16(weights, operand, acc)
            ctx.fence()
        ctx.shared.store(lds.partial.at(0, ctx.wave, 0, ctx.lane), acc)
        dev.barrier()

        @dev.when(ctx.wave == 0)
        def _() -> None:
            self._send_tile(tile, fold, which)

        dev.barrier()

    def _run(self, at: Any, half: int) -> list[Any]:
        work = self.ctx.work
        return [x for quad in range(2) for x in _words(work.load(at + half * 128 + quad * 16, 4))]

    def _reciprocal_norm(self, squares: Any, fold: int) -> Any:
        ctx, lds = self.ctx, self.ctx.lds
        for distance in (16, 32, 8)[: 2 + (fold == 2)]:
            squares = squares + dev.shuffle_xor(squares, distance)

        @dev.when(ctx.group == 0)
        def _() -> None:
            ctx.shared.store(lds.router_squares.at(ctx.wave, ctx.row), squares)

        dev.barrier()
        total = fx.Float32(0.0)
        for wave in range(WAVES):
            total = total + dev.bits_f32(ctx.shared.load(lds.router_squares.at(wave, ctx.row)))
        return m.reciprocal_sqrt(total * (1.0 / HIDDEN) + NORM_EPSILON)

    def _normed(self, words: Any, k: Any, rstd: Any) -> list[Any]:
        """Eight bf16 pairs after the norm."""
        ctx = self.ctx
        at = ctx.lds.norm.at(k // 2)
        weights = [x for quad in range(2) for x in _words(ctx.shared.load(at + 16 * quad, 4))]
        out = []
        for i in range(8):
            low, high = m.unpack_bf16(words[i])
            low_weight, high_weight = m.unpack_bf16(weights[i])
            out.append(ctx.isa.pack_bf16(low * rstd * low_weight, high * rstd * high_weight))
        return out

    def _send_tile(self, tile: int, fold: int, which: Any) -> None:
        """Lane (g, r) of the sum has experts 4 g .. of row r; of folded parts, those on the diagonal."""
        ctx, g, lds = self.ctx, self.ctx.geometry, self.ctx.lds
        total = ctx.shared.load(lds.partial.at(0, 0, 0, ctx.lane), 4).bitcast(fx.Float32)
        for wave in range(1, WAVES):
            total = total + ctx.shared.load(lds.partial.at(0, wave, 0, ctx.lane), 4).bitcast(fx.Float32)
        values = [total[i] for i in range(4)]
        if fold == 2:
            # Groups 2 and 3 with rows 8 .. 15 hold the second part of groups 0 and 1 with rows 0 .. 7.
            values = [x + dev.shuffle_xor(x, 32 + 8) for x in values]
        row = ctx.row + tile * TILE
        has = (ctx.group * 4 < ROUTER_EXPERTS) & (row < g.rows)

        @dev.when(has)
        def _() -> None:
            for i, value in enumerate(values):
                expert = ctx.workgroup * ROUTER_EXPERTS + ctx.group * 4 + i
                at = ctx.workspace.logits.at(row, expert)
                send(ctx.work, at, dev.f32_bits(value), tag_word(ctx.launch.tag), dev.DEVICE)

    # ---- choice
    def clear_active(self) -> None:
        """Zero the bits of picked experts; a barrier must follow before ``choose``."""
        ctx = self.ctx

        @dev.when(ctx.thread < ctx.geometry.experts // 32)
        def _() -> None:
            ctx.shared.store(ctx.lds.active_bits.at(ctx.thread), fx.Int32(0))

    def choose(self) -> None:
        """Picks and weights of every row, a wave a row, and the bits of picked experts."""

        def one(row: Any, carried: list[Any]) -> list[Any]:
            self._choose_row(row)
            return carried

        dev.loop(self.ctx.wave, self.ctx.geometry.rows, WAVES, [], one)

    def _choose_row(self, row: Any) -> None:
        """Value i of lane l is expert 64 i + l."""
        ctx, g = self.ctx, self.ctx.geometry
        values = g.experts // dev.WAVE
        base = ctx.workspace.logits.at(row, ctx.lane)
        words = Receiver(ctx.launch, self.stage_choose).words(
            ctx.work,
            [base + i * dev.WAVE * 8 for i in range(values)],
            ctx.lane >= 0,
            lambda i, _: (ctx.lane + i * dev.WAVE) // ROUTER_EXPERTS,
        )
        bias = dev.Buffer(ctx.args.gate_bias)
        biases = [dev.bits_f32(bias.load((ctx.lane + i * dev.WAVE) * 4)) for i in range(values)]
        keys = [_ranked(_score(dev.bits_f32(x[0])) + b) for x, b in zip(words, biases, strict=True)]
        picked = fx.Int32(0)
        for pick in range(g.picks):
            best = keys[0]
            for key in keys[1:]:
                best = fx.max(best, key)
            best = dev.wave_max(best)
            winner = fx.Int32(0)
            for i in reversed(range(values)):
                lane = dev.first_lane_where(keys[i] == best)
                winner = (lane >= 0).select(lane + i * dev.WAVE, winner)
            keys = [
                (ctx.lane + i * dev.WAVE == winner).select(fx.Int32(_TAKEN), key)
                for i, key in enumerate(keys)
            ]
            picked = (ctx.lane == pick).select(winner, picked)
        self._store_picks(row, picked)

    def _store_picks(self, row: Any, picked: Any) -> None:
        """Lane p < picks has the expert of pick p."""
        ctx, g, lds = self.ctx, self.ctx.geometry, self.ctx.lds
        # The words were all of this launch a moment ago.
        logit = ctx.work.load(ctx.workspace.logits.at(row, picked), 1, dev.DEVICE)
        score = _score(dev.bits_f32(logit))
        chosen = ctx.lane < g.picks
        score = chosen.select(score, fx.Float32(0.0))
        total = score
        for distance in (1, 2, 4):
            total = total + dev.shuffle_xor(total, distance)
        weight = score * m.reciprocal(total) * ROUTED_SCALING

        @dev.when(chosen)
        def _() -> None:
            ctx.shared.store(lds.pick_expert.at(row, ctx.lane), picked)
            ctx.shared.store(lds.pick_weight.at(row, ctx.lane), weight)
            ctx.shared.fetch_or(lds.active_bits.at(picked // 32), fx.Int32(1) << (picked % 32))

    def list_active(self) -> Any:
        """The picked experts in ascending order and who picked them, in LDS; returns their number. A barrier
        must come before."""
        ctx, g, lds = self.ctx, self.ctx.geometry, self.ctx.lds
        words = [
            ctx.shared.load(lds.active_bits.at(4 * i), 4)[j]
            for i in range(g.experts // 128)
            for j in range(4)
        ]
        own_word, own_bit = ctx.thread // 32, ctx.thread % 32
        below, total, mine = fx.Int32(0), fx.Int32(0), fx.Int32(0)
        for i, word in enumerate(words):
            here = own_word == i
            bits = here.select(word & ((fx.Int32(1) << own_bit) - 1), word)
            counted = dev.count_bits(bits)
            below = below + (own_word >= i).select(counted, fx.Int32(0))
            total = total + dev.count_bits(word)
            mine = here.select(word, mine)
        present = dev.both(ctx.thread < g.experts, (dev.shift_right(mine, own_bit) & 1) == 1)

        @dev.when(present)
        def _() -> None:
            ctx.shared.store(lds.active.at(below), ctx.thread)
            ctx.shared.store(lds.index_of.at(ctx.thread), below)

        entries = total * (g.row_tiles * TILE // 4)

        def clear(start: Any, carried: list[Any]) -> list[Any]:
            at = start + ctx.thread

            @dev.when(at < entries)
            def _() -> None:
                ctx.shared.store(lds.slot_of.at(0, 0) + at * 4, fx.Int32(-1))

            return carried

        dev.loop(0, dev.uniform(entries), THREADS, [], clear)
        dev.barrier()

        @dev.when(ctx.thread < g.rows * g.picks)
        def _() -> None:
            row, slot = ctx.thread // g.picks, ctx.thread % g.picks
            index = ctx.shared.load(lds.index_of.at(ctx.shared.load(lds.pick_expert.at(row, slot))))
            ctx.shared.store_byte(lds.slot_of.at(index, row), slot)

        dev.barrier()
        return dev.uniform(total)


def _words(vector: Any) -> list[Any]:
    return [vector[i] for i in range(4)]


def _score(logit: fx.Float32) -> fx.Float32:
    return m.square_root(m.softplus(logit))


def _ranked(value: fx.Float32) -> fx.Int32:
    """An integer that orders as the float does; a NaN below all."""
    bits = dev.f32_bits(value)
    flipped = (bits < 0).select(bits ^ 0x7FFFFFFF, bits)
    return (value == value).select(flipped, fx.Int32(_NOT_A_NUMBER))


def picked_in(ctx: Context, tile: int, index: Any) -> Any:
    """Whether a row of a tile has picked the active expert ``index``; the same in the wave."""
    slot = ctx.shared.load_byte(ctx.lds.slot_of.at(index, ctx.row + tile * TILE))
    return dev.first_lane_where(slot != NO_SLOT) >= 0


def pick_of(ctx: Context, row: Any, index: Any) -> tuple[Any, Any]:
    """(slot, weight) of the active expert ``index`` among the picks of step row ``row``; (-1, 0) if the row
    has
    not picked it."""
    slot = ctx.shared.load_byte(ctx.lds.slot_of.at(index, row))
    has = slot != NO_SLOT
    at = ctx.lds.pick_weight.at(has.select(row, fx.Int32(0)), has.select(slot, fx.Int32(0)))
    weight = has.select(dev.bits_f32(ctx.shared.load(at)), fx.Float32(0.0))
    return has.select(slot, fx.Int32(-1)), weight
