# SPDX-License-Identifier: Apache-2.0
"""Compile one of the base's mono kernels and write its assembly and sizes (a process of its own per
architecture: the base fixes the architecture when it is imported).

    python compile_one.py BASE_VLLM_DIR OUT_DIR KIND ROWS TP ARCH RATIO
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path


def main() -> None:
    base, out, kind, rows, tp, arch, ratio = sys.argv[1:]
    work = Path(tempfile.mkdtemp(dir=out))
    os.environ.update(
        ARCH=arch,
        COMPILE_ONLY="1",
        FLYDSL_DUMP_IR="1",
        FLYDSL_DUMP_DIR=str(work),
        FLYDSL_RUNTIME_CACHE_DIR=str(work / "cache"),
        FLYDSL_RUNTIME_ENABLE_CACHE="0",
    )
    sys.path.insert(0, str(Path(__file__).parent / "shim"))
    # The packages above the kernels import the serving engine; only their paths are wanted.
    for name in ("vllm", "vllm.models", "vllm.models.deepseek_v41", "vllm.models.deepseek_v41.amd"):
        module = types.ModuleType(name)
        module.__path__ = [str(Path(base, *name.split(".")[1:]))]
        sys.modules[name] = module
    from vllm.models.deepseek_v41.amd.mono import layer

    build = layer.MonoBuild(int(rows), int(tp), int(ratio))
    launch = {"k1": layer.build_mono_k1, "k2": layer.build_mono_k2, "ffn": layer.build_mono_ffn}[kind](build)
    names = [p for p in inspect.signature(getattr(launch, "func", launch)).parameters if p != "stream"]
    launch(*[0] * len(names))
    found = list(work.glob("*/*_final_isa.s"))
    if len(found) != 1:
        raise SystemExit(f"{len(found)} assembly files in {work}")
    sizes = {
        "arguments": names,
        "scratch_bytes": layer.scratch_bytes(int(rows), int(tp)),
        "epoch_words": layer.EPOCH_WORDS,
        "peer_half_bytes": layer.peer_half_bytes(int(tp)),
        "regions": layer.scratch_layout(int(rows), int(tp)),
    }
    stem = Path(out) / f"{kind}-{rows}-{tp}-{arch}-{ratio}"
    stem.with_suffix(".json").write_text(json.dumps(sizes))
    shutil.move(found[0], stem.with_suffix(".s"))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
