# SPDX-License-Identifier: Apache-2.0
"""The laid tree's mono folder holds our kernels, and of the base's files those that another model imports."""

import shutil

import pytest

from rocm_overlay.base_index import BaseIndex
from rocm_overlay.overlay import module_name
from rocm_overlay.plan import Sources
from rocm_overlay.project import Project
from rocm_overlay.removed_imports import find_importers
from tests.tiny import write_files

PROJECT = Project.find()
MONO = "vllm/models/deepseek_v41/amd/mono"
MINIMAX = "vllm/models/minimax_m3/amd/specialized_decode"
OURS = {file.path for file in Sources.load(PROJECT).overlay.files}


def files_below(tree, folder):
    found = (path.relative_to(tree).as_posix() for path in (tree / folder).rglob("*") if path.is_file())
    return {path for path in found if "__pycache__" not in path}


def needless(tree, ours=OURS):
    """Files of the mono folder that are not ours and that no other model's file imports, directly or not."""
    index = BaseIndex(tree)
    theirs = files_below(tree, MONO) - ours
    outside = {path for path in files_below(tree, "vllm") if path.endswith(".py")} - theirs - ours
    paths = {module_name(path): path for path in theirs}
    needed: set[str] = set()
    waiting = {paths[one.module] for one in find_importers(index, outside, theirs)}
    while waiting:
        needed |= waiting
        waiting = {paths[one.module] for one in find_importers(index, needed, theirs - needed)}
    return theirs - needed


@pytest.fixture
def copied(tmp_path):
    """The folder and the one that imports from it, in a tree that a test may spoil."""
    for folder in (MONO, MINIMAX):
        shutil.copytree(PROJECT.tree / folder, tmp_path / folder)
    return tmp_path


def test_no_kernel_of_the_base_is_left():
    assert needless(PROJECT.tree) == set()
    left = files_below(PROJECT.tree, MONO) - OURS
    assert {path.removeprefix(f"{MONO}/").partition("/")[0] for path in left} == {"common"}


def test_no_folder_is_left_without_a_file():
    assert [
        path for path in (PROJECT.tree / MONO).rglob("*") if path.is_dir() and not any(path.iterdir())
    ] == []


@pytest.mark.parametrize("name", ["runner.py", "stages/moe.py", "common/mx.py", "attention/back.py"])
def test_a_kernel_that_is_back_is_found(copied, name):
    assert needless(copied) == set()
    write_files(copied, {f"{MONO}/{name}": (PROJECT.base / MONO / name).read_text()})
    assert needless(copied) == {f"{MONO}/{name}"}


def test_what_the_other_model_no_longer_imports_is_found(copied):
    shutil.rmtree(copied / MINIMAX)
    assert needless(copied) == files_below(copied, MONO) - OURS != set()


def test_a_file_that_only_ours_import_is_found(copied):
    write_files(copied, {f"{MONO}/own.py": "x = 1\n", f"{MONO}/builds.py": "from . import own\n"})
    assert needless(copied) == {f"{MONO}/own.py"}
