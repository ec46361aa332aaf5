# SPDX-License-Identifier: Apache-2.0
"""Preflight on a machine: what it refuses there, and that what it advises works there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rocm_overlay.machine import Gpu
from rocm_overlay.preflight import Refusal, check
from rocm_overlay.recipe import load, load_all, recipe_names
from rocm_overlay.render import build_command
from rocm_overlay.settings import Settings, changed, read_settings

RECIPES = Path(__file__).parents[2] / "recipes"
ALL = load_all(RECIPES)
GIB = 1 << 30


def cards(*kinds: tuple[str, int, int]) -> list[Gpu]:
    """GPUs of (architecture, compute units, GiB), in that order."""
    return [Gpu(index, gfx, units, gib * GIB) for index, (gfx, units, gib) in enumerate(kinds)]


MI355X = ("gfx950", 256, 288)
MI325X = ("gfx942", 304, 256)
MI300X = ("gfx942", 304, 192)
CPX = ("gfx942", 38, 24)
INTEGRATED = ("gfx1036", 2, 1)


def settings(name: str, words: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Settings:
    recipe = load(RECIPES, name)
    return read_settings(recipe, build_command(recipe, words), env or {})


def judge(
    name: str, gpus: Sequence[Gpu], words: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> list[Refusal]:
    return check(settings(name, words, env), gpus, ALL)


def only(refusals: list[Refusal]) -> Refusal:
    assert len(refusals) == 1, [str(refusal) for refusal in refusals]
    return refusals[0]


def test_the_recipes_own_machine_is_accepted() -> None:
    assert judge("mi355x-tp4", cards(*[MI355X] * 8)) == []


@pytest.mark.parametrize(
    ("count", "change"),
    [
        (3, "--recipe mi355x-tp2"),
        (2, "--recipe mi355x-tp2"),
        # One rank has no room for the weights and no kernels: nothing is advised that fails next.
        (1, "a machine with 4 gfx950 GPUs: nothing that this recipe can do fits 1"),
        (0, "give the container --device /dev/kfd --device /dev/dri, on a machine with the GPUs"),
    ],
)
def test_too_few_gpus_are_counted(count: int, change: str) -> None:
    refusal = only(judge("mi355x-tp4", cards(*[MI355X] * count)))
    assert f"needs 4 GPUs, {count} visible" in refusal.why
    assert refusal.change == change


def test_without_a_recipe_for_so_few_gpus_fewer_ranks_are_advised() -> None:
    own = settings("mi355x-tp4")
    refusal = only(check(own, cards(*[MI355X] * 2), [own.recipe]))
    assert refusal.change == "--tensor-parallel-size 2"


def test_ranks_of_every_kind_are_counted() -> None:
    words = ["--no-monokernel", "--pipeline-parallel-size", "2"]
    refusal = only(judge("mi355x-tp4", cards(*[MI355X] * 4), words))
    assert "needs 8 GPUs, 4 visible" in refusal.why
    assert refusal.change.startswith("--pipeline-parallel-size 1")
    assert judge("mi355x-tp4", cards(*[MI355X] * 8), words) == []


def test_hidden_gpus_are_not_missing() -> None:
    refusal = only(judge("mi355x-tp4", cards(*[MI355X] * 8), env={"HIP_VISIBLE_DEVICES": ""}))
    assert refusal.change == "unset HIP_VISIBLE_DEVICES"
    some = only(judge("mi355x-tp4", cards(*[MI355X] * 8), env={"HIP_VISIBLE_DEVICES": "0,1"}))
    assert some.change == "--recipe mi355x-tp2, or unset HIP_VISIBLE_DEVICES"


def test_another_architecture_is_refused_with_a_recipe_that_fits() -> None:
    refusal = only(judge("mi355x-tp4", cards(*[MI300X] * 8)))
    assert refusal.why == "is for gfx950, this machine has gfx942"
    assert refusal.change == "--recipe mi300x-tp4"
    assert only(judge("mi355x-tp4", cards(*[MI325X] * 8))).change == "--recipe mi325x-tp4"


def test_an_architecture_without_a_recipe_is_said_to_have_none() -> None:
    refusal = only(judge("mi355x-tp4", cards(*[("gfx90a", 104, 64)] * 8)))
    assert refusal.changes == ()
    assert "a recipe of your own for gfx90a" in refusal.change


def test_a_gpu_that_the_server_does_not_take_does_not_matter() -> None:
    assert judge("mi355x-tp4", cards(*[MI355X] * 8, INTEGRATED)) == []


def test_another_gpu_before_the_ones_to_be_used_is_passed_by() -> None:
    refusal = only(judge("mi355x-tp4", cards(INTEGRATED, *[MI355X] * 8)))
    assert refusal.change == "HIP_VISIBLE_DEVICES=1,2,3,4"


def test_another_gpu_does_not_count_for_those_that_are_missing() -> None:
    refusal = only(judge("mi355x-tp4", cards(*[MI355X] * 3, INTEGRATED)))
    assert "needs 4 GPUs, 3 visible" in refusal.why


def test_a_partitioned_gpu_is_named_as_such() -> None:
    refusal = only(judge("mi325x-tp4", cards(*[CPX] * 8)))
    assert "GPU 0 is a partition, 38 of 304 compute units" in refusal.why
    assert "need 256 resident" in refusal.why
    assert refusal.change == "set the cards to one partition (SPX)"


@pytest.mark.parametrize("mode", ["SPX", ""])
def test_too_few_compute_units_are_refused_whatever_the_mode(mode: str) -> None:
    small = [Gpu(index, "gfx942", 80, 256 * GIB, partition_mode=mode) for index in range(8)]
    refusal = only(judge("mi325x-tp4", small))
    assert "need 256 resident" in refusal.why
    if mode:
        assert refusal.change == "--no-monokernel"
        assert judge("mi325x-tp4", small, ["--no-monokernel"]) == []


def test_the_machines_cards_decide_the_plan_not_the_recipes() -> None:
    tight = ["--gpu-memory-utilization", "0.5"]
    assert check(settings("mi325x-tp4", tight)) == []
    refusal = only(judge("mi325x-tp4", cards(*[MI300X] * 8), tight))
    assert refusal.rule == "memory"
    assert "on a 192 GiB card" in refusal.why


def test_a_change_that_ends_all_refusals_is_named_alone() -> None:
    # Without the kernels eight ranks could run, but here are four GPUs.
    refusals = {one.rule: one.change for one in judge("mi355x-tp4", cards(*[MI355X] * 4), ["-tp", "8"])}
    assert refusals["ranks"] == "--tensor-parallel-size 4"
    assert set(refusals) == {"ranks", "count"}


def test_two_ranks_with_the_kernels_are_not_sent_to_eight() -> None:
    # Eight ranks hold the weights, but the kernels are not built for them.
    refusals = judge("mi300x-tp4", cards(*[MI300X] * 8), ["-tp", "2", "--monokernel"])
    (refusal,) = [one for one in refusals if one.rule == "memory"]
    assert refusals == [refusal] and refusal.changes
    after = changed(settings("mi300x-tp4", ["-tp", "2", "--monokernel"]), refusal.changes[0], ALL)
    assert after is not None
    assert check(after, cards(*[MI300X] * 8), ALL) == []


# Whatever a user asks for on whatever machine: each change that is named removes its refusal and
# brings no other.

WORDS: list[list[str]] = [
    *(["-tp", ranks] for ranks in ("1", "2", "4", "8")),
    *(["--gpu-memory-utilization", share] for share in (".5", ".75", ".97")),
    *(["--max-num-seqs", seqs] for seqs in ("7", "1000", "8k")),
    *(["--max-num-batched-tokens", tokens] for tokens in ("5", "256", "1M")),
    *(["--engram-config.cpu_offload", place] for place in ("False", "1")),
    *(["-cc.cudagraph_mode", mode] for mode in ("PIECEWISE", "NONE", "FULL")),
    ["--compilation-config", "{}"],
    ["-O0"],
    ["--monokernel"],
    ["--no-monokernel"],
    ["--kernel-config.monokernel", "true"],
    ["--kernel-config.specialized_decode", "auto"],
    ["--specialized-decode"],
    ["-dp", "2"],
    ["-pp", "2"],
    ["-dcp", "2"],
    ["-ep"],
    ["--moe-backend", "triton"],
    ["--max-model-len", "128k"],
    ["--speculative-config.enable_adaptive_verification", "on"],
]
VARIABLES = {
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": ["0", "2"],
    "VLLM_ROCM_USE_AITER": ["0", "1"],
    "VLLM_ROCM_USE_AITER_MOE": ["0"],
    "VLLM_USE_BREAKABLE_CUDAGRAPH": ["0", "1"],
    "HIP_VISIBLE_DEVICES": ["", "0,1", "1,2,3,4"],
    "ROCR_VISIBLE_DEVICES": ["0,1,2", "1,2,3,4,5,6,7,8"],
}
machines = st.one_of(
    st.none(),
    st.builds(
        lambda kind, count, before, after: cards(*before, *[kind] * count, *after),
        st.sampled_from([MI355X, MI325X, MI300X, CPX, ("gfx942", 80, 256), ("gfx90a", 104, 64)]),
        st.integers(0, 9),
        st.sampled_from([[], [INTEGRATED]]),
        st.sampled_from([[], [INTEGRATED], [MI355X]]),
    ),
)
environments = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(values) for name, values in VARIABLES.items()}
)


@hypothesis_settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    name=st.sampled_from(recipe_names(RECIPES)),
    words=st.lists(st.sampled_from(WORDS), max_size=4),
    env=environments,
    machine=machines,
)
def test_every_advice_removes_its_refusal_and_brings_no_other(
    name: str, words: list[list[str]], env: dict[str, str], machine: list[Gpu] | None
) -> None:
    own = settings(name, [word for group in words for word in group], env)
    refusals = check(own, machine, ALL)
    rules = {refusal.rule for refusal in refusals}
    for refusal in refusals:
        assert refusal.change
        for change in refusal.changes:
            after = changed(own, change, ALL)
            assert after is not None
            left = {one.rule for one in check(after, machine, ALL)}
            assert left <= rules - {refusal.rule}, f"{refusal}: {change}"
