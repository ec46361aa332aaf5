# SPDX-License-Identifier: Apache-2.0
"""Whether the files of a pull request find what they import: in the pinned source, and in what it depends on.

Its tests do not show it: an import inside a function that a test replaces is never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from rocm_overlay.base_index import BaseIndex
from rocm_overlay.errors import OverlayError
from rocm_overlay.export_plan import FOLDER, NAME, ExportPlan, PullRequest
from rocm_overlay.removed_imports import called_name, find_importers

# Packages of upstream's tree. Others are the machine's.
PACKAGES = ("vllm", "tests")


def refuse_missing_imports(
    pull: PullRequest,
    plan: ExportPlan,
    base: Path,
    before: Mapping[str, str | None],
    files: Mapping[str, str | None],
) -> None:
    """Refuse a pull request that imports what only a pull request beside it has, or nobody.

    Args:
        pull: the pull request.
        plan: the manifest, to name who has what is missing.
        base: the unpacked pinned source.
        before: what those that it depends on change, by path.
        files: what it changes itself.

    Raises:
        OverlayError: with every such import, or with what still imports a module that it removes.
    """
    there, here = _Tree(base, before), _Tree(base, {**before, **files})
    _refuse_importers_of_removed(pull, here, files)
    found = []
    for path, text in files.items():
        if not path.endswith(".py") or text is None:
            continue
        # What upstream's own file already imports in vain (a compiled module) is upstream's matter.
        old = set(there.missing(path)) if there.has(path) else set()
        found += [f"{path}: {one}{_owner(plan, one)}" for one in here.missing(path) if one not in old]
    if found:
        raise OverlayError(
            f"{FOLDER}/{NAME}: {pull.name} imports what neither the pinned source nor its depends have",
            seen="; ".join(found),
            fix="add the pull request that has it to depends, or move the file to it",
        )


def _refuse_importers_of_removed(pull: PullRequest, tree: _Tree, files: Mapping[str, str | None]) -> None:
    """A removed module must have no importer in upstream's whole tree, its tests and tools included."""
    removed = [path for path, text in files.items() if text is None]
    if importers := find_importers(tree.index, tree.python_files(), removed):
        raise OverlayError(
            f"{FOLDER}/{NAME}: {pull.name} removes what is still imported",
            seen="; ".join(map(str, importers)),
            fix="remove or edit those files as well, or keep the module",
        )


def _owner(plan: ExportPlan, name: str) -> str:
    """Which pull request has a module, in words."""
    module, _, member = name.partition(":")
    for stem in (f"{module}.{member}".replace(".", "/"), module.replace(".", "/")):
        for pull in plan.pulls:
            targets = (*pull.files, *(one.target for one in pull.tests))
            if f"{stem}.py" in targets or f"{stem}/__init__.py" in targets:
                return f" (of {pull.name}{', which waits' if pull.waits else ''})"
    return ""


class _Tree:
    """Upstream's tree with some files changed."""

    def __init__(self, base: Path, changed: Mapping[str, str | None]) -> None:
        self._gone = {path for path, text in changed.items() if text is None}
        laid = {path: text.encode("utf-8") for path, text in changed.items() if text is not None}
        self._folders = {parent.as_posix() for path in laid for parent in Path(path).parents}
        self._laid = frozenset(laid)
        self.index = BaseIndex(base, laid)

    def python_files(self) -> list[str]:
        """The paths of its Python files."""
        root = self.index.root
        files = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.is_file()}
        return sorted((files | {path for path in self._laid if path.endswith(".py")}) - self._gone)

    def has(self, path: str) -> bool:
        return path not in self._gone and self.index.path_of(_module(path)) is not None

    def missing(self, path: str) -> list[str]:
        """The names that a file imports and that are not there, each once, in order."""
        tree = self.index.tree(_module(path))
        if tree is None:
            return []
        names = [name for node in ast.walk(tree) for name in self._imports(_module(path), node)]
        return list(dict.fromkeys(name for name in names if not self._is_there(*name.split(":"))))

    def _imports(self, module: str, node: ast.AST) -> Iterator[str]:
        """What a node imports of upstream's packages: MODULE, or MODULE:NAME."""
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = self.index.source_of(module, node)
            found = [f"{source}:{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and called_name(node.func) == "import_module" and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found = [name.value]
        yield from (one for one in found if one.partition(":")[0].split(".")[0] in PACKAGES)

    def _is_there(self, module: str, name: str = "") -> bool:
        if not self._is_module(module):
            return False
        if name in ("", "*") or self._is_module(f"{module}.{name}"):
            return True
        tree = self.index.tree(module)
        return tree is not None and not {name, "*", "__getattr__"}.isdisjoint(_bound(tree))

    def _is_module(self, module: str) -> bool:
        path = self.index.path_of(module)
        if path is not None:
            return path.relative_to(self.index.root).as_posix() not in self._gone
        folder = module.replace(".", "/")
        return folder in self._folders or (self.index.root / folder).is_dir()


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _bound(tree: ast.AST) -> set[str]:
    """The names that a module binds when it is imported; '*' where it takes another's."""
    found: set[str] = set()
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return found
