# SPDX-License-Identifier: Apache-2.0
"""What laying does to a vllm package, worked out in full before anything is written.

The plan is the one place that meets overlay, series, lock and base: laying a copy, laying an
installed package, the lock and the drift table all come from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay import __version__, table
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.overlay import Overlay, load_overlay
from rocm_overlay.patching import Outcome, apply_diff
from rocm_overlay.pin import LockedFile, Pin
from rocm_overlay.project import Project
from rocm_overlay.series import Patch, Series, load_series
from rocm_overlay.textio import decode

ADDED, REPLACED, REMOVED, PATCHED = "added", "replaced", "removed", "patched"
LOCK_ACTION = {REPLACED: "replace", REMOVED: "remove", PATCHED: "patch"}
REBASE_COMMAND = (
    "make rebase TO=VERSION, IMAGE or FOLDER carries them over; --allow-drift PATH accepts a file as it is"
)


@dataclass(frozen=True)
class Sources:
    """Everything of ours that is laid: pin, overlay and series."""

    pin: Pin
    overlay: Overlay
    series: Series

    @classmethod
    def load(cls, project: Project) -> Sources:
        """Read and check base.toml, overlay/ and patches/."""
        return cls(Pin.load(project.pin_file), load_overlay(project.overlay), load_series(project.patches))

    @property
    def touched(self) -> dict[str, str]:
        """What we do to each path: added, replaced, removed or patched."""
        kinds = {"new": ADDED, "replaces": REPLACED}
        touched = {file.path: kinds[file.kind] for file in self.overlay.files}
        touched |= {removal.path: REMOVED for removal in self.overlay.removals}
        for patch in self.series.patches:
            for diff in patch.diffs:
                if touched.setdefault(diff.path, PATCHED) != PATCHED:
                    raise OverlayError(
                        f"patches/{patch.name} patches a file that the overlay owns",
                        seen=diff.path,
                        fix="change the overlay's file instead",
                    )
        return touched

    def stamp(self) -> dict[str, str]:
        """What identifies the distribution: one value a key, for labels and the start-up line."""
        return {
            "version": __version__,
            "vllm_version": self.pin.vllm.version,
            "overlay_hash": self.overlay.sha256,
            "series_hash": self.series.sha256,
        }


@dataclass(frozen=True)
class Drift:
    """A touched file that is not what the lock says: changed, missing, or there although new."""

    path: str
    action: str
    state: str
    wanted: str
    found: str


@dataclass(frozen=True)
class Change:
    """One file's change; ``content`` is None for a removal, ``patches`` name what was applied."""

    path: str
    action: str
    content: bytes | None
    patches: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """The hash of the file as laid; '' for a removed one."""
        return "" if self.content is None else hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class Plan:
    """Every change, in path order, the drift that was let through, and notes for the user."""

    changes: tuple[Change, ...]
    allowed: tuple[Drift, ...]
    notes: tuple[str, ...]

    def table(self) -> str:
        """A table of each file added, replaced, removed, patched."""
        rows = [(change.action, change.path, ", ".join(change.patches)) for change in self.changes]
        return table.render(("what", "file", "patches"), rows)


def read_base(root: Path, path: str) -> bytes | None:
    """A base file's content, None when it is not there. ``root`` is the folder that holds vllm/."""
    try:
        return (root / path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise OverlayError(
            f"{path} of the base cannot be read", seen=error, wanted="a readable file"
        ) from None


def find_drift(sources: Sources, root: Path) -> list[Drift]:
    """Every touched file of the base at ``root`` that differs from the lock.

    Raises:
        OverlayError: the lock does not hold exactly the files we touch.
    """
    locked = sources.pin.locked()
    touched = sources.touched
    check_lock_is_complete(sources)
    found = []
    for path, action in sorted(touched.items()):
        content = read_base(root, path)
        have = "absent" if content is None else hashlib.sha256(content).hexdigest()
        want = locked[path].sha256 if path in locked else "absent"
        if have != want:
            state = (
                "changed" if "absent" not in (have, want) else "missing" if have == "absent" else "new there"
            )
            found.append(Drift(path, action, state, want, have))
    return found


def check_lock_is_complete(sources: Sources) -> None:
    """Raise OverlayError unless [files] of base.toml lists just what we touch, with what we do to it."""
    wanted = {path: LOCK_ACTION[action] for path, action in sources.touched.items() if action != ADDED}
    have = {entry.path: entry.action for entry in sources.pin.files}
    if wanted != have:
        odd = sorted(set(wanted.items()) ^ set(have.items()))
        raise OverlayError(
            "[files] of base.toml does not match overlay/ and patches/",
            seen="; ".join(f"{path}: {action}" for path, action in odd),
            fix="make lock",
        )


def drift_table(drift: list[Drift]) -> str:
    """The drifted files, what we do to each, and the two hashes (first 12 digits)."""
    rows = [(one.path, one.state, one.action, one.wanted[:12], one.found[:12]) for one in drift]
    return table.render(("file", "state", "what we do to it", "locked", "found"), rows)


def make_plan(sources: Sources, root: Path, allow_drift: Collection[str] = ()) -> Plan:
    """Work out every change to the base whose vllm/ folder is in ``root``.

    Args:
        sources: pin, overlay and series.
        root: the folder that holds the base's vllm/.
        allow_drift: paths whose drift is accepted.

    Raises:
        CheckFailed: files drifted that ``allow_drift`` does not name; the table is in the message.
        OverlayError: a patch does not apply, or its probe finds no effect after it did.
    """
    drift = find_drift(sources, root)
    refused = [one for one in drift if one.path not in allow_drift]
    if refused:
        raise CheckFailed(
            f"{len(refused)} of the files we touch differ from the pinned base\n\n{drift_table(refused)}\n",
            wanted=f"vLLM {sources.pin.vllm.version} as locked in base.toml",
            fix=REBASE_COMMAND,
        )
    if unused := sorted(set(allow_drift) - {one.path for one in drift}):
        raise OverlayError(
            "--allow-drift names files that did not drift", seen=", ".join(unused), fix="drop them"
        )
    changes = {file.path: _overlay_change(file.path, file.content, root) for file in sources.overlay.files}
    for removal in sources.overlay.removals:
        changes[removal.path] = Change(removal.path, REMOVED, None)
    notes = _apply_series(sources.series, root, changes)
    return Plan(tuple(changes[path] for path in sorted(changes)), tuple(drift), tuple(notes))


def _overlay_change(path: str, content: bytes, root: Path) -> Change:
    return Change(path, ADDED if read_base(root, path) is None else REPLACED, content)


def _apply_series(series: Series, root: Path, changes: dict[str, Change]) -> list[str]:
    notes = []
    for patch in series.patches:
        _check_not_due(patch, root)
        for diff in patch.diffs:
            before = changes.get(diff.path)
            content = before.content if before else read_base(root, diff.path)
            if content is None:
                raise OverlayError(
                    f"patches/{patch.name}: {diff.path} is missing from the base", fix=REBASE_COMMAND
                )
            result = apply_diff(decode(content, diff.path), diff)
            if result.outcome is not Outcome.CLEAN:
                raise OverlayError(
                    f"patches/{patch.name} {result.outcome.value}: {diff.path}",
                    seen=result.detail,
                    wanted="an exact match of every hunk",
                    fix="drop the patch" if result.outcome is Outcome.ALREADY else REBASE_COMMAND,
                )
            if result.offset:
                notes.append(f"patches/{patch.name}: {diff.path} applied {result.offset} lines off its place")
            names = (*(before.patches if before else ()), patch.name)
            changes[diff.path] = Change(diff.path, PATCHED, result.text.encode("utf-8"), names)
        probed = changes[patch.probe.path].content
        if not patch.probe.holds(None if probed is None else decode(probed, patch.probe.path)):
            raise OverlayError(
                f"patches/{patch.name} applied but has no effect",
                seen=f"the probe finds nothing: {patch.probe}",
                fix="the code moved: rewrite the patch where it moved to",
            )
    return notes


def _check_not_due(patch: Patch, root: Path) -> None:
    """Raise OverlayError when the base meets the patch's own condition to be dropped."""
    due = patch.drop_when
    if due is None:
        return
    content = read_base(root, due.path)
    if due.holds(None if content is None else decode(content, due.path)):
        raise OverlayError(
            f"patches/{patch.name} is already upstream",
            seen=f"Drop-when holds: base {due}",
            fix="drop the patch",
        )


def make_lock(sources: Sources, root: Path) -> list[LockedFile]:
    """The [files] entries for the base at ``root``: every file that we replace, remove or patch.

    Raises:
        OverlayError: a file that we replace, remove or patch is not in the base, or one we add is.
    """
    entries = []
    for path, action in sorted(sources.touched.items()):
        content = read_base(root, path)
        if (content is None) != (action == ADDED):
            raise OverlayError(
                f"{path} cannot be {action}",
                seen="it is not in the base" if content is None else "it is in the base",
                fix="correct its path in overlay/manifest.toml, or drop the [[remove]] entry"
                if action == REMOVED
                else "correct its kind in overlay/manifest.toml",
            )
        if content is not None:
            entries.append(LockedFile(path, LOCK_ACTION[action], hashlib.sha256(content).hexdigest()))
    return entries
