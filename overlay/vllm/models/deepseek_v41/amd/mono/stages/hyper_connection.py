# SPDX-License-Identifier: Apache-2.0
"""A hyper-connection seam, of the attention or of the FFN.

Inputs: what comes before it (the attention's output or the last layer's, summed over ranks, a word a lane),
the residual streams, the last seam's post, comb and pre mixes. Outputs: the residual with it folded in, bf16
[rows, 4, 5120]; the collapsed row, handed to every workgroup; this seam's post [rows, 4], comb [rows, 4, 4]
and pre [rows, 4].

Work split: a lane folds and collapses one word (two columns) of one row of its workgroup's slice, which is
all that the rest of the launch waits for. The mixes are off that path: every workgroup sends its slice's
partial sums, and one workgroup a row adds them.

Numerics (vllm/model_executor/kernels/mhc/torch.py): the folded residual and the collapsed row are rounded to
bf16; the mixes are of the rounded residual, in fp32; slices are added in a fixed tree, so every rank gets the
same bits.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent import math as m
from vllm.models.common.amd.persistent.handoff import Receiver, send, tag_word

from ..geometry import (
    HIDDEN,
    MIX_EPSILON,
    MIXES,
    NORM_EPSILON,
    SINKHORN_ROUNDS,
    STREAMS,
    THREADS,
    WAVES,
    WORKGROUPS,
    workgroup_of,
)
from ..regions import SEAM_SUMS
from .collapsed import CollapsedRows
from .context import Context

_ROW_BYTES = HIDDEN * 2


class HyperConnection:
    """One seam; ``stage_fold`` and ``stage_mixes`` are stage numbers for error records."""

    def __init__(self, ctx: Context, collapsed: CollapsedRows, stage_mixes: int) -> None:
        self.ctx, self.collapsed, self.stage_mixes = ctx, collapsed, stage_mixes

    # ---- what does not depend on other workgroups
    def load(self, row: Any, word: Any) -> None:
        """Load this lane's residual words and its row's mixes; start filling LDS with the mix weights."""
        ctx, args = self.ctx, self.ctx.args
        column = (ctx.slice_idx * ctx.geometry.columns + word * 2) * 2
        residual = dev.Buffer(args.residual_in)
        self._residual_at = row * (STREAMS * _ROW_BYTES) + column
        self._old = [residual.load(self._residual_at + j * _ROW_BYTES) for j in range(STREAMS)]
        self._post = dev.Buffer(args.post_in).load(row * 16, 4).bitcast(fx.Float32)
        self._pre = dev.Buffer(args.pre_in).load(row * 16, 4).bitcast(fx.Float32)
        comb = dev.Buffer(args.comb_in)
        self._comb = [comb.load(row * 64 + i * 16, 4).bitcast(fx.Float32) for i in range(STREAMS)]

    def load_mix_weights(self) -> None:
        """Copy the slice's columns of the mix projection to LDS: 24 rows of 4 streams x 20 columns."""
        ctx, args = self.ctx, self.ctx.args
        quads = STREAMS * ctx.geometry.columns // 4
        per_stream = ctx.geometry.columns // 4

        @dev.when(ctx.thread < MIXES * quads)
        def _() -> None:
            mix, quad = ctx.thread // quads, ctx.thread % quads
            stream, part = quad // per_stream, quad % per_stream
            column = stream * HIDDEN + ctx.slice_idx * ctx.geometry.columns + part * 4
            words = dev.Buffer(args.mix_projection).load((mix * (STREAMS * HIDDEN) + column) * 4, 4)
            ctx.shared.store(ctx.lds.mix_weights.at(mix, quad * 4), words)

    # ---- on the critical path
    def fold(self, row: Any, word: Any, active: Any, output: Any, owes: Any = None) -> None:
        """Fold ``output`` into the streams, store them, collapse them, hand the collapsed word over. Streams
        that owe nothing stay as they are; ``owes`` is the same in the launch, None if they always do."""
        ctx = self.ctx
        folded = lambda: self._folded(m.unpack_bf16(output))  # noqa: E731
        new_words = folded() if owes is None else dev.choose(owes, folded, self._old)
        new = [m.unpack_bf16(x) for x in new_words]
        collapsed = []
        for half in range(2):
            total = self._pre[0] * new[0][half]
            for j in range(1, STREAMS):
                total = m.fused(self._pre[j], new[j][half], total)
            collapsed.append(total)
        packed = ctx.isa.pack_bf16(collapsed[0], collapsed[1])

        @dev.when(active)
        def _() -> None:
            self.collapsed.store(row, word, packed)
            out = dev.Buffer(ctx.args.residual_out)
            for j in range(STREAMS):
                out.store(self._residual_at + j * _ROW_BYTES, new_words[j])
                ctx.shared.store(ctx.lds.streams.at(row, j, word * 2), dev.vector_f32([new[j][0], new[j][1]]))

    def _folded(self, output: Any) -> list[Any]:
        """post x the output, and the streams mixed by comb, rounded to bf16."""
        old = [m.unpack_bf16(x) for x in self._old]
        words = []
        for j in range(STREAMS):
            pair = []
            for half in range(2):
                total = self._post[j] * output[half]
                for i in range(STREAMS):
                    total = m.fused(self._comb[i][j], old[i][half], total)
                pair.append(total)
            words.append(self.ctx.isa.pack_bf16(pair[0], pair[1]))
        return words

    # ---- beside it
    def send_sums(self) -> None:
        """The slice's part of every mix's dot product and of the residual's sum of squares. Call after a
        barrier behind ``fold``."""
        ctx, lds = self.ctx, self.ctx.lds
        items = ctx.geometry.rows * SEAM_SUMS
        quads = STREAMS * ctx.geometry.columns // 4

        def one(start: Any, carried: list[Any]) -> list[Any]:
            item = start + ctx.thread

            @dev.when(item < items)
            def _() -> None:
                row, which = item // SEAM_SUMS, item % SEAM_SUMS
                values_at = lds.streams.at(row)
                # The sum of squares is the streams' product with themselves.
                weights_at = (which == MIXES).select(values_at, lds.mix_weights.at(which))
                sums = [dev.vector_f32([fx.Float32(0.0)] * 2)] * 2
                for quad in range(quads):
                    values = ctx.shared.load(values_at + quad * 16, 4).bitcast(fx.Float32)
                    weights = ctx.shared.load(weights_at + quad * 16, 4).bitcast(fx.Float32)
                    for i in range(2):
                        a, b = (dev.vector_f32([x[2 * i], x[2 * i + 1]]) for x in (values, weights))
                        sums[i] = m.fused(a, b, sums[i])
                both = sums[0] + sums[1]
                total = both[0] + both[1]
                at = ctx.workspace.seam_sums.at(row, which, ctx.slice_idx)
                send(ctx.work, at, dev.f32_bits(total), tag_word(ctx.launch.tag), dev.DEVICE)

            return carried

        dev.loop(0, items, THREADS, [], one)

    def finish_mixes(self) -> None:
        """Workgroup ``mixes_first + row`` adds that row's sums and stores its mixes."""
        ctx = self.ctx
        row = ctx.workgroup - ctx.geometry.mixes_first

        @dev.when((row >= 0) & (row < ctx.geometry.rows))
        def _() -> None:
            self._add_slices(row)
            dev.barrier()

            @dev.when(ctx.wave == 0)
            def _() -> None:
                self._store_mixes(row)

    def _add_slices(self, row: Any) -> None:
        ctx = self.ctx

        def one(which: Any, carried: list[Any]) -> list[Any]:
            base = ctx.workspace.seam_sums.at(row, which, ctx.lane * 2)
            half = WORKGROUPS // 2 * 8
            pairs = Receiver(ctx.launch, self.stage_mixes).pairs(
                ctx.work,
                [base, base + half],
                ctx.lane >= 0,
                lambda load, word: workgroup_of(ctx.lane * 2 + (load * (WORKGROUPS // 2) + word)),
            )
            total = dev.bits_f32(pairs[0][0]) + dev.bits_f32(pairs[0][2])
            total = total + (dev.bits_f32(pairs[1][0]) + dev.bits_f32(pairs[1][2]))
            for distance in (32, 16, 8, 4, 2, 1):
                total = total + dev.shuffle_xor(total, distance)

            @dev.when(ctx.lane == 0)
            def _() -> None:
                ctx.shared.store(ctx.lds.mixes.at(which), total)

            return carried

        dev.loop(ctx.wave, SEAM_SUMS, WAVES, [], one)

    def _store_mixes(self, row: Any) -> None:
        """Lane 4 i + j (of each 16) has comb's element i, j; lanes 0..3 have pre's and post's element too."""
        ctx, args, lds = self.ctx, self.ctx.args, self.ctx.lds
        lane = ctx.lane % 16
        quad = lane % STREAMS
        load = lambda index: dev.bits_f32(ctx.shared.load(lds.mixes.at(index)))  # noqa: E731
        rstd = m.reciprocal_sqrt(load(MIXES) * (1.0 / (STREAMS * HIDDEN)) + NORM_EPSILON)
        scale = [dev.bits_f32(dev.Buffer(args.mix_scale).load(i * 4)) for i in range(3)]
        base = dev.Buffer(args.mix_base)

        def mix(index: Any, which: int) -> Any:
            return load(index) * rstd * scale[which] + dev.bits_f32(base.load(index * 4))

        pre = m.sigmoid(mix(quad, 0)) + MIX_EPSILON
        post = m.sigmoid(mix(quad + STREAMS, 1)) * 2.0
        comb = mix(lane + 2 * STREAMS, 2)

        def over(value: Any, distances: tuple[int, int], combine: Any) -> Any:
            for distance in distances:
                value = combine(value, dev.shuffle_xor(value, distance))
            return value

        along, across = (1, 2), (4, 8)
        add = lambda a, b: a + b  # noqa: E731
        comb = m.exp2((comb - over(comb, along, m.maximum)) * m.LOG2_E)
        comb = comb * m.reciprocal(over(comb, along, add)) + MIX_EPSILON
        comb = comb * m.reciprocal(over(comb, across, add) + MIX_EPSILON)

        def sinkhorn(_: Any, carried: list[Any]) -> list[Any]:
            value = carried[0]
            value = value * m.reciprocal(over(value, along, add) + MIX_EPSILON)
            return [value * m.reciprocal(over(value, across, add) + MIX_EPSILON)]

        (comb,) = dev.loop(0, SINKHORN_ROUNDS - 1, 1, [comb], sinkhorn)

        @dev.when(ctx.lane < 16)
        def _() -> None:
            dev.Buffer(args.comb_out).store(row * 64 + ctx.lane * 4, comb)

        @dev.when(ctx.lane < STREAMS)
        def _() -> None:
            dev.Buffer(args.pre_out).store(row * 16 + ctx.lane * 4, pre)
            dev.Buffer(args.post_out).store(row * 16 + ctx.lane * 4, post)
