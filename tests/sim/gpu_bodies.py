# SPDX-License-Identifier: Apache-2.0
"""Test bodies that run on the simulator and, unchanged, on real GPUs (tests/device)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cdnasim.hip import GpuLike
from cdnasim.triton_front import TritonKernel


@triton.jit
def _row_sum(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.store(out + row, tl.sum(tl.load(x + row * n + at, mask=at < n, other=0.0), 0))


@triton.jit
def _dot(a, b, c, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * M + m[None, :])
    tl.store(c + m[:, None] * M + m[None, :], tl.dot(x, y))


def row_sum(dev: GpuLike) -> None:
    """A masked reduction over LDS and lanes."""
    kernel = TritonKernel(_row_sum, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 1024}, dev.arch)
    data = torch.randn(9, 1000, generator=torch.Generator().manual_seed(1))
    x, out = dev.tensor(data), dev.empty(9)
    kernel.run(dev, 9, [x, out, 1000])
    torch.testing.assert_close(out.cpu(), data.sum(1), rtol=1e-5, atol=1e-4)


def dot(dev: GpuLike) -> None:
    """A bf16 matrix product on matrix instructions: products and small sums of integers are exact."""
    kernel = TritonKernel(_dot, {"a": "*bf16", "b": "*bf16", "c": "*fp32"}, {"M": 64, "K": 128}, dev.arch)
    g = torch.Generator().manual_seed(2)
    a = torch.randint(-8, 9, (64, 128), generator=g).bfloat16()
    b = torch.randint(-8, 9, (128, 64), generator=g).bfloat16()
    c = dev.zeros(64, 64)
    kernel.run(dev, 1, [dev.tensor(a), dev.tensor(b), c])
    assert torch.equal(c.cpu(), a.float() @ b.float())


BODIES = {"row sum": row_sum, "dot": dot}
