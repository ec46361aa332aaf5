# SPDX-License-Identifier: Apache-2.0
"""The FFN launch on the host: weights checked, memory made once a step width, arguments as fixed addresses.

A step width has a workspace and symmetric memory of its own, made before its first step and never freed,
so that a FULL CUDA graph can hold every address. Nothing is cleared between steps: hand-offs carry tags that
the kernel moves on. The kernel itself is ``kernels/ffn.py``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.models.common.amd.persistent.fail_stop import CONTROL_WORDS, FailStop
from vllm.models.common.amd.persistent.kernel_cache import KernelCache
from vllm.models.common.amd.persistent.peers import Group, PeerBackend, SymmetricMemory, symmetric_memory
from vllm.models.common.amd.persistent.timeline import Part, parts_of

from . import builds
from .geometry import HIDDEN, MIXES, MX_BLOCK, STREAMS, FfnGeometry, padded_share

# Polls of a wait before it gives up. A poll is a round trip past the L2 and a sleep of 64 cycles or more, a
# microsecond at least by that arithmetic, so a wait lasts some tens of seconds: longer than ranks are apart
# after one was stopped by a debugger's attach or a page fault, and finite. It must fit in 31 bits.
WAIT_LIMIT = 1 << 24
ALIGNMENT = 16
# "1": kernels are timeline builds; "0" as unset.
TIMELINE_VARIABLE = "VLLM_MONO_TIMELINE"
# Scale columns of the down projection come in groups of this many.
SCALE_GROUP = 8

STAGES = {
    1: ("the attention all-reduce", "a peer, as rank"),
    2: ("the hyper-connection mixes", "producer"),
    3: ("the collapsed rows", "slice"),
    4: ("the router's logits", "producer"),
    5: ("the experts' intermediate rows", "slot"),
    6: ("the MoE all-reduce", "a peer, as rank"),
}

# A kernel by its arguments by name and the stream.
Kernel = Callable[[dict[str, int], Any], None]
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
AnyWidth = TypeVar("AnyWidth")


@dataclass(frozen=True)
class FfnWeights:
    """One layer's tensors as the kernel reads them, by its arguments' names; shapes in ``expected``."""

    layer: str
    mix_projection: Tensor
    mix_scale: Tensor
    mix_base: Tensor
    norm_weight: Tensor
    gate_weight: Tensor
    gate_bias: Tensor
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    shared_w13: Tensor
    shared_w13_scale: Tensor
    shared_w2: Tensor
    shared_w2_scale: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "layer"}

    def check(self, tp: int, experts: int, picks: int, layout: str = "aiter_shuffle") -> None:
        """Refuse tensors that the kernel would read past or misread.

        Args:
            layout: the routed experts', of ``EXPERT_LAYOUTS``.

        Raises:
            ValueError: every fault at once, with the layer's name.
        """
        wanted = expected(FfnGeometry(1, tp, experts, picks), layout)
        faults = [
            fault
            for name, tensor in self.tensors().items()
            for fault in faults_of(name, tensor, *wanted[name])
        ]
        if faults:
            routed = any(fault.startswith(ROUTED) for fault in faults)
            way_out = f" (experts are read as {WAYS_OUT[layout]})" if routed else ""
            raise ValueError(f"FFN launch of {self.layer}: {'; '.join(faults)}{way_out}")


ROUTED = ("w13", "w2")
WAYS_OUT = {
    "aiter_shuffle": "AITER_MXFP4_BF16 leaves them: start with --moe-backend aiter",
    "row_major": "AITER_TRITON_MXFP4_BF16 and triton_kernels 3.8 leave them: start with --moe-backend aiter",
}


def expected(g: FfnGeometry, layout: str = "aiter_shuffle") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every weight, as vLLM loads them. Scales are E8M0 codes as bytes; those of routed
    experts in AITER's shuffle have experts and rows in one dimension."""
    bf16, f32, codes, fp8 = torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn
    blocks = HIDDEN // MX_BLOCK
    return {
        "mix_projection": ((MIXES, STREAMS * HIDDEN), f32),
        "mix_scale": ((3,), f32),
        "mix_base": ((MIXES,), f32),
        "norm_weight": ((HIDDEN,), bf16),
        "gate_weight": ((g.experts, HIDDEN), bf16),
        "gate_bias": ((g.experts,), f32),
        **_routed(g, layout),
        "shared_w13": ((2 * g.share, HIDDEN), fp8),
        "shared_w13_scale": ((2 * g.share // MX_BLOCK, blocks), codes),
        "shared_w2": ((HIDDEN, g.share), fp8),
        "shared_w2_scale": ((blocks, g.share // MX_BLOCK), codes),
    }


def _routed(g: FfnGeometry, layout: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Of the routed experts."""
    columns, experts, blocks = padded_share(g.share, layout), g.experts, HIDDEN // MX_BLOCK
    if layout == "row_major":
        return {
            "w13": ((experts, 2 * columns, HIDDEN // 2), torch.uint8),
            "w13_scale": ((experts, blocks, 2 * columns), torch.uint8),
            "w2": ((experts, HIDDEN, columns // 2), torch.uint8),
            "w2_scale": ((experts, columns // MX_BLOCK, HIDDEN), torch.uint8),
        }
    scale_columns = -(-(columns // MX_BLOCK) // SCALE_GROUP) * SCALE_GROUP
    fp4 = torch.float4_e2m1fn_x2
    return {
        "w13": ((experts, 2 * columns, HIDDEN // 2), fp4),
        "w13_scale": ((experts * 2 * columns, blocks), torch.uint8),
        "w2": ((experts, HIDDEN, columns // 2), fp4),
        "w2_scale": ((experts * HIDDEN, scale_columns), torch.uint8),
    }


def faults_of(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    found = []
    if tuple(tensor.shape) != shape:
        found.append(f"{name} has shape {tuple(tensor.shape)}, wanted {shape}")
    if tensor.dtype != dtype:
        widened = (tensor.dtype, dtype) == (torch.bfloat16, torch.float8_e4m3fn)
        way_out = ": set VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD=0" if widened else ""
        found.append(f"{name} is {tensor.dtype}, wanted {dtype}{way_out}")
    if not tensor.is_contiguous():
        found.append(f"{name} has strides {tensor.stride()}, wanted contiguous memory")
    if tensor.data_ptr() % ALIGNMENT:
        found.append(f"{name} starts at {tensor.data_ptr():#x}, wanted a multiple of {ALIGNMENT}")
    return found


@dataclass
class Width:
    """What steps of one row count use; kept for as long as the process, since captured graphs hold it."""

    kernel: Kernel
    workspace: Tensor
    symmetric: SymmetricMemory
    geometry: FfnGeometry


def timeline_asked() -> bool:
    """Whether the process is told to take timeline builds.

    Raises:
        ValueError: it is told something else than yes or no.
    """
    told = os.environ.get(TIMELINE_VARIABLE, "0")
    if told not in ("0", "1"):
        raise ValueError(f"{TIMELINE_VARIABLE} is {told!r}, wanted 1 for timeline builds, or 0 or unset")
    return told == "1"


@dataclass(frozen=True)
class Deployment:
    """One rank's place and what its kernels are for.

    Args:
        group: the TP group.
        device: this rank's GPU.
        arch: its architecture.
        experts, picks: the routing.
        layers: the layers of a step that take the launch, in order.
        timeline: take timeline builds, whose workgroups keep clocks; default, what the process is told.
    """

    group: Group
    device: torch.device
    arch: str
    experts: int
    picks: int
    layers: Sequence[str]
    timeline: bool = field(default_factory=timeline_asked)

    def shape(self, rows: int) -> tuple[int, int, int, int, bool]:
        """What a geometry of a step width is made from."""
        return rows, self.group.size, self.experts, self.picks, self.timeline


class FfnLaunch:
    """The FFN launch of one rank.

    Args:
        deployment: where and for what.
        make_kernel: gives the kernel of a geometry, compiled; default, from the kernel cache of the process.
        peer_backend: how symmetric memory is had; default, what the process is told.
        sizes: bytes of workspace and symmetric memory of a geometry; default, the kernel's own layouts.
    """

    def __init__(
        self,
        deployment: Deployment,
        make_kernel: Callable[[FfnGeometry], Kernel] | None = None,
        peer_backend: PeerBackend | None = None,
        sizes: Callable[[FfnGeometry], tuple[int, int]] | None = None,
        record: Any = None,
    ) -> None:
        self.deployment = deployment
        self._make_kernel = make_kernel or KernelsOfProcess("ffn", deployment.arch)
        self._peer_backend = peer_backend
        self._sizes = sizes or _sizes
        self._widths: dict[int, Width] = {}
        if record is None:
            record = importlib.import_module("vllm.models.common.amd.persistent.handoff").ErrorRecord
        name = f"DeepSeek-V4.1 FFN launch ({deployment.experts} experts)"
        self.fail_stop = FailStop(deployment.group.rank, name, deployment.layers, STAGES, record)

    def prepare(self, rows: int) -> None:
        """Make what steps of ``rows`` rows need, once. Collective over the TP group, never in a capture.

        Raises:
            KernelBuildError: the kernel cannot be compiled or kept.
            PeerMemoryError: some rank has no symmetric memory.
        """
        if rows in self._widths:
            return
        d = self.deployment
        geometry = FfnGeometry(*d.shape(rows))
        workspace_bytes, symmetric_bytes = self._sizes(geometry)
        # The kernel first: symmetric memory is made by all ranks together, so that no rank launches, and
        # waits, while another still compiles.
        kernel = self._make_kernel(geometry)
        workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=d.device)
        symmetric = symmetric_memory(
            symmetric_bytes, d.group, d.device, self._peer_backend, start=start_words()
        )
        control = symmetric.local[: 4 * CONTROL_WORDS].view(torch.int32)
        self.fail_stop.add(rows, control)
        self._widths[rows] = Width(kernel, workspace, symmetric, geometry)

    def timeline(self, rows: int) -> list[Part]:
        """When the workgroups began each part of the last launch of ``rows`` rows; waits for the device.

        Raises:
            RuntimeError: these are no timeline builds, or the width was not prepared.
            ValueError: nothing was launched.
        """
        width = width_of(self._widths, rows, "FFN launch")
        return read_timeline(width.geometry, "workspace", width.workspace)

    def __call__(
        self,
        weights: FfnWeights,
        part: Tensor,
        residual: Tensor,
        post_mix: Tensor,
        res_mix: Tensor,
        pre_mix: Tensor,
    ) -> Outputs:
        """The FFN half of a layer.

        Args:
            weights: the layer's, checked.
            part: bf16 [rows, 5120], this rank's unreduced wo_b output.
            residual: bf16 [rows, 4, 5120], of the attention seam.
            post_mix, res_mix, pre_mix: f32 [rows, 4, 1], [rows, 4, 4], [rows, 4], of the attention seam.

        Returns:
            x bf16 [rows, 5120], and residual, post_mix, res_mix, pre_mix of the FFN seam as the inputs are.
        """
        rows = part.shape[0]
        width = width_of(self._widths, rows, "FFN launch")
        if part.dtype != torch.bfloat16 or residual.dtype != torch.bfloat16:
            raise TypeError(
                f"FFN launch: part {part.dtype}, residual {residual.dtype}, wanted torch.bfloat16"
            )
        outputs = (
            torch.empty_like(part),
            torch.empty_like(residual),
            torch.empty_like(post_mix),
            torch.empty_like(res_mix),
            torch.empty_like(pre_mix),
        )
        out, residual_out, post_out, comb_out, pre_out = outputs
        tensors = {
            "partial": part, "residual_in": residual, "post_in": post_mix, "comb_in": res_mix,
            "pre_in": pre_mix, **weights.tensors(), "residual_out": residual_out, "post_out": post_out,
            "comb_out": comb_out, "pre_out": pre_out, "out": out,
            "workspace": width.workspace, "peers": width.symmetric.addresses,
        }  # fmt: skip
        arguments = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        arguments["rank"] = self.deployment.group.rank
        width.kernel(arguments, stream_of(part))
        if weights.layer == self.deployment.layers[-1]:
            self.fail_stop.watch(rows)
        return outputs


def start_words() -> list[int]:
    """The int32 words that symmetric memory starts with: the first launch's tag, the wait limit, no error."""
    return [1, WAIT_LIMIT, 0, 0]


def stream_of(tensor: Tensor) -> Any:
    """What a launch on ``tensor`` is queued on; None on a CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def width_of(widths: Mapping[int, AnyWidth], rows: int, what: str) -> AnyWidth:
    """What steps of ``rows`` rows use. Raises ``RuntimeError`` when the width was not prepared."""
    width = widths.get(rows)
    if width is None:
        raise RuntimeError(f"{what}: no memory was made for steps of {rows} rows (prepare)")
    return width


def read_timeline(geometry: FfnGeometry, layout: str, workspace: Tensor) -> list[Part]:
    """The parts of a launch from its workspace, whose layout is that function of ``regions``.

    Raises:
        RuntimeError: this is no timeline build.
        ValueError: nothing was launched.
    """
    if not geometry.timeline:
        raise RuntimeError(f"no timeline build was made: start the process with {TIMELINE_VARIABLE}=1")
    regions = importlib.import_module(f"{__package__}.regions")
    region = getattr(regions, layout)(geometry).timeline
    words = workspace[region.offset : region.offset + region.size].view(torch.int64)
    return parts_of(words.view(region.shape).tolist(), geometry.stamps)


def _sizes(geometry: FfnGeometry) -> tuple[int, int]:
    regions = importlib.import_module(f"{__package__}.regions")
    return regions.workspace(geometry).size, regions.symmetric(geometry).size


class KernelsOfProcess:
    """Kernels of a kind from the cache that the environment names."""

    def __init__(self, kind: str, arch: str) -> None:
        self.kind, self.arch = kind, arch
        self.cache = KernelCache.of_process()

    def __call__(self, geometry: FfnGeometry) -> Kernel:
        launcher = self.cache.launcher(builds.kernel_build(self.kind, geometry, self.arch))
        kind = builds.KINDS[self.kind]
        struct = getattr(importlib.import_module(kind.module), kind.struct)

        def launch(arguments: dict[str, int], stream: Any) -> None:
            launcher(struct(**arguments), stream=stream)

        return launch
