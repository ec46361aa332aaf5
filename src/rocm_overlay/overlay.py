# SPDX-License-Identifier: Apache-2.0
"""overlay/: the files that this project wrote in full, and their manifest."""

from __future__ import annotations

import ast
import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.textio import decode, read_text

MANIFEST_NAME = "manifest.toml"
KINDS = ("new", "replaces")


@dataclass(frozen=True)
class OverlayFile:
    """One file of ours. ``symbols`` are the names that other files use from it."""

    path: str
    kind: str
    why: str
    upstream: str
    symbols: tuple[str, ...]
    content: bytes


@dataclass(frozen=True)
class Removal:
    """An upstream file that the distribution does without."""

    path: str
    why: str


@dataclass(frozen=True)
class Overlay:
    """The overlay as its manifest declares it, checked against the folder."""

    files: tuple[OverlayFile, ...]
    removals: tuple[Removal, ...]
    sha256: str


def _bad(what: str, **details: object) -> OverlayError:
    return OverlayError(f"overlay/{MANIFEST_NAME}: {what}", **details)  # type: ignore[arg-type]


def check_path(path: str) -> str:
    """A path inside the package as both manifest and patches write it: posix, below vllm/.

    Raises:
        OverlayError: the path is absolute, leaves vllm/ or is not in its shortest form.
    """
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or pure.parts[:1] != ("vllm",) or str(pure) != path:
        raise OverlayError("a path outside the package", seen=path, wanted="vllm/... in its shortest form")
    return path


def load_overlay(folder: Path) -> Overlay:
    """Read the overlay and its manifest.

    Raises:
        OverlayError: a file without an entry, an entry without a file, a missing field, or a symbol
            that the file does not define.
    """
    manifest = folder / MANIFEST_NAME
    try:
        data = tomllib.loads(read_text(manifest, f"overlay/{MANIFEST_NAME}"))
    except tomllib.TOMLDecodeError as error:
        raise _bad("not valid TOML", seen=error) from None

    files = tuple(_file(folder, entry) for entry in _entries(data, "file"))
    removals = tuple(_removal(entry) for entry in _entries(data, "remove"))
    _check_complete(folder, files, removals)
    digest = hashlib.sha256(manifest.read_bytes())
    for file in sorted(files, key=lambda one: one.path):
        digest.update(f"{file.path}\0{hashlib.sha256(file.content).hexdigest()}\n".encode())
    return Overlay(files, removals, digest.hexdigest())


def _entries(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    entries = data.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _bad(name, seen=repr(entries)[:80], wanted=f"[[{name}]] tables")
    if unknown := set(data) - {"file", "remove"}:
        raise _bad("unknown table", seen=", ".join(sorted(unknown)), wanted="[[file]] and [[remove]]")
    return entries


def _removal(entry: dict[str, object]) -> Removal:
    _check_fields(entry, {"path": str, "why": str})
    return Removal(check_path(str(entry["path"])), str(entry["why"]))


def _check_fields(entry: dict[str, object], wanted: dict[str, type]) -> None:
    path = entry.get("path")
    for field, kind in wanted.items():
        if not isinstance(entry.get(field), kind) or (kind is str and not entry[field]):
            raise _bad(f"entry {path}: field {field}", seen=entry.get(field), wanted=kind.__name__)
    if unknown := set(entry) - set(wanted):
        raise _bad(f"entry {path}: unknown field", seen=", ".join(sorted(unknown)), wanted=", ".join(wanted))


def _file(folder: Path, entry: dict[str, object]) -> OverlayFile:
    path = str(entry.get("path"))
    _check_fields(entry, {"path": str, "kind": str, "why": str, "upstream": str, "symbols": list})
    if entry["kind"] not in KINDS:
        raise _bad(f"entry {path}: kind", seen=entry["kind"], wanted=" or ".join(KINDS))
    try:
        content = (folder / check_path(path)).read_bytes()
    except FileNotFoundError:
        raise _bad(f"entry {path} has no file", fix=f"add overlay/{path} or drop the entry") from None
    except OSError as error:
        raise _bad(f"entry {path} cannot be read", seen=error, wanted="a file") from None
    symbols = tuple(str(name) for name in entry["symbols"])  # type: ignore[attr-defined]
    if path.endswith(".py"):
        _check_symbols(path, content, symbols)
    return OverlayFile(path, str(entry["kind"]), str(entry["why"]), str(entry["upstream"]), symbols, content)


def module_name(path: str) -> str:
    """The dotted name of a file of the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def same_program(one: bytes, other: bytes) -> bool:
    """Whether two files are the same, or the same Python: comments, docstrings, layout, import order aside.

    An export takes upstream's form, so what upstream merged is seldom ours to the byte.
    """
    if one == other:
        return True
    try:
        trees = [ast.parse(text) for text in (one, other)]
    except (SyntaxError, ValueError):
        return False
    return _program(trees[0]) == _program(trees[1])


def _program(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                first.value.value = ""
        elif isinstance(node, ast.ImportFrom | ast.Import):
            node.names.sort(key=lambda alias: alias.name)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    rest = [node for node in tree.body if node not in imports]
    return "\n".join([*sorted(map(ast.dump, imports)), *map(ast.dump, rest)])


def defined_names(content: bytes) -> set[str]:
    """The names that a module defines or imports at its top level.

    Raises:
        SyntaxError: it is not valid Python.
    """
    defined: set[str] = set()
    for node in ast.parse(content).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined.update(alias.asname or alias.name for alias in node.names)
    return defined


def _check_symbols(path: str, content: bytes, symbols: tuple[str, ...]) -> None:
    decode(content, f"overlay/{path}")
    try:
        defined = defined_names(content)
    except SyntaxError as error:
        raise OverlayError(
            f"overlay/{path} is not valid Python", seen=error, fix="correct that line"
        ) from None
    if missing := [name for name in symbols if name not in defined]:
        raise _bad(
            f"entry {path}: symbols that others use are not defined in the file",
            seen=", ".join(missing),
            fix="define them or correct the entry",
        )


def _check_complete(folder: Path, files: tuple[OverlayFile, ...], removals: tuple[Removal, ...]) -> None:
    paths = [file.path for file in files] + [removal.path for removal in removals]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise _bad("a path has two entries", seen=", ".join(twice))
    found = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
    # A link would lay what lies elsewhere, under a hash that does not follow it.
    if links := [path.relative_to(folder).as_posix() for path in found if path.is_symlink()]:
        raise _bad("links in the overlay", seen=", ".join(links), wanted="files", fix="replace them by files")
    present = {path.relative_to(folder).as_posix() for path in found if path.is_file()} - {MANIFEST_NAME}
    if stray := sorted(present - {file.path for file in files}):
        raise _bad("files without an entry", seen=", ".join(stray), fix="add a [[file]] entry for each")
