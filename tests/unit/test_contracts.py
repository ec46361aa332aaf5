# SPDX-License-Identifier: Apache-2.0
"""The contract list: what is recorded of the base, and each drift of one found by reading and by import."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest

from rocm_overlay import contract_import, contracts
from rocm_overlay.base_index import BaseIndex, parameters
from rocm_overlay.contract_callers import find_misfits
from rocm_overlay.contract_checks import current
from rocm_overlay.contracts import compare, load, text_of
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.overlay import load_overlay
from rocm_overlay.plan import Sources
from rocm_overlay.project import Project
from tests.tiny import BASE, make_base, write_files
from tests.tiny_rebase import git, make_checkout, make_session, make_target

PROJECT = Project.find()
LIBRARY = """
from dataclasses import dataclass
from enum import Enum

LIMIT = 48


class Mode(Enum):
    FULL = 2


@dataclass
class Inner:
    rows: int = 4
    name: str = "x"


@dataclass
class Config:
    inner: Inner
    size: int = 1

    @property
    def doubled(self):
        return 2 * self.size


class Runner:
    def __init__(self, config, device="cuda", *, strict=False):
        self.state = None

    def forward(self, x, y, fold=True):
        return x

    def reset(self):
        pass


def build(cam, width=128, *, noncausal=False, **rest):
    return width
"""
OURS = """
from __future__ import annotations

from typing import TYPE_CHECKING

import vllm.settings as settings
from vllm.lib import LIMIT, Mode, Runner, build

if TYPE_CHECKING:
    from vllm.lib import Config


class Mine(Runner):
    def forward(self, x, y, fold=True):
        return super().forward(x, y, fold)

    def own(self):
        return 1


def launch(config: Config, maybe: "Config | None" = None):
    assert Mode.FULL and settings.FLAG and LIMIT
    runner = Runner(config, strict=True)
    return build(config, noncausal=config.inner.rows > maybe.size) and runner
"""
REVIEWED = """
[[contract]]
module = "vllm.lib"
name = "Runner"
members = ["reset", "state"]
why = "called through another object"
"""


@pytest.fixture
def tiny(tmp_path):
    """A base with a library, re-exported with a star, an overlay file that uses it, and its contract list."""
    base = make_base(
        tmp_path / "base",
        {
            "vllm/lib/__init__.py": "from .core import *\n",
            "vllm/lib/core.py": LIBRARY,
            "vllm/settings.py": "FLAG = 1\n",
        },
    )
    manifest = '[[file]]\npath = "vllm/ours.py"\nkind = "new"\nwhy = "w"\nupstream = "u"\nsymbols = []\n'
    write_files(tmp_path / "overlay", {"manifest.toml": manifest, "vllm/ours.py": OURS})
    write_files(tmp_path / "contracts", {"reviewed.toml": REVIEWED})
    return base, contracts.record(load_overlay(tmp_path / "overlay"), tmp_path / "contracts", base, {})


def test_what_is_recorded_is_what_the_file_uses(tiny):
    _, recorded = tiny
    found = {str(one): one.kind for one in recorded}
    assert found == {
        "vllm.lib.LIMIT": "value",
        "vllm.lib.Mode": "class",
        "vllm.lib.Mode.FULL": "value",
        "vllm.lib.Config": "class",
        "vllm.lib.core.Config.inner": "value",
        "vllm.lib.core.Config.size": "value",
        "vllm.lib.core.Inner.rows": "value",
        "vllm.lib.Runner": "class",
        "vllm.lib.Runner.forward": "function",
        "vllm.lib.Runner.reset": "function",
        "vllm.lib.Runner.state": "value",
        "vllm.lib.build": "function",
        "vllm.settings": "module",
        "vllm.settings.FLAG": "value",
    }
    by_name = {str(one): one for one in recorded}
    assert [one.name for one in by_name["vllm.lib.Runner"].parameters] == ["config", "device", "strict"]
    assert by_name["vllm.lib.Config"].parameters is None, "it is not called"
    assert by_name["vllm.lib.Runner.state"].users == ("reviewed: called through another object",)


def test_the_same_base_keeps_every_contract(tiny):
    base, recorded = tiny
    assert compare(recorded, base) == []


DRIFTS = {
    "a renamed argument": (
        "width=128", "columns=128", "build", "argument width is gone, columns is in its place", True,
    ),
    "a removed argument": ("*, noncausal=False, ", "", "build", "argument noncausal is gone", True),
    "a new needed argument": ("build(cam, ", "build(cam, table, ", "build", "new argument table", True),
    "a new optional argument": ("**rest", "extra=None, **rest", "build", "new argument extra = None", False),
    "an optional argument before others": (
        "build(cam, ", "build(cam, table=0, ", "build", "before old ones", True,
    ),
    "a changed default of an argument": (
        "width=128", "width=64", "build", "default of width was 128, is 64", True,
    ),
    "arguments in another order": (
        "forward(self, x, y", "forward(self, y, x", "Runner.forward", "order", True,
    ),
    "an argument by keyword only": (
        "device=\"cuda\", *,", "*, device=\"cuda\",", "Runner", "keyword only", True,
    ),
    "a removed field": ("    rows: int = 4\n", "", "Inner.rows", "Inner has no rows", True),
    "a changed default of a field": (
        "rows: int = 4", "rows: int = 5", "Inner.rows", "default was 4, is 5", True,
    ),
    "a field that lost its default": (
        "size: int = 1", "size: int", "Config.size", "default was 1, is none", True,
    ),
    "a changed constant": ("LIMIT = 48", "LIMIT = 32", "LIMIT", "default was 48, is 32", True),
    "a removed function": ("def build(", "def make(", "build", "gone", True),
    "a removed method": ("def reset(", "def restart(", "Runner.reset", "has no reset", True),
    "a removed attribute": ("self.state = None", "pass", "Runner.state", "has no state", True),
    "a class that became a function": (
        "class Mode(Enum):\n    FULL = 2", "def Mode():\n    pass", "Mode", "was a class", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "name", "what", "breaks"), DRIFTS.values(), ids=DRIFTS)
def test_each_drift_is_found_and_named(tiny, old, new, name, what, breaks):
    base, recorded = tiny
    text = (base / "vllm/lib/core.py").read_text()
    assert text.count(old) >= 1
    (base / "vllm/lib/core.py").write_text(text.replace(old, new, 1))
    found = [(str(one.contract), one.what, one.breaks) for one in compare(recorded, base)]
    assert any(at.endswith(name) and what in said and stops is breaks for at, said, stops in found), found


def import_check(base, recorded, tmp_path):
    record = tmp_path / "recorded.json"
    record.write_text(text_of(recorded, "1.2.3"))
    done = subprocess.run(
        [sys.executable, "-m", "rocm_overlay.contract_import", str(record)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(base), *sys.path])},
        text=True,
        capture_output=True,
        check=True,
    )
    rows = [json.loads(line)[1:] for line in done.stdout.splitlines()]
    return {name: (state, what) for name, state, what in rows}


def test_the_imported_package_agrees_with_what_was_read(tiny, tmp_path):
    base, recorded = tiny
    found = import_check(base, recorded, tmp_path)
    assert set(found) == {str(one) for one in recorded}
    assert {state for state, _ in found.values()} == {contract_import.AGREES}


@pytest.mark.parametrize(
    "drift",
    ["a renamed argument", "a removed field", "a changed default of an argument", "a removed function",
     "a removed method", "an argument by keyword only"],
)  # fmt: skip
def test_the_import_finds_drift_as_well(tiny, tmp_path, drift):
    base, recorded = tiny
    old, new, name, *_ = DRIFTS[drift]
    path = base / "vllm/lib/core.py"
    path.write_text(path.read_text().replace(old, new, 1))
    found = import_check(base, recorded, tmp_path)
    assert next(state for at, (state, _) in found.items() if at.endswith(name)) == contract_import.DIFFERS


def test_a_package_that_is_not_on_this_machine_is_named_and_is_no_drift(tiny, tmp_path):
    base, recorded = tiny
    write_files(base, {"vllm/settings.py": "import aiter_of_amd\nFLAG = 1\n"})
    found = import_check(base, recorded, tmp_path)
    assert found["vllm.settings.FLAG"] == (contract_import.NEEDS, "aiter_of_amd")


def test_a_use_of_a_name_that_is_nowhere_is_an_error(tiny, tmp_path):
    base, _ = tiny
    overlay = tmp_path / "overlay/vllm/ours.py"
    overlay.write_text(OURS.replace("from vllm.lib import LIMIT", "from vllm.lib import LIMITS, LIMIT"))
    with pytest.raises(OverlayError, match=r"vllm\.lib\.LIMITS"):
        contracts.record(load_overlay(tmp_path / "overlay"), tmp_path / "contracts", base, {})
    # What our own patches bring is no contract with the base.
    laid = {"vllm/lib/core.py": (LIBRARY + "\nLIMITS = 1\n").encode()}
    found = contracts.record(load_overlay(tmp_path / "overlay"), tmp_path / "contracts", base, laid)
    assert "vllm.lib.LIMITS" not in map(str, found)


def test_a_damaged_record_and_a_wrong_entry_are_named(tmp_path):
    write_files(tmp_path, {"recorded.json": "{}", "reviewed.toml": "[[contract]]\nmodule = 'vllm'\n"})
    with pytest.raises(OverlayError, match="damaged"):
        load(tmp_path)
    with pytest.raises(OverlayError, match="an entry's fields"):
        contracts.read_reviewed(tmp_path / "reviewed.toml")


# --- the real list ---


def test_the_real_record_is_what_make_lock_would_write():
    found = current(PROJECT, PROJECT.base)
    version = Sources.load(PROJECT).pin.vllm.version
    assert (PROJECT.root / "contracts/recorded.json").read_text() == text_of(found, version), "run: make lock"
    assert compare(found, PROJECT.base) == []


PLANTED = {
    "a renamed argument": (
        "vllm/v1/attention/backends/utils.py", "require_uniform: bool = False", "uniform: bool = False",
        "split_decodes_and_prefills", "argument require_uniform is gone",
    ),
    "a removed field": (
        "vllm/v1/attention/backends/mla/sparse_swa.py", "    decode_swa_width: int = 0\n", "",
        "DeepseekSparseSWAMetadata.decode_swa_width", "has no decode_swa_width",
    ),
    "a changed default": (
        "vllm/config/parallel.py", "    enable_eplb: bool = False\n", "    enable_eplb: bool = True\n",
        "ParallelConfig.enable_eplb", "default was False, is True",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "old", "new", "name", "what"), PLANTED.values(), ids=PLANTED)
def test_drift_planted_in_a_copy_of_the_pinned_base_is_found(tmp_path, path, old, new, name, what):
    recorded = load(PROJECT.root / "contracts")
    # A copy that shares its files with the base, but for the one that is changed.
    shutil.copytree(PROJECT.base / "vllm", tmp_path / "vllm", copy_function=os.link)
    assert compare(recorded, tmp_path) == []
    text = (tmp_path / path).read_text()
    assert text.count(old) == 1
    (tmp_path / path).unlink()
    (tmp_path / path).write_text(text.replace(old, new))
    (found,) = [one for one in compare(recorded, tmp_path) if one.breaks]
    assert str(found.contract).endswith(name) and what in found.what


def test_the_laid_base_calls_ours_as_ours_wants_to_be_called():
    assert find_misfits(Sources.load(PROJECT), PROJECT.tree) == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("ours.launch(1, 2)", None),
        ("ours.launch(1, fold=2)", None),
        ("launch(1, **rest)", None),
        ("launch()", "no x, which ours needs"),
        ("ours.launch(1, 2, 3)", "3 positional arguments, ours takes 2"),
        ("launch(1, folded=2)", "argument folded, which ours does not take"),
        ("Made(1)", "1 positional arguments, ours takes 0"),
        ("Made.of(1)", None),
        ("Made.of(1, 2)", "2 positional arguments, ours takes 1"),
    ],
)
def test_a_call_that_ours_does_not_take_is_found(tmp_path, call, says):
    text = "def launch(x, fold=1):\n    return x\n\n\nclass Made:\n    def __init__(self):\n        pass\n\n"
    text += "    @staticmethod\n    def of(x):\n        return x\n"
    caller = f"from vllm.amd import ours\nfrom vllm.amd.ours import Made, launch\n\nrest = {{}}\n{call}\n"
    manifest = '[[file]]\npath = "vllm/amd/ours.py"\nkind = "new"\nwhy = "w"\nupstream = "u"\nsymbols = []\n'
    project = make_checkout(tmp_path / "p")
    write_files(project.overlay, {"manifest.toml": manifest, "vllm/amd/ours.py": text})
    for left in ("ops", "ours"):
        shutil.rmtree(project.overlay / "vllm/amd" / left)
    tree = make_base(tmp_path / "tree", {"vllm/amd/ours.py": text, "vllm/caller.py": caller})
    found = find_misfits(Sources.load(project), tree)
    assert [(one.path, one.line, one.what) for one in found] == (
        [("vllm/caller.py", 5, says)] if says else []
    )


def test_a_rebase_stops_at_a_broken_contract_until_it_is_accepted(tmp_path):
    def with_contracts(root):
        write_files(root, {"contracts/reviewed.toml": ""})
        ours = "from vllm.other import call\n\n\ndef launch():\n    return call(1)\n"
        write_files(root, {"overlay/vllm/amd/ours/kernel.py": ours})
        base = make_base(root.parent / "p-pinned", {"vllm/other.py": "def call(x):\n    return x\n"})
        listed = contracts.record(load_overlay(root / "overlay"), root / "contracts", base, {})
        contracts.write(root / "contracts", listed, "1.2.3")

    project = make_checkout(tmp_path / "p", edit=with_contracts)
    changed = {"vllm/other.py": "def call(y):\n    return y\n"}
    with pytest.raises(CheckFailed, match="argument x is gone, y is in its place"):
        make_session(project).start(lambda: make_target(tmp_path / "new", changed))
    assert make_session(project).go_on(accept=["vllm.other.call"]).status == "landed"
    assert '"name": "y"' in (project.root / "contracts/recorded.json").read_text()
    assert git(project.root, "status", "--porcelain") == ""


def test_parameters_are_read_as_python_means_them():
    node = ast.parse("def f(self, a, /, b, c=1, *d, e, f=2, **g): pass").body[0]
    assert [(one.name, one.kind, one.default) for one in parameters(node)] == [
        ("a", "positional only", None), ("b", "either", None), ("c", "either", "1"), ("d", "*", None),
        ("e", "keyword only", None), ("f", "keyword only", "2"), ("g", "**", None),
    ]  # fmt: skip


def test_a_name_is_followed_through_relative_and_renamed_imports(tmp_path):
    files = {
        "vllm/a/__init__.py": "from .b import thing as other\n",
        "vllm/a/b.py": "from ..c import thing\n",
        "vllm/c.py": "try:\n    import x\nexcept ImportError:\n    thing = 3\n",
    }
    index = BaseIndex(write_files(tmp_path, files | {"vllm/__init__.py": BASE["vllm/__init__.py"]}))
    found = index.resolve("vllm.a", "other")
    assert found.module == "vllm.c" and found.name == "thing"
    assert index.resolve("vllm.a", "thing") is None
    assert index.resolve("vllm.a", "b").node is None, "a submodule"
