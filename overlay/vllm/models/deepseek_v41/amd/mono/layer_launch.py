# SPDX-License-Identifier: Apache-2.0
"""Whole layers on the host: the attention front, what vLLM runs behind it, and the attention back.

As the FFN launch (``ffn_launch``): weights checked, memory made once a step width, arguments as fixed
addresses. The two kernels have a workspace and tags of their own, since a launch writes every word of its
mailboxes. What the front hands to the back lies in memory of the width, as captured graphs need it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.models.common.amd.persistent.epoch import FIRST_TAG
from vllm.models.common.amd.persistent.fail_stop import CONTROL_WORDS, FailStop
from vllm.models.common.amd.persistent.peers import PeerBackend, SymmetricMemory, symmetric_memory
from vllm.models.common.amd.persistent.timeline import Part

from .ffn_launch import (
    STAGES,
    Deployment,
    FfnWeights,
    Kernel,
    KernelsOfProcess,
    Outputs,
    faults_of,
    read_timeline,
    start_words,
    stream_of,
    width_of,
)
from .geometry import (
    GROUP_K,
    HEAD_DIM,
    HIDDEN,
    MIXES,
    MX_BLOCK,
    QKV,
    QUERY_RANK,
    ROTARY,
    SELECTED,
    STREAMS,
    WINDOW,
    BackGeometry,
    FfnGeometry,
    FrontGeometry,
)

FRONT_STAGES = {
    1: ("the hyper-connection mixes", "producer"),
    2: ("the collapsed rows", "slice"),
    3: ("the query rank and key", "producer"),
}
BACK_STAGES = STAGES | {
    7: ("the attended heads", "block"),
    8: ("the output projection's ranks", "producer"),
}
# Loads of records are of 16 bytes.
CACHE_ALIGNMENT = 16
RATIOS = (0, 1, 2)


@dataclass(frozen=True)
class LayerWeights:
    """One layer's tensors as the kernels read them, by their arguments' names; shapes in ``expected``. The
    ``mix_*`` and ``norm_weight`` are the attention's; the FFN's are in ``ffn``.

    Args:
        layer: its name.
        ratio: positions of a compressed key, 0 for a layer without compressed keys.
        ffn: the FFN half's.
    """

    layer: str
    ratio: int
    ffn: FfnWeights
    mix_projection: Tensor
    mix_scale: Tensor
    mix_base: Tensor
    norm_weight: Tensor
    wqkv: Tensor
    wqkv_scale: Tensor
    query_norm: Tensor
    key_norm: Tensor
    wq_b: Tensor
    wq_b_scale: Tensor
    wo_a: Tensor
    wo_a_scale: Tensor
    wo_b: Tensor
    wo_b_scale: Tensor
    sink: Tensor
    cos_sin: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The attention's tensors by name."""
        own = {field.name for field in fields(self)} - {"layer", "ratio", "ffn"}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in own}

    def check(self, tp: int, experts: int, picks: int, layout: str = "aiter_shuffle") -> None:
        """Refuse tensors that the kernels would read past or misread.

        Args:
            layout: the routed experts', of ``EXPERT_LAYOUTS``.

        Raises:
            ValueError: every fault of the attention, or of the FFN, at once, with the layer's name.
        """
        wanted = expected(tp)
        faults = [
            fault
            for name, tensor in self.tensors().items()
            if name in wanted
            for fault in faults_of(name, tensor, *wanted[name])
        ]
        heads = BackGeometry(1, tp).heads
        if self.sink.dim() != 1 or self.sink.shape[0] < heads:
            faults.append(f"sink has shape {tuple(self.sink.shape)}, wanted one of at least {heads}")
        if self.cos_sin.dim() != 2 or self.cos_sin.shape[1] != ROTARY:
            faults.append(f"cos_sin has shape {tuple(self.cos_sin.shape)}, wanted positions x {ROTARY}")
        for name, tensor in (("sink", self.sink), ("cos_sin", self.cos_sin)):
            faults += faults_of(name, tensor, tuple(tensor.shape), torch.float32)
        if self.ratio not in RATIOS:
            faults.append(f"compress ratio {self.ratio}, wanted {', '.join(map(str, RATIOS))}")
        if faults:
            raise ValueError(f"attention of {self.layer}: " + "; ".join(faults))
        self.ffn.check(tp, experts, picks, layout)


def expected(tp: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every attention weight of fixed size, as vLLM loads them."""
    bf16, f32, fp8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    back = BackGeometry(1, tp)
    queries, ranks = back.heads * HEAD_DIM, back.rank_columns

    def linear(name: str, outputs: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        codes = (outputs // MX_BLOCK, k // MX_BLOCK)
        return {name: ((outputs, k), fp8), f"{name}_scale": (codes, torch.uint8)}

    return {
        "mix_projection": ((MIXES, STREAMS * HIDDEN), f32),
        "mix_scale": ((3,), f32),
        "mix_base": ((MIXES,), f32),
        "norm_weight": ((HIDDEN,), bf16),
        "query_norm": ((QUERY_RANK,), bf16),
        "key_norm": ((HEAD_DIM,), bf16),
        **linear("wqkv", QKV, HIDDEN),
        **linear("wq_b", queries, QUERY_RANK),
        **linear("wo_a", ranks, GROUP_K),
        **linear("wo_b", HIDDEN, ranks),
    }


class Keys(NamedTuple):  # made for every layer of a step: a frozen dataclass costs five times as much
    """What a layer's attention reads beside the weights, for one step.

    Args:
        positions, slots: int64 [rows]; a negative slot is a padded row.
        window_cache: uint8 [blocks, block, 584].
        window_indices: int32 [>= rows, 1, window] slots.
        window_lens, requests: int32 [>= rows].
        selected: int32 [>= rows, 512] entries of a request's compressed keys; None without compressed keys.
        compressed_cache: uint8 [blocks, block, 584].
        block_table: int32 [requests, blocks].
    """

    positions: Tensor
    slots: Tensor
    window_cache: Tensor
    window_indices: Tensor
    window_lens: Tensor
    requests: Tensor
    selected: Tensor | None = None
    compressed_cache: Tensor | None = None
    block_table: Tensor | None = None

    def faults(self, window: int) -> list[str]:
        """Why the kernels cannot read them."""
        found = []
        wanted = {
            "positions": torch.int64, "slots": torch.int64, "window_indices": torch.int32,
            "window_lens": torch.int32, "requests": torch.int32, "selected": torch.int32,
            "block_table": torch.int32,
        }  # fmt: skip
        for name, dtype in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.dtype != dtype:
                found.append(f"{name} is {tensor.dtype}, wanted {dtype}")
        for name, row in (("window_indices", window), ("selected", SELECTED)):
            tensor = getattr(self, name)
            if tensor is not None and tensor.stride(0) != row:
                found.append(f"{name} has rows {tensor.stride(0)} apart, wanted {row}")
        for name in ("window_cache", "compressed_cache"):
            cache = getattr(self, name)
            if cache is not None and (cache.stride(0) | cache.data_ptr()) % CACHE_ALIGNMENT:
                found.append(
                    f"{name} has blocks {cache.stride(0)} bytes apart from {cache.data_ptr():#x}, wanted "
                    f"multiples of {CACHE_ALIGNMENT}"
                )
            if cache is not None and cache.shape[1] & (cache.shape[1] - 1):
                found.append(f"{name} has blocks of {cache.shape[1]} records, wanted a power of two")
        compressed = (self.selected, self.compressed_cache, self.block_table)
        if any(x is None for x in compressed) and any(x is not None for x in compressed):
            found.append("selected, compressed_cache and block_table go together")
        return found


@dataclass
class Half:
    """One of the two kernels of a step width."""

    kernel: Kernel
    workspace: Tensor
    symmetric: SymmetricMemory
    geometry: FfnGeometry

    def addresses(self, rank: int) -> dict[str, int]:
        """The arguments that every launch of it has."""
        return {
            "workspace": self.workspace.data_ptr(),
            "peers": self.symmetric.addresses.data_ptr(),
            "rank": rank,
        }


@dataclass
class LayerWidth:
    """What steps of one row count use; kept for as long as the process, since captured graphs hold it.
    ``middle``: what the front hands over, by the back's arguments; ``handed_out``: what an index source
    reads."""

    front: Half
    back: Half
    middle: dict[str, Tensor]
    handed_out: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Makers:
    """How kernels are had, and the bytes of workspace and symmetric memory of a geometry."""

    front: Callable[[FfnGeometry], Kernel]
    back: Callable[[FfnGeometry], Kernel]
    front_sizes: Callable[[FfnGeometry], tuple[int, int]] = field(default=lambda g: _sizes("front", g))
    back_sizes: Callable[[FfnGeometry], tuple[int, int]] = field(default=lambda g: _sizes("back", g))

    @classmethod
    def of_process(cls, arch: str) -> Makers:
        """From the kernel cache of the process."""
        return cls(KernelsOfProcess("attention_front", arch), KernelsOfProcess("attention_back_ffn", arch))


def _sizes(half: str, geometry: FfnGeometry) -> tuple[int, int]:
    regions = importlib.import_module(f"{__package__}.regions")
    return (
        getattr(regions, f"{half}_workspace")(geometry).size,
        getattr(regions, f"{half}_symmetric")(geometry).size,
    )


class LayerLaunch:
    """Whole layers of one rank.

    Args:
        deployment: where and for what.
        window: places of a row's window keys, the width of its indices; a multiple of 16.
        makers: how kernels are had; default, from the kernel cache of the process.
        peer_backend: how symmetric memory is had; default, what the process is told.
        record: ``handoff.ErrorRecord``.
    """

    def __init__(
        self,
        deployment: Deployment,
        window: int,
        makers: Makers | None = None,
        peer_backend: PeerBackend | None = None,
        record: Any = None,
    ) -> None:
        if not 0 < window <= 2 * WINDOW or window % 16:
            wanted = f"a multiple of 16 up to {2 * WINDOW}"
            raise ValueError(f"whole layers: windows of {window} keys, wanted {wanted}")
        self.deployment, self.window = deployment, window
        self._makers = makers or Makers.of_process(deployment.arch)
        self._peer_backend = peer_backend
        self._widths: dict[int, LayerWidth] = {}
        self._first_pre: dict[int, Tensor] = {}
        if record is None:
            record = importlib.import_module("vllm.models.common.amd.persistent.handoff").ErrorRecord
        rank, layers = deployment.group.rank, deployment.layers
        name = f"DeepSeek-V4.1 attention {{}} ({deployment.experts} experts)"
        self.front_fail_stop = FailStop(rank, name.format("front"), layers, FRONT_STAGES, record)
        self.back_fail_stop = FailStop(rank, name.format("back"), layers, BACK_STAGES, record)

    def check(self) -> None:
        """Raise if a step whose output has arrived failed: of both kernels, the front first."""
        self.front_fail_stop.check()
        self.back_fail_stop.check()

    def prepare(self, rows: int) -> None:
        """Make what steps of ``rows`` rows need, once. Collective over the TP group, never in a capture.

        Raises:
            KernelBuildError: a kernel cannot be compiled or kept.
            PeerMemoryError: some rank has no symmetric memory.
        """
        if rows in self._widths:
            return
        d, makers = self.deployment, self._makers
        front, back = FrontGeometry(*d.shape(rows)), BackGeometry(*d.shape(rows))
        # Both kernels first: no rank launches, and waits, while another still compiles.
        kernels = makers.front(front), makers.back(back)
        front_half, back_half = [
            self._half(geometry, kernel, *sizes, fail_stop)
            for geometry, kernel, sizes, fail_stop in zip(
                (front, back),
                kernels,
                (makers.front_sizes(front), makers.back_sizes(back)),
                (self.front_fail_stop, self.back_fail_stop),
                strict=True,
            )
        ]
        self._widths[rows] = LayerWidth(front_half, back_half, *self._middle(rows, back.heads))

    def timelines(self, rows: int) -> dict[str, list[Part]]:
        """When the workgroups began each part of the last ``front`` and ``back`` of ``rows`` rows; waits for
        the device.

        Raises:
            RuntimeError: these are no timeline builds, or the width was not prepared.
            ValueError: nothing was launched.
        """
        width = width_of(self._widths, rows, "whole layers")
        return {
            name: read_timeline(half.geometry, f"{name}_workspace", half.workspace)
            for name, half in (("front", width.front), ("back", width.back))
        }

    def _half(
        self, geometry: FfnGeometry, kernel: Kernel, workspace: int, symmetric: int, fail_stop: FailStop
    ) -> Half:
        d = self.deployment
        memory = torch.zeros(workspace, dtype=torch.uint8, device=d.device)
        shared = symmetric_memory(symmetric, d.group, d.device, self._peer_backend, start=start_words())
        fail_stop.add(geometry.rows, shared.local[: 4 * CONTROL_WORDS].view(torch.int32))
        return Half(kernel, memory, shared, geometry)

    def _middle(self, rows: int, heads: int) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        device = self.deployment.device

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        middle = {
            "query": empty(rows, heads, HEAD_DIM),
            "residual_in": empty(rows, STREAMS, HIDDEN),
            "post_in": empty(rows, STREAMS, dtype=torch.float32),
            "comb_in": empty(rows, STREAMS, STREAMS, dtype=torch.float32),
            "pre_in": empty(rows, STREAMS, dtype=torch.float32),
        }
        return middle, (empty(rows, HIDDEN), empty(rows, QUERY_RANK))

    @property
    def epoch(self) -> list[int]:
        """How many layers were launched, of steps of every width; waits for the device."""
        backs = (width.back.symmetric.local[:4].view(torch.int32) for width in self._widths.values())
        return [sum(int(tag) - FIRST_TAG for tag in backs)]

    def first_pre_mix(self, rows: int) -> Tensor:
        """f32 [rows, 4]: the pre-mix that selects stream 0."""
        if rows not in self._first_pre:
            mix = torch.zeros(rows, STREAMS, dtype=torch.float32, device=self.deployment.device)
            mix[:, 0] = 1.0
            self._first_pre[rows] = mix
        return self._first_pre[rows]

    def __call__(
        self,
        weights: LayerWeights,
        activations: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        keys: Keys,
        fold: bool = True,
        select: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Outputs:
        """A layer.

        Args:
            weights: the layer's, checked.
            activations: x bf16 [rows, 5120], the last layer's output; residual bf16 [rows, 4, 5120]; post_mix
                f32 [rows, 4, 1], res_mix f32 [rows, 4, 4], pre_mix f32 [rows, 4] of the last seam.
            keys: what the attention reads.
            fold: whether the residual still owes the last layer's post-mix.
            select: an index source's choice of compressed keys, from its normed input bf16 [rows, 5120] and
                query rank bf16 [rows, 1280]; it runs between the kernels.

        Returns:
            x, residual, post_mix, res_mix, pre_mix of the FFN seam, shaped as ``activations``.

        Raises:
            RuntimeError: the width was not prepared.
            ValueError: the kernels cannot read ``keys``; every fault, with the layer's name.
        """
        x, residual = activations[:2]
        rows = x.shape[0]
        width = width_of(self._widths, rows, "whole layers")
        if faults := keys.faults(self.window):
            raise ValueError(f"attention of {weights.layer}: " + "; ".join(faults))
        stream = stream_of(x)
        self._front(width, weights, activations, keys, fold, select is not None, stream)
        if select is not None:
            select(*width.handed_out)
        outputs = (
            torch.empty_like(x),
            torch.empty_like(residual),
            torch.empty(rows, STREAMS, 1, dtype=torch.float32, device=x.device),
            torch.empty(rows, STREAMS, STREAMS, dtype=torch.float32, device=x.device),
            torch.empty(rows, STREAMS, dtype=torch.float32, device=x.device),
        )
        self._back(width, weights, keys, outputs, stream)
        if weights.layer == self.deployment.layers[-1]:
            self.front_fail_stop.watch(rows)
            self.back_fail_stop.watch(rows)
        return outputs

    def _front(
        self,
        width: LayerWidth,
        weights: LayerWeights,
        activations: tuple[Tensor, ...],
        keys: Keys,
        fold: bool,
        hand_out: bool,
        stream: Any,
    ) -> None:
        names = ("x", "residual_in", "post_in", "comb_in", "pre_in")
        not_front = ("wo_a", "wo_a_scale", "wo_b", "wo_b_scale", "sink")
        tensors = dict(zip(names, activations, strict=True))
        tensors |= {name: t for name, t in weights.tensors().items() if name not in not_front}
        tensors |= {"positions": keys.positions, "slots": keys.slots, "window_cache": keys.window_cache}
        for name in ("residual", "post", "comb", "pre"):
            tensors[f"{name}_out"] = width.middle[f"{name}_in"]
        tensors["query"] = width.middle["query"]
        arguments = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        normed, rank = (tensor.data_ptr() if hand_out else 0 for tensor in width.handed_out)
        arguments |= width.front.addresses(self.deployment.group.rank) | {
            "normed_out": normed, "query_rank_out": rank, "fold": int(fold),
            "window_stride": keys.window_cache.stride(0), "window_block": keys.window_cache.shape[1],
        }  # fmt: skip
        width.front.kernel(arguments, stream)

    def _back(
        self, width: LayerWidth, weights: LayerWeights, keys: Keys, outputs: Outputs, stream: Any
    ) -> None:
        attention = ("wo_a", "wo_a_scale", "wo_b", "wo_b_scale", "sink", "cos_sin")
        own = weights.tensors()
        tensors = {
            **width.middle, **weights.ffn.tensors(), **{name: own[name] for name in attention},
            "positions": keys.positions, "slots": keys.slots, "window_cache": keys.window_cache,
            "window_indices": keys.window_indices, "window_lens": keys.window_lens, "requests": keys.requests,
        }  # fmt: skip
        tensors |= zip(("out", "residual_out", "post_out", "comb_out", "pre_out"), outputs, strict=True)
        arguments = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        arguments |= width.back.addresses(self.deployment.group.rank)
        arguments |= {
            "window_stride": keys.window_cache.stride(0), "window_block": keys.window_cache.shape[1],
            "window": self.window, "ratio": max(weights.ratio, 1),
        }  # fmt: skip
        width.back.kernel(arguments | _compressed(keys, width.back.workspace), stream)


def _compressed(keys: Keys, anything: Tensor) -> dict[str, int]:
    """The compressed keys' arguments. Where there are none, the kernel loads no entry of them."""
    if keys.selected is None or keys.compressed_cache is None or keys.block_table is None:
        somewhere = anything.data_ptr()
        return {
            "selected": somewhere, "block_table": somewhere, "compressed_cache": somewhere,
            "compressed_stride": 0, "compressed_block": 1, "table_stride": 0, "selected_keys": 0,
        }  # fmt: skip
    return {
        "selected": keys.selected.data_ptr(),
        "block_table": keys.block_table.data_ptr(),
        "compressed_cache": keys.compressed_cache.data_ptr(),
        "compressed_stride": keys.compressed_cache.stride(0),
        "compressed_block": keys.compressed_cache.shape[1],
        "table_stride": keys.block_table.stride(0),
        "selected_keys": SELECTED,
    }
