# SPDX-License-Identifier: Apache-2.0
"""What an exported pull request has to pass: ``git am`` on the pinned source, its tests, upstream's hooks.

Upstream's hooks are run by pre-commit itself from upstream's own configuration. Where that names a
repository of hooks, which needs a host that this machine may not reach, the same tool at the same
version is taken from the package index; a hook without such a package is named and not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.export import PLACEHOLDER, REPOSITORY, Exported
from rocm_overlay.export_plan import ExportPlan, load_plan
from rocm_overlay.gittool import git_text, run_git
from rocm_overlay.plan import Sources
from rocm_overlay.project import Project

# Of a hook in somebody's repository: the package that has its tool, by the repository's name and the
# tag without its v, and the hook as that repository declares it.
PACKAGES: Mapping[str, tuple[str, Mapping[str, dict[str, Any]]]] = {
    "astral-sh/ruff-pre-commit": (
        "ruff=={version}",
        {
            "ruff-check": {"entry": "ruff check --force-exclude", "types_or": ["python", "pyi", "jupyter"]},
            "ruff-format": {"entry": "ruff format --force-exclude", "types_or": ["python", "pyi", "jupyter"]},
        },
    ),
    "crate-ci/typos": ("typos=={version}", {"typos": {"entry": "typos", "types": ["text"]}}),
    "pre-commit/mirrors-clang-format": (
        "clang-format=={version}",
        {"clang-format": {"entry": "clang-format -i", "types_or": ["c++", "c", "cuda"]}},
    ),
}
RESULT = re.compile(
    r"^(?P<name>.+?)\.{3,}(?:\((?P<why>[^)]+)\))?(?P<state>Passed|Failed|Skipped)$", re.MULTILINE
)


@dataclass(frozen=True)
class HookResult:
    """A hook of upstream's configuration: Passed, Failed, Skipped (no file for it) or not run, and why."""

    name: str
    state: str
    detail: str = ""


def apply_mailboxes(repository: Path, patches: Sequence[Path], target: Path, base: Path) -> Path:
    """A checkout of the pinned source with mailbox patches applied by ``git am``.

    Args:
        repository: build/export.git, whose branch ``base`` is the pinned source.
        patches: in the order in which they apply.
        target: the folder to make.
        base: the unpacked pinned source, for what an installed package has and the repository has not.

    Raises:
        CheckFailed: a patch does not apply.
    """
    run_git(["clone", "--quiet", "--shared", "--branch", "base", str(repository), str(target)])
    name, _, email = PLACEHOLDER.rpartition("<")
    run_git(["config", "user.name", name.strip()], target)
    run_git(["config", "user.email", email.rstrip(">")], target)
    for patch in patches:
        # The title's own brackets stay: only [PATCH] is the mailbox's.
        status, printed = run_git(["am", "--keep-non-patch", str(patch)], target, good=range(256))
        if status:
            raise CheckFailed(
                f"{patch.parent.name} does not apply to the pinned source",
                seen=printed.decode("utf-8", "replace").strip()[-400:],
                wanted="a clean git am",
            )
    version = (base / "vllm" / "_version.py").read_text(encoding="utf-8")
    (target / "vllm" / "_version.py").write_text(version, encoding="utf-8")
    match = re.search(r"__version__ = version = '([^']+)'", version)
    info = target / f"vllm-{match[1] if match else '0'}.dist-info"
    info.mkdir()
    shutil.copy(base / "PKG-INFO", info / "METADATA")
    # What an install adds is nobody's change.
    (target / ".git" / "info" / "exclude").write_text("/vllm-*.dist-info/\n", encoding="utf-8")
    return target


def run_tests(checkout: Path, commands: Sequence[str], timeout: float | None = None) -> str:
    """Run a pull request's tests on the CPU, without upstream's conftest, which wants a GPU's packages.

    Returns:
        The last line of each run.

    Raises:
        CheckFailed: one fails, or runs no test or skips one.
    """
    lines = []
    for command in commands:
        words = command.split()
        if words[:3] != ["python", "-m", "pytest"]:
            raise OverlayError("a test command", seen=command, wanted="python -m pytest PATHS")
        options = ["-q", "-p", "no:cacheprovider", "--noconftest"]
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PYTEST_"))
        }
        environment |= {"PYTHONPATH": "", "VLLM_PLUGINS": "", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *words[1:], *options],
            cwd=checkout, env=environment, text=True, capture_output=True, timeout=timeout, check=False,
        )  # fmt: skip
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        if done.returncode or "skipped" in last or "passed" not in last:
            raise CheckFailed(
                f"the tests of {' '.join(words[3:])} fail", seen=(done.stdout + done.stderr)[-3000:]
            )
        lines.append(last)
    return "; ".join(lines)


def local_configuration(text: str) -> tuple[dict[str, Any], list[HookResult]]:
    """Upstream's configuration with each hook from a repository replaced by its package.

    Returns:
        The configuration, and the hooks that have no package.
    """
    configuration = yaml.safe_load(text)
    repositories, left_out = [], []
    for repository in configuration["repos"]:
        if repository["repo"] == "local":
            repositories.append(repository)
            continue
        name = "/".join(repository["repo"].split("/")[-2:])
        package, known = PACKAGES.get(name, ("", {}))
        hooks = []
        for hook in repository["hooks"]:
            if hook["id"] not in known:
                left_out.append(HookResult(hook["id"], "not run", f"{name} is no Python package"))
                continue
            dependency = package.format(version=str(repository["rev"]).removeprefix("v"))
            hooks.append(
                {**known[hook["id"]], "name": hook["id"], "language": "python",
                 "additional_dependencies": [dependency], **hook}
            )  # fmt: skip
        if hooks:
            repositories.append({"repo": "local", "hooks": hooks})
    return {**configuration, "repos": repositories}, left_out


def run_hooks(checkout: Path, paths: Sequence[str], home: Path, skip: Sequence[str] = ()) -> list[HookResult]:
    """Upstream's hooks over the files that a pull request changes.

    Args:
        checkout: upstream's tree with the pull request applied.
        paths: the changed files.
        home: where pre-commit keeps the tools' environments.
        skip: ids of hooks to leave out.

    Raises:
        OverlayError: pre-commit itself fails.
    """
    configuration, results = local_configuration(
        (checkout / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    )
    written = checkout.parent / f"{checkout.name}-pre-commit.yaml"
    written.write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")
    present = [path for path in paths if (checkout / path).is_file()]
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
        "PRE_COMMIT_HOME": str(home.resolve()),
        "SKIP": ",".join(skip),
        "PYTHONPATH": "",
    }
    command = [
        sys.executable,
        "-m",
        "pre_commit",
        "run",
        "--config",
        str(written.resolve()),
        "--color",
        "never",
    ]
    done = subprocess.run(
        [*command, "--files", *present],
        cwd=checkout, env=environment, text=True, capture_output=True, check=False,
    )  # fmt: skip
    found = list(RESULT.finditer(done.stdout))
    if not found:
        raise OverlayError("pre-commit did not run", seen=(done.stdout + done.stderr)[-600:])
    for number, match in enumerate(found):
        end = found[number + 1].start() if number + 1 < len(found) else len(done.stdout)
        detail = done.stdout[match.end() : end].strip() if match["state"] == "Failed" else match["why"] or ""
        results.append(HookResult(match["name"], match["state"], detail))
    if changed := git_text("status", "--porcelain", cwd=checkout):
        results.append(HookResult("files as the hooks leave them", "Failed", changed))
    return results


@dataclass(frozen=True)
class Outcome:
    """One check of one exported pull request."""

    name: str
    check: str
    found: str
    failed: bool = False


def check_all(project: Project, base: Path, exported_in: Path, exported: Sequence[Exported]) -> list[Outcome]:
    """Apply each pull request on what it depends on, run its tests, then upstream's hooks on its files.

    Raises:
        CheckFailed: one does not apply, or a test of it fails.
    """
    plan = load_plan(project.root, Sources.load(project))
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="rocm-overlay-am-", dir=project.build) as folder:
        for one in exported:
            checkout = Path(folder) / one.pull.name
            apply_mailboxes(
                project.build / REPOSITORY, mailboxes(plan, exported, exported_in, one), checkout, base
            )
            outcomes.append(Outcome(one.pull.name, "git am", "applies"))
            outcomes.append(Outcome(one.pull.name, "tests", run_tests(checkout, one.pull.run)))
            for result in run_hooks(checkout, one.paths, project.cache / "pre-commit"):
                if result.state != "Skipped":
                    found = f"{result.state} {result.detail}".strip()
                    outcomes.append(Outcome(one.pull.name, result.name, found, result.state == "Failed"))
            shutil.rmtree(checkout)
    return outcomes


def mailboxes(
    plan: ExportPlan, exported: Sequence[Exported], exported_in: Path, wanted: Exported
) -> list[Path]:
    """The patches to apply for a pull request: those of what it depends on, then its own."""
    folders = {one.pull.name: one.folder for one in exported}
    names = [one.name for one in plan.closure(wanted.pull.name) if one.name in folders]
    return [patch for name in names for patch in sorted((exported_in / folders[name]).glob("*.patch"))]
