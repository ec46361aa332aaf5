# SPDX-License-Identifier: Apache-2.0
"""base.toml is the only pin; each wrong field is named."""

import pytest

from rocm_overlay.errors import OverlayError
from rocm_overlay.pin import ImagePin, Pin
from rocm_overlay.project import Project
from tests.tiny import make_project


def test_the_projects_own_pin_is_complete():
    pin = Pin.load(Project.find().pin_file)
    assert pin.vllm.sdist == f"vllm-{pin.vllm.version}.tar.gz"
    assert set(pin.images) == {"gfx942", "gfx950"}
    assert {"torch", "triton", "amd-aiter", "flydsl"} <= set(pin.packages)
    assert pin.packages["flydsl"] in pin.compile_flydsl


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[vllm]", "[vllm", "not valid TOML"),
        ('version = "1.2.3"', "version = 3", r"vllm\.version"),
        ('commit = "abc"\n', "", r"vllm\.commit"),
        (f'sha256 = "{"0" * 64}"\n\n', 'sha256 = "abc"\n\n', r"vllm\.sha256"),
        ("[image.gfx942]", "[image.gfx90a]", "gfx942"),
        ('reference = "vllm/vllm-openai-rocm:v1.2.3"', 'reference = "no tag"', r"image\.gfx950\.reference"),
        ('digest = ""', 'digest = "sha256:12"', r"image\.gfx950\.digest"),
        ('action = "remove"', 'action = "drop"', "action one of"),
        ("[packages]", "[package]", r"unknown section package\n(.*\n)*.*did you mean packages"),
        ("commit =", "comit =", r"unknown field vllm\.comit\n(.*\n)*.*did you mean commit"),
        ("digest =", "digset =", r"unknown field image\.gfx950\.digset\n(.*\n)*.*did you mean digest"),
        ("location =", "locaton =", r"unknown field mirror\.gfx950\.locaton\n(.*\n)*.*did you mean location"),
        ('[mirror.gfx942]\nlocation = ""\ndate = ""\n', "", r"\[mirror\.gfx942\] is wrong"),
        ("[mirror.gfx942]", "[mirror.gfx90a]", r"unknown field mirror\.gfx90a\n(.*\n)*.*did you mean gfx9"),
        ("[compile]\nflydsl", "[compile]\nflysdl", r"unknown field compile\.flysdl"),
        ('flydsl = ["0.4.2"]', 'flydsl = "0.4.2"', r"compile\.flydsl is wrong"),
        ('flydsl = ["0.4.2"]', "flydsl = [0.4]", r"compile\.flydsl is wrong"),
        ('torch = "2.13.0"', "torch = 2.13", r"packages\.torch is wrong"),
        ('action = "remove",', 'action = "remove", why = "x",', r"unknown field files.*\.why"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, old, new, message):
    file = make_project(tmp_path).pin_file
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(OverlayError, match=message):
        Pin.load(file)


@pytest.mark.parametrize("section", ["vllm", "image", "mirror", "packages", "compile", "files"])
@pytest.mark.parametrize("value", ["3", '"text"', "[1]"])
def test_a_section_that_is_no_table_is_named(tmp_path, section, value):
    file = make_project(tmp_path).pin_file
    kept = [block for block in file.read_text().split("\n[") if not block.lstrip("[").startswith(section)]
    file.write_text(f"{section} = {value}\n[" + "\n[".join(kept).removeprefix("["))
    with pytest.raises(OverlayError, match=rf"\[{section}\] is wrong"):
        Pin.load(file)


def test_a_pin_file_that_is_not_utf_8_or_cannot_be_read_is_an_error(tmp_path):
    file = make_project(tmp_path).pin_file
    file.write_bytes(b"# caf\xe9\n" + file.read_bytes())
    with pytest.raises(OverlayError, match="not UTF-8") as caught:
        Pin.load(file)
    assert caught.value.seen == "byte 0xe9 at offset 5"
    with pytest.raises(OverlayError, match="cannot be read"):
        Pin.load(tmp_path)


def test_a_missing_pin_file_is_an_error(tmp_path):
    with pytest.raises(OverlayError, match="no pin file"):
        Pin.load(tmp_path / "base.toml")


def test_the_pull_reference_is_by_digest_when_one_is_pinned():
    digest = "sha256:" + "a" * 64
    assert ImagePin("vllm/vllm-openai-rocm:v1", "").pull_reference == "vllm/vllm-openai-rocm:v1"
    assert ImagePin("vllm/vllm-openai-rocm:v1", digest).pull_reference == f"vllm/vllm-openai-rocm@{digest}"
    assert ImagePin("host:5000/vllm:v1", digest).pull_reference == f"host:5000/vllm@{digest}"


def test_the_project_is_found_from_inside_it_and_by_its_variable(tmp_path, monkeypatch):
    project = make_project(tmp_path / "p")
    inside = project.overlay / "vllm/amd"
    assert Project.find(inside).root == (tmp_path / "p").resolve()
    monkeypatch.setenv("ROCM_OVERLAY_HOME", str(project.root))
    assert Project.find().root == (tmp_path / "p").resolve()
    monkeypatch.setenv("ROCM_OVERLAY_HOME", str(tmp_path))
    with pytest.raises(OverlayError, match="ROCM_OVERLAY_HOME"):
        Project.find()
