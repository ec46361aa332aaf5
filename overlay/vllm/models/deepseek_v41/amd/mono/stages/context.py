# SPDX-License-Identifier: Apache-2.0
"""What every stage of a launch shares: where this lane is, the launch, the memories and their layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent.handoff import Launch
from vllm.models.common.amd.persistent.isa.base import Isa
from vllm.models.common.amd.persistent.regions import Layout

from ..geometry import K_STEP, FfnGeometry, slice_of


@dataclass
class Context:
    """``args`` is the kernel's argument struct; ``symmetric``, ``workspace`` and ``lds`` are layouts,
    ``own``, ``work`` and ``shared`` the memories they describe, ``peers`` every rank's symmetric memory."""

    geometry: FfnGeometry
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

    @property
    def hidden_steps(self) -> int:
        """128 k of a wave's share of the hidden size."""
        return self.geometry.wave_k // K_STEP

    def fence(self) -> None:
        """Between unrolled steps of a build with many rows, whose operands fill the registers: keeps the
        compiler from loading several steps ahead. With few rows there is room, and loads should go early."""
        if self.geometry.row_tiles > 1:
            dev.schedule_fence()
