# SPDX-License-Identifier: Apache-2.0
"""What a vLLM source defines, read from its syntax trees: names through re-exports, signatures, fields.

Nothing is imported, so that any base can be read on any machine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
MAX_HOPS = 12


@dataclass(frozen=True)
class Found:
    """A name's definition and the module that has it; ``node`` is None for a module itself."""

    module: str
    node: Definition | None
    name: str = ""


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, how it is passed, and its default as source (None without one)."""

    name: str
    kind: str
    default: str | None


class BaseIndex:
    """The package below ``root``, the folder that holds vllm/. Files are read as they are asked for.

    Args:
        root: the folder.
        laid: contents that stand in place of its files, by path.
    """

    def __init__(self, root: Path, laid: Mapping[str, bytes] | None = None) -> None:
        self.root = root
        self._laid = laid or {}
        self._trees: dict[str, ast.Module | None] = {}

    def path_of(self, module: str) -> Path | None:
        """A module's file; None where there is none."""
        stem = self.root / module.replace(".", "/")
        candidates = (stem / "__init__.py", stem.with_name(f"{stem.name}.py"))
        return next((path for path in candidates if self._name(path) in self._laid or path.is_file()), None)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def content(self, name: str) -> bytes:
        """A file's content, by its path from the root."""
        laid = self._laid.get(name)
        return (self.root / name).read_bytes() if laid is None else laid

    def tree(self, module: str) -> ast.Module | None:
        """A module's syntax tree; None where there is no such module, or it does not parse."""
        if module not in self._trees:
            path = self.path_of(module)
            try:
                self._trees[module] = ast.parse(self.content(self._name(path))) if path else None
            except SyntaxError:
                self._trees[module] = None
        return self._trees[module]

    def is_package(self, module: str) -> bool:
        """Whether the module is a package's own file."""
        path = self.path_of(module)
        return path is not None and path.name == "__init__.py"

    def resolve(self, module: str, name: str, hops: int = 0) -> Found | None:
        """Where a module's name is defined, through the modules that it is imported from."""
        tree = self.tree(module)
        if hops > MAX_HOPS:
            return None
        if tree is None:
            # A folder without a file of its own is a package as well.
            return self._module(f"{module}.{name}")
        for node in reversed(list(top_level(tree))):
            if isinstance(node, ast.ImportFrom):
                source = self.source_of(module, node)
                for alias in node.names:
                    starred = alias.name == "*" and source.split(".")[0] == "vllm"
                    if starred and (found := self.resolve(source, name, hops + 1)):
                        return found
                    if (alias.asname or alias.name) == name:
                        found = self.resolve(source, alias.name, hops + 1)
                        return found or self._module(f"{source}.{alias.name}")
            elif name in defined_by(node):
                assert isinstance(node, Definition)
                return Found(module, node, name)
        return self._module(f"{module}.{name}")

    def _module(self, module: str) -> Found | None:
        return Found(module, None) if self.path_of(module) else None

    def source_of(self, module: str, node: ast.ImportFrom) -> str:
        """The absolute name of what a ``from`` import of a module imports from."""
        if not node.level:
            return node.module or ""
        parts = module.split(".") if self.is_package(module) else module.split(".")[:-1]
        parts = parts[: len(parts) - (node.level - 1)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def classes(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """The class and its bases, in the order in which a member is looked up, as far as they are found."""
        yield module, node
        for base in node.bases:
            found = self.resolve_expression(module, base)
            if found and isinstance(found.node, ast.ClassDef) and found.node is not node:
                yield from self.classes(found.module, found.node)

    def resolve_expression(self, module: str, expression: ast.expr) -> Found | None:
        """What a name, attribute, string or optional annotation of a module stands for."""
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            try:
                return self.resolve_expression(module, ast.parse(expression.value, mode="eval").body)
            except SyntaxError:
                return None
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.BitOr):
            return self.resolve_expression(module, expression.left)
        if isinstance(expression, ast.Subscript):
            return self.resolve_expression(module, expression.value)
        if isinstance(expression, ast.Name):
            return self.resolve(module, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.resolve_expression(module, expression.value)
            if owner and owner.node is None:
                return self.resolve(owner.module, expression.attr)
        return None

    def is_whole(self, found: Found) -> bool:
        """Whether every base of a class is in the package: others can bring members that are not seen."""
        assert isinstance(found.node, ast.ClassDef)
        return all(
            self.resolve_expression(module, base) is not None
            for module, node in self.classes(found.module, found.node)
            for base in node.bases
        )

    def member(self, found: Found, name: str) -> Found | None:
        """A class's method, field or property, its bases' included, or an attribute that a method sets."""
        assert isinstance(found.node, ast.ClassDef)
        for module, node in self.classes(found.module, found.node):
            for child in top_level(node):
                if name in defined_by(child) and isinstance(child, Definition):
                    return Found(module, child, name)
            for assignment in set_by_methods(node):
                if name in defined_by(assignment, own=True):
                    return Found(module, assignment, name)
        return None


def top_level(node: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    """The statements that bind names, those under ``if``, ``try`` and ``with`` included."""
    waiting: list[ast.stmt] = list(node.body)
    while waiting:
        statement = waiting.pop(0)
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                waiting += getattr(statement, part, [])
        if isinstance(statement, ast.Try):
            waiting += [child for handler in statement.handlers for child in handler.body]


def defined_by(node: ast.AST, own: bool = False) -> set[str]:
    """The names that a statement defines; with ``own`` those of ``self`` that it sets."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return set() if own else {node.name}
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    names = set()
    for target in [part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]:
        if own and isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            names.add(target.attr)
        elif not own and isinstance(target, ast.Name):
            names.add(target.id)
    return names


def set_by_methods(node: ast.ClassDef) -> Iterator[ast.Assign | ast.AnnAssign]:
    """The assignments in a class's methods."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in ast.walk(method):
                if isinstance(child, ast.Assign | ast.AnnAssign):
                    yield child


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Parameter]:
    """A function's parameters in order; ``self`` and ``cls`` are left out."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    found = []
    for at, (one, default) in enumerate(zip(positional, defaults, strict=True)):
        kind = "positional only" if at < len(arguments.posonlyargs) else "either"
        found.append(Parameter(one.arg, kind, ast.unparse(default) if default else None))
    if found and found[0].name in ("self", "cls"):
        found = found[1:]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, "*", None))
    for one, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(one.arg, "keyword only", ast.unparse(given) if given else None))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, "**", None))
    return found
