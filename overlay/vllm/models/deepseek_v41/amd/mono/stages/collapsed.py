# SPDX-License-Identifier: Apache-2.0
"""The collapsed rows on their way from every slice to every workgroup.

Every workgroup reads every row, so the rows are published rather than sent in tagged words: stored at device
scope, drained, announced by one word a slice, then read by plain loads that share the XCD's L2. Tagged words
would double the bytes, send each of 256 readers past the L2, and cost more instructions than the one
acknowledgement that they save.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent.handoff import Receiver, send, tag_word

from ..geometry import WAVES, WORKGROUPS, workgroup_of
from .context import Context


class CollapsedRows:
    """bf16 [rows, 5120] in the workspace; ``stage`` is the stage number of the wait."""

    def __init__(self, ctx: Context, stage: int) -> None:
        self.ctx, self.stage = ctx, stage

    def store(self, row: Any, word: Any, payload: Any) -> None:
        """Store word ``word`` of this workgroup's slice of a row, in the lanes that have one."""
        ctx = self.ctx
        at = ctx.workspace.collapsed.at(row, ctx.slice_idx * ctx.geometry.pairs + word)
        ctx.work.store(at, payload, dev.DEVICE)

    def announce(self) -> None:
        """After every lane's ``store``: drain, meet, and send the slice's word."""
        ctx = self.ctx
        dev.drain()
        dev.barrier()

        @dev.when(ctx.thread == 0)
        def _() -> None:
            at = ctx.workspace.collapsed_ready.at(ctx.slice_idx)
            send(ctx.work, at, fx.Int32(0), tag_word(ctx.launch.tag), dev.DEVICE)

    def wait(self) -> None:
        """Wait for every slice, a share of them a wave, and for the other waves."""
        ctx = self.ctx
        share = WORKGROUPS // WAVES
        which = ctx.lane % share + ctx.wave * share
        at = ctx.workspace.collapsed_ready.at(which)
        receiver = Receiver(ctx.launch, self.stage)
        receiver.words(ctx.work, [at], ctx.lane < share, lambda *_: workgroup_of(which))
        dev.barrier()
        dev.acquire()
