# SPDX-License-Identifier: Apache-2.0
"""Fail-stop of the whole layer's launches: a word that never comes ends the launch on every rank, with a
record of what was awaited, and a new start works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mono import layer_handoffs as handoffs
from mono.layer_case import Shape
from mono.layer_mutations import ATTENTION, PUBLISHED, SILENT, SILENT_KEY
from mono.layer_run import LayerRun, back_kernel, front_kernel
from mono.mutations import COLLAPSED, REDUCE, SEAM
from mono.run import WAIT_LIMIT, Run, same
from mono.sources import Edit, modules, mutated

from cdnasim import Device

full = pytest.mark.full
TP, LIMIT, TAG = 2, 300, 5
ONE = Shape(1, TP, contexts=(0,))
ffn, front, back = modules().ffn, modules().front, modules().back


def start(memory: str = "exact") -> LayerRun:
    device = Device("gfx950", ranks=TP, memory=memory)
    return LayerRun(handoffs.step(ONE, 0), device, limit=LIMIT, tag=TAG)


def started(launch: str) -> tuple[LayerRun, Run]:
    """A layer, and the launch of it that will go wrong; what comes before has run, with waits of any
    length."""
    layer = start()
    if launch == "front":
        return layer, layer.front
    layer.front.reset(TAG)
    layer.front.launch()
    return layer, layer.back


def records(run: Run) -> list[Any]:
    found = [run.record(rank) for rank in range(TP)]
    assert None not in found, found
    return found


def check_over(run: Run) -> None:
    """A later launch ends at once, however long its waits may be, and the error stands; with the control
    blocks reset the next launch is right."""
    before = records(run)
    for peer in run.peers:
        peer[4:8].view(torch.int32)[0] = WAIT_LIMIT
    reports = run.launch()
    # A wait looks twice: before and after it has read the record. None comes near the limit.
    assert max(r.longest_wave for r in reports) < WAIT_LIMIT // 10
    assert records(run) == before
    run.reset(TAG + 10)
    run.launch()
    name = "front" if hasattr(run, "qkv") else "back"
    got = {f"{name} {key}": value for key, value in run.outputs().items()}
    want = handoffs.expected(ONE)[0]
    assert same(got, {key: want[key] for key in got}) == []


def test_a_rank_never_launches_the_back() -> None:
    _, run = started("back")
    run.launch(ranks=[0])
    for record in records(run):
        assert (record.stage, record.awaited, record.tag) == (ffn.ATTENTION_REDUCE, 1, TAG)
    check_over(run)


def test_a_front_waits_for_no_other_rank() -> None:
    _, run = started("front")
    run.launch(ranks=[1])
    run.launch(ranks=[0])
    got = {f"front {key}": value for key, value in run.outputs().items()}
    assert same(got, {key: handoffs.expected(ONE)[0][key] for key in got}) == []


@full
def test_a_peers_stores_are_lost() -> None:
    """Rank 1's stores to rank 0 go elsewhere."""
    _, run = started("back")
    nowhere = run.device.zeros(run.symmetric.size, dtype=torch.uint8, name="nowhere", peer=True)
    right = run.addresses[1].clone()
    run.addresses[1][0] = nowhere.data_ptr()
    run.launch()
    for record in records(run):
        assert (record.stage, record.awaited, record.tag) == (ffn.ATTENTION_REDUCE, 1, TAG)
    run.addresses[1].copy_(right)
    check_over(run)


@full
@pytest.mark.parametrize("launch", ["front", "back"])
@pytest.mark.parametrize("memory", ["exact", "hostile"])
def test_a_limit_of_one_poll_never_takes_a_late_word_for_a_missing_one(memory: str, launch: str) -> None:
    """Waits that give up at once: whatever the launch ends with, the next start is right."""
    layer = start(memory)
    run = layer.front if launch == "front" else layer.back
    if launch == "back":
        layer.front.reset(TAG)
        layer.front.launch()
    run.reset(TAG, 1)
    run.launch()
    numbers = range(1, (front.QKV_ROWS if launch == "front" else back.RANKS) + 1)
    for record in (run.record(rank) for rank in range(TP)):
        assert record is None or record.stage in numbers
    run.reset(TAG + 1)
    run.launch()
    run.outputs()


# ---- a workgroup that stops before it hands over
@dataclass(frozen=True)
class Stop:
    """``edit`` silences one workgroup of ``launch``; the record has ``stage``, and one of ``awaited``."""

    launch: str
    edit: Edit
    stage: int
    awaited: frozenset[int]
    fast: bool = False


def _published(workgroup: int) -> Edit:
    old = "@dev.when(there & (ctx.thread == 0))"
    return Edit(PUBLISHED, old, old.replace("there &", f"there & (ctx.workgroup != {workgroup}) &"))


_COLLAPSED = Edit(
    COLLAPSED,
    "        @dev.when(ctx.thread == 0)",
    "        @dev.when((ctx.thread == 0) & (ctx.workgroup != 37))",
)
_SUMS = Edit(SEAM, "@dev.when(item < items)", "@dev.when((item < items) & (ctx.workgroup != 37))")
_HEADS = Edit(ATTENTION, "@dev.when(ctx.lane % 4 == 0)", "@dev.when((ctx.lane % 4 == 0) & (head != 3))")
_REDUCE = Edit(REDUCE, "    @dev.when(active)", "    @dev.when(active & (ctx.workgroup != 37))")
_37 = frozenset({37})
STOPPED = {
    "front: collapsed": Stop("front", _COLLAPSED, front.COLLAPSED, _37),
    "front: mixes": Stop("front", _SUMS, front.MIXES, _37),
    "front: query rank": Stop("front", _published(37), front.QKV_ROWS, _37),
    "front: key": Stop("front", SILENT_KEY, front.QKV_ROWS, frozenset({SILENT}), fast=True),
    # Head 3 of the first group: its 16 blocks of 32.
    "back: attended": Stop("back", _HEADS, back.ATTENDED, frozenset(range(48, 64))),
    "back: ranks": Stop("back", _published(37), back.RANKS, _37),
    "back: attention reduce": Stop("back", _REDUCE, ffn.ATTENTION_REDUCE, frozenset({1})),
    "back: collapsed": Stop("back", _COLLAPSED, ffn.COLLAPSED, _37),
    "back: mixes": Stop("back", _SUMS, ffn.MIXES, _37),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if stop.fast else full) for n, stop in STOPPED.items()]
)
def test_a_workgroup_stops(name: str) -> None:
    """On rank 1; the other's launch is as it should be."""
    stop = STOPPED[name]
    kernel = (front_kernel if stop.launch == "front" else back_kernel)(ONE, overlay=mutated((stop.edit,)))
    _, run = started(stop.launch)
    run.launch(kernels={1: kernel})
    for record in records(run):
        assert (record.stage, record.tag) == (stop.stage, TAG)
        assert record.awaited in stop.awaited
    check_over(run)


def test_each_stop_still_finds_its_place() -> None:
    for stop in STOPPED.values():
        mutated((stop.edit,))
