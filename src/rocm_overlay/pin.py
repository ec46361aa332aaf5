# SPDX-License-Identifier: Apache-2.0
"""base.toml: the one pin of everything that the distribution is built from."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError

ACTIONS = ("replace", "remove", "patch")
ARCHITECTURES = ("gfx942", "gfx950")
LOCK_HEADER = "[files]"
LOCK_NOTE = (
    "# SHA-256 of every upstream file that we replace, remove or patch. Written by `rocm-overlay lock`."
)


@dataclass(frozen=True)
class VllmPin:
    """The vLLM source artefact: its version, commit, file name and SHA-256."""

    version: str
    commit: str
    sdist: str
    sha256: str


@dataclass(frozen=True)
class ImagePin:
    """An image reference by tag, and its digest where one is known (else '')."""

    reference: str
    digest: str

    @property
    def pull_reference(self) -> str:
        """The reference to pull: by digest when one is pinned, else by tag."""
        if not self.digest:
            return self.reference
        repository, _, tag = self.reference.rpartition(":")
        return f"{repository if '/' not in tag else self.reference}@{self.digest}"


@dataclass(frozen=True)
class Mirror:
    """Where the pinned images were last copied to, and the UTC date of it; '' when never."""

    location: str
    date: str


@dataclass(frozen=True)
class LockedFile:
    """An upstream file that we touch: path below the source root, what we do to it, its SHA-256."""

    path: str
    action: str
    sha256: str


@dataclass(frozen=True)
class Pin:
    """The content of base.toml."""

    vllm: VllmPin
    images: Mapping[str, ImagePin]
    mirror: Mirror
    packages: Mapping[str, str]
    compile_flydsl: tuple[str, ...]
    files: tuple[LockedFile, ...]

    @classmethod
    def load(cls, path: Path) -> Pin:
        """Read and check a pin file.

        Raises:
            OverlayError: the file is missing, is no TOML, or a field is missing or malformed.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise OverlayError(f"no pin file {path}", fix="run from a checkout of the project") from None
        except tomllib.TOMLDecodeError as error:
            raise OverlayError(
                f"{path.name} is not valid TOML", seen=error, fix="correct that line"
            ) from None
        return cls(
            vllm=_vllm(path, data),
            images=_images(path, data),
            mirror=Mirror(**_strings(path, data, "mirror", ("location", "date"))),
            packages=_table(path, data, "packages"),
            compile_flydsl=tuple(_table(path, data, "compile").get("flydsl", [])),
            files=_files(path, data),
        )

    def locked(self) -> dict[str, LockedFile]:
        """The locked files by path."""
        return {entry.path: entry for entry in self.files}


def _fault(path: Path, field: str, seen: object, wanted: str) -> OverlayError:
    return OverlayError(
        f"{path.name}: field {field} is wrong", seen=repr(seen), wanted=wanted, fix=f"correct {path.name}"
    )


def _table(path: Path, data: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name)
    if not isinstance(value, dict):
        raise _fault(path, f"[{name}]", value, "a table")
    return value


def _strings(path: Path, data: Mapping[str, Any], name: str, fields: Iterable[str]) -> dict[str, str]:
    table = _table(path, data, name)
    for field in fields:
        if not isinstance(table.get(field), str):
            raise _fault(path, f"{name}.{field}", table.get(field), "a string")
    return {field: table[field] for field in fields}


def _vllm(path: Path, data: Mapping[str, Any]) -> VllmPin:
    pin = VllmPin(**_strings(path, data, "vllm", ("version", "commit", "sdist", "sha256")))
    if not re.fullmatch(r"[0-9a-f]{64}", pin.sha256):
        raise _fault(path, "vllm.sha256", pin.sha256, "64 lower-case hex digits")
    return pin


def _images(path: Path, data: Mapping[str, Any]) -> dict[str, ImagePin]:
    table = _table(path, data, "image")
    images = {}
    for name in ARCHITECTURES:
        pin = ImagePin(**_strings(path, table, name, ("reference", "digest")))
        if not re.fullmatch(r"[\w./:-]+:[\w.-]+", pin.reference):
            raise _fault(path, f"image.{name}.reference", pin.reference, "repository:tag")
        if pin.digest and not re.fullmatch(r"sha256:[0-9a-f]{64}", pin.digest):
            raise _fault(path, f"image.{name}.digest", pin.digest, "sha256: and 64 hex digits, or empty")
        images[name] = pin
    return images


def _files(path: Path, data: Mapping[str, Any]) -> tuple[LockedFile, ...]:
    entries = []
    for name, value in data.get("files", {}).items():
        if not isinstance(value, dict) or value.get("action") not in ACTIONS:
            raise _fault(path, f'files."{name}"', value, f"action one of {', '.join(ACTIONS)}, and sha256")
        if not re.fullmatch(r"[0-9a-f]{64}", str(value.get("sha256"))):
            raise _fault(path, f'files."{name}".sha256', value.get("sha256"), "64 lower-case hex digits")
        entries.append(LockedFile(name, value["action"], value["sha256"]))
    return tuple(entries)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a text file in one step: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_lock(path: Path, files: Iterable[LockedFile]) -> None:
    """Replace the [files] section of a pin file; everything before it stays as it is."""
    text = path.read_text(encoding="utf-8")
    head = text.split(LOCK_NOTE, 1)[0].split(f"\n{LOCK_HEADER}", 1)[0].rstrip("\n")
    lines = [head, "", LOCK_NOTE, LOCK_HEADER]
    for entry in sorted(files, key=lambda one: one.path):
        lines.append(f'"{entry.path}" = {{ action = "{entry.action}", sha256 = "{entry.sha256}" }}')
    write_text_atomically(path, "\n".join(lines) + "\n")
