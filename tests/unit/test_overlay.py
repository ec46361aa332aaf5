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
        ('why = "nothing uses it"\n', "", "entry vllm/amd/old.py: field why"),
        ('why = "nothing uses it"\n', 'why = "w"\nkind = "new"\n', "old.py: unknown field"),
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


def test_a_link_in_the_overlay_is_an_error_even_when_it_leads_nowhere(tmp_path):
    for name, target in (
        ("vllm/link.py", "amd/ours/kernel.py"),
        ("vllm/folder", "amd"),
        ("vllm/gone.py", "no"),
    ):
        folder = make_project(tmp_path / name).overlay
        (folder / name).symlink_to(target)
        with pytest.raises(OverlayError, match="links in the overlay") as error:
            load_overlay(folder)
        assert name in error.value.render()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"#\xff\xfe\n", "not UTF-8"), (b"def launch(:\n", "not valid Python"), (b"x = 1\0\n", "zero byte")],
)
def test_a_file_that_is_no_python_is_named(tmp_path, content, message):
    folder = make_project(tmp_path).overlay
    (folder / "vllm/amd/ours/kernel.py").write_bytes(content)
    with pytest.raises(OverlayError, match=message) as error:
        load_overlay(folder)
    assert "kernel.py" in error.value.render()


def test_an_entry_that_is_a_folder_is_named(tmp_path):
    folder = make_project(tmp_path).overlay
    (folder / "vllm/amd/ours/kernel.py").unlink()
    (folder / "vllm/amd/ours/kernel.py").mkdir()
    with pytest.raises(OverlayError, match=r"kernel\.py cannot be read"):
        load_overlay(folder)


@pytest.mark.parametrize("manifest", ["file = 3\n", "file = [1]\n", "remove = [[1]]\n", "[[files]]\n"])
def test_a_manifest_of_another_form_is_named(tmp_path, manifest):
    with pytest.raises(OverlayError, match=r"manifest\.toml"):
        overlay_of(tmp_path, manifest)


def test_a_manifest_that_is_not_utf8_is_named(tmp_path):
    folder = make_project(tmp_path).overlay
    (folder / "manifest.toml").write_bytes(b"\xff")
    with pytest.raises(OverlayError, match="not UTF-8"):
        load_overlay(folder)
