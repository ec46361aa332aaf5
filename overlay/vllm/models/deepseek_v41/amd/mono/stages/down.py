# SPDX-License-Identifier: Apache-2.0
"""Down projections of the picked experts and of the shared one, for this workgroup's 20 output columns.

Inputs: the intermediate rows (mailbox), the weights in the layouts of the loader, the picks in LDS. Output:
one bf16 word (two columns) of this rank's partial a lane, for the all-reduce.

Work split: a workgroup owns 20 rows of the down weights, as 16 and 4 outputs of two tiles, for every
expert, so its sum over experts needs no other workgroup. Waves take the picked experts in turn and the K
steps of the shared expert, and add through LDS.

Packing: an operand of the 4 outputs uses a quarter of its rows. Where the layout packs, it holds them for
four K steps at once, row 4 s + o output o of step s. A product with the rows of step s is that step's where
the lane's group is s, and dropped elsewhere; the groups are added after the last expert.

Numerics: an expert's fp32 product is scaled by the row's routing weight and added in fp32: by wave, within a
wave in ascending order of the experts, the shared expert last; then rounded to bf16. Of packed operands each
lane group adds its own K steps so, the shared expert in group 0, and the groups come last, neighbours first.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.handoff import WORD_BYTES, Receiver
from vllm.models.common.amd.persistent.isa.base import Code
from vllm.models.common.amd.persistent.regions import Region

from ..geometry import HIDDEN, K_STEP, MX_BLOCK, TILE, WAVES
from .activations import HALVES
from .context import Context
from .routed_weights import DownWeights, routed_weights
from .routing import pick_of, picked_in
from .wave_sums import leave

_PARTS = 2  # the 16 and the 4 outputs
_PACK = 4  # K steps of a packed operand, one for each lane group of a product
# What an error record says was awaited: the slot of an intermediate row in these low bits, its block above.
AWAITED_SLOT_BITS = 4


class _Short:
    """Products of the 4 outputs with one tile of rows, from operands that hold four K steps each."""

    def __init__(self, ctx: Context, packs: list[tuple[Any, Code]]) -> None:
        self.ctx, self._packs = ctx, packs
        self._ready: Any = None

    def add(self, step: int, words: Any, row_code: Code, acc: Any) -> Any:
        """``acc`` plus the products of K step ``step``, in the lanes of its group. Steps come in order."""
        ctx = self.ctx
        pack, place = divmod(step, _PACK)
        weights, code = self._packs[pack]
        if place == 0:
            self._ready = ctx.isa.ready_fp4(weights, code)
        after = ctx.isa.mfma_fp4(self._ready, code, words, row_code, acc)
        if step == pack * _PACK == ctx.geometry.down_steps - 1:
            return after  # the other steps' rows are zeros
        mine = ctx.group == place
        return dev.vector_f32([mine.select(after[i], acc[i]) for i in range(4)])


class Down:
    """``stage`` is the stage number of the wait for intermediate rows."""

    def __init__(self, ctx: Context, stage: int) -> None:
        self.ctx, self.stage = ctx, stage
        self._first = ctx.slice_idx * ctx.geometry.columns

    def output(self, part: int) -> tuple[Any, Any]:
        """(weight row of this lane, whether it has one) of a part."""
        ctx = self.ctx
        row = ctx.row + part * TILE
        return self._first + row, row < ctx.geometry.columns

    def sum_experts(self, num_active: Any) -> None:
        """Add this wave's experts and leave the sums in LDS. Two barriers."""
        ctx, g = self.ctx, self.ctx.geometry
        zero = dev.vector_f32([fx.Float32(0.0)] * 4)
        start = [zero] * (g.row_tiles * _PARTS)

        def one(index: Any, carried: list[Any]) -> list[Any]:
            return self._add_expert(index, carried)

        total = dev.loop(ctx.wave, num_active, WAVES, start, one)
        total = self._add_shared(total)
        if routed_weights(ctx).down.packs:
            total = [self._over_groups(x) if i % _PARTS else x for i, x in enumerate(total)]
        # A wave may still finish its last block.
        dev.barrier()
        leave(ctx, total)
        dev.barrier()

    @staticmethod
    def _over_groups(sums: Any) -> Any:
        """The sums of four lane groups, in each."""
        values = [sums[i] for i in range(4)]
        for distance in (16, 32):
            values = [x + dev.shuffle_xor(x, distance) for x in values]
        return dev.vector_f32(values)

    # ---- intermediate rows as operands
    def _wait(self, tile: int, slot: Any, first: Any, count: int) -> tuple[list[Any], Any]:
        """Wait for the blocks of ``count`` K steps from step ``first`` in ``slot`` of a tile's rows. Returns
        a code for each step and the offset of the bytes; past the end in lanes whose slot is negative."""
        ctx, g = self.ctx, self.ctx.geometry
        row = ctx.row + tile * TILE
        has = slot >= 0
        past = fx.Int32(dev.PAST_END)
        ready = has.select(ctx.workspace.blocks_ready.at(row, slot, ctx.group, first), past)
        offsets, real = [], []
        for i in range(count):
            step = first + i
            offsets.append(ready + i * WORD_BYTES)
            # The last step may have blocks in some groups only; words of the others are never sent.
            whole = isinstance(step, int) and step * 4 + 3 < g.blocks
            real.append(has if whole else has & (step * 4 + ctx.group < g.blocks))

        def awaited(load: int, _: int) -> Any:
            block = (dev.i32(first) + load) * 4 + ctx.group
            return (block << AWAITED_SLOT_BITS) | slot

        words = Receiver(ctx.launch, self.stage).words(ctx.work, offsets, real, awaited)
        bytes_at = has.select(
            ctx.workspace.intermediate.at(row, slot) + ctx.group * ctx.isa.group_stride, past
        )
        return [Code(word[1]) for word in words], bytes_at

    def _bytes(self, at: Any, step: Any, count_check: bool) -> Any:
        """Eight words of one K step; zeros past the last block."""
        ctx, g = self.ctx, self.ctx.geometry
        halves = []
        for half in range(HALVES):
            where = at + step * K_STEP + half * ctx.isa.half_stride
            if count_check:
                k = step * K_STEP + half * ctx.isa.half_stride + ctx.group * ctx.isa.group_stride
                where = (k < g.share).select(where, fx.Int32(dev.PAST_END))
            halves.append(ctx.work.load(where, 4, dev.DEVICE))
        return dev.vector_i32([half[i] for half in halves for i in range(4)])

    # ---- routed
    def _add_expert(self, index: Any, total: list[Any]) -> list[Any]:
        ctx, g = self.ctx, self.ctx.geometry
        expert = dev.uniform(ctx.shared.load(ctx.lds.active.at(index)))
        weights = routed_weights(ctx).down(ctx, expert, self.output)
        parts = range(1 if weights.packs else _PARTS)
        codes = [weights.codes(part) for part in parts]
        # Weights on their way while the rows are awaited; the FFN's input no longer fills the registers.
        steps = range(g.down_steps)
        loaded = {(part, step): weights.load(part, step) for step in steps for part in parts}
        packs = self._load_packs(weights) if weights.packs else []
        out = []
        for tile in range(g.row_tiles):
            before = total[tile * _PARTS : (tile + 1) * _PARTS]

            def add(tile: int = tile, before: list[Any] = before) -> list[Any]:
                slot, weight = pick_of(ctx, ctx.row + tile * TILE, index)
                row_codes, at = self._wait(tile, slot, 0, g.down_steps)
                # Bytes of many steps before their first product: not one round trip a K step. Five steps at
                # once fit the registers beside the sums of several tiles.
                at_once = g.down_steps if g.row_tiles == 1 else 5
                acc = [dev.vector_f32([fx.Float32(0.0)] * 4)] * _PARTS
                short = _Short(ctx, packs)
                for first in range(0, g.down_steps, at_once):
                    chunk = steps[first : first + at_once]
                    row_bytes = [self._bytes(at, step, step * 4 + 3 >= g.blocks) for step in chunk]
                    dev.schedule_fence()
                    for step, words in zip(chunk, row_bytes, strict=True):
                        words = ctx.isa.ready(words, row_codes[step])
                        for part in parts:
                            acc[part] = ctx.isa.mfma_fp4(
                                loaded[part, step], codes[part][step], words, row_codes[step], acc[part]
                            )
                        if packs:
                            acc[1] = short.add(step, words, row_codes[step], acc[1])
                return [
                    dev.vector_f32([m.fused(x[i], weight, y[i]) for i in range(4)])
                    for x, y in zip(acc, before, strict=True)
                ]

            # With one tile, some row of it picked the expert.
            one_tile = g.row_tiles == 1
            out += add() if one_tile else dev.choose(picked_in(ctx, tile, index), add, before)
        return out

    def _load_packs(self, weights: DownWeights) -> list[tuple[Any, Code]]:
        """The 4 outputs' operands, each of four K steps."""
        ctx, outputs = self.ctx, self.ctx.geometry.columns - TILE
        row = self._first + TILE + ctx.row % outputs
        starts = range(0, ctx.geometry.down_steps, _PACK)
        return [weights.packed(row, start + ctx.row // outputs) for start in starts]

    # ---- shared
    def _add_shared(self, total: list[Any]) -> list[Any]:
        """Wave w takes K steps w, w + 8, ..; a step past the end multiplies zeros."""
        ctx, g = self.ctx, self.ctx.geometry
        weights = dev.Buffer(ctx.args.shared_w2, HIDDEN * g.share)
        codes = dev.Buffer(ctx.args.shared_w2_scale, HIDDEN // MX_BLOCK * g.blocks)
        past = fx.Int32(dev.PAST_END)
        out = list(total)
        for turn in range(-(-g.down_steps // WAVES)):
            step = ctx.wave + turn * WAVES
            operands, lane_codes = [], []
            for part in range(_PARTS):
                row, has = self.output(part)
                halves = []
                for half in range(HALVES):
                    k = step * K_STEP + half * ctx.isa.half_stride + ctx.group * ctx.isa.group_stride
                    real = has & (k < g.share)
                    halves.append(weights.load(real.select(row * g.share + k, past), 4, dev.STREAM))
                operands.append(dev.vector_i32([half[i] for half in halves for i in range(4)]))
                block = step * 4 + ctx.group
                at = (has & (block < g.blocks)).select(row // MX_BLOCK * g.blocks + block, past)
                lane_codes.append(Code(codes.load_byte(at)))
            for tile in range(g.row_tiles):
                row = ctx.row + tile * TILE
                inside = row < g.rows
                slot = inside.select(fx.Int32(g.picks), fx.Int32(-1))
                (code,), at = self._wait(tile, slot, step, 1)
                words = ctx.isa.ready(self._bytes(at, step, True), code)
                for part in range(_PARTS):
                    where = tile * _PARTS + part
                    out[where] = ctx.isa.mfma_fp8(operands[part], lane_codes[part], words, code, out[where])
                ctx.fence()
        return out


def slice_word(ctx: Context, row: Any, word: Any, sums: Region | None = None) -> Any:
    """This rank's partial of columns 2 word, 2 word + 1 of the slice for a step row, two bf16: from the
    waves' ``sums`` (``partial``) in LDS, of the 16 and the 4 columns of a tile of rows."""
    partial = sums or ctx.lds.partial
    tile, lane_row = row // TILE, row % TILE
    values = []
    for half in range(2):
        column = word * 2 + half
        part = column // TILE
        inside = column % TILE
        lane = inside // 4 * 16 + lane_row
        total = fx.Float32(0.0)
        for wave in range(partial.shape[1]):
            at = partial.at(0, wave, tile * _PARTS + part, lane, inside % 4)
            total = total + dev.bits_f32(ctx.shared.load(at))
        values.append(total)
    return ctx.isa.pack_bf16(values[0], values[1])
