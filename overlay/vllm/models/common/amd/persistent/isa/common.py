# SPDX-License-Identifier: Apache-2.0
"""Instructions that CDNA3 and CDNA4 share, for their ``Isa``."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm
from flydsl.expr import rocdl
from flydsl.expr.typing import as_ir_value

from .. import device as dev


def acc_type() -> ir.Type:
    """Four floats, a lane's part of a 16 x 16 product."""
    return ir.VectorType.get([4], ir.F32Type.get())


def mfma_bf16_16(weights: Any, activations: Any, acc: Any) -> Any:
    """``acc`` plus 16 x 16 x 16 bf16; operands are 2 words a lane."""
    four = ir.VectorType.get([4], ir.IntegerType.get_signless(16))
    a, b = (llvm.bitcast(four, as_ir_value(x)) for x in (weights, activations))
    return fx.Vector(rocdl.mfma_f32_16x16x16bf16_1k(acc_type(), [a, b, acc]), (4,), fx.Float32)


def mfma_bf16_quads(a: Any, b: Any, acc: Any) -> Any:
    """``acc`` plus 16 x (4 x 4 x 4) bf16; operands are 2 words a lane."""
    four = ir.VectorType.get([4], ir.IntegerType.get_signless(16))
    operands = [llvm.bitcast(four, as_ir_value(x)) for x in (a, b)]
    flags = [arith.constant(ir.IntegerType.get_signless(32), 0)] * 3
    name = "llvm.amdgcn.mfma.f32.4x4x4bf16.1k"
    out = llvm.call_intrinsic(acc_type(), name, [*operands, as_ir_value(acc), *flags], [], [])
    return fx.Vector(out, (4,), fx.Float32)


def pack_bf16(low: fx.Float32, high: fx.Float32) -> fx.Int32:
    """Two floats rounded to nearest even bf16."""
    pair = llvm.fptrunc(ir.VectorType.get([2], ir.BF16Type.get()), as_ir_value(dev.vector_f32([low, high])))
    return fx.Int32(llvm.bitcast(ir.IntegerType.get_signless(32), pair))
