# SPDX-License-Identifier: Apache-2.0
"""What a launch's report counts, against numbers known from the program."""

from __future__ import annotations

import torch
from planted import HEAD, TAIL

from cdnasim import Device, load


def test_per_wave_counts_add_up_to_the_launch() -> None:
    """Wave 0 of each workgroup runs a loop of ten turns more than the others."""
    body = (
        "v_readfirstlane_b32 s8, v9\n s_mov_b32 s9, 10\n s_cmp_lg_u32 s8, 0\n"
        " s_cbranch_scc1 .Lend\n.Ltop:\n"
        " s_sleep 1\n s_sub_u32 s9, s9, 1\n s_cmp_lg_u32 s9, 0\n s_cbranch_scc1 .Ltop\n.Lend:\n"
        " ds_write_b32 v1, v0\n s_barrier\n global_load_dword v2, v1, s[4:5] nt\n"
        " global_load_dword v3, v1, s[4:5] sc1\n s_waitcnt vmcnt(0)\n"
        " global_store_dword v1, v0, s[4:5] sc0 sc1"
    )
    kernel = load(HEAD.format(arch="gfx950") + body + TAIL.format(lds=1024), "gfx950", "planted.s").kernel()
    dev = Device("gfx950")
    report = dev.launch(kernel, 3, 192, [dev.zeros(1024, dtype=torch.int32)])
    table = report.per_wave
    assert report.waves == 9 and table["issued"].sum().item() == report.total
    for name, count in report.instructions.items():
        assert table[name].sum().item() == count, name
    first = table["wave"] == 0
    assert table["polls"].tolist() == [10 if x else 0 for x in first.tolist()]
    assert set(table["issued"][first].tolist()) == {report.longest_wave}
    assert set(table["issued"][~first].tolist()) == {report.longest_wave - 40}
    assert table["barriers"].tolist() == [1] * 9 and report.barriers == 9 and report.polls == 30
    assert sorted(set(table["workgroup"].tolist())) == [0, 1, 2]
    assert report.mean_wave == report.total / 9
    per = 3 * 192 * 4
    assert report.load_bytes == {"plain": per, "sc0": 0, "sc1": per, "sc0 sc1": 0}
    assert report.load_policy["nt"] == per and report.load_policy["plain"] == 0
    assert report.load_policy["sc1"] == per and report.store_policy["sc0 sc1"] == per
    assert report.nontemporal_bytes == per and report.lds_write_bytes == per
    assert report.distinct_bytes == 192 * 4 + 64  # the buffer's lines, and the kernel arguments' line


def test_lds_bank_conflicts_are_counted() -> None:
    """A stride of 64 dwords puts all 64 lanes on one bank of gfx950: 63 cycles more than none."""
    for shift, arch, cycles in ((2, "gfx950", 0), (8, "gfx950", 63), (8, "gfx942", 2 * 31), (3, "gfx950", 1)):
        body = f"v_lshlrev_b32_e32 v2, {shift}, v0\n ds_write_b32 v2, v0"
        text = HEAD.format(arch=arch) + body + TAIL.format(lds=1 << 14)
        dev = Device(arch)
        report = dev.launch(load(text, arch, "planted.s").kernel(), 1, 64, [dev.zeros(4)])
        assert (report.lds_conflict_cycles, report.lds_accesses) == (cycles, 1), (shift, arch)


def test_mfma_is_counted_by_shape() -> None:
    body = (
        "v_mov_b32_e32 v4, 0\n v_mov_b32_e32 v5, 0\n"
        " v_mfma_f32_16x16x16_bf16 v[8:11], v[4:5], v[4:5], 0\n"
        " v_mfma_f32_16x16x16_bf16 v[8:11], v[4:5], v[4:5], v[8:11]\n"
        " v_mfma_f32_16x16x4_f32 v[8:11], v4, v5, 0"
    )
    kernel = load(HEAD.format(arch="gfx950") + body + TAIL.format(lds=0), "gfx950", "planted.s").kernel()
    dev = Device("gfx950", ranks=2)
    buffers = [dev.zeros(64, rank=r) for r in range(2)]
    for report in dev.run([dev.prepare(kernel, 2, 128, [buffers[r]], rank=r) for r in range(2)]):
        assert report.mfma == {"v_mfma_f32_16x16x16_bf16": 8, "v_mfma_f32_16x16x4_f32": 4}
