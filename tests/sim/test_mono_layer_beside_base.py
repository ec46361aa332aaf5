# SPDX-License-Identifier: Apache-2.0
"""No stage of our whole layer is further from float64 than the base's is on the same inputs."""

from __future__ import annotations

import pytest
from mono.layer_beside_base import both
from mono.layer_case import Shape

# Judged by another order of roundings than ours.
OTHER = {"out as vLLM"}


@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("rows, tp, ratio", [(1, 2, 1), (6, 4, 1), (6, 2, 2)])
def test_our_error_is_no_larger(rows: int, tp: int, ratio: int) -> None:
    """A single value beside a tie is 1e-4 of a row; the base's fp32 sums have as many as ours."""
    found = both(Shape(rows, tp, ratio, kind="few"))
    worse = {
        name: (mine.relative, other.relative)
        for name, (mine, other) in found.items()
        if name not in OTHER and not mine.relative <= other.relative + 1e-4
    }
    assert worse == {}
