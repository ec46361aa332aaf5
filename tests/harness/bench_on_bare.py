# SPDX-License-Identifier: Apache-2.0
"""``bench-swa`` on a machine that has a GPU, torch and Triton, and none of vLLM's other needs.

``PYTHONPATH=src:tests/harness python tests/harness/bench_on_bare.py TREE [bench-swa arguments]``, TREE
holding ``vllm/`` with the overlay laid over it.
"""

from __future__ import annotations

import argparse
import sys

import bare_vllm

from rocm_overlay import bench_swa

ARCH = "gfx950"


def main(arguments: list[str]) -> int:
    tree, *rest = arguments
    bare_vllm.install(tree, ARCH)
    parser = argparse.ArgumentParser()
    bench_swa.register(parser.add_subparsers())
    chosen = parser.parse_args(["bench-swa", *rest])
    return int(chosen.run(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
