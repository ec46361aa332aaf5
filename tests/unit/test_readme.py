# SPDX-License-Identifier: Apache-2.0
"""What README.md says of commands, recipes and files is so."""

import re

import pytest

from rocm_overlay.cli_recipe import TABLE_BEGIN, TABLE_END
from rocm_overlay.project import Project

ROOT = Project.find().root
README = (ROOT / "README.md").read_text()


def table_of(text):
    return text.split(TABLE_BEGIN)[1].split(TABLE_END)[0]


def test_the_table_of_recipes_is_the_recipes_own():
    assert table_of(README) == table_of((ROOT / "recipes" / "README.md").read_text())


def test_every_make_target_it_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"image", "test"} <= named <= targets


@pytest.mark.parametrize(
    "file",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/design.md",
        "docs/image.md",
        "patches/README.md",
        "recipes/README.md",
    ],
)
def test_every_file_that_a_document_links_to_exists(file):
    path = ROOT / file
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), f"{file} links to {link}"


def test_it_starts_with_what_the_project_is_in_at_most_five_lines():
    first = README.split("\n\n")[1]
    assert 1 <= len(first.splitlines()) <= 5
