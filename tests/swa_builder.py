# SPDX-License-Identifier: Apache-2.0
"""vLLM's ROCm SWA metadata builder with the gate off and on: what differs in the object that it returns.

Called in a worker process that has vLLM. The builder is the base's class with its buffers set by hand,
since its own constructor wants a model's whole configuration.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from rocm_overlay.bench_swa import WINDOW, Batch
from tests import swa_cases

MAX_TOKENS = 64


def _builder(batch: Batch, drafts: int) -> Any:
    from vllm.models.deepseek_v41.amd import rocm

    width = swa_cases.width_of(drafts, noncausal=True)

    def int32(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    builder = object.__new__(rocm.DeepseekV41ROCMAiterSparseSWAMetadataBuilder)
    fields = {
        "device": torch.device("cpu"),
        "pcp_size": 1,
        "max_image_tokens": 0,
        "block_size": batch.block_size,
        "window_size": WINDOW,
        "decode_threshold": 1 + drafts,
        "is_dspark": True,
        "noncausal_index_width": width,
        "decode_swa_indices_noncausal": None,
        "_max_tokens": MAX_TOKENS,
        "_layer_types": set(),
        "_use_aiter_sparse_mla": False,
        "token_to_req_indices": int32(MAX_TOKENS),
        "decode_swa_indices": int32(MAX_TOKENS, 1, WINDOW),
        "decode_swa_lens": int32(MAX_TOKENS) + 5,
        "is_valid_token": torch.zeros(MAX_TOKENS, dtype=torch.bool),
        "no_replay_start": int32(MAX_TOKENS),
        "decode_swa_ragged_indices_buffer": int32(MAX_TOKENS * width),
        "decode_swa_ragged_indptr_buffer": int32(MAX_TOKENS + 1),
    }
    vars(builder).update(fields)
    return builder


def _common(batch: Batch, *, noncausal: bool) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = batch.query_start_loc
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=batch.seq_lens,
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=batch.num_rows,
        max_query_len=int((starts[1:] - starts[:-1]).max()),
        max_seq_len=int(batch.seq_lens.max()),
        block_table_tensor=batch.block_table,
        slot_mapping=batch.slot_mapping,
        causal=not noncausal,
    )


def _build(batch: Batch, *, drafts: int, noncausal: bool, replay: bool, gate: bool) -> dict[str, Any]:
    """The returned object's fields, and how many launches of ours made it."""
    from vllm.models.deepseek_v41.amd import ops
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    builder, launches, launch = _builder(batch, drafts), [], swa_decode_meta.launch

    def counted(*args: Any, **kwargs: Any) -> None:
        launches.append(1)
        launch(*args, **kwargs)

    ops.record_monokernel(SimpleNamespace(kernel_config=SimpleNamespace(monokernel=gate)))
    swa_decode_meta.launch = counted
    try:
        made = builder.build(
            0, _common(batch, noncausal=noncausal), replay_start=batch.replay_start if replay else None
        )
    finally:
        swa_decode_meta.launch = launch
    found = {name: _comparable(value, builder) for name, value in vars(made).items()}
    # Past its end the ragged buffer holds whatever the copy brought, which no reader reads.
    end = int(made.decode_swa_ragged_indptr[-1])
    found["decode_swa_ragged_indices"]["values"] = made.decode_swa_ragged_indices[:end].tolist()
    return {"type": type(made).__name__, "fields": found, "launches": len(launches)}


def _comparable(value: Any, builder: Any) -> Any:
    """A tensor as its values, form and the builder's buffer that it lies in; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    buffers = {
        buffer.data_ptr(): name for name, buffer in vars(builder).items() if isinstance(buffer, torch.Tensor)
    }
    return {
        "values": value.tolist(),
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "buffer": buffers.get(value.data_ptr()),
    }


def compare(seed: int, *, drafts: int, noncausal: bool, replay: bool, count: int) -> list[str]:
    """Build ``count`` random batches with the gate off and on: a line for each that differs."""
    rng, failed = random.Random(f"{seed} {drafts} {noncausal} {replay}"), []
    for index in range(count):
        batch = swa_cases.random_batch(rng, max_rows=14, drafts=drafts, noncausal=noncausal)
        case = {"drafts": drafts, "noncausal": noncausal, "replay": replay}
        theirs, ours = (_build(batch, gate=gate, **case) for gate in (False, True))
        wrong = [name for name, value in theirs["fields"].items() if ours["fields"].get(name) != value]
        wrong += ["type"] if theirs["type"] != ours["type"] else []
        wrong += ["launches"] if (theirs["launches"], ours["launches"]) != (0, 1) else []
        if wrong:
            failed.append(f"batch {index}: {batch.num_rows} rows: {', '.join(wrong)}")
    return failed


def compare_spoilt(field: str, **case: Any) -> list[str]:
    """``compare`` with one field of our returned object left out, so that it keeps its default."""
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    build = swa_decode_meta.build

    def spoilt(builder: Any, prefix: int, cam: Any, fast: bool, replay: Any, metadata_cls: type) -> Any:
        def make(**fields: Any) -> Any:
            fields.pop(field)
            return metadata_cls(**fields)

        return build(builder, prefix, cam, fast, replay, make)

    swa_decode_meta.build = spoilt
    try:
        return compare(1, **case)
    finally:
        swa_decode_meta.build = build
