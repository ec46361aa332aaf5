# SPDX-License-Identifier: Apache-2.0
"""What another base means for the files that we add, replace or remove, and where its files moved."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rocm_overlay.gittool import find_renames
from rocm_overlay.overlay import OverlayFile, defined_names, same_program
from rocm_overlay.plan import ADDED, REMOVED, REPLACED, Sources, read_base

UNCHANGED, OUTSIDE, INSIDE = "unchanged", "changed outside our hunks", "changed inside"
MOVED, GONE, NEW_THERE = "moved", "gone", "new there"


class End(Enum):
    """How a file or patch of ours ends on another base."""

    APPLIED = "applied"
    LANDED = "landed"
    LANDED_CHANGED = "landed changed"
    CONFLICTING = "conflicting"


@dataclass(frozen=True)
class FileRow:
    """A file that we touch: what we do to it, what upstream did to it since the pin, how it ends."""

    path: str
    action: str
    upstream: str
    end: End
    moved_to: str = ""
    detail: str = ""


def find_moves(
    sources: Sources, kept: Callable[[str], bytes], old_root: Path | None, new_root: Path
) -> dict[str, str]:
    """Where the locked files that the new base lacks went, for those that git finds again."""
    gone = {
        entry.path: kept(entry.path) for entry in sources.pin.files if read_base(new_root, entry.path) is None
    }
    if not gone:
        return {}
    suffixes = {Path(path).suffix for path in gone}
    found = [
        path for path in sorted((new_root / "vllm").rglob("*")) if path.suffix in suffixes and path.is_file()
    ]
    candidates = {path.relative_to(new_root).as_posix(): path for path in found}
    if old_root is not None:
        candidates = {name: path for name, path in candidates.items() if not (old_root / name).exists()}
    return find_renames(gone, candidates)


def overlay_rows(
    sources: Sources,
    kept: Callable[[str], bytes],
    new_root: Path,
    moves: Mapping[str, str],
    accepted: Collection[str],
) -> list[FileRow]:
    """A row for each overlay file and removal."""
    locked = sources.pin.locked()
    rows = []
    for file in sources.overlay.files:
        content = read_base(new_root, file.path)
        pinned = kept(file.path) if file.path in locked else None
        if file.kind == "new":
            rows.append(_new_row(file, content, pinned, file.path in accepted))
        else:
            rows.append(_replaced_row(file, content, pinned, moves.get(file.path, ""), file.path in accepted))
    for removal in sources.overlay.removals:
        pinned = kept(removal.path) if removal.path in locked else None
        rows.append(_removed_row(removal.path, read_base(new_root, removal.path), pinned, moves))
    return rows


def _new_row(file: OverlayFile, content: bytes | None, pinned: bytes | None, accepted: bool) -> FileRow:
    if content is None:
        # An entry that a person turned from "replaces" to "new", since upstream's file is gone.
        upstream = UNCHANGED if pinned is None else GONE
        return FileRow(file.path, ADDED, upstream, End.APPLIED)
    if same_program(content, file.content):
        return FileRow(file.path, ADDED, NEW_THERE, End.LANDED, detail="upstream has our file")
    if file.symbols and set(file.symbols) <= _names(file.path, content):
        detail = "upstream's file defines every symbol that others use from ours"
        if accepted:
            return FileRow(file.path, ADDED, NEW_THERE, End.LANDED_CHANGED, detail=detail)
        ask = f'{detail}: accept it to drop ours, or make the entry kind = "replaces"'
        return FileRow(file.path, ADDED, NEW_THERE, End.CONFLICTING, detail=ask)
    ask = 'upstream has another file there: make the entry kind = "replaces", or move ours'
    return FileRow(file.path, ADDED, NEW_THERE, End.CONFLICTING, detail=ask)


def _names(path: str, content: bytes) -> set[str]:
    try:
        return defined_names(content) if path.endswith(".py") else set()
    except SyntaxError:
        return set()


def _replaced_row(
    file: OverlayFile, content: bytes | None, pinned: bytes | None, moved_to: str, accepted: bool
) -> FileRow:
    if content is None and moved_to:
        ask = "move our file after upstream's, with its entry and its imports"
        return FileRow(file.path, REPLACED, MOVED, End.CONFLICTING, moved_to, ask)
    if content is None:
        ask = 'make the entry kind = "new" if anything still needs ours, else drop it'
        return FileRow(file.path, REPLACED, GONE, End.CONFLICTING, detail=ask)
    if same_program(content, file.content):
        return FileRow(file.path, REPLACED, INSIDE, End.LANDED, detail="upstream has our file")
    if content == pinned:
        return FileRow(file.path, REPLACED, UNCHANGED, End.APPLIED)
    state = NEW_THERE if pinned is None else INSIDE
    if accepted or pinned is None:
        return FileRow(file.path, REPLACED, state, End.APPLIED, detail="accepted: ours replaces it as it is")
    ask = "read upstream's change, carry what we need of it over to our file, then accept it"
    return FileRow(file.path, REPLACED, state, End.CONFLICTING, detail=ask)


def _removed_row(path: str, content: bytes | None, pinned: bytes | None, moves: Mapping[str, str]) -> FileRow:
    if content is None and path in moves:
        ask = "remove the file where it is now, or drop the entry"
        return FileRow(path, REMOVED, MOVED, End.CONFLICTING, moves[path], ask)
    if content is None:
        return FileRow(path, REMOVED, GONE, End.LANDED, detail="upstream removed it as well")
    if pinned is None or _same(content, pinned):
        return FileRow(path, REMOVED, UNCHANGED, End.APPLIED)
    return FileRow(path, REMOVED, INSIDE, End.APPLIED, detail="upstream changed what we do without")


def _same(one: bytes, other: bytes) -> bool:
    return hashlib.sha256(one).digest() == hashlib.sha256(other).digest()
