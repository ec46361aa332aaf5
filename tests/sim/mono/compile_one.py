# SPDX-License-Identifier: Apache-2.0
"""Compile one mono kernel of ours for an architecture without a GPU; a process of its own.

python compile_one.py OVERLAY_VLLM OUT_STEM ARCH KIND NAME=NUMBER..   (the geometry's fields)
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

# Module below kernels, geometry, argument struct.
KINDS = {
    "ffn": ("ffn", "FfnGeometry", "FfnArguments"),
    "front": ("attention_front", "FrontGeometry", "FrontArguments"),
    "back": ("attention_back_ffn", "BackGeometry", "BackArguments"),
}


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
    overlay, stem, arch, kind, *fields = sys.argv[1:]
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
    module, shape, struct = KINDS[kind]
    kernel = importlib.import_module(f"{mono}.kernels.{module}")
    geometry = getattr(importlib.import_module(mono + ".geometry"), shape)
    isa = importlib.import_module(f"vllm.models.common.amd.persistent.isa.{arch}")
    values = {name: int(value) for name, value in (field.split("=") for field in fields)}
    launch = kernel.build(geometry(**values), getattr(isa, arch.capitalize())())
    arguments = getattr(kernel, struct)
    launch(arguments(**dict.fromkeys(arguments.__annotations__, 0)))
    found = list(work.glob("*/*_final_isa.s"))
    if len(found) != 1:
        raise SystemExit(f"{len(found)} assembly files in {work}")
    shutil.move(found[0], out.with_suffix(".s"))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
