# SPDX-License-Identifier: Apache-2.0
"""Which files of a tree still import a module that we remove."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from rocm_overlay.base_index import BaseIndex
from rocm_overlay.overlay import module_name

RELATIVE = re.compile(rb"from \.[\w.]* import \([^)]*\)|from \.[^\n]*")


@dataclass(frozen=True)
class Importer:
    """An import of a removed module."""

    path: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def find_importers(index: BaseIndex, paths: Iterable[str], removed: Collection[str]) -> list[Importer]:
    """Every import of a removed module, inside functions and by ``import_module`` as well.

    Args:
        index: the tree.
        paths: the files to look into, from the tree's root; those of ``removed`` are left out.
        removed: the paths that are removed; other than Python files have no importers.
    """
    modules = {module_name(path) for path in removed if path.endswith(".py")}
    if not modules:
        return []
    mentions = mention_of(modules)
    found = []
    for path in sorted(set(paths) - set(removed)):
        if mentions(path, index.content(path)) and (tree := index.tree(module_name(path))):
            found += [Importer(path, *one) for one in _imports(index, module_name(path), tree, modules)]
    return found


def mention_of(modules: Collection[str]) -> Callable[[str, bytes], bool]:
    """Whether a file can import one of the modules: by its name, from its package, or by dots."""
    parents = {name.rpartition(".")[0] for name in modules}
    names = [re.escape(name) for name in modules] + [rf"from {re.escape(name)} import" for name in parents]
    spelled = re.compile("|".join(sorted(names)).encode())
    leaves = {re.escape(name.rpartition(".")[2]) for name in modules}
    leaf = re.compile(rf"\b(?:{'|'.join(sorted(leaves))})\b".encode())
    packages = tuple(sorted({name.partition(".")[0] + "/" for name in modules}))

    def mentions(path: str, text: bytes) -> bool:
        dotted = RELATIVE.findall(text) if path.startswith(packages) else []
        return bool(spelled.search(text)) or any(leaf.search(one) for one in dotted)

    return mentions


def _imports(
    index: BaseIndex, module: str, tree: ast.Module, removed: Collection[str]
) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = index.source_of(module, node)
            names = [source, *(f"{source}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and called_name(node.func) == "import_module" and node.args:
            name = node.args[0]
            names = [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []
        yield from ((node.lineno, name) for name in names if name in removed)  # type: ignore[attr-defined]


def called_name(function: ast.expr) -> str:
    """The last name of what a call calls; '' where it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
