# SPDX-License-Identifier: Apache-2.0
"""Tests of what is exported: each goes with a pull request, or says why it stays here."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.export_plan import FOLDER, NAME, ExportPlan


def refuse_unclaimed_tests(plan: ExportPlan, root: Path) -> None:
    """Refuse a test of vLLM's code that no pull request carries and that has no reason to stay.

    Args:
        plan: the manifest.
        root: the project's folder.

    Raises:
        OverlayError: a test file that imports vLLM is in neither, or an entry of [stays] names none.
    """
    carried = {one.source for pull in plan.pulls for one in pull.tests}
    left = [path for path in _tests_of_vllm(root) if path not in carried]
    if unclaimed := [path for path in left if not any(fnmatchcase(path, glob) for glob in plan.stays)]:
        raise OverlayError(
            f"{FOLDER}/{NAME}: tests of vLLM's code that no pull request carries",
            seen=", ".join(unclaimed),
            wanted="each in the [[pr.test]] of the pull request whose files it tests",
            fix="add it there, or to [stays] with why it stays here",
        )
    if dead := [glob for glob in plan.stays if not any(fnmatchcase(path, glob) for path in left)]:
        raise OverlayError(
            f"{FOLDER}/{NAME}: [stays] names no test that would be carried",
            seen=", ".join(dead),
            fix="remove the entry",
        )


def _tests_of_vllm(root: Path) -> list[str]:
    """The test files that import vLLM, anywhere in them."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [file.relative_to(root).as_posix() for file in files if _imports_vllm(file)]


def _imports_vllm(file: Path) -> bool:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.split(".")[0] == "vllm" for name in names):
            return True
    return False
