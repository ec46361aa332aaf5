# SPDX-License-Identifier: Apache-2.0
"""No file of a tree may import a module that we remove from it."""

import pytest

from rocm_overlay.base_index import BaseIndex
from rocm_overlay.errors import OverlayError
from rocm_overlay.export_imports import refuse_missing_imports
from rocm_overlay.export_plan import load_plan
from rocm_overlay.plan import Sources
from rocm_overlay.project import Project
from rocm_overlay.rebase_checks import Checks, importers_of_removed
from rocm_overlay.removed_imports import find_importers
from tests.tiny import make_base, make_project, write_files

PROJECT = Project.find()
REMOVED = ["vllm/amd/old.py", "vllm/amd/older/__init__.py", "vllm/amd/notes.md"]


@pytest.mark.parametrize(
    ("path", "text", "module"),
    [
        ("vllm/user.py", "import vllm.amd.old\n", "vllm.amd.old"),
        ("vllm/user.py", "import vllm.amd.old as o\n", "vllm.amd.old"),
        ("vllm/user.py", "from vllm.amd.old import unused\n", "vllm.amd.old"),
        ("vllm/user.py", "from vllm.amd import other, old\n", "vllm.amd.old"),
        ("vllm/user.py", "from vllm.amd.older import x\n", "vllm.amd.older"),
        ("vllm/user.py", "def f():\n    from vllm.amd import old\n", "vllm.amd.old"),
        ("vllm/user.py", "import importlib\nimportlib.import_module('vllm.amd.old')\n", "vllm.amd.old"),
        ("vllm/amd/user.py", "from . import old\n", "vllm.amd.old"),
        ("vllm/amd/deep/user.py", "from ..old import unused\n", "vllm.amd.old"),
        ("vllm/amd/user.py", "from . import (  # ours\n    other,\n    old,\n)\n", "vllm.amd.old"),
        ("tests/user.py", "from vllm.amd import old\n", "vllm.amd.old"),
        ("vllm/user.py", "from vllm.amd import rocm\n", None),
        ("vllm/user.py", "import vllm.amd.older_still\n", None),
        ("vllm/user.py", "TEXT = 'vllm.amd.old'\n", None),
        ("vllm/amd/old.py", "from vllm.amd import older\n", None),
    ],
)
def test_every_form_of_import_is_found(tmp_path, path, text, module):
    write_files(tmp_path, {path: text})
    found = find_importers(BaseIndex(tmp_path), [path], REMOVED)
    assert [(one.path, one.line, one.module) for one in found] == (
        [] if module is None else [(path, text[: text.rindex("import")].count("\n") + 1, module)]
    )


def test_the_laid_tree_imports_nothing_that_we_remove():
    assert importers_of_removed(Sources.load(PROJECT), PROJECT.tree) == []


def test_a_rebase_stops_where_the_new_base_uses_what_we_remove(tmp_path):
    project = make_project(tmp_path / "p")
    make_base(project.tree, {"vllm/new_user.py": "\nfrom vllm.amd import old\n"})
    (found,) = Checks()._callers(project)
    assert (found.what, found.found) == ("vllm/new_user.py:2", "imports vllm.amd.old, which we remove")
    assert found.stops


PULL = """
[[pr]]
name = "all"
title = "t"
files = ["*"]
patches = ["*"]
remove = ["vllm/amd/old.py"]
merged_when = "never: recognised file by file"
purpose = ["p"]
"""


@pytest.mark.parametrize("path", ["vllm/user.py", "tests/test_old.py", "tools/old.py"])
def test_a_pull_request_that_removes_what_upstream_imports_is_refused(tmp_path, path):
    project = make_project(tmp_path / "p")
    write_files(project.root, {"upstream/prs.toml": PULL})
    base, plan = make_base(tmp_path / "base"), load_plan(project.root, Sources.load(project))
    gone = {"vllm/amd/old.py": None}
    refuse_missing_imports(plan.pulls[0], plan, base, {}, gone)
    write_files(base, {path: "from vllm.amd.old import unused\n"})
    with pytest.raises(OverlayError, match=f"all removes what is still imported.*\n.*{path}:1 imports"):
        refuse_missing_imports(plan.pulls[0], plan, base, {}, gone)
    refuse_missing_imports(plan.pulls[0], plan, base, {}, {**gone, path: None})
    refuse_missing_imports(plan.pulls[0], plan, base, {}, {**gone, path: "x = 1\n"})
    with pytest.raises(OverlayError, match="removes what is still imported"):
        refuse_missing_imports(plan.pulls[0], plan, base, {"vllm/own.py": "import vllm.amd.old\n"}, gone)
