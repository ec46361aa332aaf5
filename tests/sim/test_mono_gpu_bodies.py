# SPDX-License-Identifier: Apache-2.0
"""The bodies that tests/device runs on GPUs, on the simulator: they pass there, and can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mono import gpu
from mono.run import Run

from cdnasim import Device


def test_the_ffn_launch_is_judged() -> None:
    gpu.ffn_numerics(Device("gfx950", ranks=2), 1)


def test_replays_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replays agree; one bit of an output of the third fails it, by launch and name."""
    monkeypatch.setattr(gpu, "layer", gpu.ffn)
    said: list[str] = []
    assert gpu.race(Device("gfx950", ranks=2), (1,), 2, say=said.append) == 1
    assert said == ["1 of 2 replays: the same bits"]
    launched = Run.launch
    count = 0

    def launch(run: Run, *args: Any) -> Any:
        nonlocal count
        count += 1
        reports = launched(run, *args)
        if count == 4:
            for rank in run.ranks:
                rank["out"].view(torch.int16)[0, 0] ^= 1
        return reports

    monkeypatch.setattr(Run, "launch", launch)
    with pytest.raises(AssertionError, match="replay 1, FFN launch of 1 rows: out differ"):
        gpu.race(Device("gfx950", ranks=2), (1,), 2)


@pytest.mark.full
def test_a_layer_is_judged_and_replayed() -> None:
    gpu.layer_numerics(Device("gfx950", ranks=2), 1)
    assert gpu.race(Device("gfx950", ranks=2), (2, 1), 3, every=1) == 2


def test_what_is_compared_is_a_copy_in_cpu_memory() -> None:
    """A GPU's memory cannot be read by the comparisons; what the run itself holds stays where it is."""
    run = gpu.ffn(Device("gfx950", ranks=2), 1)
    host = gpu.on_host(run)
    assert host is not run and host.ranks is not run.ranks and host.peers is not run.peers
    moved: list[torch.device] = [x.device for rank in host.ranks for x in rank.values() if torch.is_tensor(x)]
    assert set(moved) == {torch.device("cpu")}
