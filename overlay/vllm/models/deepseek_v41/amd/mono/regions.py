# SPDX-License-Identifier: Apache-2.0
"""The FFN launch's memory: a rank's symmetric memory, its workspace, a workgroup's LDS."""

from __future__ import annotations

from vllm.models.common.amd.persistent.handoff import CONTROL_BYTES, mailbox
from vllm.models.common.amd.persistent.regions import Layout, Region

from .geometry import HIDDEN, MIXES, STREAMS, WAVES, WORKGROUPS, FfnGeometry

# Mixes of a seam, and the residual's sum of squares.
SEAM_SUMS = MIXES + 1
# 32 fp8 values of a block are eight words.
BLOCK_WORDS = 8
# A row of the pick tables in LDS: two 16-byte loads.
PICK_ROW = 8


def symmetric(g: FfnGeometry) -> Layout:
    """What peers write: the control block, and the two all-reduces' mailboxes by source rank."""
    exchange = (g.tp, WORKGROUPS, g.rows * g.pairs)
    return Layout(
        [
            Region("control", (CONTROL_BYTES,), 1),
            mailbox("attention", *exchange),
            mailbox("moe", *exchange),
        ]
    )


def workspace(g: FfnGeometry) -> Layout:
    """Mailboxes between a rank's workgroups."""
    if g.published:
        collapsed = [Region("collapsed", (g.rows, HIDDEN // 2), 4), mailbox("collapsed_ready", WORKGROUPS)]
    else:
        collapsed = [mailbox("collapsed", g.rows, HIDDEN // 2)]
    return Layout(
        [
            *collapsed,
            mailbox("seam_sums", g.rows, SEAM_SUMS, WORKGROUPS),
            mailbox("logits", g.rows, g.experts),
            mailbox("intermediate", g.rows, g.slots, g.blocks, BLOCK_WORDS),
        ]
    )


def lds(g: FfnGeometry) -> Layout:
    """LDS of a workgroup, in bytes."""
    return Layout(
        [
            # Partial sums of the waves: gate/up is the largest user (four tiles of 16 outputs).
            Region("partial", (WAVES, 4 * g.row_tiles, 64, 4), 4),
            Region("norm", (HIDDEN // 2,), 4),
            Region("streams", (g.rows, STREAMS, g.columns), 4),
            # A row of weights starts four banks after the one before.
            Region("mix_weights", (MIXES, STREAMS * g.columns + 4), 4),
            Region("squares", (WAVES, g.row_tiles, 16), 4),
            Region("mixes", (32,), 4),
            Region("pick_expert", (g.rows, PICK_ROW), 4),
            Region("pick_weight", (g.rows, PICK_ROW), 4),
            Region("active_bits", (g.experts // 32,), 4),
            Region("active", (g.max_active,), 4),
            Region("active_count", (1,), 4),
        ]
    )
