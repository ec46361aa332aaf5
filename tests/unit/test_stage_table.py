# SPDX-License-Identifier: Apache-2.0
"""The stage table of the FFN launch holds for every geometry, and what is wrong with one is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.unit.test_specialized_decode_tree import TREE  # noqa: F401

from vllm.models.deepseek_v41.amd.mono import regions  # isort: skip
from vllm.models.deepseek_v41.amd.mono.geometry import WORKGROUPS, FfnGeometry  # isort: skip
from vllm.models.deepseek_v41.amd.mono.stage_table import (  # isort: skip
    Stage,
    concurrent_workgroups,
    faults,
    ffn_stages,
)

SHOWN = FfnGeometry(6, 4)
geometries = some.builds(
    lambda rows, tp, routing: FfnGeometry(rows, tp, *routing),
    some.integers(1, 48),
    some.sampled_from((2, 4)),
    some.sampled_from(((384, 6), (128, 3))),
)


def found(stages: tuple[Stage, ...], g: FfnGeometry = SHOWN) -> list[str]:
    memory = [region.name for layout in (regions.symmetric(g), regions.workspace(g)) for region in layout]
    return faults(stages, g, memory, [region.name for region in regions.lds(g)])


@given(geometries)
def test_every_read_was_written_and_tasks_cover_the_work(g: FfnGeometry) -> None:
    assert found(ffn_stages(), g) == []


@given(geometries)
def test_stages_beside_each_other_have_workgroups_of_their_own(g: FfnGeometry) -> None:
    taken = [workgroup for _, some_of in concurrent_workgroups(g) for workgroup in some_of]
    assert len(taken) == len(set(taken)) and max(taken) < WORKGROUPS


@given(geometries)
def test_regions_are_disjoint_and_inside_their_memory(g: FfnGeometry) -> None:
    for layout in (regions.symmetric(g), regions.workspace(g)):
        end = 0
        for region in layout:
            assert region.offset >= end
            end = region.offset + region.size
        assert end <= layout.size


def changed(name: str, **changes: object) -> tuple[Stage, ...]:
    return tuple(replace(one, **changes) if one.name == name else one for one in ffn_stages())


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (
            changed("router logits", writes=("x",)),
            "choose reads logits, which no earlier stage writes",
        ),
        (tuple(reversed(ffn_stages())), "output reads moe, which no earlier stage writes"),
        (changed("mixes", tasks=lambda g: g.rows - 1), "mixes: 5 tasks of 1 do not cover 6"),
        (changed("mixes", first=lambda g: WORKGROUPS), "mixes starts at workgroup 256, wanted 0..255"),
        (changed("mixes", reads=()), "nothing reads seam_sums"),
        (changed("seam sums", writes=()), "nothing writes seam_sums"),
        (changed("choose", reads=("typo",), writes=("other",)), "choose names no region that there is"),
    ],
)
def test_a_planted_fault_is_found(stages: tuple[Stage, ...], said: str) -> None:
    assert said in found(stages)


def test_every_wait_of_an_error_record_is_a_stage_of_the_table() -> None:
    from vllm.models.deepseek_v41.amd.mono.ffn_launch import STAGES

    assert len(STAGES) == len({name for name, _ in STAGES.values()})
