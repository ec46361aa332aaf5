# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of a decode step: each row's heads over its window's and its selected compressed keys.

Inputs: the query, bf16 [rows, heads, 512]; both caches; the rows' key lists. Output: ``attended``, the heads'
outputs with the rotary taken back, MXFP8 [rows, heads x 512], a block of 32 handed over by a word that
carries its code.

Work split: a task is ``task_heads`` heads of one row with all of its keys, so that no partial result crosses
workgroups. A row's tasks lie on one XCD, whose L2 then holds its keys. In a task the waves take tiles of 16
keys in turn, each with its own softmax, and add through LDS.

How a tile's keys become operands of the scores and of the weighted sum, for keys are values, too, is in
``key_tiles``.

Numerics: keys are exact in bf16; scores in fp32, times 512^-1/2; softmax in base 2 with the sink; weights are
rounded to bf16 against the largest score of the wave's keys so far, their sum is of the unrounded ones; the
output is rounded to bf16, turned in fp32, quantised with one E8M0 code per 32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.handoff import send, tag_word

from ..geometry import (
    GROUP_K,
    HEAD_DIM,
    MX_BLOCK,
    POSITION_FREE,
    RECORD_CODES,
    RECORD_DATA,
    ROTARY,
    SELECTED,
    THREADS,
    TILE,
    WAVES,
    WORKGROUPS,
    XCDS,
)
from .context import Context
from .key_tiles import DIM_TILES, THERE, Key, key_tiles
from .qkv_projection import rotated

_LOWEST = -1.0e30
_SCALE = HEAD_DIM**-0.5 * m.LOG2_E


class SparseAttention:
    """This workgroup's task, if it has one."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self._tiles = ctx, key_tiles(ctx)
        g = ctx.geometry
        # Parts of the dims whose sums LDS has room for.
        self._rounds = -(-g.task_heads * HEAD_DIM // ctx.lds.sums.shape[1])
        tasks = g.heads // g.task_heads
        # From the last workgroup of an XCD on: the FFN half's roles beside others begin with the first.
        local = WORKGROUPS // XCDS - 1 - ctx.workgroup // XCDS
        self.row = ctx.workgroup % XCDS + local // tasks * XCDS
        self.first_head = local % tasks * g.task_heads
        self._there = self.row < g.rows

    def run(self) -> None:
        """Attend, and hand the heads over. Every wave of the workgroup calls it; ends with a barrier."""

        @dev.when(self._there)
        def _() -> None:
            self._begin()
            self._load_query()
            self._list_keys()
            dev.barrier()
            sums = self._attend()
            for turn in range(self._rounds):
                if turn:
                    dev.barrier()
                self._leave(turn, *sums)
                dev.barrier()
                dev.when(self._finishes(turn))(partial(self._finish, turn))

        dev.barrier()

    # ---- the row
    def _begin(self) -> None:
        args, row = self.ctx.args, self.row
        position = dev.uniform(dev.Buffer(args.positions).load(row * 8))
        live = dev.uniform(dev.Buffer(args.slots).load(row * 8)) >= 0
        window = dev.uniform(dev.Buffer(args.window_lens).load(row * 4))
        self._position = position
        self._window = live.select(fx.min(window, args.window), fx.Int32(0))
        # The ratio is 1 or 2.
        there = dev.shift_right(position + 1, args.ratio - 1)
        self._selected = live.select(fx.min(there, args.selected_keys), fx.Int32(0))
        request = dev.uniform(dev.Buffer(args.requests).load(row * 4))
        self._table = args.block_table + fx.Int64(request * args.table_stride) * 4
        # Records of a block are a power of two.
        self._compressed_shift = dev.count_bits(args.compressed_block - 1)
        self._window_shift = dev.count_bits(args.window_block - 1)

    def _load_query(self) -> None:
        """The task's heads to LDS, 16 bytes a thread."""
        ctx, g = self.ctx, self.ctx.geometry
        pieces = HEAD_DIM * 2 // 16
        item = ctx.thread

        @dev.when(item < g.task_heads * pieces)
        def _() -> None:
            head, piece = item // pieces, item % pieces
            at = ((self.row * g.heads + self.first_head + head) * HEAD_DIM) * 2 + piece * 16
            ctx.shared.store(ctx.lds.query.at(head, piece * 8), dev.Buffer(ctx.args.query).load(at, 4))

    # ---- keys
    def _list_keys(self) -> None:
        """Where the row's keys lie, to LDS: a lane a key, so that no wave follows a key's indices while it
        multiplies."""
        ctx = self.ctx
        total = ctx.args.selected_keys + ctx.args.window

        def one(start: Any, carried: list[Any]) -> list[Any]:
            key = start + ctx.thread

            @dev.when(key < total)
            def _() -> None:
                ctx.shared.store(ctx.lds.keys.at(key), dev.vector_i32(self._place(key)))

            return carried

        dev.loop(0, total, THREADS, [], one)

    def _slot(self, key: Any) -> tuple[Any, Any]:
        """(slot of a key, negative if there is none; whether it is a compressed one)."""
        args = self.ctx.args
        in_window = key - args.selected_keys
        inside = (in_window >= 0) & (in_window < self._window)
        at = inside.select(self.row * args.window + in_window, fx.Int32(0))
        slot = inside.select(dev.Buffer(args.window_indices).load(at * 4), fx.Int32(-1))
        picked = key < self._selected
        entry = dev.Buffer(args.selected).load(picked.select(self.row * SELECTED + key, fx.Int32(0)) * 4)
        entry = picked.select(entry, fx.Int32(-1))
        has = entry >= 0
        entry = has.select(entry, fx.Int32(0))
        # Where there is no entry, any word will do.
        at = self._table + fx.Int64(dev.shift_right(entry, self._compressed_shift)) * 4
        block = dev.load_at(has.select(at, args.workspace), 1)
        compressed = (block << self._compressed_shift) | (entry & (args.compressed_block - 1))
        return has.select(compressed, slot), has

    def _place(self, key: Any) -> list[Any]:
        """A key's data and its codes as addresses, low words first; the lowest bit says that there is one. An
        absent key's are zeros."""
        args = self.ctx.args
        slot, compressed = self._slot(key)
        valid = slot >= 0
        slot = valid.select(slot, fx.Int32(0))
        cache = compressed.select(args.compressed_cache, args.window_cache)
        stride = compressed.select(args.compressed_stride, args.window_stride)
        records = compressed.select(args.compressed_block, args.window_block)
        shift = compressed.select(self._compressed_shift, self._window_shift)
        base = cache + fx.Int64(dev.shift_right(slot, shift)) * stride
        inside = slot & (records - 1)
        zeros = args.workspace + fx.Int64(self.ctx.workspace.zeros.offset)
        data = valid.select(base + fx.Int64(inside * RECORD_DATA), zeros)
        codes = valid.select(base + fx.Int64(records * RECORD_DATA + inside * RECORD_CODES), zeros)
        low, high = dev.address_words(data)
        return [low | valid.select(fx.Int32(THERE), fx.Int32(0)), high, *dev.address_words(codes)]

    # ---- scores and sums
    def _attend(self) -> tuple[Any, Any, list[Any]]:
        """(largest score, sum of weights of this lane's keys, sums by tile of dims) of this wave's keys."""
        zero = dev.vector_f32([fx.Float32(0.0)] * 4)
        start = [fx.Float32(_LOWEST), fx.Float32(0.0), *[zero] * DIM_TILES]

        def one(tile: Any, carried: list[Any]) -> list[Any]:
            return self._add_tile(self._tiles.load(tile), carried)

        tiles = (self.ctx.args.selected_keys + self.ctx.args.window) // TILE
        largest, total, *acc = dev.loop(self.ctx.wave, tiles, WAVES, start, one)
        for distance in (16, 32):
            total = total + dev.shuffle_xor(total, distance)
        return largest, total, acc

    def _add_tile(self, key: Key, carried: list[Any]) -> list[Any]:
        ctx, tiles = self.ctx, self._tiles
        before, total, *acc = carried
        score = tiles.scores(key)
        there = tiles.valid(key)
        valid = [(there & (1 << i)) != 0 for i in range(4)]
        scores = [v.select(score[i] * _SCALE, fx.Float32(_LOWEST)) for i, v in enumerate(valid)]
        top = m.maximum(m.maximum(scores[0], scores[1]), m.maximum(scores[2], scores[3]))
        for distance in (16, 32):
            top = m.maximum(top, dev.shuffle_xor(top, distance))
        largest = m.maximum(before, top)
        weights = [v.select(m.exp2(s - largest), fx.Float32(0.0)) for s, v in zip(scores, valid, strict=True)]
        shrink = m.exp2(before - largest)

        def shrunk() -> list[Any]:
            return [dev.vector_f32([x[i] * shrink for i in range(4)]) for x in acc]

        # Most tiles have no score above those before, and before the first there are none to shrink.
        grows = (largest > before) & (before > _LOWEST)
        acc = dev.choose(dev.first_lane_where(grows) >= 0, shrunk, acc)
        total = total * shrink + ((weights[0] + weights[1]) + (weights[2] + weights[3]))
        packed = dev.vector_i32([ctx.isa.pack_bf16(weights[i], weights[i + 1]) for i in (0, 2)])
        return [largest, total, *tiles.weighted(key, packed, acc)]

    # ---- over the waves
    def _sums_at(self, turn: int, wave: Any, head: Any, dim: Any) -> Any:
        """Where a wave leaves its sums: f32 [heads][dims of a turn]."""
        width = HEAD_DIM // self._rounds
        return self.ctx.lds.sums.at(wave) + (head * width + dim - turn * width) * 4

    def _leave(self, turn: int, largest: Any, total: Any, acc: list[Any]) -> None:
        """Lane (g, r) has four dims of every tile for head r."""
        ctx = self.ctx
        width = DIM_TILES // self._rounds

        @dev.when(ctx.row < ctx.geometry.task_heads)
        def _() -> None:
            for tile in range(turn * width, (turn + 1) * width):
                ctx.shared.store(self._sums_at(turn, ctx.wave, ctx.row, self._tiles.dim(tile)), acc[tile])
            if turn:
                return

            @dev.when(ctx.group == 0)
            def _() -> None:
                at = ctx.lds.softmax.at(ctx.wave, ctx.row)
                ctx.shared.store(at, dev.vector_f32([largest, total]))

    def _finishes(self, turn: int) -> Any:
        """Whether this lane has dims of the turn, in a wave that has a head."""
        ctx = self.ctx
        there = ctx.wave < ctx.geometry.task_heads
        if self._rounds == 1:
            return there
        return there & (ctx.lane // (dev.WAVE // self._rounds) == turn)

    def _finish(self, turn: int) -> None:
        """Wave h finishes head h of the task: lane l dims 8 l .. 8 l + 7."""
        ctx = self.ctx
        head = self.first_head + ctx.wave
        sink = dev.bits_f32(dev.Buffer(ctx.args.sink).load(head * 4)) * m.LOG2_E
        parts = [
            ctx.shared.load(ctx.lds.softmax.at(wave, ctx.wave), 2).bitcast(fx.Float32)
            for wave in range(WAVES)
        ]
        top = sink
        for part in parts:
            top = m.maximum(top, part[0])
        shares = [m.exp2(part[0] - top) for part in parts]
        total = m.exp2(sink - top)
        for part, share in zip(parts, shares, strict=True):
            total = m.fused(part[1], share, total)
        values = [fx.Float32(0.0)] * 8
        for wave, share in enumerate(shares):
            at = self._sums_at(turn, wave, ctx.wave, ctx.lane * 8)
            for quad in range(2):
                four = ctx.shared.load(at + quad * 16, 4).bitcast(fx.Float32)
                for i in range(4):
                    values[quad * 4 + i] = m.fused(four[i], share, values[quad * 4 + i])
        inverse = m.reciprocal(total)
        self._hand_over(head, self._turned_back([x * inverse for x in values]))

    def _turned_back(self, values: list[Any]) -> list[Any]:
        """Rounded to bf16; the rotary dims, which the last lanes have, turned by the negative angle."""
        ctx = self.ctx
        dim = ctx.lane * 8
        turns = dim >= POSITION_FREE
        angle = turns.select((dim - POSITION_FREE) // 2, fx.Int32(0))
        table = dev.Buffer(ctx.args.cos_sin)
        at = self._position * (ROTARY * 4) + angle * 4
        cos, sin = table.load(at, 4).bitcast(fx.Float32), table.load(at + ROTARY * 2, 4).bitcast(fx.Float32)
        out = []
        for i in range(4):
            even, odd = m.round_bf16(ctx.isa, values[2 * i], values[2 * i + 1])
            x, y = rotated(cos[i], -sin[i], even, odd)
            out += [turns.select(x, even), turns.select(y, odd)]
        return out

    def _hand_over(self, head: Any, values: list[Any]) -> None:
        """Four neighbouring lanes have a block."""
        ctx = self.ctx
        amax = m.largest_magnitude(values)
        for distance in (1, 2):
            amax = dev.unsigned_max(amax, dev.quad_xor(amax, distance))
        code = m.mx_code(amax)
        inverse = m.mx_inverse(code)
        words = [ctx.isa.pack_fp8([x * inverse for x in values[i : i + 4]]) for i in (0, 4)]
        at = ctx.workspace.attended.at(self.row, head * HEAD_DIM + ctx.lane * 8)
        ctx.work.store(at, dev.vector_i32(words), dev.DEVICE)
        dev.drain()

        @dev.when(ctx.lane % 4 == 0)
        def _() -> None:
            k = head * HEAD_DIM + ctx.lane * 8
            block = k % GROUP_K // MX_BLOCK
            where = ctx.workspace.attended_ready.at(self.row, k // GROUP_K, block % 4, block // 4)
            send(ctx.work, where, fx.Int32(0), tag_word(ctx.launch.tag, code), dev.DEVICE)
