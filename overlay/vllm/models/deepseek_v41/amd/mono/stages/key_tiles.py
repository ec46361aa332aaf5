# SPDX-License-Identifier: Apache-2.0
"""A tile of 16 keys in a wave: its scores, and the weighted sum of its values, which are the keys.

Keys are loaded to registers, a lane a quarter of a key, as operands of the scores. As operands of the sum a
lane needs one dim of several keys:

- ``KeysInLds`` leaves them in LDS as bf16, from where a read of columns gives them transposed;
- ``KeysInLanes``, where there is no such read, transposes them between four neighbouring lanes (``Quads``)
  while they are bytes. The four have the four keys of their lane group, which is where the sum wants them;
  the scores are products of 4 x 4 therefore. A code, of a key and a block, is a power of two that goes to
  the block's part of the score and, exactly, to the weights.

Both give ``scores``: four floats, lane (g, r)'s of keys 4 g .. 4 g + 3 with head r; and take the weights
alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.quads import Quads

from ..geometry import HEAD_DIM, POSITION_FREE, RECORD_BLOCK, TILE
from .context import Context

BLOCKS = POSITION_FREE // RECORD_BLOCK
DIM_TILES = HEAD_DIM // TILE
THERE = 1  # in the lowest bit of an address, which is a multiple of 16
_QUARTER = 16  # e4m3 of one block that a lane takes
_WORDS = _QUARTER // 4
_PARTS = 2  # runs of 32 rotary dims, of which a lane takes 8
_QUAD = 4


@dataclass
class Key:
    """A quarter of one key, as words: of each block of 64, and of both runs of the rotary dims; its codes."""

    valid: Any
    codes: Any
    blocks: list[Any]
    rotary: list[Any]

    @classmethod
    def load(cls, ctx: Context, key: Any, quarter: Any) -> Key:
        """Quarter ``quarter`` of the key at place ``key`` of the list in LDS."""
        place = ctx.shared.load(ctx.lds.keys.at(key), 4)
        data = dev.lane_address(place[0] & ~THERE, place[1])
        at = data + fx.Int64(quarter * _QUARTER)
        blocks = [dev.load_at(at + fx.Int64(b * RECORD_BLOCK), 4) for b in range(BLOCKS)]
        rotary = [dev.load_at(at + fx.Int64(POSITION_FREE + part * 64), 4) for part in range(_PARTS)]
        codes = dev.load_at(dev.lane_address(place[2], place[3]), 2)
        return cls((place[0] & THERE) != 0, codes, blocks, rotary)

    def code(self, block: int) -> Any:
        """The E8M0 code of a block."""
        return dev.shift_right(self.codes[block // 4], block % 4 * 8) & 0xFF


class KeysInLds:
    """Lane (g, r) loads quarter g of key r. Tile t of the sums has dims 16 t .. 16 t + 15."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def load(self, tile: Any) -> Key:
        """This lane's part of a tile."""
        return Key.load(self.ctx, tile * TILE + self.ctx.row, self.ctx.group)

    def valid(self, key: Key) -> Any:
        """A bit for each key of this lane's group, in the low four."""
        return dev.shift_right(dev.low_lanes(key.valid), self.ctx.group * 4)

    def dim(self, tile: int) -> Any:
        """The first of this lane's four dims in a tile of the sums."""
        return tile * TILE + self.ctx.group * 4

    def scores(self, key: Key) -> Any:
        """Scores of a tile, whose keys are left in LDS."""
        ctx, lds = self.ctx, self.ctx.lds
        operands = self._operands(key)
        head = ctx.row % ctx.geometry.task_heads
        score = dev.vector_f32([fx.Float32(0.0)] * 4)
        for dim, stride, words in operands:
            own = dim + ctx.group * stride
            ctx.shared.store(lds.values.at(ctx.wave, ctx.row, own), words)
            query = ctx.shared.load(lds.query.at(head, own), 4)
            score = ctx.isa.mfma_bf16(words, query, score)
        return score

    def _operands(self, key: Key) -> list[tuple[int, int, Any]]:
        """(first dim of lane group 0's, dims between groups, eight values as words) of each 32 k. In a block,
        lane group g has dims 16 g .. 16 g + 15 in two operands; of the rotary dims, 8 g .. 8 g + 7 of each
        32."""
        out = []
        for block, words in enumerate(key.blocks):
            scale = dev.bits_f32(key.code(block) << 23)
            for half in range(2):
                pairs = [p for i in range(2) for p in self.ctx.isa.expand_fp8(words[half * 2 + i], scale)]
                out.append((block * RECORD_BLOCK + half * 8, _QUARTER, dev.vector_i32(pairs)))
        for part, words in enumerate(key.rotary):
            out.append((POSITION_FREE + part * 32, 8, words))
        return out

    def weighted(self, _: Key, weights: Any, acc: list[Any]) -> list[Any]:
        """``acc`` plus the weights times the tile's values, which this wave left in LDS."""
        ctx = self.ctx
        # Per 16 lanes: lane 4 k + c points to four dims of key 4 g + k.
        key = ctx.group * 4 + ctx.row // 4
        base = ctx.lds.values.at(ctx.wave, key, ctx.row % 4 * 4)
        dev.wave_fence()
        out = []
        for tile, before in enumerate(acc):
            values = ctx.isa.column_bf16(ctx.shared, base + tile * TILE * 2)
            out.append(ctx.isa.mfma_bf16_half(values, weights, before))
        dev.wave_fence()
        return out


@dataclass
class _LaneKey(Key):
    """``scales``: of each block, for the value that the conversions make of its bytes."""

    scales: list[Any]


class KeysInLanes:
    """Lane (g, 4 q + c) loads quarter q of key 4 g + c. Four tiles of the sums have the 64 dims of a block;
    in tile j of them, lane group g has dims 16 g + 4 j .. 16 g + 4 j + 3. Of the rotary dims, two tiles have
    32, and lane group g has 8 g + 4 j and the next three."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._place, self._quarter = ctx.lane % _QUAD, ctx.row // _QUAD
        self._quads = Quads(ctx.lane)

    def load(self, tile: Any) -> _LaneKey:
        """This lane's part of a tile."""
        ctx = self.ctx
        key = Key.load(ctx, tile * TILE + ctx.group * _QUAD + self._place, self._quarter)
        scales = [dev.bits_f32(key.code(block) << 23) for block in range(BLOCKS)]
        blocks = key.blocks
        if bias := ctx.isa.record_code_bias:
            # The window's records are in the conversions' format, the compressed ones OCP on every
            # architecture: their bytes stand for less here, and may be -0.
            compressed = tile * TILE < ctx.args.selected_keys
            unit = compressed.select(fx.Float32(2.0**bias), fx.Float32(1.0))
            scales = [scale * unit for scale in scales]
            words = [block[i] for block in blocks for i in range(_WORDS)]
            words = dev.choose(compressed, lambda: [m.clear_negative_zeros(x) for x in words], words)
            blocks = [words[i : i + _WORDS] for i in range(0, len(words), _WORDS)]
        return _LaneKey(key.valid, key.codes, blocks, key.rotary, scales)

    def valid(self, key: Key) -> Any:
        """A bit for each key of this lane's group, in the low four."""
        return dev.row_lanes(key.valid, self.ctx.lane)

    def dim(self, tile: int) -> Any:
        """The first of this lane's four dims in a tile of the sums."""
        tiles = BLOCKS * _WORDS
        if tile < tiles:
            return tile // _WORDS * RECORD_BLOCK + self.ctx.group * _QUARTER + tile % _WORDS * _QUAD
        return POSITION_FREE + (tile - tiles) // 2 * 32 + self.ctx.group * 8 + tile % 2 * _QUAD

    # ---- scores
    def scores(self, key: _LaneKey) -> Any:
        """Scores of a tile: four heads at a time, each quarter by itself, then their sum."""
        ctx = self.ctx
        heads = ctx.geometry.task_heads
        sets = [self._scores(key, s * _QUAD + self._place % heads) for s in range(-(-heads // _QUAD))]
        out = [[dev.quads_sum(score[i]) for i in range(4)] for score in sets]
        if len(out) > 1:
            second = ctx.row % heads >= _QUAD
            out = [[second.select(b, a) for a, b in zip(*out, strict=True)]]
        return out[0]

    def _scores(self, key: _LaneKey, head: Any) -> Any:
        ctx = self.ctx
        zero = dev.vector_f32([fx.Float32(0.0)] * 4)
        total = [fx.Float32(0.0)] * 4
        for block, words in enumerate(key.blocks):
            dev.schedule_fence()
            part = zero
            query = self._query(head, block * RECORD_BLOCK + self._quarter * _QUARTER, _QUARTER)
            for i in range(_WORDS):
                values = dev.vector_i32(ctx.isa.expand_fp8(words[i], fx.Float32(1.0)))
                part = ctx.isa.mfma_bf16_quads(values, query[i], part)
            scale = [dev.quad_lane(key.scales[block], i) for i in range(4)]
            total = [m.fused(scale[i], part[i], total[i]) for i in range(4)]
        score = dev.vector_f32(total)
        for run, words in enumerate(key.rotary):
            query = self._query(head, POSITION_FREE + run * 32 + self._quarter * 8, 8)
            for i in range(2):
                values = dev.vector_i32([words[2 * i], words[2 * i + 1]])
                score = ctx.isa.mfma_bf16_quads(values, query[i], score)
        return score

    def _query(self, head: Any, dim: Any, count: int) -> list[Any]:
        """``count`` dims of a head, four an operand."""
        ctx = self.ctx
        loads = [ctx.shared.load(ctx.lds.query.at(head, dim + i), 4) for i in range(0, count, 8)]
        return [dev.vector_i32([x[i], x[i + 1]]) for x in loads for i in (0, 2)]

    # ---- sums
    def weighted(self, key: _LaneKey, weights: Any, acc: list[Any]) -> list[Any]:
        """``acc`` plus the weights times the tile's values."""
        ctx, out = self.ctx, list[Any]()
        exact = [x for i in range(2) for x in m.unpack_bf16(weights[i])]
        for block, words in enumerate(key.blocks):
            # A block at a time: more in flight would not fit the registers beside the sums.
            dev.schedule_fence()
            scaled = [exact[i] * dev.quad_lane(key.scales[block], i) for i in range(4)]
            pairs = dev.vector_i32([dev.upper_halves(scaled[i], scaled[i + 1]) for i in (0, 2)])
            for i in range(_WORDS):
                values = ctx.isa.expand_fp8(self._quads.bytes(words[i]), fx.Float32(1.0))
                out.append(ctx.isa.mfma_bf16_half(dev.vector_i32(values), pairs, acc[len(out)]))
        for words in key.rotary:
            for i in range(2):
                values = self._quads.halves(words[2 * i], words[2 * i + 1])
                out.append(ctx.isa.mfma_bf16_half(dev.vector_i32(values), weights, acc[len(out)]))
        return out


def key_tiles(ctx: Context) -> Any:
    """How this architecture transposes keys."""
    return KeysInLds(ctx) if ctx.isa.column_read else KeysInLanes(ctx)
