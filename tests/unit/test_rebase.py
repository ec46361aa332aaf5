# SPDX-License-Identifier: Apache-2.0
"""The rebase report says what another base means for each file and patch of ours, and changes nothing."""

import pytest

from rocm_overlay import rebase
from rocm_overlay.errors import OverlayError
from rocm_overlay.rebase import find_base, make_report
from tests.tiny import BASE, DIFF, HEADER, make_base, make_project, make_sources, snapshot

ROCM = BASE["vllm/amd/rocm.py"]
GATED = ROCM.replace("    # two\n", "    # two\n    if gate():\n        return None\n")


def report_of(tmp_path, changes=None, patch=HEADER + DIFF):
    return make_report(make_sources(tmp_path / "p", patch=patch), make_base(tmp_path / "b", changes))


def test_the_pinned_base_is_accepted_as_it_is(tmp_path):
    report = report_of(tmp_path)
    assert report.clean and {one.upstream for one in report.files} == {"unchanged"}


@pytest.mark.parametrize(
    ("text", "outcome", "detail"),
    [
        ("# new\n" + ROCM, "applies", "1 lines off"),
        (ROCM.replace("def build(cam)", "def build(c)"), "applies only with fuzz", "fuzz 1"),
        (ROCM.replace("# two", "# 2"), "no longer applies", "hunk 1"),
        (GATED, "already upstream", "Drop-when"),
        (None, "no longer applies", "gone"),
    ],
)
def test_each_change_upstream_is_reported(tmp_path, text, outcome, detail):
    report = report_of(tmp_path, {"vllm/amd/rocm.py": text})
    (patch,) = report.patches
    assert patch.outcome == outcome and detail in patch.detail
    (file,) = [one for one in report.files if one.path == "vllm/amd/rocm.py"]
    assert file.upstream == ("missing" if text is None else "changed") and not report.clean
    assert outcome in report.render()


def test_an_effect_that_upstream_took_without_our_condition_is_already_upstream(tmp_path):
    header = HEADER.replace("base vllm/amd/rocm.py calls gate in build", "never: ROCm only")
    (patch,) = report_of(tmp_path, {"vllm/amd/rocm.py": GATED}, header + DIFF).patches
    assert patch.outcome == "already upstream"


def test_a_clean_patch_without_effect_is_reported(tmp_path):
    lost = DIFF.replace(
        "+    if gate():\n+        return None\n", "+    # gate() was here\n+    # and here\n"
    )
    assert [one.outcome for one in report_of(tmp_path, patch=HEADER + lost).patches] == [
        "applies",
        "no effect",
    ]


def test_nothing_is_changed(tmp_path):
    sources, base = make_sources(tmp_path / "p"), make_base(tmp_path / "b", {"vllm/amd/rocm.py": "x = 1\n"})
    before = snapshot(tmp_path)
    make_report(sources, base)
    assert snapshot(tmp_path) == before


def test_a_base_is_a_folder_or_a_version(tmp_path, monkeypatch):
    project = make_project(tmp_path / "p")
    base = make_base(tmp_path / "b")
    assert find_base(project, str(base)) == base
    monkeypatch.setattr(rebase, "fetch_version", lambda version, _: base if version == "0.32.0" else None)
    assert find_base(project, "0.32.0") == base
    for wrong in ("", "latest", str(tmp_path / "p")):
        with pytest.raises(OverlayError):
            find_base(project, wrong)
