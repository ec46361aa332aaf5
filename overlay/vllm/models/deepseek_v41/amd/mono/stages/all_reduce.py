# SPDX-License-Identifier: Apache-2.0
"""TP all-reduce of one slice of hidden columns, over symmetric memory.

Inputs: one word (two bf16 columns) of this rank's partial a lane. Outputs: the sum of that word over ranks.
Hand-off: every rank's workgroup of the slice sends its words to every rank, itself included, and waits for
those of all ranks; a word carries its tag.
Numerics: fp32 sum in rank order, rounded to bf16, the same bits on every rank.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.handoff import Receiver, send, tag_word
from vllm.models.common.amd.persistent.regions import Region

from .context import Context


def exchange(ctx: Context, box: Region, stage: int, item: Any, active: Any, partial: Any) -> Any:
    """The word of all ranks' sum, two bf16. ``item`` is the word's index in the slice's mailbox, ``partial``
    this rank's word; lanes that are not ``active`` take no part."""
    launch = ctx.launch

    @dev.when(active)
    def _() -> None:
        at = box.at(ctx.rank, ctx.slice_idx, item)
        for peer in ctx.peers:
            send(peer, at, partial, tag_word(launch.tag), dev.SYSTEM)

    where = [box.at(source, ctx.slice_idx, item) for source in range(ctx.geometry.tp)]
    words = Receiver(launch, stage).words(ctx.own, where, active, lambda source, _: source, dev.SYSTEM)
    low, high = fx.Float32(0.0), fx.Float32(0.0)
    for word in words:
        first, second = m.unpack_bf16(word[0])
        low, high = low + first, high + second
    return ctx.isa.pack_bf16(low, high)
