# SPDX-License-Identifier: Apache-2.0
"""Memory layouts, declared once: sizes, offsets and addresses come from the same declaration.

A ``Layout`` names the regions of one allocation in order. ``Region.at`` gives the byte offset of an element
and works on Python integers (plans, tests, the host) and on traced ones (kernels) alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# A region starts on its own memory channel interleave, so that no two regions share a cache line.
REGION_ALIGNMENT = 256


@dataclass(frozen=True)
class Region:
    """A dense row-major array inside an allocation: ``shape`` items of ``item_bytes`` from ``offset``."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    offset: int = 0

    @property
    def size(self) -> int:
        """Bytes of the whole region."""
        total = self.item_bytes
        for extent in self.shape:
            total *= extent
        return total

    def stride(self, axis: int) -> int:
        """Bytes between neighbours along ``axis``."""
        step = self.item_bytes
        for extent in self.shape[axis + 1 :]:
            step *= extent
        return step

    def at(self, *index: Any) -> Any:
        """Byte offset, from the start of the allocation, of the item at ``index``; trailing indices left
        out are 0. Raises ``IndexError`` for too many indices or a Python integer that is out of range."""
        if len(index) > len(self.shape):
            raise IndexError(f"{self.name} has {len(self.shape)} dimensions, {len(index)} indices given")
        out: Any = self.offset
        for axis, where in enumerate(index):
            if isinstance(where, int) and not 0 <= where < self.shape[axis]:
                raise IndexError(
                    f"{self.name}: index {where} of axis {axis} is not in 0..{self.shape[axis] - 1}"
                )
            step = self.stride(axis)
            out = out + (where if step == 1 else where * step)
        return out


@dataclass(frozen=True)
class Overlap:
    """Groups of regions that begin at the same place: no two groups are in use at the same time. A group may
    hold such groups in turn."""

    groups: tuple[tuple[Region | Overlap, ...], ...]


class Layout:
    """The regions of one allocation, in order, each aligned to ``REGION_ALIGNMENT``; attributes by name."""

    def __init__(self, regions: Sequence[Region | Overlap]) -> None:
        self._regions: dict[str, Region] = {}
        self.size = self._put(regions, 0)

    def _put(self, group: Sequence[Region | Overlap], end: int) -> int:
        for region in group:
            if isinstance(region, Overlap):
                end = max(self._put(inner, end) for inner in region.groups)
                continue
            if region.name in self._regions:
                raise ValueError(f"two regions are named {region.name!r}")
            if region.item_bytes <= 0 or any(extent <= 0 for extent in region.shape):
                raise ValueError(
                    f"region {region.name!r} is empty: {region.shape} of {region.item_bytes} bytes"
                )
            placed = Region(region.name, region.shape, region.item_bytes, end)
            self._regions[region.name] = placed
            end = -(-(end + placed.size) // REGION_ALIGNMENT) * REGION_ALIGNMENT
        return end

    def __getattr__(self, name: str) -> Region:
        try:
            return self.__dict__["_regions"][name]
        except KeyError:
            raise AttributeError(
                f"no region {name!r}; there are {', '.join(self.__dict__['_regions'])}"
            ) from None

    def overlap(self, one: str, other: str) -> bool:
        """Whether two regions share bytes."""
        a, b = getattr(self, one), getattr(self, other)
        return a.offset < b.offset + b.size and b.offset < a.offset + a.size

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())
