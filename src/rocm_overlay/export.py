# SPDX-License-Identifier: Apache-2.0
"""The work as upstream pull requests: a branch, a mailbox patch and a body each, on the pinned source.

Two runs of the same commit give the same bytes: times, names and the order of everything are fixed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.export_body import make_body
from rocm_overlay.export_files import Files, trees
from rocm_overlay.export_plan import ExportPlan, PullRequest, load_plan
from rocm_overlay.export_tests import refuse_unclaimed_tests
from rocm_overlay.fetch import sha256_of
from rocm_overlay.gittool import OWN, git_text, run_git
from rocm_overlay.plan import Sources
from rocm_overlay.project import Project
from rocm_overlay.staging import staging_folder
from rocm_overlay.transaction import Step, exclusive, no_step
from rocm_overlay.upstream_style import obtain_ruff

PLACEHOLDER = "YOUR NAME <YOUR EMAIL>"
AUTHOR = re.compile(r"[^<>\s][^<>\n\0]* <[^<>\n\0]+>")
LISTING = "series.json"
REPOSITORY = "export.git"
INDEX = "index"
OTHER_FOLDER = (
    "move what you want to keep elsewhere and remove the folder, or: rocm-overlay export-prs --out FOLDER"
)
# What packaging adds to the source archive and upstream's repository does not have.
NOT_UPSTREAM = (
    ".base.json",
    "PKG-INFO",
    "vllm.egg-info",
    "setup.cfg",
    "vllm/_version.py",
    "**/__pycache__/**",
)


@dataclass(frozen=True)
class Exported:
    """One exported pull request: its number in the order, its commit, and the paths that it changes."""

    number: int
    pull: PullRequest
    commit: str
    paths: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.number:02}-{self.pull.name}"


def export(
    project: Project, base: Path, target: Path, author: str = PLACEHOLDER, step: Step = no_step
) -> list[Exported]:
    """Write every pull request that has content below ``target``, which is replaced when that worked.

    Args:
        project: whose overlay, series, tests and documents are exported.
        base: the unpacked pinned source.
        target: a folder to make: NN-NAME/{0001-*.patch, BODY.md}, and the listing. The branches are in
            build/export.git.
        author: who signs off, as NAME <EMAIL>; a placeholder where it is left out.
        step: called with a step's name before each change on disk; a test kills the process in it.

    Raises:
        OverlayError: the manifest does not fit the overlay, something does not apply, the target holds what
            no export wrote, or another process exports: then nothing is changed.
    """
    if not AUTHOR.fullmatch(author):
        raise OverlayError("the author", seen=author, wanted="NAME <EMAIL>")
    target = target.absolute()
    _check_ours(target)
    with held(project):
        sources = Sources.load(project)
        plan = load_plan(project.root, sources)
        refuse_unclaimed_tests(plan, project.root)
        ruff = obtain_ruff(base, project.cache / "tools")
        files = trees(plan, sources, project.root, base, ruff)
        target.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(target.parent, "export") as staging:
            fresh = staging / "export"
            fresh.mkdir()
            step("repository")
            repository = _Repository(project.build / REPOSITORY, author, _moment(project))
            step("base")
            root = repository.import_base(base, sources.pin.vllm.version)
            step("commits")
            exported = _write(project, plan, files, repository, root, fresh)
            (fresh / LISTING).write_text(
                _listing(exported, plan, root, source_of(project), fresh), encoding="utf-8"
            )
            step("branches")
            repository.publish({"base": root, **{f"pr/{one.pull.name}": one.commit for one in exported}})
            _check_ours(target)
            _replace(target, fresh, staging / "before", step)
        return exported


def _replace(target: Path, fresh: Path, before: Path, step: Step) -> None:
    """Move ``fresh`` in and the target aside; where that does not end, the target is back."""
    try:
        step("move aside")
        if target.exists():
            target.rename(before)
        step("move in")
        fresh.rename(target)
    except BaseException:
        if before.exists() and not target.exists():
            before.rename(target)
        raise


# What this process holds: an export that is checked is held once for both.
_held: set[Path] = set()


@contextmanager
def held(project: Project) -> Iterator[None]:
    """Hold the repository of branches for this process, however it ends.

    Raises:
        OverlayError: another process exports, or checks what it exported.
    """
    repository = (project.build / REPOSITORY).absolute()
    if repository in _held:
        yield
        return
    repository.mkdir(parents=True, exist_ok=True)
    with exclusive(repository, "exporting"):
        _held.add(repository)
        try:
            yield
        finally:
            _held.remove(repository)


def _check_ours(target: Path) -> None:
    """Raise unless nothing is lost with the target: not there, empty, or an export as it was written."""
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise OverlayError(
            f"{target} is no export",
            seen="a link" if target.is_symlink() else "a file",
            wanted="a new folder, or an export",
            fix=OTHER_FOLDER,
        )
    if foreign := _foreign(target):
        raise OverlayError(
            f"{target} is no export, or one that was added to or changed",
            seen=", ".join(foreign[:6]) + (f" and {len(foreign) - 6} more" if len(foreign) > 6 else ""),
            wanted="a new folder, or an export as it was written",
            fix=OTHER_FOLDER,
        )


def _foreign(target: Path) -> list[str]:
    """What is in a folder that its own listing does not say an export wrote, or that was changed since."""
    try:
        rows = json.loads((target / LISTING).read_text(encoding="utf-8"))["pull_requests"]
        written = {f"{row['folder']}/{name}": digest for row in rows for name, digest in row["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return sorted(path.name for path in target.iterdir())
    found = []
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target).as_posix()
        if name == LISTING or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not path.is_file() or sha256_of(path) != written.get(name):
            found.append(name)
    return found


def source_of(project: Project) -> dict[str, object]:
    """What is exported: the project's commit ('' without one), and whether it has changes in no commit."""
    status, printed = run_git(["rev-parse", "--verify", "--quiet", "HEAD"], project.root, good=(0, 1, 128))
    if status:
        return {"commit": "", "changed": True}
    changes = git_text("status", "--porcelain", "--untracked-files=normal", cwd=project.root)
    return {"commit": printed.decode().strip(), "changed": bool(changes)}


def _moment(project: Project) -> str:
    """The time that every commit carries: SOURCE_DATE_EPOCH, else the project's own last commit's."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        if not re.fullmatch(r"[0-9]{1,10}", given):
            raise OverlayError(
                "SOURCE_DATE_EPOCH is no time",
                seen=given,
                wanted="whole seconds since 1970, as `git log -1 --format=%ct` prints them",
                fix="correct it, or unset it for the time of the project's last commit",
            )
        return f"{given} +0000"
    status, printed = run_git(["log", "-1", "--format=%ct"], project.root, good=(0, 128))
    return f"{printed.decode().strip() if status == 0 else 0} +0000"


def _write(
    project: Project,
    plan: ExportPlan,
    files: dict[str, Files],
    repository: _Repository,
    root: str,
    fresh: Path,
) -> list[Exported]:
    exported: list[Exported] = []
    commits: dict[tuple[str, ...], str] = {(): root}
    for pull in plan.pulls:
        if pull.name not in files:
            continue
        chain: tuple[str, ...] = ()
        for below in plan.closure(pull.name):
            if below.name not in files:
                continue
            parent, chain = chain, (*chain, below.name)
            if chain not in commits:
                commits[chain] = repository.commit(commits[parent], files[below.name], _message(below))
        one = Exported(len(exported) + 1, pull, commits[chain], tuple(files[pull.name]))
        folder = fresh / one.folder
        folder.mkdir()
        repository.mailbox(one.commit, folder)
        body = make_body(project, plan, pull, one.paths)
        (folder / "BODY.md").write_text(body, encoding="utf-8")
        exported.append(one)
    return exported


def _message(pull: PullRequest) -> str:
    return f"{pull.title}\n\n" + "\n\n".join(pull.texts["purpose"]) + "\n"


def _listing(
    exported: list[Exported], plan: ExportPlan, root: str, made_from: dict[str, object], fresh: Path
) -> str:
    rows = [
        {
            "folder": one.folder,
            "name": one.pull.name,
            "title": one.pull.title,
            "branch": f"pr/{one.pull.name}",
            "commit": one.commit,
            "depends": list(one.pull.depends),
            "paths": list(one.paths),
            "tests": list(one.pull.run),
            "files": {file.name: sha256_of(file) for file in sorted((fresh / one.folder).iterdir())},
        }
        for one in exported
    ]
    waiting = {one.name: one.held_back for one in plan.pulls if one.held_back}
    listing = {"format": 2, "base": root, "project": made_from, "pull_requests": rows, "held_back": waiting}
    return json.dumps(listing, indent=1) + "\n"


class _Repository:
    """A bare repository that commits are made in without a work tree."""

    def __init__(self, path: Path, author: str, moment: str) -> None:
        self.path = path
        name, _, email = author.rpartition("<")
        self._sign_off = f"Signed-off-by: {author}"
        self._environment = {
            **OWN,
            "GIT_AUTHOR_NAME": name.strip(), "GIT_AUTHOR_EMAIL": email.rstrip(">"), "GIT_AUTHOR_DATE": moment,
            "GIT_COMMITTER_NAME": name.strip(), "GIT_COMMITTER_EMAIL": email.rstrip(">"),
            "GIT_COMMITTER_DATE": moment,
        }  # fmt: skip
        # A killed run leaves git's own locks behind, and an index that may be cut short.
        for left in (*path.rglob("*.lock"), *path.glob(f"{INDEX}.*")):
            left.unlink(missing_ok=True)
        # Where it is there already, this is harmless and mends what a killed one left out.
        run_git(["init", "--quiet", "--bare", "--initial-branch=base", str(path)], environment=OWN)

    def import_base(self, base: Path, version: str) -> str:
        """The pinned source as a commit."""
        git_dir = [f"--git-dir={self.path}", f"--work-tree={base.resolve()}"]
        # Forced: upstream tracks files that its own ignore list names.
        left_out = [f":(exclude,glob){name}" for name in NOT_UPSTREAM]
        # Hashing eight thousand files takes seconds: the index is kept between exports. A copy is worked on,
        # which another git that still runs for a killed export does not meet.
        kept, mine = self.path / INDEX, self.path / f"{INDEX}.base-{os.getpid()}"
        if kept.is_file():
            shutil.copy2(kept, mine)
        environment = {**OWN, "GIT_INDEX_FILE": str(mine)}
        add = [*git_dir, "add", "--all", "--force", "--", ".", *left_out]
        try:
            run_git(add, base, environment=environment)
        except OverlayError:
            if not kept.is_file():
                raise
            # It is only there to be quicker.
            for damaged in (kept, mine, mine.with_name(f"{mine.name}.lock")):
                damaged.unlink(missing_ok=True)
            run_git(add, base, environment=environment)
        tree = run_git([*git_dir, "write-tree"], base, environment=environment)[1].decode().strip()
        mine.replace(kept)
        return self._commit_tree(tree, [], f"vLLM {version}, the pinned source\n")

    def commit(self, parent: str, files: Files, message: str) -> str:
        """A commit of changed, added and removed files on top of another."""
        index = self.path / f"{INDEX}.commit-{os.getpid()}"
        index.unlink(missing_ok=True)
        environment = {**OWN, "GIT_INDEX_FILE": str(index)}
        run_git(["read-tree", parent], self.path, environment=environment)
        lines = []
        for path, text in files.items():
            if text is None:
                lines.append(f"0 {'0' * 40}\t{path}")
                continue
            hash_it, given = ["hash-object", "-w", "--stdin"], text.encode("utf-8")
            hashed = run_git(hash_it, self.path, environment=OWN, given=given)[1]
            lines.append(f"{self._mode(parent, path)} {hashed.decode().strip()}\t{path}")
        given = ("\n".join(lines) + "\n").encode("utf-8")
        run_git(["update-index", "--index-info"], self.path, environment=environment, given=given)
        tree = run_git(["write-tree"], self.path, environment=environment)[1].decode().strip()
        index.unlink()
        return self._commit_tree(tree, ["-p", parent], f"{message}\n{self._sign_off}\n")

    def _mode(self, parent: str, path: str) -> str:
        listed = git_text("ls-tree", parent, "--", path, cwd=self.path, environment=OWN)
        return listed.split()[0] if listed else "100644"

    def _commit_tree(self, tree: str, parents: list[str], message: str) -> str:
        command = ["commit-tree", tree, *parents]
        made = run_git(command, self.path, environment=self._environment, given=message.encode("utf-8"))
        return made[1].decode().strip()

    def publish(self, branches: Mapping[str, str]) -> None:
        """Make these the repository's branches, and no others; all at once."""
        asked = ("for-each-ref", "--format=%(refname)", "refs/heads")
        there = git_text(*asked, cwd=self.path, environment=OWN).split()
        wanted = {f"refs/heads/{name}": commit for name, commit in branches.items()}
        lines = [f"delete {ref}" for ref in there if ref not in wanted]
        lines += [f"update {ref} {commit}" for ref, commit in wanted.items()]
        given = ("\n".join(lines) + "\n").encode()
        run_git(["update-ref", "--stdin"], self.path, environment=OWN, given=given)

    def mailbox(self, commit: str, folder: Path) -> None:
        """The commit as ``git am`` takes it."""
        options = ["--no-signature", "--zero-commit", "--no-stat", "--no-renames", "--full-index", "--binary"]
        command = ["format-patch", "--quiet", "-1", *options, "-o", str(folder), commit]
        run_git(command, self.path, environment=OWN)
