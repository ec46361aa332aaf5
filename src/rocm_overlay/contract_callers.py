# SPDX-License-Identifier: Apache-2.0
"""The other direction of the contracts: how the base's files call what the overlay provides.

A base file that passes an argument which ours does not take is found in its syntax tree.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay.base_index import BaseIndex, Found, parameters
from rocm_overlay.overlay import module_name
from rocm_overlay.plan import Sources
from rocm_overlay.removed_imports import mention_of


@dataclass(frozen=True)
class Misfit:
    """A call of a base file that ours does not take."""

    path: str
    line: int
    called: str
    what: str


def find_misfits(sources: Sources, tree: Path) -> list[Misfit]:
    """Calls in the laid tree of functions, classes and class methods of ours that do not fit them."""
    ours = {module_name(file.path) for file in sources.overlay.files if file.path.endswith(".py")}
    own_paths = {file.path for file in sources.overlay.files}
    if not ours:
        return []
    index = BaseIndex(tree)
    mentions = mention_of(ours)
    found: list[Misfit] = []
    for path in sorted((tree / "vllm").rglob("*.py")):
        name = path.relative_to(tree).as_posix()
        if name in own_paths or not mentions(name, path.read_bytes()):
            continue
        module = module_name(name)
        parsed = index.tree(module)
        if parsed is not None:
            imported = _imported(index, module, parsed, ours)
            found += [one for node in ast.walk(parsed) for one in _misfit(index, name, node, imported)]
    return found


def _imported(index: BaseIndex, module: str, tree: ast.Module, ours: set[str]) -> dict[str, Found]:
    """The names that a module imports from ours, or our modules themselves."""
    found: dict[str, Found] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = index.source_of(module, node)
            for alias in node.names:
                own = source in ours or f"{source}.{alias.name}" in ours
                if own and (target := index.resolve(source, alias.name)):
                    found[alias.asname or alias.name] = target
    return found


def _misfit(index: BaseIndex, path: str, node: ast.AST, imported: dict[str, Found]) -> list[Misfit]:
    if not isinstance(node, ast.Call):
        return []
    target = _target(index, node.func, imported)
    if target is None or not isinstance(target.node, ast.FunctionDef):
        return []
    starred = any(isinstance(one, ast.Starred) for one in node.args)
    given = {keyword.arg for keyword in node.keywords}
    if starred or None in given:
        return []
    own = parameters(target.node)
    places = [one for one in own if one.kind in ("either", "positional only")]
    faults = []
    if len(node.args) > len(places) and not any(one.kind == "*" for one in own):
        faults.append(f"{len(node.args)} positional arguments, ours takes {len(places)}")
    unknown = sorted(str(name) for name in given - {one.name for one in own})
    if unknown and not any(one.kind == "**" for one in own):
        faults.append(f"argument {', '.join(unknown)}, which ours does not take")
    filled = {one.name for one in places[: len(node.args)]} | given
    if lacking := [
        one.name for one in own if one.default is None and one.kind[0] != "*" and one.name not in filled
    ]:
        faults.append(f"no {', '.join(lacking)}, which ours needs")
    return [Misfit(path, node.lineno, ast.unparse(node.func), what) for what in faults]


def _target(index: BaseIndex, called: ast.expr, imported: dict[str, Found]) -> Found | None:
    """What is called: an imported function, a class's constructor, or a function of a module or class."""
    if isinstance(called, ast.Name):
        found = imported.get(called.id)
        if found and isinstance(found.node, ast.ClassDef):
            return index.member(found, "__init__")
        return found
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        owner = imported.get(called.value.id)
        if owner is None:
            return None
        if owner.node is None:
            return index.resolve(owner.module, called.attr)
        if isinstance(owner.node, ast.ClassDef):
            member = index.member(owner, called.attr)
            return member if member and _is_static(member) else None
    return None


def _is_static(member: Found) -> bool:
    """Whether a method is called on its class with the very arguments that it takes."""
    decorators = member.node.decorator_list if isinstance(member.node, ast.FunctionDef) else []
    return any(ast.unparse(one) in ("staticmethod", "classmethod") for one in decorators)
