# SPDX-License-Identifier: Apache-2.0
"""The tiny distribution as a git checkout, and other bases for it: what the tests of a rebase start from."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from rocm_overlay.carry import Carried, Work, carry
from rocm_overlay.kept import keep, read_kept
from rocm_overlay.pin import VllmPin, write_lock
from rocm_overlay.plan import Sources, make_lock
from rocm_overlay.project import Project
from rocm_overlay.rebase import Session
from rocm_overlay.rebase_checks import Checks
from rocm_overlay.rebase_write import with_series_table
from rocm_overlay.series import load_series
from rocm_overlay.targets import Target
from rocm_overlay.transaction import Step, no_step
from tests.tiny import DIFF, HEADER, make_base, make_project, write_files

NEXT = VllmPin("1.3.0", "def", "vllm-1.3.0.tar.gz", "1" * 64)
# Run as a script: what the fast tests are to a real checkout.
PASSING_TEST = "assert True\n"


def git(root: Path, *arguments: str) -> str:
    """Run git in a checkout and return what it prints."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip()


def make_checkout(
    root: Path,
    patch: str = HEADER + DIFF,
    base: Path | None = None,
    edit: Callable[[Path], None] | None = None,
) -> Project:
    """The tiny project as a checkout of one commit, its kept bases and one fast test included.

    Args:
        root: the folder to make it in.
        patch: its one patch.
        base: a pinned base other than the tiny one.
        edit: called with the folder before the commit.
    """
    project = make_project(root, patch)
    base = base or make_base(root.parent / f"{root.name}-pinned")
    readme = with_series_table(
        "# Patches\n\n<!-- series -->\nx\n<!-- /series -->\n", load_series(project.patches).markdown()
    )
    write_files(
        root,
        {
            ".gitignore": "/build/\n__pycache__/\n",
            "patches/README.md": readme,
            "tests/test_fast.py": PASSING_TEST,
        },
    )
    if edit:
        edit(root)
    write_lock(project.pin_file, make_lock(Sources.load(project), base))
    sources = Sources.load(project)
    keep(project.patches, sources.pin.locked(), base)
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "config", "user.name", "Tiny")
    git(root, "config", "user.email", "tiny@example.com")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=Start")
    return project


def make_target(root: Path, changes: Mapping[str, str | None] | None = None) -> Target:
    """A base of version 1.3.0 below ``root``: the tiny one, with some files changed or left out."""
    version = {"vllm/_version.py": "__version__ = version = '1.3.0'\n"}
    make_base(root, {**version, **(changes or {})})
    return Target("version", "1.3.0", NEXT, str(root))


def carry_to(project: Project, target: Target, **options: object) -> Carried:
    """What carrying the project to a base gives, with nothing written."""
    sources = Sources.load(project)
    locked = sources.pin.locked()
    kept = {path: read_kept(project.patches, entry) for path, entry in locked.items()}
    return carry(Work(sources, kept.__getitem__, Path(target.root), **options))  # type: ignore[arg-type]


def make_session(project: Project, step: Step = no_step) -> Session:
    """A session whose fast tests are the tiny checkout's own."""
    return Session(project, Checks(tests=("tests/test_fast.py",)), step=step)


def state_of(project: Project) -> dict[str, object]:
    """All of a checkout that a rebase could change: branch, commit, index, refs, status, every file."""
    root = project.root
    files = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not {".git", "build", "__pycache__"} & set(path.relative_to(root).parts)
    }
    return {
        "head": git(root, "rev-parse", "HEAD"),
        "branch": git(root, "branch", "--show-current"),
        "refs": git(root, "for-each-ref"),
        "index": git(root, "ls-files", "--stage"),
        "status": git(root, "status", "--porcelain"),
        "worktrees": git(root, "worktree", "list"),
        "files": files,
    }
