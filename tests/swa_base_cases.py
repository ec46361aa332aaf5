# SPDX-License-Identifier: Apache-2.0
"""The SWA batches of the base's own kernel test, with its own reference, a few at a time.

The base's test runs 300 of them in one function, which takes minutes under Triton's interpreter. Its file
is imported unchanged, so batches, buffers and reference are the base's; only the count is chosen here.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import on_cpu
import torch

SEED = 1234
DRAFTS = 5
RUBBISH = -7


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("base_swa_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(path: str, *, noncausal: bool, count: int) -> list[str]:
    """The first ``count`` batches of the base's test file both ways: a line for each that differs."""
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta
    from vllm.v1.attention.backends.mla.compressor_utils import get_dspark_swa_index_width

    with on_cpu.CudaOnCpu():
        base = _load(path)
        width = get_dspark_swa_index_width(base.WINDOW, DRAFTS) if noncausal else base.WINDOW
        generator = torch.Generator().manual_seed(SEED)
        failed = []
        for index in range(count):
            batch = None
            while batch is None:
                batch = base._swa_case(generator, swa_decode_meta.MAX_ROWS)
            buffers = base._swa_buffers(width, noncausal)
            wrong = _differences(base, swa_decode_meta, batch, buffers)
            if wrong:
                failed.append(f"batch {index}: {batch['n']} rows: {', '.join(wrong)}")
    return failed


def _readable(buffers: dict, rows: int) -> dict[str, torch.Tensor]:
    """What a reader reads, as copies."""
    ends = {"is_valid": rows, "indices": rows, "lens": None, "indptr": rows + 1}
    ends["ragged"] = int(buffers["indptr"][rows])
    return {name: buffers[name][:end].clone() for name, end in ends.items()}


def _differences(base: ModuleType, ours: ModuleType, batch: dict, buffers: dict) -> list[str]:
    rows = batch["n"]
    base._swa_old_ops(batch, buffers)
    expected = _readable(buffers, rows)
    buffers["is_valid"].logical_not_()
    for name in ("indices", "lens", "ragged", "indptr"):
        buffers[name].fill_(RUBBISH)
    inputs = ("query_start_loc", "seq_lens", "token_to_req", "block_table", "replay_start")
    outputs = ("indices", "lens", "ragged", "indptr")
    ours.launch(
        batch["slot_mapping"],
        buffers["is_valid"][:rows],
        *(buffers[name] for name in outputs),
        *(batch[name] for name in inputs),
        rows,
        base.WINDOW,
        batch["block_size"],
        noncausal=buffers["noncausal"],
    )
    actual = _readable(buffers, rows)
    return [name for name in expected if not torch.equal(expected[name], actual[name])]
