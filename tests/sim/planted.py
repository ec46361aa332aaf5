# SPDX-License-Identifier: Apache-2.0
"""Small kernels in assembly around a body: one buffer, its address in s[4:5], 4 x the thread in v1."""

from __future__ import annotations

import torch

from cdnasim import Device, load

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
    .name: k
amdhsa.version: [1, 2]
...
	.end_amdgpu_metadata
"""


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
