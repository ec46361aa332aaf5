# SPDX-License-Identifier: Apache-2.0
"""Large read-only memory that repeats a small pool of bytes, made of one file mapped many times.

384 experts are 3.4 GB a rank at TP2. Mapped onto a pool of some megabytes they take no memory and no time;
as the pool is a prime number of pages long, every expert begins at another place of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import torch

PAGE = mmap.PAGESIZE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]


def _map(address: int | None, size: int, protection: int, flags: int, file: int, offset: int) -> int:
    got = _libc.mmap(address, size, protection, flags, file, offset)
    if got in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes failed")
    return int(got)


class Pool:
    """``content`` is uint8, a whole number of pages."""

    def __init__(self, content: torch.Tensor) -> None:
        self.size = content.numel()
        if self.size % PAGE:
            raise ValueError(f"a pool of {self.size} bytes is not a whole number of {PAGE}-byte pages")
        self._file = os.memfd_create("mono-pool")
        os.ftruncate(self._file, self.size)
        with mmap.mmap(self._file, self.size) as view:
            view.write(content.numpy().tobytes())

    def repeat(self, size: int, first_page: int) -> torch.Tensor:
        """``size`` bytes (whole pages) that run through the pool from ``first_page`` again and again. A
        store to them ends the process. They stay mapped till its end: they are only addresses."""
        base = _map(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        at, where = 0, first_page * PAGE % self.size
        while at < size:
            part = min(self.size - where, size - at)
            _map(base + at, part, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, self._file, where)
            at, where = at + part, 0
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base)))
