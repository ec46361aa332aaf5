# SPDX-License-Identifier: Apache-2.0
"""A worker process in which vLLM is importable, the platform is AMD's and Triton interprets its kernels.

Triton decides when a kernel is defined whether to interpret it, vLLM decides its platform once a process,
and importing either costs seconds. A test module therefore keeps one worker and calls functions in it by
name, with arguments and results that JSON can hold::

    with Worker(tree) as worker:
        assert worker.call("tests.swa_cases:compare", 1, drafts=5, noncausal=False) == []

The worker loads vLLM's modules one by one (``bare_vllm``), or vLLM as it is with ``whole=True``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

HARNESS = Path(__file__).resolve().parent
ROOT = HARNESS.parents[1]


class WorkerError(AssertionError):
    """A call that raised in the worker, or a worker that ended: the message holds its traceback."""


class Worker:
    """The process, started at once and ended with the ``with`` block.

    Args:
        tree: the folder that holds ``vllm/``.
        arch: the architecture that the platform reports.
        whole: import vLLM itself, with all it needs, in place of single modules.
    """

    def __init__(self, tree: Path, arch: str = "gfx950", *, whole: bool = False) -> None:
        paths = [str(ROOT), str(ROOT / "src"), str(HARNESS), *([str(tree)] if whole else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.interpreter", str(tree), arch, str(int(whole))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Run ``module:name`` in the worker and return its result.

        Raises:
            WorkerError: the function raised, or the worker ended.
        """
        try:
            print(json.dumps([function, args, kwargs]), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerError(f"the worker ended with status {self._process.wait()}") from None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the worker ended in {function} with status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{function} raised in the worker:\n{reply['error']}")
        return reply["result"]

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A worker that ended early leaves the last request unsent.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _resolve(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer each line of ``requests`` until they end."""
    for line in requests:
        try:
            function, args, kwargs = json.loads(line)
            reply = {"result": _resolve(function)(*args, **kwargs)}
            text = json.dumps(reply)
        except Exception:
            text = json.dumps({"error": traceback.format_exc()})
        print(text, file=replies, flush=True)


def main(arguments: list[str]) -> None:
    tree, arch, whole = arguments
    # What vLLM prints must not come between the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if int(whole):
        importlib.import_module("fake_rocm").install(arch)
    else:
        importlib.import_module("bare_vllm").install(tree, arch)
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main(sys.argv[1:])
