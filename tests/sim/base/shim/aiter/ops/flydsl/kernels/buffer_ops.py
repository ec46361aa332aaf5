# SPDX-License-Identifier: Apache-2.0
"""Raw buffer loads and stores in traced FlyDSL code, addressed in elements.

A stand-in of ours for the helpers of the same names that the base's kernels import from AITER; only what
those kernels call is here. Every offset counts elements of the loaded or stored type; the access is one
``raw.ptr.buffer`` operation, so its width and cache policy are what the caller asked for.
"""

from typing import Any

from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm
from flydsl._mlir.dialects import rocdl as raw
from flydsl.expr.typing import as_ir_value

# Word 3 of a raw buffer descriptor (stride 0, no swizzle): 32-bit data format, identity component selection.
RAW_BUFFER_FLAGS = (7 << 12) | (4 << 15)
WHOLE_ADDRESS_SPACE = 0xFFFFFFFF


def _i32(value: Any) -> ir.Value:
    if isinstance(value, int):
        signed = value - (1 << 32) if value >= 1 << 31 else value
        return arith.constant(ir.IntegerType.get_signless(32), signed)
    out = as_ir_value(value)
    i32 = ir.IntegerType.get_signless(32)
    if out.type == i32:
        return out
    if isinstance(out.type, ir.IndexType):
        return arith.index_cast(i32, out)
    return arith.trunci(i32, out)


def create_buffer_resource_from_addr(addr: Any, num_records_bytes: Any = None) -> ir.Value:
    """A raw buffer descriptor at 64-bit address ``addr``; unbounded unless ``num_records_bytes`` is given."""
    address = as_ir_value(addr)
    base = llvm.inttoptr(ir.Type.parse("!llvm.ptr"), address)
    records = WHOLE_ADDRESS_SPACE if num_records_bytes is None else num_records_bytes
    if isinstance(records, int):
        records64 = arith.constant(ir.IntegerType.get_signless(64), records)
    else:
        records64 = arith.extui(ir.IntegerType.get_signless(64), _i32(records))
    stride = arith.constant(ir.IntegerType.get_signless(16), 0)
    return raw.make_buffer_rsrc(
        ir.Type.parse("!llvm.ptr<8>"), base, stride, records64, _i32(RAW_BUFFER_FLAGS)
    )


def _element_bytes(ty: ir.Type) -> int:
    if isinstance(ty, ir.VectorType):
        ty = ty.element_type
    return ty.width // 8


def _byte_offset(offset: Any, element_bytes: int) -> ir.Value:
    off = _i32(offset)
    return off if element_bytes == 1 else arith.muli(off, _i32(element_bytes))


def buffer_load(
    rsrc: ir.Value, offset: Any, vec_width: int = 4, dtype: Any = None, cache_modifier: int = 0
) -> ir.Value:
    """``vec_width`` elements of ``dtype`` at element ``offset``: a scalar for 1, else a vector."""
    element = dtype() if callable(dtype) else dtype
    result = element if vec_width == 1 else ir.VectorType.get([vec_width], element)
    aux = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), cache_modifier)
    return raw.RawPtrBufferLoadOp(
        result, rsrc, _byte_offset(offset, _element_bytes(element)), _i32(0), aux=aux
    ).result


def buffer_store(data: Any, rsrc: ir.Value, offset: Any, cache_modifier: int = 0) -> None:
    """Store a scalar or vector at element ``offset`` of its own element type."""
    value = as_ir_value(data)
    aux = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), cache_modifier)
    raw.RawPtrBufferStoreOp(value, rsrc, _byte_offset(offset, _element_bytes(value.type)), _i32(0), aux=aux)
