# SPDX-License-Identifier: Apache-2.0
"""The one-launch SWA metadata against its definition in plain numbers, under Triton's interpreter.

test_dsv41_gfx942_decode_meta.py compares the same kernel with the operations that it replaces, on a GPU.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from tests.models.specialized_decode import fake_rocm

# Triton decides when a kernel is defined whether to interpret it.
os.environ["TRITON_INTERPRET"] = "1"
if torch.version.hip is None:
    fake_rocm.install("gfx950")

from tests.kernels.models.amd import swa_ragged  # noqa: E402
from tests.kernels.models.amd.swa_ragged import Batch, Request, expected  # noqa: E402


def random_batch(seed: int, noncausal: bool) -> Batch:
    """Requests of one to five rows, tables with null and negative entries, padded rows, a tail."""
    draw = random.Random(seed)
    window, block_size = draw.choice([4, 16, 24]), draw.choice([4, 16, 32])
    requests = []
    for _ in range(draw.randint(1, 5)):
        rows = draw.randint(1, 5)
        length = rows + draw.randint(0, 3 * window)
        blocks = [draw.randint(-2, 9) for _ in range(length // block_size + 1)]
        requests.append(Request(rows, length, draw.choice([0, 0, length, draw.randint(0, length)]), blocks))
    own = sum(request.rows for request in requests)
    return Batch(
        window=window,
        width=window + 8 if noncausal else window,
        block_size=block_size,
        noncausal=noncausal,
        requests=requests,
        padded=[row for row in range(own) if draw.random() < 0.15],
        tail=draw.randint(0, 3),
    )


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "draft"])
@pytest.mark.parametrize("seed", range(12))
def test_random_batches_are_what_the_definition_says(seed: int, noncausal: bool) -> None:
    batch = random_batch(seed, noncausal)
    assert swa_ragged.launch(batch.plain()) == expected(batch)


def one_batch(**changes: Any) -> Batch:
    fields: dict[str, Any] = {
        "window": 4,
        "width": 4,
        "block_size": 4,
        "noncausal": False,
        "requests": [Request(3, 7, 0, [5, 9])],
        "padded": [1],
        "tail": 0,
    }
    return Batch(**{**fields, **changes})


def test_a_batch_worked_by_hand() -> None:
    """Rows at positions 4, 5 and 6 of blocks 5 and 9: slots 20 to 23 and 36 to 38; the second is padded."""
    assert swa_ragged.launch(one_batch().plain()) == {
        "is_valid": [True, False, True],
        "indices": [[21, 22, 23, 36], [-1, -1, -1, -1], [23, 36, 37, 38]],
        "lens": [4, 0, 4, 0, 0, 0, 0, 0],
        "indptr": [0, 4, 4, 8],
        "ragged": [21, 22, 23, 36, 23, 36, 37, 38],
    }


@pytest.mark.parametrize("rows", [0, 49])
def test_a_launch_of_rows_that_the_kernel_does_not_take_is_refused(rows: int) -> None:
    batch = one_batch(requests=[Request(1, 9, 0, [3, 4, 5])] * rows, padded=[])
    with pytest.raises(ValueError, match=f"takes 1 to 48 rows, got {rows}"):
        swa_ragged.launch(batch.plain())
