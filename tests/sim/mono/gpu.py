# SPDX-License-Identifier: Apache-2.0
"""Bodies of our launches that run on the simulator and, unchanged, on GPUs (``tests/device``): numerics, and
replays whose every output is compared bit for bit with the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cdnasim.hip import GpuLike

from . import compare
from . import layer_compare as layers
from .case import make
from .layer_case import Shape, make_layer
from .layer_run import LayerRun
from .run import Run, same


def on_host(run: Any) -> Any:
    """The same run with what its memory holds in CPU memory, which is what comparisons read."""
    if isinstance(run, LayerRun):
        out = copy.copy(run)
        out.front = on_host(run.front)
        out.back = on_host(run.back)
        if out.back is not None:
            out.back.front = out.front
        return out
    if run is None:
        return None
    host = copy.copy(run)
    host.ranks = [
        {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in args.items()}
        for args in run.ranks
    ]
    host.peers = [peer.cpu() for peer in run.peers]
    return host


def ffn(dev: GpuLike, rows: int) -> Run:
    """The FFN launch of every rank of ``dev``, ready."""
    return Run(make(rows, dev.ranks, "random" if rows <= 7 else "few", arch=dev.arch), dev)


def layer(dev: GpuLike, rows: int, ratio: int = 1) -> LayerRun:
    """A standard layer's two launches, ready."""
    kind = "random" if rows <= 7 else "few"
    shape = Shape(rows, dev.ranks, ratio, contexts=(3, 700) if rows > 1 else (0,), kind=kind, arch=dev.arch)
    return LayerRun(make_layer(shape), dev)


def ffn_numerics(dev: GpuLike, rows: int) -> None:
    """Every stage of the FFN launch against float64, by ``compare.BOUNDS``."""
    run = ffn(dev, rows)
    run.launch()
    compare.check_run(on_host(run))


def layer_numerics(dev: GpuLike, rows: int, ratio: int = 1) -> None:
    """Every stage of a layer against float64, by ``layer_compare.BOUNDS``."""
    run = layer(dev, rows, ratio)
    run.launch()
    layers.check_layer(on_host(run))


def race(
    dev: GpuLike,
    widths: Sequence[int],
    replays: int,
    every: int = 50,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """The whole layer and the FFN launch of each of ``widths`` in turn, ``replays`` times on one memory.
    Every output is compared bit for bit with the first replay's at each ``every``-th and at the last.

    Returns how many replays were compared. Raises ``AssertionError`` for the first that differs, or whose
    wait ended without its word."""
    runs: list[Run | LayerRun] = [make(dev, rows) for rows in widths for make in (layer, ffn)]
    first: list[dict[str, torch.Tensor]] = []
    compared = 0
    for replay in range(replays):
        for run in runs:
            run.launch()
        if not first:
            first = [on_host(run).outputs() for run in runs]
        elif replay % every == 0 or replay == replays - 1:
            for run, want in zip(runs, first, strict=True):
                if wrong := same(on_host(run).outputs(), want):
                    what = "layer" if isinstance(run, LayerRun) else "FFN launch"
                    rows = run.case.shape.rows if isinstance(run, LayerRun) else run.case.rows
                    raise AssertionError(f"replay {replay}, {what} of {rows} rows: {', '.join(wrong)} differ")
            compared += 1
            say(f"{replay} of {replays} replays: the same bits")
    return compared
