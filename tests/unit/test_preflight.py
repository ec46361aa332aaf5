# SPDX-License-Identifier: Apache-2.0
"""What is refused before the weights are read. Each refusal is planted as a user would write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.machine import Gpu
from rocm_overlay.memory import plan
from rocm_overlay.preflight import Refusal, check, refuse
from rocm_overlay.recipe import load, recipe_names
from rocm_overlay.render import build_command
from rocm_overlay.settings import Settings, read_settings, with_card

RECIPES = Path(__file__).parents[2] / "recipes"
GIB = 1 << 30


def settings(name: str, words: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Settings:
    recipe = load(RECIPES, name)
    return read_settings(recipe, build_command(recipe, words), env or {})


def only(refusals: list[Refusal]) -> Refusal:
    assert len(refusals) == 1, [str(refusal) for refusal in refusals]
    return refusals[0]


@pytest.mark.parametrize("name", recipe_names(RECIPES))
def test_no_recipe_is_refused_on_its_own_hardware(name: str) -> None:
    assert check(settings(name)) == []


def test_two_ranks_on_mi300x_are_refused_with_four_as_the_change() -> None:
    refusal = only(check(settings("mi300x-tp4", ["-tp", "2", "--no-monokernel"])))
    assert refusal.flag == "--tensor-parallel-size"
    assert refusal.seen == "2"
    assert "below zero on a 192 GiB card" in refusal.why
    assert refusal.change == "--tensor-parallel-size 4"


def test_engram_tables_on_a_card_too_small_for_them_go_to_the_host() -> None:
    on_device = ["--engram-config.cpu_offload", "false"]
    refusal = only(check(settings("mi355x-tp2", [*on_device, "--gpu-memory-utilization", "0.6"])))
    assert refusal.flag == "--gpu-memory-utilization"
    small = with_card(settings("mi355x-tp2", on_device), [Gpu(0, "gfx950", 256, 256 * GIB)] * 2)
    refusal = only(check(small))
    assert refusal.flag == "--engram-config"
    assert refusal.change == "--engram-config.cpu_offload true"


def test_what_the_two_card_recipe_says_of_the_tables_is_what_the_plan_says() -> None:
    note = load(RECIPES, "mi355x-tp2").notes["engram-config"]
    on_host = plan(settings("mi355x-tp2").shape)
    on_device = plan(settings("mi355x-tp2", ["--engram-config.cpu_offload", "false"]).shape)
    for gib in (on_device.engram, on_device.kv_left, on_host.kv_left):
        assert f"{gib:.1f}" in note
    assert on_device.fits


@pytest.mark.parametrize("value", ["true", "True", "1", "on", '"yes"'])
def test_adaptive_verification_is_refused(value: str) -> None:
    words = ["--speculative-config.enable_adaptive_verification", value]
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


@pytest.mark.parametrize("value", ["1", "2", "true", ""])
def test_the_a4w4_mode_is_refused_with_the_kernels_only(value: str) -> None:
    env = {"VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": value}
    refusal = only(check(settings("mi355x-tp4", env=env)))
    assert refusal.flag == "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"
    assert refusal.change == "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4=0, or --no-monokernel"
    assert check(settings("mi355x-tp4", ["--no-monokernel"], env)) == []
    assert check(settings("mi355x-tp4", env={"VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "0"})) == []


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["-tp", "8"], "--tensor-parallel-size"),
        (["--enable-expert-parallel"], "--enable-expert-parallel"),
        (["-ep"], "--enable-expert-parallel"),
        (["-dp", "2"], "--data-parallel-size"),
        (["--enable-eplb"], "--enable-eplb"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size"),
        (["--decode-context-parallel-size", "2"], "--decode-context-parallel-size"),
        (["-pcp", "2"], "--prefill-context-parallel-size"),
        (["--moe-backend", "triton"], "--moe-backend"),
        (["-cc.cudagraph_mode=FULL"], "--compilation-config.cudagraph_mode"),
        (["-cc.cudagraph_mode=PIECEWISE"], "--compilation-config.cudagraph_mode"),
    ],
)
def test_what_the_kernels_are_not_built_for_is_refused_with_them_only(words: list[str], flag: str) -> None:
    assert only(check(settings("mi355x-tp4", words))).flag == flag
    assert check(settings("mi355x-tp4", [*words, "--no-monokernel"])) == []


def test_the_kernels_of_gfx942_run_at_tp_2_and_4_and_read_aiter_s_experts() -> None:
    asked = ["--monokernel", "--moe-backend"]
    refusal = only(check(settings("mi325x-tp4", ["-tp", "8", *asked, "aiter"])))
    assert "built for TP 2 and 4 on gfx942" in refusal.why
    assert refusal.change == "--no-monokernel, or --tensor-parallel-size 4"
    assert check(settings("mi325x-tp4", ["-tp", "2", *asked, "aiter"])) == []
    assert check(settings("mi300x-tp4", [*asked, "aiter-triton-mxfp4-bf16"])) == [], "beside 192 GiB too"
    refusal = only(check(settings("mi325x-tp4", [*asked, "triton_unfused"])))
    assert refusal.flag == "--moe-backend" and refusal.change == "--moe-backend aiter"


@pytest.mark.parametrize("name", ["VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"])
@pytest.mark.parametrize("recipe", ["mi355x-tp4", "mi325x-tp4"])
def test_the_kernels_without_aiters_experts_are_refused(recipe: str, name: str) -> None:
    refusal = only(check(settings(recipe, env={name: "0"})))
    assert refusal.flag == name
    assert refusal.change == f"{name}=1"
    assert check(settings(recipe, ["--no-monokernel"], {name: "0"})) == []


def test_kernels_asked_for_in_a_json_argument_are_the_same_kernels() -> None:
    words = ["--no-monokernel", "--kernel-config.monokernel", "true", "-tp", "8"]
    refusal = only(check(settings("mi355x-tp4", words)))
    assert refusal.change == ("--no-monokernel --kernel-config.monokernel false, or --tensor-parallel-size 4")


@pytest.mark.parametrize(
    "words",
    [
        ["--specialized-decode"],
        ["--specialized-decode", "monokernel"],
        ["--kernel-config.specialized_decode", "auto"],
        ["--kernel-config", '{"monokernel":"yes"}'],
    ],
)
def test_every_name_of_the_kernels_turns_them_on(words: list[str]) -> None:
    assert settings("mi300x-tp4", words).shape.monokernel
    assert "built for TP 2 and 4" in only(check(settings("mi300x-tp4", [*words, "-tp", "8"]))).why
    assert check(settings("mi300x-tp4", ["--no-monokernel", "-tp", "8"])) == []


def test_kernels_named_in_a_json_argument_are_turned_off_there() -> None:
    words = ["--kernel-config.specialized_decode", "auto", "-tp", "8"]
    refusal = only(check(settings("mi355x-tp4", words)))
    assert "--no-monokernel --kernel-config.specialized_decode null" in refusal.change


@pytest.mark.parametrize(
    "words",
    [
        ["--compilation-config", '{"cudagraph_mode":"FULL_AND_PIECEWISE"}'],
        ["--compilation-config.cudagraph_mode", "piecewise"],
        ["-cc", '{"cudagraph_mode":"PIECEWISE"}'],
        ["-cc.cudagraph_mode=PIECEWISE"],
        ["--compilation-config", "{}", "-O3"],
        ["--compilation-config", "{}", "-O", "1"],
    ],
)
def test_piecewise_graphs_are_refused_on_gfx942(words: list[str]) -> None:
    refusal = only(check(settings("mi325x-tp4", words)))
    assert refusal.flag == "--compilation-config.cudagraph_mode"
    assert refusal.change == "--compilation-config.cudagraph_mode FULL_DECODE_ONLY"


def test_the_optimization_level_without_graphs_is_accepted_on_gfx942() -> None:
    assert check(settings("mi325x-tp4", ["--compilation-config", "{}", "-O0"])) == []
    # A written mode stands over the level.
    assert settings("mi325x-tp4", ["-O0"]).graph_mode == "FULL_DECODE_ONLY"


def test_the_default_graph_mode_is_refused_on_gfx942() -> None:
    refusal = only(check(settings("mi325x-tp4", ["--compilation-config", "{}"])))
    assert refusal.seen == "FULL_AND_PIECEWISE"


def test_breakable_graphs_are_refused_on_gfx942_only() -> None:
    env = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
    refusal = only(check(settings("mi325x-tp4", env=env)))
    assert refusal.change == "VLLM_USE_BREAKABLE_CUDAGRAPH=0"
    assert check(settings("mi355x-tp4", env=env)) == []


@pytest.mark.parametrize("value", ["0", "", "true"])
def test_piecewise_graphs_without_breakable_ones_are_refused_on_gfx950(value: str) -> None:
    env = {"VLLM_USE_BREAKABLE_CUDAGRAPH": value}
    refusal = only(check(settings("mi355x-tp4", env=env)))
    assert refusal.change == (
        "VLLM_USE_BREAKABLE_CUDAGRAPH=1, or --compilation-config.cudagraph_mode FULL_DECODE_ONLY"
    )
    assert check(settings("mi355x-tp4", ["-cc.cudagraph_mode", "FULL_DECODE_ONLY"], env)) == []


def test_breakable_graphs_left_unset_are_refused_on_gfx942() -> None:
    recipe = replace(load(RECIPES, "mi325x-tp4"), env={"VLLM_ROCM_USE_AITER": "1"})
    refusal = only(check(read_settings(recipe, build_command(recipe), {})))
    assert refusal.flag == "VLLM_USE_BREAKABLE_CUDAGRAPH"
    assert refusal.seen.startswith("unset")


def test_a_server_without_graphs_may_leave_both_unset_on_gfx942() -> None:
    recipe = replace(load(RECIPES, "mi325x-tp4"), env={"VLLM_ROCM_USE_AITER": "1"})
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


@pytest.mark.parametrize("word", [".95", "0.95", "95e-2"])
def test_a_share_may_be_written_as_python_reads_it(word: str) -> None:
    assert settings("mi355x-tp4", ["--gpu-memory-utilization", word]).shape.utilization == 0.95
    assert settings("mi355x-tp4", [f"--device-memory-utilization={word}"]).shape.utilization == 0.95


@pytest.mark.parametrize(
    ("words", "on_host"),
    [
        (["--engram-config.cpu_offload", "False"], False),
        (["--engram-config.cpu_offload=0"], False),
        (["--engram-config.cpu_offload", "off"], False),
        (["--engram-config", '{"cpu_offload":"no"}'], False),
        (["--engram-config.cpu_offload", "1"], True),
        (["--engram-config", "{}"], True),
    ],
)
def test_where_the_tables_are_is_read_as_pydantic_reads_it(words: list[str], on_host: bool) -> None:
    assert settings("mi355x-tp4", words).shape.engram_on_host is on_host


@pytest.mark.parametrize(
    "words",
    [["--speculative-config.num_speculative_tokens", '"6"'], ["--spec-tokens", "6"]],
)
def test_drafts_are_read_from_either_flag(words: list[str]) -> None:
    assert settings("mi355x-tp4", words).shape.drafts == 6


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ([], 4),
        (["-pp", "2"], 8),
        (["-dp", "2"], 8),
        (["-pp", "2", "-dp", "2"], 16),
        (["-pcp", "2"], 8),
        (["-dcp", "2"], 4),
        (["-dp", "4", "--data-parallel-size-local", "1"], 4),
        (["-pp", "2", "--nnodes", "2"], 4),
    ],
)
def test_every_rank_on_this_machine_takes_a_gpu(words: list[str], gpus: int) -> None:
    assert settings("mi355x-tp4", words).gpus == gpus


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
        (["--gpu-memory-utilization", "nan"], "gpu-memory-utilization"),
        (["--engram-config", "host"], "engram-config"),
        (["--engram-config.cpu_offload", "perhaps"], "engram-config.cpu_offload"),
        (["-cc.cudagraph_mode", "SOME"], "compilation-config.cudagraph_mode"),
        (["--compilation-config", "{}", "-O7"], "optimization-level"),
        (["--speculative-config.num_speculative_tokens", "few"], "num_speculative_tokens"),
    ],
)
def test_a_value_that_cannot_be_judged_is_named(words: list[str], flag: str) -> None:
    with pytest.raises(OverlayError, match=f"{flag} cannot be read"):
        settings("mi355x-tp4", words)


def test_what_cannot_be_judged_is_shown_without_its_secrets() -> None:
    with pytest.raises(OverlayError) as caught:
        settings("mi355x-tp4", ["--speculative-config", '{"hf_token":"hush",}'])
    assert "hush" not in caught.value.render()


def test_the_machines_smallest_card_decides_the_plan() -> None:
    own = settings("mi325x-tp4", ["--gpu-memory-utilization", "0.5"])
    cards = [Gpu(0, "gfx942", 304, 256 * GIB), Gpu(1, "gfx942", 304, 192 * GIB)]
    assert check(with_card(own, cards[:1])) == []
    assert with_card(own, cards).shape.card_gib == 192
    assert check(with_card(own, cards)) != []


@pytest.mark.parametrize(
    "gpu",
    [Gpu(0, "gfx950", 256, 288 * GIB), Gpu(0, "gfx942", 38, 24 * GIB), Gpu(0, "gfx942", 304, 0)],
)
def test_memory_of_a_gpu_that_is_refused_otherwise_or_unknown_is_left_out(gpu: Gpu) -> None:
    own = settings("mi325x-tp4")
    assert with_card(own, [gpu]) == own
