# SPDX-License-Identifier: Apache-2.0
"""The laid tree is a copy of the base; nothing else is ever replaced by it."""

import importlib.metadata

import pytest

from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.install import verify
from rocm_overlay.tree import build_tree
from tests.tiny import make_base, make_sources, snapshot, write_files


@pytest.fixture
def sources(tmp_path):
    return make_sources(tmp_path / "project")


def test_the_tree_is_laid_and_the_base_is_as_it_was(sources, tmp_path):
    base = make_base(tmp_path / "base")
    before = snapshot(base)
    build_tree(sources, base, tmp_path / "tree")
    verify(tmp_path / "tree", sources)
    assert snapshot(base) == before
    assert (tmp_path / "tree/vllm-1.2.3.dist-info").is_dir()


def test_an_older_tree_is_replaced(sources, tmp_path):
    base = make_base(tmp_path / "base")
    build_tree(sources, base, tmp_path / "tree")
    write_files(tmp_path / "tree", {"vllm/amd/left.py": "from before"})
    build_tree(sources, base, tmp_path / "tree")
    assert not (tmp_path / "tree/vllm/amd/left.py").exists()


def test_a_folder_with_other_things_in_it_is_never_replaced(sources, tmp_path):
    write_files(tmp_path / "mine", {"thesis.txt": "all of it"})
    (tmp_path / "file").write_text("a file")
    before = snapshot(tmp_path)
    base = make_base(tmp_path / "base")
    for target in (tmp_path / "mine", tmp_path / "file"):
        with pytest.raises(OverlayError, match="not a laid tree"):
            build_tree(sources, base, target)
    after = {path: state for path, state in snapshot(tmp_path).items() if not path.startswith("base/")}
    assert after == before


def test_an_empty_folder_may_be_filled(sources, tmp_path):
    (tmp_path / "tree").mkdir()
    build_tree(sources, make_base(tmp_path / "base"), tmp_path / "tree")
    verify(tmp_path / "tree")


def test_a_failed_lay_leaves_the_older_tree(sources, tmp_path):
    build_tree(sources, make_base(tmp_path / "base"), tmp_path / "tree")
    before = snapshot(tmp_path / "tree")
    drifted = make_base(tmp_path / "drifted", {"vllm/amd/rocm.py": "changed = 1\n"})
    with pytest.raises(CheckFailed):
        build_tree(sources, drifted, tmp_path / "tree")
    assert snapshot(tmp_path / "tree") == before
    assert not list(tmp_path.glob(".rocm-overlay-*"))


@pytest.mark.parametrize("said", [None, "Metadata-Version: 2.1\nName: vllm\nVersion: 1.2.3\n"])
def test_a_laid_tree_has_a_version_also_of_a_base_that_says_none(sources, tmp_path, said):
    """A checkout and an image's package have no PKG-INFO; without a version vLLM drops Triton."""
    base = make_base(tmp_path / "base", {"PKG-INFO": said} if said else {})
    build_tree(sources, base, tmp_path / "tree")
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path / "tree")])
    assert found.version == "1.2.3"
