# SPDX-License-Identifier: Apache-2.0
"""The base's mono kernels, compiled once each and cached outside the tree."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdnasim.program import Kernel, load
from rocm_overlay.project import Project

HERE = Path(__file__).parent
BASE = Project.find().base / "vllm"


def rocm_path(cache: Path) -> Path:
    """A folder with llvm/bin/ld.lld, as FlyDSL looks for under ROCM_PATH."""
    linker = next((p for name in ("ld.lld", "ld.lld-19", "ld.lld-20") if (p := shutil.which(name))), None)
    if linker is None:
        raise RuntimeError("no ld.lld on the PATH: FlyDSL cannot link code objects")
    folder = cache / "rocm" / "llvm" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "ld.lld"
    if not link.exists():
        link.symlink_to(linker)
    return cache / "rocm"


@dataclass
class BaseKernel:
    """A compiled kernel and the sizes of what its runner allocates, in bytes or 32-bit words."""

    kernel: Kernel
    arguments: list[str]
    scratch_bytes: int
    epoch_words: int
    peer_half_bytes: int
    regions: dict[str, list[int]]


def source_hash() -> str:
    """Of what a compiled kernel depends on: the base's sources, our shim, the compiler's version."""
    import flydsl

    digest = hashlib.sha256()
    shim = [HERE / "compile_one.py", *sorted((HERE / "shim").rglob("*.py"))]
    for file in [*sorted((BASE / "models/deepseek_v41/amd/mono").rglob("*.py")), *shim]:
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(flydsl.__version__.encode())
    return digest.hexdigest()[:16]


def compiled(kind: str, rows: int, tp: int, arch: str, ratio: int = 1) -> BaseKernel:
    """kind "k1", "k2" or "ffn"."""
    cache = Path(os.environ.get("CDNASIM_CACHE", Path.home() / ".cache" / "cdnasim"))
    folder = cache / f"base-{source_hash()}"
    stem = folder / f"{kind}-{rows}-{tp}-{arch}-{ratio}"
    if not stem.with_suffix(".s").exists():
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [
                sys.executable,
                str(HERE / "compile_one.py"),
                str(BASE),
                str(folder),
                kind,
                str(rows),
                str(tp),
                arch,
                str(ratio),
            ],
            env=os.environ | {"ROCM_PATH": str(rocm_path(cache))},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{kind} {rows} rows TP{tp} {arch} does not compile:\n{done.stderr[-3000:]}")
    sizes: dict[str, Any] = json.loads(stem.with_suffix(".json").read_text())
    program = load(stem.with_suffix(".s").read_text(), arch, str(stem.with_suffix(".s")))
    return BaseKernel(program.kernel(), **sizes)
