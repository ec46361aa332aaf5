# SPDX-License-Identifier: Apache-2.0
"""Building the image: where its base comes from, what it is told, and what the Dockerfile may use."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from rocm_overlay import engine as engines
from rocm_overlay import image
from rocm_overlay.engine import Buildah, Completed, Docker
from rocm_overlay.errors import OverlayError
from rocm_overlay.pin import Pin
from rocm_overlay.project import Project
from tests.unit.test_engine import DIGEST, FakeShell, image_answers

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Pin.load(ROOT / "base.toml").images["gfx950"].reference
STAND_IN = "localhost/vllm-rocm-stand-in:1-abc"
STAMP = {"version": "9.9", "overlay_hash": "aa", "series_hash": "bb", "vllm_version": "0"}
SCRIPT = str(ROOT / image.STAND_IN_SCRIPT)


@pytest.fixture
def project():
    return Project(ROOT)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    monkeypatch.setenv("STORAGE_DRIVER", "")
    monkeypatch.setattr(engines, "install_packages", lambda shell, packages: False)


def pin_of(tmp_path, **lines):
    """The project's pin with some values replaced, as KEY_IN_UNDERSCORES of section.key."""
    path = tmp_path / "base.toml"
    path.write_text((ROOT / "base.toml").read_text())
    for name, value in lines.items():
        section, _, key = name.rpartition("_")
        image.set_pin_values(path, section.replace("_", "."), {key: value})
    return Pin.load(path)


def obtain(project, pin, engine, given=None, allow_stand_in=True):
    return image.obtain_base(project, pin, "gfx950", engine, given=given, allow_stand_in=allow_stand_in)


def test_the_pinned_image_is_pulled_by_digest_when_one_is_pinned(project, tmp_path):
    pin = pin_of(tmp_path, image_gfx950_digest=DIGEST)
    wanted = f"{REFERENCE.rpartition(':')[0]}@{DIGEST}"
    shell = FakeShell({**image_answers({}), "docker image inspect " + wanted: 1})
    base = obtain(project, pin, Docker(shell))
    assert f"docker pull {wanted}" in shell.commands
    assert (base.reference, base.digest, base.stand_in) == (wanted, DIGEST, False)


def test_an_image_that_is_here_is_not_pulled_again(project, tmp_path):
    shell = FakeShell(image_answers({}))
    base = obtain(project, pin_of(tmp_path), Docker(shell))
    assert not any("pull" in line for line in shell.commands)
    assert (base.reference, base.digest) == (REFERENCE, DIGEST)


def failing_pull(**more):
    return FakeShell(
        {
            **image_answers({}),
            "buildah --version": "",
            "debootstrap": "",
            "buildah images": 1,
            "buildah pull": Completed(125, "trying\nError: no such host"),
            **more,
        }
    )


def test_a_pull_that_fails_without_a_mirror_says_how_to_make_one(project, tmp_path):
    with pytest.raises(OverlayError) as caught:
        obtain(project, pin_of(tmp_path), Buildah(failing_pull()), allow_stand_in=False)
    assert caught.value.seen == "Error: no such host"
    assert "make mirror-base" in str(caught.value.fix)


def test_a_pull_that_fails_says_where_the_mirror_is_and_of_when(project, tmp_path):
    pin = pin_of(tmp_path, mirror_location="our.registry/base@sha256:1", mirror_date="2026-01-02 03:04 UTC")
    with pytest.raises(OverlayError) as caught:
        obtain(project, pin, Buildah(failing_pull()), allow_stand_in=False)
    assert "our.registry/base@sha256:1" in str(caught.value.fix) and "2026-01-02" in str(caught.value.fix)


def test_the_stand_in_takes_the_place_of_a_pinned_image_and_says_so(project, tmp_path, capsys):
    pin = pin_of(tmp_path, mirror_location="our.registry/base", mirror_date="2026-01-02 03:04 UTC")
    shell = failing_pull(**{SCRIPT: f"stand-in: working\n{STAND_IN}"})
    base = obtain(project, pin, Buildah(shell))
    said = capsys.readouterr().err
    assert (base.reference, base.digest, base.stand_in) == (STAND_IN, "", True)
    assert "USING THE STAND-IN BASE" in said and "cannot serve" in said and "our.registry/base" in said


def test_docker_hands_the_stand_in_to_buildah(project, tmp_path):
    shell = failing_pull(**{SCRIPT: STAND_IN, "docker image inspect": 1, "docker pull": 1})
    assert obtain(project, pin_of(tmp_path), Docker(shell)).engine.name == "buildah"


def test_no_stand_in_takes_the_place_of_an_image_that_was_asked_for(project, tmp_path):
    shell = failing_pull(**{SCRIPT: STAND_IN})
    with pytest.raises(OverlayError, match="the base image other/image:1 cannot be pulled"):
        obtain(project, pin_of(tmp_path), Buildah(shell), given="other/image:1")
    assert SCRIPT not in shell.commands


def test_a_stand_in_that_cannot_be_made_is_an_error(project, tmp_path):
    shell = failing_pull(**{SCRIPT: Completed(2, "error: needs root")})
    with pytest.raises(OverlayError, match="the stand-in base could not be made"):
        obtain(project, pin_of(tmp_path), Buildah(shell))


def test_a_stand_in_is_told_by_its_label_wherever_it_comes_from(project, tmp_path):
    answers = image_answers({image.STAND_IN_LABEL: "abc"})
    base = obtain(project, pin_of(tmp_path), Docker(FakeShell(answers)), given="our.registry/base:1")
    assert (base.stand_in, base.digest) == (True, "")
    shell = failing_pull(**{**answers, "buildah pull": "abc123"})
    assert obtain(project, pin_of(tmp_path), Buildah(shell), given="oci-archive:base.tar").stand_in


def test_an_archive_is_built_over_by_the_id_that_the_pull_prints(project, tmp_path):
    shell = failing_pull(**{"buildah pull": "storing\nabc123"})
    base = obtain(project, pin_of(tmp_path), Buildah(shell), given="oci-archive:/some/where/base.tar")
    assert (base.reference, base.name) == ("abc123", "oci-archive:base.tar")


def test_an_architecture_that_is_not_pinned_is_refused(project, tmp_path):
    with pytest.raises(OverlayError, match="no image is pinned for gfx1250"):
        image.image_pin(pin_of(tmp_path), "gfx1250")


@pytest.mark.parametrize(
    ("stand_in", "tag"), [(False, "vllm-openai-rocm:9.9"), (True, "vllm-openai-rocm:9.9-stand-in")]
)
def test_the_build_is_told_the_base_and_the_stamp(project, tmp_path, stand_in, tag):
    shell = FakeShell(image_answers({"vllm-openai-rocm.overlay-hash": "aa"}))
    base = image.Base("base:1", "base:1", DIGEST, Docker(shell), stand_in)
    built = image.build_image(project, pin_of(tmp_path), STAMP, base)
    command = next(line for line in shell.commands if line.startswith("docker build"))
    for argument in ("BASE_IMAGE=base:1", f"BASE_DIGEST={DIGEST}", "VERSION=9.9", "OVERLAY_HASH=aa"):
        assert f"--build-arg {argument}" in command
    assert built.reference == tag and f"--tag {tag} " in command
    assert ("STAND-IN" in built.table()) is stand_in
    assert "wall time" in built.table()


def test_a_folder_that_lacks_files_of_the_image_is_refused_by_their_names(tmp_path):
    shell = FakeShell(image_answers({}))
    base = image.Base("base:1", "base:1", "", Docker(shell))
    with pytest.raises(OverlayError) as caught:
        image.build_image(Project(tmp_path), pin_of(tmp_path), STAMP, base)
    assert "Dockerfile" in str(caught.value.seen) and not shell.commands


def test_every_argument_of_the_dockerfile_is_passed_and_every_one_passed_is_used(project, tmp_path):
    shell = FakeShell(image_answers({}))
    image.build_image(project, pin_of(tmp_path), STAMP, image.Base("b", "b", "", Docker(shell)))
    command = next(line for line in shell.commands if line.startswith("docker build"))
    passed = set(re.findall(r"--build-arg (\w+)=", command))
    assert passed == set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))


def test_the_build_context_lets_in_what_the_dockerfile_copies_and_nothing_of_home():
    text = (ROOT / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == {name for name in allowed if "/" not in name}
    assert not re.search(r"/root|\$HOME|~/", text)


def test_the_stand_in_scripts_reference_changes_with_the_base(tmp_path):
    base = tmp_path / "base"
    (base / "vllm").mkdir(parents=True)
    (base / "vllm.egg-info").mkdir()
    (base / "vllm/one.py").write_text("a = 1\n")

    def key():
        done = subprocess.run(
            [SCRIPT, "--base", str(base), "--key"], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    before = key()
    assert key() == before and before.startswith("localhost/vllm-rocm-stand-in:")
    (base / "vllm/one.py").write_text("a = 2\n")
    assert key() != before


def test_the_stand_in_script_says_what_is_missing(tmp_path):
    done = subprocess.run([SCRIPT, "--base", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no vLLM package" in done.stderr and "fix:" in done.stderr
