# SPDX-License-Identifier: Apache-2.0
"""Schedules: a function of the seed alone, ranks side by side, the adversarial ones."""

from __future__ import annotations

import pytest
import torch
from planted import AWAIT, HEAD, TAIL, between_ranks, run

from cdnasim import Device, SimulationError, load
from cdnasim.program import Kernel


def test_a_seed_is_a_schedule() -> None:
    """The same seed gives the same run; the schedules differ between seeds."""

    def trace(seed: int) -> list[int]:
        body = "v_mov_b32_e32 v4, 0\n v_mov_b32_e32 v5, 1\n global_atomic_add v6, v4, v5, s[4:5] sc0\n s_waitcnt vmcnt(0)\n v_lshlrev_b32_e32 v7, 8, v9\n v_add_u32_e32 v7, v7, v1\n global_store_dword v1, v6, s[4:5] offset:1024"  # noqa: E501
        return run(body, block=512, bytes_=4096, seed=seed, quantum=(1, 3)).tolist()

    assert trace(1) == trace(1)
    assert len({tuple(trace(s)) for s in range(4)}) > 1


# Two ranks: each adds to and reads what the other wrote, in memory that both share.
PEERS = """
	s_load_dwordx2 s[6:7], s[0:1], 0x8
	v_mov_b32_e32 v4, 0
	v_mov_b32_e32 v5, 1
	v_add_u32_e32 v3, 0x100, v0
	s_waitcnt lgkmcnt(0)
	global_store_dword v1, v3, s[6:7] sc0 sc1
	s_waitcnt vmcnt(0)
	s_barrier
	v_cmp_eq_u32_e32 vcc, 0, v0
	s_and_saveexec_b64 s[8:9], vcc
	global_atomic_add v4, v5, s[6:7] offset:2048
	s_mov_b64 exec, s[8:9]
{await_all}
	global_load_dword v7, v1, s[4:5] sc0 sc1
	s_waitcnt vmcnt(0)
	global_store_dword v1, v7, s[4:5] offset:1024 sc0 sc1
"""


@pytest.mark.parametrize("memory", ["exact", "hostile"])
@pytest.mark.parametrize("schedule", ["random", "round-robin", "slowest-first", "rank-stalled"])
def test_ranks_meet_in_peer_memory(memory: str, schedule: str) -> None:
    """Stores, atomics and polls cross ranks; three workgroups of each rank write the same rows."""
    kernel = between_ranks(PEERS.format(await_all=AWAIT.format(count=3)))
    counts = []
    for threads in (1, 2):
        dev = Device(
            "gfx950", ranks=2, memory=memory, schedule=schedule, threads=threads, seed=5, stall_bound=400_000
        )
        dev.count_handoffs(memory == "exact")
        buffers = [dev.zeros(1024, dtype=torch.int32, rank=r, peer=True) for r in range(2)]
        launches = [
            dev.prepare(kernel, 3, 128, [buffers[r], buffers[1 - r]], rank=r, persistent=True)
            for r in range(2)
        ]
        reports = dev.run(launches)
        for buffer in buffers:
            assert buffer[256:384].tolist() == list(range(0x100, 0x180))
            assert buffer[512].item() == 3
        counts.append([(r.total, r.polls, r.handoff_depth, r.per_wave["issued"].tolist()) for r in reports])
        if memory == "exact":
            assert max(r.handoff_depth for r in reports) >= 1
    assert counts[0] == counts[1], "the number of host threads changed the run"


# Rank 0 computes for long, without a store, while its peer polls in a loop that does not sleep.
LATE = """
	s_load_dwordx2 s[6:7], s[0:1], 0x8
	v_mov_b32_e32 v4, 0
	v_mov_b32_e32 v5, 1
	s_movk_i32 s9, {rounds}
.Lcompute:
	s_sub_u32 s9, s9, 1
	s_cmp_lg_u32 s9, 0
	s_cbranch_scc1 .Lcompute
	s_waitcnt lgkmcnt(0)
	{store}
.Lpoll:
	global_load_dword v6, v4, s[4:5] offset:2048 sc0 sc1
	s_waitcnt vmcnt(0)
	v_readfirstlane_b32 s8, v6
	s_cmp_lg_u32 s8, 1
	s_cbranch_scc1 .Lpoll
"""


def stalled(memory: str, store: str) -> list[torch.Tensor]:
    kernel = between_ranks(LATE.format(rounds=4000, store=store))
    # The stalled rank needs 12,000 instructions, in which its peer polls for about 64 times as many.
    dev = Device("gfx950", ranks=2, memory=memory, schedule="rank-stalled", seed=5, stall_bound=60_000)
    buffers = [dev.zeros(1024, dtype=torch.int32, rank=r, peer=True) for r in range(2)]
    dev.run(
        [dev.prepare(kernel, 1, 64, [buffers[r], buffers[1 - r]], rank=r, persistent=True) for r in range(2)]
    )
    return buffers


@pytest.mark.parametrize("memory", ["exact", "hostile"])
def test_a_stalled_rank_is_no_deadlock(memory: str) -> None:
    """A deadlock is what every rank has had its share of turns in, not what one polls while another waits."""
    buffers = stalled(memory, "global_store_dword v4, v5, s[6:7] offset:2048 sc0 sc1")
    assert [buffer[512].item() for buffer in buffers] == [1, 1]


@pytest.mark.parametrize("memory", ["exact", "hostile"])
def test_a_deadlock_of_a_stalled_rank_is_found(memory: str) -> None:
    with pytest.raises(SimulationError, match=r"deadlock: no memory changed .* 2 waves poll or run"):
        stalled(memory, "")


# Rank 0 stores a flag for its peer at once; rank 1 (told by its buffer's first word) computes, then looks for
# it.
EARLY = """
	s_load_dwordx2 s[6:7], s[0:1], 0x8
	v_mov_b32_e32 v4, 0
	v_mov_b32_e32 v5, 1
	global_load_dword v7, v4, s[4:5]
	s_waitcnt vmcnt(0) lgkmcnt(0)
	v_readfirstlane_b32 s8, v7
	s_cmp_lg_u32 s8, 0
	s_cbranch_scc1 .Llook
	global_store_dword v4, v5, s[6:7] offset:2048 sc0 sc1
	s_branch .Lend
.Llook:
	s_movk_i32 s9, 500
.Lcompute:
	s_sub_u32 s9, s9, 1
	s_cmp_lg_u32 s9, 0
	s_cbranch_scc1 .Lcompute
	global_load_dword v6, v4, s[4:5] offset:2048 sc0 sc1
	s_waitcnt vmcnt(0)
	global_store_dword v4, v6, s[4:5] offset:1024 sc0 sc1
.Lend:
	s_waitcnt vmcnt(0)
"""


def test_a_stalled_rank_is_stalled_from_the_start() -> None:
    kernel = between_ranks(EARLY)
    seen = 0
    for seed in range(30):
        dev = Device("gfx950", ranks=2, memory="hostile", schedule="rank-stalled", seed=seed)
        buffers = [dev.zeros(1024, dtype=torch.int32, rank=r, peer=True) for r in range(2)]
        buffers[1][0] = 1
        dev.run([dev.prepare(kernel, 1, 64, [buffers[r], buffers[1 - r]], rank=r) for r in range(2)])
        assert buffers[1][512] == 1
        seen += int(buffers[1][256])
    assert seen < 12


# Workgroup 8 reads words that workgroup 0, of its XCD, stores, till its compute unit has evicted their lines.
EVICTED = """
	v_mov_b32_e32 v2, 0
	s_cmp_eq_u32 s2, 8
	s_cbranch_scc1 .Lread
	s_cmp_lg_u32 s2, 0
	s_cbranch_scc1 .Lend
	s_movk_i32 s9, 500
.Lwait:
	s_sub_u32 s9, s9, 1
	s_cmp_lg_u32 s9, 0
	s_cbranch_scc1 .Lwait
	v_mov_b32_e32 v3, 7
	global_store_dword v2, v3, s[4:5]
	global_store_dword v2, v3, s[6:7]
	s_waitcnt vmcnt(0)
	s_branch .Lend
.Lread:
	global_load_dword v4, v2, s[4:5]
	global_load_dword v5, v2, s[6:7]
	s_waitcnt vmcnt(0)
	v_add_u32_e32 v4, v4, v5
	v_cmp_ne_u32_e32 vcc, 14, v4
	s_cbranch_vccnz .Lread
.Lend:
"""


def test_a_seed_is_the_same_run_wherever_the_host_puts_the_memory() -> None:
    """Hostile memory: what the caches hold, evict and fetch follows the order of the allocations alone."""
    body = "\ts_load_dwordx2 s[6:7], s[0:1], 0x8\n\ts_waitcnt lgkmcnt(0)\n" + EVICTED
    kernel = between_ranks(body)

    def issued(seed: int, offsets: tuple[int, int], order: tuple[int, int] = (0, 1)) -> list[int]:
        dev = Device("gfx950", memory="hostile", seed=seed, stall_bound=20_000_000)
        blocks = [torch.zeros(4096, dtype=torch.uint8) for _ in offsets]
        starts = [-block.data_ptr() % 128 + at for block, at in zip(blocks, offsets, strict=True)]
        parts = [memoryview(blocks[i].numpy())[starts[i] : starts[i] + 2048] for i in range(2)]
        memory = [dev.register(torch.frombuffer(parts[i], dtype=torch.int32)) for i in order]
        report = dev.launch(kernel, 9, 64, memory)
        return report.per_wave["issued"].tolist()

    runs = [issued(seed, (0, 0)) for seed in range(3)]
    assert len({tuple(run) for run in runs}) > 1
    for offsets, order in (((64, 0), (0, 1)), ((0, 64), (1, 0)), ((4, 120), (1, 0))):
        assert [issued(seed, offsets, order) for seed in range(3)] == runs


def test_what_a_failed_run_left_in_the_caches_is_nobodys() -> None:
    """It was never written back, and the memory may be another's when the device runs again."""

    def kernel(body: str) -> Kernel:
        return load(HEAD.format(arch="gfx950") + body + TAIL.format(lds=0), "gfx950", "planted.s").kernel()

    dev = Device("gfx950", memory="hostile")
    buffer = dev.zeros(64, dtype=torch.int32)
    fails = "global_store_dword v1, v0, s[4:5]\n s_waitcnt vmcnt(0)\n"
    fails += "global_load_dword v2, v1, s[4:5] offset:1024"
    with pytest.raises(SimulationError, match="out-of-bounds"):
        dev.launch(kernel(fails), 1, 64, [buffer])
    dev.launch(kernel("s_nop 0"), 1, 64, [buffer])
    assert buffer.tolist() == [0] * 64


def test_lanes_read_on_from_one_allocation_into_the_next() -> None:
    """Which the host may have put side by side, where the hostile memory model puts a page between them."""
    kernel = between_ranks("""
	s_load_dwordx2 s[6:7], s[0:1], 0x8
	s_waitcnt lgkmcnt(0)
	global_load_dword v4, v1, s[4:5]
	s_waitcnt vmcnt(0)
	global_store_dword v1, v4, s[6:7] offset:1024
""")
    for dwords in (1, 31, 33, 63):
        memory = torch.arange(1, 1025, dtype=torch.int32)
        view = memoryview(memory.numpy())
        parts = [torch.frombuffer(part, dtype=torch.int32) for part in (view[:dwords], view[dwords:])]
        dev = Device("gfx950", memory="hostile")
        dev.launch(kernel, 1, 64, [dev.register(part) for part in parts])
        assert memory[dwords + 256 : dwords + 320].tolist() == list(range(1, 65))


def test_the_slowest_workgroup_is_kept_behind() -> None:
    """slowest-first widens the gap between workgroups as far as can be; random keeps them near."""
    body = "s_movk_i32 s9, 0x400\n.Ltop:\n s_sub_u32 s9, s9, 1\n s_cmp_lg_u32 s9, 0\n s_cbranch_scc1 .Ltop"
    kernel = load(HEAD.format(arch="gfx950") + body + TAIL.format(lds=0), "gfx950", "planted.s").kernel()

    def first_end(schedule: str) -> int:
        dev = Device("gfx950", schedule=schedule, quantum=(20, 40))
        report = dev.launch(kernel, 16, 64, [dev.zeros(4)])
        return int(report.per_wave["last_clock"].min())

    assert first_end("slowest-first") < first_end("random") / 4


@pytest.mark.parametrize("seed", range(30))
def test_two_loads_into_one_register_land_in_order(seed: int) -> None:
    """Compilers leave the wait out between them, since vector memory answers in order."""
    body = """
    v_mov_b32_e32 v3, 7
    global_store_dword v1, v3, s[4:5] offset:512
    s_waitcnt vmcnt(0)
    global_load_dword v2, v1, s[4:5]
    global_load_dword v2, v1, s[4:5] offset:512
    s_waitcnt vmcnt(0)
    global_store_dword v1, v2, s[4:5] offset:1024
    """
    out = run(body, bytes_=1536, memory="hostile", seed=seed)
    assert out[256:].tolist() == [7] * 128


def test_a_poll_of_the_same_lines_in_many_lanes_sleeps() -> None:
    """Wave 0 polls 16 lines, each in every sixteenth lane and ten times, till wave 1 stores after a while: it
    wakes when they change, not at every turn."""
    looks = " global_load_dword v3, v2, s[4:5] sc1\n" * 10
    body = (
        "v_and_b32_e32 v2, 15, v0\n v_lshlrev_b32_e32 v2, 7, v2\n"
        " v_readfirstlane_b32 s8, v9\n s_cmp_lg_u32 s8, 0\n s_cbranch_scc1 .Lother\n"
        f".Ltop:\n{looks} s_waitcnt vmcnt(0)\n v_readfirstlane_b32 s9, v3\n s_cmp_lg_u32 s9, 0\n"
        " s_cbranch_scc1 .Lend\n s_sleep 1\n s_branch .Ltop\n"
        ".Lother:\n s_movk_i32 s9, 20000\n"
        ".Lturn:\n s_sub_u32 s9, s9, 1\n s_cmp_lg_u32 s9, 0\n s_cbranch_scc1 .Lturn\n"
        " v_mov_b32_e32 v3, 1\n global_store_dword v2, v3, s[4:5] sc1\n.Lend:\n s_nop 0"
    )
    kernel = load(HEAD.format(arch="gfx950") + body + TAIL.format(lds=1024), "gfx950", "planted.s").kernel()
    for seed in range(4):
        dev = Device("gfx950", seed=seed)
        report = dev.launch(kernel, 1, 128, [dev.zeros(1024, dtype=torch.int32)])
        assert 1 <= report.polls <= 4
