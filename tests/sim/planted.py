# SPDX-License-Identifier: Apache-2.0
"""Small kernels in assembly around a body: one buffer, its address in s[4:5], 4 x the thread in v1."""

from __future__ import annotations

import torch

from cdnasim import Device, load
from cdnasim.program import Kernel

HEAD = """
	.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
	.text
	.type	k,@function
k:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_lshlrev_b32_e32 v1, 2, v0
	v_lshrrev_b32_e32 v9, 6, v0
	s_waitcnt lgkmcnt(0)
"""
TAIL = """
	s_endpgm
	.section	.rodata,"a",@progbits
	.amdhsa_kernel k
		.amdhsa_group_segment_fixed_size {lds}
		.amdhsa_private_segment_fixed_size 0
		.amdhsa_kernarg_size 8
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_system_vgpr_workitem_id 0
		.amdhsa_next_free_vgpr 16
		.amdhsa_next_free_sgpr 32
		.amdhsa_accum_offset 16
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
      - .offset: 0
        .size: 8
        .value_kind: global_buffer
    .group_segment_fixed_size: {lds}
    .kernarg_segment_align: 8
    .kernarg_segment_size: 8
    .max_flat_workgroup_size: 1024
    .name: k
    .private_segment_fixed_size: 0
    .sgpr_count: 38
    .symbol: k.kd
    .vgpr_count: 16
    .wavefront_size: 64
amdhsa.version: [1, 2]
...
	.end_amdgpu_metadata
"""

# Waits until the word at 2048 of this rank's buffer is {count}.
AWAIT = """
.Lpoll:
	global_load_dword v6, v4, s[4:5] offset:2048 sc0 sc1
	s_waitcnt vmcnt(0)
	v_readfirstlane_b32 s8, v6
	s_sleep 1
	s_cmp_lg_u32 s8, {count}
	s_cbranch_scc1 .Lpoll
"""


def between_ranks(body: str) -> Kernel:
    """A kernel around ``body`` with two buffers: its own, and a peer's as second argument."""
    tail = TAIL.format(lds=0).replace(".amdhsa_kernarg_size 8", ".amdhsa_kernarg_size 16")
    second = "      - .offset: 8\n        .size: 8\n        .value_kind: global_buffer\n"
    tail = tail.replace("    .group_segment", second + "    .group_segment")
    return load(HEAD.format(arch="gfx950") + body + tail, "gfx950", "planted.s").kernel()


def run(
    body: str,
    *,
    arch: str = "gfx950",
    block: int = 128,
    grid: int = 1,
    lds: int = 1024,
    bytes_: int = 1024,
    empty: bool = False,
    persistent: bool = False,
    **device: object,
) -> torch.Tensor:
    """Run ``body`` with the buffer's address in s[4:5] and 4 x the thread in v1."""
    kernel = load(HEAD.format(arch=arch) + body + TAIL.format(lds=lds), arch, "planted.s").kernel()
    dev = Device(arch, stall_bound=200_000, **device)  # type: ignore[arg-type]
    buffer = (
        dev.empty(bytes_ // 4, dtype=torch.int32, name="buffer")
        if empty
        else dev.zeros(bytes_ // 4, dtype=torch.int32, name="buffer")
    )
    dev.launch(kernel, grid, block, [buffer], persistent=persistent)
    return buffer


# A hand-off between two workgroups on different XCDs; ``GOOD`` fills the places that faults change.
PRODUCE = """
	s_cmp_lg_u32 s2, 0
	s_cbranch_scc1 .Lconsume
	v_add_u32_e32 v3, 0x100, v0
	{store}
	{drain}
	s_barrier
	v_mov_b32_e32 v4, 0
	v_mov_b32_e32 v5, 1
	v_cmp_eq_u32_e32 vcc, 0, v0
	s_and_saveexec_b64 s[8:9], vcc
	global_store_dword v4, v5, s[4:5] offset:2048 sc1
	s_endpgm
.Lconsume:
	v_mov_b32_e32 v4, 0
	{early}
.Lpoll:
	global_load_dword v5, v4, s[4:5] offset:2048 sc1
	s_waitcnt vmcnt(0)
	v_readfirstlane_b32 s8, v5
	s_sleep 1
	s_cmp_eq_u32 s8, 0
	s_cbranch_scc1 .Lpoll
	{load}
	s_waitcnt vmcnt(0)
	global_store_dword v1, v6, s[4:5] offset:1024
"""
GOOD = {
    "store": "global_store_dword v1, v3, s[4:5] sc1",
    "drain": "s_waitcnt vmcnt(0)",
    "early": "",
    "load": "global_load_dword v6, v1, s[4:5] sc1",
}
