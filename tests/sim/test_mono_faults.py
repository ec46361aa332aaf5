# SPDX-License-Identifier: Apache-2.0
"""Fail-stop of our FFN launch: a word that never comes ends the launch on every rank, with a record of what
was awaited, and a new start works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mono import handoffs
from mono.case import make
from mono.mutations import COLLAPSED, GATE_UP, REDUCE, ROUTING, SEAM
from mono.run import WAIT_LIMIT, Run, same
from mono.sources import Edit, compiled, modules, mutated

from cdnasim import Device

full = pytest.mark.full
TP, LIMIT, TAG = 2, 300, 5
ffn = modules().ffn


def start(memory: str = "exact", **settings: Any) -> Run:
    return Run(make(1, TP), Device("gfx950", ranks=TP, memory=memory), limit=LIMIT, tag=TAG, **settings)


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
    assert same(run.outputs(), handoffs.expected(1, TP, "random")[0]) == []


def check_one_rank_missing(run: Run) -> None:
    run.launch(ranks=[0])
    for record in records(run):
        assert (record.stage, record.awaited, record.tag) == (ffn.ATTENTION_REDUCE, 1, TAG)
        assert 0 <= record.workgroup < 256
    check_over(run)


def test_a_rank_never_launches() -> None:
    check_one_rank_missing(start())


@full
def test_a_rank_never_launches_on_hostile_memory() -> None:
    check_one_rank_missing(start("hostile"))


def test_a_peers_stores_are_lost() -> None:
    """Rank 1's stores to rank 0 go elsewhere."""
    run = start()
    nowhere = run.device.zeros(run.symmetric.size, dtype=torch.uint8, name="nowhere", peer=True)
    right = run.addresses[1].clone()
    run.addresses[1][0] = nowhere.data_ptr()
    run.launch()
    for record in records(run):
        assert (record.stage, record.awaited, record.tag) == (ffn.ATTENTION_REDUCE, 1, TAG)
    run.addresses[1].copy_(right)
    check_over(run)


def test_ranks_at_different_tags() -> None:
    """A rank that counted another launch: neither takes the other's words."""
    run = start()
    run.peers[1][:4].view(torch.int32)[0] = TAG + 2
    run.launch()
    for record in records(run):
        assert record.stage == ffn.ATTENTION_REDUCE
        assert (record.tag, record.awaited) in {(TAG, 1), (TAG + 2, 0)}
    check_over(run)


@full
@pytest.mark.parametrize("memory", ["exact", "hostile"])
def test_a_limit_of_one_poll_never_takes_a_late_word_for_a_missing_one(memory: str) -> None:
    """Waits that give up at once: whatever the launch ends with, no record says that a word was missing that
    the launch took."""
    run = start(memory)
    run.reset(TAG, 1)
    run.launch()
    for record in (run.record(rank) for rank in range(TP)):
        assert record is None or record.stage in range(ffn.ATTENTION_REDUCE, ffn.MOE_REDUCE + 1)
    run.reset(TAG + 1, WAIT_LIMIT)
    run.launch()
    assert same(run.outputs(), handoffs.expected(1, TP, "random")[0]) == []


# ---- a workgroup that stops before it hands over: stage -> (edit, its number, what was awaited)
def _silent(file: str, old: str, new: str) -> Edit:
    return Edit(file, old, new)


STOPPED = {
    "attention reduce": (
        _silent(REDUCE, "    @dev.when(active)", "    @dev.when(active & (ctx.workgroup != 37))"),
        ffn.ATTENTION_REDUCE,
        {1},
    ),
    "collapsed": (
        _silent(
            COLLAPSED,
            "        @dev.when(ctx.thread == 0)",
            "        @dev.when((ctx.thread == 0) & (ctx.workgroup != 37))",
        ),
        ffn.COLLAPSED,
        {37},
    ),
    "mixes": (
        _silent(
            SEAM,
            "            @dev.when(item < items)",
            "            @dev.when((item < items) & (ctx.workgroup != 37))",
        ),
        ffn.MIXES,
        {37},
    ),
    "logits": (
        _silent(
            ROUTING,
            "        @dev.when(has)",
            "        @dev.when(has & (ctx.workgroup != 7))",
        ),
        ffn.LOGITS,
        {7},
    ),
    "intermediate": (
        _silent(
            GATE_UP,
            "        @dev.when(has & (ctx.group == 0))",
            "        @dev.when(has & (ctx.group == 0) & (block != 3))",
        ),
        ffn.INTERMEDIATE,
        {3 << 4 | slot for slot in range(7)},
    ),
    "moe reduce": (
        _silent(
            REDUCE,
            "    @dev.when(active)",
            f"    @dev.when(active & (ctx.workgroup != 37) if stage == {ffn.MOE_REDUCE} else active)",
        ),
        ffn.MOE_REDUCE,
        {1},
    ),
}


@full
@pytest.mark.parametrize("stage", STOPPED)
def test_a_workgroup_stops(stage: str) -> None:
    """On rank 1; the others' launches are as they should be."""
    edit, number, awaited = STOPPED[stage]
    run = start()
    run.launch(kernels={1: compiled(1, TP, overlay=mutated((edit,)))})
    for record in records(run):
        assert (record.stage, record.tag) == (number, TAG)
        assert record.awaited in awaited
        if "reduce" in stage:
            assert record.workgroup == 37
    check_over(run)


def test_each_stop_still_finds_its_place() -> None:
    for edit, _, _ in STOPPED.values():
        mutated((edit,))


# ---- the record's words
def test_a_record_survives_its_encoding() -> None:
    handoff = modules().handoff
    for stage, workgroup, awaited in ((1, 0, 0), (6, 255, 3), (5, 17, 35 << 4 | 6)):
        code = stage << handoff.STAGE_SHIFT | workgroup << handoff.WORKGROUP_SHIFT | awaited
        assert handoff.ErrorRecord.decode(code, 9) == handoff.ErrorRecord(stage, workgroup, awaited, 9)
    assert handoff.ErrorRecord.decode(0, 9) is None


def test_workgroup_of_is_the_inverse_of_slice_of() -> None:
    g = modules().geometry
    assert [g.workgroup_of(g.slice_of(w)) for w in range(g.WORKGROUPS)] == list(range(g.WORKGROUPS))
