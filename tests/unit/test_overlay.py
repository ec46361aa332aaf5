# SPDX-License-Identifier: Apache-2.0
"""overlay/ holds what its manifest says, and nothing else."""

import pytest

from rocm_overlay.errors import OverlayError
from rocm_overlay.overlay import load_overlay
from tests.tiny import MANIFEST, make_project, write_files


def overlay_of(tmp_path, manifest=MANIFEST, extra=None):
    folder = make_project(tmp_path).overlay
    write_files(folder, {"manifest.toml": manifest, **(extra or {})})
    return load_overlay(folder)


def test_the_tiny_overlay_loads(tmp_path):
    overlay = overlay_of(tmp_path)
    assert [(file.path, file.kind) for file in overlay.files] == [
        ("vllm/amd/ops/__init__.py", "replaces"),
        ("vllm/amd/ours/kernel.py", "new"),
    ]
    assert [removal.path for removal in overlay.removals] == ["vllm/amd/old.py"]


def test_the_hash_follows_files_and_manifest(tmp_path):
    first = overlay_of(tmp_path / "a").sha256
    assert overlay_of(tmp_path / "b").sha256 == first
    changed = {"vllm/amd/ours/kernel.py": "def launch():\n    return 2\n"}
    assert overlay_of(tmp_path / "c", extra=changed).sha256 != first
    assert overlay_of(tmp_path / "d", MANIFEST.replace("the gate", "a gate")).sha256 != first


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "new"', 'kind = "other"', "kind"),
        ('why = "the kernel"\n', "", "why"),
        ('symbols = ["launch"]', 'symbols = ["start"]', "not defined"),
        ('symbols = ["launch"]', 'symbols = ["launch"]\nnote = "x"', "unknown field"),
        ('path = "vllm/amd/ours/kernel.py"', 'path = "vllm/amd/ours/gone.py"', "no file"),
        ('path = "vllm/amd/ours/kernel.py"', 'path = "/etc/passwd"', "outside the package"),
        ('path = "vllm/amd/ours/kernel.py"', 'path = "vllm/../x.py"', "outside the package"),
        ('path = "vllm/amd/old.py"', 'path = "vllm/amd/ops/__init__.py"', "two entries"),
        ("[[file]]", "[[file", "not valid TOML"),
    ],
)
def test_a_wrong_manifest_is_named(tmp_path, old, new, message):
    assert old in MANIFEST
    with pytest.raises(OverlayError, match=message):
        overlay_of(tmp_path, MANIFEST.replace(old, new))


def test_a_file_without_an_entry_is_an_error(tmp_path):
    with pytest.raises(OverlayError, match=r"stray\.py"):
        overlay_of(tmp_path, extra={"vllm/stray.py": ""})
