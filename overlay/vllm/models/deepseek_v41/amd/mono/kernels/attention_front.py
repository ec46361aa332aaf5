# SPDX-License-Identifier: Apache-2.0
"""The attention front (K1): hyper-connection seam, query and key projections, the row's own key to its cache.

Inputs, Outputs: ``FrontArguments``. The grid is one workgroup a compute unit, all resident; each runs every
stage in order, so a wait is always for something that another workgroup reaches without waiting for this
one's later stages. No rank waits for another.

Limits: 1..48 rows; the layer's sizes are fixed (``geometry``); loads of weights are bounded by their tensors.
On CDNA3 e4m3 weights must hold no -0, as in ``ffn``.
"""

from collections.abc import Callable
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from vllm.models.common.amd.persistent import device as dev
from vllm.models.common.amd.persistent.isa.base import Isa
from vllm.models.common.amd.persistent.regions import Layout

from .. import regions
from ..geometry import THREADS, WORKGROUPS, FrontGeometry
from ..stages import kv_record
from ..stages.activations import Activations, load_norm
from ..stages.collapsed import CollapsedRows
from ..stages.context import Context, Place
from ..stages.hyper_connection import HyperConnection
from ..stages.published import PublishedRows
from ..stages.qkv_projection import QkvProjection, QueryProjection

STREAM = fx.Stream(None)

# Stage numbers of error records: the wait that failed. What it awaited is a workgroup.
MIXES, COLLAPSED, QKV_ROWS = range(1, 4)


@fx.struct
class FrontArguments:
    """Addresses, and this rank. ``rows`` is the step's row count, ``H`` the heads of a rank.

    Activations: ``x`` bf16 [rows, 5120], the last layer's output, of no effect where ``fold`` is 0;
    ``residual_in`` bf16 [rows, 4, 5120]; ``post_in`` f32 [rows, 4], ``comb_in`` f32 [rows, 4, 4], ``pre_in``
    f32 [rows, 4] of the last seam. ``positions``, ``slots`` int64 [rows]; a negative slot is a padded row.
    Seam: ``mix_projection`` f32 [24, 20480], ``mix_scale`` f32 [3], ``mix_base`` f32 [24], ``norm_weight``
    bf16 [5120]. Projections, e4m3 with E8M0 codes a 32 x 32: ``wqkv`` [1792, 5120], ``wqkv_scale`` [56, 160],
    ``wq_b`` [512 H, 1280], ``wq_b_scale`` [16 H, 40]. ``query_norm`` bf16 [1280], ``key_norm`` bf16 [512],
    ``cos_sin`` f32 [positions, 64].
    Cache: ``window_cache``, the sliding window's records in blocks of ``window_block``, ``window_stride``
    bytes apart.
    Outputs: ``residual_out``, ``post_out``, ``comb_out``, ``pre_out`` as the inputs; ``query`` bf16 [rows, H,
    512]; for an index source, ``normed_out`` bf16 [rows, 5120] and ``query_rank_out`` bf16 [rows, 1280],
    both 0 for other layers.
    Memory: ``workspace``; ``peers``, int64 [TP] addresses of every rank's control block.
    """

    x: fx.Int64
    residual_in: fx.Int64
    post_in: fx.Int64
    comb_in: fx.Int64
    pre_in: fx.Int64
    positions: fx.Int64
    slots: fx.Int64
    mix_projection: fx.Int64
    mix_scale: fx.Int64
    mix_base: fx.Int64
    norm_weight: fx.Int64
    wqkv: fx.Int64
    wqkv_scale: fx.Int64
    wq_b: fx.Int64
    wq_b_scale: fx.Int64
    query_norm: fx.Int64
    key_norm: fx.Int64
    cos_sin: fx.Int64
    window_cache: fx.Int64
    window_stride: fx.Int64
    residual_out: fx.Int64
    post_out: fx.Int64
    comb_out: fx.Int64
    pre_out: fx.Int64
    query: fx.Int64
    normed_out: fx.Int64
    query_rank_out: fx.Int64
    workspace: fx.Int64
    peers: fx.Int64
    window_block: fx.Int32
    fold: fx.Int32
    rank: fx.Int32


def _run(ctx: Context) -> None:
    g = ctx.geometry
    place = Place.of(ctx, ctx.thread)
    output = dev.Buffer(ctx.args.x).load(place.column_at)
    collapsed = CollapsedRows(ctx, COLLAPSED)
    qkv = PublishedRows(ctx, ctx.workspace.qkv, ctx.workspace.qkv_ready, QKV_ROWS)
    seam = HyperConnection(ctx, collapsed, MIXES)
    seam.load(place.row, place.word)
    seam.load_mix_weights()
    load_norm(ctx)
    projection, query = QkvProjection(ctx, qkv), QueryProjection(ctx, qkv)
    query.load_norm()
    # The operands of several tiles of rows leave no room for weights that wait.
    early = g.row_tiles == 1
    if early:
        projection.load()

    ctx.stamp("seam fold")
    seam.fold(place.row, place.word, place.active, output, ctx.args.fold != 0)
    collapsed.announce()
    collapsed.wait()
    ctx.stamp("normalised rows")
    activations = Activations(ctx, ctx.args.normed_out)
    activations.norms()
    operands = [activations.operands(tile) for tile in range(g.row_tiles)]
    if not early:
        projection.load()
    ctx.stamp("query rank and key")
    projection.run(operands)
    query.load()
    ctx.stamp("seam sums")
    seam.send_sums()
    ctx.stamp("query")
    query.run()
    ctx.stamp("key record")
    kv_record.insert(ctx, qkv)
    ctx.stamp("mixes")
    seam.finish_mixes()
    ctx.stamp("end")

    @dev.when((ctx.workgroup == 0) & (ctx.thread == 0))
    def _() -> None:
        ctx.launch.finish()


def _layouts(g: FrontGeometry, isa: Isa) -> tuple[Layout, Layout, Layout]:
    """Symmetric memory's, the workspace's, LDS's. Not in a closure of the kernel: FlyDSL's cache keys on what
    those hold, and a layout's name differs between processes."""
    return regions.front_symmetric(g), regions.front_workspace(g), regions.front_lds(g, isa.lds_bytes)


def build(g: FrontGeometry, isa: Isa, name: str = "attention_front") -> Callable[..., Any]:
    """The launcher of one build, ``name`` in the code object: called with ``FrontArguments``."""

    @flyc.kernel(name=name, known_block_size=[THREADS, 1, 1])
    def kernel(args: FrontArguments) -> None:
        _run(Context.begin(g, isa, args, _layouts(g, isa)))

    @flyc.jit
    def launch(args: FrontArguments, stream: fx.Stream = STREAM) -> None:
        kernel(args).launch(grid=(WORKGROUPS,), block=(THREADS,), stream=stream)

    return launch
