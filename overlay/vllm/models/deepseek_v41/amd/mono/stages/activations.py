# SPDX-License-Identifier: Apache-2.0
"""The collapsed rows in every workgroup: received, normalised, quantised, held in registers as operands.

Inputs: the collapsed rows of every slice (workspace), the norm's weights. Outputs, in registers of each wave,
for its 640 of the 5120 hidden values: the normed rows in bf16 (a tile of 16 rows at a time, for the router)
and in MXFP8 (all rows).

Lane map of one tile: lane (group g, row r) holds, for each 128 k and each half h of them, the run of 16
values k = 64 h + 16 g .. of step row r. That is the 8-bit operand's own layout, and each 8 of the 16 are a
bf16 operand. An MX block of 32 is two neighbouring groups of one half.

Hand-off: with one tile of rows, tagged words straight into registers. With more, the words and tags would not
fit beside the operands and every workgroup would read them past the L2, so the rows are published: stored at
device scope, drained, announced by one word a slice, then read through the L2, twice, instead of kept.

Numerics: RMSNorm in fp32 with the sum of squares of the bf16 row, rounded to bf16; one E8M0 code per 32 of
the rounded values, e4m3 rounded to nearest even. The routed and the shared experts use the same codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.handoff import Receiver, send, tag_word
from vllm.models.common.amd.persistent.isa.base import Code

from ..geometry import HIDDEN, K_STEP, NORM_EPSILON, THREADS, WAVES
from .context import Context

HALVES = 2
RUN_PAIRS = 8  # bf16 pairs of a run


@dataclass
class Operand:
    """MXFP8 activations of one tile and 128 k: eight words a lane, and the lane's E8M0 code."""

    words: Any
    code: Code


class CollapsedRows:
    """The collapsed rows on their way from every slice to every workgroup."""

    def __init__(self, ctx: Context, stage: int) -> None:
        self.ctx, self.stage = ctx, stage

    def send(self, row: Any, word: Any, payload: Any) -> None:
        """Hand word ``word`` of this workgroup's slice of a row over, in the lanes that have one."""
        ctx = self.ctx
        at = ctx.workspace.collapsed.at(row, ctx.slice_idx * ctx.geometry.pairs + word)
        if ctx.geometry.published:
            ctx.work.store(at, payload, dev.DEVICE)
        else:
            send(ctx.work, at, payload, tag_word(ctx.launch.tag), dev.DEVICE)

    def announce(self) -> None:
        """After every lane's ``send``: a barrier, and for published rows the slice's word."""
        ctx = self.ctx
        if ctx.geometry.published:
            dev.drain()
        dev.barrier()
        if ctx.geometry.published:

            @dev.when(ctx.thread == 0)
            def _() -> None:
                at = ctx.workspace.collapsed_ready.at(ctx.slice_idx)
                send(ctx.work, at, fx.Int32(0), tag_word(ctx.launch.tag), dev.DEVICE)

    def await_slices(self) -> None:
        """Wait for the words of the slices that this wave reads; nothing for tagged rows."""
        ctx = self.ctx
        if not ctx.geometry.published:
            return
        slices = ctx.geometry.wave_k // ctx.geometry.columns
        mine = ctx.lane % slices + ctx.wave * slices
        at = ctx.workspace.collapsed_ready.at(mine)
        Receiver(ctx.launch, self.stage).words(ctx.work, [at], ctx.lane < slices, mine)
        dev.acquire()

    def tile(self, tile: int) -> _Runs:
        """The runs of a tile of rows; zero in lanes without a row."""
        ctx = self.ctx
        row = ctx.row + tile * 16
        active = row < ctx.geometry.rows
        base = active.select(ctx.workspace.collapsed.at(row, first_pair(ctx)), fx.Int32(dev.PAST_END))
        return _Published(ctx, base) if ctx.geometry.published else self._tagged(base, active)

    def _tagged(self, base: Any, active: Any) -> _Runs:
        ctx = self.ctx
        receiver = Receiver(ctx.launch, self.stage)
        runs = [(step, half) for step in range(ctx.hidden_steps) for half in range(HALVES)]
        at_once = 4  # runs whose words and tags fit the registers together
        words: dict[tuple[int, int], list[Any]] = {}
        for first in range(0, len(runs), at_once):
            chunk = runs[first : first + at_once]
            offsets = [
                base + ((step * K_STEP + half * 64) // 2 * 8 + pair * 16)
                for step, half in chunk
                for pair in range(RUN_PAIRS // 2)
            ]
            awaited = first_pair(ctx) // ctx.geometry.pairs
            vectors = receiver.pairs(ctx.work, offsets, active, awaited)
            flat = [word for vector in vectors for word in (vector[0], vector[2])]
            for i, run in enumerate(chunk):
                words[run] = flat[i * RUN_PAIRS : (i + 1) * RUN_PAIRS]
        return _Held(words)


def first_pair(ctx: Context, step: int = 0, half: int = 0) -> Any:
    """Index in a row, counted in bf16 pairs, of this lane's run."""
    k = ctx.wave * ctx.geometry.wave_k + step * K_STEP + half * 64
    return k // 2 + ctx.group * RUN_PAIRS


class _Runs:
    """bf16 pairs of this lane's runs of one tile."""

    def run(self, step: int, half: int) -> list[Any]:
        """The eight pairs of a run."""
        raise NotImplementedError


class _Held(_Runs):
    def __init__(self, words: dict[tuple[int, int], list[Any]]) -> None:
        self._words = words

    def run(self, step: int, half: int) -> list[Any]:
        return self._words[step, half]


class _Published(_Runs):
    def __init__(self, ctx: Context, base: Any) -> None:
        self._ctx, self._base = ctx, base

    def run(self, step: int, half: int) -> list[Any]:
        at = self._base + (step * K_STEP + half * 64) * 2
        quads = [self._ctx.work.load(at + 16 * quad, 4) for quad in range(RUN_PAIRS // 4)]
        return [quad[i] for quad in quads for i in range(4)]


class NormedTile:
    """One tile of rows after RMSNorm, as bf16 runs. Making it holds one barrier."""

    def __init__(self, ctx: Context, tile: int, rows: _Runs) -> None:
        self.ctx, self._rows = ctx, rows
        self._rstd = self._reciprocal_norm(tile)
        self._held: list[list[list[Any]]] | None = None
        if not ctx.geometry.published:
            self._held = [self._normalise(step) for step in range(ctx.hidden_steps)]

    def halves(self, step: int) -> list[list[Any]]:
        """bf16 pairs [half][8] of 128 k; loaded and normalised again at every call for published rows."""
        return self._normalise(step) if self._held is None else self._held[step]

    def _reciprocal_norm(self, tile: int) -> Any:
        ctx, lds = self.ctx, self.ctx.lds
        squares = fx.Float32(0.0)
        for step in range(ctx.hidden_steps):
            for half in range(HALVES):
                for word in self._rows.run(step, half):
                    low, high = m.unpack_bf16(word)
                    squares = m.fused(high, high, m.fused(low, low, squares))
                ctx.fence()
        for distance in (16, 32):
            squares = squares + dev.shuffle_xor(squares, distance)

        @dev.when(ctx.group == 0)
        def _() -> None:
            ctx.shared.store(lds.squares.at(ctx.wave, tile, ctx.row), squares)

        dev.barrier()
        total = fx.Float32(0.0)
        for wave in range(WAVES):
            total = total + dev.bits_f32(ctx.shared.load(lds.squares.at(wave, tile, ctx.row)))
        return m.reciprocal_sqrt(total * (1.0 / HIDDEN) + NORM_EPSILON)

    def _normalise(self, step: int) -> list[list[Any]]:
        ctx = self.ctx
        out = []
        for half in range(HALVES):
            at = ctx.lds.norm.at(first_pair(ctx, step, half))
            weights = [ctx.shared.load(at + 16 * quad, 4) for quad in range(RUN_PAIRS // 4)]
            # Unpack again: the floats of the sum of squares would take twice the registers till here.
            packed = dev.pin(dev.vector_i32(self._rows.run(step, half)))
            run = []
            for i in range(RUN_PAIRS):
                low, high = m.unpack_bf16(packed[i])
                low_weight, high_weight = m.unpack_bf16(weights[i // 4][i % 4])
                run.append(ctx.isa.pack_bf16(low * self._rstd * low_weight, high * self._rstd * high_weight))
            out.append(run)
            ctx.fence()
        return out


def load_norm(ctx: Context) -> None:
    """Copy the norm's weights to LDS; visible after a barrier."""

    def one(start: Any, carried: list[Any]) -> list[Any]:
        quad = start + ctx.thread

        @dev.when(quad < HIDDEN // 8)
        def _() -> None:
            ctx.shared.store(ctx.lds.norm.at(quad * 4), dev.Buffer(ctx.args.norm_weight).load(quad * 16, 4))

        return carried

    dev.loop(0, HIDDEN // 8, THREADS, [], one)


def quantise(ctx: Context, normed: NormedTile) -> list[Operand]:
    """The MXFP8 operands of one tile, one for each 128 k of this wave."""
    words, codes = [], []
    for step in range(ctx.hidden_steps):
        step_words, code = _quantise_step(ctx, normed.halves(step))
        words.append(step_words)
        codes.append(code)
        ctx.fence()
    # Four codes share a register.
    packed = []
    for first in range(0, len(codes), 4):
        word = codes[first]
        for byte, code in enumerate(codes[first + 1 : first + 4], 1):
            word = word | (code << (8 * byte))
        packed.append(dev.pin(word))
    return [Operand(x, Code(packed[i // 4], i % 4)) for i, x in enumerate(words)]


def _quantise_step(ctx: Context, halves: list[list[Any]]) -> tuple[Any, Any]:
    codes, words = [], []
    for run in halves:
        values = [x for word in run for x in m.unpack_bf16(word)]
        amax = m.magnitude(values[0])
        for x in values[1:]:
            amax = m.maximum(amax, m.magnitude(x))
        amax = m.maximum(amax, dev.shuffle_xor(amax, 16))
        codes.append(m.mx_code(amax))
        inverse = m.mx_inverse(codes[-1])
        scaled = [x * inverse for x in values]
        words += [ctx.isa.pack_fp8(scaled[i : i + 4]) for i in range(0, 16, 4)]
        ctx.fence()
    return dev.pin(dev.vector_i32(words)), block_code(ctx, codes[0], codes[1])


def block_code(ctx: Context, first: Any, second: Any) -> Any:
    """The code of k 32 g .. 32 g + 31, which the matrix instruction wants in lanes of group g.

    ``first`` is the code of this lane's 16 values in the first half (block g // 2), ``second`` in the second
    (block 2 + g // 2). Groups 0 and 3 have theirs; 1 and 2 swap across 32 lanes."""
    low = ctx.group < 2
    received = dev.shuffle_xor(low.select(second, first), 32)
    own = low.select(first, second)
    outer = (ctx.group == 0) | (ctx.group == 3)
    return outer.select(own, received)
