# SPDX-License-Identifier: Apache-2.0
"""Our kernel sources in the tests: imported without the engine, compiled once a build, mutated."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from cdnasim.flydsl_front import rocm_path
from cdnasim.program import Kernel, load

from .compile_one import stub_packages

HERE = Path(__file__).parent
OVERLAY = HERE.parents[2] / "overlay" / "vllm"
MONO = "models/deepseek_v41/amd/mono"
PERSISTENT = "models/common/amd/persistent"
FOLDERS = (PERSISTENT, MONO, f"{MONO}/kernels", f"{MONO}/stages", f"{PERSISTENT}/isa")


@dataclass(frozen=True)
class Modules:
    """The parts of the kernel sources that need no GPU compiler."""

    geometry: Any
    regions: Any
    handoff: Any
    epoch: Any
    ffn: Any  # numbers of the stages
    front: Any
    back: Any
    formats: Any
    reference: Any
    attention: Any  # the reference's
    stage_table: Any
    timeline: Any


@lru_cache(maxsize=1)
def modules() -> Modules:
    """Imported from the overlay, without the packages above them."""
    saved = {k: v for k, v in sys.modules.items() if k == "vllm" or k.startswith("vllm.")}
    for name in saved:
        del sys.modules[name]
    try:
        stub_packages(OVERLAY)
        mono, persistent = "vllm.models.deepseek_v41.amd.mono", "vllm.models.common.amd.persistent"
        return Modules(
            *(
                importlib.import_module(name)
                for name in (
                    f"{mono}.geometry",
                    f"{mono}.regions",
                    f"{persistent}.handoff",
                    f"{persistent}.epoch",
                    f"{mono}.kernels.ffn",
                    f"{mono}.kernels.attention_front",
                    f"{mono}.kernels.attention_back_ffn",
                    f"{mono}.reference.formats",
                    f"{mono}.reference.ffn",
                    f"{mono}.reference.attention",
                    f"{mono}.stage_table",
                    f"{persistent}.timeline",
                )
            )
        )
    finally:
        for name in [k for k in sys.modules if k == "vllm" or k.startswith("vllm.")]:
            del sys.modules[name]
        sys.modules.update(saved)


def source_files(overlay: Path) -> list[Path]:
    """What a kernel is compiled from."""
    return [file for folder in FOLDERS for file in sorted((overlay / folder).glob("*.py"))]


@cache
def source_hash(overlay: Path) -> str:
    """Content of the kernel sources and of what compiles them here, as a process first saw them: a run never
    mixes builds of sources that are edited meanwhile."""
    import flydsl

    digest = hashlib.sha256(flydsl.__version__.encode())
    for file in source_files(overlay):
        digest.update(str(file.relative_to(overlay)).encode() + file.read_bytes())
    digest.update((HERE / "compile_one.py").read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where assembly is kept between runs."""
    return Path(os.environ.get("CDNASIM_CACHE", Path.home() / ".cache" / "cdnasim"))


def assembly(
    rows: int, tp: int, arch: str = "gfx950", experts: int = 384, picks: int = 6, overlay: Path = OVERLAY
) -> Path:
    """The FFN launch's assembly of one build."""
    return assembly_of("ffn", arch, overlay, rows=rows, tp=tp, experts=experts, picks=picks)


# Builds that this process has asked for, by architecture, kind and fields, with whose sources.
ASKED: dict[str, Path] = {}


def note_asked(build: str, overlay: Path) -> None:
    """A build with a planted fault is never taken for the plain one."""
    if ASKED.get(build, OVERLAY) == OVERLAY:
        ASKED[build] = overlay


def build_name(kind: str, arch: str, fields: dict[str, int]) -> str:
    """A build in words that ``parse_build`` reads."""
    return "-".join([kind, arch, *(f"{name}{int(value)}" for name, value in fields.items())])


def parse_build(name: str) -> tuple[str, str, dict[str, int]]:
    """Kind, architecture and fields of a ``build_name``."""
    kind, arch, *fields = name.split("-")
    pairs = [re.fullmatch(r"([a-z_]+)(\d+)", field) for field in fields]
    return kind, arch, {pair[1]: int(pair[2]) for pair in pairs if pair}


def assembly_of(kind: str, arch: str = "gfx950", overlay: Path = OVERLAY, **fields: int) -> Path:
    """The assembly of one build of a kind (``compile_one.KINDS``), from the cache if its sources are
    unchanged; ``fields``: its geometry's."""
    what = build_name(kind, arch, fields)
    note_asked(what, overlay)
    stem = cache_folder() / f"mono-{source_hash(overlay)}" / what
    text = stem.with_suffix(".s")
    if not text.exists():
        stem.parent.mkdir(parents=True, exist_ok=True)
        # Test processes may compile the same build at once: each has its own file till it is whole.
        work = Path(tempfile.mkdtemp(dir=stem.parent))
        done = subprocess.run(
            [sys.executable, str(HERE / "compile_one.py"), str(overlay), str(work / "kernel"), arch, kind]
            + [f"{name}={int(value)}" for name, value in fields.items()],
            env=os.environ | {"ROCM_PATH": str(rocm_path())},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            shutil.rmtree(work)
            raise RuntimeError(f"{what} does not compile:\n{done.stderr[-3000:]}")
        (work / "kernel.s").replace(text)
        shutil.rmtree(work)
    return text


def compiled(
    rows: int, tp: int, arch: str = "gfx950", experts: int = 384, picks: int = 6, overlay: Path = OVERLAY
) -> Kernel:
    """The FFN launch's kernel of one build, for the simulator."""
    return compiled_kind("ffn", arch, overlay, rows=rows, tp=tp, experts=experts, picks=picks)


def compiled_kind(kind: str, arch: str = "gfx950", overlay: Path = OVERLAY, **fields: int) -> Kernel:
    """The kernel of one build of a kind, for the simulator."""
    text = assembly_of(kind, arch, overlay, **fields)
    return load(text.read_text(), arch, str(text)).kernel()


def code_hash(kernels: list[Kernel]) -> str:
    """Of the instructions of some builds: what their counts are counts of."""
    digest = hashlib.sha256()
    for kernel in kernels:
        digest.update("\n".join(kernel.texts).encode() + b"\0")
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Edit:
    """Replace ``old``, which occurs exactly once in ``file``, by ``new``."""

    file: str
    old: str
    new: str


def mutated(edits: tuple[Edit, ...]) -> Path:
    """A copy of the kernel sources with ``edits``; the same folder for the same content."""
    contents = {file.relative_to(OVERLAY): file.read_text() for file in source_files(OVERLAY)}
    for edit in edits:
        path = Path(edit.file)
        if (found := contents[path].count(edit.old)) != 1:
            raise ValueError(
                f"{edit.file}: {edit.old!r} occurs {found} times, 1 is wanted: update the mutation"
            )
        contents[path] = contents[path].replace(edit.old, edit.new)
    digest = hashlib.sha256()
    for path, text in contents.items():
        digest.update(str(path).encode() + text.encode())
    folder = cache_folder() / "mutants" / digest.hexdigest()[:16]
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder.parent))
        for path, text in contents.items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_text(text)
        try:
            work.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(work)
    return folder
