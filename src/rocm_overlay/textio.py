# SPDX-License-Identifier: Apache-2.0
"""Reading and replacing text files, with errors that name the file."""

from __future__ import annotations

import os
from pathlib import Path

from rocm_overlay.errors import OverlayError


def read_text(path: Path, name: str) -> str:
    """A UTF-8 text file's content; ``name`` is what errors call it.

    Raises:
        OverlayError: the file is missing, cannot be read or is not UTF-8.
    """
    try:
        return decode(path.read_bytes(), name)
    except FileNotFoundError:
        raise OverlayError(f"{name} is missing", seen=path, fix="restore it, or correct its path") from None
    except OSError as error:
        raise OverlayError(
            f"{name} cannot be read",
            seen=error.strerror or error,
            wanted="a readable file",
            fix=f"correct the permissions of {path}",
        ) from None


def log_end(log: Path, lines: int = 8) -> str:
    """What an error says a log ends with: its last ``lines``, indented."""
    tail = log.read_text(errors="replace").splitlines()[-lines:]
    return "its log ends:\n    " + "\n    ".join(tail or ["(empty)"])


def decode(content: bytes, name: str) -> str:
    """Bytes as UTF-8 text.

    Raises:
        OverlayError: they are not UTF-8, or hold a zero byte.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OverlayError(
            f"{name} is not UTF-8 text",
            seen=f"byte {content[error.start]:#04x} at position {error.start}",
            wanted="UTF-8",
            fix=f"save {name} as UTF-8",
        ) from None
    if "\0" in text:
        raise OverlayError(f"{name} holds a zero byte", wanted="text", fix="restore it from the repository")
    return text


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a text file in one step: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
