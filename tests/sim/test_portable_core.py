# SPDX-License-Identifier: Apache-2.0
"""The core compiled for a host without AVX-512 is as right: its own code for whole waves is used there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.full
@pytest.mark.parametrize(
    "files",
    [
        ["test_conformance.py", "test_layouts.py", "test_counts.py"],
        ["test_catchers.py", "test_wait_checks.py", "test_schedule.py"],
    ],
)
def test_the_core_without_avx512(files: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", *(str(HERE / f) for f in files)]
    done = subprocess.run(
        [*command, "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-x", "-m", "not full"],
        cwd=HERE.parents[1],
        env=os.environ | {"CDNASIM_MARCH": "x86-64-v3", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
