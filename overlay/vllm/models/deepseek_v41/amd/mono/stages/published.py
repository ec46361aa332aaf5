# SPDX-License-Identifier: Apache-2.0
"""Rows that every workgroup reads, published by the workgroups that computed them.

As ``collapsed``: stored at device scope, drained, announced by one word a producer, then read by plain loads
that share the XCD's L2.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent.handoff import Receiver, send, tag_word
from vllm.models.common.amd.persistent.regions import Region

from ..geometry import WAVES
from .context import Context


class PublishedRows:
    """bf16 rows in ``rows``, the producers' words in ``ready``; ``stage`` is the stage number of the wait."""

    def __init__(self, ctx: Context, rows: Region, ready: Region, stage: int) -> None:
        self.ctx, self.rows, self.ready, self.stage = ctx, rows, ready, stage

    def store(self, row: Any, word: Any, payload: Any) -> None:
        """Store words of a row from word ``word`` on."""
        self.ctx.work.store(self.rows.at(row, word), payload, dev.DEVICE)

    def announce(self, there: Any) -> None:
        """After every lane's ``store``: drain, meet, and send this workgroup's word where ``there`` holds."""
        ctx = self.ctx
        dev.drain()
        dev.barrier()

        @dev.when(there & (ctx.thread == 0))
        def _() -> None:
            send(ctx.work, self.ready.at(ctx.workgroup), fx.Int32(0), tag_word(ctx.launch.tag), dev.DEVICE)

    def wait_in_wave(self, first: int, count: int) -> None:
        """Wait in this wave for up to 64 producers from ``first`` on."""
        ctx = self.ctx
        producer = first + ctx.lane
        at = self.ready.at((ctx.lane < count).select(producer, fx.Int32(first)))
        Receiver(ctx.launch, self.stage).words(ctx.work, [at], ctx.lane < count, lambda *_: producer)
        dev.acquire()

    def wait(self, count: int) -> None:
        """Wait for the first ``count`` producers, a share of them a wave, and for the other waves."""
        ctx = self.ctx
        share = -(-count // WAVES)
        producer = ctx.wave * share + ctx.lane
        there = (ctx.lane < share) & (producer < count)
        at = self.ready.at(there.select(producer, fx.Int32(0)))
        Receiver(ctx.launch, self.stage).words(ctx.work, [at], there, lambda *_: producer)
        dev.barrier()
        dev.acquire()
