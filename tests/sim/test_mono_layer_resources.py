# SPDX-License-Identifier: Apache-2.0
"""What the compiled launches of a whole layer use: no scratch memory, no spilled vector register."""

from __future__ import annotations

import re

import pytest
from mono.sources import assembly_of

from cdnasim.device import LDS_BYTES

full = pytest.mark.full
TARGET, DRAFT = {"experts": 384, "picks": 6}, {"experts": 128, "picks": 3}
ROWS = (1, 6, 16, 17, 32, 33, 48)


def used(text: str) -> dict[str, int]:
    """A kernel's numbers from its metadata."""
    names = ("private_segment_fixed_size", "vgpr_spill_count", "group_segment_fixed_size", "vgpr_count")
    return {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names}


def check(text: str) -> None:
    numbers = used(text)
    assert numbers["private_segment_fixed_size"] == numbers["vgpr_spill_count"] == 0
    assert 0 < numbers["group_segment_fixed_size"] <= LDS_BYTES["gfx950"]
    # Eight waves of a workgroup are two a SIMD, which share its 512 registers.
    assert 0 < numbers["vgpr_count"] <= 256


@pytest.mark.parametrize(
    "rows, tp", [(1, 2), (6, 4), *(pytest.param(r, tp, marks=full) for r in ROWS for tp in (2, 4))]
)
def test_no_scratch(rows: int, tp: int) -> None:
    check(assembly_of("front", rows=rows, tp=tp).read_text())
    check(assembly_of("back", rows=rows, tp=tp, **TARGET).read_text())


@full
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("rows", ROWS)
def test_no_scratch_in_the_draft(rows: int, tp: int) -> None:
    check(assembly_of("back", rows=rows, tp=tp, **DRAFT).read_text())


def test_scratch_and_spills_are_noticed() -> None:
    text = assembly_of("front", rows=1, tp=2).read_text()
    for name in ("private_segment_fixed_size", "vgpr_spill_count"):
        with pytest.raises(AssertionError):
            check(re.sub(rf"\.{name}:\s+0", f".{name}: 4", text))
