# SPDX-License-Identifier: Apache-2.0
"""The set-up script says what a machine lacks, installs it through apt where it may, and else stops."""

import os
import shutil
import subprocess
import sys

import pytest

from rocm_overlay.project import Project

SCRIPT = Project.find().root / "ci" / "setup.sh"
COREUTILS = ("bash", "cat", "dirname", "env", "id", "sha256sum", "tr", "rm")


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

    def run(goal="image", **commands):
        for name, body in commands.items():
            (binaries / name).unlink(missing_ok=True)
            (binaries / name).write_text(f"#!{binaries}/bash\n{body}\n")
            (binaries / name).chmod(0o755)
        environment = {"PATH": str(binaries), "HOME": str(tmp_path)}
        command = [str(binaries / "bash"), "ci/setup.sh", goal]
        return subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False)

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


def test_an_unknown_goal_is_named(machine):
    done = machine("imgae")
    assert done.returncode == 2 and "imgae" in done.stderr and "image or test" in done.stderr
