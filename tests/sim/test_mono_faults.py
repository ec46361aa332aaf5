# SPDX-License-Identifier: Apache-2.0
"""Fail-stop of our FFN launch: a word that never comes ends the launch on every rank, with a record of what
was awaited, and a new start works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mono import handoffs
from mono.case import make
from mono.mutations import COLLAPSED, GATE_UP, LATE, REDUCE, ROUTING, SEAM
from mono.run import WAIT_LIMIT, Run, same
from mono.sources import Edit, compiled, modules, mutated

from cdnasim import Device

full = pytest.mark.full
TP, LIMIT, TAG = 2, 300, 5
ffn = modules().ffn


def start(memory: str = "exact", **settings: Any) -> Run:
    # Waits that poll in vain are what is tested, no deadlock.
    device = Device("gfx950", ranks=TP, memory=memory, stall_bound=10**9)
    return Run(make(1, TP), device, limit=LIMIT, tag=TAG, **settings)


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
    """Rank 1's stores to rank 0 go elsewhere: rank 0 misses them, and rank 1, which has all words of the
    first all-reduce, misses rank 0's of the last."""
    run = start()
    nowhere = run.device.zeros(run.symmetric.size, dtype=torch.uint8, name="nowhere", peer=True)
    right = run.addresses[1].clone()
    run.addresses[1][0] = nowhere.data_ptr()
    run.launch()
    known = [{(ffn.ATTENTION_REDUCE, 1, TAG)}, {(ffn.ATTENTION_REDUCE, 1, TAG), (ffn.MOE_REDUCE, 0, TAG)}]
    for record, true in zip(records(run), known, strict=True):
        assert (record.stage, record.awaited, record.tag) in true
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


@full
@pytest.mark.timeout(3600)
def test_a_word_that_comes_with_the_last_poll_is_taken() -> None:
    """``LATE``: waits that take nothing before their polls are used up."""
    run = start(kernel=compiled(1, TP, overlay=mutated((LATE,))))
    run.launch()
    assert same(run.outputs(), handoffs.expected(1, TP, "random")[0]) == []


# ---- a workgroup that stops before it hands over
@dataclass(frozen=True)
class Record:
    """Records that are true: of a wait of one stage, in one of ``workgroups`` (None: any), for one of
    ``awaited``."""

    stage: int
    awaited: frozenset[int]
    workgroups: frozenset[int] | None = None

    def __contains__(self, record: Any) -> bool:
        return (
            record.stage == self.stage
            and record.awaited in self.awaited
            and (self.workgroups is None or record.workgroup in self.workgroups)
        )


def _any(stage: int, *awaited: int) -> Record:
    return Record(stage, frozenset(awaited))


def _in(workgroup: int, stage: int, *awaited: int) -> Record:
    return Record(stage, frozenset(awaited), frozenset([workgroup]))


def _blocks_of(workgroup: int) -> Record:
    """Waits for the blocks of routed experts that a workgroup hands over."""
    case = make(1, TP)
    g, ref = case.geometry, modules().reference
    logits = ref.router_logits(case.normed(), case.router["gate_weight"])
    picks = ref.choose(logits, case.router["gate_bias"], case.picks).experts[0].tolist()
    tasks = range((workgroup - g.roles_end) % 256, case.picks * g.blocks, 256)
    blocks = [(task % g.blocks) << 4 | picks.index(sorted(picks)[task // g.blocks]) for task in tasks]
    return _any(ffn.INTERMEDIATE, *blocks)


@dataclass(frozen=True)
class Stop:
    """What rank 1 leaves out, and every record of a wait that cannot be satisfied then: whoever waits for the
    word, and whoever waits for one that waits. Which of them runs out first is the schedule's choice."""

    edit: Edit
    true: tuple[Record, ...]


MIXER = make(1, TP).geometry.mixes_first  # finishes the only row's mixes
# Rank 1 does not reach its last all-reduce.
NO_SUM = _any(ffn.MOE_REDUCE, 1)
STOPPED = {
    "attention reduce": Stop(
        Edit(REDUCE, "    @dev.when(active)", "    @dev.when(active & (ctx.workgroup != 37))"),
        # Both ranks' workgroup 37 waits, and so no other workgroup comes past the collapsed rows.
        (_in(37, ffn.ATTENTION_REDUCE, 1), _any(ffn.COLLAPSED, 37)),
    ),
    "collapsed": Stop(
        Edit(
            COLLAPSED,
            "        @dev.when(ctx.thread == 0)",
            "        @dev.when((ctx.thread == 0) & (ctx.workgroup != 37))",
        ),
        (_any(ffn.COLLAPSED, 37), NO_SUM),
    ),
    "mixes": Stop(
        Edit(
            SEAM,
            "            @dev.when(item < items)",
            "            @dev.when((item < items) & (ctx.workgroup != 37))",
        ),
        (_in(MIXER, ffn.MIXES, 37), _blocks_of(MIXER), NO_SUM),
    ),
    "logits": Stop(
        Edit(ROUTING, "        @dev.when(has)", "        @dev.when(has & (ctx.workgroup != 7))"),
        (_any(ffn.LOGITS, 7), NO_SUM),
    ),
    "intermediate": Stop(
        Edit(
            GATE_UP,
            "        @dev.when(has & (ctx.group == 0))",
            "        @dev.when(has & (ctx.group == 0) & (block != 3))",
        ),
        (_any(ffn.INTERMEDIATE, *(3 << 4 | slot for slot in range(7))), NO_SUM),
    ),
    "moe reduce": Stop(
        Edit(
            REDUCE,
            "    @dev.when(active)",
            f"    @dev.when(active & (ctx.workgroup != 37) if stage == {ffn.MOE_REDUCE} else active)",
        ),
        (_in(37, ffn.MOE_REDUCE, 1),),
    ),
}


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", STOPPED)
def test_a_workgroup_stops(stage: str) -> None:
    """On rank 1; the others' launches are as they should be."""
    stop = STOPPED[stage]
    run = start()
    run.launch(kernels={1: compiled(1, TP, overlay=mutated((stop.edit,)))})
    for record in records(run):
        assert record.tag == TAG
        assert any(record in true for true in stop.true), record
    check_over(run)


def test_each_stop_still_finds_its_place() -> None:
    for stop in STOPPED.values():
        mutated((stop.edit,))


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
