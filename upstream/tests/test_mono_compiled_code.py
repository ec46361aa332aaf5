# SPDX-License-Identifier: Apache-2.0
"""The mono kernels through the real compiler: without a GPU, without scratch, and found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import regex as re

from tests.models.specialized_decode.deployment import TREE  # noqa: F401

from vllm.models.common.amd.persistent.build import KernelBuildError  # isort: skip
from vllm.models.common.amd.persistent.kernel_cache import KernelCache  # isort: skip
from vllm.models.deepseek_v41.amd.mono.builds import ffn_build  # isort: skip
from vllm.models.deepseek_v41.amd.mono.geometry import FfnGeometry  # isort: skip

GEOMETRIES = [FfnGeometry(6, 4), FfnGeometry(48, 2, 128, 3)]


def scratch_bytes(folder: Path) -> list[bytes]:
    """What the module that FlyDSL compiled says that its kernels use, as its file spells it."""
    (file,) = folder.rglob("*.pkl")
    return re.findall(rb"private_segment_fixed_size = (\d+)", file.read_bytes())


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["6 rows TP4", "48 rows TP2 draft"])
def test_a_kernel_compiles_without_scratch_and_the_next_process_compiles_nothing(
    geometry: FfnGeometry, tmp_path: Path
) -> None:
    build = ffn_build(geometry, "gfx950")
    cache = KernelCache(tmp_path)
    cache.launcher(build)
    assert (cache.counters.compiled, cache.counters.loaded) == (1, 0)
    assert scratch_bytes(tmp_path / build.name) == [b"0"]
    again = KernelCache(tmp_path)
    again.launcher(build)
    assert (again.counters.compiled, again.counters.loaded) == (0, 1)


def test_an_architecture_without_kernels_is_refused() -> None:
    with pytest.raises(KernelBuildError, match="no mono kernels for gfx90a, there are some for gfx950"):
        ffn_build(GEOMETRIES[0], "gfx90a")
