# SPDX-License-Identifier: Apache-2.0
"""Folders that something is made in before it takes its place, and what is left of those of killed runs."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The folder that holds them may be a user's own (--out, ROCM_OVERLAY_CACHE): only a name that nobody else
# gives may be swept.
NAME = re.compile(r"\.rocm-overlay-[a-z]+-(?P<process>\d+)-\w{8}")


@contextmanager
def staging_folder(beside: Path, label: str) -> Iterator[Path]:
    """A new folder in ``beside``, on the file system of what is to be moved out of it; gone at the end.

    What runs left that were killed is removed first.

    Args:
        beside: a folder that exists.
        label: what it is for, in lower-case letters.
    """
    sweep(beside)
    prefix = f".rocm-overlay-{label}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=beside) as folder:
        yield Path(folder)


def sweep(folder: Path) -> None:
    """Remove the staging folders of processes that are no more."""
    for left in folder.glob(".rocm-overlay-*"):
        match = NAME.fullmatch(left.name)
        if (
            match
            and left.is_dir()
            and not left.is_symlink()
            and not Path(f"/proc/{match['process']}").exists()
        ):
            shutil.rmtree(left, ignore_errors=True)
