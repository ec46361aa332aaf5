# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for both architectures give what torch gives."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from cdnasim import Device
from cdnasim.triton_front import TritonKernel

ARCHES = ("gfx942", "gfx950")


@pytest.fixture(params=ARCHES)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=("exact", "hostile"))
def dev(arch: str, request: pytest.FixtureRequest) -> Device:
    return Device(arch, memory=request.param, seed=1)


@triton.jit
def k_add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(o + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)


@triton.jit
def k_softmax(x, o, stride, cols, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + r * stride + i, mask=i < cols, other=float("-inf"))
    v = v - tl.max(v, 0)
    e = tl.exp(v)
    tl.store(o + r * stride + i, e / tl.sum(e, 0), mask=i < cols)


@triton.jit
def k_scan(x, o, R: tl.constexpr, C: tl.constexpr):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(o + at, tl.cumsum(tl.load(x + at), 1))


@triton.jit
def k_reduce_int(x, o, p, B: tl.constexpr):
    v = tl.load(x + tl.arange(0, B))
    tl.store(o, tl.sum(v, 0))
    tl.store(o + 1, tl.max(v, 0))
    tl.store(o + 2, tl.min(v, 0))
    tl.store(o + 3, tl.xor_sum(v, 0))
    tl.store(p, tl.argmax(v, 0))


@triton.jit
def k_atomics(x, s, m, h, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=0)
    tl.atomic_add(s, tl.sum(v, 0))
    tl.atomic_max(m, tl.max(v, 0))
    tl.atomic_add(h + (v & 15), 1, mask=i < n)


@triton.jit
def k_cas_lock(lock, total, B: tl.constexpr):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total, volatile=True) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def k_dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, INT: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros((M, N), tl.int32 if INT else tl.float32)
    for k0 in range(0, K, BK):
        x = tl.load(a + m[:, None] * K + k0 + k[None, :])
        y = tl.load(b + (k0 + k[:, None]) * N + n[None, :])
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def k_math(x, o, n, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(o + i, tl.sqrt(v))
    tl.store(o + n + i, tl.log(v))
    tl.store(o + 2 * n + i, 3.0 / v)
    tl.store(o + 3 * n + i, tl.sin(v))
    tl.store(o + 4 * n + i, tl.rsqrt(v))
    tl.store(o + 5 * n + i, tl.floor(v) + tl.exp2(-v))
    tl.store(o + 6 * n + i, tl.sigmoid(v))


@triton.jit
def k_int_math(x, y, o, n, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(o + i, a // b)
    tl.store(o + n + i, a % b)
    tl.store(o + 2 * n + i, tl.umulhi(a.to(tl.uint32), b.to(tl.uint32)).to(tl.int32))
    tl.store(o + 3 * n + i, (a.to(tl.int64) * b.to(tl.int64) >> 16).to(tl.int32))


@triton.jit
def k_casts(x, bf, hf, i8, f8, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(bf + i, v.to(tl.bfloat16))
    tl.store(hf + i, v.to(tl.float16))
    tl.store(i8 + i, v.to(tl.int8))
    tl.store(f8 + i, v.to(f8.dtype.element_ty))


@triton.jit
def k_transpose(x, o, R: tl.constexpr, C: tl.constexpr):
    v = tl.load(x + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    tl.store(o + tl.arange(0, C)[:, None] * R + tl.arange(0, R)[None, :], tl.trans(v))


@triton.jit
def k_sort(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.sort(tl.load(x + i)))


@triton.jit
def k_dot_scaled(
    a, sa, b, sb, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FA: tl.constexpr, FB: tl.constexpr
):
    PA: tl.constexpr = 2 if FA == "e2m1" else 1
    PB: tl.constexpr = 2 if FB == "e2m1" else 1
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(a + m[:, None] * (K // PA) + tl.arange(0, K // PA)[None, :])
    y = tl.load(b + n[None, :] * (K // PB) + tl.arange(0, K // PB)[:, None])
    s = tl.arange(0, K // 32)
    xs = tl.load(sa + m[:, None] * (K // 32) + s[None, :])
    ys = tl.load(sb + n[:, None] * (K // 32) + s[None, :])
    acc = tl.dot_scaled(x, xs, FA, y, ys, FB)
    tl.store(c + m[:, None] * N + n[None, :], acc)


def test_add(dev: Device) -> None:
    k = TritonKernel(k_add, {"x": "*fp32", "y": "*fp32", "o": "*fp32", "n": "i32"}, {"B": 256}, dev.arch)
    x, y, o = dev.tensor(torch.randn(1000)), dev.tensor(torch.randn(1000)), dev.empty(1000)
    k.run(dev, 4, [x, y, o, 1000])
    assert torch.equal(o, x + y)


@pytest.mark.parametrize("warps", [1, 4])
def test_softmax(dev: Device, warps: int) -> None:
    k = TritonKernel(
        k_softmax,
        {"x": "*fp32", "o": "*fp32", "stride": "i32", "cols": "i32"},
        {"B": 1024},
        dev.arch,
        num_warps=warps,
    )
    x, o = dev.tensor(torch.randn(5, 1000)), dev.empty(5, 1000)
    k.run(dev, 5, [x, o, 1000, 1000])
    torch.testing.assert_close(o, torch.softmax(x, 1), rtol=2e-6, atol=1e-8)


def test_scan(dev: Device) -> None:
    k = TritonKernel(k_scan, {"x": "*i32", "o": "*i32"}, {"R": 16, "C": 256}, dev.arch)
    x, o = (
        dev.tensor(torch.randint(-99, 99, (16, 256), dtype=torch.int32)),
        dev.empty(16, 256, dtype=torch.int32),
    )
    k.run(dev, 1, [x, o])
    assert torch.equal(o, torch.cumsum(x, 1).int())


def test_integer_reductions(dev: Device) -> None:
    k = TritonKernel(k_reduce_int, {"x": "*i32", "o": "*i32", "p": "*i32"}, {"B": 2048}, dev.arch)
    x = dev.tensor(torch.randperm(1 << 20)[:2048].int() - 3000)
    o, p = dev.empty(4, dtype=torch.int32), dev.empty(1, dtype=torch.int32)
    k.run(dev, 1, [x, o, p])
    xor = 0
    for v in x.tolist():
        xor ^= v
    assert o.tolist() == [x.sum().item(), x.max().item(), x.min().item(), xor]
    assert p.item() == x.argmax().item()


def test_atomics(dev: Device) -> None:
    k = TritonKernel(
        k_atomics, {"x": "*i32", "s": "*i32", "m": "*i32", "h": "*i32", "n": "i32"}, {"B": 256}, dev.arch
    )
    x = dev.tensor(torch.randint(0, 5000, (3000,), dtype=torch.int32))
    s, m, h = (dev.zeros(n, dtype=torch.int32) for n in (1, 1, 16))
    k.run(dev, 12, [x, s, m, h, 3000])
    assert s.item() == x.sum().item() and m.item() == x.max().item()
    assert torch.equal(h, torch.bincount(x & 15, minlength=16).int())


def test_spin_lock(dev: Device) -> None:
    k = TritonKernel(k_cas_lock, {"lock": "*i32", "total": "*i32"}, {"B": 64}, dev.arch, num_warps=1)
    lock, total = dev.zeros(1, dtype=torch.int32), dev.zeros(1, dtype=torch.int32)
    k.run(dev, 24, [lock, total])
    assert total.item() == 24 and lock.item() == 0


@pytest.mark.parametrize(
    "dtype, name",
    [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32"), (torch.int8, "i8")],
)
@pytest.mark.parametrize("size", [16, 64])
def test_dot(dev: Device, dtype: torch.dtype, name: str, size: int) -> None:
    integer = dtype == torch.int8
    if integer:
        a, b = (torch.randint(-99, 99, s, dtype=dtype) for s in ((size, 128), (128, size)))
    else:
        a, b = torch.randn(size, 128).to(dtype), torch.randn(128, size).to(dtype)
    out = "i32" if integer else "fp32"
    constants = {"M": size, "N": size, "K": 128, "BK": 64, "INT": integer}
    k = TritonKernel(k_dot, {"a": f"*{name}", "b": f"*{name}", "c": f"*{out}"}, constants, dev.arch)
    c = dev.empty(size, size, dtype=torch.int32 if integer else torch.float32)
    k.run(dev, 1, [dev.tensor(a), dev.tensor(b), c])
    if integer:
        assert torch.equal(c.long(), a.long() @ b.long())
    else:
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [16, 32])
def test_dot_fp8(dev: Device, size: int) -> None:
    dtype, name = (
        (torch.float8_e4m3fnuz, "fp8e4b8") if dev.arch == "gfx942" else (torch.float8_e4m3fn, "fp8e4nv")
    )
    a, b = torch.randn(size, 128).to(dtype), torch.randn(128, size).to(dtype)
    k = TritonKernel(
        k_dot,
        {"a": f"*{name}", "b": f"*{name}", "c": "*fp32"},
        {"M": size, "N": size, "K": 128, "BK": 128, "INT": False},
        dev.arch,
    )
    c = dev.empty(size, size)
    k.run(dev, 1, [dev.tensor(a), dev.tensor(b), c])
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def unpack(kind: str, raw: torch.Tensor) -> torch.Tensor:
    if kind == "e2m1":
        return torch.stack([FP4[(raw & 15).long()], FP4[(raw >> 4).long()]], -1).flatten(-2)
    return raw.view(torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2).double()


@pytest.mark.parametrize("fa, fb", [("e4m3", "e4m3"), ("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e5m2", "e4m3")])
def test_dot_scaled(dev: Device, fa: str, fb: str) -> None:
    m, n, k = 32, 32, 256

    def make(rows: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        if kind == "e2m1":
            raw = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8)
        else:
            raw = (
                torch.randn(rows, k)
                .to(torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2)
                .view(torch.uint8)
            )
        return raw, torch.randint(121, 133, (rows, k // 32), dtype=torch.uint8)

    a, sa = make(m, fa)
    b, sb = make(n, fb)
    types = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5", "e2m1": "*u8"}
    kernel = TritonKernel(
        k_dot_scaled,
        {"a": types[fa], "sa": "*u8", "b": types[fb], "sb": "*u8", "c": "*fp32"},
        {"M": m, "N": n, "K": k, "FA": fa, "FB": fb},
        dev.arch,
    )
    if dev.arch == "gfx950":
        assert "v_mfma_scale" in kernel.text
    c = dev.empty(m, n)
    kernel.run(dev, 1, [*(dev.tensor(x) for x in (a, sa, b, sb)), c])
    scaled = [
        unpack(f, x).reshape(-1, k // 32, 32) * torch.exp2(s.double() - 127)[..., None]
        for f, x, s in ((fa, a, sa), (fb, b, sb))
    ]
    want = scaled[0].reshape(m, k) @ scaled[1].reshape(n, k).T
    # gfx942 has no scaled MFMA: Triton converts to bf16, exactly for these formats and scales.
    assert ((c - want).abs().max() / want.abs().max()).item() < 2e-6


def test_math(dev: Device) -> None:
    k = TritonKernel(k_math, {"x": "*fp32", "o": "*fp32", "n": "i32"}, {"B": 512}, dev.arch)
    x, o = dev.tensor(torch.rand(512) * 40 + 0.01), dev.empty(7, 512)
    k.run(dev, 1, [x, o, 512])
    v = x.double()
    want = [v.sqrt(), v.log(), 3 / v, v.sin(), v.rsqrt(), v.floor() + torch.exp2(-v), v.sigmoid()]
    torch.testing.assert_close(o.double(), torch.stack(want), rtol=1e-6, atol=1e-6)


def test_integer_math(dev: Device) -> None:
    k = TritonKernel(k_int_math, {"x": "*i32", "y": "*i32", "o": "*i32", "n": "i32"}, {"B": 512}, dev.arch)
    x = torch.randint(-(1 << 31), 1 << 31, (512,)).int()
    y = torch.randint(-5000, 5000, (512,)).int()
    y[y == 0] = 7
    o = dev.empty(4, 512, dtype=torch.int32)
    k.run(dev, 1, [dev.tensor(x), dev.tensor(y), o, 512])
    xl, yl = x.long(), y.long()
    assert torch.equal(o[0], torch.div(xl, yl, rounding_mode="trunc").int())
    assert torch.equal(o[1], torch.fmod(xl, yl).int())
    high = [(a % 2**32) * (b % 2**32) >> 32 for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert [v % 2**32 for v in o[2].tolist()] == high
    assert torch.equal(o[3], (xl * yl >> 16).int())


def test_casts(dev: Device) -> None:
    dtype, name = (
        (torch.float8_e4m3fnuz, "fp8e4b8") if dev.arch == "gfx942" else (torch.float8_e4m3fn, "fp8e4nv")
    )
    types = {"x": "*fp32", "bf": "*bf16", "hf": "*fp16", "i8": "*i8", "f8": f"*{name}"}
    k = TritonKernel(k_casts, types, {"B": 512}, dev.arch)
    x = dev.tensor(torch.randn(512) * 20)
    outs = [dev.empty(512, dtype=t) for t in (torch.bfloat16, torch.float16, torch.int8, dtype)]
    k.run(dev, 1, [x, *outs])
    for got in outs[:3]:
        assert torch.equal(got, x.to(got.dtype))
    assert torch.equal(outs[3].view(torch.uint8), x.to(dtype).view(torch.uint8))


def test_transpose(dev: Device) -> None:
    k = TritonKernel(k_transpose, {"x": "*fp16", "o": "*fp16"}, {"R": 64, "C": 128}, dev.arch)
    x, o = dev.tensor(torch.randn(64, 128).half()), dev.empty(128, 64, dtype=torch.float16)
    k.run(dev, 1, [x, o])
    assert torch.equal(o, x.T)


def test_sort(dev: Device) -> None:
    k = TritonKernel(k_sort, {"x": "*i32", "o": "*i32"}, {"B": 256}, dev.arch)
    x, o = dev.tensor(torch.randint(-999, 999, (256,), dtype=torch.int32)), dev.empty(256, dtype=torch.int32)
    k.run(dev, 1, [x, o])
    assert torch.equal(o, x.sort().values)
