# SPDX-License-Identifier: Apache-2.0
"""The tool's `recipes` commands."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rocm_overlay.cli_recipe import (
    TABLE_BEGIN,
    TABLE_END,
    check_images,
    explanation,
    recipe_table,
    register,
    with_table,
)
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.recipe import load, load_all, recipe_names

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_OVERLAY_HOME", str(ROOT))


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["recipes", *argv])
    return int(arguments.run(arguments))


def test_list_names_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    said = capsys.readouterr().out
    for name in recipe_names(RECIPES):
        assert f"\n{name} " in said


def test_explain_says_what_each_flag_is_for_and_whose_the_figures_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("explain", "bench-gfx950-32k") == 0
    said = capsys.readouterr().out
    assert "extends   mi355x-tp4" in said
    assert "block-size = 128\n      The MXFP4 indexer's block" in said
    assert "KV left" in said
    assert "published by vLLM pull request" in said
    assert "measured" not in said


@pytest.mark.parametrize("name", recipe_names(RECIPES))
def test_every_recipe_can_be_explained(name: str) -> None:
    assert name in explanation(load(RECIPES, name))


@pytest.mark.parametrize(
    ("form", "start"),
    [("serve", "VLLM_ROCM_USE_AITER=1 "), ("docker", "docker run "), ("compose", "services:")],
)
def test_render_prints_the_form_alone_and_the_overrides_aside(
    capsys: pytest.CaptureFixture[str], form: str, start: str
) -> None:
    assert run("render", "mi355x-tp4", "--as", form, "--", "--max-num-seqs", "64") == 0
    said = capsys.readouterr()
    assert said.out.startswith(start)
    assert "--max-num-seqs" in said.out and "256" not in said.out
    assert said.err == "# override max-num-seqs: 256 -> 64\n"


@pytest.mark.parametrize(
    "argv",
    [["--as", "docker", "--image", "mine:1", "mi355x-tp4"], ["mi355x-tp4", "--as=docker", "--image=mine:1"]],
)
def test_render_takes_its_flags_before_and_behind_the_name(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert run("render", *argv) == 0
    assert capsys.readouterr().out.endswith("mine:1 \\\n  --recipe mi355x-tp4\n")


def test_render_refuses_a_form_it_does_not_have() -> None:
    with pytest.raises(SystemExit):
        run("render", "mi355x-tp4", "--as", "podman")


def test_a_servers_flag_without_the_dashes_is_refused_with_the_right_command() -> None:
    with pytest.raises(OverlayError, match="does not know an argument") as caught:
        run("render", "mi355x-tp4", "--max-num-seqs", "64")
    assert caught.value.fix == "recipes render mi355x-tp4 -- --max-num-seqs 64"


def test_the_readmes_table_is_the_recipes() -> None:
    assert run("table", "--check") == 0


def test_a_stale_table_fails_the_check_and_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_OVERLAY_HOME", str(tmp_path))
    (tmp_path / "base.toml").write_text("")
    folder = tmp_path / "recipes"
    folder.mkdir()
    for name in recipe_names(RECIPES):
        (folder / f"{name}.yaml").write_text((RECIPES / f"{name}.yaml").read_text())
    readmes = (folder / "README.md", tmp_path / "README.md")
    for readme in readmes:
        readme.write_text(f"Before.\n{TABLE_BEGIN}\n| stale |\n{TABLE_END}\nAfter.\n")
    with pytest.raises(CheckFailed, match="is not the recipes'"):
        run("table", "--check")
    assert run("table", "--write") == 0
    assert run("table", "--check") == 0
    for readme in readmes:
        text = readme.read_text()
        assert text.startswith("Before.\n") and text.endswith("\nAfter.\n")
        assert "stale" not in text


@pytest.mark.parametrize("text", ["", TABLE_BEGIN, f"{TABLE_END}\n{TABLE_BEGIN}"])
def test_a_readme_without_the_marks_is_refused(text: str) -> None:
    with pytest.raises(OverlayError, match="no place for the table"):
        with_table(text, "| table |")


def test_the_table_has_a_row_for_each_recipe() -> None:
    recipes = load_all(RECIPES)
    assert len(recipe_table(recipes).splitlines()) == 2 + len(recipes)


def test_every_recipes_image_is_in_the_pin(tmp_path: Path) -> None:
    recipes = load_all(RECIPES)
    check_images(recipes, ROOT / "base.toml")
    pin = tmp_path / "base.toml"
    pin.write_text('[image.gfx950]\nreference = "x"\n')
    with pytest.raises(CheckFailed, match="the pin has no image gfx942"):
        check_images(recipes, pin)
