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


# Reads until this process is gone, whose end of the pipe is the only one, and then ends the group.
_GUARD = """
read -r _
kill -s TERM -- "-$1" 2>/dev/null || exit 0
left=$2
while [ "$left" -gt 0 ] && kill -s 0 -- "-$1" 2>/dev/null; do sleep 1; left=$((left - 1)); done
kill -s KILL -- "-$1" 2>/dev/null
"""


class GroupGuard:
    """Ends a process group once this process is gone, even where it was killed.

    A server or client that outlives its session would hold its port and GPUs, and load what the next one
    measures. The group is asked first and killed after ``limit_s`` seconds.

    Args:
        group: the number of the group, its leader's.
    """

    def __init__(self, group: int, limit_s: int) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(group), str(limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        """The group is ended, or is left to run: guard it no more."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


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
