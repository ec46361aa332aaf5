# SPDX-License-Identifier: Apache-2.0
"""The mono kernels for CDNA3 through the real compiler: without a GPU or scratch, within 64 KB of LDS."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.deepseek_v41.amd.mono.test_compiled_code import descriptor

from vllm.models.deepseek_v41.amd.mono.geometry import FfnGeometry  # isort: skip


@pytest.mark.parametrize("kind", ["ffn", "attention_front", "attention_back_ffn"])
def test_a_kernel_fits_a_compute_unit_without_scratch(kind: str, tmp_path: Path) -> None:
    sizes = descriptor(kind, "gfx942", FfnGeometry(6, 4), tmp_path)
    assert sizes["private_segment_fixed_size"] == 0
    assert 0 < sizes["group_segment_fixed_size"] <= 64 * 1024
