# SPDX-License-Identifier: Apache-2.0
"""The tool's `recipes` commands."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rocm_overlay import __version__, cli, cli_recipe
from rocm_overlay.cli_recipe import (
    TABLE_BEGIN,
    TABLE_END,
    built_image,
    check_images,
    default_tree,
    explanation,
    recipe_table,
    register,
    with_table,
)
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.flags import flag_table
from rocm_overlay.image import image_tags
from rocm_overlay.pin import Pin
from rocm_overlay.project import Project
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


def test_render_needs_no_form_before_the_servers_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("render", "mi355x-tp4", "--", "--max-num-seqs", "64") == 0
    said = capsys.readouterr()
    assert "--max-num-seqs 64" in said.out
    assert said.err == "# override max-num-seqs: 256 -> 64\n"


def test_what_stands_behind_the_dashes_is_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("render", "mi355x-tp4", "--as", "docker", "--", "--image=mine:1") == 0
    assert capsys.readouterr().out.endswith("--recipe mi355x-tp4 -- --image=mine:1\n")


@pytest.mark.parametrize(
    "argv",
    [["--as", "docker", "--image", "mine:1", "mi355x-tp4"], ["mi355x-tp4", "--as=docker", "--image=mine:1"]],
)
def test_render_takes_its_flags_before_and_behind_the_name(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert run("render", *argv) == 0
    assert capsys.readouterr().out.endswith("mine:1 \\\n  --recipe mi355x-tp4\n")


@pytest.mark.parametrize("name", recipe_names(RECIPES))
def test_the_image_is_the_one_that_make_image_tags(name: str) -> None:
    tags = image_tags(Pin.load(ROOT / "base.toml"), load(RECIPES, name).image, __version__, stand_in=False)
    assert built_image(load(RECIPES, name), Project(ROOT)) == tags[0]


def test_each_architecture_has_its_own_image_where_the_pin_has_two(tmp_path: Path) -> None:
    pin = (ROOT / "base.toml").read_text()
    head, gfx942 = pin.split("[image.gfx942]")
    (tmp_path / "base.toml").write_text(
        f"{head}[image.gfx942]{gfx942.replace('v0.33.0', 'nightly-another', 1)}"
    )
    for name, tag in (("mi355x-tp4", "gfx950"), ("mi325x-tp4", "gfx942")):
        image = built_image(load(RECIPES, name), Project(tmp_path))
        assert image == f"vllm-openai-rocm:{__version__}-{tag}"


def test_render_refuses_a_form_it_does_not_have() -> None:
    with pytest.raises(SystemExit):
        run("render", "mi355x-tp4", "--as", "podman")


def test_a_servers_flag_without_the_dashes_is_refused_with_the_right_command() -> None:
    with pytest.raises(OverlayError, match="does not know an argument") as caught:
        run("render", "mi355x-tp4", "--max-num-seqs", "64")
    assert caught.value.fix == "recipes render mi355x-tp4 -- --max-num-seqs 64"


@pytest.mark.parametrize(
    "argv",
    [
        ["mi355x-tp4", "--hf-token", "hush"],
        ["mi355x-tp4", "--api-key=hush"],
        ["--hf-tok", "hush", "mi355x-tp4"],
        ["mi355x-tp4", "--hf-toke", "hush"],
        ["mi355x-tp4", "--api-k=hush"],
        ["mi355x-tp4", "--", "--hf-tok", "hush"],
        ["mi355x-tp4", "--as", "docker", "--", "--hf-token", "hush"],
        ["mi355x-tp4", "--", "hush", "hush"],
    ],
)
def test_no_error_of_render_tells_a_secret(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(OverlayError) as caught:
        run("render", *argv)
    said = capsys.readouterr()
    assert "hush" not in caught.value.render() + said.out + said.err


def test_the_whole_tool_leaves_the_servers_flags_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "render", "mi355x-tp4", "--", "--seed", "1"]) == 0
    assert "--seed 1" in capsys.readouterr().out
    assert cli.main(["recipes", "render", "mi355x-tp4", "--hf-token", "hush"]) == 2
    assert "hush" not in capsys.readouterr().err


def test_a_table_of_flags_that_is_not_the_trees_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_recipe.base_flags, "read_spellings", lambda _: dict(flag_table()))
    assert run("flags", "--tree", str(tmp_path)) == 0
    assert f"{len(flag_table())} flags" in capsys.readouterr().out
    monkeypatch.setattr(cli_recipe.base_flags, "read_spellings", lambda _: {})
    with pytest.raises(CheckFailed, match="is not the table of the vllm serve") as caught:
        run("flags", "--tree", str(tmp_path))
    assert caught.value.fix == "rocm-overlay recipes flags --write"


def test_the_tree_to_check_against_is_the_checkouts_or_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_recipe, "find_site", lambda: Path("/site"))
    assert default_tree(Project(tmp_path)) == Path("/site")
    (tmp_path / "build/tree/vllm").mkdir(parents=True)
    assert default_tree(Project(tmp_path)) == tmp_path / "build/tree"


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
