# SPDX-License-Identifier: Apache-2.0
"""SWA metadata as plain numbers: what the specification says of a batch, and what our kernel writes for it.

``expected`` is arithmetic on lists, written from the definition of a window and from nothing else: no
tensor, no kernel and none of vLLM's code has part in it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

UNUSED_LENGTHS = 5
RUBBISH = -7
PADDED = -1


@dataclass(frozen=True)
class Request:
    """``rows`` rows at the end of ``length`` tokens; the window's KV exists from ``replay_start`` on."""

    rows: int
    length: int
    replay_start: int
    blocks: list[int]


@dataclass(frozen=True)
class Batch:
    """A decode batch in plain values. ``padded`` rows, by index, have no slot; ``tail`` more follow."""

    window: int
    width: int
    block_size: int
    noncausal: bool
    requests: list[Request]
    padded: list[int]
    tail: int

    @property
    def num_rows(self) -> int:
        return sum(request.rows for request in self.requests) + self.tail

    @property
    def rows(self) -> list[tuple[Request, int]]:
        """Each row's request and its place in it, padded rows after the last request included."""
        own = [(request, place) for request in self.requests for place in range(request.rows)]
        return own + [(self.requests[0], 0)] * self.tail

    def is_padded(self, row: int) -> bool:
        return row in self.padded or row >= self.num_rows - self.tail

    def plain(self) -> dict[str, Any]:
        """The batch as JSON can hold it."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Batch:
        return cls(**{**plain, "requests": [Request(**one) for one in plain["requests"]]})


def expected(batch: Batch) -> dict[str, list]:
    """What a reader must find, by definition."""
    dense, lens = [], []
    for row, (request, place) in enumerate(batch.rows):
        first, last = _window(batch, request, place)
        if batch.is_padded(row):
            first, last = 0, -1
        slots = [
            request.blocks[position // batch.block_size] * batch.block_size + position % batch.block_size
            for position in range(first, last + 1)
        ]
        dense.append(slots + [-1] * (batch.width - len(slots)))
        lens.append(last - first + 1)
    kept = [[slot for slot in row if slot >= 0] for row in dense]
    return {
        "is_valid": [not batch.is_padded(row) for row in range(batch.num_rows)],
        "indices": dense,
        "lens": lens + [0] * UNUSED_LENGTHS,
        "indptr": [sum(map(len, kept[:row])) for row in range(batch.num_rows + 1)],
        "ragged": [slot for row in kept for slot in row],
    }


def _window(batch: Batch, request: Request, place: int) -> tuple[int, int]:
    """First and last position of a row's keys; the last is below the first where there are none."""
    context = request.length - request.rows
    if batch.noncausal:
        return max(context - batch.window, 0), request.length - 1
    position = context + place
    return max(position - batch.window + 1, request.replay_start, 0), position


def launch(plain: dict[str, Any]) -> dict[str, list]:
    """What the kernel writes for the batch: the same fields, read as a reader reads them."""
    import torch
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    batch = Batch.of(plain)
    rows, requests = batch.num_rows, batch.requests

    def int32(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def rubbish(*shape: int) -> torch.Tensor:
        return torch.full(shape, RUBBISH, dtype=torch.int32)

    most = max((len(request.blocks) for request in requests), default=0)
    starts = [sum(request.rows for request in requests[:count]) for count in range(len(requests) + 1)]
    owners = [index for index, request in enumerate(requests) for _ in range(request.rows)]
    slots = [PADDED if batch.is_padded(row) else row for row in range(rows)]
    valid = torch.tensor([slot < 0 for slot in slots], dtype=torch.bool)
    indices, lens = rubbish(rows, 1, batch.width), rubbish(rows + UNUSED_LENGTHS)
    ragged, indptr = rubbish(rows * batch.width), rubbish(rows + 1)
    swa_decode_meta.launch(
        torch.tensor(slots, dtype=torch.int64), valid, indices, lens, ragged, indptr, int32(starts),
        int32([request.length for request in requests]), int32(owners + [0] * batch.tail),
        int32([request.blocks + [0] * (most - len(request.blocks)) for request in requests]),
        int32([request.replay_start for request in requests]),
        rows, batch.window, batch.block_size, noncausal=batch.noncausal,
    )  # fmt: skip
    return {
        "is_valid": valid.tolist(),
        "indices": indices[:, 0].tolist(),
        "lens": lens.tolist(),
        "indptr": indptr.tolist(),
        "ragged": ragged[: int(indptr[-1])].tolist(),
    }
