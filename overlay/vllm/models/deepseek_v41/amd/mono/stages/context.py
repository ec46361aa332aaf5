# SPDX-License-Identifier: Apache-2.0
"""What every stage of a launch shares: where this lane is, the launch, the memories and their layouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent.handoff import Launch
from vllm.models.common.amd.persistent.isa.base import Isa
from vllm.models.common.amd.persistent.regions import Layout

from ..geometry import HIDDEN, K_STEP, FfnGeometry, slice_of


@dataclass
class Context:
    """``args`` is the kernel's argument struct; ``symmetric``, ``workspace`` and ``lds`` are layouts,
    ``own``, ``work`` and ``shared`` the memories they describe, ``peers`` every rank's symmetric memory."""

    geometry: Any  # FfnGeometry, or the kernel's own form of it, whose sizes its stages read
    isa: Isa
    args: Any
    launch: Launch
    symmetric: Layout
    workspace: Layout
    lds: Layout
    own: dev.Buffer
    work: dev.Buffer
    shared: dev.Lds
    peers: list[dev.Buffer]
    thread: fx.Int32
    workgroup: fx.Int32
    rank: fx.Int32
    wave: fx.Int32 = field(init=False)
    lane: fx.Int32 = field(init=False)
    group: fx.Int32 = field(init=False)  # lane // 16
    row: fx.Int32 = field(
        init=False
    )  # lane % 16: a step row of an activation operand, an output of a weight's
    slice_idx: fx.Int32 = field(init=False)

    def __post_init__(self) -> None:
        self.wave = dev.uniform(self.thread // dev.WAVE)
        self.lane = self.thread % dev.WAVE
        self.group = self.lane // 16
        self.row = self.lane % 16
        self.slice_idx = slice_of(self.workgroup)

    @classmethod
    def begin(
        cls, geometry: FfnGeometry, isa: Isa, args: Any, layouts: tuple[Layout, Layout, Layout]
    ) -> Context:
        """The context of a launch whose memories have ``layouts``: symmetric memory, workspace, LDS."""
        symmetric, workspace, lds = layouts
        thread, workgroup = fx.thread_idx.x, fx.block_idx.x
        table = dev.Buffer(args.peers)
        peers = [dev.Buffer(dev.address(table.load(8 * i, 2)), symmetric.size) for i in range(geometry.tp)]
        own = dev.Buffer(dev.address(table.load(args.rank * 8, 2)), symmetric.size)
        return cls(
            geometry=geometry,
            isa=isa,
            args=args,
            launch=Launch.begin(own, peers, workgroup),
            symmetric=symmetric,
            workspace=workspace,
            lds=lds,
            own=own,
            work=dev.Buffer(args.workspace, workspace.size),
            shared=dev.Lds(fx.SharedAllocator().allocate(fx.Array[fx.Int32, lds.size // 4, 16]).peek()),
            peers=peers,
            thread=thread,
            workgroup=workgroup,
            rank=args.rank,
        )

    def again(self) -> Context:
        """The same, with all that depends on the lane found anew: nothing of it that was computed before
        takes registers in between."""
        return replace(self, thread=dev.pin(self.thread))

    def stamp(self, what: str) -> None:
        """Keep the clock at which the workgroup's first wave begins ``what``, one of the geometry's
        ``stamps``. Nothing but in a timeline build."""
        if not self.geometry.timeline:
            return
        clock = dev.clock()
        at = self.workspace.timeline.at(self.workgroup, self.geometry.stamps.index(what))

        @dev.when(self.thread == 0)
        def _() -> None:
            self.work.store(at, clock)

    @property
    def hidden_steps(self) -> int:
        """128 k of a wave's share of the hidden size."""
        return self.geometry.wave_k // K_STEP

    def fence(self) -> None:
        """Between unrolled steps of a build with many rows, whose operands fill the registers: keeps the
        compiler from loading several steps ahead. With few rows there is room, and loads should go early."""
        if self.geometry.row_tiles > 1:
            dev.schedule_fence()


@dataclass
class Place:
    """A lane's word of the slice, in both all-reduces and in the seam."""

    active: Any
    item: Any
    row: Any
    word: Any
    column_at: Any  # byte offset in a bf16 [rows, 5120]

    @classmethod
    def of(cls, ctx: Context, thread: Any) -> Place:
        g = ctx.geometry
        active = thread < g.rows * g.pairs
        item = active.select(thread, fx.Int32(0))
        row, word = item // g.pairs, item % g.pairs
        return cls(active, item, row, word, row * (HIDDEN * 2) + (ctx.slice_idx * g.columns + word * 2) * 2)
