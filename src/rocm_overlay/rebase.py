# SPDX-License-Identifier: Apache-2.0
"""Rebasing onto another base: in a clone beside the checkout, and into the checkout in one step.

Everything is tried in build/rebase/repo, a clone of the project at the commit that the rebase starts
from. When the whole series applies there, the laid tree imports and the fast tests pass, the clone
makes one commit and the checkout fast-forwards to it. Until then the checkout is not written to: a
rebase that stops, fails or is killed leaves it as it was. The one moment between is recorded, and
the next call undoes or ends it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rocm_overlay import contracts
from rocm_overlay.carry import ByHand, Carried, Conflict, Work, carry
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.fetch import content_hash
from rocm_overlay.gittool import OWN, git_text, run_git
from rocm_overlay.kept import kept_problems, read_kept
from rocm_overlay.plan import Sources
from rocm_overlay.project import PIN_NAME, Project
from rocm_overlay.rebase_checks import Checks
from rocm_overlay.rebase_pulls import pull_findings
from rocm_overlay.rebase_report import TEXT_NAME, Report
from rocm_overlay.rebase_write import carried_writes, relock
from rocm_overlay.targets import Target
from rocm_overlay.textio import write_text_atomically
from rocm_overlay.transaction import Step, Transaction, exclusive, no_step, undo_interrupted

WORK_NAME, REPO_NAME, STATE_NAME, CONFLICTS_NAME = "rebase", "repo", "state.json", "conflicts"
INTO_NAME = ".into.json"
CARRYING, LANDING = "carrying", "landing"
HOW_TO_GO_ON = (
    "make rebase-continue (ACCEPT=PATH for a row that is right as it is, DROP=PATCH), or make rebase-abort"
)

START_AGAIN = "make rebase-abort, then make rebase TO=... again"

FindPinned = Callable[[Project, Sources], Path | None]


class UnreadableState(OverlayError):
    """The record of a rebase is damaged."""


@dataclass
class State:
    """What is on disk of a rebase: where it started, where it goes and a hash of that base's files, what was
    decided, how far it is."""

    start: str
    target: dict[str, Any]
    phase: str = CARRYING
    accepted: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    commit: str = ""
    content: str = ""


class Session:
    """One rebase of one checkout.

    Args:
        project: the checkout.
        checks: what a carried tree has to pass.
        find_pinned: gives the folder of the pinned base, None where it cannot be had.
        step: called with a step's name before each change on disk; a test kills the process in it.
    """

    def __init__(
        self,
        project: Project,
        checks: Checks,
        find_pinned: FindPinned = lambda project, sources: None,
        step: Step = no_step,
    ) -> None:
        self.project = project
        self.checks = checks
        self.work = project.build / WORK_NAME
        self.repo = Project(self.work / REPO_NAME)
        self._find_pinned = find_pinned
        self._step = step

    # --- the three verbs ---

    def start(self, find: Callable[[], Target]) -> Report:
        """Start a rebase and take it as far as it goes: into the checkout, or to what a person has to decide.

        Args:
            find: fetches the base to go to.

        Raises:
            CheckFailed: files or patches conflict, or a check failed; the rebase waits.
            OverlayError: a rebase is under way, the checkout has changes in no commit, or no such base.
        """
        with self._held():
            self._recover()
            if self._state_file.exists():
                raise OverlayError(
                    "a rebase is under way",
                    seen=f"{self.work}, to {self._read_state().target['name']}",
                    fix="make rebase-continue, or make rebase-abort",
                )
            start = self._clean_head()
            sources = Sources.load(self.project)
            if problems := kept_problems(self.project.patches, sources.pin.locked()):
                raise OverlayError(
                    "the kept bases are not the lock's", seen="; ".join(problems), fix="make lock"
                )
            target = find()
            if (target.vllm, target.reference) == (sources.pin.vllm, ""):
                raise OverlayError(
                    "the project is on this base already", seen=target.name, wanted="another base"
                )
            self._step("work folder")
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir(parents=True)
            self._step("clone")
            # A user's template may bring attributes with it.
            options = ["--quiet", "--no-hardlinks", "--template="]
            run_git(["clone", *options, str(self.project.root), str(self.repo.root)])
            self._step("state")
            self._write_state(State(start, target.as_json(), content=content_hash(Path(target.root))))
            return self._advance()

    def go_on(self, accept: Sequence[str] = (), drop: Sequence[str] = ()) -> Report:
        """Take a rebase that waits up again, with what was decided since.

        Args:
            accept: paths and contract names whose row is right as it stands.
            drop: patches to leave out.

        Raises:
            CheckFailed, OverlayError: as ``start`` does; or no rebase is under way.
        """
        with self._held():
            self._require()
            self._refuse_landed(self._recover())
            state = self._read_state()
            self._refuse_lost(state)
            self._refuse_unknown(state, accept, drop)
            state.accepted = sorted({*state.accepted, *accept})
            state.dropped = sorted({*state.dropped, *drop})
            self._step("decisions")
            self._write_state(state)
            return self._advance()

    def abort(self) -> None:
        """Undo a rebase: the checkout is as it was, the work folder is gone.

        Raises:
            OverlayError: no rebase is under way; or its record cannot be read and the checkout has changes,
                which may be of a landing that was cut short.
        """
        with self._held():
            if not self.work.exists():
                self._require()
            try:
                landed = self._recover()
            except UnreadableState:
                if _changes(self.project.root):
                    raise
                landed = False
            self._refuse_landed(landed)
            self._step("remove")
            if self.work.exists():
                shutil.rmtree(self.work)

    def _refuse_lost(self, state: State) -> None:
        """Refuse to go on without the clone, or over another base than the one that it was started for."""
        if not (self.repo.root / PIN_NAME).is_file():
            raise OverlayError("the rebase's clone is gone", seen=f"no {self.repo.root}", fix=START_AGAIN)
        root = Path(state.target["root"])
        if state.content and content_hash(root) != state.content:
            raise OverlayError(
                "the base that the rebase goes to is not as it was when it started",
                seen=root,
                fix=START_AGAIN,
            )

    def _refuse_unknown(self, state: State, accept: Sequence[str], drop: Sequence[str]) -> None:
        sources = Sources.load(self.repo)
        names = {patch.name for patch in sources.series.patches}
        if unknown := sorted(set(drop) - names - set(state.dropped)):
            raise OverlayError(
                "no such patch", seen=", ".join(unknown), wanted=f"of {', '.join(sorted(names))}"
            )
        rows = {file.path for file in sources.overlay.files} | set(state.accepted)
        if (folder := self.repo.root / contracts.FOLDER).is_dir():
            rows |= {str(one) for one in contracts.load(folder)}
        if unknown := sorted(set(accept) - rows):
            raise OverlayError(
                "nothing to accept of that name",
                seen=", ".join(unknown),
                wanted="the path of an overlay file, or a name of the contract list, as the report has it",
                fix="merge a patch's file in the conflicts folder, or leave the patch out with DROP=PATCH",
            )

    # --- one pass over everything ---

    def _advance(self) -> Report:
        state = self._read_state()
        target = Target.of(state.target)
        pinned = Sources.load(self.project)
        undo_interrupted(self.repo.root)
        self._drop(state)
        if self._is_carried(state):
            carried = self._read_carried()
            relock(self.repo, Path(target.root))
        else:
            carried = self._carry(state, target)
        report = Report(pinned.pin.vllm, target, carried)
        report.findings += pull_findings(self.project, pinned, Path(target.root))
        self._step("report")
        report.write(self.project.build)
        if carried.conflicts:
            raise CheckFailed(
                f"{len(carried.conflicts)} places to decide; nothing in the checkout was changed\n\n"
                + "\n".join(f"  {one.owner}  {one.path}: {one.reason}" for one in carried.conflicts)
                + "\n",
                seen=f"{self.work / CONFLICTS_NAME} has them; {self.project.build / TEXT_NAME}",
                fix=HOW_TO_GO_ON,
            )
        if not self._is_carried(state):
            self._write_carried(target, carried)
        self._check(report, state, target)
        report.status = "ready"
        report.write(self.project.build)
        self._commit(report, state)
        self._land(state)
        report.status = "landed"
        report.write(self.project.build)
        self._step("clean up")
        shutil.rmtree(self.work, ignore_errors=True)
        return report

    def _carry(self, state: State, target: Target) -> Carried:
        sources = Sources.load(self.repo)
        locked = sources.pin.locked()
        # The kept contents are the start's, whatever is edited in the clone.
        kept = {path: read_kept(self.project.patches, entry) for path, entry in locked.items()}
        work = Work(
            sources,
            kept.__getitem__,
            Path(target.root),
            self._find_pinned(self.project, sources),
            self._read_by_hand(),
            state.accepted,
        )
        carried = carry(work)
        self._step("conflicts")
        self._write_conflicts(carried.conflicts)
        return carried

    def _write_carried(self, target: Target, carried: Carried) -> None:
        """Pin, lock, patches and overlay of the clone, all or none."""
        self._step("carried record")
        record = {
            "files": [{**asdict(row), "end": row.end.value} for row in carried.files],
            "rows": [{**asdict(row), "end": row.end.value} for row in carried.rows],
            "patches": dict(carried.patches),
            "dropped": list(carried.dropped),
        }
        write_text_atomically(self.work / "carried.json", json.dumps(record))
        self._step("write")
        Transaction(self.repo.root).run(carried_writes(self.repo, target, carried))

    def _read_carried(self) -> Carried:
        from rocm_overlay.carry import PatchRow
        from rocm_overlay.carry_files import End, FileRow

        record = json.loads((self.work / "carried.json").read_text(encoding="utf-8"))
        files = tuple(FileRow(**{**row, "end": End(row["end"])}) for row in record["files"])
        rows = tuple(PatchRow(**{**row, "end": End(row["end"])}) for row in record["rows"])
        return Carried(files, rows, record["patches"], tuple(record["dropped"]), ())

    def _is_carried(self, state: State) -> bool:
        """Whether the clone's pin is the new one: it is written in one step with everything else."""
        command = ["diff", "--quiet", state.start, "--", PIN_NAME]
        return run_git(command, self.repo.root, environment=OWN, good=(0, 1))[0] == 1

    def _check(self, report: Report, state: State, target: Target) -> None:
        self._step("checks")
        for findings in self.checks.run(self.repo, target, state.accepted):
            report.findings += findings
            if stops := [one for one in findings if one.stops]:
                report.status = "checks failed"
                report.write(self.project.build)
                raise CheckFailed(
                    f"the carried tree fails: {stops[0].check}; nothing in the checkout was changed\n\n"
                    + "\n".join(f"  {one.what}: {one.found}" for one in stops)
                    + "\n",
                    seen=f"{self.repo.root}, {self.project.build / TEXT_NAME}",
                    wanted="a tree that imports, keeps its contracts and passes the fast tests",
                    fix=f"correct it there, then {HOW_TO_GO_ON}",
                )

    # --- the commit, and its way into the checkout ---

    def _commit(self, report: Report, state: State) -> None:
        self._step("commit")
        root = self.repo.root
        run_git(["add", "--all"], root, environment=OWN)
        if git_text("status", "--porcelain", cwd=root, environment=OWN):
            name, email = (
                git_text("config", f"user.{key}", cwd=self.project.root) for key in ("name", "email")
            )
            # A line that a check found may start with a # and is no comment.
            command = ["-c", f"user.name={name}", "-c", f"user.email={email}", "commit", "--quiet",
                       "--cleanup=whitespace", "--file=-"]  # fmt: skip
            run_git(command, root, environment=OWN, given=report.summary().encode("utf-8"))
        state.commit = git_text("rev-parse", "HEAD", cwd=root, environment=OWN)

    def _land(self, state: State) -> None:
        """Fast-forward the checkout; recorded before and undone by the next call where it does not end."""
        if (head := self._clean_head()) != state.start:
            raise OverlayError(
                "the checkout has moved on since the rebase started",
                seen=head,
                wanted=state.start,
                fix=f"make rebase-abort and start again, or take commit {state.commit} from {self.repo.root}",
            )
        self._step("fetch")
        # Without a ref or FETCH_HEAD: only objects come over.
        run_git(["fetch", "--quiet", "--no-write-fetch-head", str(self.repo.root), "HEAD"], self.project.root)
        _refuse_blocked(self.project.root, state.start, state.commit)
        self._step("landing")
        state.phase = LANDING
        self._write_state(state)
        command = ["merge", "--quiet", "--ff-only", "--no-verify-signatures", state.commit]
        try:
            self._step("fast-forward")
            run_git(command, self.project.root)
        except BaseException:
            # An interrupt reaches git as well: before its files, in the middle of them, or when it had ended.
            if not self._recover():
                raise

    def _recover(self) -> bool:
        """End or undo a landing that was cut short; True where the rebase had in fact landed."""
        if not self._state_file.exists():
            if self.work.exists():
                # Killed before anything was recorded: nothing but the clone is there.
                shutil.rmtree(self.work, ignore_errors=True)
            return False
        state = self._read_state()
        if state.phase != LANDING:
            return False
        root = self.project.root
        head = git_text("rev-parse", "HEAD", cwd=root)
        if head == state.commit:
            # A merge moves the branch last, so it had ended: what differs was changed since.
            shutil.rmtree(self.work, ignore_errors=True)
            return True
        if head != state.start:
            raise OverlayError(
                "the checkout has moved on since a landing was cut short",
                seen=head,
                wanted=f"{state.start}, where the rebase started",
                fix=f"see git status and git diff {state.start}, then remove {self.work}",
            )
        _undo_fast_forward(root, state.start, state.commit)
        state.phase = CARRYING
        self._write_state(state)
        return False

    def _refuse_landed(self, landed: bool) -> None:
        if landed:
            raise OverlayError(
                "the rebase has landed already",
                seen=git_text("log", "-1", "--format=%h %s", cwd=self.project.root),
                fix="git reset --hard HEAD~1 takes it back",
            )

    # --- the work folder ---

    @contextmanager
    def _held(self) -> Iterator[None]:
        self.project.build.mkdir(exist_ok=True)
        with exclusive(self.project.build, "rebasing"):
            yield

    @property
    def _state_file(self) -> Path:
        return self.work / STATE_NAME

    def _require(self) -> None:
        if not self._state_file.exists():
            raise OverlayError(
                "no rebase is under way",
                seen=f"no {self._state_file}",
                fix="make rebase TO=VERSION, IMAGE or FOLDER",
            )

    def _read_state(self) -> State:
        try:
            return State(**json.loads(self._state_file.read_text(encoding="utf-8")))
        except (ValueError, TypeError, OSError) as error:
            raise UnreadableState(
                f"{self._state_file} cannot be read", seen=error, fix="see git status, then make rebase-abort"
            ) from None

    def _write_state(self, state: State) -> None:
        write_text_atomically(self._state_file, json.dumps(asdict(state), indent=1) + "\n")

    def _clean_head(self) -> str:
        root = self.project.root
        if run_git(["rev-parse", "--verify", "HEAD"], root, good=(0, 128))[0]:
            raise OverlayError(
                f"{root} is no git checkout", wanted="a checkout with a commit", fix="clone the project"
            )
        if changes := _changes(root):
            raise OverlayError(
                "the checkout has changes that are in no commit",
                seen=changes.replace("\n", ", ")[:300],
                wanted="a clean checkout: a rebase ends in one commit",
                fix="commit or stash them",
            )
        if doing := _under_way(root):
            raise OverlayError(
                "git is in the middle of something else in the checkout",
                seen=doing,
                wanted="a checkout where nothing is under way: a rebase ends in one commit",
                fix=f"end or abort it: git {doing} --continue or --abort"
                if doing != "bisect"
                else "git bisect reset",
            )
        for key in ("name", "email"):
            if run_git(["config", f"user.{key}"], root, good=(0, 1))[0]:
                raise OverlayError(
                    "git knows nobody to commit as", seen=f"no user.{key}", fix=f"git config user.{key} VALUE"
                )
        return git_text("rev-parse", "HEAD", cwd=root)

    def _drop(self, state: State) -> None:
        """Take the patches that are to be dropped out of the clone's series."""
        listing = self.repo.patches / "series"
        kept = [
            line for line in listing.read_text(encoding="utf-8").splitlines() if line not in state.dropped
        ]
        for name in state.dropped:
            (self.repo.patches / name).unlink(missing_ok=True)
        write_text_atomically(listing, "\n".join(kept) + "\n")

    def _write_conflicts(self, conflicts: Sequence[Conflict]) -> None:
        """A file with markers each, upstream's diff and our intent beside it."""
        root = self.work / CONFLICTS_NAME
        shutil.rmtree(root, ignore_errors=True)
        into = {}
        for one in conflicts:
            place = root / one.owner / one.path
            place.parent.mkdir(parents=True, exist_ok=True)
            if one.merged:
                place.write_text(one.merged, encoding="utf-8")
                into[f"{one.owner}\n{one.path}"] = one.into
            place.with_name(f"{place.name}.upstream.diff").write_text(one.upstream, encoding="utf-8")
            place.with_name(f"{place.name}.intent.txt").write_text(
                f"{one.reason}\n\n{one.intent}\n", encoding="utf-8"
            )
        if conflicts:
            (root / INTO_NAME).write_text(json.dumps(into), encoding="utf-8")

    def _read_by_hand(self) -> Mapping[tuple[str, str], ByHand]:
        """What a person made of the files with markers, and keeps being made of them in later passes."""
        kept_file = self.work / "by_hand.json"
        kept: dict[str, dict[str, str]] = json.loads(kept_file.read_text()) if kept_file.exists() else {}
        root = self.work / CONFLICTS_NAME
        if (root / INTO_NAME).exists():
            for key, into in json.loads((root / INTO_NAME).read_text(encoding="utf-8")).items():
                owner, _, path = key.partition("\n")
                if (root / owner / path).is_file():
                    text = (root / owner / path).read_bytes().decode("utf-8")
                    kept[key] = {"text": text, "into": into}
            self._step("by hand")
            write_text_atomically(kept_file, json.dumps(kept))
        return {tuple(key.split("\n", 1)): ByHand(**one) for key, one in kept.items()}  # type: ignore[misc]


def _changes(root: Path) -> str:
    return git_text("status", "--porcelain", "--untracked-files=no", cwd=root)


# The file or folder that git keeps while a command of its own waits, and that command.
GIT_KEEPS = {
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
    "rebase-merge": "rebase",
    "rebase-apply/applying": "am",
    "rebase-apply": "rebase",
    "BISECT_LOG": "bisect",
}


def _under_way(root: Path) -> str:
    """The command of git that waits in a checkout; '' where none does."""
    folder = Path(git_text("rev-parse", "--absolute-git-dir", cwd=root))
    return next((command for name, command in GIT_KEEPS.items() if (folder / name).exists()), "")


def _refuse_blocked(root: Path, start: str, commit: str) -> None:
    """Refuse where a file that no commit has stands in the place of one that the commit adds: git would
    refuse, or take an ignored one away, and putting back what a cut merge added would remove it."""
    command = ["diff", "--name-only", "--no-renames", "--diff-filter=A", start, commit]
    blocked = []
    for path in git_text(*command, cwd=root).splitlines():
        above = [one for one in (root / path).parents if one.is_relative_to(root)]
        if (root / path).exists() or (root / path).is_symlink():
            blocked.append(path)
        blocked += [str(one) for one in above if one.exists() and not one.is_dir()]
    if blocked:
        raise OverlayError(
            "files that are in no commit stand where the rebase adds some",
            seen=", ".join(sorted(set(blocked))),
            fix="move them away, then make rebase-continue",
        )


def _undo_fast_forward(root: Path, start: str, commit: str) -> None:
    """Put back what a merge that was cut short had written; the checkout was clean when it began."""
    lock = Path(git_text("rev-parse", "--absolute-git-dir", cwd=root)) / "index.lock"
    lock.unlink(missing_ok=True)
    listed = git_text("diff", "--name-status", "--no-renames", start, commit, cwd=root)
    changed = [line.split("\t", 1) for line in listed.splitlines()]
    added = [path for status, path in changed if status == "A"]
    run_git(["reset", "--quiet", "--mixed", start], root)
    if others := [path for status, path in changed if status != "A"]:
        run_git(["checkout", "--quiet", start, "--", *others], root)
    for path in added:
        (root / path).unlink(missing_ok=True)
