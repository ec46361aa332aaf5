# SPDX-License-Identifier: Apache-2.0
"""The simulator's test bodies on a real AMD GPU: the same assembly text, the same expectations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cdnasim.hip import HipDevice, unfit

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
ARCH = next((a for a in ("gfx950", "gfx942") if not unfit(a, 1)), "")
pytestmark = pytest.mark.skipif(not ARCH, reason="no gfx942 or gfx950 GPU that torch can use")


@pytest.mark.parametrize("name", ["row sum", "dot"])
def test_body_on_the_gpu(name: str) -> None:
    from gpu_bodies import BODIES

    BODIES[name](HipDevice(ARCH))
    torch.cuda.synchronize()
