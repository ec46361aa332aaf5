# SPDX-License-Identifier: Apache-2.0
"""The SWA metadata kernel compiled for gfx942 and gfx950: one wave, no scratch, no LDS, no barrier."""

import json
import os
import subprocess
import sys

import pytest

from rocm_overlay import table
from rocm_overlay.project import Project
from tests.harness.interpreter import HARNESS

PROJECT = Project.find()
ARCHES = ("gfx942", "gfx950")
VARIANTS = 6
NONE_USED = (
    "scratch_bytes", "lds_bytes", "shared_bytes", "vgpr_spills", "sgpr_spills", "barriers",
    "scratch_instructions",
)  # fmt: skip
# From here on a SIMD holds fewer than eight waves.
MOST_VGPRS = 64
DOCUMENT = PROJECT.root / "docs/tuning/swa_decode_meta.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a program of the harness and read the JSON that it prints."""
    cache = tmp_path_factory.mktemp("triton")

    def run_program(program, *arguments):
        # Triton would otherwise take the kernel for one to interpret, or answer from an earlier compilation.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment.update(TRITON_CACHE_DIR=str(cache), PYTHONPATH=str(HARNESS))
        command = [sys.executable, str(HARNESS / program), *map(str, arguments)]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run_program


@pytest.fixture(scope="module")
def compiled(run):
    return run("compile_swa.py", PROJECT.tree, *ARCHES)


def render(rows):
    headers = ("arch", "rows", "block size", "VGPRs", "SGPRs", "scratch bytes", "LDS bytes", "barriers")
    lines = [
        (
            row["arch"], "draft" if row["noncausal"] else "causal", row["block_size"], row["vgprs"],
            row["sgprs"], row["scratch_bytes"], max(row["lds_bytes"], row["shared_bytes"]), row["barriers"],
        )
        for row in rows
    ]  # fmt: skip
    return table.render(headers, lines)


def found_in(row):
    """What a compiled kernel uses of that which ours must not."""
    found = [name for name in NONE_USED if row[name]]
    return found + ([f"{row['vgprs']} VGPRs"] if row["vgprs"] > MOST_VGPRS else [])


def test_every_variant_uses_registers_alone(compiled, capsys):
    with capsys.disabled():
        print("\n" + render(compiled))
    assert [row["arch"] for row in compiled] == [arch for arch in ARCHES for _ in range(VARIANTS)]
    assert {(row["noncausal"], row["block_size"]) for row in compiled} == {
        (noncausal, block_size) for noncausal in (False, True) for block_size in (32, 64, 128)
    }
    assert [found_in(row) for row in compiled] == [[]] * len(compiled)
    assert all(row["vgprs"] > 0 and row["sgprs"] > 0 for row in compiled), "nothing was read of the assembly"


def test_the_document_holds_this_table(compiled):
    assert render(compiled) in DOCUMENT.read_text(), "write the table that the test above prints into it"


def test_more_waves_are_seen_to_use_lds_and_barriers(run):
    """The same kernel over four waves has to exchange through LDS."""
    for row in run("compile_swa.py", PROJECT.tree, "gfx942", "NUM_WARPS=4"):
        assert {"shared_bytes", "barriers"} <= set(found_in(row))


def test_a_kernel_that_spills_is_seen_to(run):
    for row in run("compile_crowded.py", *ARCHES):
        assert {"scratch_bytes", "vgpr_spills", "scratch_instructions"} <= set(found_in(row))


def test_too_many_registers_are_seen(compiled):
    assert found_in({**compiled[0], "vgprs": MOST_VGPRS + 1}) == ["65 VGPRs"]
