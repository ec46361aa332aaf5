# SPDX-License-Identifier: Apache-2.0
"""Paged caches as records that kernels can index, checked before any view of them is made.

A kernel's loads and stores are not bounded by the tensor that it got: a cache of another format would be
read as garbage and written over, without a fault.
"""

from __future__ import annotations

import math
import weakref

import torch

BYTE_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def cache_faults(cache: torch.Tensor, block_size: int, record_bytes: int) -> list[str]:
    """Why a cache does not hold blocks of ``block_size`` records of ``record_bytes`` bytes; empty when it
    does.

    Args:
        cache: [blocks, ...], what follows the first dimension being one block's storage: bytes of any shape,
            or [records, bytes of a record].
        block_size: records of a block.
        record_bytes: bytes of a record.
    """
    if not isinstance(cache, torch.Tensor):
        return [f"a {type(cache).__name__}, wanted a tensor: the cache is not allocated"]
    if cache.numel() == 0 or cache.dim() < 2:
        return [f"shape {tuple(cache.shape)}, wanted blocks of records: the cache is not allocated"]
    faults = []
    if cache.dtype not in BYTE_DTYPES:
        faults.append(f"dtype {cache.dtype}, wanted one byte an element: {', '.join(map(str, BYTE_DTYPES))}")
    if cache.dim() > 2 and cache.shape[-1] != record_bytes:
        faults.append(f"records of {cache.shape[-1]} bytes, wanted {record_bytes}")
    stored, wanted = math.prod(cache.shape[1:]), block_size * record_bytes
    records = f"wanted at least {wanted}, {block_size} records of {record_bytes} bytes"
    if stored < wanted:
        faults.append(f"blocks of {stored} bytes, {records}")
    if not cache[0].is_contiguous():
        faults.append(f"strides {cache.stride()} of shape {tuple(cache.shape)}, wanted each block contiguous")
    if cache.stride(0) < wanted:
        faults.append(f"block stride {cache.stride(0)}, {records}: blocks would overlap")
    return faults


class RecordCache:
    """One cache of one layer, as [blocks, block size, record bytes].

    It keeps no view: vLLM frees a cache and binds another, and a view would keep the first one's memory.

    Args:
        layer: the layer's name, for errors.
        what: which of the layer's caches it is, for errors.
        record_bytes: bytes of a record.
    """

    def __init__(self, layer: str, what: str, record_bytes: int) -> None:
        self.layer = layer
        self.what = what
        self.record_bytes = record_bytes
        self._checked: weakref.ref[torch.Tensor] | None = None
        self._block_size = 0
        self._as_is = False

    def view(self, cache: torch.Tensor, block_size: int) -> torch.Tensor:
        """``cache`` as uint8 [blocks, block_size, record bytes], a block's records first.

        Raises:
            ValueError: the cache does not hold such records; names the layer and every fault.
        """
        # A freed cache is None to its reference, as is a cache that is not bound.
        known = self._checked is not None and cache is not None and self._checked() is cache
        if not known or self._block_size != block_size:
            self._check(cache, block_size)
        if self._as_is:
            return cache
        return torch.as_strided(
            cache.view(torch.uint8), (cache.shape[0], block_size, self.record_bytes), self._strides(cache)
        )

    def _check(self, cache: torch.Tensor, block_size: int) -> None:
        if faults := cache_faults(cache, block_size, self.record_bytes):
            raise ValueError(f"{self.layer}: the kernels cannot read its {self.what}: {'; '.join(faults)}")
        self._checked, self._block_size = weakref.ref(cache), block_size
        self._as_is = (
            cache.dtype == torch.uint8
            and cache.shape[1:] == (block_size, self.record_bytes)
            and cache.stride() == self._strides(cache)
        )

    def _strides(self, cache: torch.Tensor) -> tuple[int, int, int]:
        return cache.stride(0), self.record_bytes, 1
