# SPDX-License-Identifier: Apache-2.0
"""What our mono kernels hold on each GPU beside vLLM's weights, in bytes, from the checkpoint's shapes.

The only place that decides these figures: the memory plan, the recipes' table and their notes take them from
here. A test counts them from the tensors that the kernels are handed and from their own memory layouts.
"""

from __future__ import annotations

from rocm_overlay.kernel_arches import most_rows, reachable_widths

BACKBONE_LAYERS, DRAFT_LAYERS = 40, 3
HIDDEN, QUERY_RANK, KV_WIDTH, HEADS, HEAD_DIM = 5120, 1280, 512, 64, 512
OUTPUT_GROUPS, OUTPUT_RANK, SHARED_WIDTH = 8, 1024, 2304
# Values of one E8M0 code of a dense weight, a block of 32 x 32.
CODE_VALUES = 32 * 32
# A whole layer's workspace, symmetric memory and what its two kernels hand on, a row of a step width, of the
# target and of the draft: no more than this at any width.
STEP_BYTES_A_ROW = {2: 346_800 + 340_100, 4: 393_100 + 388_500}
TARGET_BYTES_A_ROW = {2: 346_800, 4: 393_100}


def dense_values(tensor_parallel: int) -> dict[str, int]:
    """Values of a rank's dense MXFP8 weights that a layer's kernels read."""
    group = HEADS // OUTPUT_GROUPS * HEAD_DIM
    whole = {
        "wqkv": (QUERY_RANK + KV_WIDTH) * HIDDEN * tensor_parallel,  # every rank has all of it
        "wq_b": HEADS * HEAD_DIM * QUERY_RANK,
        "wo_a": OUTPUT_GROUPS * OUTPUT_RANK * group,
        "wo_b": HIDDEN * OUTPUT_GROUPS * OUTPUT_RANK,
        "shared_w13": 2 * SHARED_WIDTH * HIDDEN,
        "shared_w2": HIDDEN * SHARED_WIDTH,
    }
    return {name: values // tensor_parallel for name, values in whole.items()}


def weight_bytes(
    architecture: str, tensor_parallel: int, drafts: int, *, widened_at_load: bool = True
) -> int:
    """Bytes a rank of weights with the kernels beyond what vLLM holds without them; below zero where they
    save some. Routed experts are read where vLLM has them.

    Args:
        drafts: draft tokens a request; without any there is no draft model.
        widened_at_load: whether vLLM widens dense weights to bf16 at load, as it does by default, rather than
            at each call (``VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD=0``). gfx950 widens none.
    """
    if architecture != "gfx942":
        return 0
    layers = BACKBONE_LAYERS + (DRAFT_LAYERS if drafts else 0)
    values = dense_values(tensor_parallel)
    codes = sum(values.values()) // CODE_VALUES
    if widened_at_load:  # the bytes stay beside vLLM's bf16
        return layers * (sum(values.values()) + codes)
    # A byte a value in place of two. vLLM still widens wo_a once, which it then holds beside its bytes.
    return layers * (2 * values["wo_a"] - sum(values.values()) + codes)


def step_bytes(architecture: str, tensor_parallel: int, drafts: int) -> int:
    """Bytes a rank of workspaces and symmetric memory: every step width that vLLM's default graph sizes reach
    has its own, of the target and of the draft."""
    a_row = STEP_BYTES_A_ROW if drafts else TARGET_BYTES_A_ROW
    rows = most_rows(architecture, tensor_parallel)
    return sum(reachable_widths(rows, drafts, rows + drafts)) * a_row[tensor_parallel]
