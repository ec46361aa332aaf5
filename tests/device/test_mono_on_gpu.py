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

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
MAX_ROWS = {"gfx950": 48, "gfx942": 42}
TP_SIZES = {"gfx950": (2, 4), "gfx942": (4,)}
PLACES = [(arch, tp) for arch, sizes in TP_SIZES.items() for tp in sizes if not unfit(arch, tp)]
pytestmark = [
    pytest.mark.skipif(not PLACES, reason="no two gfx950 or four gfx942 GPUs that torch can use"),
    pytest.mark.parametrize("arch, tp", PLACES or [("none", 0)]),
    pytest.mark.timeout(4 * 3600),
]


@pytest.mark.parametrize("body", ["ffn_numerics", "layer_numerics"])
@pytest.mark.parametrize("rows", [1, 6, 17, None], ids=["1", "6", "17", "most"])
def test_every_stage_against_float64(arch: str, tp: int, body: str, rows: int | None) -> None:
    from mono import gpu

    run: Callable[..., None] = getattr(gpu, body)
    run(HipDevice(arch, tp), rows or MAX_ROWS[arch])


def replays() -> int:
    """Raises ``ValueError`` for a ``MONO_REPLAYS`` that is no number above 1."""
    given = os.environ.get("MONO_REPLAYS", "300")
    if not given.isdigit() or int(given) < 2:
        raise ValueError(f"MONO_REPLAYS is {given!r}, wanted a number of replays, 2 or more")
    return int(given)


def test_replays_of_two_widths_in_turn_give_the_same_bits(arch: str, tp: int) -> None:
    from mono import gpu

    count = replays()
    compared = gpu.race(HipDevice(arch, tp), (MAX_ROWS[arch], 6), count, say=print)
    print(f"{count} replays, {compared} of them compared")
