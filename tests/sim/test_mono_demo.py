# SPDX-License-Identifier: Apache-2.0
"""`make demo`: runs the FFN launch and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from mono import demo
from mono.compare import Error

from rocm_overlay.project import Project

ROOT = Project.find().root


def test_the_make_target_runs_it() -> None:
    (recipe,) = re.findall(r"^demo:.*\n\t@(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (script,) = re.findall(r"\S+\.py", recipe)
    assert (ROOT / script).samefile(demo.__file__)


def test_tables_put_ours_beside_the_bases() -> None:
    from mono import bench

    pair = bench.kept("layer", "gfx950")["layer TP4 6 rows"]
    lines = demo.counts_table(pair["ours"], pair["base"])
    for launches in pair.values():
        assert f"{bench.modelled_us(launches):.1f}" in lines[-1]
        assert f"{sum(c.handoff_depth for c in launches):.0f}" in lines[0]
    assert "modelled" in lines[-1] and "not measured" in lines[-1]
    one, other = Error(1.0, 1e-5, 0.0, 0.0, 0.0), Error(1.0, 2e-4, 0.0, 0.0, 0.0)
    assert demo.errors_table({"post": one}, {"post": other})[1].split() == ["post", "1.0e-05", "2.0e-04"]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernel, shown", [("ffn", "output, the sum rounded once"), ("layer", "key record")])
def test_it_runs(kernel: str, shown: str) -> None:
    done = subprocess.run(
        [sys.executable, demo.__file__, "--kernel", kernel, "--rows", "1", "--tp", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "1 rows, TP2" in said and shown in said and "not measured" in said
