# SPDX-License-Identifier: Apache-2.0
"""The real overlay and series between vLLM 0.33.0, the pin, and 0.32.0, which lacks half of what we touch."""

import re
import shutil

import pytest

from rocm_overlay.carry import Work, carry
from rocm_overlay.carry_files import End
from rocm_overlay.errors import CheckFailed
from rocm_overlay.kept import keep, kept_problems, read_kept
from rocm_overlay.patching import FileDiff, Outcome, apply_diff
from rocm_overlay.pin import write_lock
from rocm_overlay.plan import Sources, find_drift, make_lock
from rocm_overlay.project import Project
from rocm_overlay.rebase import Session
from rocm_overlay.rebase_checks import Checks
from rocm_overlay.series import load_series
from rocm_overlay.targets import find_target
from tests.tiny import write_files
from tests.tiny_rebase import git, state_of

PROJECT = Project.find()
OTHER = "0.32.0"
MODEL = "vllm/models/deepseek_v41/amd"
# One process unpacks the other base for all of these.
pytestmark = pytest.mark.xdist_group("other-base")

# The fast tests of the reduced checkout: every laid file compiles, and the pin's version is the tree's.
FAST = """
import compileall, pathlib, tomllib
pin = tomllib.loads(pathlib.Path("base.toml").read_text())["vllm"]["version"]
assert f"'{pin}'" in pathlib.Path("build/tree/vllm/_version.py").read_text()
assert compileall.compile_dir("build/tree/vllm/models", quiet=1)
"""


@pytest.fixture(scope="module")
def other():
    return find_target(PROJECT, OTHER)


def test_the_kept_bases_are_the_locks():
    sources = Sources.load(PROJECT)
    assert kept_problems(PROJECT.patches, sources.pin.locked()) == []


def test_the_other_release_is_reported_file_by_file(other):
    sources = Sources.load(PROJECT)
    locked = sources.pin.locked()
    kept = {path: read_kept(PROJECT.patches, entry) for path, entry in locked.items()}
    found = carry(Work(sources, kept.__getitem__, PROJECT.build / "bases" / OTHER, PROJECT.base))
    rows = {row.path: (row.upstream, row.end) for row in found.files}
    assert rows["vllm/config/kernel.py"] == ("changed inside", End.CONFLICTING)
    assert rows[f"{MODEL}/vl_model.py"] == ("changed outside our hunks", End.APPLIED)
    assert rows[f"{MODEL}/ops/__init__.py"] == ("gone", End.CONFLICTING)
    assert rows["vllm/models/common/specialized_decode/spec.py"] == ("unchanged", End.APPLIED)
    ends = {row.name: row.end for row in found.rows}
    assert ends["0001-swa-gate-call-site.patch"] is End.CONFLICTING
    assert ends["0012-model-count-replayed-steps.patch"] is End.APPLIED
    assert other.vllm.version == OTHER and re.fullmatch(r"[0-9a-f]{9,}", other.vllm.commit)


def shared_hunks(diff, other_root):
    """The hunks of a diff that apply to the file of either release by themselves."""
    kept = []
    for hunk in diff.hunks:
        alone = FileDiff(diff.path, (hunk,))
        texts = [(root / diff.path).read_text() for root in (PROJECT.base, other_root)]
        if all(apply_diff(text, alone).outcome is Outcome.CLEAN for text in texts):
            kept.append(hunk)
    return kept


def hunk_text(hunk):
    old, new = len(hunk.old), len(hunk.new)
    body = "".join(f"{mark}{text}\n" for mark, text in hunk.lines)
    return f"@@ -{hunk.old_start},{old} +{hunk.new_start},{new} @@\n{body}"


def reduced_patch(patch, other_root):
    """The patch with the hunks that exist on both releases; None where what it is probed for does not."""
    parts, whole = [], True
    for diff in patch.diffs:
        hunks = shared_hunks(diff, other_root)
        whole &= len(hunks) == len(diff.hunks)
        if hunks:
            parts.append(f"--- a/{diff.path}\n+++ b/{diff.path}\n" + "".join(map(hunk_text, hunks)))
    text = patch.content.decode()
    if whole:
        return text
    head = text[: text.index("\n--- ") + 1]
    verb = f"Probe: {patch.probe.path} defines {patch.probe.name}"
    added = re.search(r"^\+    def (\w+)", "".join(parts), re.MULTILINE)
    if not parts or not added:
        return None
    head = re.sub(r"^Probe: .*$", verb.replace(patch.probe.name, added[1]), head, flags=re.MULTILINE)
    return head + "".join(parts)


@pytest.fixture
def reduced(tmp_path, other):
    """A checkout of those parts of overlay and series that exist on both releases."""
    project = Project(tmp_path / "p")
    other_root = PROJECT.build / "bases" / OTHER
    shutil.copytree(PROJECT.overlay, project.overlay, ignore=shutil.ignore_patterns("__pycache__", "ops"))
    manifest = project.overlay / "manifest.toml"
    tables = re.split(r"(?m)^(?=\[\[)", manifest.read_text())
    gone = [
        t for t in tables if (p := re.search(r'path = "(.+)"', t)) and not (project.overlay / p[1]).exists()
    ]
    manifest.write_text("".join(table for table in tables if table not in gone))
    patches = {p.name: reduced_patch(p, other_root) for p in load_series(PROJECT.patches).patches}
    patches = {name: text for name, text in patches.items() if text}
    assert len(patches) >= 2
    series = "".join(f"{name}\n" for name in patches)
    write_files(project.root, {"tests/test_fast.py": FAST, ".gitignore": "/build/\n__pycache__/\n"})
    write_files(project.patches, {"series": series, **patches})
    shutil.copy(PROJECT.pin_file, project.pin_file)
    write_lock(project.pin_file, make_lock(Sources.load(project), PROJECT.base))
    keep(project.patches, Sources.load(project).pin.locked(), PROJECT.base)
    git(tmp_path, "init", "--quiet", str(project.root))
    git(project.root, "config", "user.name", "Real")
    git(project.root, "config", "user.email", "real@example.com")
    git(project.root, "add", "--all")
    git(project.root, "commit", "--quiet", "--message=Start")
    return project


def rebase(project, target):
    """Start, and accept each replaced file that upstream changed: whole files of ours on both releases."""
    session = Session(project, Checks(("tests/test_fast.py",)), lambda *_: PROJECT.base)
    try:
        return session.start(lambda: target)
    except CheckFailed as error:
        assert "places to decide" in error.what, error
        replaced = [file.path for file in Sources.load(project).overlay.files if file.kind == "replaces"]
        return session.go_on(accept=replaced)


@pytest.mark.full
def test_down_to_the_other_release_and_back(reduced, other):
    """The parts of the series that exist on both come back as they were, each time in one commit."""
    pinned = find_target(PROJECT, Sources.load(PROJECT).pin.vllm.version)
    shutil.copytree(PROJECT.root / "tests/harness", reduced.root / "tests/harness")
    git(reduced.root, "add", "--all")
    git(reduced.root, "commit", "--quiet", "--message=Harness")
    before = state_of(reduced)["files"]
    down = rebase(reduced, other)
    sources = Sources.load(reduced)
    assert down.status == "landed" and sources.pin.vllm.version == OTHER
    assert find_drift(sources, PROJECT.build / "bases" / OTHER) == []
    assert {row.upstream for row in down.carried.files} >= {"changed outside our hunks", "unchanged"}
    up = rebase(reduced, pinned)
    assert up.status == "landed" and git(reduced.root, "rev-list", "--count", "HEAD") == "4"
    after = state_of(reduced)["files"]
    # A patch made of some of another's hunks says nothing of the new side's lines that can be compared.
    headings = re.compile(rb"^(@@ -\S+).*$", re.MULTILINE)
    for path in sorted(before):
        assert headings.sub(rb"\1", after[path]) == headings.sub(rb"\1", before[path]), path
    assert set(after) == set(before)
