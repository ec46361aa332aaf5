# SPDX-License-Identifier: Apache-2.0
"""Processes that end with this one, and signals that end this one as an interrupt does."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def run_bound(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run``, whose process ends with this one even where this one is killed.

    A test run that outlives its rebase would go on writing into the folder that the next one starts in.

    Args:
        command: the program and its arguments.
        options: as ``subprocess.run`` takes them.
    """
    ours = os.getpid()

    def end_with_parent() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before the kernel was asked.
        if os.getppid() != ours:
            os._exit(1)

    return subprocess.run(command, preexec_fn=end_with_parent, **options)


@contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGTERM end the block as an interrupt does, and SIGINT too where the shell had it ignored.

    A container's end is a SIGTERM, and a job of a script starts with SIGINT ignored: both would leave
    processes and half-done work behind.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
