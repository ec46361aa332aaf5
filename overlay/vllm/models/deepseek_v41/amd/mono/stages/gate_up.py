# SPDX-License-Identifier: Apache-2.0
"""Gate and up projections with the activation between, of the routed experts and of the shared one.

Inputs: MXFP8 activations in registers, the weights in the layouts of the loader. Output: one MX block of the
intermediate row for every (step row, slot): 32 e4m3 bytes, then a mailbox word with the block's code.

Work split: a task is one expert and one block of 32 intermediate columns, that is two tiles of 16 gate and
two of 16 up outputs; the waves divide the hidden size and add through LDS, one wave a tile of rows
finishes. Tasks of routed experts go round the workgroups; those of the shared expert start at
``shared_first``.

Every row of the step is multiplied with every picked expert: the rows are in registers already, and the
weights, not the products, take the time. Only rows that picked the expert hand their block over.

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
from .routing import pick_of

_TILES = 4  # gate, up, gate, up
_CODE_COLUMNS = HIDDEN // MX_BLOCK


class GateUp:
    """Both kinds of tasks on one set of activations, ``operands[tile of rows][128 k]``."""

    def __init__(self, ctx: Context, operands: list[list[Operand]]) -> None:
        self.ctx, self.operands = ctx, operands
        self.steps = ctx.hidden_steps

    # ---- routed experts
    def routed(self, num_active: Any) -> None:
        """Every task of this workgroup, in order."""
        ctx, g = self.ctx, self.ctx.geometry

        def one(task: Any, carried: list[Any]) -> list[Any]:
            self._routed_task(task // g.blocks, task % g.blocks)
            return carried

        dev.loop(ctx.workgroup, num_active * g.blocks, WORKGROUPS, [], one)

    def _routed_task(self, index: Any, block: Any) -> None:
        ctx, g = self.ctx, self.ctx.geometry
        expert = dev.uniform(ctx.shared.load(ctx.lds.active.at(index)))
        tile_bytes = TILE * HIDDEN // 2
        expert_bytes = 2 * g.padded_share * HIDDEN // 2
        expert_codes = 2 * g.padded_share * _CODE_COLUMNS
        weights = dev.Buffer(ctx.args.w13 + fx.Int64(expert) * expert_bytes, expert_bytes)
        codes = dev.Buffer(ctx.args.w13_scale + fx.Int64(expert) * expert_codes, expert_codes)
        at = block * (_TILES * tile_bytes) + ctx.wave * 1024 + ctx.lane * 16
        acc = self._zeros()
        for pair in range(2):
            operands = [
                [
                    weights.load(at + ((2 * pair + which) * tile_bytes + step * WAVES * 1024), 4, dev.STREAM)
                    for which in range(2)
                ]
                for step in range(self.steps)
            ]
            # A word has the codes of one gate and one up row for two K steps: gate, up, gate, up from the low
            # byte. A wave's K steps are all even or all odd.
            row_at = (block * 2 + pair) * (_CODE_COLUMNS // 8) + ctx.wave // 2
            words = [
                codes.load(((row_at + i * WAVES // 2) * 64 + ctx.lane) * 4, 1, dev.STREAM)
                for i in range(self.steps)
            ]
            words = [dev.shift_right(word, ctx.wave % 2 * 16) for word in words]
            for step in range(self.steps):
                for which in range(2):
                    tile = 2 * pair + which
                    code = Code(words[step], which)
                    for rows in range(g.row_tiles):
                        x = self.operands[rows][step]
                        acc[tile][rows] = ctx.isa.mfma_fp4(
                            operands[step][which], code, x.words, x.code, acc[tile][rows]
                        )
            ctx.fence()
        self._finish(acc, block, lambda row: pick_of(ctx, row, index)[0], self._routed_product)

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
        self._finish(acc, block, lambda row: fx.Int32(g.picks), self._shared_product)

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
    ) -> None:
        """Add the waves' sums; one wave a tile of rows activates, quantises and hands over. Two barriers."""
        ctx, g = self.ctx, self.ctx.geometry
        partial = ctx.lds.partial
        for tile in range(_TILES):
            for rows in range(g.row_tiles):
                ctx.shared.store(partial.at(ctx.wave, tile * g.row_tiles + rows, ctx.lane), acc[tile][rows])
        dev.barrier()

        @dev.when(ctx.wave < g.row_tiles)
        def _() -> None:
            sums = []
            for tile in range(_TILES):
                where = ctx.wave + tile * g.row_tiles
                total = ctx.shared.load(partial.at(0, where, ctx.lane), 4).bitcast(fx.Float32)
                for wave in range(1, WAVES):
                    total = total + ctx.shared.load(partial.at(wave, where, ctx.lane), 4).bitcast(fx.Float32)
                sums.append([total[i] for i in range(4)])
            self._hand_over(sums, block, slot_of, product)

        dev.barrier()

    def _hand_over(self, sums: list[list[Any]], block: Any, slot_of: Any, product: Any) -> None:
        """Lane (g, r) has columns 16 p + 4 g .. of the block for step row r, p = 0, 1."""
        ctx, g = self.ctx, self.ctx.geometry
        row = ctx.wave * TILE + ctx.row
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
