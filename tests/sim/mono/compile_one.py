# SPDX-License-Identifier: Apache-2.0
"""Compile one mono kernel of ours for an architecture without a GPU; a process of its own.

python compile_one.py OVERLAY_VLLM OUT_STEM ARCH ROWS TP EXPERTS PICKS
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path


def stub_packages(overlay: Path) -> None:
    """Kernel sources import nothing of the serving engine above them; only the packages' paths are wanted."""
    for name in (
        "vllm",
        "vllm.models",
        "vllm.models.common",
        "vllm.models.common.amd",
        "vllm.models.deepseek_v41",
        "vllm.models.deepseek_v41.amd",
        "vllm.models.deepseek_v41.amd.mono",
        "vllm.models.deepseek_v41.amd.mono.stages",
        "vllm.models.deepseek_v41.amd.mono.kernels",
    ):
        module = types.ModuleType(name)
        module.__path__ = [str(overlay.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module


def main() -> None:
    overlay, stem, arch, rows, tp, experts, picks = sys.argv[1:]
    out = Path(stem)
    work = Path(tempfile.mkdtemp(dir=out.parent))
    os.environ.update(
        ARCH=arch,
        COMPILE_ONLY="1",
        FLYDSL_DUMP_IR="1",
        FLYDSL_DUMP_DIR=str(work),
        FLYDSL_RUNTIME_CACHE_DIR=str(work / "cache"),
        FLYDSL_RUNTIME_ENABLE_CACHE="0",
    )
    stub_packages(Path(overlay))
    mono = "vllm.models.deepseek_v41.amd.mono"
    ffn = importlib.import_module(mono + ".kernels.ffn")
    geometry = importlib.import_module(mono + ".geometry")
    gfx950 = importlib.import_module("vllm.models.common.amd.persistent.isa.gfx950")
    launch = ffn.build(geometry.FfnGeometry(int(rows), int(tp), int(experts), int(picks)), gfx950.Gfx950())
    names = list(ffn.FfnArguments.__annotations__)
    launch(ffn.FfnArguments(**dict.fromkeys(names, 0)))
    found = list(work.glob("*/*_final_isa.s"))
    if len(found) != 1:
        raise SystemExit(f"{len(found)} assembly files in {work}")
    shutil.move(found[0], out.with_suffix(".s"))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
