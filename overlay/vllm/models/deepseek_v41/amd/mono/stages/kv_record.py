# SPDX-License-Identifier: Apache-2.0
"""The row's own key into the sliding-window cache: normalised, turned, quantised, stored at the row's slot.

Input: the published key, bf16 [rows, 512]. Output: the record (``geometry``) at ``slots[row]``; a row whose
slot is negative has none. Work split: one wave a row, on the last workgroups, whose query projection is done
by then: nothing of this launch waits for it.

Numerics: RMSNorm in fp32, rounded to bf16; the rotary in fp32, rounded to bf16; one UE8M0 code per 64 of the
values without position, of the largest magnitude and 1e-4, e4m3 rounded to nearest even. On CDNA3 vLLM keeps
these records in FNUZ FP8, with the largest magnitude at 224 in place of 448: the same bytes, and codes one
higher (csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu).
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m

from ..geometry import (
    HEAD_DIM,
    NORM_EPSILON,
    POSITION_FREE,
    QUERY_RANK,
    RECORD_BLOCK,
    RECORD_CODES,
    RECORD_DATA,
    ROTARY,
    WORKGROUPS,
)
from .context import Context
from .published import PublishedRows
from .qkv_projection import rotated

_VALUES = HEAD_DIM // dev.WAVE  # of one lane
_SMALLEST = 0x38D1B717  # 1e-4


def insert(ctx: Context, rows: PublishedRows) -> None:
    """Store the records of this workgroup's row, if it has one."""
    g = ctx.geometry
    row = WORKGROUPS - 1 - ctx.workgroup

    @dev.when((row < g.rows) & (ctx.wave == 0))
    def _() -> None:
        rows.wait_in_wave(g.query_workgroups, g.qkv_workgroups - g.query_workgroups)
        words = ctx.work.load(rows.rows.at(row, QUERY_RANK // 2 + ctx.lane * (_VALUES // 2)), 4)
        slot = dev.uniform(dev.Buffer(ctx.args.slots).load(row * 8))

        @dev.when(slot >= 0)
        def _() -> None:
            _store(ctx, row, slot, [words[i] for i in range(4)])


def _store(ctx: Context, row: Any, slot: Any, words: list[Any]) -> None:
    pairs, code = _record(ctx, row, words)
    block, inside = slot // ctx.args.window_block, slot % ctx.args.window_block
    cache = dev.Buffer(ctx.args.window_cache + fx.Int64(block) * ctx.args.window_stride)
    data = inside * RECORD_DATA
    free = ctx.lane < POSITION_FREE // _VALUES

    @dev.when(free)
    def _() -> None:
        packed = [ctx.isa.scale_fp8(pairs[i : i + 2], code) for i in (0, 2)]
        cache.store(data + ctx.lane * _VALUES, dev.vector_i32(packed))

    @dev.when(ctx.lane >= POSITION_FREE // _VALUES)
    def _() -> None:
        at = data + POSITION_FREE + (ctx.lane * _VALUES - POSITION_FREE) * 2
        cache.store(at, dev.vector_i32(pairs))

    # The lane behind the last block stores the pad.
    @dev.when((ctx.lane * _VALUES % RECORD_BLOCK == 0) & (ctx.lane * _VALUES <= POSITION_FREE))
    def _() -> None:
        codes = ctx.args.window_block * RECORD_DATA + inside * RECORD_CODES
        cache.store_byte(
            codes + ctx.lane * _VALUES // RECORD_BLOCK,
            free.select(code + ctx.isa.record_code_bias, fx.Int32(0)),
        )


def _record(ctx: Context, row: Any, words: list[Any]) -> tuple[list[Any], Any]:
    """This lane's eight values as bf16 pairs, and the code of its block."""
    squares = fx.Float32(0.0)
    for word in words:
        squares = ctx.isa.dot_bf16(word, word, squares)
    for distance in (1, 2, 4, 8, 16, 32):
        squares = squares + dev.shuffle_xor(squares, distance)
    rstd = m.reciprocal_sqrt(squares * (1.0 / HEAD_DIM) + NORM_EPSILON)
    weights = dev.Buffer(ctx.args.key_norm).load(ctx.lane * (_VALUES * 2), 4)
    dim = ctx.lane * _VALUES
    turns = dim >= POSITION_FREE
    position = dev.Buffer(ctx.args.positions).load(row * 8)
    angle = turns.select((dim - POSITION_FREE) // 2, fx.Int32(0))
    table = dev.Buffer(ctx.args.cos_sin)
    at = position * (ROTARY * 4) + angle * 4
    cos, sin = table.load(at, 4).bitcast(fx.Float32), table.load(at + ROTARY * 2, 4).bitcast(fx.Float32)
    pairs = []
    for i, word in enumerate(words):
        (low, high), (first, second) = m.unpack_bf16(word), m.unpack_bf16(weights[i])
        even, odd = m.round_bf16(ctx.isa, low * rstd * first, high * rstd * second)
        x, y = rotated(cos[i], sin[i], even, odd)
        pairs.append(ctx.isa.pack_bf16(turns.select(x, even), turns.select(y, odd)))
    amax = dev.unsigned_max(m.largest_of_pairs(pairs), fx.Int32(_SMALLEST))
    for distance in (1, 2, 4):
        amax = dev.unsigned_max(amax, dev.shuffle_xor(amax, distance))
    return pairs, m.mx_code(amax)
