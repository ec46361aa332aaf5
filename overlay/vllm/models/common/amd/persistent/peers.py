# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory: one allocation a rank, mapped by every rank, through which kernels hand data to peers.

Kernels poll peers' words past their caches and rely on single stores being seen whole, so the memory must be
fine-grained: uncached on the GPU that owns it. AITER's IPC heap gives that on ROCm; torch's symmetric memory
is the alternative where AITER is not, and takes its place only when asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

BACKEND_VARIABLE = "VLLM_MONO_PEER_MEMORY"
AITER, TORCH = "aiter", "torch"


class PeerMemoryError(RuntimeError):
    """Symmetric memory cannot be had on some rank. The message names the ranks and what each met."""


@dataclass(frozen=True)
class Group:
    """The TP group as the handle exchange needs it.

    Args:
        rank: this rank in it.
        size: its ranks.
        gather: gives every rank's value, in rank order. Collective; works on the CPU.
        name: what torch calls the group.
    """

    rank: int
    size: int
    gather: Callable[[Any], Sequence[Any]]
    name: str = ""

    @classmethod
    def of(cls, process_group: Any) -> Group:
        """A torch process group, which must have a CPU backend."""
        import torch.distributed as dist

        size = dist.get_world_size(process_group)

        def gather(value: Any) -> Sequence[Any]:
            values: list[Any] = [None] * size
            dist.all_gather_object(values, value, group=process_group)
            return values

        return cls(dist.get_rank(process_group), size, gather, process_group.group_name)


@dataclass
class SymmetricMemory:
    """What one rank holds of it.

    Args:
        local: uint8 [bytes], this rank's.
        addresses: int64 [ranks] on the device: every rank's memory as this rank maps it.
        release: unmaps the peers' and frees the own. Only when no rank's kernel can still touch it.
    """

    local: Tensor
    addresses: Tensor
    release: Callable[[], None]


class PeerBackend(Protocol):
    """One way to get memory that peers can map."""

    def allocate(self, num_bytes: int, device: torch.device) -> tuple[int, Tensor]:
        """Memory of any content: its address, and uint8 [num_bytes] over it."""

    def export(self, address: int) -> Any:
        """A handle that another process can open."""

    def open(self, handle: Any) -> int:
        """The address of a peer's memory here."""

    def close(self, address: int) -> None:
        """Unmap a peer's memory."""

    def free(self, address: int) -> None:
        """Free the own memory."""


class AiterHeap:
    """AITER's uncached IPC allocations."""

    def __init__(self) -> None:
        from aiter.ops.flydsl.quick_allreduce_int4_ipc import UncachedIpcHeap

        self._heap = UncachedIpcHeap

    def allocate(self, num_bytes: int, device: torch.device) -> tuple[int, Tensor]:
        address = int(self._heap.alloc_uncached(num_bytes))
        return address, torch.as_tensor(_Bytes(address, num_bytes), device=device)

    def export(self, address: int) -> Any:
        return self._heap.get_mem_handle_bytes(address)

    def open(self, handle: Any) -> int:
        return int(self._heap.open_mem_handle(handle))

    def close(self, address: int) -> None:
        self._heap.close_mem_handle(address)

    def free(self, address: int) -> None:
        self._heap.free_device_mem(address)


class _Bytes:
    """Device memory that torch views and does not own."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


def symmetric_memory(
    num_bytes: int,
    group: Group,
    device: torch.device,
    backend: PeerBackend | None = None,
    start: Sequence[int] = (),
) -> SymmetricMemory:
    """Symmetric memory, the same on every rank. Collective: every rank reaches every exchange, whatever it
    met before, so that one rank's failure is every rank's error and no rank waits for ever.

    Args:
        num_bytes: of each rank.
        group: the ranks.
        device: this rank's GPU.
        backend: how memory is had; default, what the process is told.
        start: int32 words at its start; the rest is zero. It is so before any rank has its address.

    Raises:
        PeerMemoryError: on every rank alike, with what each failing rank met.
    """
    if backend is None and os.environ.get(BACKEND_VARIABLE, AITER) == TORCH:
        return _torch_symmetric_memory(num_bytes, group, device, start)
    fault, own = "", None
    opened: dict[int, int] = {}
    try:
        backend = backend or _backend()
        own = backend.allocate(num_bytes, device)
        _fill(own[1], start)
        handle = backend.export(own[0])
    except Exception as error:  # every rank must still reach the exchange
        fault, handle = f"allocating {num_bytes} bytes: {error}", None
    handles = group.gather((handle, fault))
    faults = [why for _, why in handles]
    if not any(faults):
        for peer, (theirs, _) in enumerate(handles):
            if peer != group.rank and not fault:
                try:
                    opened[peer] = backend.open(theirs)  # type: ignore[union-attr]
                except Exception as error:
                    fault = f"mapping rank {peer}'s memory: {error}"
        faults = list(group.gather(fault))

    def release() -> None:
        while opened:
            backend.close(opened.popitem()[1])  # type: ignore[union-attr]
        nonlocal own
        if own is not None:
            backend.free(own[0])  # type: ignore[union-attr]
            own = None

    if any(faults):
        release()
        listed = "; ".join(f"rank {rank}, {why}" for rank, why in enumerate(faults) if why)
        raise PeerMemoryError(
            f"the kernels' symmetric memory cannot be made: {listed}. They need IPC between the GPUs of the "
            f"TP group: --ipc=host in a container, and AITER ({BACKEND_VARIABLE}={TORCH} takes torch's)"
        )
    assert own is not None
    addresses = [own[0] if rank == group.rank else opened[rank] for rank in range(group.size)]
    return SymmetricMemory(own[1], torch.tensor(addresses, dtype=torch.int64, device=device), release)


def _fill(local: Tensor, start: Sequence[int]) -> None:
    local.zero_()
    if start:
        local[: 4 * len(start)].view(torch.int32).copy_(torch.tensor(start, dtype=torch.int32))
    if local.is_cuda:
        torch.accelerator.synchronize(local.device)


def peer_memory_reason() -> str | None:
    """Why no symmetric memory can be had as the process is told; None where it may be."""
    chosen = os.environ.get(BACKEND_VARIABLE, AITER)
    if chosen in (AITER, TORCH):
        return None
    return f"{BACKEND_VARIABLE} is {chosen}, wanted {AITER} or {TORCH}"


def _backend() -> PeerBackend:
    if reason := peer_memory_reason():
        raise ValueError(reason)
    return AiterHeap()


def _torch_symmetric_memory(
    num_bytes: int, group: Group, device: torch.device, start: Sequence[int]
) -> SymmetricMemory:
    import torch.distributed._symmetric_memory as torch_memory

    fault, handle, local = "", None, None
    try:
        local = torch_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        _fill(local, start)
    except Exception as error:
        fault = f"allocating {num_bytes} bytes: {error}"
    faults = group.gather(fault)
    if not any(faults):
        try:
            handle = torch_memory.rendezvous(local, group.name)
        except Exception as error:
            fault = f"torch's rendezvous: {error}"
        faults = group.gather(fault)
    if any(faults) or handle is None or local is None:
        listed = "; ".join(f"rank {rank}, {why}" for rank, why in enumerate(faults) if why)
        raise PeerMemoryError(f"the kernels' symmetric memory cannot be made with torch: {listed}")
    kept = [local, handle]
    addresses = torch.tensor([int(one) for one in handle.buffer_ptrs], dtype=torch.int64, device=device)
    return SymmetricMemory(local, addresses, kept.clear)
