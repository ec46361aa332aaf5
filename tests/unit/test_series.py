# SPDX-License-Identifier: Apache-2.0
"""The series is the only list of patches, and every patch carries its whole header."""

import pytest

from rocm_overlay.errors import OverlayError
from rocm_overlay.series import FIELDS, load_series
from tests.tiny import DIFF, HEADER, make_project, write_files


def series_of(tmp_path, patch=HEADER + DIFF, name="0001-amd-gate.patch", listed=None):
    write_files(tmp_path, {name: patch, "series": f"{listed or name}\n"})
    return load_series(tmp_path)


def test_the_tiny_series_loads(tmp_path):
    (patch,) = series_of(tmp_path).patches
    assert patch.header["Kind"] == "rocm-only" and patch.diffs[0].path == "vllm/amd/rocm.py"
    assert str(patch.probe) == "vllm/amd/rocm.py calls gate in build"


def test_the_hash_follows_any_byte_of_any_patch(tmp_path):
    first = series_of(tmp_path / "a").sha256
    assert series_of(tmp_path / "b").sha256 == first
    assert series_of(tmp_path / "c", HEADER.replace("planned", "planned soon") + DIFF).sha256 != first


@pytest.mark.parametrize("field", FIELDS)
def test_each_header_field_is_required(tmp_path, field):
    lines = [line for line in HEADER.splitlines() if not line.startswith(f"{field}:")]
    with pytest.raises(OverlayError, match=field):
        series_of(tmp_path, "\n".join(lines) + "\n" + DIFF)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Kind: rocm-only", "Kind: forever", "Kind"),
        ("Subject:", "Topic:", "header line"),
        ("Probe: vllm/amd/rocm.py", "Probe: vllm/other.py", "no file of the patch"),
        ("Probe: vllm/amd/rocm.py calls", "Probe: vllm/amd/rocm.py mentions", "Probe"),
        ("Drop-when: base", "Drop-when: some day", "Drop-when"),
        ("Drop-when: base vllm/amd/rocm.py calls gate in build", "Drop-when: never:", "Drop-when"),
        ("--- a/vllm/amd/rocm.py\n+++ b/vllm", "--- a/../rocm.py\n+++ b/..", "outside the package"),
    ],
)
def test_a_malformed_header_is_named(tmp_path, old, new, message):
    text = (HEADER + DIFF).replace(old, new)
    if ".." in new:
        text = text.replace("b/../amd/rocm.py", "b/../rocm.py")
    assert text != HEADER + DIFF
    with pytest.raises(OverlayError, match=message):
        series_of(tmp_path, text)


def test_never_needs_its_reason_and_takes_it(tmp_path):
    old = "base vllm/amd/rocm.py calls gate in build\nTest"
    text = (HEADER + DIFF).replace(old, "never: ROCm only\nTest")
    assert series_of(tmp_path, text).patches[0].drop_when is None


def test_an_unlisted_patch_a_missing_one_and_a_wrong_order_are_errors(tmp_path):
    folder = make_project(tmp_path).patches
    write_files(folder, {"0002-amd-more.patch": HEADER + DIFF})
    with pytest.raises(OverlayError, match="does not name"):
        load_series(folder)
    write_files(folder, {"series": "0002-amd-more.patch\n0001-amd-gate.patch\n"})
    with pytest.raises(OverlayError, match="order"):
        load_series(folder)
    write_files(folder, {"series": "0001-amd-gate.patch\n0003-amd-gone.patch\n"})
    with pytest.raises(OverlayError, match="not there"):
        load_series(folder)


def test_a_patch_name_without_number_and_area_is_an_error(tmp_path):
    with pytest.raises(OverlayError, match="file name"):
        series_of(tmp_path, name="gate.patch")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("def build():\n    gate()\n", True),
        ("def build():\n    ops.gate()\n", True),
        ("class A:\n    def build(self):\n        if x and ops.gate(): pass\n", True),
        ("def build():\n    xgate()\n", False),
        ("def build():\n    ops.xgate()\n", False),
        ("def build():\n    return gate\n", False),
        ("def other():\n    gate()\n", False),
        ("def build():\n    # gate()\n    pass\n", False),
        ("def build(:\n", False),
        (None, False),
    ],
)
def test_a_probe_looks_for_the_call_itself(tmp_path, text, holds):
    assert series_of(tmp_path).patches[0].probe.holds(text) is holds


def test_a_patch_named_twice_is_an_error(tmp_path):
    folder = make_project(tmp_path).patches
    write_files(folder, {"series": "0001-amd-gate.patch\n0001-amd-gate.patch\n"})
    with pytest.raises(OverlayError, match="order"):
        load_series(folder)


def test_the_hash_follows_the_patches_names_too(tmp_path):
    first = series_of(tmp_path / "a").sha256
    assert series_of(tmp_path / "b", name="0002-amd-gate.patch").sha256 != first


@pytest.mark.parametrize("name", ["series", "0001-amd-gate.patch"])
def test_a_file_that_is_not_utf8_is_named(tmp_path, name):
    folder = make_project(tmp_path).patches
    (folder / name).write_bytes(b"\xff\xfe")
    with pytest.raises(OverlayError, match=f"{name} is not UTF-8"):
        load_series(folder)


def test_a_patch_with_carriage_returns_says_so(tmp_path):
    folder = make_project(tmp_path).patches
    (folder / "0001-amd-gate.patch").write_bytes((HEADER + DIFF).replace("\n", "\r\n").encode())
    with pytest.raises(OverlayError, match="carriage returns"):
        load_series(folder)
