# SPDX-License-Identifier: Apache-2.0
"""The base's own mono decode test file, unchanged, on the base: the harness runs real upstream tests.

It reaches into the base's module, which the laid tree replaces; that the tree keeps what it promises is
test_mono_decode_base_behaviours.py.
"""

import os
import re
import subprocess
import sys

from rocm_overlay.project import Project
from tests.harness.interpreter import HARNESS

PROJECT = Project.find()
FILE = PROJECT.base / "tests/models/test_dsv41_mono_decode.py"
TESTS = 76

# A pytest plugin: the gate module forgets the flag that it should keep, and gfx942 takes gfx950's rows.
FAULTS = """
from vllm.models.deepseek_v41.amd import mono_decode, ops

ops.record_monokernel = lambda vllm_config: None
mono_decode.MAX_ROWS_GFX942 = mono_decode.MAX_ROWS
"""


def run(tree, *plugins, extra_path=""):
    """Counts of the run's last line, by outcome, and the names of the tests that failed."""
    command = [
        sys.executable, "-m", "pytest", "-rf", "-p", "fake_rocm_plugin", *plugins, "-p", "no:cacheprovider",
        "-c", str(HARNESS / "empty.ini"), "--noconftest", "--rootdir", str(PROJECT.base / "tests"), str(FILE),
    ]  # fmt: skip
    paths = [str(tree), str(HARNESS), str(extra_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) ([a-z]+)", last) if name != "warnings"}
    assert counts, done.stdout + done.stderr
    tested = re.search(r"^vLLM tested: (.+)$", done.stdout, re.MULTILINE)
    assert tested and tested[1] == str(tree / "vllm"), done.stdout
    failed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    return counts, failed, done.stdout


def test_all_tests_pass_and_none_is_skipped():
    counts, _, output = run(PROJECT.base)
    assert counts == {"passed": TESTS}, output


def test_planted_faults_are_found(tmp_path):
    (tmp_path / "planted_faults.py").write_text(FAULTS)
    counts, failed, output = run(PROJECT.base, "-p", "planted_faults", extra_path=tmp_path)
    assert set(failed) == {
        "test_create_records_the_flag_for_the_gfx942_helpers",
        "test_gfx942_decode_steps_of_up_to_42_rows",
    }, output
    assert counts == {"passed": TESTS - len(failed), "failed": len(failed)}
