# SPDX-License-Identifier: Apache-2.0
"""Building the image: where its base comes from, what it is told, and what the Dockerfile may use."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_overlay import engine as engines
from rocm_overlay import image, mirror
from rocm_overlay.engine import Buildah, Completed, Docker
from rocm_overlay.errors import OverlayError
from rocm_overlay.pin import Pin
from rocm_overlay.project import Project
from tests.unit.test_engine import DIGEST, FakeShell, image_answers

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Pin.load(ROOT / "base.toml").images["gfx950"].reference
OTHER = "sha256:" + "b" * 64
STAND_IN = "localhost/vllm-rocm-stand-in:1-abc"
STAMP = {"version": "9.9", "overlay_hash": "aa", "series_hash": "bb", "vllm_version": "0"}
# The source archives that were fetched in this test.
FETCHED: list[str] = []
SCRIPT = str(ROOT / image.STAND_IN_SCRIPT)


@pytest.fixture
def project():
    return Project(ROOT)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    monkeypatch.setenv("STORAGE_DRIVER", "")
    monkeypatch.setattr(engines, "install_packages", lambda shell, packages: False)
    monkeypatch.setattr(image, "fetch_base", lambda project, pin: FETCHED.append(pin.sdist))
    FETCHED.clear()


def pin_of(tmp_path, **lines):
    """The project's pin with some values replaced, as KEY_IN_UNDERSCORES of section.key."""
    path = tmp_path / "base.toml"
    path.write_text((ROOT / "base.toml").read_text())
    for name, value in lines.items():
        section, _, key = name.rpartition("_")
        mirror.set_pin_values(path, section.replace("_", "."), {key: value})
    return Pin.load(path)


def built_over(version="0.33.0\n", labels=None):
    """What the engines answer where the base carries a version of vllm."""
    return {**image_answers(labels or {}), "docker run": version}


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
    assert not any("pull" in line for line in shell.commands) and not FETCHED
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
    pin = pin_of(
        tmp_path,
        mirror_gfx950_location="our.registry/base@sha256:1",
        mirror_gfx950_date="2026-01-02 03:04 UTC",
        mirror_gfx942_location="our.registry/another",
    )
    with pytest.raises(OverlayError) as caught:
        obtain(project, pin, Buildah(failing_pull()), allow_stand_in=False)
    assert "our.registry/base@sha256:1" in str(caught.value.fix) and "2026-01-02" in str(caught.value.fix)


def test_the_stand_in_takes_the_place_of_a_pinned_image_and_says_so(project, tmp_path, capsys):
    pin = pin_of(tmp_path, mirror_gfx950_location="our.registry/base")
    shell = failing_pull(**{SCRIPT: f"stand-in: working\n{STAND_IN}"})
    base = obtain(project, pin, Buildah(shell))
    said = capsys.readouterr().err
    assert (base.reference, base.digest, base.stand_in) == (STAND_IN, "", True)
    assert [pin.vllm.sdist] == FETCHED
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


@pytest.mark.parametrize("other", ["", OTHER])
def test_an_image_has_the_name_that_commands_use_unless_it_serves_nothing_or_is_one_of_two(tmp_path, other):
    pin = pin_of(tmp_path, image_gfx950_digest=DIGEST, image_gfx942_digest=other or DIGEST)
    wanted = {
        "": ("vllm-openai-rocm:9.9", "vllm-openai-rocm"),
        OTHER: ("vllm-openai-rocm:9.9-gfx950", "vllm-openai-rocm:gfx950"),
    }
    assert image.image_tags(pin, "gfx950", "9.9", stand_in=False) == wanted[other]
    assert image.image_tags(pin, "gfx950", "9.9", stand_in=True) == ("vllm-openai-rocm:9.9-stand-in",)


@pytest.mark.parametrize("stand_in", [False, True])
def test_the_build_is_told_the_base_and_the_stamp(project, stand_in):
    shell = FakeShell(built_over(labels={"vllm-openai-rocm.overlay-hash": "aa"}))
    base = image.Base("base:1", "base:1", DIGEST, Docker(shell), stand_in)
    built = image.build_image(project, STAMP, base, ["ours:1", "ours"])
    command = next(line for line in shell.commands if line.startswith("docker build"))
    for argument in ("BASE_IMAGE=base:1", f"BASE_DIGEST={DIGEST}", "VERSION=9.9", "OVERLAY_HASH=aa"):
        assert f"--build-arg {argument}" in command
    assert "--tag ours:1 --tag ours " in command
    assert re.search(r"image +ours:1\n.*image +ours\n", built.table(), re.DOTALL)
    assert ("STAND-IN" in built.table()) is stand_in
    assert "wall time" in built.table()


def test_the_label_has_the_version_that_the_base_itself_carries(project):
    shell = FakeShell(built_over("warning: noise\n0.33.1.dev7+g4ba787ec9\n"))
    image.build_image(project, STAMP, image.Base("nightly", "nightly", "", Docker(shell)), ["ours"])
    assert any(line.startswith("docker run --rm --entrypoint python3 nightly -c") for line in shell.commands)
    assert any("--build-arg VLLM_VERSION=0.33.1.dev7+g4ba787ec9 " in line for line in shell.commands)


def test_the_script_that_asks_the_base_finds_the_version_without_importing(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "vllm/_version.py").write_text("__version__ = version = '1.2.3+rocm'\n")
    done = subprocess.run(
        [sys.executable, "-c", image.VERSION_SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1.2.3+rocm\n"


def test_a_base_without_vllm_is_refused_before_anything_is_built(project):
    shell = FakeShell(built_over(Completed(1, "", "Traceback\nAttributeError: no vllm")))
    with pytest.raises(OverlayError, match=r"the base image other:1 has no vllm package") as caught:
        image.build_image(project, STAMP, image.Base("other:1", "other:1", "", Docker(shell)), ["ours"])
    assert caught.value.seen == "AttributeError: no vllm"
    assert not any("build" in line for line in shell.commands)


def test_drift_that_is_allowed_reaches_the_lay_and_is_loud(project, capsys):
    shell = FakeShell(built_over())
    base = image.Base("base:1", "base:1", "", Docker(shell))
    image.build_image(project, STAMP, base, ["ours"], allow_drift=["vllm/a.py", "vllm/b.py"])
    assert any("--build-arg ALLOW_DRIFT=vllm/a.py vllm/b.py " in line for line in shell.commands)
    assert "DRIFT ALLOWED in vllm/a.py, vllm/b.py" in capsys.readouterr().err
    image.build_image(project, STAMP, base, ["ours"])
    assert "DRIFT" not in capsys.readouterr().err


@pytest.mark.parametrize("path", ["", "two words", "a;b", "$(id)"])
def test_a_drift_path_that_the_dockerfile_would_not_get_is_refused(path):
    with pytest.raises(OverlayError, match="--allow-drift takes the path of one file"):
        image.check_drift_paths(["vllm/fine.py", path])


@pytest.mark.parametrize(("asked", "told"), [(True, "yes"), (False, "no")])
def test_kernels_are_compiled_into_the_image_where_that_is_asked_for(project, asked, told):
    shell = FakeShell(built_over())
    base = image.Base("base:1", "base:1", "", Docker(shell))
    image.build_image(project, STAMP, base, ["ours"], compile_kernels=asked)
    assert any(f"--build-arg COMPILE_KERNELS={told} " in line for line in shell.commands)
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "ARG COMPILE_KERNELS=no" in dockerfile and "rocm-overlay kernels --out" in dockerfile


def test_an_image_that_loses_its_name_is_not_removed_and_the_user_is_told_how(project, capsys):
    shell = FakeShell(built_over())
    image.build_image(project, STAMP, image.Base("base:1", "base:1", "", Docker(shell)), ["ours"])
    assert "docker image prune" in capsys.readouterr().err
    assert not any("rmi" in line or "prune" in line for line in shell.commands)
    shell.answers["docker image inspect ours"] = 1
    image.build_image(project, STAMP, image.Base("base:1", "base:1", "", Docker(shell)), ["ours"])
    assert "prune" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("goal", "variables", "wanted"),
    [
        ("image", [], "image --arch gfx950"),
        ("image", ["ALLOW_DRIFT=a.py b.py"], "image --arch gfx950 --allow-drift a.py --allow-drift b.py"),
        ("image", ["KERNELS=1"], "image --arch gfx950 --compile-kernels"),
        ("mirror-base", ["TO=x/y:1"], "mirror-base --to x/y:1"),
        ("mirror-base", ["TO=x/y:1", "ARCH=gfx942"], "mirror-base --to x/y:1 --arch gfx942"),
        ("pin-digest", [], "pin-digest"),
        ("pin-digest", ["ARCH=gfx942"], "pin-digest --arch gfx942"),
    ],
)
def test_the_makefile_passes_what_it_is_given_and_fetches_nothing_itself(goal, variables, wanted):
    # The tests themselves run under make, whose own flags would reach this one.
    outer = ("ARCH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "--dry-run", goal, "TOOL=tool", *variables]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    setup, *run = done.stdout.replace("\\\n", "").splitlines()
    assert setup == "ci/setup.sh image"
    assert [shlex.split(line) for line in run] == [["tool", *wanted.split()]]


def test_a_folder_that_lacks_files_of_the_image_is_refused_by_their_names(tmp_path):
    shell = FakeShell(image_answers({}))
    base = image.Base("base:1", "base:1", "", Docker(shell))
    with pytest.raises(OverlayError) as caught:
        image.build_image(Project(tmp_path), STAMP, base, ["ours"])
    assert "Dockerfile" in str(caught.value.seen) and not shell.commands


def test_every_argument_of_the_dockerfile_is_passed_and_every_one_passed_is_used(project):
    shell = FakeShell(built_over())
    image.build_image(project, STAMP, image.Base("b", "b", "", Docker(shell)), ["ours"])
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


def test_no_script_or_engine_removes_an_image():
    for name in ("ci/stand-in-base.sh", "src/rocm_overlay/engine.py"):
        text = (ROOT / name).read_text()
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("#", "say ")))
        assert not re.search(r'buildah rmi|_run\("rmi', code)


def test_the_stand_in_script_says_what_is_missing(tmp_path):
    done = subprocess.run([SCRIPT, "--base", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no vLLM package" in done.stderr and "fix:" in done.stderr
