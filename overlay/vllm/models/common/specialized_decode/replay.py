# SPDX-License-Identifier: Apache-2.0
"""Counting the steps that run none of the model's Python: the replays of FULL CUDA graphs.

The model runner asks the model's state to prepare the attention metadata of every step, on the host and
before the step is launched. That is where a replay can be counted without a kernel in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.models.common.specialized_decode.metrics import StepCounters


def counting(state: type[Any], counters: Callable[[], StepCounters | None]) -> type[Any]:
    """A model state like ``state`` that counts the replays of FULL graphs.

    Args:
        state: the model's ``ModelState``.
        counters: gives the counters, None where nothing is decoded on kernels of the model's own.
    """

    class CountingModelState(state):  # type: ignore[misc]
        def prepare_attn(
            self,
            input_batch: Any,
            cudagraph_mode: CUDAGraphMode,
            *rest: Any,
            for_capture: bool = False,
            **options: Any,
        ) -> dict[str, Any]:
            if cudagraph_mode is CUDAGraphMode.FULL and not for_capture and (found := counters()) is not None:
                found.replayed(input_batch.num_tokens_after_padding, input_batch.num_tokens)
            prepared: dict[str, Any] = super().prepare_attn(
                input_batch, cudagraph_mode, *rest, for_capture=for_capture, **options
            )
            return prepared

    return CountingModelState
