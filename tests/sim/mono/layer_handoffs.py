# SPDX-License-Identifier: Apache-2.0
"""A whole layer's two launches again and again under the hostile memory model, as ``handoffs`` does it.

    python -m mono.layer_handoffs --rows 6 --tp 4 --schedules 200     (in tests/sim)

From step to step the activations and the key lists change; the front's new records are in the cache that the
back of the same step reads.
"""

from __future__ import annotations

import argparse
import sys
from functools import lru_cache

import torch

from cdnasim.device import SCHEDULES
from cdnasim.program import Kernel

from .handoffs import LIMIT, STEPS, hostile, reschedule, schedules
from .layer_case import LayerCase, Shape, make_layer
from .layer_run import LayerRun
from .run import same


@lru_cache(maxsize=32)
def step(shape: Shape, number: int) -> LayerCase:
    """Step ``number``, whose inputs come again after ``STEPS``."""
    return make_layer(shape, seed=number % STEPS)


@lru_cache(maxsize=8)
def expected(shape: Shape, only_front: bool = False) -> list[dict[str, torch.Tensor]]:
    """Outputs of each step in exact memory, by the kernels as they are."""
    out = []
    for number in range(STEPS):
        run = LayerRun(step(shape, number), only_front=only_front)
        run.launch()
        out.append(run.outputs())
    return out


def _take(run: LayerRun, number: int) -> None:
    """One step of the run. Raises ``AssertionError`` if its bits are wrong."""
    shape = run.case.shape
    run.feed(step(shape, number))
    run.launch()
    want = expected(shape) if run.back else expected(shape, only_front=True)
    if wrong := same(run.outputs(), want[number % STEPS]):
        raise AssertionError(", ".join(wrong) + " differ")


def check(
    shape: Shape,
    count: int,
    *,
    front: Kernel | None = None,
    back: Kernel | None = None,
    first: int = 0,
    only_front: bool = False,
) -> int:
    """``count`` steps on one memory, or with ``only_front`` their fronts. Raises ``AssertionError`` for the
    first whose bits are wrong."""
    device = hostile(shape.tp, shape.arch)
    run = LayerRun(step(shape, 0), device, front=front, back=back, limit=LIMIT, only_front=only_front)
    for number, (seed, schedule) in enumerate(schedules(first, count)):
        reschedule(device, seed, schedule)
        try:
            _take(run, number)
        except AssertionError as wrong:
            raise AssertionError(f"step {number} (seed {seed}, {schedule}): {wrong}") from None
    return count


def alternate(shapes: tuple[Shape, Shape], pairs: int, *, first: int = 0, share: bool = False) -> int:
    """Two widths in turn on one device, ``pairs`` times. ``share``: they share their memory, the fault that
    each width's own memory rules out."""
    device = hostile(shapes[0].tp, shapes[0].arch)
    runs: list[LayerRun] = []
    for shape in sorted(shapes, key=lambda shape: -shape.rows):
        other = runs[0] if share and runs else None
        runs.append(LayerRun(step(shape, 0), device, limit=LIMIT, share=other))
    for number in range(first, first + pairs):
        for run in runs:
            reschedule(device, number, SCHEDULES[number % len(SCHEDULES)])
            try:
                _take(run, number)
            except AssertionError as wrong:
                raise AssertionError(f"pair {number}, {run.case.shape.rows} rows: {wrong}") from None
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--ratio", type=int, default=1)
    parser.add_argument("--kind", default="few")
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    given = parser.parse_args()
    shape = Shape(given.rows, given.tp, given.ratio, kind=given.kind, hands_out=True)
    count = check(shape, given.schedules, first=given.first)
    print(f"{given.rows} rows TP{given.tp}: {count} schedules from seed {given.first}, the same bits")


if __name__ == "__main__":
    sys.exit(main())
