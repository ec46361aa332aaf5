# SPDX-License-Identifier: Apache-2.0
"""Small FlyDSL kernels: a tagged hand-off through scratch, correct and with each fault planted.

Workgroup 0 writes 64 words of a row and then a flag that holds the launch's tag; workgroup 1 waits for the
tag,
reads the row through LDS in reverse, and writes it out. The correct kernel passes every seed of the hostile
model on both architectures; each fault is caught, as a wrong value or by a catcher's name, in bounded time.
"""

import functools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "base" / "shim"))

import flydsl.compiler as flyc
import flydsl.expr as fx
from aiter.ops.flydsl.kernels import buffer_ops as bo
from flydsl.expr import const_expr, gpu, rocdl
from flydsl.expr.typing import Int32, Int64, T

from cdnasim import Device, SimulationError
from cdnasim.flydsl_front import compile_kernel
from cdnasim.program import Kernel

DEVICE_SCOPE = 16  # sc1
THREADS = 128
STREAM = fx.Stream(None)
FLAG = 4096  # word of the flag in scratch
FAULTS = (
    "",
    "no drain",
    "plain store",
    "plain load",
    "flag first",
    "no barrier in LDS",
    "row past the end",
    "no epoch in the tag",
)


def build(fault: str, flag: int = FLAG, row: int = 0):
    """``flag`` and ``row``: where the flag and the row lie in scratch, in words."""

    @fx.struct
    class Lds:
        row: fx.Array[fx.Int32, THREADS, 16]

    name = f"handoff_{fault.replace(' ', '_') or 'good'}_{flag}"

    @flyc.kernel(name=name, known_block_size=[THREADS, 1, 1])
    def kernel(scratch: Int64, out: Int64, epoch: Int32):
        tid = fx.thread_idx.x
        bid = fx.block_idx.x
        lds = fx.SharedAllocator().allocate(Lds).peek()
        s = bo.create_buffer_resource_from_addr(scratch)
        o = bo.create_buffer_resource_from_addr(out)
        tag = fx.Int32(1) if const_expr(fault == "no epoch in the tag") else epoch + 1
        store_policy = 0 if const_expr(fault == "plain store") else DEVICE_SCOPE
        load_policy = 0 if const_expr(fault == "plain load") else DEVICE_SCOPE
        shift = THREADS if const_expr(fault == "row past the end") else 0
        if bid == 0:
            if const_expr(fault == "flag first") and tid == 0:
                bo.buffer_store(tag, s, flag, cache_modifier=DEVICE_SCOPE)
            bo.buffer_store(tid * 3 + epoch * 1000, s, row + tid, cache_modifier=store_policy)
            if const_expr(fault != "no drain"):
                rocdl.s_waitcnt(vmcnt=0)
            gpu.barrier()
            if const_expr(fault != "flag first") and tid == 0:
                bo.buffer_store(tag, s, flag, cache_modifier=DEVICE_SCOPE)
        else:
            if const_expr(fault == "plain load"):
                # The line is read once before it is handed over.
                early = fx.Int32(bo.buffer_load(s, row + tid, vec_width=1, dtype=T.i32))
                bo.buffer_store(early, o, THREADS + tid)
                rocdl.s_waitcnt(vmcnt=0)
            seen = fx.Int32(bo.buffer_load(s, flag, vec_width=1, dtype=T.i32, cache_modifier=DEVICE_SCOPE))
            while seen != tag:
                rocdl.s_sleep(1)
                seen = fx.Int32(
                    bo.buffer_load(s, flag, vec_width=1, dtype=T.i32, cache_modifier=DEVICE_SCOPE)
                )
            value = fx.Int32(
                bo.buffer_load(s, row + tid, vec_width=1, dtype=T.i32, cache_modifier=load_policy)
            )
            fx.ptr_store(value, lds.row.ptr + tid)
            if const_expr(fault != "no barrier in LDS"):
                gpu.barrier()
            back = fx.ptr_load(lds.row.ptr + (THREADS - 1 - tid))
            bo.buffer_store(back, o, tid + shift * 2)

    @flyc.jit
    def launch(scratch: Int64, out: Int64, epoch: Int32, stream: fx.Stream = STREAM):
        kernel(scratch, out, epoch).launch(grid=(2,), block=(THREADS,), stream=stream)

    return launch


@functools.cache
def compiled(fault: str, arch: str, flag: int = FLAG, row: int = 0) -> Kernel:
    return compile_kernel(build(fault, flag, row), 3, arch)


def passes(fault: str, arch: str, seed: int, epochs: int = 2) -> bool:
    """Whether ``epochs`` launches on the same scratch give the right rows."""
    dev = Device(arch, memory="hostile", seed=seed, quantum=(5, 40), stall_bound=100_000)
    scratch = dev.zeros(FLAG + 64, dtype=torch.int32, name="scratch")
    out = dev.zeros(2 * THREADS, dtype=torch.int32, name="out")
    for epoch in range(epochs):
        dev.launch(compiled(fault, arch), 2, THREADS, [scratch, out, epoch], persistent=True)
        want = [t * 3 + epoch * 1000 for t in reversed(range(THREADS))]
        if out[:THREADS].tolist() != want:
            return False
    return True


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_correct_handoff(arch: str) -> None:
    assert all(passes("", arch, seed) for seed in range(60))


@pytest.mark.full
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_correct_handoff_on_a_thousand_seeds(arch: str) -> None:
    assert all(passes("", arch, seed) for seed in range(1000))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f and f not in ("no barrier in LDS", "row past the end")]
)
def test_wrong_values_of_a_faulty_handoff(fault: str, arch: str) -> None:
    assert not all(passes(fault, arch, seed) for seed in range(100))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "fault, kind",
    [("no barrier in LDS", ("lds-race", "lds-never-written")), ("row past the end", ("out-of-bounds",))],
)
def test_faults_that_a_catcher_names(fault: str, kind: tuple[str, ...], arch: str) -> None:
    with pytest.raises(SimulationError) as caught:
        for seed in range(20):
            passes(fault, arch, seed)
    assert caught.value.kind in kind and caught.value.line


def reuse(arch: str, seed: int, *, shared: bool) -> bool:
    """A launch of one width, then one of another width whose flag lies where the first kept data. With
    the first's
    scratch, word 1 holds 3 already: the tag that the second launch (epoch 2) waits for."""
    dev = Device(arch, memory="hostile", seed=seed, quantum=(5, 40), stall_bound=100_000)
    scratch, other = (dev.zeros(FLAG + 64, dtype=torch.int32) for _ in range(2))
    out = dev.zeros(2 * THREADS, dtype=torch.int32, name="out")
    dev.launch(compiled("", arch), 2, THREADS, [scratch, out, 0], persistent=True)
    second = compiled("", arch, 1, 2048)
    dev.launch(second, 2, THREADS, [scratch if shared else other, out, 2], persistent=True)
    return out[:THREADS].tolist() == [t * 3 + 2000 for t in reversed(range(THREADS))]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_scratch_reused_by_another_width_is_caught(arch: str) -> None:
    assert all(reuse(arch, seed, shared=False) for seed in range(40))
    assert not all(reuse(arch, seed, shared=True) for seed in range(40))
