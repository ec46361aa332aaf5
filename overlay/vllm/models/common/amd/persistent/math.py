# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on lanes: bf16 pairs, MX scales, activations."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm
from flydsl.expr.typing import as_ir_value

from . import device as dev

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def _intrinsic(name: str, *values: Any) -> fx.Float32:
    f32 = ir.F32Type.get()
    return fx.Float32(llvm.call_intrinsic(f32, name, [as_ir_value(v) for v in values], [], []))


def exp2(x: fx.Float32) -> fx.Float32:
    """2^x by the hardware's instruction (1 ulp; denormal results flush)."""
    return _intrinsic("llvm.amdgcn.exp2.f32", x)


def log2(x: fx.Float32) -> fx.Float32:
    """Base-2 logarithm by the hardware's instruction (1 ulp)."""
    return _intrinsic("llvm.amdgcn.log.f32", x)


def reciprocal(x: fx.Float32) -> fx.Float32:
    """1 / x by the hardware's instruction (1 ulp)."""
    return _intrinsic("llvm.amdgcn.rcp.f32", x)


def reciprocal_sqrt(x: fx.Float32) -> fx.Float32:
    """1 / sqrt(x) by the hardware's instruction (1 ulp)."""
    return _intrinsic("llvm.amdgcn.rsq.f32", x)


def square_root(x: fx.Float32) -> fx.Float32:
    """sqrt(x) by the hardware's instruction (1 ulp)."""
    return _intrinsic("llvm.amdgcn.sqrt.f32", x)


def fused(a: Any, b: Any, c: Any) -> Any:
    """a b + c of floats or of vectors of two, rounded once."""
    if not isinstance(a, fx.Vector):
        return _intrinsic("llvm.fma.f32", a, b, c)
    two = ir.VectorType.get([2], ir.F32Type.get())
    out = llvm.call_intrinsic(two, "llvm.fma.v2f32", [as_ir_value(x) for x in (a, b, c)], [], [])
    return fx.Vector(out, (2,), fx.Float32)


def maximum(a: fx.Float32, b: fx.Float32) -> fx.Float32:
    """The larger; of a NaN and a number, the number."""
    return _intrinsic("llvm.maxnum.f32", a, b)


def minimum(a: fx.Float32, b: fx.Float32) -> fx.Float32:
    """The smaller; of a NaN and a number, the number."""
    return _intrinsic("llvm.minnum.f32", a, b)


def magnitude(x: fx.Float32) -> fx.Float32:
    """|x|."""
    return _intrinsic("llvm.fabs.f32", x)


def largest_magnitude(values: list[Any]) -> fx.Int32:
    """The bits of the largest |x|, which order as unsigned integers do; a NaN only if all are."""
    out = magnitude(values[0])
    for value in values[1:]:
        out = maximum(out, magnitude(value))
    return dev.f32_bits(out)


def unpack_bf16(pair: fx.Int32) -> tuple[fx.Float32, fx.Float32]:
    """The two bf16 of a word, low half first."""
    return dev.bits_f32(pair << 16), dev.bits_f32(pair & dev.i32(0xFFFF0000))


def round_bf16(isa: Any, low: fx.Float32, high: fx.Float32) -> tuple[fx.Float32, fx.Float32]:
    """Both values rounded to bf16."""
    return unpack_bf16(isa.pack_bf16(low, high))


def clear_negative_zeros(word: fx.Int32) -> fx.Int32:
    """Four 8-bit floats with 0 for -0: a magnitude plus 127 carries into the sign's bit unless it is 0."""
    # Pinned, or the compiler factors ``word`` out, which costs an instruction more.
    magnitude = dev.pin(word & 0x7F7F7F7F)
    return (word & (magnitude + 0x7F7F7F7F)) | magnitude


def sigmoid(x: fx.Float32) -> fx.Float32:
    """1 / (1 + e^-x)."""
    return reciprocal(1.0 + exp2(x * -LOG2_E))


def softplus(x: fx.Float32) -> fx.Float32:
    """log(1 + e^x), to a few ulp for every x: the rounding of 1 + y is taken out of the logarithm."""
    y = exp2(magnitude(x) * -LOG2_E)
    u = 1.0 + y
    scaled = log2(u) * LN_2 * (y * reciprocal(u - 1.0))
    log1p = (u == 1.0).select(y, scaled)
    return maximum(x, fx.Float32(0.0)) + log1p


def largest_of_pairs(pairs: list[Any]) -> fx.Int32:
    """The fp32 bits of the largest |x| of some bf16 pairs; a NaN is above every number."""
    halves = ir.VectorType.get([2], ir.IntegerType.get_signless(16))
    out = None
    for pair in pairs:
        bits = llvm.bitcast(halves, as_ir_value(pair & 0x7FFF7FFF))
        out = bits if out is None else arith.maxui(out, bits)
    both = fx.Int32(llvm.bitcast(ir.IntegerType.get_signless(32), out))
    return dev.unsigned_max(both << 16, both & dev.i32(0xFFFF0000))


def mx_code(amax: fx.Int32) -> fx.Int32:
    """The E8M0 code of a block whose largest magnitude has the fp32 bits ``amax``: ceil(log2(amax / 448)) +
    127, at least 0.

    448 is 1.75 x 2^8, so the exponent is rounded up where the mantissa is above 1.75."""
    return dev.subtract_to_zero(dev.shift_right(amax + 0x1FFFFF, 23), 8)


def mx_code_of_bf16(amax: fx.Int32) -> fx.Int32:
    """``mx_code`` of a magnitude with the bf16 bits ``amax``."""
    return dev.subtract_to_zero(dev.shift_right(amax + 0x1F, 7), 8)


def mx_inverse(code: fx.Int32) -> fx.Float32:
    """2^(127 - code), what the block's values are multiplied by."""
    return dev.bits_f32((254 - code) << 23)
