# SPDX-License-Identifier: Apache-2.0
"""Compile a kernel that has to spill, and print what ``compile_swa`` reads in it: a fault for its checks.

``PYTHONPATH=tests/harness python tests/harness/compile_crowded.py ARCH...``
"""

from __future__ import annotations

import json
import sys

import compile_swa
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Values a lane of a 64-lane wave, twice the registers that eight waves a SIMD leave to each.
LANES, VALUES, WAVES_PER_SIMD = 64, 64, 8


@triton.jit
def crowded(source_ptr, target_ptr, NUM_VALUES: tl.constexpr):
    place = tl.arange(0, NUM_VALUES)
    first = tl.load(source_ptr + place)
    second = tl.load(source_ptr + place * first)
    rank = tl.cumsum(second, axis=0)
    tl.store(target_ptr + rank, first + second)


def main(arches: list[str]) -> None:
    signature = {"source_ptr": "*i32", "target_ptr": "*i32", "NUM_VALUES": "constexpr"}
    source = ASTSource(crowded, signature, constexprs={"NUM_VALUES": LANES * VALUES})
    options = {"num_warps": 1, "waves_per_eu": WAVES_PER_SIMD}
    rows = []
    for arch in arches:
        compiled = triton.compile(source, target=GPUTarget("hip", arch, LANES), options=options)
        shape = {"arch": arch, "shared_bytes": compiled.metadata.shared}
        rows.append({**shape, **compile_swa.resources(compiled.asm["amdgcn"])})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
