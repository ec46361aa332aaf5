# SPDX-License-Identifier: Apache-2.0
"""Layers of every kind in one step: replayed on the same memory with other metadata, each step gives what it
gives alone."""

from __future__ import annotations

import pytest
from mono import handoffs
from mono.layer_case import Shape
from mono.layer_step import Step, eager, first_of
from mono.run import same

from cdnasim import Device

full = pytest.mark.full


def replayed(layers: list[Shape | None], rows: int, tp: int, steps: int, memory: str) -> None:
    device = Device("gfx950", ranks=tp, memory=memory)
    run = Step(layers, rows, tp, device, 0)
    for number in range(steps):
        if memory == "hostile":
            handoffs.reschedule(device, number, "random")
        run.feed(number)
        run.launch()
        if number:  # The first leaves its words behind.
            assert same(run.outputs(), eager(layers, rows, tp, number)) == []


def test_two_layers_replayed() -> None:
    """A settled entry, and a layer that vLLM's attention runs before."""
    layers = [first_of(2, 1)[0], None]
    replayed(layers, 1, 2, 2, "exact")


@full
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("rows, memory", [(1, "hostile"), (6, "exact")])
def test_a_small_model_replayed(rows: int, memory: str) -> None:
    replayed(first_of(2, rows), rows, 2, 3, memory)


@full
@pytest.mark.timeout(4 * 3600)
def test_a_replay_that_keeps_a_steps_metadata_is_noticed() -> None:
    layers = [first_of(2, 1)[1]]
    run = Step(layers, 1, 2, Device("gfx950", ranks=2), 0)
    run.launch()
    assert same(run.outputs(), eager(layers, 1, 2, 1)) != []
