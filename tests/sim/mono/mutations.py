# SPDX-License-Identifier: Apache-2.0
"""Planted faults: each is an edit of a copy of the kernel sources and the check that must notice it.

    python -m mono.mutations [NAME ..]     (in tests/sim) prints the table

The check passes on the sources as they are, so what it notices is the edit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from cdnasim import Device, SimulationError
from cdnasim.program import Kernel

from . import compare, handoffs
from .case import make
from .run import Run
from .sources import MONO, PERSISTENT, Edit, compiled, mutated


@dataclass(frozen=True)
class Check:
    """``run``, given a kernel for ``rows`` and ``tp``, raises ``AssertionError`` or ``SimulationError`` if
    the kernel is wrong."""

    name: str
    rows: int
    tp: int
    run: Callable[[Kernel], object]


def _numerics(rows: int, tp: int, kind: str) -> Check:
    def run(kernel: Kernel) -> None:
        launch = Run(make(rows, tp, kind), Device("gfx950", ranks=tp), kernel, limit=handoffs.LIMIT)
        launch.launch()
        compare.check_run(launch, whole=False)

    return Check(f"stages, {rows} rows TP{tp} {kind}", rows, tp, run)


def _handoffs(rows: int, tp: int, kind: str, count: int = 4) -> Check:
    def run(kernel: Kernel) -> None:
        handoffs.check(rows, tp, kind, count, kernel)

    return Check(f"hostile memory, {rows} rows TP{tp}", rows, tp, run)


def _no_record() -> Check:
    def run(kernel: Kernel) -> None:
        # Waits that poll in vain are wanted here, no deadlock.
        launch = Run(make(1, 2), Device("gfx950", ranks=2, stall_bound=10**9), kernel, limit=300)
        launch.launch()
        launch.outputs()

    return Check("no error record, 1 row TP2", 1, 2, run)


STAGES = _numerics(1, 2, "random")
TIES = _numerics(1, 2, "tied-groups")
RANKS = _numerics(1, 4, "cancelling")
HOSTILE = _handoffs(1, 2, "random")
# With one row a lost order seldom shows: the few words that are stored late are there before they are read.
MORE_ROWS = _handoffs(17, 2, "same", 6)
NO_RECORD = _no_record()


@dataclass(frozen=True)
class Mutation:
    """A fault. ``fast``: part of the fast suite."""

    name: str
    check: Check
    edits: tuple[Edit, ...]
    fast: bool = False


def _one(name: str, check: Check, file: str, old: str, new: str, fast: bool = False) -> Mutation:
    return Mutation(name, check, (Edit(file, old, new),), fast)


HANDOFF, DOWN = f"{PERSISTENT}/handoff.py", f"{MONO}/stages/down.py"
COLLAPSED, ROUTING = f"{MONO}/stages/collapsed.py", f"{MONO}/stages/routing.py"
SEAM, GATE_UP = f"{MONO}/stages/hyper_connection.py", f"{MONO}/stages/gate_up.py"
REDUCE, FFN, GEOMETRY = f"{MONO}/stages/all_reduce.py", f"{MONO}/kernels/ffn.py", f"{MONO}/geometry.py"
MATH = f"{PERSISTENT}/math.py"
# Waits that take nothing before their polls are used up, when every word has long been there.
LATE = Edit(
    HANDOFF,
    "return missing(vectors) & (carried[1] == 0), vectors",
    "return (missing(vectors) | (carried[0] > 0)) & (carried[1] == 0), vectors",
)

MUTATIONS = (
    # ---- hand-offs
    _one("a tag is used again", HOSTILE, HANDOFF, "self.tag + 1)", "self.tag)", fast=True),
    _one(
        "a word of any launch is taken",
        HOSTILE,
        HANDOFF,
        "differs = differs | (vector[i] ^ want)",
        "differs = differs | (vector[i] == 0).select(fx.Int32(256), fx.Int32(0))",
    ),
    _one(
        "intermediate blocks are stored to the XCD's own L2",
        HOSTILE,
        GATE_UP,
        "ctx.work.store(at, payload, dev.DEVICE)",
        "ctx.work.store(at, payload, dev.CACHED)",
    ),
    _one(
        "intermediate blocks are announced to the XCD's own L2",
        HOSTILE,
        GATE_UP,
        "send(ctx.work, at, fx.Int32(0), tag_word(ctx.launch.tag, code), dev.DEVICE)",
        "send(ctx.work, at, fx.Int32(0), tag_word(ctx.launch.tag, code), dev.CACHED)",
    ),
    _one(
        "intermediate blocks are announced before their stores are done",
        HOSTILE,
        GATE_UP,
        "        # The block's word follows its bytes, which one wave stores.\n        dev.drain()\n",
        "",
    ),
    _one(
        "a wait polls its own caches",
        HOSTILE,
        HANDOFF,
        "buffer.load(offset, count, policy) for offset",
        "buffer.load(offset, count, dev.CACHED) for offset",
    ),
    _one(
        "both all-reduces use one mailbox",
        HOSTILE,
        FFN,
        "ctx, ctx.symmetric.moe, MOE_REDUCE,",
        "ctx, ctx.symmetric.attention, MOE_REDUCE,",
    ),
    _one(
        "collapsed rows are announced before their stores are done",
        MORE_ROWS,
        COLLAPSED,
        "        dev.drain()\n",
        "",
    ),
    _one(
        "collapsed rows are announced without a barrier",
        MORE_ROWS,
        COLLAPSED,
        "        dev.drain()\n        dev.barrier()\n",
        "        dev.drain()\n",
    ),
    _one(
        "collapsed rows are stored to the XCD's own L2",
        HOSTILE,
        COLLAPSED,
        "ctx.work.store(at, payload, dev.DEVICE)",
        "ctx.work.store(at, payload, dev.CACHED)",
    ),
    _one(
        "collapsed rows are read without an acquire",
        HOSTILE,
        COLLAPSED,
        "        dev.acquire()\n",
        "",
    ),
    _one(
        "collapsed rows are read before they are announced",
        HOSTILE,
        COLLAPSED,
        "receiver.words(ctx.work, [at], ctx.lane < share,",
        "receiver.words(ctx.work, [at], ctx.lane < 0,",
    ),
    Mutation(
        "a word that comes with the last poll is reported missing",
        NO_RECORD,
        (LATE, Edit(HANDOFF, "@dev.when(missing)", "@dev.when(launch.limit != 0)")),
    ),
    # ---- barriers
    _one(
        "no barrier between the choice and the list of experts",
        STAGES,
        FFN,
        "    router.choose()\n    dev.barrier()\n",
        "    router.choose()\n",
    ),
    _one(
        "no barrier before the sum of the waves",
        STAGES,
        DOWN,
        "leave(ctx, total)\n        dev.barrier()",
        "leave(ctx, total)",
    ),
    # ---- arithmetic
    Mutation(
        "the mixes and the collapse see an unrounded residual",
        STAGES,
        (
            Edit(
                SEAM,
                "            words.append(self.ctx.isa.pack_bf16(pair[0], pair[1]))\n",
                "            words.append(self.ctx.isa.pack_bf16(pair[0], pair[1]))\n"
                "            self._exact = [*(self._exact if j else []), tuple(pair)]\n",
            ),
            Edit(SEAM, "new = [m.unpack_bf16(x) for x in new_words]", "new = self._exact"),
        ),
        fast=True,
    ),
    _one("the routed scale is 3 % off", STAGES, GEOMETRY, "ROUTED_SCALING = 1.5", "ROUTED_SCALING = 1.545"),
    _one(
        "a tie goes to a higher expert",
        TIES,
        ROUTING,
        "later = a < b",
        "later = (a < b) | (a == b)",
        fast=True,
    ),
    _one(
        "an intermediate block is one off",
        STAGES,
        GATE_UP,
        "intermediate.at(row, slot, block * MX_BLOCK",
        "intermediate.at(row, slot, (block + 1) % g.blocks * MX_BLOCK",
    ),
    _one("a block's code is rounded down", STAGES, MATH, "+ 0x1FFFFF", "+ 0"),
    _one(
        "ranks are added from the last",
        RANKS,
        REDUCE,
        "    for word in words:",
        "    for word in reversed(words):",
    ),
)


@lru_cache(maxsize=1)
def by_name() -> dict[str, Mutation]:
    return {m.name: m for m in MUTATIONS}


def outcome(mutation: Mutation) -> str | None:
    """What the check says of the mutant: None if it noticed nothing."""
    check = mutation.check
    kernel = compiled(check.rows, check.tp, overlay=mutated(mutation.edits))
    try:
        check.run(kernel)
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
