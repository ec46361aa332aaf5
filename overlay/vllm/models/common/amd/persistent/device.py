# SPDX-License-Identifier: Apache-2.0
"""Device primitives: buffers, LDS, lanes and loops, the one place that touches raw dialect operations.

Everything here is the same on CDNA3 and CDNA4. What an architecture or a number format names is in ``isa``.
Offsets are bytes. Values are FlyDSL scalars (``Int32``, ``Float32``) and ``Vector`` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm, scf
from flydsl._mlir.dialects import rocdl as raw
from flydsl.expr import gpu, rocdl
from flydsl.expr.typing import as_ir_value

WAVE = 64

# Cache policy of an access: the scope bits sc0 (1) and sc1 (16), and nt (2).
CACHED = 0
STREAM = 2
DEVICE = 16
SYSTEM = 17

# An offset at or past every bounded buffer's end, far from wrapping when an immediate is added to it.
PAST_END = 0x7FFF0000

# The access is kept though its result is not used (a compiler flag, no bit of the instruction).
_VOLATILE = -(1 << 31)

# Third word of a raw buffer descriptor: 32-bit data format, identity component selection, no swizzle.
_DESCRIPTOR_FLAGS = (7 << 12) | (4 << 15)
_NO_BOUND = 0xFFFFFFFF


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i32(value: Any) -> fx.Int32:
    """``value`` (a Python integer, a bare operation result or a scalar) as ``Int32``."""
    if isinstance(value, int):
        return fx.Int32(value - (1 << 32) if value >= 1 << 31 else value)
    return value if isinstance(value, fx.Int32) else fx.Int32(value)


def f32_bits(value: fx.Float32) -> fx.Int32:
    """The bits of a float."""
    return fx.Int32(arith.bitcast(_i32(), as_ir_value(value)))


def bits_f32(value: fx.Int32) -> fx.Float32:
    """The float of some bits."""
    return fx.Float32(arith.bitcast(ir.F32Type.get(), as_ir_value(value)))


def shift_right(value: fx.Int32, amount: Any) -> fx.Int32:
    """Logical shift right."""
    return fx.Int32(arith.shrui(as_ir_value(value), as_ir_value(i32(amount))))


def unsigned_max(a: fx.Int32, b: fx.Int32) -> fx.Int32:
    """The larger of two words read as unsigned."""
    return fx.Int32(arith.maxui(as_ir_value(a), as_ir_value(b)))


def subtract_to_zero(value: fx.Int32, amount: int) -> fx.Int32:
    """``value`` less ``amount``, as unsigned words; 0 where that is below 0."""
    return fx.Int32(
        llvm.call_intrinsic(
            _i32(), "llvm.usub.sat.i32", [as_ir_value(value), as_ir_value(i32(amount))], [], []
        )
    )


def uniform(value: fx.Int32) -> fx.Int32:
    """``value`` of the first active lane, known to be the same in the wave."""
    return fx.Int32(raw.readfirstlane(_i32(), as_ir_value(value)))


def both(*conditions: Any) -> Any:
    """All of the conditions, without short circuit."""
    out = conditions[0]
    for condition in conditions[1:]:
        out = out & condition
    return out


def permute_bytes(first: fx.Int32, second: fx.Int32, selector: Any) -> fx.Int32:
    """The bytes that each byte of ``selector`` names: 0..3 are the second word's, 4..7 the first's."""
    operands = [as_ir_value(i32(x)) for x in (first, second, selector)]
    return fx.Int32(llvm.call_intrinsic(_i32(), "llvm.amdgcn.perm", operands, [], []))


_UPPER_HALVES = 0x07060302


def upper_halves(low: Any, high: Any) -> fx.Int32:
    """The upper halves of two words or floats: of floats, two bf16, cut off."""
    first, second = (f32_bits(x) if isinstance(x, fx.Float32) else x for x in (high, low))
    return permute_bytes(first, second, _UPPER_HALVES)


class Buffer:
    """Global memory at a 64-bit address. Accesses at or past ``num_bytes`` load 0 and store nothing."""

    def __init__(self, address: Any, num_bytes: int | None = None) -> None:
        i64, i16 = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(16)
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr"), as_ir_value(address))
        self._resource = raw.make_buffer_rsrc(
            ir.Type.parse("!llvm.ptr<8>"),
            pointer,
            arith.constant(i16, 0),
            arith.constant(i64, _NO_BOUND if num_bytes is None else num_bytes),
            as_ir_value(i32(_DESCRIPTOR_FLAGS)),
        )

    def load(self, offset: Any, count: int = 1, policy: int = CACHED, base: Any = 0) -> Any:
        """``count`` (1, 2 or 4) 32-bit words at ``base + offset``: an ``Int32``, or a vector of
        them. ``base``, the same in the wave, costs no vector instruction."""
        result = _i32() if count == 1 else ir.VectorType.get([count], _i32())
        value = raw.RawPtrBufferLoadOp(
            result,
            self._resource,
            as_ir_value(i32(offset)),
            as_ir_value(i32(base)),
            aux=ir.IntegerAttr.get(_i32(), policy),
        ).result
        return fx.Int32(value) if count == 1 else fx.Vector(value, (count,), fx.Int32)

    def warm(self, offset: Any) -> None:
        """Bring the cache line at ``offset`` to the L2 of this XCD; nothing waits for it."""
        raw.RawPtrBufferLoadOp(
            _i32(),
            self._resource,
            as_ir_value(i32(offset)),
            as_ir_value(i32(0)),
            aux=ir.IntegerAttr.get(_i32(), _VOLATILE),
        )

    def load_byte(self, offset: Any, policy: int = CACHED) -> fx.Int32:
        """One byte at ``offset``, zero-extended."""
        return self._load_narrow(8, offset, policy, 0)

    def load_half(self, offset: Any, policy: int = CACHED, base: Any = 0) -> fx.Int32:
        """Two bytes at ``base + offset``, zero-extended."""
        return self._load_narrow(16, offset, policy, base)

    def _load_narrow(self, bits: int, offset: Any, policy: int, base: Any) -> fx.Int32:
        value = raw.RawPtrBufferLoadOp(
            ir.IntegerType.get_signless(bits),
            self._resource,
            as_ir_value(i32(offset)),
            as_ir_value(i32(base)),
            aux=ir.IntegerAttr.get(_i32(), policy),
        ).result
        return fx.Int32(arith.extui(_i32(), value))

    def store_byte(self, offset: Any, value: fx.Int32) -> None:
        """Store the low byte of ``value`` at ``offset``."""
        raw.RawPtrBufferStoreOp(
            arith.trunci(ir.IntegerType.get_signless(8), as_ir_value(value)),
            self._resource,
            as_ir_value(i32(offset)),
            as_ir_value(i32(0)),
            aux=ir.IntegerAttr.get(_i32(), CACHED),
        )

    def store(self, offset: Any, value: Any, policy: int = CACHED) -> None:
        """Store a 32-bit scalar or a vector of them at ``offset``."""
        raw.RawPtrBufferStoreOp(
            as_ir_value(value),
            self._resource,
            as_ir_value(i32(offset)),
            as_ir_value(i32(0)),
            aux=ir.IntegerAttr.get(_i32(), policy),
        )


def load_at(address: fx.Int64, count: int) -> Any:
    """``count`` 32-bit words at a lane's own 64-bit address, unbounded: an ``Int32``, or a vector of them."""
    result = _i32() if count == 1 else ir.VectorType.get([count], _i32())
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), as_ir_value(address))
    value = llvm.LoadOp(result, pointer, alignment=4).result
    return fx.Int32(value) if count == 1 else fx.Vector(value, (count,), fx.Int32)


class Lds:
    """An LDS allocation, addressed in bytes."""

    def __init__(self, array: Any) -> None:
        self._base = array.ptr.llvm_ptr

    def at(self, offset: Any) -> ir.Value:
        """A pointer to the byte at ``offset``."""
        return llvm.getelementptr(
            self._base.type,
            self._base,
            [as_ir_value(i32(offset))],
            [-(1 << 31)],
            ir.IntegerType.get_signless(8),
            None,
        )

    def load(self, offset: Any, count: int = 1) -> Any:
        """``count`` 32-bit words (as ``Int32``); ``offset`` is a multiple of the size of the access."""
        result = _i32() if count == 1 else ir.VectorType.get([count], _i32())
        value = llvm.LoadOp(result, self.at(offset), alignment=4 * count).result
        return fx.Int32(value) if count == 1 else fx.Vector(value, (count,), fx.Int32)

    def store(self, offset: Any, value: Any) -> None:
        """Store a 32-bit scalar or a vector of them; ``offset`` is a multiple of the size of the access."""
        data = as_ir_value(value)
        words = data.type.shape[0] if isinstance(data.type, ir.VectorType) else 1
        llvm.StoreOp(data, self.at(offset), alignment=4 * words)

    def load_byte(self, offset: Any) -> fx.Int32:
        """One byte, zero-extended."""
        i8 = ir.IntegerType.get_signless(8)
        return fx.Int32(arith.extui(_i32(), llvm.LoadOp(i8, self.at(offset), alignment=1).result))

    def store_byte(self, offset: Any, value: fx.Int32) -> None:
        """Store the low byte of ``value``."""
        byte = arith.trunci(ir.IntegerType.get_signless(8), as_ir_value(value))
        llvm.StoreOp(byte, self.at(offset), alignment=1)

    def fetch_or(self, offset: Any, bits: fx.Int32) -> None:
        """Set ``bits`` of the word at ``offset``; any number of lanes may at once."""
        llvm.atomicrmw(
            llvm.AtomicBinOp._or,
            self.at(offset),
            as_ir_value(bits),
            llvm.AtomicOrdering.monotonic,
            syncscope="workgroup",
        )


def vector_i32(items: Sequence[Any]) -> fx.Vector:
    """A vector of 32-bit words."""
    return fx.Vector.from_elements([i32(x) for x in items], fx.Int32)


def vector_f32(items: Sequence[Any]) -> fx.Vector:
    """A vector of floats."""
    return fx.Vector.from_elements(list(items), fx.Float32)


def shuffle_xor(value: Any, distance: int) -> Any:
    """The value of the lane whose index differs in the bits of ``distance``."""
    return gpu.shuffle_xor(value, distance, WAVE)


def _dpp(value: Any, control: int, neutral: Any = None, rows: int = 0xF) -> Any:
    """``value`` of the lane that ``control`` names. With ``neutral``, that in rows of 16 lanes that are not
    in
    ``rows``; without, every lane must have a source, which lets the compiler fold the access."""
    if isinstance(value, fx.Float32):
        bits = None if neutral is None else f32_bits(neutral)
        return bits_f32(_dpp(f32_bits(value), control, bits, rows))
    old = llvm.UndefOp(_i32()).result if neutral is None else as_ir_value(neutral)
    out = raw.update_dpp(_i32(), old, as_ir_value(value), control, rows, 0xF, neutral is None)
    return fx.Int32(out)


_QUAD_XOR = {1: 0xB1, 2: 0x4E}
_ROW_ROTATE = 0x120
_ROW_BROADCAST_15, _ROW_BROADCAST_31 = 0x142, 0x143


def quad_xor(value: Any, distance: int) -> Any:
    """The value of the lane whose index differs in ``distance`` (1 or 2); no LDS traffic."""
    return _dpp(value, _QUAD_XOR[distance])


def quad_lane(value: Any, lane: int) -> Any:
    """The value of lane ``lane`` of this lane's four neighbours; no LDS traffic."""
    return _dpp(value, lane * 0b01010101)


def quads_sum(value: fx.Float32) -> fx.Float32:
    """The sum over this lane's row of 16 of the lanes that have its place among their four neighbours."""
    for lanes in (4, 8):
        value = value + _dpp(value, _ROW_ROTATE + lanes)
    return value


def last_lane_sum(value: fx.Float32) -> fx.Float32:
    """The sum over the wave, in lane 63 only."""
    for distance in (1, 2):
        value = value + quad_xor(value, distance)
    for lanes in (4, 8):
        value = value + _dpp(value, _ROW_ROTATE + lanes)
    value = value + _dpp(value, _ROW_BROADCAST_15, fx.Float32(0.0), 0xA)
    return value + _dpp(value, _ROW_BROADCAST_31, fx.Float32(0.0), 0xC)


def half_wave_sum(value: fx.Float32) -> fx.Float32:
    """The sum over the 32 lanes of this lane's half of the wave, in every lane."""
    for distance in (1, 2):
        value = value + quad_xor(value, distance)
    for lanes in (4, 8):
        value = value + _dpp(value, _ROW_ROTATE + lanes)
    return value + shuffle_xor(value, 16)


def wave_max(value: fx.Int32) -> fx.Int32:
    """The largest value of the wave, in every lane and known to be uniform."""
    for distance in (1, 2):
        value = fx.max(value, quad_xor(value, distance))
    for lanes in (4, 8):
        value = fx.max(value, _dpp(value, _ROW_ROTATE + lanes))
    rows = [lane_value(value, lane) for lane in range(0, WAVE, 16)]
    return fx.max(fx.max(rows[0], rows[1]), fx.max(rows[2], rows[3]))


def lane_value(value: fx.Int32, lane: Any) -> fx.Int32:
    """The value of lane ``lane``, which is the same in the wave; so is what is returned."""
    return fx.Int32(raw.readlane(_i32(), as_ir_value(value), as_ir_value(i32(lane))))


def lanes_below(condition: Any) -> fx.Int32:
    """In how many lanes before this one ``condition`` holds."""
    mask = raw.ballot(ir.IntegerType.get_signless(64), as_ir_value(condition))
    low = arith.trunci(_i32(), mask)
    high = arith.trunci(_i32(), arith.shrui(mask, arith.constant(mask.type, 32)))
    count = raw.mbcnt_lo(_i32(), low, as_ir_value(i32(0)))
    return fx.Int32(raw.mbcnt_hi(_i32(), high, count))


def first_lane_where(condition: Any) -> fx.Int32:
    """The lowest lane of the wave where ``condition`` holds, -1 if none; uniform."""
    i64 = ir.IntegerType.get_signless(64)
    mask = raw.ballot(i64, as_ir_value(condition))
    where = llvm.call_intrinsic(
        i64, "llvm.cttz.i64", [mask, arith.constant(ir.IntegerType.get_signless(1), 0)], [], []
    )
    none = arith.cmpi(arith.CmpIPredicate.eq, mask, arith.constant(i64, 0))
    return fx.Int32(arith.select(none, as_ir_value(fx.Int32(-1)), arith.trunci(_i32(), where)))


def row_lanes(condition: Any, lane: Any) -> fx.Int32:
    """A bit for each lane of this lane's row of 16 where ``condition`` holds, in the low half; what is above
    it may be another row's."""
    mask = raw.ballot(ir.IntegerType.get_signless(64), as_ir_value(condition))
    low = fx.Int32(arith.trunci(_i32(), mask))
    high = fx.Int32(arith.trunci(_i32(), arith.shrui(mask, arith.constant(mask.type, 32))))
    return shift_right((lane < WAVE // 2).select(low, high), lane & 16)


def low_lanes(condition: Any) -> fx.Int32:
    """A bit for each of lanes 0..31 where ``condition`` holds; uniform."""
    mask = raw.ballot(ir.IntegerType.get_signless(64), as_ir_value(condition))
    return fx.Int32(arith.trunci(_i32(), mask))


def shuffle_from(value: fx.Int32, lane: Any) -> fx.Int32:
    """The value of lane ``lane``."""
    return fx.Int32(raw.ds_bpermute(_i32(), as_ir_value(i32(lane) * 4), as_ir_value(value)))


def repeat(
    start: Sequence[Any],
    attempt: Callable[[list[Any]], tuple[Any, Sequence[Any]]],
    again: Callable[[list[Any]], Sequence[Any]],
) -> list[Any]:
    """``attempt`` on the carried values until its condition does not hold; returns the last attempt's
    results.

    ``attempt`` gives (whether to go on, results), ``again`` the carried values of the next attempt."""
    kinds = [_rebuild(x) for x in start]
    types = [as_ir_value(x).type for x in start]
    probe: Sequence[Any] = ()

    def wrap(values: Sequence[ir.Value], how: Sequence[Callable[[ir.Value], Any]]) -> list[Any]:
        return [kind(value) for kind, value in zip(how, values, strict=True)]

    # The types of the results are known once the attempt is traced, which needs the operation; so it is
    # traced in a block of its own that is then moved.
    loop_types = [*types]
    scratch = scf.WhileOp(loop_types, [as_ir_value(x) for x in start])
    scratch.before.blocks.append(*types)
    block = scratch.before.blocks[0]
    with ir.InsertionPoint(block):
        going, probe = attempt(wrap(block.arguments, kinds))
        results = [as_ir_value(x) for x in probe]
        scf.ConditionOp(as_ir_value(going), [*results, *block.arguments])
    result_types = [x.type for x in results]
    loop = scf.WhileOp([*result_types, *types], [as_ir_value(x) for x in start])
    block.append_to(loop.before)
    scratch.erase()
    loop.after.blocks.append(*result_types, *types)
    after = loop.after.blocks[0]
    with ir.InsertionPoint(after):
        carried = wrap(list(after.arguments)[len(results) :], kinds)
        scf.YieldOp([as_ir_value(x) for x in again(carried)])
    outs = list(loop.results)[: len(results)]
    return wrap(outs, [_rebuild(x) for x in probe])


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Decorates a function without arguments: its body runs in the lanes where ``condition`` holds."""

    def run(body: Callable[[], None]) -> None:
        branch = scf.IfOp(as_ir_value(condition))
        with ir.InsertionPoint(branch.then_block):
            body()
            scf.YieldOp([])

    return run


def choose(condition: Any, then: Callable[[], Sequence[Any]], otherwise: Sequence[Any]) -> list[Any]:
    """What ``then`` gives where ``condition`` holds, which must be the same in the wave, else
    ``otherwise``."""
    kinds = [_rebuild(x) for x in otherwise]
    other = [as_ir_value(x) for x in otherwise]
    branch = scf.IfOp(as_ir_value(condition), [x.type for x in other], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.YieldOp([as_ir_value(x) for x in then()])
    with ir.InsertionPoint(branch.else_block):
        scf.YieldOp(other)
    return [kind(x) for kind, x in zip(kinds, branch.results, strict=True)]


def loop(
    first: Any,
    end: Any,
    step: int,
    carried: Sequence[Any],
    body: Callable[[fx.Int32, list[Any]], Sequence[Any]],
) -> list[Any]:
    """``carried = body(i, carried)`` for i in first, first + step, .. below end; returns the last."""
    kinds = [_rebuild(x) for x in carried]
    bounds = [as_ir_value(i32(x)) for x in (first, end, step)]
    op = scf.ForOp(*bounds, [as_ir_value(x) for x in carried])
    with ir.InsertionPoint(op.body):
        inside = [kind(x) for kind, x in zip(kinds, op.inner_iter_args, strict=True)]
        out = body(fx.Int32(op.induction_variable), inside)
        scf.YieldOp([as_ir_value(x) for x in out])
    return [kind(x) for kind, x in zip(kinds, op.results, strict=True)]


def _rebuild(value: Any) -> Callable[[ir.Value], Any]:
    if isinstance(value, fx.Vector):
        shape, dtype = value.shape, value.dtype
        return lambda raw_value: fx.Vector(raw_value, shape, dtype)
    return type(value)


def pin(value: Any) -> Any:
    """The same value, computed here: the compiler may not put its computation off to where it is used, which
    would keep the larger inputs in registers instead."""
    operand = as_ir_value(value)
    out = llvm.inline_asm(operand.type, [operand], "", "=v,0", has_side_effects=True)
    return _rebuild(value)(out)


def schedule_fence() -> None:
    """The compiler moves no instruction across: keeps loads of later steps out of registers for a while."""
    rocdl.sched_barrier(0)


def clock() -> fx.Vector:
    """The GPU's constant-rate clock as two words, low first; the same for every wave at the same time."""
    ticks = llvm.call_intrinsic(ir.IntegerType.get_signless(64), "llvm.amdgcn.s.memrealtime", [], [], [])
    return vector_i32(address_words(fx.Int64(ticks)))


def sleep() -> None:
    """Let other waves of the compute unit run for a while (64 to 128 cycles)."""
    rocdl.s_sleep(1)


def drain() -> None:
    """Wait until this wave's stores are acknowledged at the scope that they were given."""
    rocdl.s_waitcnt(vmcnt=0)


def acquire() -> None:
    """After a wait at device scope: later plain loads see what was stored before the awaited word."""
    llvm.fence(llvm.AtomicOrdering.acquire, syncscope="agent")


def wave_fence() -> None:
    """LDS accesses of this wave before it come first; for lanes of a wave that read each other's stores."""
    llvm.fence(llvm.AtomicOrdering.acq_rel, syncscope="wavefront")


def barrier() -> None:
    """All waves of the workgroup, LDS accesses before it done."""
    gpu.barrier()


def count_bits(value: fx.Int32) -> fx.Int32:
    """Number of set bits."""
    return fx.Int32(llvm.call_intrinsic(_i32(), "llvm.ctpop.i32", [as_ir_value(value)], [], []))


def address_words(address: fx.Int64) -> list[fx.Int32]:
    """A 64-bit address as two words, low first."""
    pair = llvm.bitcast(ir.VectorType.get([2], _i32()), as_ir_value(address))
    words = fx.Vector(pair, (2,), fx.Int32)
    return [words[0], words[1]]


def lane_address(low: fx.Int32, high: fx.Int32) -> fx.Int64:
    """A lane's own 64-bit address from two words."""
    pair = as_ir_value(vector_i32([low, high]))
    return fx.Int64(llvm.bitcast(ir.IntegerType.get_signless(64), pair))


def address(words: fx.Vector) -> fx.Int64:
    """A 64-bit address loaded as two words, known to be the same in the wave."""
    low, high = uniform(words[0]), uniform(words[1])
    pair = as_ir_value(vector_i32([low, high]))
    return fx.Int64(llvm.bitcast(ir.IntegerType.get_signless(64), pair))
