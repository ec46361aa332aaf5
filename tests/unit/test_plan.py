# SPDX-License-Identifier: Apache-2.0
"""The plan meets base, lock, overlay and series; drift is refused with a table."""

import pytest

from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.pin import Pin, write_lock
from rocm_overlay.plan import Sources, find_drift, make_lock, make_plan
from tests.tiny import ACTIONS, BASE, DIFF, HEADER, make_base, make_project, make_sources, write_files

ROCM = BASE["vllm/amd/rocm.py"]


def test_the_plan_names_what_happens_to_each_file(tmp_path):
    plan = make_plan(make_sources(tmp_path / "p"), make_base(tmp_path / "b"))
    assert {change.path: change.action for change in plan.changes} == {
        "vllm/amd/ops/__init__.py": "replaced",
        "vllm/amd/ours/kernel.py": "added",
        "vllm/amd/old.py": "removed",
        "vllm/amd/rocm.py": "patched",
    }
    for word in ("replaced", "added", "removed", "0001-amd-gate.patch"):
        assert word in plan.table()


def drifted_base(tmp_path):
    """One changed, one missing and one extra file."""
    changes = {
        "vllm/amd/rocm.py": "# new\n" + ROCM,
        "vllm/amd/old.py": None,
        "vllm/amd/ours/kernel.py": "x = 1\n",
    }
    return make_base(tmp_path / "b", changes)


def test_drift_is_one_row_a_file_with_what_we_do_to_it(tmp_path):
    drift = find_drift(make_sources(tmp_path / "p"), drifted_base(tmp_path))
    assert [(one.path, one.state, one.action) for one in drift] == [
        ("vllm/amd/old.py", "missing", "removed"),
        ("vllm/amd/ours/kernel.py", "new there", "added"),
        ("vllm/amd/rocm.py", "changed", "patched"),
    ]


def test_drift_is_refused_with_the_table_and_the_way_out(tmp_path):
    with pytest.raises(CheckFailed) as refused:
        make_plan(make_sources(tmp_path / "p"), drifted_base(tmp_path))
    message = refused.value.render()
    for word in ("3 of the files", "vllm/amd/rocm.py", "missing", "new there", "make rebase"):
        assert word in message


def test_an_untouched_file_may_differ(tmp_path):
    base = make_base(tmp_path / "b", {"vllm/other.py": "changed = True\n"})
    assert not make_plan(make_sources(tmp_path / "p"), base).allowed


def test_allowed_drift_is_laid_and_recorded_and_only_for_the_named_path(tmp_path):
    sources = make_sources(tmp_path / "p")
    base = drifted_base(tmp_path)
    paths = ["vllm/amd/old.py", "vllm/amd/ours/kernel.py", "vllm/amd/rocm.py"]
    with pytest.raises(CheckFailed, match=r"1 of the files.*\n(.*\n)*.*rocm\.py"):
        make_plan(sources, base, paths[:2])
    plan = make_plan(sources, base, paths)
    assert [one.path for one in plan.allowed] == paths
    assert plan.notes == ("patches/0001-amd-gate.patch: vllm/amd/rocm.py applied 1 lines off its place",)


def test_allowing_a_file_that_did_not_drift_is_an_error(tmp_path):
    with pytest.raises(OverlayError, match="did not drift"):
        make_plan(make_sources(tmp_path / "p"), make_base(tmp_path / "b"), ["vllm/amd/rocm.py"])


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (ROCM.replace("    # two\n", "    # two\n    if gate():\n        return None\n"), "already upstream"),
        (ROCM.replace("def build(cam)", "def build(c)"), "applies only with fuzz"),
        (ROCM.replace("# two", "# 2"), "no longer applies"),
    ],
)
def test_a_patch_that_does_not_apply_says_which_of_the_three(tmp_path, text, outcome):
    base = make_base(tmp_path / "b", {"vllm/amd/rocm.py": text})
    with pytest.raises(OverlayError, match=outcome):
        make_plan(make_sources(tmp_path / "p"), base, ["vllm/amd/rocm.py"])


def test_a_patch_whose_drop_condition_holds_is_an_error(tmp_path):
    """Upstream took the effect another way: the patch would apply, but it is due to go."""
    base = make_base(tmp_path / "b", {"vllm/other.py": "def gate():\n    pass\n"})
    header = HEADER.replace("base vllm/amd/rocm.py calls gate in build", "base vllm/other.py defines gate")
    with pytest.raises(OverlayError, match="already upstream"):
        make_plan(make_sources(tmp_path / "p", patch=header + DIFF), base)
    make_plan(make_sources(tmp_path / "q", patch=header + DIFF), make_base(tmp_path / "c"))


def test_a_clean_patch_without_effect_fails_its_probe(tmp_path):
    lost = DIFF.replace(
        "+    if gate():\n+        return None\n", "+    # gate() was here\n+    # and here\n"
    )
    with pytest.raises(OverlayError, match="has no effect"):
        make_plan(make_sources(tmp_path / "p", patch=HEADER + lost), make_base(tmp_path / "b"))


def test_a_patch_to_a_file_of_the_overlay_is_an_error(tmp_path):
    project = make_project(tmp_path / "p")
    path = "vllm/amd/ops/__init__.py"
    diff = f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-def enabled():\n+def on():\n"
    header = HEADER.replace("vllm/amd/rocm.py", path)
    write_files(project.patches, {"0001-amd-gate.patch": header + diff})
    with pytest.raises(OverlayError, match="overlay owns"):
        find_drift(Sources.load(project), make_base(tmp_path / "b"))


def test_a_lock_that_misses_a_file_is_an_error(tmp_path):
    project = make_project(tmp_path / "p")
    write_lock(project.pin_file, Pin.load(project.pin_file).files[1:])
    with pytest.raises(OverlayError, match="make lock"):
        find_drift(Sources.load(project), make_base(tmp_path / "b"))


def test_the_lock_is_remade_from_the_base(tmp_path):
    project = make_project(tmp_path / "p")
    before = project.pin_file.read_text()
    write_lock(project.pin_file, ())
    entries = make_lock(Sources.load(project), make_base(tmp_path / "b"))
    assert {entry.path: entry.action for entry in entries} == ACTIONS
    write_lock(project.pin_file, entries)
    assert Pin.load(project.pin_file).files == tuple(entries)
    write_lock(project.pin_file, entries)
    assert project.pin_file.read_text().split("[files]")[0].count("SHA-256") == 1
    assert Pin.load(project.pin_file).vllm.version in before


def test_a_kind_that_the_base_contradicts_is_an_error(tmp_path):
    base = make_base(tmp_path / "b", {"vllm/amd/ops/__init__.py": None})
    with pytest.raises(OverlayError, match="cannot be replaced"):
        make_lock(make_sources(tmp_path / "p"), base)


def test_a_removal_of_what_is_not_there_names_its_way_out(tmp_path):
    """A removal has no kind to correct: its path is misspelt, or it is due to go."""
    base = make_base(tmp_path / "b", {"vllm/amd/old.py": None})
    with pytest.raises(OverlayError, match=r"vllm/amd/old\.py cannot be removed") as refused:
        make_lock(make_sources(tmp_path / "p"), base)
    assert "correct its path in overlay/manifest.toml, or drop the [[remove]] entry" in refused.value.render()


def test_two_patches_of_one_file_both_take_effect(tmp_path):
    """The second is applied to what the first left, not to the base."""
    project = make_project(tmp_path / "p")
    second = (
        HEADER.replace("calls gate in build", "defines second")
        + "--- a/vllm/amd/rocm.py\n+++ b/vllm/amd/rocm.py\n@@ -8,3 +8,6 @@\n         return None\n"
        + "     base = os.sep\n     return base\n+\n+\n+def second(): ...\n"
    )
    write_files(
        project.patches,
        {"0002-amd-second.patch": second, "series": "0001-amd-gate.patch\n0002-amd-second.patch\n"},
    )
    plan = make_plan(Sources.load(project), make_base(tmp_path / "b"))
    (change,) = [one for one in plan.changes if one.action == "patched"]
    assert change.patches == ("0001-amd-gate.patch", "0002-amd-second.patch")
    assert b"if gate():" in change.content and b"def second" in change.content


def test_a_base_file_that_is_not_text_or_no_file_is_named(tmp_path):
    sources = make_sources(tmp_path / "p")
    base = make_base(tmp_path / "b")
    (base / "vllm/amd/rocm.py").write_bytes(b"\xff\xfe")
    with pytest.raises(OverlayError, match="not UTF-8"):
        make_plan(sources, base, ["vllm/amd/rocm.py"])
    (base / "vllm/amd/rocm.py").unlink()
    (base / "vllm/amd/rocm.py").mkdir()
    with pytest.raises(OverlayError, match="cannot be read"):
        make_plan(sources, base, ["vllm/amd/rocm.py"])
