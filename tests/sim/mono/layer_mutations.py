# SPDX-License-Identifier: Apache-2.0
"""Planted faults in the whole layer's launches, as ``mutations`` has those of the FFN launch.

python -m mono.layer_mutations [NAME ..]     (in tests/sim) prints the table
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from cdnasim import SimulationError
from cdnasim.program import Kernel

from . import layer_compare, layer_handoffs
from .handoffs import LIMIT
from .layer_case import Shape, make_layer
from .layer_run import LayerRun, back_kernel, front_kernel
from .sources import MONO, PERSISTENT, Edit, modules, mutated

STAGE = f"{MONO}/stages"
PUBLISHED, RECORD = f"{STAGE}/published.py", f"{STAGE}/kv_record.py"
QKV, ATTENTION = f"{STAGE}/qkv_projection.py", f"{STAGE}/sparse_attention.py"
PROJECTION, LINEAR = f"{STAGE}/output_projection.py", f"{STAGE}/mx_linear.py"
FRONT, BACK = f"{MONO}/kernels/attention_front.py", f"{MONO}/kernels/attention_back_ffn.py"
HANDOFF, SEAM = f"{PERSISTENT}/handoff.py", f"{STAGE}/hyper_connection.py"


@dataclass(frozen=True)
class Check:
    """``run``, given the shape and the two launches' kernels (None: as they are), raises ``AssertionError``
    or ``SimulationError`` if one is wrong. A front that is given runs by itself."""

    name: str
    shape: Shape
    run: Callable[[Shape, Kernel | None, Kernel | None], object]


def _numerics(name: str, shape: Shape) -> Check:
    """Exact memory: every stage of both launches."""

    def run(shape: Shape, front: Kernel | None, back: Kernel | None) -> None:
        only_front = front is not None
        layer = LayerRun(make_layer(shape), front=front, back=back, limit=LIMIT, only_front=only_front)
        layer.front.launch()
        layer_compare.check_front(layer.front, [0])
        if layer.back:
            layer.back.launch()
            layer_compare.check_back(layer.back, [0], whole=False)

    return Check(f"{name}, {shape.rows} rows TP{shape.tp}", shape, run)


def _handoffs(name: str, shape: Shape, count: int) -> Check:
    """Hostile memory: a mutated front alone, or the back on a right front's outputs."""

    def run(shape: Shape, front: Kernel | None, back: Kernel | None) -> None:
        layer_handoffs.check(shape, count, front=front, back=back, only_front=front is not None)

    return Check(f"{name}, {shape.rows} rows TP{shape.tp}", shape, run)


# Workgroup 200, of the key, never announces its outputs.
_THERE = "@dev.when(there & (ctx.thread == 0))"
SILENT = 200
SILENT_KEY = Edit(PUBLISHED, _THERE, _THERE.replace("there &", f"there & (ctx.workgroup != {SILENT}) &"))


def _silent_key(shape: Shape) -> Check:
    """A front whose key is never announced whole ends with a record of that. A schedule seldom shows that a
    key is not waited for: its words are there long before the query is done."""

    def run(shape: Shape, front: Kernel | None, back: Kernel | None) -> None:
        kernel = front or front_kernel(shape, overlay=mutated((SILENT_KEY,)))
        layer = LayerRun(make_layer(shape), front=kernel, back=back, limit=300, only_front=True)
        layer.front.launch()
        for rank in range(shape.tp):
            record = layer.front.record(rank)
            assert record is not None, f"rank {rank} did not wait for workgroup {SILENT}"
            assert (record.stage, record.awaited) == (modules().front.QKV_ROWS, SILENT)

    return Check(f"a silent workgroup, {shape.rows} rows TP{shape.tp}", shape, run)


# A request whose rows lack compressed keys, and one with both kinds; padded rows; short windows.
KEYS = Shape(5, 4, ratio=2, contexts=(0, 140), padded=(2,), kind="same", compressed_block=32, slack=16)
STAGES = _numerics("stages", KEYS)
HOSTILE = _handoffs("hostile memory", Shape(1, 2, contexts=(0,)), 4)
# With one row a lost order seldom shows: the few words that are stored late are there before they are read.
MORE_ROWS = _handoffs("hostile memory", Shape(17, 2, contexts=(100,), kind="same"), 4)
SILENCE = _silent_key(Shape(1, 2, contexts=(0,)))
CHECKS = (STAGES, HOSTILE, MORE_ROWS, SILENCE)


@dataclass(frozen=True)
class Mutation:
    """A fault in the ``launch`` "front" or "back". ``fast``: part of the fast suite."""

    name: str
    launch: str
    check: Check
    edits: tuple[Edit, ...]
    fast: bool = False


def _one(launch: str, name: str, check: Check, file: str, old: str, new: str, fast: bool = False) -> Mutation:
    return Mutation(name, launch, check, (Edit(file, old, new),), fast)


STORE = "self.ctx.work.store(self.rows.at(row, word), payload, dev.DEVICE)"
_ANNOUNCE = "        dev.drain()\n        dev.barrier()\n\n        @dev.when(there & (ctx.thread == 0))"
WORD = "send(ctx.work, self.ready.at(ctx.workgroup), fx.Int32(0), tag_word(ctx.launch.tag), dev.DEVICE)"
_WHEN = "        @dev.when(there & (ctx.thread == 0))"
HEADS_WORD = "send(ctx.work, where, fx.Int32(0), tag_word(ctx.launch.tag, code), dev.DEVICE)"

HANDOFFS = (
    _one("front", "a tag is used again", HOSTILE, HANDOFF, "self.tag + 1)", "self.tag)"),
    _one("front", "published rows are stored to the XCD's own L2", HOSTILE, PUBLISHED, STORE,
         STORE.replace("DEVICE", "CACHED")),
    _one("back", "wo_a's outputs are stored to the XCD's own L2", HOSTILE, PUBLISHED, STORE,
         STORE.replace("DEVICE", "CACHED")),
    _one("front", "published rows are announced before their stores are done", MORE_ROWS, PUBLISHED,
         _ANNOUNCE, f"        dev.barrier()\n\n{_WHEN}"),
    _one("front", "published rows are announced without a barrier", MORE_ROWS, PUBLISHED, _ANNOUNCE,
         f"        dev.drain()\n\n{_WHEN}"),
    _one("front", "the query rank is read without an acquire", HOSTILE, PUBLISHED,
         "        dev.barrier()\n        dev.acquire()\n", "        dev.barrier()\n"),
    _one("front", "the query rank is read before it is announced", HOSTILE, PUBLISHED,
         "there = (ctx.lane < share) & (producer < count)", "there = ctx.lane < 0"),
    _one("front", "the query rank is read before the other waves have seen theirs", HOSTILE, PUBLISHED,
         "        dev.barrier()\n        dev.acquire()\n", "        dev.acquire()\n"),
    Mutation("the key is read before it is announced", "front", SILENCE, (
        SILENT_KEY,
        Edit(RECORD, "rows.wait_in_wave(g.query_workgroups, g.qkv_workgroups - g.query_workgroups)",
             "rows.wait_in_wave(0, 1)"),
    ), fast=True),
    _one("front", "the first projection takes the seam's words", HOSTILE, FRONT,
         "ctx.workspace.qkv_ready,", "ctx.workspace.collapsed_ready,"),
    _one("back", "wo_a's words are the seam's", HOSTILE, PROJECTION,
         "ctx.workspace.ranks_ready,", "ctx.workspace.collapsed_ready,"),
    _one("back", "heads are stored to the XCD's own L2", HOSTILE, ATTENTION,
         "ctx.work.store(at, dev.vector_i32(words), dev.DEVICE)",
         "ctx.work.store(at, dev.vector_i32(words), dev.CACHED)"),
    _one("back", "heads are announced before their stores are done", HOSTILE, ATTENTION,
         "dev.vector_i32(words), dev.DEVICE)\n        dev.drain()\n", "dev.vector_i32(words), dev.DEVICE)\n"),
)  # fmt: skip

BARRIERS = (
    _one("front", "no barrier before the sum of the waves", STAGES, LINEAR,
         "to bf16 and publish them in ``rows``. Two barriers.\"\"\"\n    dev.barrier()\n",
         "to bf16 and publish them in ``rows``. Two barriers.\"\"\"\n"),
    _one("back", "no barrier before the query is read", STAGES, ATTENTION,
         "            self._list_keys()\n            dev.barrier()\n", "            self._list_keys()\n"),
    _one("back", "no barrier before the waves' sums are added", STAGES, ATTENTION,
         "self._leave(turn, *sums)\n                dev.barrier()\n", "self._leave(turn, *sums)\n"),
)  # fmt: skip

ARITHMETIC = (
    _one("front", "a settled residual is folded", _numerics("settled", Shape(1, 2, fold=False)), FRONT,
         "ctx.args.fold != 0)", "ctx.args.fold == 0)"),
    _one("front", "the query turns the other way", STAGES, QKV,
         "x, y = rotated(cos[i], sin[i], even, odd)", "x, y = rotated(cos[i], -sin[i], even, odd)"),
    _one("front", "the key turns the other way", STAGES, RECORD,
         "x, y = rotated(cos[i], sin[i], even, odd)", "x, y = rotated(cos[i], -sin[i], even, odd)"),
    _one("front", "a padded row's key is stored", STAGES, RECORD, "@dev.when(slot >= 0)",
         "@dev.when(slot >= -1)"),
    _one("front", "a record's code lies beside its place", STAGES, RECORD,
         "ctx.args.window_block * RECORD_DATA + inside * RECORD_CODES",
         "ctx.args.window_block * RECORD_DATA + (inside + 1) * RECORD_CODES"),
    _one("back", "the heads are not turned back", STAGES, ATTENTION, "rotated(cos[i], -sin[i], even, odd)",
         "rotated(cos[i], sin[i], even, odd)"),
    _one("back", "the sink is in the wrong base", STAGES, ATTENTION, "load(head * 4)) * m.LOG2_E",
         "load(head * 4)) * 1.0"),
    _one("back", "scores are 3 % off", STAGES, ATTENTION, "HEAD_DIM**-0.5 * m.LOG2_E",
         "HEAD_DIM**-0.5 * m.LOG2_E * 1.03"),
    _one("back", "an absent compressed key is taken for the first", STAGES, ATTENTION, "has = entry >= 0",
         "has = (entry >= 0) | picked"),
    _one("back", "a window has one key too many", STAGES, ATTENTION, "(in_window < self._window)",
         "(in_window <= self._window)"),
    _one("back", "compressed keys are counted as if each were of one position", STAGES, ATTENTION,
         "dev.shift_right(position + 1, args.ratio - 1)", "dev.shift_right(position + 1, 0)"),
    _one("back", "caches' blocks lie without a gap", STAGES, ATTENTION,
         "compressed.select(args.compressed_stride, args.window_stride)",
         "compressed.select(args.compressed_stride, args.window_stride) // 584 * 584", fast=True),
    _one("back", "every request has the first one's block table", STAGES, ATTENTION,
         "fx.Int64(request * args.table_stride)", "fx.Int64(request * 0)"),
)  # fmt: skip

MUTATIONS = (*HANDOFFS, *BARRIERS, *ARITHMETIC)


@lru_cache(maxsize=1)
def by_name() -> dict[str, Mutation]:
    return {m.name: m for m in MUTATIONS}


def outcome(mutation: Mutation, arch: str = "gfx950") -> str | None:
    """What the check says of the mutant: None if it noticed nothing."""
    check, front = mutation.check, mutation.launch == "front"
    shape = replace(check.shape, arch=arch)
    kernel = (front_kernel if front else back_kernel)(shape, overlay=mutated(mutation.edits))
    try:
        check.run(shape, kernel if front else None, None if front else kernel)
    except (AssertionError, SimulationError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return None


def main() -> int:
    missed = 0
    for name in sys.argv[1:] or by_name():
        mutation = by_name()[name]
        said = outcome(mutation)
        missed += said is None
        print(
            f"| {name} | {mutation.check.name} | {(said or 'NOT NOTICED').splitlines()[0][:110]} |",
            flush=True,
        )
    return missed


if __name__ == "__main__":
    sys.exit(main())
