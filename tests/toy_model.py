# SPDX-License-Identifier: Apache-2.0
"""A model of three layers that decodes on "kernels" of its own: the worked example of
docs/design/specialized_decode.md.
 A layer multiplies its input by a weight and adds a bias. The kernels do the same to a whole layer, or only
the addition. They run on the CPU, and leave a trace of what they were asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.models.common.specialized_decode.decode import Decline, Launch, LayerPlan, SpecializedDecode, Step
from vllm.models.common.specialized_decode.spec import Check, DecodeSpec, Device
from vllm.models.common.specialized_decode.weights import gather

WIDTH = 4
MAX_ROWS = 8


# Step 1 of adding a model: say what its kernels can run.


def _bias_is_finite(config: VllmConfig) -> str | None:
    bias = config.model_config.hf_config.bias
    return None if abs(bias) != float("inf") else f"bias: {bias}, wanted a finite one"


SPEC = DecodeSpec(
    name="toy decode",
    architectures=frozenset({"ToyForCausalLM"}),
    dtypes=frozenset({torch.float32}),
    kv_cache_dtypes=frozenset({"auto"}),
    max_rows={3: {1: MAX_ROWS // 2}, 4: {1: MAX_ROWS}},
    resident_workgroups=2,
    graph_modes=frozenset({"NONE", "FULL"}),
    runs_alongside=frozenset({"prefix caching", "torch.compile"}),
    checks=(Check("the bias", _bias_is_finite),),
    device=lambda: Device(cdna_version=4, compute_units=2),
)


# Step 2: say how to read a step, where the weights are and how to open the kernels.


@dataclass(frozen=True)
class ToyMetadata:
    """What the toy's attention backend would say of a step."""

    num_prefills: int
    whole_layers: bool = True


class ToyKernels:
    """A trace instead of a device: (what, rows) of every launch, and the widths made ready."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.launches: list[tuple[str, int]] = []

    def whole_layer(self, weights: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        self.launches.append(("whole", x.shape[0]))
        return torch.addcmul(weights["bias"], x, weights["scale"])

    def add(self, weights: Mapping[str, torch.Tensor], part: torch.Tensor) -> torch.Tensor:
        self.launches.append(("part", part.shape[0]))
        return part.add(weights["bias"])


class ToyDecode(SpecializedDecode[ToyKernels]):
    """The decode of one toy model."""

    def open_kernels(self) -> ToyKernels:
        return ToyKernels()

    def prepare_width(self, kernels: ToyKernels, rows: int) -> None:
        kernels.widths.append(rows)

    def read_step(self, metadata: Mapping[str, Any], rows: int) -> tuple[Decline | None, Decline | None]:
        toy = metadata.get("toy")
        if toy is None:
            missing = Decline("metadata missing", "toy", expected=False)
            return missing, missing
        if toy.num_prefills:
            prefill = Decline("not decode only", f"{toy.num_prefills} prefills")
            return prefill, prefill
        return None if toy.whole_layers else Decline("part only"), None


# Step 3: ask for the step where the layer would run, and go on as before where there is none.


class ToyLayer(torch.nn.Module):
    """One layer: ``x * scale + bias``, f32 [rows, WIDTH]."""

    def __init__(self, index: int, launch: Launch | None, decode: ToyDecode) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((WIDTH,), 2.0 + index), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.weights: Mapping[str, torch.Tensor] = {}
        self.launch, self.decode = launch, decode
        why = "" if launch is Launch.WHOLE else "an odd scale"
        self.plan = LayerPlan(f"toy.layers.{index}", index, launch, why)
        decode.add_layer(self.plan, self if launch else None)

    def take_weights(self) -> None:
        self.weights = gather(self, {"scale": "scale", "bias": "bias"})
        if self.scale.shape != (WIDTH,):
            raise ValueError(f"scale {tuple(self.scale.shape)}, wanted {(WIDTH,)}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step: Step | None
        if self.launch is Launch.WHOLE and (step := self.decode.whole_step(x.shape[0])) is not None:
            assert step.metadata["toy"].num_prefills == 0
            return self.decode.kernels.whole_layer(self.weights, x)
        part = x * self.scale
        if self.launch is Launch.PART and self.decode.part_step(x.shape[0]) is not None:
            return self.decode.kernels.add(self.weights, part)
        return part + self.bias


class ToyModel(torch.nn.Module):
    """Three layers: one of each launch, and one on vLLM's path."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__()
        SPEC.require(vllm_config, "--specialized-decode")
        self.decode = ToyDecode(SPEC, "target", vllm_config)
        launches = (Launch.WHOLE, Launch.PART, None)
        self.layers = torch.nn.ModuleList(
            ToyLayer(i, launch, self.decode) for i, launch in enumerate(launches)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
