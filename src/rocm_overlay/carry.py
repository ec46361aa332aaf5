# SPDX-License-Identifier: Apache-2.0
"""Carrying overlay and series over to another base: worked out in full, and nothing is written.

A patch is the difference of two texts: the pinned file before it and after it. ``git merge-file``
merges that difference into the new base's file, so that what upstream changed elsewhere in the file
stays and what upstream changed at the same place is a conflict. The new difference is the new patch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rocm_overlay.carry_files import (
    GONE,
    INSIDE,
    MOVED,
    OUTSIDE,
    UNCHANGED,
    End,
    FileRow,
    find_moves,
    overlay_rows,
)
from rocm_overlay.errors import OverlayError
from rocm_overlay.gittool import CONTEXT_LINES, diff_texts, has_markers, merge_texts
from rocm_overlay.patching import HUNK, Outcome, apply_diff
from rocm_overlay.plan import PATCHED, Sources, read_base
from rocm_overlay.series import Patch, Symbol
from rocm_overlay.textio import decode

ReadKept = Callable[[str], bytes]


@dataclass(frozen=True)
class ByHand:
    """A text that a person merged, and the hash of the text that it was merged into."""

    text: str
    into: str


@dataclass(frozen=True)
class Work:
    """What a carry starts from.

    Attributes:
        sources: pin, overlay and series, as they are to be carried.
        kept: gives the pinned content of a locked path.
        new_root: the folder that holds the new base's vllm/.
        old_root: the same of the pinned base, None where it cannot be had: a moved file is then
            looked for among all the new base's files rather than among those new in it.
        resolved: texts that a person merged, by patch name and path.
        accepted: paths whose row was accepted as it stands.
    """

    sources: Sources
    kept: ReadKept
    new_root: Path
    old_root: Path | None = None
    resolved: Mapping[tuple[str, str], ByHand] = field(default_factory=dict)
    accepted: Collection[str] = ()


@dataclass(frozen=True)
class PatchRow:
    """How one file of a patch ends, and why."""

    name: str
    path: str
    end: End
    detail: str = ""


@dataclass(frozen=True)
class Conflict:
    """A place where a person has to decide.

    Attributes:
        owner: the patch's name, or 'overlay'.
        path: the file, where the new base has it, else where the pinned one has it.
        merged: the text with markers, '' where there is none to merge.
        intent: why we touch the file.
        upstream: upstream's change of the file since the pin, as a diff.
        reason: what is to be decided.
        into: the hash of the text that the change was merged into.
    """

    owner: str
    path: str
    merged: str
    intent: str
    upstream: str
    reason: str
    into: str = ""


@dataclass(frozen=True)
class Carried:
    """The outcome: a row a file and a row a patch's file, the new patches, what is left to decide.

    ``patches`` holds each patch's new text by name, None for one that is dropped; ``dropped`` names
    overlay files and removals whose part is upstream.
    """

    files: tuple[FileRow, ...]
    rows: tuple[PatchRow, ...]
    patches: Mapping[str, str | None]
    dropped: tuple[str, ...]
    conflicts: tuple[Conflict, ...]


def hash_text(text: str) -> str:
    """The SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def carry(work: Work) -> Carried:
    """Carry overlay and series to the base at ``work.new_root``.

    Raises:
        OverlayError: the series does not apply to the kept base, or a file is no text.
    """
    moves = find_moves(work.sources, work.kept, work.old_root, work.new_root)
    texts = _Texts(work, moves)
    patches: dict[str, str | None] = {}
    rows: list[PatchRow] = []
    for patch in work.sources.series.patches:
        outcome = _carry_patch(work, patch, texts)
        patches[patch.name] = outcome.text
        rows += outcome.rows
    patched = [_patched_row(work, path, texts, rows) for path in texts.paths]
    overlay = overlay_rows(work.sources, work.kept, work.new_root, moves, work.accepted)
    conflicts = texts.conflicts + [
        _overlay_conflict(work, row) for row in overlay if row.end is End.CONFLICTING
    ]
    dropped = tuple(row.path for row in overlay if row.end in (End.LANDED, End.LANDED_CHANGED))
    return Carried(
        tuple(sorted([*patched, *overlay], key=lambda row: row.path)),
        tuple(rows),
        patches,
        dropped,
        tuple(conflicts),
    )


class _Texts:
    """The patched files on both bases while the series is carried: pinned side, new side."""

    def __init__(self, work: Work, moves: Mapping[str, str]) -> None:
        self.moves = moves
        self.paths = sorted(path for path, action in work.sources.touched.items() if action == PATCHED)
        self.pinned = {path: decode(work.kept(path), path) for path in self.paths}
        self.first = dict(self.pinned)
        self.new: dict[str, str] = {}
        for path in self.paths:
            content = read_base(work.new_root, self.place(path))
            if content is not None:
                self.new[path] = decode(content, self.place(path))
        self.base = dict(self.new)
        self.blocked: dict[str, str] = {}
        self.conflicts: list[Conflict] = []

    def place(self, path: str) -> str:
        """Where the new base has a file of the pinned one."""
        return self.moves.get(path, path)


@dataclass(frozen=True)
class _Outcome:
    rows: list[PatchRow]
    text: str | None


@dataclass
class _Step:
    """One file of a patch, merged or not."""

    path: str
    before: str
    after: str
    row: PatchRow
    merged: str = ""


def _carry_patch(work: Work, patch: Patch, texts: _Texts) -> _Outcome:
    pinned_before = {diff.path: texts.pinned[diff.path] for diff in patch.diffs}
    for diff in patch.diffs:
        applied = apply_diff(texts.pinned[diff.path], diff)
        if applied.outcome is not Outcome.CLEAN:
            raise OverlayError(
                f"patches/{patch.name} {applied.outcome.value} on the kept base: {diff.path}",
                seen=applied.detail,
                fix="make lock, then make rebase",
            )
        texts.pinned[diff.path] = applied.text
    steps = [_merge(work, patch, diff.path, pinned_before[diff.path], texts) for diff in patch.diffs]
    if landed := _effect_upstream(work, patch, pinned_before, texts, steps):
        # Upstream's form stays; what we merged of ours goes.
        return _Outcome([replace(step.row, end=landed[0], detail=landed[1]) for step in steps], None)
    for step in steps:
        _settle(work, patch, step, texts)
    rows = [step.row for step in steps]
    if any(row.end is End.CONFLICTING for row in rows):
        return _Outcome(rows, patch.content.decode("utf-8"))
    probe = _moved(patch.probe, texts)
    owner = next(step for step in steps if step.path == patch.probe.path)
    fault = ""
    if not probe.holds(texts.new.get(patch.probe.path)):
        fault = f"merged, and without effect: no {probe}"
    elif owner.row.end is End.LANDED:
        fault = "the part that the probe looks at is upstream: drop the patch, or give it the rest's probe"
    if fault:
        for step in steps:
            texts.new[step.path] = step.before
        _decide(work, patch, owner, texts, owner.after, fault)
        conflicting = [replace(one, end=End.CONFLICTING, detail=fault) for one in rows]
        return _Outcome(conflicting, patch.content.decode("utf-8"))
    return _Outcome(rows, _rewrite(patch, steps, texts))


def _merge(work: Work, patch: Patch, path: str, pinned_before: str, texts: _Texts) -> _Step:
    """Merge one file's change into the new base's text; nothing is decided about the patch yet."""
    place = texts.place(path)
    pinned_after = texts.pinned[path]
    before = texts.new.get(path, "")
    if path not in texts.new:
        row = PatchRow(patch.name, path, End.CONFLICTING, "the file is gone")
        return _Step(path, "", "", row)
    if path in texts.blocked:
        row = PatchRow(patch.name, place, End.CONFLICTING, f"waits for {texts.blocked[path]}")
        return _Step(path, before, before, row)
    by_hand = work.resolved.get((patch.name, place))
    # What was merged into another text is of no use: an earlier patch was decided anew.
    if by_hand is not None and by_hand.into == hash_text(before):
        if has_markers(by_hand.text):
            row = PatchRow(patch.name, place, End.CONFLICTING, "markers are left in the merged file")
            return _Step(path, before, before, row, by_hand.text)
        return _Step(path, before, by_hand.text, PatchRow(patch.name, place, End.APPLIED, "merged by hand"))
    labels = (f"{place} of the new base", "of the pinned base", f"with {patch.name}")
    merged, conflicts = merge_texts(before, pinned_before, pinned_after, labels)
    if conflicts:
        detail = f"{conflicts} conflict{'s' if conflicts > 1 else ''}"
        undone = apply_diff(before, next(diff for diff in patch.diffs if diff.path == path))
        if undone.outcome is Outcome.ALREADY:
            return _Step(
                path, before, before, PatchRow(patch.name, place, End.LANDED, "every hunk's result is there")
            )
        return _Step(path, before, before, PatchRow(patch.name, place, End.CONFLICTING, detail), merged)
    if merged == before:
        return _Step(
            path, before, before, PatchRow(patch.name, place, End.LANDED, "the merge changes nothing")
        )
    detail = "" if place == path else f"moved with the file from {path}"
    return _Step(path, before, merged, PatchRow(patch.name, place, End.APPLIED, detail))


def _effect_upstream(
    work: Work, patch: Patch, pinned_before: Mapping[str, str], texts: _Texts, steps: list[_Step]
) -> tuple[End, str] | None:
    """Whether the patch's work is upstream: to the line, or by its Drop-when or Probe."""
    if all(step.row.end is End.LANDED for step in steps):
        return End.LANDED, "upstream has it to the line"
    if patch.drop_when is not None:
        due = _moved(patch.drop_when, texts)
        content = read_base(work.new_root, due.path)
        if content is not None and due.holds(decode(content, due.path)):
            return End.LANDED_CHANGED, f"Drop-when holds: base {due}"
    path = patch.probe.path
    resolved = any(name == patch.name for name, _ in work.resolved)
    if resolved or path in texts.blocked or path not in texts.new:
        return None
    # A probe that the pinned file met before the patch says nothing of upstream's.
    if not patch.probe.holds(pinned_before[path]) and patch.probe.holds(texts.new[path]):
        return End.LANDED_CHANGED, f"upstream has the effect: {_moved(patch.probe, texts)}"
    return None


def _settle(work: Work, patch: Patch, step: _Step, texts: _Texts) -> None:
    """Take the merged text, or leave the file to a person and hold later patches of it."""
    if step.row.end is not End.CONFLICTING:
        texts.new[step.path] = step.after
        return
    if not step.row.detail.startswith("waits for"):
        _decide(work, patch, step, texts, step.merged, step.row.detail)
    texts.blocked.setdefault(step.path, patch.name)


def _decide(work: Work, patch: Patch, step: _Step, texts: _Texts, merged: str, reason: str) -> None:
    intent = "\n".join(f"{name}: {value}" for name, value in patch.header.items())
    upstream = _upstream_diff(work, step.path, texts.moves)
    into = hash_text(step.before)
    texts.conflicts.append(
        Conflict(patch.name, texts.place(step.path), merged, intent, upstream, reason, into)
    )
    texts.blocked.setdefault(step.path, patch.name)


def _upstream_diff(work: Work, path: str, moves: Mapping[str, str]) -> str:
    content = read_base(work.new_root, moves.get(path, path))
    entry = work.sources.pin.locked().get(path)
    old = decode(work.kept(path), path) if entry else ""
    return diff_texts(old, "" if content is None else decode(content, path), path, context=3)


def _moved(symbol: Symbol, texts: _Texts) -> Symbol:
    return replace(symbol, path=texts.place(symbol.path))


def _rewrite(patch: Patch, steps: list[_Step], texts: _Texts) -> str:
    """The patch against the new base; byte for byte the old one where that applies there in its place."""
    text = patch.content.decode("utf-8")
    if all(_applies_in_place(patch, step, texts) for step in steps):
        return text
    context = max(_context(patch), CONTEXT_LINES)
    body = "".join(diff_texts(step.before, step.after, texts.place(step.path), context) for step in steps)
    head = text[: text.index("\n--- ") + 1]
    for old in patch.diffs:
        new = texts.place(old.path)
        if new != old.path:
            pattern = rf"^(Probe: |Drop-when: base ){re.escape(old.path)}(?= )"
            head = re.sub(pattern, rf"\g<1>{new}", head, flags=re.MULTILINE)
    return head + body


def _context(patch: Patch) -> int:
    """The lines of context that the patch was written with."""
    most = 0
    for hunk in (hunk for diff in patch.diffs for hunk in diff.hunks):
        marks = "".join(mark for mark, _ in hunk.lines)
        most = max(most, len(marks) - len(marks.lstrip(" ")), len(marks) - len(marks.rstrip(" ")))
    return most


def _applies_in_place(patch: Patch, step: _Step, texts: _Texts) -> bool:
    if texts.place(step.path) != step.path:
        return False
    applied = apply_diff(step.before, next(diff for diff in patch.diffs if diff.path == step.path))
    return applied.outcome is Outcome.CLEAN and not applied.offset and applied.text == step.after


def _patched_row(work: Work, path: str, texts: _Texts, rows: list[PatchRow]) -> FileRow:
    place = texts.place(path)
    own = [row for row in rows if row.path in (path, place)]
    ends = {row.end for row in own}
    order = (End.CONFLICTING, End.APPLIED, End.LANDED_CHANGED, End.LANDED)
    end = next(one for one in order if one in ends)
    names = ", ".join(dict.fromkeys(row.name for row in own))
    if path not in texts.base:
        return FileRow(path, PATCHED, GONE, end, "", names)
    change = _where(texts.first[path], texts.pinned[path], texts.base[path])
    if place != path:
        return FileRow(
            path, PATCHED, MOVED, end, place, names if change == UNCHANGED else f"{names}; {change}"
        )
    return FileRow(path, PATCHED, change, end, "", names)


def _where(pinned: str, patched: str, new: str) -> str:
    """Whether upstream changed lines of our hunks or the two on either side of each, or only others."""
    if pinned == new:
        return UNCHANGED
    ours = _old_ranges(diff_texts(pinned, patched, "f"))
    theirs = _old_ranges(diff_texts(pinned, new, "f", context=0))
    inside = any(
        first <= last_own and last >= first_own for first, last in theirs for first_own, last_own in ours
    )
    return INSIDE if inside else OUTSIDE


def _old_ranges(diff: str) -> list[tuple[int, int]]:
    """First and last old line of each hunk; an insertion behind line n is n to n + 1, both its neighbours."""
    ranges = []
    for line in diff.split("\n"):
        if match := HUNK.match(line):
            first, count = int(match[1]), int(match[2]) if match[2] is not None else 1
            ranges.append((first, first + count - 1) if count else (first, first + 1))
    return ranges


def _overlay_conflict(work: Work, row: FileRow) -> Conflict:
    why = {file.path: file.why for file in work.sources.overlay.files}
    why |= {removal.path: removal.why for removal in work.sources.overlay.removals}
    moves = {row.path: row.moved_to} if row.moved_to else {}
    upstream = _upstream_diff(work, row.path, moves)
    return Conflict("overlay", row.path, "", f"{row.action}: {why[row.path]}", upstream, row.detail)
