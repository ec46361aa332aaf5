# SPDX-License-Identifier: Apache-2.0
"""What the layer test puts into each of vLLM's workers, which import it by ``--worker-extension-cls``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from rocm_overlay.measure.layer_recorder import LayerRecorder
from rocm_overlay.measure.layer_weights import clear_padding, fill_floats
from rocm_overlay.measure.record_layers import LOAD_FORMAT


@register_model_loader(LOAD_FORMAT)
class LayerTestLoader(DummyModelLoader):  # type: ignore[misc]
    """Dummy weights of a checkpoint's size, with zeros where the routed experts are padded, as loaded ones.

    vLLM's path computes the padding with the rest, and the kernels leave it out.
    """

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        super().load_weights(model, model_config)
        fill_floats(model)
        clear_padding(model)


class RecordingWorker:
    """Joined to vLLM's worker; each method is an RPC to all ranks.

    Every rank's outputs are whole, so that the first one's are kept.
    """

    rank: int
    get_model: Any

    def begin_layer_recording(self, prompts: list[int], steps: int) -> None:
        """Hook the model's layers."""
        if self.rank == 0:
            self._layer_recorder = LayerRecorder(self.get_model(), prompts, steps)

    def end_layer_recording(self, file: str) -> list[str]:
        """Write what was recorded; its problems."""
        return self._layer_recorder.finish(Path(file)) if self.rank == 0 else []
