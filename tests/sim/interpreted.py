# SPDX-License-Identifier: Apache-2.0
"""Triton kernels with their inputs, for two machines: Triton's interpreter (this file run with
TRITON_INTERPRET=1
writes what it gives) and the simulator (``test_triton_interpreter.py``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import test_triton as t
import torch


@dataclass(frozen=True)
class Case:
    """``arguments`` gives tensors (outputs zeroed) and integers, in the kernel's order."""

    kernel: Any
    grid: int
    types: tuple[str, ...]
    constants: dict[str, Any]
    arguments: Callable[[torch.Generator], list[Any]]

    def made(self) -> list[Any]:
        """The same arguments each time."""
        return self.arguments(torch.Generator().manual_seed(11))


def ints(g: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=g, dtype=torch.int32)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


i32, f16 = torch.int32, torch.float16
CASES = {
    "add": Case(
        t.k_add,
        4,
        ("*fp32", "*fp32", "*fp32", "i32"),
        {"B": 256},
        lambda g: [torch.randn(1000, generator=g), torch.randn(1000, generator=g), zeros(1000), 1000],
    ),
    "softmax": Case(
        t.k_softmax,
        5,
        ("*fp32", "*fp32", "i32", "i32"),
        {"B": 1024},
        lambda g: [torch.randn(5, 1000, generator=g), zeros(5, 1000), 1000, 1000],
    ),
    "scan": Case(
        t.k_scan,
        1,
        ("*i32", "*i32"),
        {"R": 16, "C": 256},
        lambda g: [ints(g, -99, 99, 16, 256), zeros(16, 256, dtype=i32)],
    ),
    "integer reductions": Case(
        t.k_reduce_int,
        1,
        ("*i32", "*i32", "*i32"),
        {"B": 2048},
        lambda g: [
            torch.randperm(1 << 20, generator=g)[:2048].int(),
            zeros(4, dtype=i32),
            zeros(1, dtype=i32),
        ],
    ),
    "atomics": Case(
        t.k_atomics,
        12,
        ("*i32", "*i32", "*i32", "*i32", "i32"),
        {"B": 256},
        lambda g: [ints(g, 0, 5000, 3000), *(zeros(n, dtype=i32) for n in (1, 1, 16)), 3000],
    ),
    "dot": Case(
        t.k_dot,
        1,
        ("*fp16", "*fp16", "*fp32"),
        {"M": 32, "N": 32, "K": 128, "BK": 64, "INT": False},
        lambda g: [
            torch.randn(32, 128, generator=g).half(),
            torch.randn(128, 32, generator=g).half(),
            zeros(32, 32),
        ],
    ),
    "integer maths": Case(
        t.k_int_math,
        1,
        ("*i32", "*i32", "*i32", "i32"),
        {"B": 512},
        lambda g: [ints(g, -(1 << 31), 1 << 31, 512), ints(g, 1, 5000, 512), zeros(4, 512, dtype=i32), 512],
    ),
    "transpose": Case(
        t.k_transpose,
        1,
        ("*fp16", "*fp16"),
        {"R": 64, "C": 128},
        lambda g: [torch.randn(64, 128, generator=g).half(), zeros(128, 64, dtype=f16)],
    ),
    "sort": Case(
        t.k_sort,
        1,
        ("*i32", "*i32"),
        {"B": 256},
        lambda g: [ints(g, -999, 999, 256), zeros(256, dtype=i32)],
    ),
}


def main() -> None:
    """Every case through the interpreter; all tensors afterwards to the file named."""
    out: dict[str, list[torch.Tensor]] = {}
    for name, case in CASES.items():
        args = case.made()
        case.kernel[(case.grid,)](*args, **case.constants)
        out[name] = [a for a in args if isinstance(a, torch.Tensor)]
    torch.save(out, sys.argv[1])


if __name__ == "__main__":
    main()
