# SPDX-License-Identifier: Apache-2.0
"""What a carried tree has to pass before the rebase is committed, in the order of their cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rocm_overlay import contracts
from rocm_overlay.base_index import BaseIndex
from rocm_overlay.contract_callers import find_misfits
from rocm_overlay.contract_checks import FAKE_PLATFORM, check_by_import, write_current
from rocm_overlay.install import verify
from rocm_overlay.overlay import module_name
from rocm_overlay.plan import REMOVED, Sources
from rocm_overlay.processes import run_bound
from rocm_overlay.project import Project
from rocm_overlay.rebase_report import Finding
from rocm_overlay.removed_imports import Importer, find_importers
from rocm_overlay.targets import Target
from rocm_overlay.tree import build_tree

FAST_TESTS = ("-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-m", "not full")
TAIL_LINES = 15

# Imports each module named on the command line and says how that went, a line of JSON each. What is
# missing of others' packages is a matter of this machine, and not of the tree.
IMPORT_EACH = """
import importlib, json, sys, traceback
for name in sys.argv[1:]:
    found = "imports"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        found = "needs " + str(error.name)
        if (error.name or "vllm").split(".")[0] == "vllm":
            found = "fails: " + repr(error)
    except BaseException as error:
        found = "fails: " + traceback.format_exc().strip().splitlines()[-1]
    print(json.dumps(["import", name, found]), flush=True)
"""


@dataclass(frozen=True)
class Checks:
    """The checks of a carried tree.

    Attributes:
        tests: the arguments of the Python that runs the fast tests, in the clone.
        environment: variables for the imports and tests, beside this process's.
    """

    tests: Sequence[str] = FAST_TESTS
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, repo: Project, target: Target, accepted: Collection[str]) -> Iterator[list[Finding]]:
        """Lay the tree and check it: a list of findings a check, until one stops.

        Args:
            repo: the clone with the carried series.
            target: its base.
            accepted: names of contracts whose drift was accepted.
        """
        yield self._contracts(repo, target, accepted)
        yield self._lay(repo, target)
        yield self._callers(repo)
        yield self._imports(repo)
        yield self._contracts_by_import(repo)
        yield self._tests(repo)

    def _contracts(self, repo: Project, target: Target, accepted: Collection[str]) -> list[Finding]:
        """The recorded contracts against the new base, which is then what they are recorded from."""
        folder = repo.root / contracts.FOLDER
        if not folder.is_dir():
            return []
        root = Path(target.root)
        recorded = contracts.load(folder)
        rows = [
            Finding("contract", str(one.contract), f"{one.what} (used by {', '.join(one.contract.users)})",
                    one.breaks and str(one.contract) not in accepted)
            for one in contracts.compare(recorded, root)
        ]  # fmt: skip
        if not any(row.stops for row in rows):
            write_current(repo, root, accepted)
        return [Finding("contract", f"{len(recorded)} names of the base", f"{len(rows)} differ"), *rows]

    def _callers(self, repo: Project) -> list[Finding]:
        sources = Sources.load(repo)
        misfits = [
            Finding("caller", f"{one.path}:{one.line}", f"{one.called}: {one.what}", True)
            for one in find_misfits(sources, repo.tree)
        ]
        return misfits + [
            Finding("caller", f"{one.path}:{one.line}", f"imports {one.module}, which we remove", True)
            for one in importers_of_removed(sources, repo.tree)
        ]

    def _contracts_by_import(self, repo: Project) -> list[Finding]:
        recorded = repo.root / contracts.FOLDER / contracts.RECORDED
        if not recorded.is_file():
            return []
        return check_by_import(repo, recorded, repo.tree, self.python)

    def _lay(self, repo: Project, target: Target) -> list[Finding]:
        repo.build.mkdir(exist_ok=True)
        if repo.base.is_symlink() or not repo.base.exists():
            repo.base.unlink(missing_ok=True)
            repo.base.symlink_to(target.root)
        sources = Sources.load(repo)
        plan = build_tree(sources, repo.base, repo.tree)
        verify(repo.tree, sources)
        return [Finding("laid tree", f"{len(plan.changes)} files", "laid and verified")]

    def _imports(self, repo: Project) -> list[Finding]:
        names = modules_of(Sources.load(repo))
        done = self.python(repo, ["-c", FAKE_PLATFORM + IMPORT_EACH, *names], str(repo.tree))
        rows = []
        for line in done.stdout.splitlines():
            if line.startswith('["import", '):
                _, name, found = json.loads(line)
                rows.append(Finding("import", name, found, found.startswith("fails")))
        seen = {row.what for row in rows}
        rows += [
            Finding("import", name, f"fails: the process ended; {_tail(done.stderr, 3)}", True)
            for name in names
            if name not in seen
        ]
        good = [row for row in rows if row.found == "imports"]
        others = [row for row in rows if row.found != "imports"]
        return [Finding("import", f"{len(good)} modules", "import on the CPU"), *others]

    def _tests(self, repo: Project) -> list[Finding]:
        done = self.python(repo, list(self.tests), "")
        text = done.stdout + done.stderr
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        if done.returncode:
            return [Finding("fast tests", f"exit status {done.returncode}", _tail(text, TAIL_LINES), True)]
        return [Finding("fast tests", "passed", last)]

    def python(self, repo: Project, arguments: list[str], path: str) -> subprocess.CompletedProcess[str]:
        """Run Python in a checkout, with ``path`` in front of its import path."""
        # A checkout's own tool, else the one that runs here.
        source = [str(folder) for folder in (repo.root / "src", Path(__file__).parents[1]) if folder.is_dir()]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
            "PYTHONPATH": os.pathsep.join([part for part in (path, *source) if part]),
            "ROCM_OVERLAY_HOME": str(repo.root),
            "VLLM_PLUGINS": "",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.environment,
        }
        command = [sys.executable, *arguments]
        return run_bound(command, cwd=repo.root, env=environment, text=True, capture_output=True, check=False)


def importers_of_removed(sources: Sources, tree: Path) -> list[Importer]:
    """What a laid tree still imports of the modules that we remove."""
    paths = (path.relative_to(tree).as_posix() for path in (tree / "vllm").rglob("*.py"))
    return find_importers(BaseIndex(tree), paths, [one.path for one in sources.overlay.removals])


def modules_of(sources: Sources) -> list[str]:
    """The modules that we add, replace or patch, in path order."""
    paths = [path for path, action in sorted(sources.touched.items()) if action != REMOVED]
    return [module_name(path) for path in paths if path.endswith(".py")]


def _tail(text: str, lines: int) -> str:
    return " | ".join(line.strip() for line in text.strip().splitlines()[-lines:]) or "no output"


def cached_environment(project: Project) -> dict[str, str]:
    """Variables with which the clone's tests use the checkout's download cache."""
    return {"ROCM_OVERLAY_CACHE": str(project.cache)}


def checks_for(project: Project) -> Checks:
    """The checks of a real rebase."""
    return Checks(environment=cached_environment(Project(Path(project.root).resolve())))
