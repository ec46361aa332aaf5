# SPDX-License-Identifier: Apache-2.0
"""CDNA4: scaled matrix instructions on MX formats, OCP FP8, packed bf16 conversion."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm
from flydsl._mlir.dialects import rocdl as raw
from flydsl.expr import rocdl
from flydsl.expr.typing import as_ir_value

from .. import device as dev
from .base import Code, Isa
from .common import acc_type, mfma_bf16_16, mfma_bf16_quads, pack_bf16

_E4M3, _E2M1 = 0, 4  # operand formats of the scaled matrix instructions


class Gfx950(Isa):
    """MI350X and MI355X."""

    name = "gfx950"
    lds_bytes = 160 * 1024
    compute_units = 256
    group_stride, half_stride = 16, 64
    weight_sets = 2
    record_code_bias = 0
    column_read = True
    expert_layout = "aiter_shuffle"

    def mfma_bf16(self, weights: Any, activations: Any, acc: Any) -> Any:
        a, b = (x.bitcast(fx.BFloat16) for x in (weights, activations))
        return fx.Vector(rocdl.mfma_f32_16x16x32_bf16(acc_type(), [a, b, acc]), (4,), fx.Float32)

    def mfma_bf16_half(self, weights: Any, activations: Any, acc: Any) -> Any:
        return mfma_bf16_16(weights, activations, acc)

    def mfma_bf16_quads(self, a: Any, b: Any, acc: Any) -> Any:
        return mfma_bf16_quads(a, b, acc)

    def column_bf16(self, shared: Any, offset: Any) -> Any:
        four = ir.VectorType.get([4], ir.IntegerType.get_signless(16))
        two = ir.VectorType.get([2], ir.IntegerType.get_signless(32))
        return fx.Vector(llvm.bitcast(two, raw.ds_read_tr16_b64(four, shared.at(offset))), (2,), fx.Int32)

    def expand_fp8(self, word: fx.Int32, scale: fx.Float32) -> list[fx.Int32]:
        pair = ir.VectorType.get([2], ir.BF16Type.get())
        return [
            fx.Int32(
                llvm.bitcast(
                    ir.IntegerType.get_signless(32),
                    raw.cvt_scalef32_pk_bf16_fp8(pair, as_ir_value(word), as_ir_value(scale), upper),
                )
            )
            for upper in (False, True)
        ]

    def ready(self, words: Any, code: Code) -> Any:
        return words

    def _scaled(self, a_format: int, a: Any, a_code: Code, b: Any, b_code: Code, acc: Any) -> Any:
        out = rocdl.mfma_scale_f32_16x16x128_f8f6f4(
            acc_type(), [a, b, acc, a_format, _E4M3, a_code.byte, a_code.word, b_code.byte, b_code.word]
        )
        return fx.Vector(out, (4,), fx.Float32)

    def mfma_fp4(
        self, weights: Any, weight_code: Code, activations: Any, activation_code: Code, acc: Any
    ) -> Any:
        return self._scaled(_E2M1, weights, weight_code, activations, activation_code, acc)

    def mfma_fp8(
        self, weights: Any, weight_code: Code, activations: Any, activation_code: Code, acc: Any
    ) -> Any:
        return self._scaled(_E4M3, weights, weight_code, activations, activation_code, acc)

    def pack_bf16(self, low: fx.Float32, high: fx.Float32) -> fx.Int32:
        return pack_bf16(low, high)

    def dot_bf16(self, a: fx.Int32, b: fx.Int32, acc: fx.Float32) -> fx.Float32:
        pair = ir.VectorType.get([2], ir.BF16Type.get())
        operands = [llvm.bitcast(pair, as_ir_value(x)) for x in (a, b)]
        clamp = arith.constant(ir.IntegerType.get_signless(1), 0)
        name = "llvm.amdgcn.fdot2.f32.bf16"
        return fx.Float32(
            llvm.call_intrinsic(ir.F32Type.get(), name, [*operands, as_ir_value(acc), clamp], [], [])
        )

    def scale_fp8(self, pairs: list[fx.Int32], code: fx.Int32) -> fx.Int32:
        # The instruction divides by the exponent of its scale.
        half = ir.VectorType.get([2], ir.IntegerType.get_signless(16))
        scale = as_ir_value(dev.bits_f32(code << 23))
        bf16 = ir.VectorType.get([2], ir.BF16Type.get())
        word = llvm.UndefOp(half).result  # both halves are written
        for upper, pair in enumerate(pairs):
            word = raw.cvt_scalef32_pk_fp8_bf16(
                half, word, llvm.bitcast(bf16, as_ir_value(pair)), scale, bool(upper)
            )
        return fx.Int32(llvm.bitcast(ir.IntegerType.get_signless(32), word))

    def pack_fp8(self, values: list[fx.Float32]) -> fx.Int32:
        i32 = ir.IntegerType.get_signless(32)
        a, b, c, d = (as_ir_value(v) for v in values)
        low = raw.cvt_pk_fp8_f32(i32, a, b, as_ir_value(fx.Int32(0)), False)
        return fx.Int32(raw.cvt_pk_fp8_f32(i32, c, d, low, True))
