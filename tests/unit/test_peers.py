# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory over ranks that are threads, with memory that is this process's."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from tests.unit.test_specialized_decode_tree import TREE  # noqa: F401

from vllm.models.common.amd.persistent.peers import Group, PeerMemoryError, symmetric_memory  # isort: skip

CPU = torch.device("cpu")


class Ranks:
    """A TP group of threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.values: list[Any] = [None] * size

    def group(self, rank: int) -> Group:
        def gather(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait()
            found = list(self.values)
            self.barrier.wait()
            return found

        return Group(rank, self.size, gather)

    def run(self, body: Any) -> list[Any]:
        """What ``body(rank, group)`` gives or raises on every rank."""
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = body(rank, self.group(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


class Heap:
    """A rank's memory; handles are addresses, mapped peers are at other addresses."""

    def __init__(self, rank: int, fails: str = "") -> None:
        self.rank, self.fails = rank, fails
        self.open_addresses: set[int] = set()
        self.kept: torch.Tensor | None = None

    def allocate(self, num_bytes: int, device: torch.device) -> tuple[int, torch.Tensor]:
        if self.fails == "allocate":
            raise RuntimeError("out of memory")
        self.kept = torch.full((num_bytes,), 0xAB, dtype=torch.uint8)
        return 1000 + self.rank, self.kept

    def export(self, address: int) -> int:
        return address

    def open(self, handle: int) -> int:
        if self.fails == "open":
            raise RuntimeError("invalid handle")
        self.open_addresses.add(10 * handle)
        return 10 * handle

    def close(self, address: int) -> None:
        self.open_addresses.remove(address)

    def free(self, address: int) -> None:
        assert address == 1000 + self.rank
        self.kept = None


def test_every_rank_has_every_ranks_address_in_rank_order() -> None:
    heaps = [Heap(rank) for rank in range(4)]
    made = Ranks(4).run(lambda rank, group: symmetric_memory(64, group, CPU, heaps[rank]))
    for rank, memory in enumerate(made):
        assert memory.addresses.dtype == torch.int64
        assert memory.addresses.tolist() == [1000 + r if r == rank else 10 * (1000 + r) for r in range(4)]
    for heap, memory in zip(heaps, made, strict=True):
        memory.release()
        memory.release()
        assert heap.kept is None and not heap.open_addresses


def test_it_starts_as_asked_before_a_peer_can_have_its_address() -> None:
    seen: list[torch.Tensor] = []

    class Watched(Heap):
        def export(self, address: int) -> int:
            assert self.kept is not None
            seen.append(self.kept.clone())
            return address

    heaps = [Watched(rank) for rank in range(2)]
    made = Ranks(2).run(lambda rank, group: symmetric_memory(64, group, CPU, heaps[rank], start=[1, 7, 0, 0]))
    wanted = [1, 7] + [0] * 14
    assert [one.view(torch.int32).tolist() for one in seen] == [wanted] * 2
    assert made[0].local.view(torch.int32).tolist() == wanted


@pytest.mark.parametrize(
    ("what", "said"),
    [("allocate", "rank 1, allocating 64 bytes: out of memory"), ("open", "rank 1, mapping rank 0's memory")],
)
def test_one_ranks_failure_is_every_ranks_error_and_frees_everything(what: str, said: str) -> None:
    heaps = [Heap(rank, what if rank == 1 else "") for rank in range(4)]
    found = Ranks(4).run(lambda rank, group: symmetric_memory(64, group, CPU, heaps[rank]))
    assert [type(one) for one in found] == [PeerMemoryError] * 4
    assert all(said in str(one) for one in found) and "rank 0," not in str(found[0])
    assert all(heap.kept is None and not heap.open_addresses for heap in heaps)


def test_a_machine_without_aiter_says_so_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aiter", "aiter.ops.flydsl.quick_allreduce_int4_ipc"):
        monkeypatch.setitem(sys.modules, name, None)
    found = Ranks(2).run(lambda rank, group: symmetric_memory(64, group, CPU))
    assert all(isinstance(one, PeerMemoryError) and "aiter" in str(one).lower() for one in found)


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MONO_PEER_MEMORY", "shm")
    found = Ranks(2).run(lambda rank, group: symmetric_memory(64, group, CPU))
    assert all("VLLM_MONO_PEER_MEMORY is shm, wanted aiter or torch" in str(one) for one in found)


def test_torchs_symmetric_memory_is_taken_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as torch_memory

    class Handle:
        buffer_ptrs = (5, 6)

    monkeypatch.setenv("VLLM_MONO_PEER_MEMORY", "torch")
    monkeypatch.setattr(torch_memory, "empty", lambda n, **how: torch.full((n,), 0xAB, dtype=torch.uint8))
    monkeypatch.setattr(torch_memory, "rendezvous", lambda local, name: Handle())
    made = Ranks(2).run(lambda rank, group: symmetric_memory(64, group, CPU, start=[1]))
    assert [one.addresses.tolist() for one in made] == [[5, 6]] * 2
    assert made[0].local.view(torch.int32).tolist() == [1] + [0] * 15


def test_torchs_failure_is_every_ranks_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as torch_memory

    def refuse(local: Any, name: str) -> Any:
        raise RuntimeError("no multicast")

    monkeypatch.setenv("VLLM_MONO_PEER_MEMORY", "torch")
    monkeypatch.setattr(torch_memory, "empty", lambda n, **how: torch.zeros(n, dtype=torch.uint8))
    monkeypatch.setattr(torch_memory, "rendezvous", refuse)
    found = Ranks(2).run(lambda rank, group: symmetric_memory(64, group, CPU))
    assert all("rank 1, torch's rendezvous: no multicast" in str(one) for one in found)
