# SPDX-License-Identifier: Apache-2.0
"""The stages of each launch as data: what each reads and writes, and which workgroups do it.

``faults`` checks a table against the launch's memory: every read was written by an earlier stage, every
region of a mailbox is written and read, tasks cover the work. The README's tables are ``markdown``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .geometry import HEAD_DIM, HIDDEN, QKV, TILE, WORKGROUPS, XCDS, BackGeometry, FfnGeometry

# Of the launch's own geometry: each has properties that the others lack.
Count = Callable[[Any], int]


@dataclass(frozen=True)
class Stage:
    """One stage of a launch.

    Args:
        name: its name in documents and errors.
        does: what it does, in a few words.
        tasks: units of work.
        task: what one of them is.
        first: the first workgroup that has any; tasks go to it and those after it, in turn.
        covers: the units that tasks must cover, and how many of them one task does.
        reads: regions that it waits for or loads: of the workspace, symmetric memory or LDS.
        writes: regions that it stores.
        numerics: rounding points and order of sums.
    """

    name: str
    does: str
    tasks: Count
    task: str
    first: Count
    covers: tuple[Count, Count]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    numerics: str


def _all(_: FfnGeometry) -> int:
    return WORKGROUPS


def _none(_: FfnGeometry) -> int:
    return 0


def _one(_: FfnGeometry) -> int:
    return 1


def _attention_first(g: BackGeometry) -> int:
    """Tasks go to each XCD's last workgroups; workgroups are dealt to the XCDs in turn."""
    return WORKGROUPS - XCDS * -(-g.rows // XCDS) * (g.heads // g.task_heads)


def _slice_columns(g: FfnGeometry) -> int:
    return g.columns


def _hidden(_: FfnGeometry) -> int:
    return HIDDEN


def _router_experts(g: FfnGeometry) -> int:
    return g.experts // g.router_tiles


def _every_workgroup(
    name: str,
    does: str,
    reads: Sequence[str],
    writes: Sequence[str],
    numerics: str,
) -> Stage:
    """A stage in which each workgroup does its slice of the hidden columns."""
    covers = (_hidden, _slice_columns)
    task = "a slice of hidden columns"
    return Stage(name, does, _all, task, _none, covers, tuple(reads), tuple(writes), numerics)


_SEAM_SUMS = _every_workgroup(
    "seam sums",
    "hands on its slice's part of the mixes and of the residual's sum of squares",
    ("streams",),
    ("seam_sums",),
    "of the rounded residual, in fp32",
)
_MIXES = Stage(
    "mixes",
    "finishes post, comb and pre mixes: scale, sigmoid, Sinkhorn",
    lambda g: g.rows,
    "a row",
    lambda g: g.mixes_first,
    (lambda g: g.rows, _one),
    ("seam_sums",),
    (),
    "fp32; slices are added in a fixed tree, so that every rank has the same bits",
)


def front_stages() -> tuple[Stage, ...]:
    """The stages of the attention front, in the order in which every workgroup runs them."""
    return (
        _every_workgroup(
            "seam fold",
            "adds the last layer's output to the four streams where they owe it, collapses them by the "
            "carried pre-mix, and takes its part of the mixes' dot products",
            ("mix_weights",),
            ("collapsed", "collapsed_ready", "streams"),
            "the folded residual and the collapsed row are rounded to bf16; sums in fp32",
        ),
        Stage(
            "query rank and key",
            "normalises and quantises the rows and multiplies them by wqkv",
            lambda g: g.qkv_workgroups,
            "8 outputs, all rows; the query rank's come first",
            _none,
            (lambda g: QKV, lambda g: g.qkv_outputs),
            ("collapsed", "collapsed_ready", "norm"),
            ("qkv", "qkv_ready"),
            "MXFP8 weights times MXFP8 rows, fp32 sums, then bf16; an index source's normed rows are "
            "stored in bf16",
        ),
        _SEAM_SUMS,
        Stage(
            "query",
            "normalises and quantises the query rank, multiplies it by wq_b, turns the rotary dims",
            _all,
            "32 or 64 outputs of one head, all rows",
            _none,
            (lambda g: g.heads * HEAD_DIM, lambda g: g.query_tiles * TILE),
            ("qkv", "qkv_ready", "query_norm"),
            (),
            "RMSNorm in fp32, rounded to bf16, then MXFP8; fp32 sums rounded to bf16, the rotary in fp32 on "
            "them, rounded to bf16",
        ),
        Stage(
            "key record",
            "normalises, turns and quantises the row's key and stores its record at the row's slot",
            lambda g: g.rows,
            "a row, from the last workgroup down",
            lambda g: WORKGROUPS - g.rows,
            (lambda g: g.rows, _one),
            ("qkv", "qkv_ready"),
            (),
            "RMSNorm and rotary in fp32, each rounded to bf16; one UE8M0 code per 64 of the largest "
            "magnitude and 1e-4, e4m3 to nearest even",
        ),
        _MIXES,
    )


def back_stages() -> tuple[Stage, ...]:
    """The stages of the attention back with the FFN half."""
    reduce, *rest = ffn_stages()
    return (
        Stage(
            "sparse attention",
            "attends over the row's compressed keys and its window, turns the heads back and quantises them",
            lambda g: g.rows * (g.heads // g.task_heads),
            "some heads of a row with all of its keys, on the XCD of the row's number modulo 8",
            _attention_first,
            (lambda g: g.rows * g.heads, lambda g: g.task_heads),
            (),
            ("attended", "attended_ready"),
            "keys are exact in bf16; scores in fp32; softmax in base 2 with the sink, a wave's keys at a "
            "time; weights are rounded to bf16, their sum is of the unrounded ones; the output is rounded "
            "to bf16, turned in fp32, then one E8M0 code a block of 32 and e4m3",
        ),
        Stage(
            "wo_a",
            "multiplies each group of heads by its rows of wo_a",
            _all,
            "8 or 16 outputs of one group, all rows",
            _none,
            (lambda g: g.rank_columns, lambda g: g.rank_outputs),
            ("attended", "attended_ready"),
            ("ranks", "ranks_ready"),
            "MXFP8 weights times MXFP8 rows, fp32 sums, then bf16",
        ),
        _every_workgroup(
            "wo_b",
            "quantises all groups' ranks and multiplies them by wo_b",
            ("ranks", "ranks_ready"),
            ("partial",),
            "one E8M0 code a block of 32 and e4m3; fp32 sums, then bf16",
        ),
        replace(reduce, reads=("partial",)),
        *rest,
    )


def ffn_stages() -> tuple[Stage, ...]:
    """The stages of the FFN launch, in the order in which every workgroup runs them."""
    return (
        _every_workgroup(
            "attention all-reduce",
            "pushes its slice of wo_b's output to every rank and sums all ranks' slices",
            (),
            ("attention",),
            "bf16 words summed in fp32 in rank order, then bf16",
        ),
        _every_workgroup(
            "seam fold",
            "adds the attention's output to the four streams, collapses them by the carried pre-mix, and "
            "takes its part of the mixes' dot products",
            ("attention", "mix_weights"),
            ("collapsed", "collapsed_ready", "streams"),
            "the folded residual and the collapsed row are rounded to bf16; sums in fp32",
        ),
        Stage(
            "router logits",
            "normalises the rows and multiplies them by the gate weights",
            lambda g: g.router_tiles,
            "a tile of experts, all rows",
            _none,
            (lambda g: g.experts, _router_experts),
            ("collapsed", "collapsed_ready", "norm"),
            ("logits",),
            "bf16 products summed in fp32",
        ),
        _SEAM_SUMS,
        Stage(
            "shared gate/up",
            "gate and up projection of the shared expert with the activation between",
            lambda g: g.blocks,
            "a block of 32 intermediate columns, all rows",
            lambda g: g.shared_first,
            (lambda g: g.blocks, _one),
            ("collapsed", "collapsed_ready", "norm"),
            ("intermediate", "blocks_ready"),
            "fp32 sums; gate and up, silu and the product are each rounded to bf16; then one E8M0 code a "
            "block of 32 and e4m3",
        ),
        _MIXES,
        Stage(
            "choose",
            "picks the experts of every row and lists those that any row picked",
            _all,
            "every row, in every workgroup",
            _none,
            (_all, _one),
            ("logits",),
            ("pick_expert", "pick_weight", "active"),
            "score = sqrt(softplus(logit)) in fp32, chosen by score + bias, ties to the lowest expert id; "
            "weight = score / sum of the chosen scores x 1.5",
        ),
        Stage(
            "routed gate/up",
            "gate and up projections of the experts that were picked",
            lambda g: g.max_active * g.blocks,
            "a block of 32 intermediate columns of one active expert; as many as experts are active",
            _none,
            (lambda g: g.max_active * g.blocks, _one),
            ("collapsed", "collapsed_ready", "norm", "pick_expert", "active"),
            ("intermediate", "blocks_ready"),
            "MXFP4 weights times MXFP8 rows, fp32 sums; silu(gate) x up is rounded to bf16; then as the "
            "shared expert's",
        ),
        _every_workgroup(
            "down",
            "down projections of the picks and the shared expert, summed over both",
            ("intermediate", "blocks_ready", "pick_weight", "active"),
            ("partial",),
            "an expert's fp32 product is scaled by the row's weight and added in fp32: by wave, within a "
            "wave in ascending order of the experts, the shared expert last; then bf16",
        ),
        _every_workgroup(
            "MoE all-reduce",
            "pushes its slice of the sum to every rank and sums all ranks' slices",
            ("partial",),
            ("moe",),
            "as the attention's",
        ),
        _every_workgroup("output", "stores its slice of the layer's output", ("moe",), (), "none"),
    )


# Filled by every workgroup for itself when it starts, before any wait.
LOADED = frozenset({"norm", "query_norm", "mix_weights"})
# Not handed over: the launch's own words, and what nobody writes.
OWN = frozenset({"control", "zeros"})


def faults(
    stages: Sequence[Stage], g: FfnGeometry, memory: Sequence[str], shared: Sequence[str]
) -> list[str]:
    """What is wrong with a table.

    Args:
        stages: in order.
        g: the geometry to check it for.
        memory: regions of workspace and symmetric memory; each must be written, and read later.
        shared: regions of LDS, which a stage may name.
    """
    known, handed = {*memory, *shared}, set(memory) - OWN
    found, written = [], set(LOADED)
    read: set[str] = set()
    for stage in stages:
        # A geometry that has no such region hands the same data over in another.
        for region in stage.reads:
            if region in known and region not in written:
                found.append(f"{stage.name} reads {region}, which no earlier stage writes")
        named = (*stage.reads, *stage.writes)
        if named and not any(region in known for region in named):
            found.append(f"{stage.name} names no region that there is")
        read |= set(stage.reads)
        written |= set(stage.writes)
        tasks, first = stage.tasks(g), stage.first(g)
        units, each = (count(g) for count in stage.covers)
        if tasks * each != units:
            found.append(f"{stage.name}: {tasks} tasks of {each} do not cover {units}")
        if not 0 <= first < WORKGROUPS:
            found.append(f"{stage.name} starts at workgroup {first}, wanted 0..{WORKGROUPS - 1}")
    found += [f"nothing writes {region}" for region in sorted(handed - written)]
    found += [f"nothing reads {region}" for region in sorted(handed - read)]
    return found


def concurrent_workgroups(g: FfnGeometry) -> list[tuple[str, range]]:
    """The workgroups of the stages that some workgroups do beside others, each with one task at most."""
    beside = ("router logits", "shared gate/up", "mixes")
    stages = [stage for stage in ffn_stages() if stage.name in beside]
    return [(stage.name, range(stage.first(g), stage.first(g) + stage.tasks(g))) for stage in stages]


def markdown(stages: Sequence[Stage], g: FfnGeometry) -> str:
    """A launch's table for the README, with task counts of ``g``."""
    lines = ["| stage | tasks | first workgroup | reads | writes | numerics |", "| " + "--- | " * 5 + "--- |"]
    for stage in stages:
        cells = (
            f"**{stage.name}**: {stage.does}",
            f"{stage.tasks(g)}: {stage.task}",
            stage.first(g),
            ", ".join(stage.reads) or "arguments",
            ", ".join(stage.writes) or "arguments",
            stage.numerics,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
