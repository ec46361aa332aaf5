# SPDX-License-Identifier: Apache-2.0
"""What is refused before the weights are read. Each refusal is planted as a user would write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rocm_overlay import preflight
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.machine import Gpu
from rocm_overlay.preflight import Refusal, Settings, check, check_machine, read_settings, refuse, with_card
from rocm_overlay.recipe import load, recipe_names
from rocm_overlay.render import build_command

RECIPES = Path(__file__).parents[2] / "recipes"
GIB = 1 << 30


def settings(name: str, words: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Settings:
    recipe = load(RECIPES, name)
    command = build_command(recipe, words)
    return read_settings(recipe, command, {**command.env, **(env or {})})


def only(refusals: list[Refusal]) -> Refusal:
    assert len(refusals) == 1, [str(refusal) for refusal in refusals]
    return refusals[0]


@pytest.mark.parametrize("name", recipe_names(RECIPES))
def test_no_recipe_is_refused_on_its_own_hardware(name: str) -> None:
    assert check(settings(name)) == []


def test_two_ranks_on_mi300x_are_refused_with_four_as_the_change() -> None:
    refusal = only(check(settings("mi300x-tp4", ["-tp", "2"])))
    assert refusal.flag == "--tensor-parallel-size"
    assert refusal.seen == "2"
    assert "below zero on a 192 GiB card" in refusal.why
    assert refusal.change == "--tensor-parallel-size 4"


def test_the_kernels_copies_are_refused_on_mi300x() -> None:
    refusal = only(check(settings("mi300x-tp4", ["--monokernel"])))
    assert "below zero on a 192 GiB card" in refusal.why


def test_engram_tables_on_a_card_too_small_for_them_go_to_the_host() -> None:
    on_device = ["--engram-config.cpu_offload", "false"]
    refusal = only(check(settings("mi355x-tp2", [*on_device, "--gpu-memory-utilization", "0.6"])))
    assert refusal.flag == "--gpu-memory-utilization"
    small = with_card(settings("mi355x-tp2", on_device), [Gpu(0, "gfx950", 256, 256 * GIB)] * 2)
    refusal = only(check(small))
    assert refusal.flag == "--engram-config"
    assert refusal.change == """--engram-config '{"cpu_offload":true}'"""


def test_adaptive_verification_is_refused() -> None:
    words = ["--speculative-config.enable_adaptive_verification", "true"]
    refusal = only(check(settings("mi355x-tp4", words)))
    assert refusal.change == "--speculative-config.enable_adaptive_verification false"
    replaced = ["--speculative-config", '{"method":"dspark","enable_adaptive_verification":true}']
    assert only(check(settings("mi355x-tp4", replaced))).flag == refusal.flag


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["--max-num-batched-tokens", "1535"], "--max-num-batched-tokens 1536, or --max-num-seqs 255"),
        (["--max-num-batched-tokens", "5"], "--max-num-batched-tokens 1536"),
        (["--max-num-seqs", "3000"], "--max-num-batched-tokens 18000, or --max-num-seqs 2730"),
    ],
)
def test_a_token_budget_below_a_full_decode_step_is_refused(words: list[str], change: str) -> None:
    assert only(check(settings("mi355x-tp4", words))).change == change


def test_a_token_budget_of_exactly_a_full_decode_step_is_accepted() -> None:
    assert check(settings("mi355x-tp4", ["--max-num-batched-tokens", "1536"])) == []


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_the_a4w4_mode_is_refused_with_the_kernels_only(value: str) -> None:
    env = {"VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": value}
    refusal = only(check(settings("mi355x-tp4", env=env)))
    assert refusal.flag == "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"
    assert "unset VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4" in refusal.change
    assert check(settings("mi355x-tp4", ["--no-monokernel"], env)) == []
    assert check(settings("mi355x-tp4", env={"VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "0"})) == []


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["-tp", "8"], "--tensor-parallel-size"),
        (["--enable-expert-parallel"], "--enable-expert-parallel"),
        (["-ep"], "--enable-expert-parallel"),
        (["-dp", "2"], "--data-parallel-size"),
        (["--moe-backend", "triton"], "--moe-backend"),
    ],
)
def test_what_the_kernels_are_not_built_for_is_refused_with_them_only(words: list[str], flag: str) -> None:
    assert only(check(settings("mi355x-tp4", words))).flag == flag
    assert check(settings("mi355x-tp4", [*words, "--no-monokernel"])) == []


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE", "piecewise"])
def test_piecewise_graphs_are_refused_on_gfx942(mode: str) -> None:
    words = ["--compilation-config", f'{{"cudagraph_mode":"{mode}"}}']
    refusal = only(check(settings("mi325x-tp4", words)))
    assert refusal.flag == "--compilation-config.cudagraph_mode"
    assert refusal.change == "--compilation-config.cudagraph_mode FULL_DECODE_ONLY"


def test_the_default_graph_mode_is_refused_on_gfx942() -> None:
    refusal = only(check(settings("mi325x-tp4", ["--compilation-config", "{}"])))
    assert refusal.seen == "FULL_AND_PIECEWISE"


def test_breakable_graphs_are_refused_on_gfx942_only() -> None:
    env = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
    refusal = only(check(settings("mi325x-tp4", env=env)))
    assert refusal.change == "VLLM_USE_BREAKABLE_CUDAGRAPH=0"
    assert check(settings("mi355x-tp4", env=env)) == []


def test_breakable_graphs_left_unset_are_refused_on_gfx942() -> None:
    recipe = load(RECIPES, "mi325x-tp4")
    command = build_command(recipe)
    refusal = only(check(read_settings(recipe, command, {})))
    assert refusal.flag == "VLLM_USE_BREAKABLE_CUDAGRAPH"
    assert refusal.seen.startswith("unset")


def test_a_server_without_graphs_may_leave_both_unset_on_gfx942() -> None:
    recipe = load(RECIPES, "mi325x-tp4")
    command = build_command(recipe, ["--enforce-eager", "--compilation-config", "{}"])
    assert check(read_settings(recipe, command, {})) == []


def test_all_reasons_are_reported_at_once() -> None:
    words = [
        "--speculative-config.enable_adaptive_verification",
        "true",
        "--max-num-batched-tokens",
        "100",
    ]
    found = check(settings("mi325x-tp4", words, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}))
    with pytest.raises(CheckFailed) as caught:
        refuse("mi325x-tp4", found)
    message = caught.value.render()
    assert "for 3 reasons" in message
    for part in ("adaptive_verification", "--max-num-batched-tokens 768", "VLLM_USE_BREAKABLE_CUDAGRAPH=0"):
        assert part in message
    assert caught.value.exit_code == 1


def test_nothing_is_raised_without_reasons() -> None:
    refuse("mi325x-tp4", [])


# Values as vLLM reads them.


@pytest.mark.parametrize(
    ("word", "tokens"), [("16384", 16384), ("16k", 16000), ("16K", 16384), ("1.5k", 1500)]
)
def test_numbers_may_be_written_short(word: str, tokens: int) -> None:
    assert settings("mi355x-tp4", ["--max-num-batched-tokens", word]).shape.max_num_batched_tokens == tokens


@pytest.mark.parametrize("word", ["auto", "-1"])
def test_an_automatic_context_is_the_models(word: str) -> None:
    assert settings("mi355x-tp4", ["--max-model-len", word]).shape.max_model_len == 1048576


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--max-num-seqs", "many"], "max-num-seqs"),
        (["--max-num-seqs", "0"], "max-num-seqs"),
        (["--max-num-seqs"], "max-num-seqs"),
        (["--gpu-memory-utilization", "90"], "gpu-memory-utilization"),
        (["--engram-config", "host"], "engram-config"),
        (["--speculative-config.num_speculative_tokens", "few"], "num_speculative_tokens"),
    ],
)
def test_a_value_that_cannot_be_judged_is_named(words: list[str], flag: str) -> None:
    with pytest.raises(OverlayError, match=f"{flag} cannot be read"):
        settings("mi355x-tp4", words)


# The machine.

MI355X = Gpu(0, "gfx950", 256, 288 * GIB)
MI300X = Gpu(0, "gfx942", 304, 192 * GIB)
CPX = Gpu(0, "gfx942", 38, 24 * GIB)


def machine(name: str, gpus: Sequence[Gpu], fitting: str = "") -> list[Refusal]:
    return check_machine(load(RECIPES, name), settings(name), gpus, fitting)


def test_the_recipes_own_machine_is_accepted() -> None:
    assert machine("mi355x-tp4", [MI355X] * 8) == []


@pytest.mark.parametrize(
    ("count", "change"),
    [(3, "--tensor-parallel-size 2"), (1, "--tensor-parallel-size 1"), (0, "--device /dev/kfd")],
)
def test_too_few_gpus_are_counted(count: int, change: str) -> None:
    refusal = only(machine("mi355x-tp4", [MI355X] * count))
    assert f"needs 4 GPUs, {count} visible" in refusal.why
    assert change in refusal.change


def test_another_architecture_is_refused_with_a_recipe_that_fits() -> None:
    refusal = only(machine("mi355x-tp4", [MI300X] * 8, "mi300x-tp4"))
    assert refusal.why == "is for gfx950, this machine has gfx942"
    assert refusal.change == "--recipe mi300x-tp4"


def test_a_partitioned_gpu_is_named_as_such() -> None:
    refusal = only(machine("mi325x-tp4", [CPX] * 8))
    assert "GPU 0 is a partition, 38 of 304 compute units" in refusal.why
    assert f"need {preflight.KERNEL_COMPUTE_UNITS} resident" in refusal.why


def test_the_machines_smallest_card_decides_the_plan() -> None:
    own = settings("mi325x-tp4")
    cards = [Gpu(0, "gfx942", 304, 256 * GIB), MI300X]
    assert with_card(own, cards).shape.card_gib == 192
    assert check(with_card(own, cards)) != []


@pytest.mark.parametrize("gpu", [MI355X, CPX, Gpu(0, "gfx942", 304, 0)])
def test_memory_of_a_gpu_that_is_refused_otherwise_or_unknown_is_left_out(gpu: Gpu) -> None:
    own = settings("mi325x-tp4")
    assert with_card(own, [gpu]) == own
