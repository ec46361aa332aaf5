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
from .activations import HALVES, Operand
from .context import Context
from .routed_weights import Place, routed_weights
from .routing import pick_of, picked_in
from .wave_sums import add_waves, leave

_TILES = 4  # gate, up, gate, up
_CODE_COLUMNS = HIDDEN // MX_BLOCK


class GateUp:
    """Both kinds of tasks on one set of activations, ``operands[tile of rows][128 k]``."""

    def __init__(self, ctx: Context, operands: list[list[Operand]]) -> None:
        self.ctx, self.operands = ctx, operands
        self.steps = ctx.hidden_steps
        self._weights = routed_weights(ctx)
        # Where the rows' operands leave few registers, few K steps' weights at a time, and beside three tiles
        # of rows the sums of one pair of tiles at a time.
        tight = ctx.isa.weight_sets < 2 and ctx.geometry.row_tiles > 1
        self._groups = [range(1), range(1, 2)] if tight and ctx.geometry.row_tiles > 2 else [range(2)]
        self._at_once = 3 if tight else self.steps
        # Where products need the rows in another form, the pairs of a group share it.
        self._loads = self._groups if tight else [range(1), range(1, 2)]
        self._ready: dict[int, Any] = {}

    # ---- routed experts
    def routed(self, num_active: Any) -> None:
        """Every task of this workgroup, in order. Tasks begin with the workgroups that had no other stage's
        work, so that the last round's fall on those. With one tile of rows the registers hold a task's
        weights, and the next one's are on their way while this one is handed over; where they hold two
        tasks', also while this one is multiplied."""
        ctx, g = self.ctx, self.ctx.geometry
        total = num_active * g.blocks
        mine = (ctx.workgroup + (WORKGROUPS - g.roles_end)) % WORKGROUPS

        def two(task: Any, carried: list[Any]) -> list[Any]:
            # Two tasks a turn of the loop, so that no weights move between registers.
            turn, *first = carried
            second = self._load(self._task(task + WORKGROUPS, total), range(2))
            self._hand_on(self._multiply(first, range(2), self._zeros()), task, turn)
            first = self._load(self._task(task + 2 * WORKGROUPS, total), range(2))

            @dev.when(task + WORKGROUPS < total)
            def _() -> None:
                acc = self._multiply(second, range(2), self._zeros())
                self._hand_on(acc, task + WORKGROUPS, turn + 1)

            return [turn + 2, *first]

        def ahead(task: Any, carried: list[Any]) -> list[Any]:
            turn, *first = carried
            acc = self._multiply(first, range(2), self._zeros())
            dev.schedule_fence()
            first = self._load(self._task(task + WORKGROUPS, total), range(2))
            self._hand_on(acc, task, turn)
            return [turn + 1, *first]

        def one(task: Any, carried: list[Any]) -> list[Any]:
            where = self._task(task, total)
            picked = [picked_in(ctx, tile, task // g.blocks) for tile in range(g.row_tiles)]
            for group in self._groups:
                acc = self._zeros()
                for pairs in (pairs for pairs in self._loads if pairs.start in group):
                    for first in range(0, self.steps, self._at_once):
                        steps = range(first, min(first + self._at_once, self.steps))
                        loaded = self._load(where, pairs, steps)
                        acc = self._multiply(loaded, pairs, acc, picked, steps)
                        ctx.fence()
                self._leave(acc, group)
            self._finish_routed(task)
            return carried

        if g.row_tiles == 1:
            # As the products take them, for every task.
            self._ready = {step: ctx.isa.ready(x.words, x.code) for step, x in enumerate(self.operands[0])}
            start = self._load(self._task(mine, total), range(2))
            two_sets = ctx.isa.weight_sets > 1
            step, body = (2 * WORKGROUPS, two) if two_sets else (WORKGROUPS, ahead)
            dev.loop(mine, total, step, [fx.Int32(1), *start], body)
        else:
            dev.loop(mine, total, WORKGROUPS, [], one)

    def _task(self, task: Any, total: Any) -> Place:
        """Where a task's weights are; past the end for a task past the last."""
        ctx, g = self.ctx, self.ctx.geometry
        there = task < total
        task = there.select(task, fx.Int32(0))
        expert = dev.uniform(ctx.shared.load(ctx.lds.active.at(task // g.blocks)))
        return self._weights.place(ctx, expert, task % g.blocks, there)

    def _load(self, place: Place, pairs: range, steps: range | None = None) -> list[Any]:
        """The weights of some gate/up pairs of tiles, step by step, then their codes; ``steps``: of
        all."""
        turns = [(pair, step) for pair in pairs for step in steps or range(self.steps)]
        operands = [
            self._weights.words(place, pair, which, step) for pair, step in turns for which in range(2)
        ]
        return operands + [self._weights.codes_of(place, pair, step) for pair, step in turns]

    def _multiply(
        self,
        loaded: list[Any],
        pairs: range,
        acc: list[list[Any]],
        picked: list[Any] | None = None,
        steps: range | None = None,
    ) -> list[list[Any]]:
        """``acc[tile][tile of rows]`` plus what ``_load`` gave times the rows, of tiles that are
        ``picked``."""
        ctx = self.ctx
        steps = steps or range(self.steps)
        num_codes = len(pairs) * len(steps)
        words = loaded[-num_codes:]
        out = [list(tiles) for tiles in acc]
        mine = [2 * pair + which for pair in pairs for which in range(2)]
        for rows in range(ctx.geometry.row_tiles):
            before = [out[tile][rows] for tile in mine]

            def products(rows: int = rows, before: list[Any] = before) -> list[Any]:
                after, ready = list(before), dict(self._ready)
                for i, word in enumerate(words):
                    step = steps[i % len(steps)]
                    x = self.operands[rows][step]
                    if step not in ready:
                        ready[step] = ctx.isa.ready(x.words, x.code)
                    for which in range(2):
                        at, weights = i // len(steps) * 2 + which, loaded[2 * i + which]
                        after[at] = ctx.isa.mfma_fp4(
                            weights, Code(word, which), ready[step], x.code, after[at]
                        )
                return after

            after = products() if picked is None else dev.choose(picked[rows], products, before)
            for tile, value in zip(mine, after, strict=True):
                out[tile][rows] = value
        return out

    def _hand_on(self, acc: list[list[Any]], task: Any, turn: Any) -> None:
        """A turn of one tile of rows, whose sums have a set of their own every second turn."""
        base = turn % 2 * self.ctx.lds.partial.stride(0)
        self._leave(acc, range(2), base)
        self._finish_routed(task, turn, base)

    def _finish_routed(self, task: Any, turn: Any = 0, base: Any = 0) -> None:
        ctx, blocks = self.ctx, self.ctx.geometry.blocks
        slot_of = lambda row: pick_of(ctx, row, task // blocks)[0]  # noqa: E731
        self._finish(task % blocks, slot_of, self._routed_product, turn, base)

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
        for group in self._groups:
            acc = self._zeros()
            for step in range(self.steps):
                k = (ctx.wave + step * WAVES) * K_STEP
                for which in range(2):  # gate, up
                    first_row = which * g.share + block * MX_BLOCK
                    code_at = (which * g.blocks + block) * _CODE_COLUMNS + k // MX_BLOCK + ctx.group
                    code = Code(codes.load_byte(code_at))
                    for pair in group:
                        at = first_row + pair * TILE + ctx.row
                        at = at * HIDDEN + k + ctx.group * ctx.isa.group_stride
                        halves = [
                            weights.load(at + half * ctx.isa.half_stride, 4, dev.STREAM)
                            for half in range(HALVES)
                        ]
                        operand = dev.vector_i32([half[i] for half in halves for i in range(4)])
                        self._multiply_shared(operand, code, step, acc[2 * pair + which])
                ctx.fence()
            self._leave(acc, group)
        self._finish(block, lambda row: fx.Int32(g.picks), self._shared_product)

    def _multiply_shared(self, operand: Any, code: Code, step: int, acc: list[Any]) -> None:
        """Add the products of one tile and 128 k to its sums."""
        isa = self.ctx.isa
        for rows, x in enumerate(operands[step] for operands in self.operands):
            acc[rows] = isa.mfma_fp8(operand, code, isa.ready(x.words, x.code), x.code, acc[rows])

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

    def _leave(self, acc: list[list[Any]], group: range, base: Any = 0) -> None:
        """Leave the sums of some pairs of tiles in LDS; a barrier must follow the last."""
        tiles = range(2 * group.start, 2 * group.stop)
        units = [value for tile in tiles for value in acc[tile]]
        leave(self.ctx, units, base, tiles.start * self.ctx.geometry.row_tiles)

    def _finish(
        self,
        block: Any,
        slot_of: Callable[[Any], Any],
        product: Callable[..., list[Any]],
        turn: Any = 0,
        base: Any = 0,
    ) -> None:
        """Add the waves' sums, left ``base`` bytes further; one wave a tile of rows activates, quantises and
        hands over.

        With one tile of rows, turns use two sets of sums and take the waves in order to finish, so no barrier
        is needed behind that: the wave that finished a set is past it when the set is written again."""
        ctx, g = self.ctx, self.ctx.geometry
        one_tile = g.row_tiles == 1
        dev.barrier()
        rows = fx.Int32(0) if one_tile else ctx.wave
        mine = ctx.wave == turn % WAVES if one_tile else ctx.wave < g.row_tiles

        @dev.when(mine)
        def _() -> None:
            sums = [add_waves(ctx, tile * g.row_tiles + rows, base) for tile in range(_TILES)]
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
