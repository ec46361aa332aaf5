# SPDX-License-Identifier: Apache-2.0
"""FlyDSL kernels on the simulator: compile a launcher for an architecture without a GPU, keep its kernel."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .program import Kernel, load


def rocm_path() -> Path:
    """A folder with llvm/bin/ld.lld, where FlyDSL looks for its linker; made in the cache if need be."""
    if (existing := os.environ.get("ROCM_PATH")) and (Path(existing) / "llvm/bin/ld.lld").exists():
        return Path(existing)
    linker = next((p for name in ("ld.lld", "ld.lld-19", "ld.lld-20") if (p := shutil.which(name))), None)
    if linker is None:
        raise RuntimeError("no ld.lld on the PATH: FlyDSL cannot link code objects")
    root = Path(os.environ.get("CDNASIM_CACHE", Path.home() / ".cache" / "cdnasim")) / "rocm"
    (root / "llvm/bin").mkdir(parents=True, exist_ok=True)
    link = root / "llvm/bin/ld.lld"
    if not link.exists():
        link.symlink_to(linker)
    return root


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {k: os.environ.get(k) for k in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for k, v in before.items():
            if v is None:
                del os.environ[k]
            else:
                os.environ[k] = v


def compile_kernel(launch: Callable[..., Any], num_args: int, arch: str) -> Kernel:
    """The one kernel behind a ``flyc.jit`` launcher whose ``num_args`` arguments are all integers
    (addresses and
    scalars). Its values do not matter: nothing is launched."""
    with tempfile.TemporaryDirectory() as work:
        settings = {
            "ARCH": arch,
            "COMPILE_ONLY": "1",
            "ROCM_PATH": str(rocm_path()),
            "FLYDSL_DUMP_IR": "1",
            "FLYDSL_DUMP_DIR": work,
            "FLYDSL_RUNTIME_CACHE_DIR": work + "/cache",
            "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
        }
        with _environment(**settings):
            launch(*[0] * num_args)
        found = list(Path(work).glob("*/*_final_isa.s"))
        if len(found) != 1:
            raise RuntimeError(f"{len(found)} assembly files from one launcher")
        return load(found[0].read_text(), arch, found[0].parent.name + ".s").kernel()
