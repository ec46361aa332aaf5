# SPDX-License-Identifier: Apache-2.0
"""Every catcher catches its planted fault, by name, and leaves the correct twin alone."""

from __future__ import annotations

import pytest
import torch
from planted import GOOD, HEAD, PRODUCE, TAIL, run

from cdnasim import AssemblyError, Device, SimulationError, load

# name of the fault -> (correct body, faulty body, options)
EXCHANGE = "ds_write_b32 v1, v0\n s_waitcnt lgkmcnt(0)\n {barrier}\n v_xor_b32_e32 v2, 0x1fc, v1\n ds_read_b32 v3, v2\n s_waitcnt lgkmcnt(0)\n global_store_dword v1, v3, s[4:5]\n"  # noqa: E501
FAULTS: dict[str, tuple[str, str, dict[str, object]]] = {
    "out-of-bounds": (
        "global_store_dword v1, v0, s[4:5]",
        "global_store_dword v1, v0, s[4:5] offset:516",
        {"bytes_": 512},
    ),
    "memory-never-written": (
        "global_store_dword v1, v0, s[4:5]\n s_waitcnt vmcnt(0)\n global_load_dword v2, v1, s[4:5]\n s_waitcnt vmcnt(0)",  # noqa: E501
        "global_load_dword v2, v1, s[4:5]\n s_waitcnt vmcnt(0)",
        {"empty": True},
    ),
    "misaligned": ("global_load_dword v2, v1, s[4:5]", "global_load_dword v2, v1, s[4:5] offset:2", {}),
    "lds-race": (
        EXCHANGE.format(barrier="s_barrier"),
        EXCHANGE.format(barrier=""),
        {"checks": {"lds-never-written": "off"}},
    ),
    "lds-never-written": ("ds_write_b32 v1, v0\n ds_read_b32 v2, v1", "ds_read_b32 v2, v1", {}),
    "register-never-written": (
        "v_mov_b32_e32 v7, 1\n v_add_u32_e32 v8, v7, v0",
        "v_add_u32_e32 v8, v7, v0",
        {},
    ),
    "barrier-divergence": (
        "v_readfirstlane_b32 s8, v9\n s_barrier",
        "v_readfirstlane_b32 s8, v9\n s_cmp_eq_u32 s8, 0\n s_cbranch_scc1 .L1\n s_barrier\n s_branch .L2\n.L1:\n s_nop 0\n s_barrier\n.L2:",  # noqa: E501
        {},
    ),
    "deadlock": (
        "s_nop 0",
        ".L1:\n global_load_dword v2, v1, s[4:5] sc1\n s_waitcnt vmcnt(0)\n v_readfirstlane_b32 s8, v2\n s_sleep 1\n s_cmp_eq_u32 s8, 0\n s_cbranch_scc1 .L1",  # noqa: E501
        {},
    ),
    "launch refused": ("s_nop 0", "s_nop 0", {"grid": 5000, "persistent": True}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught_by_name(name: str) -> None:
    good, bad, options = FAULTS[name]
    run(good, **({k: v for k, v in options.items() if k not in ("grid", "persistent")}))  # type: ignore[arg-type]
    with pytest.raises(SimulationError) as caught:
        run(bad, **options)  # type: ignore[arg-type]
    assert caught.value.kind.startswith(name), str(caught.value)
    if name not in ("deadlock", "launch refused"):
        assert caught.value.line and caught.value.text and "workgroup" in caught.value.where


def test_a_copy_of_an_unwritten_register_is_caught_at_its_use() -> None:
    """Compilers copy registers that a path never wrote; only the use of such a copy is a fault."""
    run("v_mov_b32_e32 v6, v7\n v_mov_b32_e32 v8, 1\n v_mov_b32_e32 v8, v0")
    with pytest.raises(SimulationError, match="register-never-written") as caught:
        run("v_mov_b32_e32 v6, v7\n v_mov_b32_e32 v5, v6\n v_add_u32_e32 v8, v5, v0")
    assert "v_add_u32" in caught.value.text


def test_deadlock_says_who_waits_where() -> None:
    with pytest.raises(
        SimulationError,
        match=r"workgroup \(0, 0, 0\) wave \d at line \d+: last load \(line \d+\) of 0x[0-9a-f]+ \('buffer' \+ 0\) saw 0x0",  # noqa: E501
    ):
        run(FAULTS["deadlock"][1])


@pytest.mark.parametrize(
    "line, why",
    [
        ("v_frobnicate_b32 v0, v1", "opcode v_frobnicate_b32 is not known"),
        ("v_add_u32_e32 v0, v1", "with 2 operands"),
        ("v_add_u32_e32 v0, v1, v2 wobble:3", "modifier wobble:3"),
        ("v_add_u32_e32 v0, |v1|, v2", "abs"),
        ("global_load_dword v0, v1, s[4:5] glc", "glc"),
        ("v_mfma_f32_16x16x16_bf16 v[0:3], v[4:7], v[8:9], 0", "4 registers, 2 are needed"),
        ("s_mov_b64 s[8:9], 0x80000000", "extension"),
        ("s_cbranch_scc1 .Lnowhere", "label"),
        ("v_mov_b32_e32 v200, 0", "past the 16"),
        ("buffer_load_dword v0, v1, s[4:7], 0 offen swz", "swz"),
    ],
)
def test_unknown_text_is_an_error_with_file_and_line(line: str, why: str) -> None:
    with pytest.raises(AssemblyError) as caught:
        run(line)
    message = str(caught.value)
    assert message.startswith("planted.s:10:") and why in message and line in message


@pytest.mark.parametrize("arch, limit", [("gfx942", 64 * 1024), ("gfx950", 160 * 1024)])
def test_lds_size_is_the_architectures(arch: str, limit: int) -> None:
    run("s_nop 0", arch=arch, lds=limit)
    with pytest.raises(SimulationError, match="lds-size"):
        run("s_nop 0", arch=arch, lds=limit + 4)


def test_wrapping_offset_is_reported_not_hidden() -> None:
    body = "s_mov_b32 s6, -1\n s_mov_b32 s7, 0x27000\n v_mov_b32_e32 v2, 0xfffffff0\n buffer_store_dword v0, v2, s[4:7], 0 offen offset:16"  # noqa: E501
    with pytest.raises(SimulationError, match="offset-wrap"):
        run(body, block=64, checks={"offset-wrap": "error"})
    run(body, block=64)


def test_bounded_buffer_drops_and_returns_zero() -> None:
    body = (
        "s_movk_i32 s6, 0x20\n s_mov_b32 s7, 0x27000\n v_add_u32_e32 v3, 1, v0\n buffer_store_dword v3, v1, s[4:7], 0 offen\n s_waitcnt vmcnt(0)\n"  # noqa: E501
        " buffer_load_dword v4, v1, s[4:7], 0 offen\n s_waitcnt vmcnt(0)\n global_store_dword v1, v4, s[4:5] offset:512"  # noqa: E501
    )
    out = run(body, block=64)
    assert out[:64].tolist() == [*range(1, 9), *[0] * 56]
    assert out[128:192].tolist() == [*range(1, 9), *[0] * 56]


# ---- the hostile memory model: a hand-off between two workgroups on different XCDs
HANDOFF_FAULTS = {
    "missing drain": {"drain": ""},
    "plain store": {"store": "global_store_dword v1, v3, s[4:5]"},
    "plain load of a line seen before": {
        "early": "global_load_dword v6, v1, s[4:5]\n s_waitcnt vmcnt(0)",
        "load": "global_load_dword v6, v1, s[4:5]",
    },
    "data loaded before the flag": {
        "early": "global_load_dword v6, v1, s[4:5] sc1\n s_waitcnt vmcnt(0)",
        "load": "",
    },
}


# The way of compilers, plain accesses and cache maintenance; without sc1 the latter does nothing.
FENCED = {
    "store": "global_store_dword v1, v3, s[4:5]",
    "drain": "buffer_wbl2 sc1\n s_waitcnt vmcnt(0)",
    "early": "global_load_dword v6, v1, s[4:5]\n s_waitcnt vmcnt(0)",
    "load": "buffer_inv sc1\n global_load_dword v6, v1, s[4:5]",
}
FENCE_FAULTS = {
    "no write-back": {"drain": "s_waitcnt vmcnt(0)"},
    "write-back without sc1": {"drain": "buffer_wbl2 sc0\n s_waitcnt vmcnt(0)"},
    "write-back not waited for": {"drain": "buffer_wbl2 sc1"},
    "no invalidate": {"load": "global_load_dword v6, v1, s[4:5]"},
    "invalidate without sc1": {"load": "buffer_inv sc0\n global_load_dword v6, v1, s[4:5]"},
}


def test_cache_maintenance_hands_plain_accesses_over() -> None:
    assert all(handoff(FENCED, seed) for seed in range(150))


@pytest.mark.parametrize("name", FENCE_FAULTS)
def test_faulty_cache_maintenance_fails_some_seed(name: str) -> None:
    assert not all(handoff(FENCED | FENCE_FAULTS[name], seed) for seed in range(100))


def handoff(parts: dict[str, str], seed: int) -> bool:
    """Whether the consumer saw the producer's data."""
    out = run(
        PRODUCE.format(**(GOOD | parts)),
        grid=2,
        bytes_=4096,
        memory="hostile",
        seed=seed,
        quantum=(3, 25),
        persistent=True,
    )
    return out[256:384].tolist() == list(range(0x100, 0x180))


def test_correct_handoff_passes_every_seed() -> None:
    assert all(handoff({}, seed) for seed in range(150))


@pytest.mark.full
def test_correct_handoff_passes_a_thousand_seeds() -> None:
    assert all(handoff({}, seed) for seed in range(1000))


@pytest.mark.parametrize("name", HANDOFF_FAULTS)
def test_faulty_handoff_fails_some_seed(name: str) -> None:
    assert not all(handoff(HANDOFF_FAULTS[name], seed) for seed in range(60))


@pytest.mark.parametrize("name", ["missing drain", "plain store"])
def test_exact_memory_hides_what_the_hostile_model_shows(name: str) -> None:
    """Why the hostile model exists: in order and at once, these faults change nothing."""
    for seed in range(20):
        out = run(
            PRODUCE.format(**(GOOD | HANDOFF_FAULTS[name])),
            grid=2,
            bytes_=4096,
            seed=seed,
            quantum=(3, 25),
            persistent=True,
        )
        assert out[256:384].tolist() == list(range(0x100, 0x180))


def test_watched_wave_and_handoff_depth() -> None:
    body = PRODUCE.format(**GOOD)
    kernel = load(HEAD.format(arch="gfx950") + body + TAIL.format(lds=0), "gfx950", "planted.s").kernel()
    dev = Device("gfx950")
    dev.count_handoffs()
    line = next(i.line for i, t in zip(kernel.insts, kernel.texts, strict=True) if "0x100" in t)
    dev.watch(workgroup=0, wave=1, dump_line=line)
    report = dev.launch(kernel, 2, 128, [dev.zeros(1024, dtype=torch.int32)], persistent=True)
    assert report.handoff_depth == 1
    trace = dev.trace(kernel)
    assert trace[0].endswith("s_load_dwordx2 s[4:5], s[0:1], 0x0") and trace[-1].endswith("s_endpgm")
    registers = dev.registers()
    assert registers is not None
    assert registers[0][1].tolist() == [4 * (64 + lane) for lane in range(64)]
    assert registers[1][2].item() == 0


ATOMICS = {
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "umin": min,
    "umax": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "swap": lambda old, x: x,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("form", ["global", "buffer"])
def test_memory_atomics(name: str, form: str) -> None:
    """Lanes in order on four words; the old values come back."""
    where = {
        "global": f"global_atomic_{name} v5, v4, v3, s[4:5] sc0",
        "buffer": f"v_mov_b32_e32 v5, v3\n buffer_atomic_{name} v5, v4, s[4:7], 0 offen sc0",
    }[form]
    body = (
        "s_mov_b32 s6, -1\n s_mov_b32 s7, 0x27000\n v_and_b32_e32 v4, 12, v1\n v_mul_u32_u24_e32 v3, 37, v0\n"
        f" v_and_b32_e32 v3, 63, v3\n {where}\n s_waitcnt vmcnt(0)\n global_store_dword v1, v5, s[4:5] offset:512"  # noqa: E501
    )
    out = run(body, block=64)
    memory = [0] * 4
    for lane in range(64):
        assert out[128 + lane].item() & 0xFFFFFFFF == memory[lane & 3]
        memory[lane & 3] = ATOMICS[name](memory[lane & 3], 37 * lane & 63) & 0xFFFFFFFF
    assert [x & 0xFFFFFFFF for x in out[:4].tolist()] == memory


# Workgroup 0 stores word 0; workgroup 8, on its XCD, waits for it and says so in word 128;
# workgroup 1, on another XCD, then copies word 0 to word 192. Lines are 32 words.
RELAY = """
	v_mov_b32_e32 v2, 0
	v_mov_b32_e32 v3, 1
	s_cmp_eq_u32 s2, 0
	s_cbranch_scc1 .Lfirst
	s_cmp_eq_u32 s2, 8
	s_cbranch_scc1 .Lsame
	s_cmp_lg_u32 s2, 1
	s_cbranch_scc1 .Lend
.Lother:
	global_load_dword v5, v2, s[4:5] offset:512 sc1
	s_waitcnt vmcnt(0)
	v_readfirstlane_b32 s8, v5
	s_sleep 1
	s_cmp_eq_u32 s8, 0
	s_cbranch_scc1 .Lother
	global_load_dword v6, v2, s[4:5] sc1
	s_waitcnt vmcnt(0)
	global_store_dword v2, v6, s[4:5] offset:768 sc1
	s_waitcnt vmcnt(0)
	s_branch .Lend
.Lsame:
	global_load_dword v5, v2, s[4:5] sc1
	s_waitcnt vmcnt(0)
	v_readfirstlane_b32 s8, v5
	s_sleep 1
	s_cmp_eq_u32 s8, 0
	s_cbranch_scc1 .Lsame
	buffer_inv sc1
	global_store_dword v2, v3, s[4:5] offset:512 sc1
	s_waitcnt vmcnt(0)
	s_branch .Lend
.Lfirst:
	global_store_dword v2, v3, s[4:5] {bits}
	s_waitcnt vmcnt(0)
.Lend:
	s_nop 0
"""


def test_a_neighbour_that_looks_writes_no_plain_store_back() -> None:
    """A plain store stays in its XCD's L2 though a workgroup there polls it past the L2 and invalidates."""
    for bits, seen in (("sc1", {1}), ("", {0})):
        got = {
            int(run(RELAY.format(bits=bits), block=64, grid=16, memory="hostile", seed=seed)[192])
            for seed in range(8)
        }
        assert got == seen, bits


# Workgroup 0 stores a word and a flag; workgroup 1 waits for the flag and copies the word.
TOGETHER = """
	s_cmp_eq_u32 s2, 0
	s_cbranch_scc1 .Lstore
	v_mov_b32_e32 v2, 0
.Lpoll:
	global_load_dword v5, v2, s[4:5] offset:512 sc1
	s_waitcnt vmcnt(0)
	v_readfirstlane_b32 s8, v5
	s_cmp_lg_u32 s8, 0
	s_cbranch_scc1 .Ltake
	s_sleep 1
	s_branch .Lpoll
.Ltake:
	global_load_dword v6, v2, s[4:5] sc1
	s_waitcnt vmcnt(0)
	global_store_dword v2, v6, s[4:5] offset:768 sc1
	s_branch .Lend
.Lstore:
	v_mov_b32_e32 v2, 0
	v_mov_b32_e32 v3, 1
	global_store_dword v2, v3, s[4:5] sc1
	{drain}
	global_store_dword v2, v3, s[4:5] offset:512 sc1
.Lend:
	s_waitcnt vmcnt(0)
"""


def test_stores_that_share_a_wait_are_seen_in_either_order() -> None:
    for drain, seen in (("s_waitcnt vmcnt(0)", {1}), ("", {0, 1})):
        body = TOGETHER.format(drain=drain)
        got = {int(run(body, block=64, grid=2, memory="hostile", seed=seed)[192]) for seed in range(40)}
        assert got == seen, drain


# Workgroup 0 stores a word and a flag after a while; workgroup 1 waits for the flag and loads the word;
# workgroup 9, on its XCD, only runs.
UNASKED = """
	v_mov_b32_e32 v2, 0
	v_mov_b32_e32 v3, 1
	s_movk_i32 s9, 20000
	s_cmp_eq_u32 s2, 1
	s_cbranch_scc1 .Lpoll
	s_cmp_eq_u32 s2, 0
	s_cbranch_scc1 .Lturn
	s_cmp_lg_u32 s2, 9
	s_cbranch_scc1 .Lend
.Lturn:
	s_sub_u32 s9, s9, 1
	s_cmp_lg_u32 s9, 0
	s_cbranch_scc1 .Lturn
	s_cmp_lg_u32 s2, 0
	s_cbranch_scc1 .Lend
	global_store_dword v2, v3, s[4:5] sc1
	s_waitcnt vmcnt(0)
	global_store_dword v2, v3, s[4:5] offset:512 sc1
	s_branch .Lend
.Lpoll:
	global_load_dword v5, v2, s[4:5] offset:512 sc1
	s_waitcnt vmcnt(0)
	v_readfirstlane_b32 s8, v5
	s_sleep 1
	s_cmp_eq_u32 s8, 0
	s_cbranch_scc1 .Lpoll
	{acquire}
	global_load_dword v6, v2, s[4:5]
	s_waitcnt vmcnt(0)
	global_store_dword v2, v6, s[4:5] offset:768 sc1
.Lend:
	s_waitcnt vmcnt(0)
"""


def test_a_plain_load_without_an_acquire_may_find_a_line_that_nobody_asked_for() -> None:
    """Unless the caches fetch nothing unasked: then only what the kernel itself has loaded is stale."""
    for acquire, unasked, old in (("buffer_inv sc1", True, False), ("", True, True), ("", False, False)):
        body = UNASKED.format(acquire=acquire)
        got = {
            int(run(body, block=64, grid=16, memory="hostile", seed=seed, unasked=unasked)[192])
            for seed in range(8)
        }
        assert (0 in got) == old, (acquire, unasked)


def test_a_line_that_the_kernel_has_loaded_is_stale_all_the_same() -> None:
    early = "global_load_dword v6, v2, s[4:5]\n s_waitcnt vmcnt(0)\n.Lpoll:"
    body = UNASKED.format(acquire="").replace("s_cbranch_scc1 .Lpoll", "s_cbranch_scc1 .Learly", 1)
    body = body.replace(".Lpoll:", f".Learly:\n {early}")
    got = {int(run(body, block=64, grid=16, memory="hostile", seed=s, unasked=False)[192]) for s in range(8)}
    assert 0 in got


# In each of two workgroups wave 0 stores a flag and goes to the barrier without a wait; the others come there
# when they have seen the other workgroup's flag, and sleep on it till then.
AT_BARRIER = """
	v_mov_b32_e32 v2, 0
	v_mov_b32_e32 v3, 1
	s_lshl_b32 s8, s2, 8
	v_mov_b32_e32 v4, s8
	s_xor_b32 s8, s8, 0x100
	v_mov_b32_e32 v5, s8
	v_readfirstlane_b32 s9, v9
	s_cmp_lg_u32 s9, 0
	s_cbranch_scc1 .Lpoll
	global_store_dword v4, v3, s[4:5] sc1
	s_branch .Lmeet
.Lpoll:
	global_load_dword v6, v5, s[4:5] sc1
	s_waitcnt vmcnt(0)
	v_readfirstlane_b32 s8, v6
	s_sleep 1
	s_cmp_eq_u32 s8, 0
	s_cbranch_scc1 .Lpoll
.Lmeet:
	s_barrier
	s_waitcnt vmcnt(0)
	global_store_dword v1, v3, s[4:5] offset:1024 sc1
	s_waitcnt vmcnt(0)
"""


def test_stores_of_a_wave_at_a_barrier_arrive() -> None:
    """A store completes by itself, whatever its wave waits for; who sleeps on it goes on once."""
    for seed in range(40):
        got = run(AT_BARRIER, block=512, grid=2, bytes_=4096, memory="hostile", seed=seed, quantum=(2, 9))
        assert got[256:768].tolist() == [1] * 512
