# SPDX-License-Identifier: Apache-2.0
"""upstream/prs.toml: which overlay files, patches and tests make which upstream pull request.

Every overlay file and every patch belongs to exactly one; a new file that no entry takes is an error
that names it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.overlay import same_program
from rocm_overlay.plan import Sources, read_base
from rocm_overlay.series import DROP, Symbol
from rocm_overlay.textio import decode, read_text

FOLDER, NAME = "upstream", "prs.toml"
GLOB = re.compile(r"^!|[*?\[]")
SECTIONS = ("purpose", "claims", "validation", "reproduce", "limits", "unchanged")
FIELDS = {
    "name": str, "title": str, "depends": list, "files": list, "patches": list, "merged_when": str,
    "run": list, "test": list, "ci": list, "doc": list, "remove": list, "edit": list, "results": list,
    "waits": str,
    **dict.fromkeys(SECTIONS, list),
}  # fmt: skip
REQUIRED = ("name", "title", "purpose", "merged_when")


@dataclass(frozen=True)
class Carried:
    """A file of ours, its path in upstream's tree, and what stays here: tests, a document's sections."""

    source: str
    target: str
    omit: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edit:
    """A text of an upstream file that stands there ``count`` times, and what takes its place."""

    path: str
    old: str
    new: str
    count: int


@dataclass(frozen=True)
class Result:
    """Measured results in a document of ours: a fenced block or a table below a heading."""

    file: str
    heading: str
    block: int


@dataclass(frozen=True)
class PullRequest:
    """One pull request, its globs resolved to what they name now."""

    name: str
    title: str
    depends: tuple[str, ...]
    files: tuple[str, ...]
    patches: tuple[str, ...]
    merged_when: Symbol | None
    run: tuple[str, ...]
    tests: tuple[Carried, ...]
    ci: tuple[Carried, ...]
    docs: tuple[Carried, ...]
    remove: tuple[str, ...]
    edits: tuple[Edit, ...]
    results: tuple[Result, ...]
    texts: dict[str, tuple[str, ...]]
    waits: str = ""

    @property
    def held_back(self) -> str:
        """Why it is not exported now; '' where it is."""
        if self.waits:
            return self.waits
        return "" if self.files or self.patches or self.tests or self.ci else "nothing of it is there yet"


@dataclass(frozen=True)
class ExportPlan:
    """The pull requests in their order, how the tests' modules are called in upstream's tree, and which tests
    stay here, by glob, with why."""

    pulls: tuple[PullRequest, ...]
    renames: dict[str, str]
    stays: dict[str, str] = field(default_factory=dict)

    def closure(self, name: str) -> list[PullRequest]:
        """What a pull request stands on, and itself last, in the order of the manifest."""
        wanted, waiting = {name}, [name]
        by_name = {one.name: one for one in self.pulls}
        while waiting:
            for other in by_name[waiting.pop()].depends:
                if other not in wanted:
                    wanted.add(other)
                    waiting.append(other)
        return [one for one in self.pulls if one.name in wanted]


def _bad(what: str, **details: object) -> OverlayError:
    return OverlayError(f"{FOLDER}/{NAME}: {what}", **details)  # type: ignore[arg-type]


def load_plan(root: Path, sources: Sources) -> ExportPlan:
    """Read and check the manifest against the overlay and the series.

    Args:
        root: the project's folder.
        sources: its overlay and series.

    Raises:
        OverlayError: an unknown or missing field, a file or patch in no pull request or in two, a test
            that is not there, a dependency that is unknown or comes later.
    """
    try:
        data = tomllib.loads(read_text(root / FOLDER / NAME, f"{FOLDER}/{NAME}"))
    except tomllib.TOMLDecodeError as error:
        raise _bad("not valid TOML", seen=error, fix="correct that line") from None
    if unknown := set(data) - {"pr", "rename", "stays"}:
        raise _bad("unknown table", seen=", ".join(sorted(unknown)), wanted="[[pr]], [rename] and [stays]")
    pulls: list[PullRequest] = []
    for entry in _tables("pr", data.get("pr", [])):
        pulls.append(_pull(entry, root, sources, [one.name for one in pulls]))
    _check_cover(
        "overlay file", [file.path for file in sources.overlay.files], [p.files for p in pulls], pulls
    )
    _check_cover("patch", [patch.name for patch in sources.series.patches], [p.patches for p in pulls], pulls)
    _check_cover("removal", [one.path for one in sources.overlay.removals], [p.remove for p in pulls], pulls)
    return ExportPlan(
        tuple(pulls),
        _texts("rename", data.get("rename", {}), "the module's name in upstream's tree"),
        _texts("stays", data.get("stays", {}), "why the test stays here"),
    )


def _texts(table: str, entries: Any, wanted: str) -> dict[str, str]:
    """A table of texts, none of them empty."""
    if not isinstance(entries, dict):
        raise _bad(f"[{table}]", seen=entries, wanted=f"[{table}]")
    for key, value in entries.items():
        if not isinstance(value, str) or not value.strip():
            raise _bad(f"[{table}] {key}", seen=repr(value), wanted=wanted)
    return dict(entries)


def _tables(what: str, entries: Any) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise _bad(what, seen=entries, wanted=f"tables, each under [[{what}]]")
    return entries


def _pull(entry: dict[str, Any], root: Path, sources: Sources, earlier: Sequence[str]) -> PullRequest:
    name = str(entry.get("name"))
    if unknown := sorted(set(entry) - set(FIELDS)):
        raise _bad(f"{name}: unknown field", seen=", ".join(unknown), wanted=", ".join(FIELDS))
    for key, kind in FIELDS.items():
        if (key in REQUIRED and key not in entry) or not isinstance(entry.get(key, kind()), kind):
            raise _bad(f"{name}: field {key}", seen=entry.get(key), wanted=kind.__name__)
    for key in ("depends", "files", "patches", "run", "remove", *SECTIONS):
        if bad := [one for one in entry.get(key, []) if not isinstance(one, str)]:
            raise _bad(f"{name}: field {key}", seen=bad[0], wanted="texts")
    if later := [one for one in entry.get("depends", []) if one not in earlier]:
        raise _bad(f"{name} depends on what does not stand before it", seen=", ".join(later))
    if name in earlier:
        raise _bad("two entries of one name", seen=name)
    texts = {section: tuple(map(str, entry.get(section, []))) for section in SECTIONS}
    return PullRequest(
        name=name,
        title=entry["title"],
        depends=tuple(entry.get("depends", [])),
        files=_matching(entry.get("files", []), [file.path for file in sources.overlay.files]),
        patches=_matching(entry.get("patches", []), [patch.name for patch in sources.series.patches]),
        merged_when=_symbol(name, entry["merged_when"]),
        run=tuple(entry.get("run", [])),
        tests=_carried(name, root, entry.get("test", [])),
        ci=_carried(name, root, entry.get("ci", [])),
        docs=_carried(name, root, entry.get("doc", [])),
        remove=_removed(entry.get("remove", []), sources),
        edits=tuple(_edit(name, one) for one in _tables(f"{name}: edit", entry.get("edit", []))),
        results=tuple(_result(name, one) for one in _tables(f"{name}: results", entry.get("results", []))),
        texts=texts,
        waits=entry.get("waits", ""),
    )


def _matching(globs: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """The names that a glob takes and none that starts with '!' does."""
    wanted = [one for one in globs if not one.startswith("!")]
    barred = [one[1:] for one in globs if one.startswith("!")]
    return tuple(
        name
        for name in names
        if any(fnmatchcase(name, one) for one in wanted) and not any(fnmatchcase(name, one) for one in barred)
    )


def _removed(entries: Sequence[str], sources: Sources) -> tuple[str, ...]:
    """What is removed: overlay removals that a glob takes, and upstream's files by their paths."""
    ours = _matching(entries, [removal.path for removal in sources.overlay.removals])
    return (*ours, *(one for one in entries if one not in ours and not GLOB.search(one)))


def _symbol(name: str, text: str) -> Symbol | None:
    match = DROP.fullmatch(text)
    if not match:
        raise _bad(
            f"{name}: merged_when", seen=text, wanted="base PATH calls|defines NAME [in SCOPE], or never: WHY"
        )
    return Symbol(match["path"], match["verb"], match["name"], match["scope"]) if match["path"] else None


def _carried(name: str, root: Path, entries: Any) -> tuple[Carried, ...]:
    found = []
    for entry in _tables(f"{name}: test, ci, doc", entries):
        fits = {"from", "to"} <= set(entry) <= {"from", "to", "omit"}
        if not fits or not isinstance(entry["from"], str) or not isinstance(entry["to"], str):
            raise _bad(f"{name}: a carried file", seen=entry, wanted="from, to, and omit: what stays here")
        sources = sorted(root.glob(entry["from"]))
        if not sources:
            raise _bad(f"{name}: no such file", seen=entry["from"], fix="correct it, or restore the file")
        for source in sources:
            target = entry["to"].replace("*", source.name)
            found.append(Carried(source.relative_to(root).as_posix(), target, tuple(entry.get("omit", []))))
    return tuple(found)


def _result(name: str, entry: dict[str, Any]) -> Result:
    if not {"file", "heading"} <= set(entry) <= {"file", "heading", "block"} or not _whole(entry, "block"):
        raise _bad(f"{name}: a result", seen=entry, wanted="file, heading, and block: its number, from 1")
    return Result(str(entry["file"]), str(entry["heading"]), entry.get("block", 1))


def _whole(entry: dict[str, Any], key: str) -> bool:
    value = entry.get(key, 1)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _edit(name: str, entry: dict[str, Any]) -> Edit:
    fits = {"path", "old", "new"} <= set(entry) <= {"path", "old", "new", "count"} and _whole(entry, "count")
    if not fits or not all(isinstance(entry[key], str) for key in ("path", "old", "new")) or not entry["old"]:
        raise _bad(f"{name}: an edit", seen=entry, wanted="path, old, new, and count where it is not 1")
    return Edit(entry["path"], entry["old"], entry["new"], entry.get("count", 1))


def _check_cover(
    what: str, names: Sequence[str], taken: Sequence[Sequence[str]], pulls: Sequence[PullRequest]
) -> None:
    """Each name in exactly one pull request."""
    for name in names:
        owners = [pull.name for pull, own in zip(pulls, taken, strict=True) if name in own]
        if not owners:
            raise _bad(
                f"{what} {name} belongs to no pull request",
                fix=f"add it, or a glob that takes it, to a [[pr]] of {FOLDER}/{NAME}",
            )
        if len(owners) > 1:
            raise _bad(f"{what} {name} belongs to more than one pull request", seen=", ".join(owners))


@dataclass(frozen=True)
class Merged:
    """A pull request that a base has: what of ours it makes needless, and what of that upstream changed."""

    pull: PullRequest
    how: str
    same: tuple[str, ...]
    changed: tuple[str, ...]


def merged_pulls(plan: ExportPlan, sources: Sources, root: Path) -> list[Merged]:
    """The pull requests that the base at ``root`` has: by their own condition, file by file, or, where they
    have none, edit by edit.

    Args:
        plan: the manifest.
        sources: overlay and series.
        root: the folder that holds the base's vllm/.
    """
    ours = {file.path: file.content for file in sources.overlay.files}
    found = []
    for pull in plan.pulls:
        texts = {path: read_base(root, path) for path in pull.files}
        same = tuple(
            path for path, text in texts.items() if text is not None and same_program(text, ours[path])
        )
        how = "every file of it is there" if pull.files and len(same) == len(pull.files) else ""
        if not pull.files and not pull.patches and pull.edits and all(_has(root, one) for one in pull.edits):
            how = "every edit of it is there"
        if pull.merged_when is not None:
            content = read_base(root, pull.merged_when.path)
            if content is not None and pull.merged_when.holds(decode(content, pull.merged_when.path)):
                how = f"base {pull.merged_when}"
        if how:
            changed = tuple(path for path, text in texts.items() if text is not None and path not in same)
            found.append(Merged(pull, how, same, changed))
    return found


def _has(root: Path, edit: Edit) -> bool:
    """Whether a base has an edit's new text, and its old one no more."""
    content = read_base(root, edit.path)
    text = "" if content is None else decode(content, edit.path)
    return bool(edit.new) and edit.new in text and edit.old not in text.replace(edit.new, "")
