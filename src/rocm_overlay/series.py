# SPDX-License-Identifier: Apache-2.0
"""patches/: the numbered series, the header every patch carries, and its probe."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay import table
from rocm_overlay.errors import OverlayError
from rocm_overlay.overlay import check_path
from rocm_overlay.patching import DiffSyntaxError, FileDiff, parse_diff
from rocm_overlay.textio import read_text

SERIES_NAME = "series"
FIELDS = ("Subject", "Why", "Kind", "Upstream", "Drop-when", "Test", "Probe")
KINDS = ("temporary", "backport", "rocm-only")
NAME = re.compile(r"\d{4}-[a-z0-9]+(-[a-z0-9]+)+\.patch")
PROBE = re.compile(r"(?P<path>\S+) (?P<verb>calls|defines) (?P<name>[\w.]+)(?: in (?P<scope>[\w.]+))?")
DROP = re.compile(
    r"never: .+|base (?P<path>\S+) (?P<verb>calls|defines) (?P<name>[\w.]+)(?: in (?P<scope>[\w.]+))?"
)

ReadText = Callable[[str], str | None]


@dataclass(frozen=True)
class Symbol:
    """A fact about a file: it defines a name, or calls one (inside a function or class, if given)."""

    path: str
    verb: str
    name: str
    scope: str | None

    def holds(self, text: str | None) -> bool:
        """Whether the fact is true of the file's text; a missing or unparsable file has no symbols."""
        if text is None:
            return False
        try:
            nodes = _scope(ast.parse(text), self.scope)
        except SyntaxError:
            return False
        return any(_matches(node, self.verb, self.name) for root in nodes for node in ast.walk(root))

    def __str__(self) -> str:
        return f"{self.path} {self.verb} {self.name}" + (f" in {self.scope}" if self.scope else "")


def _scope(tree: ast.AST, scope: str | None) -> list[ast.AST]:
    nodes: list[ast.AST] = [tree]
    for part in scope.split(".") if scope else []:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        nodes = [
            child
            for node in nodes
            for child in ast.walk(node)
            if child is not node and isinstance(child, kinds) and child.name == part
        ]
    return nodes


def _matches(node: ast.AST, verb: str, name: str) -> bool:
    if verb == "defines":
        return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    return called == name or called.endswith(f".{name}")


@dataclass(frozen=True)
class Patch:
    """One patch of the series."""

    name: str
    header: dict[str, str]
    diffs: tuple[FileDiff, ...]
    probe: Symbol
    drop_when: Symbol | None
    content: bytes


@dataclass(frozen=True)
class Series:
    """The patches in the order in which they apply."""

    patches: tuple[Patch, ...]
    sha256: str

    def _rows(self) -> list[tuple[str, ...]]:
        fields = ("Kind", "Subject", "Upstream", "Drop-when")
        return [(patch.name, *(patch.header[field] for field in fields)) for patch in self.patches]

    def table(self) -> str:
        """The series as a table for the terminal."""
        return table.render(("patch", "kind", "subject", "upstream", "drop when"), self._rows())

    def markdown(self) -> str:
        """The series as the table that patches/README.md holds."""
        head = ["| patch | kind | subject | upstream | drop when |", "|---|---|---|---|---|"]
        return "\n".join(head + [f"| {' | '.join(row)} |" for row in self._rows()])


def load_series(folder: Path) -> Series:
    """Read the series file and every patch it names.

    Raises:
        OverlayError: a patch that is named but missing, present but not named, misnamed, out of
            order, or whose header or diff is malformed.
    """
    listing = folder / SERIES_NAME
    names = [line.strip() for line in read_text(listing, f"patches/{SERIES_NAME}").splitlines()]
    names = [name for name in names if name and not name.startswith("#")]
    present = {path.name for path in folder.glob("*.patch")}
    for name in names:
        if name not in present:
            raise OverlayError(f"patches/{SERIES_NAME} names a patch that is not there", seen=name)
        if not NAME.fullmatch(name):
            raise OverlayError("a patch's file name", seen=name, wanted="NNNN-<area>-<purpose>.patch")
    if unlisted := sorted(present - set(names)):
        raise OverlayError(
            "patches that the series does not name",
            seen=", ".join(unlisted),
            fix=f"add to patches/{SERIES_NAME}",
        )
    if names != sorted(set(names)):
        raise OverlayError(f"patches/{SERIES_NAME} is not in the order of its numbers", seen=", ".join(names))
    patches = tuple(load_patch(folder / name) for name in names)
    digest = hashlib.sha256()
    for patch in patches:
        digest.update(f"{patch.name}\0{hashlib.sha256(patch.content).hexdigest()}\n".encode())
    return Series(patches, digest.hexdigest())


def load_patch(path: Path) -> Patch:
    """Read one patch: its header, then its diff.

    Raises:
        OverlayError: a missing, empty or unknown header field, or a diff that cannot be read.
    """
    text = read_text(path, f"patches/{path.name}")
    if "\r" in text:
        raise OverlayError(
            f"patches/{path.name} has carriage returns",
            seen="CR LF line ends",
            wanted="LF, as the base has",
            fix="convert the file; git config core.autocrlf false keeps it so",
        )
    content = text.encode("utf-8")
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith("--- ")), len(lines))
    header = _header(path.name, lines[:start])
    try:
        diffs = tuple(parse_diff("\n".join(lines[start:]), start + 1))
    except DiffSyntaxError as error:
        raise OverlayError(f"patches/{path.name}: the diff cannot be read", seen=error) from None
    if not diffs:
        raise OverlayError(f"patches/{path.name} changes nothing", wanted="a unified diff after the header")
    for diff in diffs:
        check_path(diff.path)
    probe = _symbol(path.name, "Probe", PROBE, header["Probe"])
    if probe is None or probe.path not in {diff.path for diff in diffs}:
        raise OverlayError(f"patches/{path.name}: Probe looks at no file of the patch", seen=header["Probe"])
    return Patch(
        path.name, header, diffs, probe, _symbol(path.name, "Drop-when", DROP, header["Drop-when"]), content
    )


def _header(name: str, lines: list[str]) -> dict[str, str]:
    header: dict[str, str] = {}
    field = ""
    for line in lines:
        if not line.strip():
            continue
        if line.startswith((" ", "\t")) and field:
            header[field] += f" {line.strip()}"
            continue
        field, colon, value = line.partition(":")
        if not colon or field not in FIELDS or field in header:
            raise OverlayError(
                f"patches/{name}: header line", seen=line, wanted=f"each once: {', '.join(FIELDS)}"
            )
        header[field] = value.strip()
    if missing := [field for field in FIELDS if not header.get(field)]:
        raise OverlayError(f"patches/{name}: header fields missing", seen=", ".join(missing))
    if header["Kind"] not in KINDS:
        raise OverlayError(f"patches/{name}: Kind", seen=header["Kind"], wanted=" or ".join(KINDS))
    return header


def _symbol(name: str, field: str, form: re.Pattern[str], value: str) -> Symbol | None:
    match = form.fullmatch(value)
    if not match:
        raise OverlayError(
            f"patches/{name}: {field}",
            seen=value,
            wanted="[base] PATH calls|defines NAME [in SCOPE]"
            + (", or never: REASON" if field != "Probe" else ""),
        )
    if match["path"] is None:
        return None
    return Symbol(check_path(match["path"]), match["verb"], match["name"], match["scope"])
