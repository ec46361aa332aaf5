# SPDX-License-Identifier: Apache-2.0
"""The stages of the FFN launch as data: what each reads and writes, and which workgroups do it.

``validate`` checks a table against the launch's memory: every read was written by an earlier stage, every
region of a mailbox is written and read, tasks cover the work. The README's table is ``markdown``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .geometry import HIDDEN, WORKGROUPS, FfnGeometry

Count = Callable[[FfnGeometry], int]


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
        _every_workgroup(
            "seam sums",
            "hands on its slice's part of the mixes and of the residual's sum of squares",
            ("streams",),
            ("seam_sums",),
            "of the rounded residual, in fp32",
        ),
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
        Stage(
            "mixes",
            "finishes post, comb and pre mixes: scale, sigmoid, Sinkhorn",
            lambda g: g.rows,
            "a row",
            lambda g: g.mixes_first,
            (lambda g: g.rows, _one),
            ("seam_sums",),
            (),
            "fp32; slices are added in a fixed tree, so that every rank has the same bits",
        ),
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
LOADED = frozenset({"norm", "mix_weights"})
# Not handed over: what a workgroup keeps to itself within a stage, and the launch's own words.
OWN = frozenset({"control"})


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


def markdown(g: FfnGeometry) -> str:
    """The table for the README, with task counts of ``g``."""
    lines = ["| stage | tasks | first workgroup | reads | writes | numerics |", "| " + "--- | " * 5 + "--- |"]
    for stage in ffn_stages():
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
