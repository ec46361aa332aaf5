# SPDX-License-Identifier: Apache-2.0
"""A file of JSON lines that only grows: each line is on disk before the next one is made.

What a kill left of a last line is set aside in a ``.torn`` file beside it when the file is next opened for
writing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.textio import read_text

TORN_SUFFIX = ".torn"


def read_lines(file: Path) -> Iterator[tuple[str, object]]:
    """Every whole line as its place, for errors, and its value.

    Raises:
        OverlayError: no such file, or a line that is no JSON.
    """
    whole, _, _ = read_text(file, str(file)).rpartition("\n")
    for number, line in enumerate(whole.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            yield where, json.loads(line)
        except ValueError as error:
            raise OverlayError(
                f"{where} is no JSON", seen=error, wanted="one JSON map", fix="leave the line out"
            ) from None


def append_line(file: Path, line: str) -> None:
    """Add a line, on disk when this returns.

    Raises:
        OverlayError: it cannot be written, as on a full disk; the file then ends where it did before.
    """
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("ab") as output:
            output.write(line.encode() + b"\n")
            output.flush()
            os.fsync(output.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(file, size)
        raise OverlayError(
            f"{file} cannot be written",
            seen=error.strerror or error,
            wanted="room for another line",
            fix="free space on its disk, or correct its permissions",
        ) from None


def set_torn_line_aside(file: Path) -> str:
    """Cut a last line without its end off; its text, empty where there is none."""
    if not file.exists():
        return ""
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return ""
    torn = content[end:]
    with file.with_name(file.name + TORN_SUFFIX).open("ab") as aside:
        aside.write(torn + b"\n")
    os.truncate(file, end)
    return torn.decode("utf-8", errors="replace")
