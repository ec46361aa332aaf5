# SPDX-License-Identifier: Apache-2.0
"""Compile the SWA metadata kernel for AMD architectures, without a GPU, and print what came out as JSON.

Run in a process of its own: ``python tests/harness/compile_swa.py TREE ARCH... [NAME=VALUE...]``, TREE
holding ``vllm/``. A NAME is an integer of the kernel's module, such as NUM_WARPS, compiled at that value.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import bare_vllm

WAVE_LANES = 64
# The metadata groups of the model: its window, and the draft block's width at 5 or 6 drafts.
WINDOW = 128
DRAFT_WIDTH = 192
BLOCK_SIZES = (32, 64, 128)
POINTERS = {
    "slot_mapping_ptr": "*i64",
    "is_valid_ptr": "*i1",
    **dict.fromkeys(
        ("indices_ptr", "lens_ptr", "ragged_ptr", "indptr_ptr", "query_start_loc_ptr", "seq_lens_ptr"), "*i32"
    ),
    **dict.fromkeys(("token_to_req_ptr", "block_table_ptr", "replay_start_ptr"), "*i32"),
}


def compile_kernel(module: Any, arch: str, *, noncausal: bool, block_size: int) -> Any:
    """The kernel of ``module`` compiled for ``arch`` as ``launch`` would: Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    width = DRAFT_WIDTH if noncausal else WINDOW
    kernel = module.swa_decode_meta_kernel
    constants = {
        "WINDOW": WINDOW,
        "WIDTH": width,
        "BLOCK_SIZE": block_size,
        "NONCAUSAL": noncausal,
        "COLUMNS": triton.next_power_of_2(width),
        "NUM_BLOCKS": module.max_blocks_touched(width, block_size),
        "ROW_LANES": module.ROW_LANES,
        "TAIL": module.TAIL,
    }
    signature = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in kernel.arg_names
    }
    # What a launch tells the compiler of PyTorch's buffers: 16-byte aligned, and below 2 GB.
    known = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
    attributes = {(place,): known for place, name in enumerate(kernel.arg_names) if name in POINTERS}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source, target=GPUTarget("hip", arch, WAVE_LANES), options={"num_warps": module.NUM_WARPS}
    )


def resources(assembly: str) -> dict[str, int]:
    """Registers a lane, scratch bytes a lane, LDS bytes, spills and barriers, from the assembly."""
    names = {
        "vgprs": r"\.vgpr_count:\s+(\d+)",
        "sgprs": r"\.sgpr_count:\s+(\d+)",
        "scratch_bytes": r"\.private_segment_fixed_size:\s+(\d+)",
        "lds_bytes": r"\.group_segment_fixed_size:\s+(\d+)",
        "vgpr_spills": r"\.vgpr_spill_count:\s+(\d+)",
        "sgpr_spills": r"\.sgpr_spill_count:\s+(\d+)",
    }
    found = {name: int(re.search(pattern, assembly).group(1)) for name, pattern in names.items()}
    found["barriers"] = len(re.findall(r"^\s+s_barrier", assembly, re.MULTILINE))
    found["scratch_instructions"] = len(re.findall(r"^\s+scratch_", assembly, re.MULTILINE))
    return found


def main(arguments: list[str]) -> None:
    tree, *rest = arguments
    bare_vllm.install(tree, "gfx950")
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    for name, _, value in (one.partition("=") for one in rest if "=" in one):
        if not hasattr(swa_decode_meta, name):
            raise AttributeError(f"the kernel's module has no {name}")
        setattr(swa_decode_meta, name, int(value))
    rows = []
    for arch in (one for one in rest if "=" not in one):
        for noncausal in (False, True):
            for block_size in BLOCK_SIZES:
                compiled = compile_kernel(swa_decode_meta, arch, noncausal=noncausal, block_size=block_size)
                assembly = compiled.asm["amdgcn"]
                shape = {"arch": arch, "noncausal": noncausal, "block_size": block_size}
                rows.append({**shape, "shared_bytes": compiled.metadata.shared, **resources(assembly)})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
