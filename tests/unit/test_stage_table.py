# SPDX-License-Identifier: Apache-2.0
"""The stage table of each launch holds for every geometry, and what is wrong with one is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.unit.test_specialized_decode_tree import TREE  # noqa: F401

from vllm.models.deepseek_v41.amd.mono import regions  # isort: skip
from vllm.models.deepseek_v41.amd.mono.geometry import (  # isort: skip
    HEAD_DIM,
    HIDDEN,
    K_STEP,
    QUERY_RANK,
    WORKGROUPS,
    BackGeometry,
    FfnGeometry,
    FrontGeometry,
)
from vllm.models.deepseek_v41.amd.mono.stage_table import (  # isort: skip
    Stage,
    back_stages,
    concurrent_workgroups,
    faults,
    ffn_stages,
    front_stages,
)

SHOWN = FfnGeometry(6, 4)
geometries = some.builds(
    lambda rows, tp, routing: (rows, tp, *routing),
    some.integers(1, 48),
    some.sampled_from((2, 4)),
    some.sampled_from(((384, 6), (128, 3))),
)


@dataclass(frozen=True)
class Launch:
    """A launch's geometry, its stages, and its layouts: symmetric memory, workspace, LDS."""

    geometry: type[FfnGeometry]
    stages: Callable[[], Sequence[Stage]]
    layouts: tuple[Callable, Callable, Callable]


LAUNCHES = {
    "ffn": Launch(FfnGeometry, ffn_stages, (regions.symmetric, regions.workspace, regions.lds)),
    "front": Launch(
        FrontGeometry, front_stages, (regions.front_symmetric, regions.front_workspace, regions.front_lds)
    ),
    "back": Launch(
        BackGeometry, back_stages, (regions.back_symmetric, regions.back_workspace, regions.back_lds)
    ),
}
every_launch = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=list(LAUNCHES))


def found(stages: Sequence[Stage], g: FfnGeometry = SHOWN, launch: Launch = LAUNCHES["ffn"]) -> list[str]:
    *memory, shared = ([region.name for region in layout(g)] for layout in launch.layouts)
    return faults(stages, g, [name for names in memory for name in names], shared)


@every_launch
@given(sizes=geometries)
def test_every_read_was_written_and_tasks_cover_the_work(launch: Launch, sizes: tuple[int, ...]) -> None:
    assert found(launch.stages(), launch.geometry(*sizes), launch) == []


@given(sizes=geometries)
def test_attention_has_a_workgroup_for_each_of_its_tasks(sizes: tuple[int, ...]) -> None:
    """On its row's XCD, which workgroups are dealt to in turn."""
    g = BackGeometry(*sizes)
    attention = back_stages()[0]
    rows_a_xcd = -(-g.rows // 8)
    assert attention.tasks(g) <= WORKGROUPS and rows_a_xcd * (g.heads // g.task_heads) <= WORKGROUPS // 8
    assert g.task_heads <= 8  # a wave finishes each


@given(geometries)
def test_stages_beside_each_other_have_workgroups_of_their_own(sizes: tuple[int, ...]) -> None:
    g = FfnGeometry(*sizes)
    taken = [workgroup for _, some_of in concurrent_workgroups(g) for workgroup in some_of]
    assert len(taken) == len(set(taken)) and max(taken) < WORKGROUPS


@every_launch
@given(sizes=geometries)
def test_regions_are_disjoint_and_inside_their_memory(launch: Launch, sizes: tuple[int, ...]) -> None:
    g = launch.geometry(*sizes)
    for layout in (layout(g) for layout in launch.layouts[:2]):
        end = 0
        for region in layout:
            assert region.offset >= end
            end = region.offset + region.size
        assert end <= layout.size


# What is in LDS at once: until the seam's sums are sent, from then on (each with one turn), always.
EARLY = ("norm", "streams", "mix_weights", "squares", "mixes")
EARLY_TURNS = (("router_sums",), ("activations", "codes"))
LATE, LATE_TURNS = ("active", "slot_of"), (("partial",), ("index_of",))
ALWAYS = ("pick_expert", "pick_weight", "active_bits")


@given(sizes=geometries, num_bytes=some.sampled_from((64 * 1024, 160 * 1024)))
def test_what_is_in_lds_at_once_is_disjoint(sizes: tuple[int, ...], num_bytes: int) -> None:
    g = FfnGeometry(*sizes)
    if (g.rows > 42 and g.experts == 384) and num_bytes < 160 * 1024:
        with pytest.raises(ValueError, match=rf"of {g.rows} rows at TP {g.tp} needs \d+ bytes of LDS"):
            regions.lds(g, num_bytes)
        return
    layout = regions.lds(g, num_bytes)
    assert layout.size <= num_bytes
    for together in [(*EARLY, *turn) for turn in EARLY_TURNS] + [(*LATE, *turn) for turn in LATE_TURNS]:
        names = sorted((*together, *ALWAYS), key=lambda name: getattr(layout, name).offset)
        assert not [pair for pair in pairwise(names) if layout.overlap(*pair)]


# Of the front: one after the other, and always.
FRONT_TURNS = (("activations", "codes"), ("partial",), ("query_operands", "query_codes"))
FRONT_ALWAYS = ("norm", "streams", "mix_weights", "squares", "mixes", "query_norm", "query_squares")


@given(sizes=geometries, num_bytes=some.sampled_from((64 * 1024, 160 * 1024)))
def test_what_the_front_has_in_lds_at_once_is_disjoint(sizes: tuple[int, ...], num_bytes: int) -> None:
    layout = regions.front_lds(FrontGeometry(*sizes), num_bytes)
    assert layout.size <= num_bytes
    for turn in FRONT_TURNS:
        names = sorted((*turn, *FRONT_ALWAYS), key=lambda name: getattr(layout, name).offset)
        assert not [pair for pair in pairwise(names) if layout.overlap(*pair)]


@given(sizes=geometries, num_bytes=some.sampled_from((64 * 1024, 160 * 1024)))
def test_code_bytes_of_no_step_were_stored_by_what_came_before(
    sizes: tuple[int, ...], num_bytes: int
) -> None:
    """A lane reads its query codes in words, and its wave has steps for some of their bytes alone."""
    g = FrontGeometry(*sizes)
    layout = regions.front_lds(g, num_bytes)
    rows, codes = layout.activations, layout.query_codes
    stored = {x for row in range(rows.shape[0]) for x in range(rows.at(row), rows.at(row) + HIDDEN)}
    read = range(-(-g.query_steps // 4) * 4)
    for row, group, part in product(range(codes.shape[0]), range(4), range(g.query_parts)):
        own = range(part, QUERY_RANK // K_STEP, g.query_parts)
        assert {codes.at(row, group, part, byte) for byte in read[len(own) :]} <= stored


# Of the back: the attention's, one after the other; then the projections' sums beside the seam, and what the
# FFN launch has.
BACK_ATTENTION, BACK_TURNS = ("query", "keys", "softmax"), (("values",), ("sums",))


@given(sizes=geometries, num_bytes=some.sampled_from((64 * 1024, 160 * 1024)))
def test_what_the_back_has_in_lds_at_once_is_disjoint(sizes: tuple[int, ...], num_bytes: int) -> None:
    g = BackGeometry(*sizes)
    if (g.rows > 42 and g.experts == 384) and num_bytes < 160 * 1024:
        with pytest.raises(ValueError, match=rf"back of {g.rows} rows at TP {g.tp} needs \d+ bytes of LDS"):
            regions.back_lds(g, num_bytes)
        return
    layout = regions.back_lds(g, num_bytes)
    assert layout.size <= num_bytes
    attention = [turn for turn in BACK_TURNS if turn[0] in {region.name for region in layout}]
    early = [(*EARLY, *turn, *ALWAYS) for turn in (*EARLY_TURNS, ("projection",))]
    late = [(*LATE, *turn, *ALWAYS) for turn in LATE_TURNS]
    for together in [*((*BACK_ATTENTION, *turn) for turn in attention), *early, *late]:
        names = sorted(together, key=lambda name: getattr(layout, name).offset)
        assert not [pair for pair in pairwise(names) if layout.overlap(*pair)]


@given(sizes=geometries)
def test_sums_of_the_attention_are_of_whole_parts_of_the_dims(sizes: tuple[int, ...]) -> None:
    """All of them, or a half or a quarter, which are whole tiles of a block of 64 and whole lanes of 8."""
    g = BackGeometry(*sizes)
    if not (g.rows > 42 and g.experts == 384):
        assert HEAD_DIM * g.task_heads / regions.back_lds(g, 64 * 1024).sums.shape[1] in (1, 2, 4)
    assert regions.back_lds(g).sums.shape[1] >= HEAD_DIM * g.task_heads


def test_a_front_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"front of 42 rows at TP 4 needs \d+ bytes of LDS, a workgroup has 32768"
    ):
        regions.front_lds(FrontGeometry(42, 4), 32 * 1024)


@given(sizes=geometries)
def test_parts_of_rows_are_whole_rounds_of_the_waves(sizes: tuple[int, ...]) -> None:
    """Waves take rows four at once, from a part's first one on."""
    layouts = [regions.front_lds(FrontGeometry(*sizes), 64 * 1024)]
    if sizes[0] <= 42:
        layouts.append(regions.lds(FfnGeometry(*sizes), 64 * 1024))
    for rows in (layout.activations.shape[0] for layout in layouts):
        assert rows % 4 == 0 or rows == min(sizes[0], 16)


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
