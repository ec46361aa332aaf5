# SPDX-License-Identifier: Apache-2.0
"""Router: logits by some workgroups, the choice of experts by every one.

Inputs: the normed rows in bf16 (registers), the gate's weights bf16 [experts, 5120] and bias f32 [experts].
Outputs: logits f32 (mailbox); in LDS of every workgroup the picks of every row, their weights, and the list
of experts that some row picked, in ascending order.

Work split: a workgroup does 16 experts, its waves divide the hidden size. Choosing 6 of 384 for a few rows is
little, so every workgroup does it and none waits for the result.

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

from ..geometry import HIDDEN, K_STEP, ROUTED_SCALING, TILE, WAVES
from ..regions import PICK_ROW
from .activations import HALVES, NormedTile
from .context import Context

# Keys of the choice are order-preserving integers; these two rank below every number.
_TAKEN = -(1 << 31)
_NOT_A_NUMBER = _TAKEN + 1


class Router:
    """``stage_choose`` is the stage number of the wait for logits."""

    def __init__(self, ctx: Context, stage_choose: int) -> None:
        self.ctx, self.stage_choose = ctx, stage_choose

    @property
    def mine(self) -> Any:
        """Whether this workgroup has a tile of experts."""
        return self.ctx.workgroup < self.ctx.geometry.router_tiles

    # ---- logits
    def _gate(self) -> tuple[dev.Buffer, Any]:
        """The gate's weights, and where this lane's begin: expert row ``row`` of the tile, k of its group."""
        ctx = self.ctx
        k = ctx.wave * ctx.geometry.wave_k + ctx.group * 16
        expert = ctx.workgroup * TILE + ctx.row
        return dev.Buffer(ctx.args.gate_weight, ctx.geometry.experts * HIDDEN * 2), (expert * HIDDEN + k) * 2

    def warm_gate(self) -> None:
        """Bring this workgroup's gate weights to the XCD's L2 while the attention output is on its way."""
        ctx = self.ctx
        gate, base = self._gate()

        @dev.when(self.mine)
        def _() -> None:
            for step in range(ctx.hidden_steps):
                for half in range(HALVES):
                    gate.warm(base + (step * K_STEP + half * 64) * 2)

    def send_logits(self, tile: int, normed: NormedTile) -> None:
        """Logits of this workgroup's experts for one tile of rows. Holds two barriers, so that every wave of
        the workgroup comes here or none does."""
        ctx, lds = self.ctx, self.ctx.lds
        gate, base = self._gate()
        acc = dev.vector_f32([fx.Float32(0.0)] * 4)
        for step in range(ctx.hidden_steps):
            for half, run in enumerate(normed.halves(step)):
                for part in range(2):
                    weights = gate.load(base + (step * K_STEP + half * 64 + part * 8) * 2, 4)
                    operand = dev.vector_i32(run[part * 4 : part * 4 + 4])
                    acc = ctx.isa.mfma_bf16(weights, operand, acc)
            ctx.fence()
        ctx.shared.store(lds.partial.at(ctx.wave, 0, ctx.lane), acc)
        dev.barrier()

        @dev.when(ctx.wave == 0)
        def _() -> None:
            total = ctx.shared.load(lds.partial.at(0, 0, ctx.lane), 4).bitcast(fx.Float32)
            for wave in range(1, WAVES):
                total = total + ctx.shared.load(lds.partial.at(wave, 0, ctx.lane), 4).bitcast(fx.Float32)
            row = ctx.row + tile * TILE
            expert = ctx.workgroup * TILE + ctx.group * 4

            @dev.when(row < ctx.geometry.rows)
            def _() -> None:
                for i in range(4):
                    at = ctx.workspace.logits.at(row, expert + i)
                    send(ctx.work, at, dev.f32_bits(total[i]), tag_word(ctx.launch.tag), dev.DEVICE)

        dev.barrier()

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

    def _expert(self, index: int) -> Any:
        """The expert of this lane's value ``index``: two neighbours a load."""
        return self.ctx.lane * 2 + (index // 2 * 128 + index % 2)

    def _choose_row(self, row: Any) -> None:
        ctx, g = self.ctx, self.ctx.geometry
        base = ctx.workspace.logits.at(row, ctx.lane * 2)
        offsets = [base + part * 128 * 8 for part in range(g.experts // 128)]
        pairs = Receiver(ctx.launch, self.stage_choose).pairs(ctx.work, offsets, ctx.lane >= 0, ctx.lane // 8)
        logits = [dev.bits_f32(x) for pair in pairs for x in (pair[0], pair[2])]
        bias = dev.Buffer(ctx.args.gate_bias)
        biases = [
            x
            for part in range(g.experts // 128)
            for x in self._floats(bias.load((ctx.lane * 2 + part * 128) * 4, 2))
        ]
        keys = [_ranked(_score(x) + b) for x, b in zip(logits, biases, strict=True)]
        picked = fx.Int32(0)
        for pick in range(g.picks):
            best = keys[0]
            for key in keys[1:]:
                best = fx.max(best, key)
            for distance in (32, 16, 8, 4, 2, 1):
                best = fx.max(best, dev.shuffle_xor(best, distance))
            winner = fx.Int32(g.experts)
            for index in reversed(range(len(keys))):
                winner = (keys[index] == best).select(self._expert(index), winner)
            for distance in (32, 16, 8, 4, 2, 1):
                winner = fx.min(winner, dev.shuffle_xor(winner, distance))
            keys = [(self._expert(i) == winner).select(fx.Int32(_TAKEN), key) for i, key in enumerate(keys)]
            picked = (ctx.lane == pick).select(winner, picked)
        self._store_picks(row, picked)

    @staticmethod
    def _floats(words: Any) -> tuple[Any, Any]:
        return dev.bits_f32(words[0]), dev.bits_f32(words[1])

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

        @dev.when(ctx.lane < PICK_ROW)
        def _() -> None:
            ctx.shared.store(lds.pick_expert.at(row, ctx.lane), chosen.select(picked, fx.Int32(-1)))
            ctx.shared.store(lds.pick_weight.at(row, ctx.lane), weight)

        @dev.when(chosen)
        def _() -> None:
            ctx.shared.fetch_or(lds.active_bits.at(picked // 32), fx.Int32(1) << (picked % 32))

    def list_active(self) -> Any:
        """The picked experts in ascending order, in LDS; returns their number. A barrier must come before,
        and one comes before it returns."""
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

        dev.barrier()
        return dev.uniform(total)


def _score(logit: fx.Float32) -> fx.Float32:
    return m.square_root(m.softplus(logit))


def _ranked(value: fx.Float32) -> fx.Int32:
    """An integer that orders as the float does; a NaN below all."""
    bits = dev.f32_bits(value)
    flipped = (bits < 0).select(bits ^ 0x7FFFFFFF, bits)
    return (value == value).select(flipped, fx.Int32(_NOT_A_NUMBER))


def pick_of(ctx: Context, row: Any, expert: Any) -> tuple[Any, Any]:
    """(slot, weight) of ``expert`` among the picks of step row ``row``; slot is -1 if it has not picked
    it."""
    slot, weight = fx.Int32(-1), fx.Float32(0.0)
    for quad in range(-(-ctx.geometry.picks // 4)):
        experts = ctx.shared.load(ctx.lds.pick_expert.at(row, quad * 4), 4)
        weights = ctx.shared.load(ctx.lds.pick_weight.at(row, quad * 4), 4).bitcast(fx.Float32)
        for i in range(min(4, ctx.geometry.picks - quad * 4)):
            here = experts[i] == expert
            slot = here.select(fx.Int32(quad * 4 + i), slot)
            weight = here.select(weights[i], weight)
    return slot, weight
