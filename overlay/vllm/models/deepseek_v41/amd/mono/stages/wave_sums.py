# SPDX-License-Identifier: Apache-2.0
"""Sums of a workgroup's waves, added through LDS: a unit is four floats a lane.

Where LDS has room for every wave's, they are added by who takes them, in the order of the waves. Where it has
room for half, the upper half of the waves leave theirs first and the lower half add them to their own: the
order is wave w plus wave w + 4, by w.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent.regions import Region

from ..geometry import WAVES
from .context import Context


def leave(ctx: Context, units: list[Any], base: Any = 0, first: int = 0, sums: Region | None = None) -> None:
    """Leave a wave's units in ``sums`` (``partial``) from unit ``first`` on, ``base`` bytes further; visible
    after a barrier. A barrier where there is room for half of the waves."""
    partial = sums or ctx.lds.partial
    room = partial.shape[1]
    if room == WAVES:
        for unit, value in enumerate(units, first):
            ctx.shared.store(partial.at(0, ctx.wave, unit, ctx.lane) + base, value)
        return

    @dev.when(ctx.wave >= room)
    def _() -> None:
        for unit, value in enumerate(units, first):
            ctx.shared.store(partial.at(0, ctx.wave - room, unit, ctx.lane) + base, value)

    dev.barrier()

    @dev.when(ctx.wave < room)
    def _() -> None:
        for unit, value in enumerate(units, first):
            at = partial.at(0, ctx.wave, unit, ctx.lane) + base
            ctx.shared.store(at, value + ctx.shared.load(at, 4).bitcast(fx.Float32))


def add_waves(
    ctx: Context,
    unit: Any,
    base: Any = 0,
    waves: Sequence[Any] | None = None,
    sums: Region | None = None,
) -> list[Any]:
    """The four sums of a unit in ``sums`` (``partial``) for this lane; ``waves``: over some waves, where
    there is room for every wave's."""
    partial = sums or ctx.lds.partial
    total: Any = None
    for wave in waves or range(partial.shape[1]):
        at = partial.at(0, wave, unit, ctx.lane) + base
        value = ctx.shared.load(at, 4).bitcast(fx.Float32)
        total = value if total is None else total + value
    return [total[i] for i in range(4)]
