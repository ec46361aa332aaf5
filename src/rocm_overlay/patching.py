# SPDX-License-Identifier: Apache-2.0
"""Unified diffs: reading them, and applying them exactly or saying why not.

A patch of ours is exact by rule, so fuzz is never used to apply one: it is only tried to be able to
say "applies with fuzz". An offset alone is accepted when the place is unique, because lines that
upstream added elsewhere in the file do not concern the hunk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
MAX_FUZZ = 2


@dataclass(frozen=True)
class Hunk:
    """One hunk: the old side's first line (1-based) and (mark, text) lines, mark ' ', '-' or '+'."""

    old_start: int
    new_start: int
    lines: tuple[tuple[str, str], ...]

    @property
    def old(self) -> list[str]:
        return [text for mark, text in self.lines if mark != "+"]

    @property
    def new(self) -> list[str]:
        return [text for mark, text in self.lines if mark != "-"]

    def reversed(self) -> Hunk:
        """The hunk that undoes this one."""
        swap = {" ": " ", "-": "+", "+": "-"}
        return Hunk(self.new_start, self.old_start, tuple((swap[mark], text) for mark, text in self.lines))

    def trimmed(self, fuzz: int) -> Hunk:
        """The hunk without up to ``fuzz`` context lines at each end."""
        first, last = 0, len(self.lines)
        while first < min(fuzz, last) and self.lines[first][0] == " ":
            first += 1
        while last > max(first, len(self.lines) - fuzz) and self.lines[last - 1][0] == " ":
            last -= 1
        return Hunk(self.old_start + first, self.new_start + first, self.lines[first:last])


@dataclass(frozen=True)
class FileDiff:
    """The hunks for one file, its path without the a/ or b/ prefix."""

    path: str
    hunks: tuple[Hunk, ...]


class Outcome(Enum):
    """How a diff meets a text."""

    CLEAN = "applies"
    ALREADY = "already upstream"
    FUZZ = "applies only with fuzz"
    CONFLICT = "no longer applies"


@dataclass(frozen=True)
class Applied:
    """The outcome for one file; ``text`` is the result when it is CLEAN, ``detail`` names the place."""

    outcome: Outcome
    text: str = ""
    detail: str = ""
    offset: int = 0


class DiffSyntaxError(ValueError):
    """A diff that cannot be read; the message names the line."""


def parse_diff(text: str, first_line: int = 1) -> list[FileDiff]:
    """Read a unified diff of existing files.

    Args:
        text: the diff, from its first '---' line on; lines before are skipped.
        first_line: the number of the diff's first line in its file, for messages.

    Raises:
        DiffSyntaxError: a hunk's counts do not match its lines, or a file is added, removed or renamed.
    """
    diffs: list[FileDiff] = []
    lines = text.split("\n")
    i = 0
    while i < len(lines):
        if lines[i].startswith("\\"):
            raise DiffSyntaxError(f"line {first_line + i}: a file without a final newline is not supported")
        if not lines[i].startswith("--- "):
            i += 1
            continue
        if i + 1 >= len(lines) or not lines[i + 1].startswith("+++ "):
            raise DiffSyntaxError(f"line {first_line + i}: '---' without '+++'")
        old, new = (_path(lines[i + side][4:]) for side in (0, 1))
        if old != new:
            raise DiffSyntaxError(
                f"line {first_line + i}: {old} -> {new}: a patch changes existing files only; "
                "add a file through overlay/, remove one through its manifest"
            )
        i += 2
        hunks: list[Hunk] = []
        while i < len(lines) and lines[i].startswith("@@"):
            hunk, i = _hunk(lines, i, first_line)
            hunks.append(hunk)
        if not hunks:
            raise DiffSyntaxError(f"line {first_line + i}: {new} has no hunk")
        diffs.append(FileDiff(new, tuple(hunks)))
    return diffs


def _path(field: str) -> str:
    name = field.split("\t")[0].strip()
    return name[2:] if name[:2] in ("a/", "b/") else name


def _hunk(lines: list[str], i: int, first_line: int) -> tuple[Hunk, int]:
    head = HUNK.match(lines[i])
    if not head:
        raise DiffSyntaxError(f"line {first_line + i}: not a hunk header: {lines[i]}")
    left, right = (int(head[k]) if head[k] is not None else 1 for k in (2, 4))
    start = i
    i += 1
    body: list[tuple[str, str]] = []
    while left > 0 or right > 0:
        if i >= len(lines) or lines[i][:1] not in (" ", "-", "+", ""):
            raise DiffSyntaxError(f"line {first_line + start}: the hunk ends before its counts do")
        mark, content = lines[i][:1] or " ", lines[i][1:]
        left -= mark != "+"
        right -= mark != "-"
        body.append((mark, content))
        i += 1
    if left or right:
        raise DiffSyntaxError(f"line {first_line + start}: the hunk's counts do not match its lines")
    return Hunk(int(head[1]), int(head[3]), tuple(body)), i


def apply_diff(text: str, diff: FileDiff) -> Applied:
    """Apply a diff to a file's text, or say which of the three other outcomes it meets."""
    clean = _apply_all(text, diff.hunks)
    if isinstance(clean, Applied):
        return clean
    undone = _apply_all(text, tuple(hunk.reversed() for hunk in diff.hunks))
    if isinstance(undone, Applied):
        return Applied(Outcome.ALREADY, detail="every hunk's result is in the file")
    for fuzz in range(1, MAX_FUZZ + 1):
        loose = _apply_all(text, tuple(hunk.trimmed(fuzz) for hunk in diff.hunks))
        if isinstance(loose, Applied):
            return Applied(Outcome.FUZZ, detail=f"fuzz {fuzz}; first at {clean}")
    return Applied(Outcome.CONFLICT, detail=clean)


def _apply_all(text: str, hunks: tuple[Hunk, ...]) -> Applied | str:
    """The applied text, or the place of the first hunk that does not fit."""
    lines = text.split("\n")
    shift = largest = 0
    floor = 0
    for number, hunk in enumerate(hunks, 1):
        old = hunk.old
        at = _locate(lines, old, hunk.old_start - 1 + shift, floor)
        if at is None:
            return f"hunk {number} (line {hunk.old_start})"
        largest = max(largest, abs(at - (hunk.old_start - 1 + shift)))
        shift = at - (hunk.old_start - 1) + len(hunk.new) - len(old)
        lines[at : at + len(old)] = hunk.new
        floor = at + len(hunk.new)
    return Applied(Outcome.CLEAN, "\n".join(lines), offset=largest)


def _locate(lines: list[str], old: list[str], expected: int, floor: int) -> int | None:
    """Where ``old`` stands: at the expected index, else at the one other place from ``floor`` on."""
    if not old:
        return expected if floor <= expected <= len(lines) else None
    if expected >= floor and lines[expected : expected + len(old)] == old:
        return expected
    places = [
        i
        for i in range(floor, len(lines) - len(old) + 1)
        if lines[i] == old[0] and lines[i : i + len(old)] == old
    ]
    return places[0] if len(places) == 1 else None
