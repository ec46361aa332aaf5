# SPDX-License-Identifier: Apache-2.0
"""The contract list of a project: made anew, and checked by import in a process of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

from rocm_overlay import contracts
from rocm_overlay.contracts import Contract
from rocm_overlay.plan import Sources, make_plan
from rocm_overlay.project import Project
from rocm_overlay.rebase_report import Finding

# Makes the process an AMD one, as the tests do, where the checkout has their harness.
FAKE_PLATFORM = """
import pathlib, sys
sys.path.insert(0, "tests/harness")
if pathlib.Path("tests/harness/fake_rocm.py").is_file():
    import fake_rocm
    fake_rocm.install("gfx950")
"""
RUN_CHECK = "import runpy\nsys.argv = ['contract_import', *sys.argv[1:]]\n"
RUN_CHECK += "runpy.run_module('rocm_overlay.contract_import', run_name='__main__')\n"

RunPython = Callable[[Project, list[str], str], subprocess.CompletedProcess[str]]


def current(project: Project, base: Path, skip: Collection[str] = ()) -> list[Contract]:
    """The project's contract list over a base that its series applies to.

    Args:
        project: whose overlay, series and reviewed names count.
        base: the folder that holds the base's vllm/.
        skip: names that may be missing.
    """
    sources = Sources.load(project)
    laid = {one.path: one.content for one in make_plan(sources, base).changes if one.content is not None}
    return contracts.record(sources.overlay, project.root / contracts.FOLDER, base, laid, skip)


def write_current(project: Project, base: Path, skip: Collection[str] = ()) -> int:
    """Record the contract list anew; its length."""
    found = current(project, base, skip)
    version = Sources.load(project).pin.vllm.version
    contracts.write(project.root / contracts.FOLDER, found, version)
    return len(found)


def check_by_import(project: Project, recorded: Path, tree: Path, run: RunPython) -> list[Finding]:
    """The recorded contracts against the imported package of ``tree``: a count, and a row for each other."""
    done = run(project, ["-c", FAKE_PLATFORM + RUN_CHECK, str(recorded)], str(tree))
    rows = [json.loads(line)[1:] for line in done.stdout.splitlines() if line.startswith('["contract", ')]
    total = len(json.loads(recorded.read_text(encoding="utf-8"))["contracts"])
    agree = [name for name, state, _ in rows if state == "agrees"]
    findings = [Finding("contract by import", f"{len(agree)} of {total} names", "agree")]
    findings += [
        Finding("contract by import", name, f"{state} {what}", state == "differs")
        for name, state, what in rows
        if state != "agrees"
    ]
    if len(rows) != total:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        findings.append(Finding("contract by import", "the process ended", last, True))
    return findings
