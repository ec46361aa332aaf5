# SPDX-License-Identifier: Apache-2.0
"""The attention back with the FFN half (K2): sparse attention, output projection, the FFN launch's stages.

Inputs, Outputs: ``BackArguments``. The grid is one workgroup a compute unit, all resident; each runs every
stage in order, so a wait is always for something that another workgroup reaches without waiting for this
one's later stages.

Limits: 1..48 rows, and no more than LDS has room for (``regions.back_lds``): 42 of the target's on CDNA3. The
layer's sizes are fixed (``geometry``); loads of weights are bounded by their tensors, those of cache records
are not: slots are vLLM's. On CDNA3 e4m3 weights must hold no -0, as in ``ffn``; key records may.
"""

from collections.abc import Callable
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from vllm.models.common.amd.persistent.isa.base import Isa
from vllm.models.common.amd.persistent.regions import Layout

from .. import regions
from ..geometry import THREADS, WORKGROUPS, BackGeometry
from ..stages.context import Context, Place
from ..stages.down import slice_word
from ..stages.output_projection import OutputProjection
from ..stages.sparse_attention import SparseAttention
from .ffn import MOE_REDUCE, ffn_half

STREAM = fx.Stream(None)

# Stage numbers of error records, after the FFN half's. What it awaited is a block of 32 heads' columns of a
# group, and a workgroup.
ATTENDED, RANKS = range(MOE_REDUCE + 1, MOE_REDUCE + 3)


@fx.struct
class BackArguments:
    """Addresses, and this rank. ``rows`` is the step's row count, ``H`` and ``G`` the heads and groups of a
    rank; the FFN half's as in ``FfnArguments``, without ``partial``.

    Activations: ``query`` bf16 [rows, H, 512]; ``positions``, ``slots`` int64 [rows], a negative slot is a
    padded row. Keys: ``window_indices`` int32 [rows, window] slots, ``window_lens`` int32 [rows];
    ``selected`` int32 [rows, 512] entries of the request's compressed keys, negative for none; ``requests``
    int32 [rows];
    ``block_table`` int32, ``table_stride`` words a request. Caches: records in blocks of ``window_block`` and
    ``compressed_block``, ``window_stride`` and ``compressed_stride`` bytes apart. ``ratio``: positions of a
    compressed key, 1 or 2. ``window``: places of a row's window keys, a multiple of 16. ``selected_keys``:
    those of its compressed keys, 0 or 512. ``sink`` f32 [H], ``cos_sin`` f32 [positions, 64].
    Projections, e4m3 with E8M0 codes a 32 x 32: ``wo_a`` [1024 G, 4096], ``wo_a_scale`` [32 G, 128], ``wo_b``
    [5120, 1024 G], ``wo_b_scale`` [160, 32 G].
    """

    query: fx.Int64
    positions: fx.Int64
    slots: fx.Int64
    window_indices: fx.Int64
    window_lens: fx.Int64
    selected: fx.Int64
    requests: fx.Int64
    block_table: fx.Int64
    window_cache: fx.Int64
    window_stride: fx.Int64
    compressed_cache: fx.Int64
    compressed_stride: fx.Int64
    sink: fx.Int64
    cos_sin: fx.Int64
    wo_a: fx.Int64
    wo_a_scale: fx.Int64
    wo_b: fx.Int64
    wo_b_scale: fx.Int64
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
    table_stride: fx.Int32
    window_block: fx.Int32
    compressed_block: fx.Int32
    ratio: fx.Int32
    window: fx.Int32
    selected_keys: fx.Int32
    rank: fx.Int32


def _run(ctx: Context) -> None:
    ctx.stamp("sparse attention")
    SparseAttention(ctx).run()
    projection = OutputProjection(ctx, ATTENDED, RANKS)
    ctx.stamp("wo_a")
    projection.ranks_of_heads()
    projection.load()

    def partial_of(place: Place) -> Any:
        ctx.stamp("wo_b")
        projection.partial()
        return slice_word(ctx, place.row, place.word, ctx.lds.projection)

    ffn_half(ctx, partial_of)


def _layouts(g: BackGeometry, isa: Isa) -> tuple[Layout, Layout, Layout]:
    """Symmetric memory's, the workspace's, LDS's. Not in a closure of the kernel: FlyDSL's cache keys on what
    those hold, and a layout's name differs between processes."""
    return regions.back_symmetric(g), regions.back_workspace(g), regions.back_lds(g, isa.lds_bytes)


def build(g: BackGeometry, isa: Isa, name: str = "attention_back_ffn") -> Callable[..., Any]:
    """The launcher of one build, ``name`` in the code object: called with ``BackArguments``."""

    @flyc.kernel(name=name, known_block_size=[THREADS, 1, 1])
    def kernel(args: BackArguments) -> None:
        _run(Context.begin(g, isa, args, _layouts(g, isa)))

    @flyc.jit
    def launch(args: BackArguments, stream: fx.Stream = STREAM) -> None:
        kernel(args).launch(grid=(WORKGROUPS,), block=(THREADS,), stream=stream)

    return launch
