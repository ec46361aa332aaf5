# SPDX-License-Identifier: Apache-2.0
"""The set-up script says what a machine lacks, installs it through apt where it may, and else stops."""

import os
import shutil
import subprocess
import sys

import pytest

from rocm_overlay.project import Project

SCRIPT = Project.find().root / "ci" / "setup.sh"
COREUTILS = ("bash", "cat", "cp", "dirname", "env", "id", "mkdir", "sha256sum", "tr", "rm")


@pytest.fixture
def machine(tmp_path):
    """A machine with a Python and no more than the commands given; returns a run of the script on it."""
    root = tmp_path / "checkout"
    (root / "ci").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "ci")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in COREUTILS:
        (binaries / name).symlink_to(shutil.which(name))
    (binaries / "python3").symlink_to(sys.executable)

    def run(goal="image", cwd=root, python="", **commands):
        for name, body in commands.items():
            (binaries / name).unlink(missing_ok=True)
            (binaries / name).write_text(f"#!{binaries}/bash\n{body}\n")
            (binaries / name).chmod(0o755)
        environment = {"PATH": str(binaries), "HOME": str(tmp_path), "PYTHON": python}
        command = [str(binaries / "bash"), "ci/setup.sh", goal]
        return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, check=False)

    return run


def test_without_apt_the_missing_packages_are_listed(machine):
    done = machine(git="true")
    assert done.returncode == 2
    assert "missing: buildah debootstrap" in done.stderr and "apt-get install" in done.stderr


def test_tests_need_the_assembler_and_the_compiler_as_well(machine):
    done = machine("test", git="true")
    assert done.returncode == 2
    for package in ("lld-19", "g++", "buildah"):
        assert package in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="asks apt as root would")
def test_apt_is_asked_for_exactly_what_is_missing_and_a_failed_install_is_named(machine):
    done = machine(git="true", **{"apt-get": 'echo "apt-get $*" >&2'})
    assert done.returncode == 2
    assert "apt-get install -y -qq --no-install-recommends buildah debootstrap" in done.stderr
    assert "still missing after the install: buildah debootstrap" in done.stderr


def test_an_engine_that_answers_makes_buildah_needless(machine):
    done = machine(git="true", docker="true")
    assert "buildah" not in done.stderr and "missing" not in done.stderr


def test_a_python_that_is_too_old_counts_as_missing(machine):
    done = machine(git="true", docker="true", python3="exit 1")
    assert done.returncode == 2 and "python3 python3-venv" in done.stderr


def test_a_python_that_was_asked_for_and_cannot_be_used_is_named(machine):
    done = machine(git="true", docker="true", old='[ "$1" = --version ] && echo Python 3.9.2; exit 1')
    assert "cannot be used" not in done.stderr
    done = machine(python="old")
    assert done.returncode == 2
    assert "PYTHON=old cannot be used" in done.stderr and "Python 3.9.2" in done.stderr
    assert "3.11 or newer" in done.stderr and "leave it out" in done.stderr
    done = machine(python="nowhere")
    assert done.returncode == 2 and "PYTHON=nowhere" in done.stderr and "does not run" in done.stderr


def test_what_a_probed_python_says_is_not_taken_for_its_name(machine):
    # A start-up file may print on either stream.
    chatty = f'echo banner; echo banner >&2; exec {sys.executable} "$@"'
    done = machine(git="true", docker="true", chatty=chatty, python="chatty")
    assert "banner" not in done.stderr + done.stdout and "missing" not in done.stderr


FAKE_PYTHON = """
if [ "$2" = venv ]; then
  mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "#!$PWD/$3/bin/python" >"$3/bin/pip"; echo made >&2
fi
"""


def test_a_checkout_that_moved_makes_its_environment_anew_and_one_that_did_not_does_nothing(
    machine, tmp_path
):
    root = tmp_path / "checkout"
    (root / "requirements").mkdir()
    for name in ("requirements/pip.txt", "requirements/tool.txt", "pyproject.toml"):
        (root / name).touch()
    done = machine(git="true", docker="true", python3=FAKE_PYTHON)
    assert done.returncode == 0 and "making .venv" in done.stderr
    assert machine().stderr == ""
    moved = tmp_path / "moved"
    root.rename(moved)
    done = machine(cwd=moved)
    assert done.returncode == 0 and "making .venv" in done.stderr
    assert (moved / ".venv/bin/pip").read_text() == f"#!{moved}/.venv/bin/python\n"
    assert machine(cwd=moved).stderr == ""


def test_an_unknown_goal_is_named(machine):
    done = machine("imgae")
    assert done.returncode == 2 and "imgae" in done.stderr and "image or test" in done.stderr
