# SPDX-License-Identifier: Apache-2.0
"""Hostile memory between ranks: a store for another takes both scope bits, on both sides, and a drain."""

from __future__ import annotations

import pytest
import torch
from planted import AWAIT, between_ranks

from cdnasim import Device

# A rank stores a row into its peer's memory, then raises a flag there; it waits for its own flag and copies
# the row that it got.
BODY = """
	s_load_dwordx2 s[6:7], s[0:1], 0x8
	v_mov_b32_e32 v4, 0
	v_mov_b32_e32 v5, 1
	v_add_u32_e32 v3, 0x100, v0
	{early}
	s_waitcnt vmcnt(0) lgkmcnt(0)
	{store}
	{drain}
	s_barrier
	v_cmp_eq_u32_e32 vcc, 0, v0
	s_and_saveexec_b64 s[8:9], vcc
	global_store_dword v4, v5, s[6:7] offset:2048 sc0 sc1
	s_mov_b64 exec, s[8:9]
{await_flag}
	{load}
	s_waitcnt vmcnt(0)
	global_store_dword v1, v7, s[4:5] offset:1024 sc0 sc1
"""
GOOD = {
    "early": "global_load_dword v7, v1, s[4:5]",
    "store": "global_store_dword v1, v3, s[6:7] sc0 sc1",
    "drain": "s_waitcnt vmcnt(0)",
    "load": "global_load_dword v7, v1, s[4:5] sc0 sc1",
}
FAULTS = {
    "no drain": {"drain": ""},
    "a plain store": {"store": "global_store_dword v1, v3, s[6:7]"},
    "a store for the device": {"store": "global_store_dword v1, v3, s[6:7] sc1"},
    "a plain load": {"load": "global_load_dword v7, v1, s[4:5]"},
    "a load for the device": {"load": "global_load_dword v7, v1, s[4:5] sc1"},
}
FENCED = {
    "store": "global_store_dword v1, v3, s[6:7]",
    "drain": "buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(0)",
    "load": "buffer_inv sc0 sc1\n global_load_dword v7, v1, s[4:5]",
}


def rows_arrive(parts: dict[str, str], seed: int, memory: str = "hostile") -> bool:
    """Whether each of two ranks got its peer's row."""
    kernel = between_ranks(BODY.format(await_flag=AWAIT.format(count=1), **(GOOD | parts)))
    dev = Device("gfx950", ranks=2, memory=memory, seed=seed, quantum=(3, 25), stall_bound=400_000)
    buffers = [dev.zeros(1024, dtype=torch.int32, rank=r, peer=True) for r in range(2)]
    dev.run(
        [dev.prepare(kernel, 1, 128, [buffers[r], buffers[1 - r]], rank=r, persistent=True) for r in range(2)]
    )
    return all(b[256:384].tolist() == list(range(0x100, 0x180)) for b in buffers)


@pytest.mark.parametrize("parts", [{}, FENCED], ids=["scope bits", "write-back and invalidate"])
def test_a_row_arrives_whatever_the_seed(parts: dict[str, str]) -> None:
    assert all(rows_arrive(parts, seed) for seed in range(60))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_loses_a_row_in_some_seed(name: str) -> None:
    """A missing drain loses one in about forty: the wave's own poll drains its store soon."""
    assert not all(rows_arrive(FAULTS[name], seed) for seed in range(400))


@pytest.mark.parametrize("name", ["a plain store", "a store for the device", "a load for the device"])
def test_exact_memory_hides_it(name: str) -> None:
    assert all(rows_arrive(FAULTS[name], seed, "exact") for seed in range(10))


# Rank 0's wave 0 stores a flag to its peer and goes to the barrier without a wait, its wave 1 sleeps on the
# answer: no wave of the rank can run. Rank 1 (told by its buffer's first word) polls for the flag, never
# sleeps, and answers.
STANDING = """
	s_load_dwordx2 s[6:7], s[0:1], 0x8
	v_mov_b32_e32 v4, 0
	v_mov_b32_e32 v5, 1
	v_readfirstlane_b32 s9, v0
	global_load_dword v7, v4, s[4:5]
	s_waitcnt vmcnt(0) lgkmcnt(0)
	v_readfirstlane_b32 s8, v7
	s_cmp_lg_u32 s8, 0
	s_cbranch_scc1 .Lanswer
	s_cmp_lg_u32 s9, 0
	s_cbranch_scc1 .Lpoll
	{store}
	s_branch .Lmeet
{await_flag}
	s_branch .Lmeet
.Lanswer:
	global_load_dword v6, v4, s[4:5] offset:2048 sc0 sc1
	s_waitcnt vmcnt(0)
	v_readfirstlane_b32 s8, v6
	s_cmp_eq_u32 s8, 0
	s_cbranch_scc1 .Lanswer
	global_store_dword v4, v5, s[6:7] offset:2048 sc0 sc1
.Lmeet:
	s_barrier
	s_waitcnt vmcnt(0)
"""


@pytest.mark.parametrize(
    "store",
    [
        "global_store_dword v4, v5, s[6:7] offset:2048 sc0 sc1",
        "global_store_dword v4, v5, s[6:7] offset:2048\n buffer_wbl2 sc0 sc1",
    ],
    ids=["store", "write-back"],
)
def test_stores_of_a_rank_that_stands_still_arrive_while_its_peer_polls(store: str) -> None:
    kernel = between_ranks(STANDING.format(await_flag=AWAIT.format(count=1), store=store))
    for seed in range(40):
        dev = Device("gfx950", ranks=2, memory="hostile", seed=seed, quantum=(3, 25), stall_bound=400_000)
        buffers = [dev.zeros(1024, dtype=torch.int32, rank=r, peer=True) for r in range(2)]
        buffers[1][0] = 1
        launches = [
            dev.prepare(kernel, 1, 128, [buffers[r], buffers[1 - r]], rank=r, persistent=True)
            for r in range(2)
        ]
        dev.run(launches)
        assert [int(b[512]) for b in buffers] == [1, 1]
