# SPDX-License-Identifier: Apache-2.0
"""Timeline builds of our launches on the simulator, whose clock counts instructions.

    python -m mono.timeline [--launch ffn | front | back] [--rows 6] [--tp 4]     (in tests/sim)

prints when the workgroups of rank 0 began each part of a launch.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cdnasim import Device

from .case import make
from .layer_case import Shape, make_layer
from .layer_run import BackRun, FrontRun, back_kernel, front_kernel
from .run import Run
from .sources import OVERLAY, compiled_kind, modules

timeline = modules().timeline


class TimedFfn(Run):
    """The FFN launch."""

    def layouts(self) -> tuple[Any, Any]:
        self.geometry = replace(self.geometry, timeline=True)
        return super().layouts()


class TimedFront(FrontRun):
    """The attention front."""

    def layouts(self) -> tuple[Any, Any]:
        self.build = replace(self.build, timeline=True)
        return super().layouts()


class TimedBack(BackRun):
    """The attention back."""

    def layouts(self) -> tuple[Any, Any]:
        self.build = replace(self.build, timeline=True)
        return super().layouts()


def ffn(rows: int, tp: int, overlay: Path = OVERLAY) -> TimedFfn:
    """A timeline build's launch, ready."""
    case = make(rows, tp)
    fields = {"rows": rows, "tp": tp, "experts": case.experts, "picks": case.picks, "timeline": 1}
    return TimedFfn(case, Device("gfx950", ranks=tp), compiled_kind("ffn", "gfx950", overlay, **fields))


def layer(rows: int, tp: int) -> tuple[TimedFront, TimedBack]:
    """Timeline builds of a layer's launches; the back follows the front."""
    shape = Shape(rows, tp)
    front = TimedFront(make_layer(shape), Device("gfx950", ranks=tp), front_kernel(shape, timeline=1))
    return front, TimedBack(front, back_kernel(shape, timeline=1))


def clocks(run: Run, rank: int = 0) -> list[list[int]]:
    """[workgroups][stamps] of a rank's last launch."""
    region = run.workspace.timeline
    raw = run.ranks[rank]["workspace"][region.offset : region.offset + region.size]
    rows: list[list[int]] = raw.view(torch.int64).view(region.shape).tolist()
    return rows


def stamps(run: Run) -> tuple[str, ...]:
    """What the launch stamps, in order."""
    names: tuple[str, ...] = getattr(run, "build", run.geometry).stamps
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launch", choices=("ffn", "front", "back"), default="ffn")
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--tp", type=int, default=4)
    given = parser.parse_args()
    if given.launch == "ffn":
        run: Run = ffn(given.rows, given.tp)
    else:
        front, back = layer(given.rows, given.tp)
        run = back if given.launch == "back" else front
        front.launch()
    run.launch()
    run.launch()  # the simulator's clock begins at 0, which is no stamp
    print(timeline.markdown(timeline.parts_of(clocks(run), stamps(run))))


if __name__ == "__main__":
    sys.exit(main())
