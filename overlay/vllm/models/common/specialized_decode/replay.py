# SPDX-License-Identifier: Apache-2.0
"""The steps that run none of the model's Python: the replays of FULL CUDA graphs.

The model runner asks the target's model state to prepare the attention metadata of every step, on the host
and before the step is launched. The speculator replays its own graphs, and says so there. In both places a
replay can be counted, or rejected in strict mode, without a kernel in the graph.
"""

from __future__ import annotations

import threading
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.models.common.specialized_decode.decode import DRAFT, TARGET, current

_preparing = threading.local()


def counting(state: type[Any]) -> type[Any]:
    """A model state like ``state``, the model's ``ModelState``, that counts the target's replays and, made
    once every layer is loaded, has each decode settle what its layers run, and then prepare for it."""

    class CountingModelState(state):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            # A process may load another model later, which would then be the role's current one.
            self.decodes = {role: current(role) for role in (TARGET, DRAFT)}
            here = [decode for decode in self.decodes.values() if decode is not None]
            for decode in here:
                decode.settle()
            for decode in here:  # not before all can: what cannot be settled ends the start
                decode.prepare_ahead()

        def prepare_attn(
            self,
            input_batch: Any,
            cudagraph_mode: CUDAGraphMode,
            *rest: Any,
            for_capture: bool = False,
            **options: Any,
        ) -> dict[str, Any]:
            _preparing.draft = self.decodes[DRAFT]
            if (
                cudagraph_mode is CUDAGraphMode.FULL
                and not for_capture
                and (decode := self.decodes[TARGET]) is not None
            ):
                decode.replayed(input_batch.num_tokens_after_padding, input_batch.num_tokens)
            prepared: dict[str, Any] = super().prepare_attn(
                input_batch, cudagraph_mode, *rest, for_capture=for_capture, **options
            )
            return prepared

    return CountingModelState


def draft_replayed(width: int, rows: int) -> None:
    """Count a replay of the draft's FULL graph of ``width`` rows, for a step of ``rows``.

    The draft is that of the target whose step this thread prepared last: the speculator, which knows no
    decode, drafts behind it."""
    if (decode := getattr(_preparing, "draft", None)) is not None:
        decode.replayed(width, rows)
