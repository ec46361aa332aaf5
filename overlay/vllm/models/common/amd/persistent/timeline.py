# SPDX-License-Identifier: Apache-2.0
"""Timeline builds: when every workgroup began each part of a launch, by the GPU's constant-rate clock.

A timeline build is another build of the same kernel (``timeline`` of its geometry), whose workgroups keep a
clock a part in the workspace; other builds have no instruction of it. Clocks of a launch's workgroups are
comparable, those of two GPUs are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median


@dataclass(frozen=True)
class Part:
    """One part of a launch over its workgroups, in clock ticks from the launch's first stamp.

    Args:
        name: what begins.
        first, middle, last: the first, the median and the last workgroup's beginning.
        mean_ticks, longest_ticks: how long workgroups are in it, until they begin the next.
    """

    name: str
    first: int
    middle: float
    last: int
    mean_ticks: float
    longest_ticks: int


def parts_of(clocks: Sequence[Sequence[int]], stamps: Sequence[str]) -> list[Part]:
    """The parts of a launch.

    Args:
        clocks: [workgroups][stamps], as the workspace's ``timeline`` holds them.
        stamps: the geometry's; the last one is the end and no part.

    Raises:
        ValueError: a stamp is missing, or a workgroup's clocks do not rise.
    """
    for workgroup, row in enumerate(clocks):
        if len(row) != len(stamps):
            raise ValueError(f"workgroup {workgroup} has {len(row)} stamps, wanted {len(stamps)}")
        missing = [name for name, clock in zip(stamps, row, strict=True) if not clock]
        if missing:
            raise ValueError(
                f"workgroup {workgroup} has no stamp of {', '.join(missing)}: wanted the clocks of a launch "
                "of a timeline build that has ended"
            )
        if any(after < before for before, after in itertools.pairwise(row)):
            raise ValueError(f"workgroup {workgroup} has clocks that do not rise: {list(row)}")
    start = min(row[0] for row in clocks)
    found = []
    for i, name in enumerate(stamps[:-1]):
        begins = [row[i] - start for row in clocks]
        lasts = [row[i + 1] - row[i] for row in clocks]
        found.append(Part(name, min(begins), median(begins), max(begins), mean(lasts), max(lasts)))
    return found


def markdown(parts: Sequence[Part], ticks: float = 1.0, unit: str = "ticks") -> str:
    """A table of ``parts``, in units of ``ticks`` clock ticks (``hipDeviceAttributeWallClockRate`` is the
    clock's rate in kHz)."""
    lines = [
        f"| part | first begins, {unit} | median | last | mean duration | longest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for part in parts:
        values = (part.first, part.middle, part.last, part.mean_ticks, part.longest_ticks)
        lines.append(f"| {part.name} | " + " | ".join(f"{value / ticks:.1f}" for value in values) + " |")
    return "\n".join(lines) + "\n"
