# SPDX-License-Identifier: Apache-2.0
"""What README.md says of commands, recipes and files is so."""

import re

import pytest

from rocm_overlay.cli import build_parser
from rocm_overlay.cli_recipe import TABLE_BEGIN, TABLE_END
from rocm_overlay.project import Project

ROOT = Project.find().root
README = (ROOT / "README.md").read_text()


def table_of(text):
    return text.split(TABLE_BEGIN)[1].split(TABLE_END)[0]


def test_the_table_of_recipes_is_the_recipes_own():
    assert table_of(README) == table_of((ROOT / "recipes" / "README.md").read_text())


MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
# What the Makefile, documents and error messages call a verb of the tool by.
VERBS = build_parser()._subparsers._group_actions[0].choices


def test_every_make_target_that_documents_and_messages_name_exists():
    assert {"image", "test"} <= set(re.findall(r"\bmake ([a-z-]+)", README))
    files = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("recipes/*"),
    ]
    for path in files:
        named = set(re.findall(r"[`\"]make ([a-z][a-z-]+)", path.read_text()))
        assert named <= TARGETS, path


def test_every_target_is_phony_and_every_phony_one_has_a_rule():
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    assert phony == TARGETS


def test_every_verb_that_the_makefile_calls_exists():
    called = set(re.findall(r"\$\(TOOL\) ([a-z-]+)", MAKEFILE))
    assert called <= set(VERBS)


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
