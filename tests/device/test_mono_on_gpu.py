# SPDX-License-Identifier: Apache-2.0
"""Our launches on real GPUs by the simulator's own test bodies: numerics, and replays of two widths in turn.

``MONO_REPLAYS``: how often the layer and the FFN launch of both widths are replayed, 300 if not set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cdnasim.hip import HipDevice, unfit
from rocm_overlay.kernel_arches import MOST_ROWS

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
# By architecture and TP size: what a server gives the kernels (rocm_overlay.kernel_arches).
PLACES = [(arch, tp) for arch, most in MOST_ROWS.items() for tp in sorted(most) if not unfit(arch, tp)]
pytestmark = [
    pytest.mark.skipif(not PLACES, reason="no two gfx950 or gfx942 GPUs that torch can use"),
    pytest.mark.parametrize("arch, tp", PLACES or [("none", 0)]),
    pytest.mark.timeout(4 * 3600),
]


@pytest.mark.parametrize("body", ["ffn_numerics", "layer_numerics"])
@pytest.mark.parametrize("rows", [1, 6, 17, None], ids=["1", "6", "17", "most"])
def test_every_stage_against_float64(arch: str, tp: int, body: str, rows: int | None) -> None:
    from mono import gpu

    run: Callable[..., None] = getattr(gpu, body)
    run(HipDevice(arch, tp), rows or MOST_ROWS[arch][tp])


def replays() -> int:
    """Raises ``ValueError`` for a ``MONO_REPLAYS`` that is no number above 1."""
    given = os.environ.get("MONO_REPLAYS", "300")
    if not given.isdigit() or int(given) < 2:
        raise ValueError(f"MONO_REPLAYS is {given!r}, wanted a number of replays, 2 or more")
    return int(given)


def test_replays_of_two_widths_in_turn_give_the_same_bits(arch: str, tp: int) -> None:
    from mono import gpu

    count = replays()
    compared = gpu.race(HipDevice(arch, tp), (MOST_ROWS[arch][tp], 6), count, say=print)
    print(f"{count} replays, {compared} of them compared")
