# SPDX-License-Identifier: Apache-2.0
"""Sliding-window (SWA) metadata of a decode batch in one launch.

vLLM builds this metadata from eight launches for every SWA group and step: the validity compare, the fill
of the unused lengths, the window indices, the ragged count, scan and compaction, and two copies into the
buffers that CUDA graphs hold. One Triton kernel writes the same values here.

Inputs, on the device, N rows (tokens) of R requests:
    slot_mapping     int64 [N]        KV slot a row writes to; negative: a padded row
    query_start_loc  int32 [R + 1]    first row of each request
    seq_lens         int32 [R]        tokens of each request, this step's included
    token_to_req     int32 [N]        the request of each row
    block_table      int32 [R, B]     block numbers, rows ``stride(0)`` apart
    replay_start     int32 [R]        lowest position whose window KV exists

Outputs, in place:
    is_valid  bool  [N]               slot_mapping >= 0
    indices   int32 [>= N, 1, W]      KV slots of a row's keys, oldest first, then -1
    lens      int32 [L]               keys of each row; 0 from row N to the end
    indptr    int32 [>= N + 1]        where each row's keys start in ``ragged``
    ragged    int32 [>= N * W]        the non-negative slots of the rows, one row after the other

A row at position p attends to the positions [max(p - window + 1, replay_start, 0), p]. A row of the DSpark
draft block, which is not causal, attends to the ``window`` positions before its block and to the whole
block, and ignores replay_start: a replayed window lies below every draft block. A padded row has no keys.

Work split: one program a row and one for every ``TAIL`` unused lengths. A row's place in ``ragged`` is the
number of keys of the rows before it, which needs another program's result, or a second launch, or one
program for all rows. Here every program computes that number itself. A row's keys follow from five scalars
and from the signs of the few block-table entries that its window touches, so one lane takes one row and the
whole batch costs a handful of loads, all in flight at once. The programs share nothing, wait for nothing and
take as long for 48 rows as for one, where one program for the batch grows with the rows.

Numerics: integers only. Slots and addresses are int32 as in vLLM's own kernels.

Limits: at most ``MAX_ROWS`` rows; a cache of less than 2**31 slots, as vLLM's int32 slots require.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.models.deepseek_v41.amd import ops
from vllm.models.deepseek_v41.amd.mono_decode import MAX_ROWS, MAX_ROWS_GFX942
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

# Steps that the mono kernels decline gain nothing from their metadata coming early, so the limit is theirs.
CDNA3 = 3
ROW_LIMITS = {CDNA3: MAX_ROWS_GFX942}
# One lane a row, whatever the batch: a serving process compiles the kernel once for each SWA group.
ROW_LANES = triton.next_power_of_2(MAX_ROWS)
# The unused lengths of a 16k-token buffer take a few more programs beside the rows, not a loop in one.
TAIL = 1024
# A single wave needs no LDS and no barrier to reduce or scan.
NUM_WARPS = 1


@triton.jit
def _row_window(
    row,
    mask,
    slot_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    token_to_req_ptr,
    replay_start_ptr,
    WINDOW: tl.constexpr,
    NONCAUSAL: tl.constexpr,
):
    """Validity, request, first position and number of keys of ``row``, a scalar or one row a lane.

    The number is negative where replay_start lies above the row, as vLLM stores it.
    """
    slot = tl.load(slot_mapping_ptr + row, mask=mask, other=-1)
    req = tl.load(token_to_req_ptr + row, mask=mask, other=0)
    is_valid = slot >= 0
    # A padded row's request may be past the batch, so nothing is read for it.
    first_row = tl.load(query_start_loc_ptr + req, mask=is_valid, other=0)
    end_row = tl.load(query_start_loc_ptr + req + 1, mask=is_valid, other=0)
    seq_len = tl.load(seq_lens_ptr + req, mask=is_valid, other=0)
    context_len = seq_len - (end_row - first_row)
    if NONCAUSAL:
        start = tl.maximum(context_len - WINDOW, 0)
        end = seq_len
    else:
        replay_start = tl.load(replay_start_ptr + req, mask=is_valid, other=0)
        end = context_len + row - first_row + 1
        start = tl.maximum(tl.maximum(end - WINDOW, 0), replay_start)
    return is_valid, req, start, tl.where(is_valid, end - start, 0)


@triton.jit
def _count_keys(
    req,
    start,
    num_keys,
    block_table_ptr,
    block_table_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Keys with a non-negative slot among positions [start, start + num_keys), one row a lane.

    A block's slots have the sign of its number, so its overlap with the window counts whole or not at all.
    """
    end = start + num_keys
    first_block = start // BLOCK_SIZE
    count = tl.zeros_like(num_keys)
    for i in tl.static_range(NUM_BLOCKS):
        block = first_block + i
        overlap = tl.minimum(end, (block + 1) * BLOCK_SIZE) - tl.maximum(start, block * BLOCK_SIZE)
        number = tl.load(block_table_ptr + req * block_table_stride + block, mask=overlap > 0, other=-1)
        count += tl.where(number >= 0, overlap, 0)
    return count


@triton.jit(do_not_specialize=["indices_stride", "num_lens", "block_table_stride", "num_rows"])
def swa_decode_meta_kernel(
    num_rows,
    slot_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    token_to_req_ptr,
    replay_start_ptr,
    block_table_ptr,
    block_table_stride,
    is_valid_ptr,
    lens_ptr,
    num_lens,
    indices_ptr,
    indices_stride,
    indptr_ptr,
    ragged_ptr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NONCAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ROW_LANES: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Grid: ``num_rows`` programs for the rows, then one for every ``TAIL`` lengths after them."""
    row = tl.program_id(0)
    if row >= num_rows:
        unused = num_rows + (row - num_rows) * TAIL + tl.arange(0, TAIL)
        tl.store(lens_ptr + unused, tl.zeros((TAIL,), tl.int32), mask=unused < num_lens)
        return

    # Both windows are asked for before either is used, so that their loads overlap.
    lane = tl.arange(0, ROW_LANES)
    _, lane_req, lane_start, lane_keys = _row_window(
        lane, lane < row, slot_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, token_to_req_ptr,
        replay_start_ptr, WINDOW, NONCAUSAL,
    )  # fmt: skip
    is_valid, req, start, num_keys = _row_window(
        row, True, slot_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, token_to_req_ptr,
        replay_start_ptr, WINDOW, NONCAUSAL,
    )  # fmt: skip
    column = tl.arange(0, COLUMNS)
    position = start + column
    is_key = column < tl.minimum(num_keys, WIDTH)
    number = tl.load(
        block_table_ptr + req * block_table_stride + position // BLOCK_SIZE, mask=is_key, other=0
    )
    lane_count = _count_keys(
        lane_req, lane_start, tl.minimum(lane_keys, WIDTH), block_table_ptr, block_table_stride,
        BLOCK_SIZE, NUM_BLOCKS,
    )  # fmt: skip

    slot = tl.where(is_key, number * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(indices_ptr + row * indices_stride + column, slot, mask=column < WIDTH)
    tl.store(is_valid_ptr + row, is_valid)
    tl.store(lens_ptr + row, num_keys)

    ragged_start = tl.sum(lane_count, axis=0)
    is_kept = slot >= 0
    kept = is_kept.to(tl.int32)
    rank = tl.cumsum(kept, axis=0) - kept
    tl.store(ragged_ptr + ragged_start + rank, slot, mask=is_kept)
    if row == 0:
        tl.store(indptr_ptr, 0)
    tl.store(indptr_ptr + row + 1, ragged_start + tl.sum(kept, axis=0))


def launch(
    slot_mapping: torch.Tensor,
    is_valid: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    ragged: torch.Tensor,
    indptr: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    replay_start: torch.Tensor,
    num_tokens: int,
    window_size: int,
    block_size: int,
    noncausal: bool = False,
) -> None:
    """Write the metadata of rows [0, num_tokens), in the tensors that the module describes.

    Args:
        num_tokens: rows of the batch.
        window_size: positions of the sliding window.
        block_size: tokens of a KV block.
        noncausal: the rows are a DSpark draft block. Its width W is that of ``indices``.

    Raises:
        ValueError: no row, or more rows than the kernel's lanes count.
    """
    if not 0 < num_tokens <= MAX_ROWS:
        raise ValueError(f"SWA decode metadata takes 1 to {MAX_ROWS} rows, got {num_tokens}")
    width = indices.shape[-1]
    num_lens = lens.shape[0]
    grid = (num_tokens + triton.cdiv(num_lens - num_tokens, TAIL),)
    swa_decode_meta_kernel[grid](
        num_tokens, slot_mapping, query_start_loc, seq_lens, token_to_req, replay_start,
        block_table, block_table.stride(0), is_valid, lens, num_lens, indices, indices.stride(0), indptr,
        ragged,
        WINDOW=window_size,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        NONCAUSAL=noncausal,
        COLUMNS=triton.next_power_of_2(width),
        NUM_BLOCKS=max_blocks_touched(width, block_size),
        ROW_LANES=ROW_LANES,
        TAIL=TAIL,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def max_blocks_touched(width: int, block_size: int) -> int:
    """The most KV blocks that ``width`` consecutive positions can lie in."""
    return (width - 2) // block_size + 2


def row_limit() -> int:
    """The rows of the largest batch that is taken on this GPU: those of its mono decode kernels, at the
    tensor parallel size at which they take most."""
    from vllm.platforms.rocm import get_cdna_version

    return ROW_LIMITS.get(get_cdna_version(), MAX_ROWS)


@dataclass(frozen=True)
class DecodeBatch:
    """A batch that one launch serves: R requests of N rows in all, and the [., 1, W] buffer of its kind."""

    num_requests: int
    num_rows: int
    noncausal: bool
    indices: torch.Tensor


def take(builder: Any, common: CommonAttentionMetadata) -> DecodeBatch | None:
    """The batch as this module serves it, or None where vLLM's own build has to.

    vLLM's build serves prefill and mixed batches, batches of more rows than ``row_limit``, non-causal
    batches that are no DSpark draft, and a slot mapping that is not one slot a row, as under context
    parallelism.
    """
    from vllm.v1.attention.backends.utils import split_decodes_and_prefills

    noncausal = not common.causal
    if noncausal and not builder.is_dspark:
        return None
    num_decodes, num_prefills, num_rows, _ = split_decodes_and_prefills(
        common, decode_threshold=builder.decode_threshold
    )
    if num_prefills or not 0 < num_rows <= row_limit() or len(common.slot_mapping) != num_rows:
        return None
    return DecodeBatch(num_decodes, num_rows, noncausal, _index_buffer(builder, noncausal))


def _index_buffer(builder: Any, noncausal: bool) -> torch.Tensor:
    """The builder's dense index buffer, int32 [tokens, 1, W]. The draft's is made when first needed."""
    if not noncausal:
        return builder.decode_swa_indices
    if builder.decode_swa_indices_noncausal is None:
        shape = (len(builder.decode_swa_lens), 1, builder.noncausal_index_width)
        builder.decode_swa_indices_noncausal = builder.decode_swa_indices.new_zeros(shape)
    return builder.decode_swa_indices_noncausal


def build(
    builder: Any,
    common_prefix_len: int,
    cam: CommonAttentionMetadata,
    fast_build: bool,
    replay_start: torch.Tensor | None,
    metadata_cls: type,
) -> Any:
    """A decode batch's metadata from one launch, or None: the caller then runs vLLM's own build.

    Args:
        builder: the ROCm SWA metadata builder, whose buffers hold the results.
        common_prefix_len: as the builder's ``build``; not used.
        cam: the batch.
        fast_build: as the builder's ``build``; not used.
        replay_start: int32 [R], or None where no request replays its window.
        metadata_cls: the ROCm SWA metadata class, of which an instance is returned. Fields that only
            prefill batches or other platforms set keep their defaults.
    """
    if not ops.swa_decode_meta_enabled():
        return None
    batch = take(builder, cam)
    if batch is None:
        return None
    rows, width = batch.num_rows, batch.indices.shape[-1]
    valid = builder.is_valid_token[:rows]
    token_to_req = cam.token_to_req_indices(builder.token_to_req_indices)
    lower_bound = builder.no_replay_start if replay_start is None else replay_start
    lens, ragged, indptr = (
        builder.decode_swa_lens,
        builder.decode_swa_ragged_indices_buffer,
        builder.decode_swa_ragged_indptr_buffer,
    )
    launch(
        cam.slot_mapping, valid, batch.indices, lens, ragged, indptr, cam.query_start_loc, cam.seq_lens,
        token_to_req, cam.block_table_tensor, lower_bound, rows, builder.window_size, builder.block_size,
        noncausal=batch.noncausal,
    )  # fmt: skip
    inputs = {
        "block_table": cam.block_table_tensor,
        "slot_mapping": cam.slot_mapping,
        "block_size": builder.block_size,
        "seq_lens": cam.seq_lens,
        "query_start_loc": cam.query_start_loc,
        "query_start_loc_cpu": cam.query_start_loc_cpu,
        "token_to_req_indices": token_to_req,
        "replay_start": lower_bound,
        "num_decodes": batch.num_requests,
        "num_decode_tokens": rows,
        "max_decode_query_len": min(cam.max_query_len, builder.decode_threshold),
    }
    results = {
        "is_valid_token": valid,
        "decode_swa_indices": batch.indices[:rows],
        "decode_swa_lens": lens[:rows],
        "decode_swa_width": width,
        # The whole capacity: the attention kernel sizes its splits by it, and indptr bounds what is read.
        "decode_swa_ragged_indices": ragged[: rows * width],
        "decode_swa_ragged_indptr": indptr[: rows + 1],
    }
    return metadata_cls(**inputs, **results)
