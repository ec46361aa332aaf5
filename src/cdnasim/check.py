# SPDX-License-Identifier: Apache-2.0
"""``python -m cdnasim.check``: run the proofs that the simulator is right and print a table.

Each row is a test file of tests/sim with its counts, under the number of the proof that it belongs to
(1 opcodes, 2 Triton, 3 the base's kernels, 4 planted faults; "-" what is beside them). Then the opcodes that
the first proof does not compare with the manual, with the reason. ``--full`` adds the long tests. Exit status
1 when any fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

PROOFS = (
    ("1 opcodes against the ISA manual", "test_conformance.py"),
    ("1 64-bit and floating-point atomics", "test_atomics_wide.py"),
    ("1 matrix layouts, memory and LDS opcodes", "test_layouts.py"),
    ("2 Triton kernels against torch", "test_triton.py"),
    ("2 Triton kernels against its interpreter", "test_triton_interpreter.py"),
    ("2 SWA metadata kernel against its definition", "test_swa_decode_meta.py"),
    ("3 base's K1, K2 and FFN against float64", "test_base.py"),
    ("4 planted faults in FlyDSL hand-offs", "test_flydsl.py"),
    ("4 catchers, parser errors, memory model", "test_catchers.py"),
    ("4 planted faults between ranks", "test_peer_memory.py"),
    ("4 missing waits, NaNs where they are born", "test_wait_checks.py"),
    ("- schedules, ranks side by side", "test_schedule.py"),
    ("- counts of a launch", "test_counts.py"),
    ("- modelled times: parts, fit, residuals", "test_timing.py"),
    ("- the picture of a launch", "test_timeline.py"),
    ("- the same bodies and calls for real GPUs", "test_hip.py"),
)


FULL_PROOFS = (("- the core compiled without AVX-512", "test_portable_core.py"),)


def find_tests() -> Path:
    """tests/sim beside the source tree, or under the working directory."""
    for root in (Path(__file__).parents[2], Path.cwd()):
        if (root / "tests/sim").is_dir():
            return root / "tests/sim"
    raise SystemExit("tests/sim not found: run from the repository")


def environment() -> dict[str, str]:
    """Ours, with the modules that this process finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def run(folder: Path, file: str, full: bool) -> tuple[dict[str, int], float, str]:
    """(counts by outcome, seconds, output) of one test file."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(folder / file),
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=short",
    ]
    if not full:
        command += ["-m", "not full"]
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
        env=environment(),
    )
    tail = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error|errors)", tail)}
    if done.returncode not in (0, 5) and not counts.get("failed"):
        counts["failed"] = counts.get("failed", 0) + 1
    return counts, time.monotonic() - started, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also the tests marked full")
    full = parser.parse_args().full
    folder = find_tests()
    bad = False
    print(f"{'proof':44} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for title, file in PROOFS + (FULL_PROOFS if full else ()):
        counts, seconds, output = run(folder, file, full)
        failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
        passed = counts.get("passed", 0)
        print(f"{title:44} {passed:7} {failed:7} {counts.get('skipped', 0):8} {seconds:8.1f}", flush=True)
        if failed or not passed:
            bad = True
            print(output)
    listed = subprocess.run([sys.executable, str(folder / "conformance.py")], env=environment())
    return int(bad or listed.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
