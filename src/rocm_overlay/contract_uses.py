# SPDX-License-Identifier: Apache-2.0
"""Which names of the base our overlay files use, read from their syntax trees.

Seen are imports, attributes of imported modules and classes, methods that a subclass overrides, and
what is read of a parameter or variable whose annotation names a class of the base: the fields of
that class, and of the classes of those fields. What a file reaches in another way is for the
reviewed list.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rocm_overlay.base_index import BaseIndex, Found
from rocm_overlay.overlay import Overlay


@dataclass(frozen=True, order=True)
class Use:
    """One name of the base: its module, its name there, the member of a class where it is one.

    ``called`` says that it is called by its own name, so that how a class is made matters.
    """

    module: str
    name: str
    member: str = ""
    called: bool = False

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.name, self.member) if part)


@dataclass
class _File:
    """One overlay file while it is read."""

    index: BaseIndex
    module: str
    ours: frozenset[str]
    imports: dict[str, Use] = field(default_factory=dict)
    uses: set[Use] = field(default_factory=set)


def find_uses(overlay: Overlay, index: BaseIndex) -> dict[Use, list[str]]:
    """The base's names that the overlay's Python files use, each with the files that do.

    Names of modules that the overlay itself provides are its own affair and left out.
    """
    ours = {file.path for file in overlay.files if file.path.endswith(".py")}
    modules = frozenset(path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in ours)
    found: dict[Use, list[str]] = {}
    for file in sorted(overlay.files, key=lambda one: one.path):
        if file.path in ours:
            module = file.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            reader = _File(index, module, modules)
            _read(reader, ast.parse(file.content), file.path.endswith("/__init__.py"))
            for use in reader.uses - {replace(one, called=False) for one in reader.uses if one.called}:
                found.setdefault(use, []).append(file.path)
    return dict(sorted(found.items()))


def _read(file: _File, tree: ast.Module, package: bool) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            _import_from(file, node, package)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm" and alias.asname and alias.name not in file.ours:
                    file.imports[alias.asname] = Use(alias.name, "")
                    file.uses.add(Use(alias.name, ""))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            _overrides(file, node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            _attribute(file, node.value.id, node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in file.imports:
            file.uses.add(replace(file.imports[node.func.id], called=True))
    for scope in _scopes(tree):
        _read_annotated(file, scope)


def _import_from(file: _File, node: ast.ImportFrom, package: bool) -> None:
    source = node.module or ""
    if node.level:
        parts = file.module.split(".") if package else file.module.split(".")[:-1]
        parts = parts[: len(parts) - (node.level - 1)]
        source = ".".join([*parts, *([node.module] if node.module else [])])
    if source.split(".")[0] != "vllm" or source in file.ours:
        return
    for alias in node.names:
        whole = f"{source}.{alias.name}"
        if whole in file.ours:
            continue
        found = file.index.resolve(source, alias.name)
        use = Use(whole, "") if found and found.node is None else Use(source, alias.name)
        file.imports[alias.asname or alias.name] = use
        file.uses.add(use)


def _attribute(file: _File, owner: str, name: str) -> None:
    use = file.imports.get(owner)
    if use is None or name.startswith("__"):
        return
    if not use.name:
        file.uses.add(Use(use.module, name))
        return
    found = file.index.resolve(use.module, use.name)
    if found is None or not isinstance(found.node, ast.ClassDef):
        return
    if file.index.member(found, name) or file.index.is_whole(found):
        file.uses.add(Use(use.module, use.name, name))


def _overrides(file: _File, node: ast.ClassDef) -> None:
    for base in node.bases:
        use = file.imports.get(base.id) if isinstance(base, ast.Name) else None
        found = file.index.resolve(use.module, use.name) if use and use.name else None
        if use is None or found is None or not isinstance(found.node, ast.ClassDef):
            continue
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and file.index.member(
                found, child.name
            ):
                file.uses.add(Use(use.module, use.name, child.name))


def _scopes(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _read_annotated(file: _File, scope: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """What a function reads of its parameters and variables that are annotated with a class of the base."""
    arguments = scope.args
    annotated: dict[str, Use] = {}
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if one.annotation is not None and (use := _class_use(file, one.annotation)):
            annotated[one.arg] = use
    for node in ast.walk(scope):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if use := _class_use(file, node.annotation):
            annotated[node.target.id] = use
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            _chain(file, node, annotated)


def _class_use(file: _File, annotation: ast.expr) -> Use | None:
    """The imported class that an annotation names, through quotes and ``| None``."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return _class_use(file, ast.parse(annotation.value, mode="eval").body)
        except SyntaxError:
            return None
    if isinstance(annotation, ast.BinOp):
        return _class_use(file, annotation.left)
    return file.imports.get(annotation.id) if isinstance(annotation, ast.Name) else None


def _chain(file: _File, node: ast.Attribute, annotated: Mapping[str, Use]) -> None:
    names: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        names.insert(0, value.attr)
        value = value.value
    use = annotated.get(value.id) if isinstance(value, ast.Name) else None
    found = file.index.resolve(use.module, use.name) if use and use.name else None
    for name in names:
        if found is None or not isinstance(found.node, ast.ClassDef) or name.startswith("__"):
            return
        member = file.index.member(found, name)
        if member is None and not file.index.is_whole(found):
            return
        file.uses.add(Use(found.module, found.node.name, name))
        found = _type_of(file.index, member)


def _type_of(index: BaseIndex, member: Found | None) -> Found | None:
    """The class that a field's annotation or default factory names."""
    if member is None or not isinstance(member.node, ast.AnnAssign):
        return None
    return index.resolve_expression(member.module, member.node.annotation)
