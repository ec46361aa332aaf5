# SPDX-License-Identifier: Apache-2.0
"""Pinning digests and mirroring the base: what is asked, and the only lines of base.toml that change."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rocm_overlay import cli_image, image, mirror
from rocm_overlay import engine as engines
from rocm_overlay.engine import Buildah, Completed, Docker
from rocm_overlay.errors import OverlayError
from rocm_overlay.pin import ARCHITECTURES, Pin
from rocm_overlay.project import Project
from tests.unit.test_engine import DIGEST, FakeShell

ROOT = Path(__file__).resolve().parents[2]
OTHER = "sha256:" + "b" * 64
NOW = datetime(2026, 3, 4, 5, 6, tzinfo=UTC)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("STORAGE_DRIVER", "")
    monkeypatch.setattr(engines, "install_packages", lambda shell, packages: False)


@pytest.fixture
def project(tmp_path):
    """A project with the real pin, its digests and mirror empty."""
    (tmp_path / "base.toml").write_text((ROOT / "base.toml").read_text())
    for architecture in ARCHITECTURES:
        mirror.set_pin_values(tmp_path / "base.toml", f"image.{architecture}", {"digest": ""})
        mirror.set_pin_values(tmp_path / "base.toml", f"mirror.{architecture}", {"location": "", "date": ""})
    return Project(tmp_path)


def changed_lines(project, before):
    after = project.pin_file.read_text()
    return [new for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]


def test_pin_digest_writes_the_digest_and_no_other_line(project):
    before = project.pin_file.read_text()
    shell = FakeShell({"skopeo inspect": f"{DIGEST}\n", "skopeo --version": ""})
    assert mirror.pin_digest(project, shell, "gfx942") == DIGEST
    assert changed_lines(project, before) == [f'digest = "{DIGEST}"']
    pin = Pin.load(project.pin_file)
    assert (pin.images["gfx942"].digest, pin.images["gfx950"].digest) == (DIGEST, "")


def test_docker_is_asked_for_the_digest_where_there_is_no_skopeo(project):
    shell = FakeShell({"docker buildx imagetools inspect": DIGEST})
    assert mirror.pin_digest(project, shell, "gfx950") == DIGEST


@pytest.mark.parametrize("answer", [Completed(1, "", "no such host"), "latest"])
def test_a_digest_that_cannot_be_had_changes_nothing(project, answer):
    before = project.pin_file.read_text()
    with pytest.raises(OverlayError, match=r"the digest of .* cannot be had"):
        mirror.pin_digest(project, FakeShell({"skopeo inspect": answer, "skopeo --version": ""}), "gfx950")
    assert project.pin_file.read_text() == before


def test_mirror_base_copies_by_digest_and_records_where_and_when(project):
    mirror.set_pin_values(project.pin_file, "image.gfx950", {"digest": DIGEST})
    before = project.pin_file.read_text()
    shell = FakeShell({"skopeo": ""})
    copied = mirror.mirror_base(project, Docker(shell), ["gfx950"], "our.registry/base:1", NOW)
    assert copied.endswith(f"@{DIGEST}")
    assert f"skopeo copy docker://{copied} docker://our.registry/base:1" in shell.commands
    assert changed_lines(project, before) == [
        'location = "our.registry/base:1"',
        'date = "2026-03-04 05:06 UTC"',
    ]
    mirrors = Pin.load(project.pin_file).mirrors
    assert (mirrors["gfx950"].location, mirrors["gfx942"].location) == ("our.registry/base:1", "")


def test_mirror_base_fills_in_a_missing_digest_first(project):
    shell = FakeShell({"skopeo": "", "skopeo inspect": DIGEST})
    copied = mirror.mirror_base(project, Docker(shell), ARCHITECTURES, "oci-archive:base.tar", NOW)
    assert copied.endswith(f"@{DIGEST}")
    assert f"skopeo copy docker://{copied} oci-archive:base.tar" in shell.commands
    pin = Pin.load(project.pin_file)
    assert pin.images["gfx942"].digest == DIGEST
    assert [pin.mirrors[one].location for one in ARCHITECTURES] == ["oci-archive:base.tar"] * 2


def test_each_architectures_image_has_a_mirror_of_its_own(project):
    for architecture, digest in (("gfx950", DIGEST), ("gfx942", OTHER)):
        mirror.set_pin_values(project.pin_file, f"image.{architecture}", {"digest": digest})
        shell = FakeShell({"skopeo": ""})
        mirror.mirror_base(project, Docker(shell), [architecture], f"our.registry/{architecture}:1", NOW)
    pin = Pin.load(project.pin_file)
    for architecture in ARCHITECTURES:
        hint = image.mirror_hint(pin, architecture)
        assert f"make image ARCH={architecture} BASE=our.registry/{architecture}:1" in hint


@pytest.mark.parametrize("to", [[], ["--to", ""], ["--to", "oci-archive:"]])
def test_without_a_destination_nothing_is_asked_and_both_forms_are_named(project, monkeypatch, to):
    monkeypatch.chdir(project.root)
    monkeypatch.setattr(cli_image, "select_engine", lambda *_: pytest.fail("an engine was asked for"))
    parser = argparse.ArgumentParser()
    cli_image.register(parser.add_subparsers())
    parsed = parser.parse_args(["mirror-base", *to])
    with pytest.raises(OverlayError, match="mirror-base is not told where to copy to") as caught:
        parsed.run(parsed)
    assert "TO=REGISTRY/NAME:TAG" in str(caught.value.fix) and "TO=oci-archive:FILE" in str(caught.value.fix)
    with pytest.raises(OverlayError, match="not told where"):
        mirror.mirror_base(project, Docker(FakeShell({})), ["gfx950"], to[-1] if to else "", NOW)


def test_without_skopeo_buildah_pulls_and_writes_the_archive(project):
    mirror.set_pin_values(project.pin_file, "image.gfx950", {"digest": DIGEST})
    shell = FakeShell({"buildah": "", "buildah images": 1})
    source = mirror.mirror_base(project, Buildah(shell), ["gfx950"], "oci-archive:base.tar", NOW)
    assert shell.commands[-2:] == [
        f"buildah pull docker://{source}",
        f"buildah push {source} oci-archive:base.tar",
    ]


def test_docker_alone_cannot_write_an_archive_and_says_what_can(project):
    mirror.set_pin_values(project.pin_file, "image.gfx950", {"digest": DIGEST})
    with pytest.raises(OverlayError, match="docker cannot write an OCI archive") as caught:
        mirror.mirror_base(
            project, Docker(FakeShell({"docker": ""})), ["gfx950"], "oci-archive:base.tar", NOW
        )
    assert "skopeo" in str(caught.value.fix)


def test_two_images_do_not_fit_one_destination(project):
    mirror.set_pin_values(project.pin_file, "image.gfx950", {"digest": DIGEST})
    mirror.set_pin_values(project.pin_file, "image.gfx942", {"digest": OTHER})
    with pytest.raises(OverlayError, match="one destination cannot hold"):
        mirror.mirror_base(
            project, Docker(FakeShell({"skopeo": ""})), ARCHITECTURES, "our.registry/base", NOW
        )


def test_a_copy_that_fails_records_nothing(project):
    mirror.set_pin_values(project.pin_file, "image.gfx950", {"digest": DIGEST})
    before = project.pin_file.read_text()
    shell = FakeShell(
        {"skopeo --version": "", "skopeo copy": Completed(1, "copying\nno space left on device")}
    )
    with pytest.raises(OverlayError) as caught:
        mirror.mirror_base(project, Docker(shell), ["gfx950"], "oci-archive:base.tar", NOW)
    assert caught.value.seen == "no space left on device"
    assert project.pin_file.read_text() == before


def test_a_pin_without_the_line_is_refused_untouched(project):
    before = project.pin_file.read_text().replace('date = ""\n', "")
    project.pin_file.write_text(before)
    with pytest.raises(OverlayError, match=r"\[mirror\.gfx950\] has no date"):
        mirror.set_pin_values(project.pin_file, "mirror.gfx950", {"location": "x", "date": "y"})
    assert project.pin_file.read_text() == before
