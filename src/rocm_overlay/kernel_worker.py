# SPDX-License-Identifier: Apache-2.0
"""A process that compiles kernels, one JSON line in and one out for each.

    python -m rocm_overlay.kernel_worker OVERLAY FOLDER

OVERLAY holds ``vllm/`` with the kernel sources, FOLDER is the kernel cache to fill. A line in is ``{"arch",
"kernel", "tp", "experts", "picks", "rows"}``; a line out holds the kernel's name, whether it was compiled,
its resources, or ``error``. It is a process of its own because a compiler may end its process.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import time
import types
from pathlib import Path
from typing import Any

from rocm_overlay.code_object import UnreadableCodeObject, read_module

MONO = "vllm.models.deepseek_v41.amd.mono"
PERSISTENT = "vllm.models.common.amd.persistent"


def stub_packages(overlay: Path) -> None:
    """Packages above the kernels import the serving engine, which no compilation needs: only their folders
    are wanted."""
    name = ""
    for part in (*MONO.split("."), None):
        if name:
            module = types.ModuleType(name)
            module.__path__ = [str(overlay.joinpath(*name.split(".")))]
            sys.modules[name] = module
        name = f"{name}.{part}".lstrip(".")


class Compiler:
    """Compiles into one kernel cache."""

    def __init__(self, overlay: Path, folder: Path) -> None:
        stub_packages(overlay)
        self.builds = importlib.import_module(f"{MONO}.builds")
        cache = importlib.import_module(f"{PERSISTENT}.kernel_cache")
        self.errors: type[Exception] = importlib.import_module(f"{PERSISTENT}.build").KernelBuildError
        self.cache = cache.KernelCache(folder)

    def compile(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """What came of one kernel."""
        started = time.monotonic()
        try:
            kind = wanted["kernel"]
            routing = {"experts": wanted["experts"], "picks": wanted["picks"]} if wanted["experts"] else {}
            geometry = self.builds.KINDS[kind].geometry(wanted["rows"], wanted["tp"], **routing)
            build = self.builds.kernel_build(kind, geometry, wanted["arch"])
            before = self.cache.counters.compiled
            self.cache.launcher(build)
            entry = self.cache.find(build)
            resources = read_entry(entry, build.name)
        except (self.errors, UnreadableCodeObject, ValueError) as error:
            return {"error": str(error)}
        return {
            "name": build.name,
            "compiled": self.cache.counters.compiled > before,
            "seconds": round(time.monotonic() - started, 2),
            "resources": resources,
        }


def read_entry(entry: Path, kernel: str) -> dict[str, int]:
    """The resources of a cache entry's kernel. The file is this machine's own: reading it runs its pickle."""
    (file,) = entry.rglob("*.pkl")
    with file.open("rb") as opened:
        artefact = pickle.load(opened)
    return read_module(artefact.ir, kernel).as_dict()


def main() -> None:
    """Answer each line of the standard input."""
    overlay, folder = map(Path, sys.argv[1:])
    # The compiler prints to the standard output; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    compiler = Compiler(overlay, folder)
    for line in sys.stdin:
        print(json.dumps(compiler.compile(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
