# SPDX-License-Identifier: Apache-2.0
"""A decode step's launches in the order in which a server runs them, replayed as a captured graph is: every
argument is the address that it was at capture, and a step brings its activations and key lists in place.

Launches of one kind and width share their workspace and symmetric memory, as on the server.
"""

from __future__ import annotations

from typing import Any

import torch

from cdnasim import Device

from .case import Case, make
from .layer_case import LayerCase, Shape, make_layer
from .layer_run import LayerRun
from .run import Run

CARRIED = ("residual", "post", "comb", "pre")


def first_of(tp: int, rows: int) -> list[Shape | None]:
    """A small model: a layer whose residual is settled, a standard one, an index source, one whose attention
    vLLM runs (None), and a layer of the draft."""
    contexts = (125,)
    return [
        Shape(rows, tp, ratio=0, fold=False, contexts=contexts),
        Shape(rows, tp, ratio=1, contexts=contexts),
        Shape(rows, tp, ratio=2, hands_out=True, contexts=contexts, window_block=32),
        None,
        Shape(rows, tp, ratio=0, fold=False, experts=128, picks=3, window=192, contexts=contexts),
    ]


class Step:
    """``layers``: whole layers' shapes, None for the FFN launch alone."""

    def __init__(
        self, layers: list[Shape | None], rows: int, tp: int, device: Device, number: int, **settings: Any
    ) -> None:
        self.layers, self.rows, self.tp, self.device = layers, rows, tp, device
        self.runs: list[Run] = []
        held: dict[Any, LayerRun | Run] = {}
        for layer, case in enumerate(self._cases(number)):
            if isinstance(case, Case):
                run = Run(case, device, share=held.get("ffn"), **settings)
                held.setdefault("ffn", run)
                chain = [run]
            else:
                # The draft's back is another build, with memory of its own.
                key = case.shape.experts
                whole = LayerRun(case, device, share=held.get(key), **settings)
                held.setdefault(key, whole)
                chain = [whole.front, whole.back]
            self._follow(chain[0], layer)
            self.runs += chain

    def _cases(self, number: int) -> list[LayerCase | Case]:
        """Of step ``number``."""
        return [
            make(self.rows, self.tp, seed=50 * number + layer)
            if shape is None
            else make_layer(shape, seed=50 * number + layer)
            for layer, shape in enumerate(self.layers)
        ]

    def _follow(self, run: Run, layer: int) -> None:
        """Take the last layer's outputs, where they are, for inputs."""
        if not layer:
            return
        for args, before in zip(run.ranks, self.runs[-1].ranks, strict=True):
            args |= {f"{name}_in": before[f"{name}_out"] for name in CARRIED}
            if "x" in args:
                args["x"] = before["out"]

    def feed(self, number: int) -> None:
        """Step ``number``'s first residual, attention inputs and key lists, in place."""
        runs = iter(self.runs)
        for layer, case in enumerate(self._cases(number)):
            if isinstance(case, Case):
                run = next(runs)
                for rank, args in enumerate(run.ranks):
                    args["partial"].copy_(case.arguments(rank)["partial"])
                continue
            for run, given in ((next(runs), case.front_arguments), (next(runs), case.back_arguments)):
                names = ("positions", "slots", "window_indices", "window_lens", "requests")
                names += ("selected", "block_table") if case.shape.ratio else ()
                if not layer:
                    names += ("x", *(f"{name}_in" for name in CARRIED))
                for rank, args in enumerate(run.ranks):
                    for name in set(names) & set(given(rank)):
                        args[name].copy_(given(rank)[name])
                    if "query_norm" in args:
                        args["window_cache"].copy_(case.window.raw)

    def launch(self) -> None:
        """All of the step's launches, one after another on every rank."""
        for run in self.runs:
            run.launch()

    def outputs(self) -> dict[str, torch.Tensor]:
        """What every launch gave."""
        return {f"{i} {name}": x for i, run in enumerate(self.runs) for name, x in run.outputs().items()}


def eager(layers: list[Shape | None], rows: int, tp: int, number: int) -> dict[str, torch.Tensor]:
    """Step ``number`` on fresh memory."""
    step = Step(layers, rows, tp, Device("gfx950", ranks=tp), number)
    step.launch()
    return step.outputs()
