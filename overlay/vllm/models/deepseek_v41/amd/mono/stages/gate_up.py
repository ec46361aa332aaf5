# SPDX-License-Identifier: Apache-2.0
"""Gate and up projections with the activation between, of the routed experts and of the shared one.

Inputs: MXFP8 activations in registers, the weights in the layouts of the loader. Output: one MX block of the
intermediate row for every (step row, slot): 32 e4m3 bytes, then a mailbox word with the block's code.

Work split: a task is one expert and one block of 32 intermediate columns, that is two tiles of 16 gate and
two of 16 up outputs; the waves divide the hidden size and add through LDS, one wave a tile of rows
finishes. Tasks of routed experts go round the workgroups; those of the shared expert start at
``shared_first``.

A tile of rows is multiplied with an expert if one of them picked it: the rows are in registers already, and
the weights, not the products of a tile, take the time. Only rows that picked the expert hand their block
over.

Numerics: fp32 sums, gate at most 10, up within [-10, 10]. Routed: silu(gate) x up rounded to bf16. Shared:
gate and up rounded to bf16, silu rounded to bf16, product rounded to bf16. Then one E8M0 code per 32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.handoff import send, tag_word
from vllm.models.common.amd.persistent.isa.base import Code

from ..geometry import HIDDEN, K_STEP, MX_BLOCK, SWIGLU_LIMIT, TILE, WAVES, WORKGROUPS
from .activations import Operand
from .context import Context
from .routing import pick_of, picked_in

_TILES = 4  # gate, up, gate, up
_CODE_COLUMNS = HIDDEN // MX_BLOCK
_TILE_BYTES = TILE * HIDDEN // 2


class GateUp:
    """Both kinds of tasks on one set of activations, ``operands[tile of rows][128 k]``."""

    def __init__(self, ctx: Context, operands: list[list[Operand]]) -> None:
        self.ctx, self.operands = ctx, operands
        self.steps = ctx.hidden_steps

    # ---- routed experts
    def routed(self, num_active: Any) -> None:
        """Every task of this workgroup, in order. Tasks begin with the workgroups that had no other stage's
        work, so that the last round's fall on those. With one tile of rows the registers hold two tasks'
        weights,
        so the next task's are on their way while this one is multiplied and handed over."""
        ctx, g = self.ctx, self.ctx.geometry
        total = num_active * g.blocks
        mine = (ctx.workgroup + (WORKGROUPS - g.roles_end)) % WORKGROUPS

        def two(task: Any, carried: list[Any]) -> list[Any]:
            # Two tasks a turn of the loop, so that no weights move between registers.
            turn, *first = carried
            second = self._load(self._task(task + WORKGROUPS, total), range(2))
            self._finish_routed(self._multiply(first, range(2), self._zeros()), task, turn)
            first = self._load(self._task(task + 2 * WORKGROUPS, total), range(2))

            @dev.when(task + WORKGROUPS < total)
            def _() -> None:
                acc = self._multiply(second, range(2), self._zeros())
                self._finish_routed(acc, task + WORKGROUPS, turn + 1)

            return [turn + 2, *first]

        def one(task: Any, carried: list[Any]) -> list[Any]:
            where, acc = self._task(task, total), self._zeros()
            picked = [picked_in(ctx, tile, task // g.blocks) for tile in range(g.row_tiles)]
            for pair in range(2):
                pairs = range(pair, pair + 1)
                acc = self._multiply(self._load(where, pairs), pairs, acc, picked)
                ctx.fence()
            self._finish_routed(acc, task, fx.Int32(0))
            return carried

        if g.row_tiles == 1:
            start = self._load(self._task(mine, total), range(2))
            dev.loop(mine, total, 2 * WORKGROUPS, [fx.Int32(1), *start], two)
        else:
            dev.loop(mine, total, WORKGROUPS, [], one)

    def _task(self, task: Any, total: Any) -> tuple[dev.Buffer, dev.Buffer, Any, Any]:
        """(expert's weights, its codes, offsets of this lane in both); past the end for a task past the
        last."""
        ctx, g = self.ctx, self.ctx.geometry
        there = task < total
        task = there.select(task, fx.Int32(0))
        expert = dev.uniform(ctx.shared.load(ctx.lds.active.at(task // g.blocks)))
        block = task % g.blocks
        expert_bytes = 2 * g.padded_share * HIDDEN // 2
        expert_codes = 2 * g.padded_share * _CODE_COLUMNS
        weights = dev.Buffer(ctx.args.w13 + fx.Int64(expert) * expert_bytes, expert_bytes)
        codes = dev.Buffer(ctx.args.w13_scale + fx.Int64(expert) * expert_codes, expert_codes)
        past = fx.Int32(dev.PAST_END)
        at = block * (_TILES * _TILE_BYTES) + ctx.wave * 1024 + ctx.lane * 16
        code_at = (block * 2 * (_CODE_COLUMNS // 8) + ctx.wave // 2) * 256 + ctx.lane * 4 + ctx.wave % 2 * 2
        return weights, codes, there.select(at, past), there.select(code_at, past)

    def _load(self, where: tuple[dev.Buffer, dev.Buffer, Any, Any], pairs: range) -> list[Any]:
        """The weights of some gate/up pairs of tiles, step by step, then their codes.

        A word has the codes of one gate and one up row for two K steps: gate, up, gate, up from the low byte.
        """
        weights, codes, at, code_at = where
        operands = [
            weights.load(at, 4, dev.STREAM, base=(2 * pair + which) * _TILE_BYTES + step * WAVES * 1024)
            for pair in pairs
            for step in range(self.steps)
            for which in range(2)
        ]
        # A wave's K steps are all even or all odd, so it reads its half of a word.
        words = [
            codes.load_half(code_at, dev.STREAM, base=(pair * (_CODE_COLUMNS // 8) + step * WAVES // 2) * 256)
            for pair in pairs
            for step in range(self.steps)
        ]
        return operands + words

    def _multiply(
        self, loaded: list[Any], pairs: range, acc: list[list[Any]], picked: list[Any] | None = None
    ) -> list[list[Any]]:
        """``acc[tile][tile of rows]`` plus what ``_load`` gave times the rows, of tiles that are
        ``picked``."""
        ctx = self.ctx
        num_codes = len(pairs) * self.steps
        words = loaded[-num_codes:]
        out = [list(tiles) for tiles in acc]
        mine = [2 * pair + which for pair in pairs for which in range(2)]
        for rows in range(ctx.geometry.row_tiles):
            before = [out[tile][rows] for tile in mine]

            def products(rows: int = rows, before: list[Any] = before) -> list[Any]:
                after = list(before)
                for i, word in enumerate(words):
                    x = self.operands[rows][i % self.steps]
                    for which in range(2):
                        at = i // self.steps * 2 + which
                        code = Code(word, which)
                        after[at] = ctx.isa.mfma_fp4(loaded[2 * i + which], code, x.words, x.code, after[at])
                return after

            after = products() if picked is None else dev.choose(picked[rows], products, before)
            for tile, value in zip(mine, after, strict=True):
                out[tile][rows] = value
        return out

    def _finish_routed(self, acc: list[list[Any]], task: Any, turn: Any) -> None:
        ctx, blocks = self.ctx, self.ctx.geometry.blocks
        slot_of = lambda row: pick_of(ctx, row, task // blocks)[0]  # noqa: E731
        self._finish(acc, task % blocks, slot_of, self._routed_product, turn)

    # ---- the shared expert
    def shared(self) -> None:
        """This workgroup's block of the shared expert, if it has one."""
        ctx, g = self.ctx, self.ctx.geometry
        block = ctx.workgroup - g.shared_first

        @dev.when((block >= 0) & (block < g.blocks))
        def _() -> None:
            self._shared_task(block)

    def _shared_task(self, block: Any) -> None:
        ctx, g = self.ctx, self.ctx.geometry
        weights = dev.Buffer(ctx.args.shared_w13)
        codes = dev.Buffer(ctx.args.shared_w13_scale)
        acc = self._zeros()
        for step in range(self.steps):
            k = (ctx.wave + step * WAVES) * K_STEP
            for which in range(2):  # gate, up
                first_row = which * g.share + block * MX_BLOCK
                code_at = (which * g.blocks + block) * _CODE_COLUMNS + k // MX_BLOCK + ctx.group
                code = Code(codes.load_byte(code_at))
                for pair in range(2):
                    at = (first_row + pair * TILE + ctx.row) * HIDDEN + k + ctx.group * 16
                    halves = [weights.load(at + half * 64, 4, dev.STREAM) for half in range(2)]
                    operand = dev.vector_i32([half[i] for half in halves for i in range(4)])
                    for rows in range(g.row_tiles):
                        x = self.operands[rows][step]
                        tile = 2 * pair + which
                        acc[tile][rows] = ctx.isa.mfma_fp8(operand, code, x.words, x.code, acc[tile][rows])
            ctx.fence()
        self._finish(acc, block, lambda row: fx.Int32(g.picks), self._shared_product, fx.Int32(0))

    # ---- both
    def _zeros(self) -> list[list[Any]]:
        zero = dev.vector_f32([fx.Float32(0.0)] * 4)
        return [[zero] * self.ctx.geometry.row_tiles for _ in range(_TILES)]

    def _routed_product(self, gate: list[Any], up: list[Any]) -> list[Any]:
        out = []
        for x, y in zip(gate, up, strict=True):
            x = m.minimum(x, fx.Float32(SWIGLU_LIMIT))
            y = m.maximum(m.minimum(y, fx.Float32(SWIGLU_LIMIT)), fx.Float32(-SWIGLU_LIMIT))
            out.append(x * m.sigmoid(x) * y)
        return self._rounded(out)

    def _shared_product(self, gate: list[Any], up: list[Any]) -> list[Any]:
        gate = [m.minimum(x, fx.Float32(SWIGLU_LIMIT)) for x in self._rounded(gate)]
        up = self._rounded(up)
        up = [m.maximum(m.minimum(y, fx.Float32(SWIGLU_LIMIT)), fx.Float32(-SWIGLU_LIMIT)) for y in up]
        silu = self._rounded([x * m.sigmoid(x) for x in gate])
        return self._rounded([x * y for x, y in zip(silu, up, strict=True)])

    def _rounded(self, values: list[Any]) -> list[Any]:
        isa = self.ctx.isa
        return [x for i in range(0, len(values), 2) for x in m.round_bf16(isa, values[i], values[i + 1])]

    def _finish(
        self,
        acc: list[list[Any]],
        block: Any,
        slot_of: Callable[[Any], Any],
        product: Callable[..., list[Any]],
        turn: Any,
    ) -> None:
        """Add the waves' sums; one wave a tile of rows activates, quantises and hands over.

        With one tile of rows, turns use two sets of sums and take the waves in order to finish, so one
        barrier a turn is enough: the wave that finished a set is past it when the set is written again."""
        ctx, g = self.ctx, self.ctx.geometry
        one_tile = g.row_tiles == 1
        partial = ctx.lds.partial
        base = turn % 2 * partial.stride(0) if one_tile else 0
        for tile in range(_TILES):
            for rows in range(g.row_tiles):
                at = partial.at(0, ctx.wave, tile * g.row_tiles + rows, ctx.lane) + base
                ctx.shared.store(at, acc[tile][rows])
        dev.barrier()
        rows = fx.Int32(0) if one_tile else ctx.wave
        mine = ctx.wave == turn % WAVES if one_tile else ctx.wave < g.row_tiles

        @dev.when(mine)
        def _() -> None:
            sums = []
            for tile in range(_TILES):
                total: Any = None
                for wave in range(WAVES):
                    at = partial.at(0, wave, tile * g.row_tiles + rows, ctx.lane) + base
                    value = ctx.shared.load(at, 4).bitcast(fx.Float32)
                    total = value if total is None else total + value
                sums.append([total[i] for i in range(4)])
            self._hand_over(sums, rows, block, slot_of, product)

        if not one_tile:
            dev.barrier()

    def _hand_over(self, sums: list[list[Any]], tile: Any, block: Any, slot_of: Any, product: Any) -> None:
        """Lane (g, r) has columns 16 p + 4 g .. of the block for step row r, p = 0, 1."""
        ctx, g = self.ctx, self.ctx.geometry
        row = tile * TILE + ctx.row
        inside = row < g.rows
        row = inside.select(row, fx.Int32(0))
        middle = [product(sums[2 * pair], sums[2 * pair + 1]) for pair in range(2)]
        amax = m.largest_magnitude(middle[0] + middle[1])
        for distance in (16, 32):
            amax = dev.unsigned_max(amax, dev.shuffle_xor(amax, distance))
        code = m.mx_code(amax)
        inverse = m.mx_inverse(code)
        slot = slot_of(row)
        has = inside & (slot >= 0)

        @dev.when(has)
        def _() -> None:
            for pair in range(2):
                payload = ctx.isa.pack_fp8([x * inverse for x in middle[pair]])
                at = ctx.workspace.intermediate.at(row, slot, block * MX_BLOCK + pair * TILE + ctx.group * 4)
                ctx.work.store(at, payload, dev.DEVICE)

        # The block's word follows its bytes, which one wave stores.
        dev.drain()

        @dev.when(has & (ctx.group == 0))
        def _() -> None:
            at = ctx.workspace.blocks_ready.at(row, slot, block % 4, block // 4)
            send(ctx.work, at, fx.Int32(0), tag_word(ctx.launch.tag, code), dev.DEVICE)
