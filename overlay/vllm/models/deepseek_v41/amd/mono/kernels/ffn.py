# SPDX-License-Identifier: Apache-2.0
"""The FFN launch: attention all-reduce, hyper-connection seam, router, experts, MoE all-reduce.

Inputs, Outputs: ``FfnArguments``. Stages: ``STAGES``. The grid is one workgroup a compute unit, all resident;
each workgroup runs every stage in order, so a wait is always for something that another workgroup reaches
without waiting for this one's later stages.

Limits: 1..48 rows, and no more than LDS has room for (``regions.lds``): 42 of the target's on CDNA3. The
layer's sizes are fixed (``geometry``); loads of weights are bounded by their tensors. On CDNA3 e4m3 weights
must hold no -0 (byte 0x80), which its FP8 conversions take for a NaN.
"""

from collections.abc import Callable
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent.isa.base import Isa
from vllm.models.common.amd.persistent.regions import Layout

from .. import regions
from ..geometry import THREADS, WORKGROUPS, FfnGeometry
from ..stages.activations import Activations, load_norm
from ..stages.all_reduce import exchange
from ..stages.collapsed import CollapsedRows
from ..stages.context import Context, Place
from ..stages.down import Down, slice_word
from ..stages.gate_up import GateUp
from ..stages.hyper_connection import HyperConnection
from ..stages.routing import Router

STREAM = fx.Stream(None)

# Stage numbers of error records: the wait that failed. What it awaited is a rank in the all-reduces, a
# workgroup in the others, and for the intermediate rows (block << AWAITED_SLOT_BITS) | slot.
ATTENTION_REDUCE, MIXES, COLLAPSED, LOGITS, INTERMEDIATE, MOE_REDUCE = range(1, 7)


@fx.struct
class FfnArguments:
    """Addresses, and this rank. ``rows`` is the step's row count, ``I`` the padded and ``S`` the real
    intermediate share of a rank.

    Activations: ``partial`` bf16 [rows, 5120], wo_b's unreduced output; ``residual_in`` bf16 [rows, 4, 5120];
    ``post_in`` f32 [rows, 4], ``comb_in`` f32 [rows, 4, 4], ``pre_in`` f32 [rows, 4] of the attention seam.
    Seam: ``mix_projection`` f32 [24, 20480], ``mix_scale`` f32 [3], ``mix_base`` f32 [24], ``norm_weight``
    bf16 [5120]. Router: ``gate_weight`` bf16 [experts, 5120], ``gate_bias`` f32 [experts]. Routed experts in
    the architecture's layout (``stages/routed_weights.py``). In AITER's shuffle: ``w13`` [experts, 2 I, 2560]
    with gate and up tiles in turn, ``w13_scale`` [experts, 2 I, 160], ``w2`` [experts, 5120, I / 2],
    ``w2_scale`` [experts, 5120, I / 32 padded to 8]. Row-major: bytes of the same shapes with gate and up
    rows in turn, ``w13_scale`` [experts, 160, 2 I], ``w2_scale`` [experts, I / 32, 5120]. Shared expert:
    ``shared_w13`` e4m3 [2 S, 5120] gate first, ``shared_w13_scale`` [2 S / 32, 160], ``shared_w2`` e4m3
    [5120, S], ``shared_w2_scale`` [160, S / 32].
    Outputs: ``residual_out``, ``post_out``, ``comb_out``, ``pre_out`` as the inputs; ``out`` bf16 [rows,
    5120]. Memory: ``workspace``; ``peers``, int64 [TP] addresses of every rank's symmetric memory.
    """

    partial: fx.Int64
    residual_in: fx.Int64
    post_in: fx.Int64
    comb_in: fx.Int64
    pre_in: fx.Int64
    mix_projection: fx.Int64
    mix_scale: fx.Int64
    mix_base: fx.Int64
    norm_weight: fx.Int64
    gate_weight: fx.Int64
    gate_bias: fx.Int64
    w13: fx.Int64
    w13_scale: fx.Int64
    w2: fx.Int64
    w2_scale: fx.Int64
    shared_w13: fx.Int64
    shared_w13_scale: fx.Int64
    shared_w2: fx.Int64
    shared_w2_scale: fx.Int64
    residual_out: fx.Int64
    post_out: fx.Int64
    comb_out: fx.Int64
    pre_out: fx.Int64
    out: fx.Int64
    workspace: fx.Int64
    peers: fx.Int64
    rank: fx.Int32


def ffn_half(ctx: Context, partial_of: Callable[[Place], Any]) -> None:
    """From wo_b's unreduced output on. ``partial_of`` gives a lane's word of it, two bf16."""
    g = ctx.geometry
    place = Place.of(ctx, ctx.thread)

    ctx.stamp("loads")
    # Loads that depend on no one come first.
    collapsed = CollapsedRows(ctx, COLLAPSED)
    seam, router = HyperConnection(ctx, collapsed, MIXES), Router(ctx, LOGITS)
    seam.load(place.row, place.word)
    seam.load_mix_weights()
    load_norm(ctx)
    router.clear_active()
    router.warm_gate()

    partial = partial_of(place)
    ctx.stamp("attention all-reduce")
    attention = exchange(ctx, ctx.symmetric.attention, ATTENTION_REDUCE, place.item, place.active, partial)
    ctx.stamp("seam fold")
    seam.fold(place.row, place.word, place.active, attention)
    collapsed.announce()
    collapsed.wait()
    ctx.stamp("normalised rows")
    activations = Activations(ctx)
    activations.norms()
    ctx.stamp("router logits")
    router.send_logits(activations)
    operands = [activations.operands(tile) for tile in range(g.row_tiles)]
    ctx.stamp("seam sums")
    seam.send_sums()
    if ctx.lds.overlap("streams", "partial"):
        dev.barrier()
    gate_up = GateUp(ctx, operands)
    ctx.stamp("shared gate/up")
    gate_up.shared()
    ctx.stamp("mixes")
    seam.finish_mixes()

    ctx.stamp("choose")
    router.choose()
    dev.barrier()
    num_active = router.list_active()
    ctx.stamp("routed gate/up")
    gate_up.routed(num_active)

    # The routed experts' weights fill the registers.
    ctx = ctx.again()
    ctx.stamp("down")
    down = Down(ctx, INTERMEDIATE)
    down.sum_experts(num_active)
    ctx = ctx.again()
    ctx.stamp("MoE all-reduce")
    place = Place.of(ctx, ctx.thread)
    word = slice_word(ctx, place.row, place.word)
    moe = exchange(ctx, ctx.symmetric.moe, MOE_REDUCE, place.item, place.active, word)
    ctx.stamp("output")

    @dev.when(place.active)
    def _() -> None:
        dev.Buffer(ctx.args.out).store(place.column_at, moe)

    ctx.stamp("end")

    @dev.when((ctx.workgroup == 0) & (ctx.thread == 0))
    def _() -> None:
        ctx.launch.finish()


def _layouts(g: FfnGeometry, isa: Isa) -> tuple[Layout, Layout, Layout]:
    """Symmetric memory's, the workspace's, LDS's. Not in a closure of the kernel: FlyDSL's cache keys on what
    those hold, and a layout's name differs between processes."""
    return regions.symmetric(g), regions.workspace(g), regions.lds(g, isa.lds_bytes)


def build(g: FfnGeometry, isa: Isa, name: str = "ffn") -> Callable[..., Any]:
    """The launcher of one build, ``name`` in the code object: called with ``FfnArguments``."""

    @flyc.kernel(name=name, known_block_size=[THREADS, 1, 1])
    def kernel(args: FfnArguments) -> None:
        ctx = Context.begin(g, isa, args, _layouts(g, isa))
        partial = dev.Buffer(args.partial)
        word = partial.load(Place.of(ctx, ctx.thread).column_at)
        ffn_half(ctx, lambda _: word)

    @flyc.jit
    def launch(args: FfnArguments, stream: fx.Stream = STREAM) -> None:
        kernel(args).launch(grid=(WORKGROUPS,), block=(THREADS,), stream=stream)

    return launch
