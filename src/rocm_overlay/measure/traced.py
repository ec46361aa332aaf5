# SPDX-License-Identifier: Apache-2.0
"""A server's profiler around a pass: started and stopped over HTTP, its newest trace found in its folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.server import Server

# Writing a trace takes the server a while, in which it answers nothing.
STOP_LIMIT_S = 600.0
FILE_LIMIT_S = 60.0
POLL_S = 0.2
KINDS = ("*.json", "*.json.gz")


@dataclass
class Found:
    """Where the trace is, once the block is left."""

    file: Path = Path()


def _traces(folder: Path) -> dict[Path, tuple[int, int]]:
    found = [file for kind in KINDS for file in folder.rglob(kind)]
    return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in found}


@contextmanager
def traced(server: Server, folder: Path) -> Iterator[Found]:
    """Profile the server during the block; of several ranks' traces, the first by name is found.

    Raises:
        OverlayError: no such folder, a server without a profiler, or no new trace in the folder.
    """
    if not folder.is_dir():
        raise OverlayError(
            f"{server.name} has no folder of traces",
            seen=folder,
            wanted="the folder that its profiler writes into, on this machine",
            fix="serve with --profiler-config, and name its folder",
        )
    before, found = _traces(folder), Found()
    server.get("/start_profile", method="POST")
    try:
        yield found
    finally:
        server.get("/stop_profile", STOP_LIMIT_S, method="POST")
    found.file = _new_trace(server, folder, before)


def _new_trace(server: Server, folder: Path, before: dict[Path, tuple[int, int]]) -> Path:
    deadline, last = time.monotonic() + FILE_LIMIT_S, before
    while True:
        now = _traces(folder)
        fresh = sorted(file for file, state in now.items() if before.get(file) != state)
        # One that still grows is not whole yet.
        if fresh and now == last:
            return fresh[0]
        if time.monotonic() > deadline:
            raise OverlayError(
                f"{server.name} left no trace",
                seen=f"no new file in {folder} in {FILE_LIMIT_S:g} s",
                wanted=" or ".join(KINDS),
                fix="name the folder that its --profiler-config names",
            )
        last = now
        time.sleep(POLL_S)
