# SPDX-License-Identifier: Apache-2.0
"""Build keys: what a compiled kernel was made from, as a short digest in its name and in its folder's.

A key covers the kernel's parameters, its architecture, every source file that its module imports, and the
toolchain. FlyDSL's own key covers its compiler and the functions of the launcher's folder; sources in other
folders are not in it, so a cache that relied on it alone would run old stages under a new kernel.

Nothing here imports torch or the rest of the serving engine: kernels are also compiled where neither is.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import regex as re

# Changes whenever the layout of a cache entry does.
FORMAT = 1
DIGEST_LENGTH = 16
# Sources below this package are the kernels' own; everything else they import is the toolchain's.
SOURCE_PACKAGE = "vllm.models"
# The folder that holds ``vllm/``.
ROOT = Path(__file__).resolve().parents[5]
# What changes FlyDSL's code generation without being part of it.
CODEGEN_VARIABLES = (
    "FLYDSL_COMPILE_OPT_LEVEL",
    "FLYDSL_COMPILE_LLVM_DIR",
    "FLYDSL_DEBUG_ENABLE_DEBUG_INFO",
)


class KernelBuildError(RuntimeError):
    """A kernel cannot be built, kept or found. The message says what to do."""


@dataclass(frozen=True)
class Toolchain:
    """What compiles: ``digest`` covers every installed file of FlyDSL, its LLVM included."""

    flydsl: str
    llvm: str
    digest: str


@functools.cache
def toolchain() -> Toolchain:
    """The installed toolchain.

    Raises:
        KernelBuildError: FlyDSL is not installed, or its list of files is gone.
    """
    try:
        found = metadata.distribution("flydsl")
    except metadata.PackageNotFoundError as error:
        raise KernelBuildError("FlyDSL is not installed: it compiles the mono kernels") from error
    # Compiled Python files have no hash there, and the installer's own notes differ between installs.
    lines = (found.read_text("RECORD") or "").splitlines()
    files = sorted(line for line in lines if ",sha256=" in line and ".dist-info/" not in line)
    if not files:
        raise KernelBuildError(
            f"FlyDSL {found.version} has no RECORD of its files, by which its kernels are known: install it "
            "as a wheel"
        )
    llvm = re.search(r"libFlyPythonCAPI\.so\.([\w.]+),", "\n".join(files))
    return Toolchain(
        found.version, llvm[1] if llvm else "unknown", hashlib.sha256("\n".join(files).encode()).hexdigest()
    )


def _source_file(module: str, root: Path) -> Path | None:
    """The file of a module below ``root``, None where there is none."""
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def _imports(module: str, file: Path) -> set[str]:
    """Every module that ``module`` may import, by name; names of things in a module are dropped later."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{name.name}" for name in node.names}
    return found


@functools.cache
def sources(module: str, root: Path = ROOT) -> tuple[tuple[str, Path], ...]:
    """The modules below ``SOURCE_PACKAGE`` that ``module`` is made of, itself included, by name.

    Packages are in it only where something is imported from them, not for being above a module.

    Raises:
        KernelBuildError: there is no such module.
    """
    if _source_file(module, root) is None:
        raise KernelBuildError(f"no kernel source {module} below {root}")
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _source_file(name, root)
        if name in found or file is None:
            continue
        found[name] = file
        waiting += [one for one in _imports(name, file) if one.startswith(SOURCE_PACKAGE + ".")]
    # An empty package file has no part in a kernel, and where only a stub of it is installed, none exists.
    return tuple(sorted((name, file) for name, file in found.items() if file.name != "__init__.py"))


@functools.cache
def source_digest(modules: tuple[str, ...], root: Path = ROOT) -> str:
    """SHA-256 over the names and contents of the ``sources`` of ``modules``."""
    digest = hashlib.sha256()
    for name, file in sorted({one for module in modules for one in sources(module, root)}):
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Build:
    """One kernel to build.

    Args:
        kernel: its short name.
        modules: the modules that define it; what they import is followed.
        arch: the GPU architecture, such as gfx950.
        parameters: what it is specialised for, by name.
        make: gives the launcher and arguments of the right types, from the kernel's full name. It imports
            FlyDSL.
    """

    kernel: str
    modules: tuple[str, ...]
    arch: str
    parameters: tuple[tuple[str, int], ...]
    make: Callable[[str], tuple[Any, tuple[Any, ...]]]

    @property
    def title(self) -> str:
        """What it is, for people: the name without the digest."""
        values = "_".join(f"{name}{value}" for name, value in self.parameters)
        return f"{self.kernel}_{self.arch}_{values}"

    @functools.cached_property
    def digest(self) -> str:
        """What it is made from."""
        settings = {name: os.environ[name] for name in CODEGEN_VARIABLES if os.environ.get(name)}
        parts = (FORMAT, self.title, source_digest(self.modules), toolchain().digest, settings)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:DIGEST_LENGTH]

    @property
    def name(self) -> str:
        """The kernel's name in the code object, and its folder's in a cache."""
        return f"{self.title}_{self.digest}"
