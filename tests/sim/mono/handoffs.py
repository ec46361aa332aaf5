# SPDX-License-Identifier: Apache-2.0
"""Launch after launch under the hostile memory model, each with another schedule and other activations:
bit for bit what exact memory gives.

    python -m mono.handoffs --rows 6 --tp 4 --schedules 200     (in tests/sim)

The activations change from launch to launch because words that an earlier launch left in a mailbox are
right by accident if they do not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from cdnasim import Device
from cdnasim.device import SCHEDULES
from cdnasim.program import Kernel

from .case import Case, make
from .run import Run, same

# Far above what any schedule needs, and soon over where a word never comes.
LIMIT = 20_000
STEPS = 2  # sets of activations
# Two hundred schedules and fifty pairs, in pieces that a run can be stopped between: (first seed, how many).
SCHEDULE_PIECES = [(first, 25) for first in range(0, 200, 25)]
PAIR_PIECES = [(first, 25) for first in range(0, 50, 25)]


@lru_cache(maxsize=32)
def step(rows: int, tp: int, kind: str, number: int, arch: str = "gfx950") -> Case:
    """Activations of step ``number``, which come again after ``STEPS``."""
    return make(rows, tp, kind, seed=number % STEPS, arch=arch)


@lru_cache(maxsize=8)
def expected(rows: int, tp: int, kind: str, arch: str = "gfx950") -> list[dict[str, torch.Tensor]]:
    """Outputs of each step in exact memory, by the kernel as it is."""
    out = []
    for number in range(STEPS):
        run = Run(step(rows, tp, kind, number, arch), Device(arch, ranks=tp))
        run.launch()
        out.append(run.outputs())
    return out


def schedules(first: int, count: int) -> Iterator[tuple[int, str]]:
    """(seed, schedule): every second is random, the adversarial ones take turns."""
    for seed in range(first, first + count):
        yield seed, "random" if seed % 2 else SCHEDULES[1 + seed // 2 % (len(SCHEDULES) - 1)]


def hostile(tp: int, arch: str = "gfx950") -> Device:
    return Device(arch, ranks=tp, memory="hostile")


def reschedule(device: Device, seed: int, schedule: str) -> None:
    """Another seed and kind of schedule for the next launch."""
    _, *rest = device._settings
    device._settings = (schedule, *rest)
    device.reseed(seed)


def check(
    rows: int,
    tp: int,
    kind: str,
    count: int,
    kernel: Kernel | None = None,
    first: int = 0,
    arch: str = "gfx950",
) -> int:
    """``count`` launches on one memory. Raises ``AssertionError`` for the first whose bits are wrong."""
    want = expected(rows, tp, kind, arch)
    device = hostile(tp, arch)
    run = Run(step(rows, tp, kind, 0, arch), device, kernel, limit=LIMIT)
    for number, (seed, schedule) in enumerate(schedules(first, count)):
        reschedule(device, seed, schedule)
        run.feed(step(rows, tp, kind, number, arch))
        run.launch()
        if wrong := same(run.outputs(), want[number % STEPS]):
            raise AssertionError(f"launch {number} (seed {seed}, {schedule}): {', '.join(wrong)} differ")
    return count


def alternate(
    widths: tuple[int, int], tp: int, kind: str, pairs: int, *, first: int = 0, share: bool = False
) -> int:
    """Two widths in turn on one device, ``pairs`` times. ``share``: they share their memory, the fault
    that each width's own memory rules out."""
    device = hostile(tp)
    runs: list[Any] = []
    for rows in sorted(widths, reverse=True):
        other = runs[0] if share and runs else None
        runs.append(Run(step(rows, tp, kind, 0), device, limit=LIMIT, share=other))
    for number in range(first, first + pairs):
        for run in runs:
            rows = run.case.rows
            reschedule(device, number, SCHEDULES[number % len(SCHEDULES)])
            run.feed(step(rows, tp, kind, number))
            run.launch()
            if wrong := same(run.outputs(), expected(rows, tp, kind)[number % STEPS]):
                raise AssertionError(f"pair {number}, {rows} rows: {', '.join(wrong)} differ")
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--kind", default="few")
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    given = parser.parse_args()
    count = check(given.rows, given.tp, given.kind, given.schedules, first=given.first)
    print(f"{given.rows} rows TP{given.tp}: {count} schedules from seed {given.first}, the same bits")


if __name__ == "__main__":
    sys.exit(main())
