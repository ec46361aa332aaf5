# SPDX-License-Identifier: Apache-2.0
"""The mono kernels through the real compiler: without a GPU, without scratch, and found again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import regex as re

from tests.models.specialized_decode.deployment import TREE  # noqa: F401

from vllm.models.common.amd.persistent.build import KernelBuildError  # isort: skip
from vllm.models.common.amd.persistent.kernel_cache import KernelCache  # isort: skip
from vllm.models.deepseek_v41.amd.mono.builds import ffn_build  # isort: skip
from vllm.models.deepseek_v41.amd.mono.geometry import FfnGeometry  # isort: skip

GEOMETRIES = [FfnGeometry(6, 4), FfnGeometry(48, 2, 128, 3)]

# FlyDSL keeps what it was told to write from its first compilation on.
COMPILE = """
import sys
from tests.models.specialized_decode import deployment  # where there is no ROCm, a stand-in
from vllm.models.deepseek_v41.amd.mono.builds import KINDS, kernel_build
kind, arch, sizes = sys.argv[1], sys.argv[2], map(int, sys.argv[3:])
launch, arguments = kernel_build(kind, KINDS[kind].geometry(*sizes), arch).make(kind)
launch(*arguments)
"""


def descriptor(kind: str, arch: str, geometry: FfnGeometry, folder: Path) -> dict[str, int]:
    """A kernel compiled in a process of its own: sizes in bytes by the name of its descriptor's directive."""
    settings = {
        "ARCH": arch,
        "COMPILE_ONLY": "1",
        "FLYDSL_DUMP_IR": "1",
        "FLYDSL_DUMP_DIR": str(folder),
        "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
    }
    sizes = [str(one) for one in (geometry.rows, geometry.tp, geometry.experts, geometry.picks)]
    command = [sys.executable, "-c", COMPILE, kind, arch, *sizes]
    root = Path(__file__).resolve().parents[5]
    subprocess.run(command, cwd=root, env={**os.environ, **settings}, check=True)
    (assembly,) = folder.rglob("*_final_isa.s")
    found = re.findall(r"\.amdhsa_(\w+_segment_fixed_size) (\d+)", assembly.read_text())
    return {name: int(size) for name, size in found}


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["6 rows TP4", "48 rows TP2 draft"])
def test_a_kernel_uses_no_scratch(geometry: FfnGeometry, tmp_path: Path) -> None:
    assert descriptor("ffn", "gfx950", geometry, tmp_path)["private_segment_fixed_size"] == 0


def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    build = ffn_build(GEOMETRIES[0], "gfx950")
    for wanted in ((1, 0), (0, 1)):
        cache = KernelCache(tmp_path)
        cache.launcher(build)
        assert (cache.counters.compiled, cache.counters.loaded) == wanted


def test_an_architecture_without_kernels_is_refused() -> None:
    with pytest.raises(KernelBuildError, match=r"no mono kernels for gfx90a, there are some for .*gfx950"):
        ffn_build(GEOMETRIES[0], "gfx90a")
