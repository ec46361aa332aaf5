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
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.export import PLACEHOLDER, REPOSITORY, Exported
from rocm_overlay.export_plan import ExportPlan, load_plan
from rocm_overlay.gittool import OWN, git_text, run_git
from rocm_overlay.kernel_builds import linker_environment
from rocm_overlay.plan import Sources
from rocm_overlay.processes import run_bound
from rocm_overlay.project import Project
from rocm_overlay.staging import staging_folder
from rocm_overlay.tree import write_metadata

# Of a hook in somebody's repository: the package that has its tool, from the index of its language, by the
# repository's name and the tag without its v, and the hook as that repository declares it.
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
    "DavidAnson/markdownlint-cli2": (
        "markdownlint-cli2@{version}",
        {"markdownlint-cli2": {"entry": "markdownlint-cli2", "types": ["markdown"], "language": "node"}},
    ),
}
# What the others read, where upstream's configuration does not say it.
READS: Mapping[str, str] = {"actionlint": r"^\.github/workflows/", "shellcheck": r"\.(sh|bash)$"}
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
    clone = ["clone", "--quiet", "--shared", "--branch", "base", str(repository), str(target)]
    run_git(clone, environment=OWN)
    name, _, email = PLACEHOLDER.rpartition("<")
    run_git(["config", "user.name", name.strip()], target, environment=OWN)
    run_git(["config", "user.email", email.rstrip(">")], target, environment=OWN)
    for patch in patches:
        # The title's own brackets stay: only [PATCH] is the mailbox's.
        command = ["am", "--keep-non-patch", str(patch)]
        status, printed = run_git(command, target, environment=OWN, good=range(256))
        if status:
            raise CheckFailed(
                f"{patch.parent.name} does not apply to the pinned source",
                seen=printed.decode("utf-8", "replace").strip()[-400:],
                wanted="a clean git am",
            )
    own = base / "vllm" / "_version.py"
    match = None
    if own.is_file():
        shutil.copyfile(own, target / "vllm" / "_version.py")
        match = re.search(r"__version__ = version = '([^']+)'", own.read_text(encoding="utf-8"))
    write_metadata(base, target, match[1] if match else "0")
    # What an install adds is nobody's change.
    (target / ".git" / "info" / "exclude").write_text("/vllm-*.dist-info/\n", encoding="utf-8")
    return target


def run_tests(checkout: Path, commands: Sequence[str], timeout: float | None = None) -> str:
    """Run a pull request's tests on the CPU, without upstream's conftest, which wants a GPU's packages.

    As in upstream's ROCm image, the package is not beside the tests: it lies elsewhere on the path.

    Returns:
        The last line of each run.

    Raises:
        CheckFailed: one fails, or runs no test or skips one.
    """
    for command in commands:
        if command.split()[:3] != ["python", "-m", "pytest"]:
            raise OverlayError("a test command", seen=command, wanted="python -m pytest PATHS")
    with _package_elsewhere(checkout) as site:
        return "; ".join(_run_command(checkout, site, command.split(), timeout) for command in commands)


@contextmanager
def _package_elsewhere(checkout: Path) -> Iterator[Path]:
    """The folder that the package is moved to for the time being."""
    site = checkout / "src"
    if not (checkout / "vllm").is_dir():
        yield site
        return
    site.mkdir()
    (checkout / "vllm").rename(site / "vllm")
    try:
        yield site
    finally:
        (site / "vllm").rename(checkout / "vllm")
        shutil.rmtree(site)


def _run_command(checkout: Path, site: Path, words: Sequence[str], timeout: float | None) -> str:
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "--show-capture=no"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(site), "VLLM_PLUGINS": "", "PYTHONDONTWRITEBYTECODE": "1"}
    # What a kernel cache keeps must not be found by the next run; and kernels are linked by ROCm's lld.
    beside = checkout.parent / f"{checkout.name}-cache"
    environment |= {"VLLM_CACHE_ROOT": str(beside), **linker_environment(beside)}
    done = run_bound(
        [sys.executable, *words[1:], *options],
        cwd=checkout, env=environment, text=True, capture_output=True, timeout=timeout, check=False,
    )  # fmt: skip
    # What runs at the process's end may print below pytest's own last line.
    lines = [
        line
        for line in done.stdout.splitlines()
        if re.search(r"\b\d+ (passed|failed|skipped|errors?)\b", line)
    ]
    last = (lines or ["no output"])[-1]
    if done.returncode or "skipped" in last or "passed" not in last:
        raise CheckFailed(
            f"the tests of {' '.join(words[3:])} fail", seen=(done.stdout + done.stderr)[-3000:]
        )
    return last


def local_configuration(text: str, paths: Sequence[str]) -> tuple[dict[str, Any], list[HookResult]]:
    """Upstream's configuration with each hook from a repository replaced by its package.

    Args:
        text: the configuration.
        paths: the files that the hooks are for.

    Returns:
        The configuration, and the hooks that have no package: not run, or skipped where they read none of
        the files.
    """
    configuration = yaml.safe_load(text)
    repositories, left_out = [], []
    has_npm = shutil.which("npm") is not None
    for repository in configuration["repos"]:
        if repository["repo"] == "local":
            repositories.append(repository)
            continue
        name = "/".join(repository["repo"].split("/")[-2:])
        package, known = PACKAGES.get(name, ("", {}))
        hooks = []
        for hook in repository["hooks"]:
            own = known.get(hook["id"])
            needs_npm = own is not None and own.get("language") == "node" and not has_npm
            if own is None or needs_npm:
                why = "npm is not installed" if needs_npm else f"no package of {name} is known here"
                reads = hook.get("files", READS.get(hook["id"], ""))
                left_out.append((HookResult(hook.get("name", hook["id"]), "not run", why), reads))
                continue
            dependency = package.format(version=str(repository["rev"]).removeprefix("v"))
            made = {"language": "python", **own, "name": hook["id"], "additional_dependencies": [dependency]}
            # Node itself is the machine's.
            hooks.append({**made, **hook, **({"language_version": "system"} if "language" in own else {})})
        if hooks:
            repositories.append({"repo": "local", "hooks": hooks})
    results = [
        one if any(re.search(reads, path) for path in paths) else HookResult(one.name, "Skipped", "no files")
        for one, reads in left_out
    ]
    return {**configuration, "repos": repositories}, results


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
        (checkout / ".pre-commit-config.yaml").read_text(encoding="utf-8"), paths
    )
    written = checkout.parent / f"{checkout.name}-pre-commit.yaml"
    written.write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")
    present = [path for path in paths if (checkout / path).is_file()]
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
        **OWN,
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
    done = run_bound(
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
    if changed := git_text(
        "status", "--porcelain", "--untracked-files=normal", cwd=checkout, environment=OWN
    ):
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

    Each is checked whatever came of the others; a line to the standard error says which one is.
    """
    plan = load_plan(project.root, Sources.load(project))
    outcomes: list[Outcome] = []
    with staging_folder(project.build, "am") as folder:
        for one in exported:
            print(f"checking {one.folder}", file=sys.stderr, flush=True)
            checkout = folder / one.pull.name
            patches = mailboxes(plan, exported, exported_in, one)
            outcomes += _check_one(project, base, patches, one, checkout)
            shutil.rmtree(checkout)
    return outcomes


def _check_one(
    project: Project, base: Path, patches: Sequence[Path], one: Exported, checkout: Path
) -> Iterator[Outcome]:
    name = one.pull.name
    try:
        apply_mailboxes(project.build / REPOSITORY, patches, checkout, base)
    except CheckFailed as error:
        yield Outcome(name, "git am", str(error.seen), True)
        return
    yield Outcome(name, "git am", "applies")
    try:
        yield Outcome(name, "tests", run_tests(checkout, one.pull.run))
    except CheckFailed as error:
        yield Outcome(name, "tests", f"{error.what}: {error.seen}", True)
    for result in run_hooks(checkout, one.paths, project.cache / "pre-commit"):
        if result.state != "Skipped":
            found = f"{result.state} {result.detail}".strip()
            yield Outcome(name, result.name, found, result.state == "Failed")


def mailboxes(
    plan: ExportPlan, exported: Sequence[Exported], exported_in: Path, wanted: Exported
) -> list[Path]:
    """The patches to apply for a pull request: those of what it depends on, then its own."""
    folders = {one.pull.name: one.folder for one in exported}
    names = [one.name for one in plan.closure(wanted.pull.name) if one.name in folders]
    return [patch for name in names for patch in sorted((exported_in / folders[name]).glob("*.patch"))]
