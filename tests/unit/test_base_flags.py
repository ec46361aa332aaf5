# SPDX-License-Identifier: Apache-2.0
"""Every recipe against the real vLLM's parser, configs and environment table; faults are planted.

The tree is imported once for all tests here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_overlay.base_flags import Case, Problem, find_problems, read_spellings, refuse
from rocm_overlay.cli_recipe import cases
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.flags import flag_table
from rocm_overlay.recipe import load, load_all, recipe_names
from rocm_overlay.render import build_command

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"

# A name, the words after `vllm serve`, the variables, and what must be said.
PLANTED: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "flag": (("m", "--monokernal"), {}, "unknown flag: --monokernal; did you mean --monokernel"),
    "negated flag": (("m", "--no-monokernal"), {}, "unknown flag: --no-monokernal"),
    "flag with a value": (("m", "--max-num-sqs=4"), {}, "unknown flag: --max-num-sqs; did you mean"),
    "flag of another base": (("m", "--mono-decode-layers"), {}, "unknown flag: --mono-decode-layers"),
    "variable": (("m",), {"VLLM_ROCM_USE_AITR": "1"}, "unknown variable: VLLM_ROCM_USE_AITR; did you mean"),
    "variable's value": (
        ("m",),
        {"VLLM_ENGINE_READY_TIMEOUT_S": "1h"},
        "VLLM_ENGINE_READY_TIMEOUT_S does not",
    ),
    "value": (("m", "--max-num-seqs", "many"), {}, "invalid int value: 'many'"),
    "choice": (("m", "--moe-backend", "aitr"), {}, "invalid choice: 'aitr'"),
    "stray word": (("m", "--monokernel", "yes"), {}, "unrecognized arguments: yes"),
    "key": (
        ("m", "--engram-config", '{"cpu_ofload":true}'),
        {},
        "unknown key in --engram-config: cpu_ofload; did you mean cpu_offload?",
    ),
    "key of a config that the parser leaves unread": (
        ("m", "--speculative-config", '{"enable_adaptive_verfication":false}'),
        {},
        "unknown key in --speculative-config: enable_adaptive_verfication; did you mean",
    ),
    "key of a config within a config": (
        ("m", "--compilation-config", '{"pass_config":{"fuse_nrom_quant":true}}'),
        {},
        "unknown key in --compilation-config.pass_config: fuse_nrom_quant",
    ),
    "value of a key": (
        ("m", "--speculative-config", '{"rejection_sample_method":"blok"}'),
        {},
        "--speculative-config.rejection_sample_method does not take this value",
    ),
}


# What a user writes over a recipe. The command that we make of it must be one that the base takes.
OVERRIDDEN = [
    ["-cc.cudagraph_mode=NONE"],
    ["-sc.num_speculative_tokens", "4", "-tp=2"],
    ["--engram_config.cpu_offload", "False"],
    ["--compilation-config.splitting_ops+", "a,b"],
    ["--compilation-config.max_cudagraph_capture_size", "1k", "-O3"],
    ["--disable-prefix-caching", "--swa-bounded-replay"],
    ["--device-memory-utilization=.95", "--max_num_batched_tokens", "16k"],
    ["--kernel-config.monokernel", "true", "--spec-tokens", "5"],
]


@pytest.fixture(scope="module")
def tree() -> Path:
    for folder in (ROOT / "build" / "tree", ROOT / "build" / "base"):
        if (folder / "vllm" / "envs.py").is_file():
            return folder
    pytest.fail("no vLLM source in build/tree or build/base: fetch the base first")


@pytest.fixture(scope="module")
def problems(tree: Path) -> list[Problem]:
    planted = [Case(name, words, env) for name, (words, env, _) in PLANTED.items()]
    commands = [build_command(load(RECIPES, "mi355x-tp4"), words) for words in OVERRIDDEN]
    overridden = [Case(str(c.given), tuple(c.argv()[2:]), dict(c.env)) for c in commands]
    return find_problems(tree, [*cases(load_all(RECIPES)), *planted, *overridden])


@pytest.mark.parametrize("name", recipe_names(RECIPES))
def test_the_base_takes_the_recipes_whole_command(problems: list[Problem], name: str) -> None:
    assert [str(problem) for problem in problems if problem.case == name] == []


@pytest.mark.parametrize("words", OVERRIDDEN)
def test_the_base_takes_a_recipe_with_overrides(problems: list[Problem], words: list[str]) -> None:
    assert [str(problem) for problem in problems if problem.case == str(tuple(words))] == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(problems: list[Problem], name: str) -> None:
    (found,) = [str(problem) for problem in problems if problem.case == name]
    assert PLANTED[name][2] in found


def test_the_table_of_spellings_is_the_bases(tree: Path) -> None:
    """After a change of base or patches: rocm-overlay recipes flags --write."""
    assert read_spellings(tree) == flag_table()


def test_problems_are_raised_together() -> None:
    with pytest.raises(CheckFailed, match="2 recipe settings are unknown") as caught:
        refuse([Problem("one", "unknown flag", "--a"), Problem("two", "unknown flag", "--b")], Path("tree"))
    assert "one: unknown flag: --a" in caught.value.render()
    assert "two: unknown flag: --b" in caught.value.render()
    refuse([], Path("tree"))


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match="no vLLM to check recipes against"):
        find_problems(tmp_path, [])


def test_a_tree_that_cannot_be_imported_shows_why(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('half a tree')\n")
    (package / "envs.py").write_text("")
    with pytest.raises(OverlayError, match="half a tree"):
        find_problems(tmp_path, [])
