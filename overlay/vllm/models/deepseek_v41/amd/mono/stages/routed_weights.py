# SPDX-License-Identifier: Apache-2.0
"""The layouts in which the serving engine keeps the routed experts' MXFP4 weights, which the launch reads
where they lie. A lane's operand is 32 values of one row, the lane's MX block, and the block's code.

- ``aiter_shuffle``: AITER's own, of its fused experts on CDNA4. Gate and up in turn by tiles of 16 rows,
  bytes in tiles of 16 rows by 4 runs of 16 bytes, codes in words of two columns by two rows.
- ``row_major``: of AITER's Triton experts, which CDNA3 runs. Gate and up in turn by rows, bytes row-major,
  codes by block: [experts, K / 32, rows].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent.isa.base import Code

from ..geometry import HIDDEN, K_STEP, MX_BLOCK, TILE, WAVES, padded_share
from .context import Context

_BLOCKS = HIDDEN // MX_BLOCK
_ROW_BYTES = HIDDEN // 2
_STEP_BYTES = K_STEP // 2
_TILES = 4  # of a gate/up task: gate, up, gate, up
_TILE_BYTES = TILE * _ROW_BYTES


@dataclass
class Place:
    """Where a lane's part of a gate/up task begins: the expert's weights and codes, and offsets in both.
    ``block_codes``: bytes between codes of neighbouring blocks, where that is by block."""

    weights: dev.Buffer
    codes: dev.Buffer
    at: Any
    code_at: Any
    block_codes: int = 0


class DownWeights(ABC):
    """This lane's part of one routed expert's down weights. ``output(part)`` gives (weight row of this lane,
    whether it has one). ``packs``: the layout gives ``packed``."""

    packs = False

    def __init__(self, ctx: Context, expert: Any, output: Any) -> None:
        self.ctx, self.output = ctx, output
        g = ctx.geometry
        self.padded = padded_share(g.share, ctx.isa.expert_layout)
        self._weights = self._buffer(ctx.args.w2, expert, HIDDEN * self.padded // 2)
        self._codes = self._buffer(ctx.args.w2_scale, expert, HIDDEN * self.code_columns)

    @staticmethod
    def _buffer(address: Any, expert: Any, size: int) -> dev.Buffer:
        return dev.Buffer(address + fx.Int64(expert) * size, size)

    @property
    @abstractmethod
    def code_columns(self) -> int:
        """Codes of a row in memory."""

    @abstractmethod
    def load(self, part: int, step: int) -> Any:
        """Four words of the weight row of ``part``; zeros in lanes without a row and in the loader's padding,
        which is not read."""

    @abstractmethod
    def codes(self, part: int) -> list[Code]:
        """The weight row's codes, one for each K step."""

    def packed(self, row: Any, step: Any) -> tuple[Any, Code]:
        """Four words and the code of this lane's own weight row and K step; zeros past the last block."""
        raise NotImplementedError(f"{type(self).__name__} packs no K steps; see ``packs``")


class RoutedWeights(ABC):
    """A layout, as the routed stages read it. ``down`` is its ``DownWeights``."""

    down: type[DownWeights]

    @abstractmethod
    def place(self, ctx: Context, expert: Any, block: Any, there: Any) -> Place:
        """Of 32 gate and the same up outputs of an expert; past the end where not ``there``."""

    @abstractmethod
    def words(self, place: Place, pair: int, which: int, step: int) -> Any:
        """Four words of gate (0) or up (1) tile ``pair`` at the wave's K step ``step``."""

    @abstractmethod
    def codes_of(self, place: Place, pair: int, step: int) -> Any:
        """The codes of ``pair``: gate's in the low byte, up's in the next."""


# ---- AITER's shuffle
class _ShuffledDown(DownWeights):
    @property
    def code_columns(self) -> int:
        return -(-(self.padded // MX_BLOCK) // 8) * 8

    def load(self, part: int, step: int) -> Any:
        g, group = self.ctx.geometry, self.ctx.group
        row, has = self.output(part)
        at = row // TILE * (TILE * self.padded // 2) + row % TILE * 16 + group * 256
        at = has.select(at, fx.Int32(dev.PAST_END)) + step * 1024
        if step * 4 + 3 >= g.blocks:
            at = (step * 4 + group < g.blocks).select(at, fx.Int32(dev.PAST_END))
        return self._weights.load(at, 4, dev.STREAM)

    def codes(self, part: int) -> list[Code]:
        g, group = self.ctx.geometry, self.ctx.group
        row, has = self.output(part)
        words = []
        for word in range(-(-g.down_steps // 2)):
            index = (row // 32 * (self.code_columns // 8) + word) * 64 + group * 16 + row % TILE
            at = has.select(index * 4, fx.Int32(dev.PAST_END))
            # Byte 2 (step % 2) + (row % 32) // 16 of a word.
            words.append(dev.shift_right(self._codes.load(at, 1, dev.STREAM), row // TILE % 2 * 8))
        return [Code(words[step // 2], 2 * (step % 2)) for step in range(g.down_steps)]


class _Shuffled(RoutedWeights):
    down = _ShuffledDown

    def place(self, ctx: Context, expert: Any, block: Any, there: Any) -> Place:
        padded = padded_share(ctx.geometry.share, ctx.isa.expert_layout)
        expert_bytes = 2 * padded * HIDDEN // 2
        expert_codes = 2 * padded * _BLOCKS
        weights = dev.Buffer(ctx.args.w13 + fx.Int64(expert) * expert_bytes, expert_bytes)
        codes = dev.Buffer(ctx.args.w13_scale + fx.Int64(expert) * expert_codes, expert_codes)
        past = fx.Int32(dev.PAST_END)
        at = block * (_TILES * _TILE_BYTES) + ctx.wave * 1024 + ctx.lane * 16
        # A wave's K steps are all even or all odd, so it reads its half of a word of codes.
        code_at = (block * 2 * (_BLOCKS // 8) + ctx.wave // 2) * 256 + ctx.lane * 4 + ctx.wave % 2 * 2
        return Place(weights, codes, there.select(at, past), there.select(code_at, past))

    def words(self, place: Place, pair: int, which: int, step: int) -> Any:
        offset = (2 * pair + which) * _TILE_BYTES + step * WAVES * 1024
        return place.weights.load(place.at, 4, dev.STREAM, base=offset)

    def codes_of(self, place: Place, pair: int, step: int) -> Any:
        # A word is of one gate and one up row for two K steps: gate, up, gate, up from the low byte.
        offset = (pair * (_BLOCKS // 8) + step * WAVES // 2) * 256
        return place.codes.load_half(place.code_at, dev.STREAM, base=offset)


# ---- row-major
class _RowMajorDown(DownWeights):
    packs = True  # CDNA3 widens operands, whose unused rows take the time of used ones

    @property
    def code_columns(self) -> int:
        return self.padded // MX_BLOCK

    def _at(self, part: int, step: int, at: Any) -> Any:
        """``at`` where the lane has a row and the step a block for its group."""
        g = self.ctx.geometry
        _, has = self.output(part)
        if step * 4 + 3 >= g.blocks:
            has = has & (step * 4 + self.ctx.group < g.blocks)
        return has.select(at, fx.Int32(dev.PAST_END))

    def load(self, part: int, step: int) -> Any:
        row, _ = self.output(part)
        at = row * (self.padded // 2) + self.ctx.group * 16 + step * _STEP_BYTES
        return self._weights.load(self._at(part, step, at), 4, dev.STREAM)

    def codes(self, part: int) -> list[Code]:
        row, _ = self.output(part)
        out = []
        for step in range(self.ctx.geometry.down_steps):
            at = self._at(part, step, (step * 4 + self.ctx.group) * HIDDEN + row)
            out.append(Code(self._codes.load_byte(at, dev.STREAM)))
        return out

    def packed(self, row: Any, step: Any) -> tuple[Any, Code]:
        block = step * 4 + self.ctx.group
        real, past = block < self.ctx.geometry.blocks, fx.Int32(dev.PAST_END)
        at = row * (self.padded // 2) + block * (MX_BLOCK // 2)
        words = self._weights.load(real.select(at, past), 4, dev.STREAM)
        code_at = real.select(block * HIDDEN + row, past)
        return words, Code(self._codes.load_byte(code_at, dev.STREAM))


class _RowMajor(RoutedWeights):
    down = _RowMajorDown

    def place(self, ctx: Context, expert: Any, block: Any, there: Any) -> Place:
        rows = 2 * padded_share(ctx.geometry.share, ctx.isa.expert_layout)
        size, num_codes = rows * _ROW_BYTES, rows * _BLOCKS
        weights = dev.Buffer(ctx.args.w13 + fx.Int64(expert) * size, size)
        codes = dev.Buffer(ctx.args.w13_scale + fx.Int64(expert) * num_codes, num_codes)
        past = fx.Int32(dev.PAST_END)
        gate_row = 2 * (block * MX_BLOCK + ctx.row)
        at = gate_row * _ROW_BYTES + ctx.wave * _STEP_BYTES + ctx.group * 16
        code_at = (ctx.wave * 4 + ctx.group) * rows + gate_row
        return Place(weights, codes, there.select(at, past), there.select(code_at, past), rows)

    def words(self, place: Place, pair: int, which: int, step: int) -> Any:
        offset = (pair * 2 * TILE + which) * _ROW_BYTES + step * WAVES * _STEP_BYTES
        return place.weights.load(place.at + offset, 4, dev.STREAM)

    def codes_of(self, place: Place, pair: int, step: int) -> Any:
        offset = step * WAVES * 4 * place.block_codes + pair * 2 * TILE
        return place.codes.load_half(place.code_at + offset, dev.STREAM)


def routed_weights(ctx: Context) -> RoutedWeights:
    """The layout of this architecture's routed experts."""
    return {"aiter_shuffle": _Shuffled, "row_major": _RowMajor}[ctx.isa.expert_layout]()
