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

import itertools
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.handoff import Receiver, send, tag_word

from ..geometry import HIDDEN, ROUTED_SCALING, ROUTER_EXPERTS, THREADS, TILE, WAVES
from ..regions import NO_SLOT
from .activations import Activations
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

    def send_logits(self, activations: Activations) -> None:
        """Logits of this workgroup's experts for every row, if it has experts; after the rows' norms."""
        ctx = self.ctx

        @dev.when(ctx.workgroup < ctx.geometry.router_tiles)
        def _() -> None:
            self._multiply(activations)
            dev.barrier()

            @dev.when(ctx.wave < ctx.geometry.row_tiles)
            def _() -> None:
                self._send_tile(ctx.wave)

            # The operands take the place of the sums.
            dev.barrier()

    def _multiply(self, activations: Activations) -> None:
        """A wave's part of every logit, to LDS."""
        ctx, g, lds = self.ctx, self.ctx.geometry, self.ctx.lds
        _, which, k = self._fold()
        gate, gate_at = self._gate()
        tiles = range(g.row_tiles)
        rows = [which + tile * TILE for tile in tiles]
        at = [
            (row < g.rows).select(ctx.workspace.collapsed.at(row, k // 2), fx.Int32(dev.PAST_END))
            for row in rows
        ]
        rstd = [activations.rstd(fx.min(row, fx.Int32(g.rows - 1))) for row in rows]
        acc = [dev.vector_f32([fx.Float32(0.0)] * 4) for _ in tiles]
        for half in range(self._halves()):
            weights = self._norm_weights(k + half * 64)
            gates = [gate.load(gate_at + half * 128 + part * 16, 4) for part in range(2)]
            runs = [self._run(at[tile], half) for tile in tiles]
            for tile in tiles:
                normed = self._normed(runs[tile], rstd[tile], weights)
                for part in range(2):
                    operand = dev.vector_i32(normed[part * 4 : part * 4 + 4])
                    acc[tile] = ctx.isa.mfma_bf16(gates[part], operand, acc[tile])
            ctx.fence()
        for tile in tiles:
            ctx.shared.store(lds.router_sums.at(ctx.wave, tile, ctx.lane), acc[tile])

    def _run(self, at: Any, half: int) -> list[Any]:
        work = self.ctx.work
        return [x for quad in range(2) for x in _words(work.load(at + half * 128 + quad * 16, 4))]

    def _norm_weights(self, k: Any) -> list[Any]:
        """Of 16 neighbours, as floats."""
        ctx = self.ctx
        at = ctx.lds.norm.at(k // 2)
        words = [x for quad in range(2) for x in _words(ctx.shared.load(at + 16 * quad, 4))]
        return [x for word in words for x in m.unpack_bf16(word)]

    def _normed(self, words: list[Any], rstd: Any, weights: list[Any]) -> list[Any]:
        """Eight bf16 pairs after the norm."""
        values = [x * rstd for word in words for x in m.unpack_bf16(word)]
        values = [x * weight for x, weight in zip(values, weights, strict=True)]
        return [self.ctx.isa.pack_bf16(*values[i : i + 2]) for i in range(0, 16, 2)]

    def _send_tile(self, tile: Any) -> None:
        """Lane (g, r) of the sum has experts 4 g .. of row r; of folded parts, those on the diagonal."""
        ctx, g, lds = self.ctx, self.ctx.geometry, self.ctx.lds
        fold = self._fold()[0]
        total = ctx.shared.load(lds.router_sums.at(0, tile, ctx.lane), 4).bitcast(fx.Float32)
        for wave in range(1, WAVES):
            total = total + ctx.shared.load(lds.router_sums.at(wave, tile, ctx.lane), 4).bitcast(fx.Float32)
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
        """Lane l has experts from ``values`` l on, so of equal keys the lowest expert's is in the lowest
        lane."""
        ctx, g = self.ctx, self.ctx.geometry
        values = g.experts // dev.WAVE
        first = ctx.lane * values
        base = ctx.workspace.logits.at(row, first)
        words = Receiver(ctx.launch, self.stage_choose).pairs(
            ctx.work,
            [base + 16 * i for i in range(values // 2)],
            ctx.lane >= 0,
            lambda load, word: (first + 2 * load + word) // ROUTER_EXPERTS,
        )
        bias = dev.Buffer(ctx.args.gate_bias)
        keys = []
        for i, pair in enumerate(words):
            biases = bias.load((first + 2 * i) * 4, 2).bitcast(fx.Float32)
            keys += [_ranked(_score(dev.bits_f32(pair[2 * j])) + biases[j]) for j in range(2)]
        ranked = _descending([(key, fx.Int32(i)) for i, key in enumerate(keys)])
        # As many as the picks can ask a lane for.
        ranked = (ranked + [(fx.Int32(_TAKEN), fx.Int32(0))] * g.picks)[: g.picks]
        picked = fx.Int32(0)
        for pick in range(g.picks):
            key, value = ranked[0]
            lane = dev.first_lane_where(key == dev.wave_max(key))
            picked = (ctx.lane == pick).select(lane * values + dev.lane_value(value, lane), picked)
            # The lane's next one takes the place.
            here = ctx.lane == lane
            ranked = [
                (here.select(after[0], one[0]), here.select(after[1], one[1]))
                for one, after in itertools.pairwise(ranked)
            ]
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
        # A wave has the experts of two words.
        words = [
            dev.uniform(ctx.shared.load(lds.active_bits.at(4 * i), 4)[j])
            for i in range(g.experts // 128)
            for j in range(4)
        ]
        before, total = fx.Int32(0), fx.Int32(0)
        for i, word in enumerate(words):
            counted = dev.count_bits(word)
            before = before + (ctx.wave > i // 2).select(counted, fx.Int32(0))
            total = total + counted
        inside = ctx.thread < g.experts
        mine = ctx.shared.load(lds.active_bits.at(inside.select(ctx.thread // 32, fx.Int32(0))))
        present = dev.both(inside, (dev.shift_right(mine, ctx.thread % 32) & 1) == 1)
        below = before + dev.lanes_below(present)

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

        dev.loop(0, entries, THREADS, [], clear)
        dev.barrier()

        @dev.when(ctx.thread < g.rows * g.picks)
        def _() -> None:
            row, slot = ctx.thread // g.picks, ctx.thread % g.picks
            index = ctx.shared.load(lds.index_of.at(ctx.shared.load(lds.pick_expert.at(row, slot))))
            ctx.shared.store_byte(lds.slot_of.at(index, row), slot)

        dev.barrier()
        return total


def _words(vector: Any) -> list[Any]:
    return [vector[i] for i in range(4)]


def _score(logit: fx.Float32) -> fx.Float32:
    return m.square_root(m.softplus(logit))


def _descending(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Sorted by the first of each pair, in every lane. Equal ones keep their order, since only neighbours
    change places."""
    out = list(pairs)
    for turn in range(len(out)):
        for i in range(turn % 2, len(out) - 1, 2):
            (a, x), (b, y) = out[i], out[i + 1]
            later = a < b
            out[i] = fx.max(a, b), later.select(y, x)
            out[i + 1] = fx.min(a, b), later.select(x, y)
    return out


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
