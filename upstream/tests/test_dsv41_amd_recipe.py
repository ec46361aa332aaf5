# SPDX-License-Identifier: Apache-2.0
"""The recipe's AMD commands parse, and ask for the mono kernels only where they are built for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.models.specialized_decode.deployment import TREE  # noqa: F401

from vllm import envs  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode_spec import SPEC  # isort: skip

NAME = "recipes/models/deepseek-ai/DeepSeek-V4.1-Flash.yaml"
RECIPE = yaml.safe_load((Path(__file__).resolve().parents[4] / NAME).read_text(encoding="utf-8"))
STRATEGY = RECIPE["strategy_overrides"]["single_node_tp"]
# CDNA generation, and whether the command decodes on the kernels.
CARDS = {"mi300x": (3, False), "mi325x": (3, True), "mi350x": (4, True), "mi355x": (4, True)}


def card(name: str) -> dict[str, Any]:
    """What the recipe sets for one card beside what it sets for AMD."""
    return STRATEGY["hardware_overrides"][name]


def tp_size(name: str) -> int:
    return STRATEGY["tp"].get(name, STRATEGY["tp"]["default"])


def command(name: str) -> list[str]:
    """The arguments behind the model's name, in the order in which the recipe's site joins them."""
    drafts = RECIPE["features"]["spec_decoding"]["hardware_overrides"]["amd"]["args"]
    words = [*RECIPE["model"]["base_args"], "--tensor-parallel-size", str(tp_size(name))]
    return [*words, *RECIPE["hardware_overrides"]["amd"]["extra_args"], *card(name)["extra_args"], *drafts]


def parse(words: list[str]) -> Any:
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    (serve,) = importlib.import_module("vllm.entrypoints.cli.serve").cmd_init()
    return serve.subparser_init(parser.add_subparsers()).parse_args([RECIPE["model"]["model_id"], *words])


@pytest.mark.parametrize("name", CARDS)
def test_a_command_parses_and_asks_for_kernels_that_are_built_for_it(name: str) -> None:
    cdna, kernels = CARDS[name]
    parsed = parse(command(name))
    assert (parsed.monokernel is True) == kernels
    assert not kernels or tp_size(name) in SPEC.max_rows[cdna]


@pytest.mark.parametrize("name", CARDS)
def test_its_variables_are_vllms(name: str) -> None:
    names = {*RECIPE["hardware_overrides"]["amd"]["extra_env"], *card(name)["extra_env"]}
    assert {one for one in names if one.startswith("VLLM_")} <= set(envs.environment_variables)


def test_mi350x_decodes_as_mi355x_does() -> None:
    ours, theirs = parse(command("mi350x")), parse(command("mi355x"))
    for field in ("monokernel", "attention_config", "block_size", "moe_backend"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert tp_size("mi350x") == 4 and ours.engram_config.cpu_offload is False


def test_the_guide_says_which_steps_of_mi325x_run_on_the_kernels() -> None:
    assert "weight copies" not in RECIPE["guide"]
    rows, guide = SPEC.max_rows[CARDS["mi325x"][0]], " ".join(RECIPE["guide"].split())
    assert f"at TP4 on decode steps of up to {rows[4]} rows" in guide
    assert f"and at TP2 of up to {rows[2]} rows" in guide
    assert "For TP2, pass `--tensor-parallel-size 2`." in guide
    parsed = parse([*command("mi325x"), "--tensor-parallel-size", "2"])
    assert parsed.monokernel is True and parsed.tensor_parallel_size == 2
