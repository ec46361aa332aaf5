# SPDX-License-Identifier: Apache-2.0
"""CDNA3: no scaled matrix instruction, no 16 x 16 x 32 bf16 one, FNUZ FP8.

MX products. Both operands are widened to bf16 with their block's power of two multiplied in, and go through
16 x 16 x 16 bf16 instructions. Values of e2m1 and e4m3 have at most four significant bits, so widening is
exact and products are exact in fp32; a result differs from that of a scaled instruction in the order of the
fp32 sums alone. A lane's 32 values are one MX block with the lane's own code, and which k a lane's values are
is free where both operands agree, so that operands need no exchange between lanes. 8-bit instructions with
the scales applied to their results cost as much for one tile of rows and more for several: a scale belongs to
an output and a block, so every product of 32 k would need eight more operations a tile of rows, and operands
that lie across lane groups.

FP8. The bytes are OCP e4m3 in memory. The same byte is half the value in FNUZ, which the conversions here
make up for by a factor of two, and 0x80, OCP's -0, is FNUZ's NaN: the conversions must not see it. What is
quantised here has none. The serving engine keeps the sliding window's records as FNUZ values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm
from flydsl._mlir.dialects import rocdl as raw
from flydsl.expr.typing import as_ir_value

from .. import device as dev
from .. import math as m
from . import common
from .base import Code, Isa

# Byte selectors of ``dev.permute_bytes``.
_EVEN_BYTES, _ODD_BYTES = 0x06040200, 0x07050301
_LOW_PAIR, _HIGH_PAIR = 0x05010400, 0x07030602
# The least code whose half is a normal number. Quadruples are below code 252, of magnitudes no weight has.
_LEAST_CODE = 2


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _code(code: Code) -> fx.Int32:
    """The code by itself."""
    return dev.shift_right(code.word, 8 * code.byte) & 0xFF


@dataclass(frozen=True)
class _Widened:
    """An operand that ``ready`` or ``ready_fp4`` widened: bf16 pairs with the block's power of two multiplied
    in."""

    pairs: list[fx.Int32]


def _rows(activations: Any, code: Code) -> list[fx.Int32]:
    """The bf16 pairs of activations, which come widened or as words."""
    if not isinstance(activations, _Widened):
        activations = _widened(activations, code)
    return activations.pairs


def _widened(words: Any, code: Code) -> _Widened:
    return _Widened(_widen_fp8(*_here(words, 8, code)))


def _here(words: Any, count: int, code: Code) -> tuple[list[fx.Int32], Code]:
    """An operand that is widened where it is used and not before: what is widened for several products, or
    half widened, would not fit the registers."""
    return [dev.pin(words[i]) for i in range(count)], Code(dev.pin(code.word), code.byte)


def _table(code: Code) -> tuple[fx.Int32, fx.Int32, fx.Int32, fx.Int32]:
    """bf16 of the eight e2m1 magnitudes times the code's power of two, as bytes by magnitude: low bytes of
    the first four and of the last, then high bytes."""
    exponent = dev.unsigned_max(_code(code), fx.Int32(_LEAST_CODE))
    both = exponent * 0x00800080  # the code as exponent of two bf16
    words = [
        (exponent << 23) - 0x00800000,  # 0 and 0.5
        both + 0x00400000,  # 1 and 1.5
        both + 0x00C00080,  # 2 and 3
        both + 0x01400100,  # 4 and 6
    ]
    low, high = (
        [dev.permute_bytes(words[i + 1], words[i], selector) for i in (0, 2)]
        for selector in (_EVEN_BYTES, _ODD_BYTES)
    )
    return low[0], low[1], high[0], high[1]


def _widen_fp4(words: Any, code: Code) -> list[fx.Int32]:
    """bf16 pairs of 32 e2m1 of one block. Of each eight: (0, 2), (4, 6), (1, 3), (5, 7)."""
    low_first, low_last, high_first, high_last = _table(code)
    out = []
    for i in range(4):
        # Eight values at a time: more in flight would fill the registers.
        dev.schedule_fence()
        word = words[i]
        upper = dev.shift_right(word, 4)
        signs = ((word & 0x08080808) << 4, word & dev.i32(0x80808080))
        for nibbles, sign in zip((word, upper), signs, strict=True):
            magnitude = nibbles & 0x07070707
            low = dev.permute_bytes(low_last, low_first, magnitude)
            high = dev.permute_bytes(high_last, high_first, magnitude) | sign
            out += [dev.permute_bytes(high, low, _LOW_PAIR), dev.permute_bytes(high, low, _HIGH_PAIR)]
    return out


def _floats(word: fx.Int32, scales: ir.Value) -> list[fx.Int32]:
    """The bits of four 8-bit values times ``scales``, a power of two twice: of at most four significant bits,
    so that cutting them off to bf16 is exact."""
    two, bits = ir.VectorType.get([2], ir.F32Type.get()), ir.VectorType.get([2], _i32())
    out = []
    for upper in (False, True):
        pair = arith.mulf(raw.cvt_pk_f32_fp8(two, as_ir_value(word), upper), scales)
        vector = fx.Vector(llvm.bitcast(bits, pair), (2,), fx.Int32)
        out += [vector[0], vector[1]]
    return out


def _widen_fp8(words: Any, code: Code) -> list[fx.Int32]:
    """bf16 pairs of 32 e4m3 of one block, in the order of ``_widen_fp4``."""
    # One more than the code: the conversion takes the bytes for half their value.
    scale = dev.bits_f32((_code(code) + 1) << 23)
    scales = as_ir_value(dev.vector_f32([scale, scale]))
    out = []
    for i in range(0, 8, 2):
        dev.schedule_fence()
        values = _floats(words[i], scales) + _floats(words[i + 1], scales)
        out += [dev.upper_halves(values[a], values[b]) for a, b in ((0, 2), (4, 6), (1, 3), (5, 7))]
    return out


def _sum_products(weights: list[Any], activations: list[Any], acc: Any) -> Any:
    for i in range(0, len(weights), 2):
        first, second = (dev.vector_i32(x[i : i + 2]) for x in (weights, activations))
        acc = common.mfma_bf16_16(first, second, acc)
    return acc


def _pack_halves(halves: list[fx.Float32]) -> fx.Int32:
    """The bytes of four values from their halves: half a value has the same byte in FNUZ as the value in OCP,
    rounded alike. Of zeros there is one."""
    a, b, c, d = (as_ir_value(x) for x in halves)
    low = raw.cvt_pk_fp8_f32(_i32(), a, b, as_ir_value(fx.Int32(0)), False)
    return fx.Int32(raw.cvt_pk_fp8_f32(_i32(), c, d, low, True))


class Gfx942(Isa):
    """MI300X and MI325X."""

    name = "gfx942"
    lds_bytes = 64 * 1024
    compute_units = 304
    group_stride, half_stride = 32, 16
    weight_sets = 1
    record_code_bias = 1
    column_read = False
    expert_layout = "row_major"

    def mfma_bf16(self, weights: Any, activations: Any, acc: Any) -> Any:
        return _sum_products([weights[i] for i in range(4)], [activations[i] for i in range(4)], acc)

    def mfma_bf16_half(self, weights: Any, activations: Any, acc: Any) -> Any:
        return common.mfma_bf16_16(weights, activations, acc)

    def mfma_bf16_quads(self, a: Any, b: Any, acc: Any) -> Any:
        return common.mfma_bf16_quads(a, b, acc)

    def expand_fp8(self, word: fx.Int32, scale: fx.Float32) -> list[fx.Int32]:
        values = _floats(word, as_ir_value(dev.vector_f32([scale, scale])))
        return [dev.upper_halves(*values[i : i + 2]) for i in (0, 2)]

    def ready(self, words: Any, code: Code) -> Any:
        return _widened(words, code)

    def ready_fp4(self, words: Any, code: Code) -> Any:
        return _Widened(_widen_fp4(*_here(words, 4, code)))

    def mfma_fp4(
        self, weights: Any, weight_code: Code, activations: Any, activation_code: Code, acc: Any
    ) -> Any:
        rows = _rows(activations, activation_code)
        if not isinstance(weights, _Widened):
            weights = self.ready_fp4(weights, weight_code)
        return _sum_products(weights.pairs, rows, acc)

    def mfma_fp8(
        self, weights: Any, weight_code: Code, activations: Any, activation_code: Code, acc: Any
    ) -> Any:
        rows = _rows(activations, activation_code)
        return _sum_products(_widen_fp8(weights, weight_code), rows, acc)

    def pack_bf16(self, low: fx.Float32, high: fx.Float32) -> fx.Int32:
        return common.pack_bf16(low, high)

    def dot_bf16(self, a: fx.Int32, b: fx.Int32, acc: fx.Float32) -> fx.Float32:
        (a_low, a_high), (b_low, b_high) = m.unpack_bf16(a), m.unpack_bf16(b)
        return m.fused(a_high, b_high, m.fused(a_low, b_low, acc))

    def scale_fp8(self, pairs: list[fx.Int32], code: fx.Int32) -> fx.Int32:
        half = m.mx_inverse(code) * 0.5
        return _pack_halves([x * half for pair in pairs for x in m.unpack_bf16(pair)])

    def pack_fp8(self, values: list[fx.Float32]) -> fx.Int32:
        return _pack_halves([x * 0.5 for x in values])
