# SPDX-License-Identifier: Apache-2.0
"""base.toml: the one pin of everything that the distribution is built from."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.textio import write_text_atomically

ACTIONS = ("replace", "remove", "patch")
ARCHITECTURES = ("gfx942", "gfx950")
SECTIONS = ("vllm", "image", "mirror", "packages", "compile", "files")
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
    """Where an architecture's image was last copied to, and the UTC date of it; '' when never."""

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
    mirrors: Mapping[str, Mirror]
    packages: Mapping[str, str]
    compile_flydsl: tuple[str, ...]
    files: tuple[LockedFile, ...]

    @classmethod
    def load(cls, path: Path) -> Pin:
        """Read and check a pin file.

        Raises:
            OverlayError: the file is missing, is no TOML, or a field is missing, malformed or unknown.
        """
        data = _read(path)
        _check_known(path, "", data, SECTIONS)
        return cls(
            vllm=_vllm(path, data),
            images=_images(path, data),
            mirrors=_mirrors(path, data),
            packages=_packages(path, data),
            compile_flydsl=_compile_flydsl(path, data),
            files=_files(path, data),
        )

    def locked(self) -> dict[str, LockedFile]:
        """The locked files by path."""
        return {entry.path: entry for entry in self.files}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OverlayError(f"no pin file {path}", fix="run from a checkout of the project") from None
    except OSError as error:
        raise OverlayError(
            f"{path} cannot be read", seen=error.strerror, wanted="a readable file", fix=f"correct {path}"
        ) from None
    except UnicodeDecodeError as error:
        raise OverlayError(
            f"{path.name} is not UTF-8",
            seen=f"byte 0x{error.object[error.start]:02x} at offset {error.start}",
            wanted="UTF-8 text",
            fix=f"save {path.name} as UTF-8",
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise OverlayError(f"{path.name} is not valid TOML", seen=error, fix="correct that line") from None


def _fault(path: Path, field: str, seen: object, wanted: str) -> OverlayError:
    return OverlayError(
        f"{path.name}: field {field} is wrong", seen=repr(seen), wanted=wanted, fix=f"correct {path.name}"
    )


def _check_known(path: Path, section: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a name that nothing reads: it is a slip of the pen, and what it meant is then missing."""
    for name in table:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=2)
        raise OverlayError(
            f"{path.name}: unknown {'field' if section else 'section'} {section}{name}",
            seen=name,
            wanted=f"one of {', '.join(known)}",
            fix=f"did you mean {' or '.join(near)}?" if near else f"remove it from {path.name}",
        )


def _table(path: Path, data: Mapping[str, Any], name: str, section: str = "") -> dict[str, Any]:
    value = data.get(name)
    if not isinstance(value, dict):
        raise _fault(path, f"[{section}{name}]", value, "a table")
    return value


def _strings(
    path: Path, data: Mapping[str, Any], name: str, fields: Sequence[str], section: str = ""
) -> dict[str, str]:
    """A table of exactly these string fields."""
    table = _table(path, data, name, section)
    _check_known(path, f"{section}{name}.", table, fields)
    for field in fields:
        if not isinstance(table.get(field), str):
            raise _fault(path, f"{section}{name}.{field}", table.get(field), "a string")
    return {field: table[field] for field in fields}


def _vllm(path: Path, data: Mapping[str, Any]) -> VllmPin:
    pin = VllmPin(**_strings(path, data, "vllm", ("version", "commit", "sdist", "sha256")))
    if not re.fullmatch(r"[0-9a-f]{64}", pin.sha256):
        raise _fault(path, "vllm.sha256", pin.sha256, "64 lower-case hex digits")
    return pin


def _by_architecture(
    path: Path, data: Mapping[str, Any], name: str, fields: Sequence[str]
) -> dict[str, dict[str, str]]:
    table = _table(path, data, name)
    _check_known(path, f"{name}.", table, ARCHITECTURES)
    return {one: _strings(path, table, one, fields, f"{name}.") for one in ARCHITECTURES}


def _images(path: Path, data: Mapping[str, Any]) -> dict[str, ImagePin]:
    images = {}
    for name, values in _by_architecture(path, data, "image", ("reference", "digest")).items():
        pin = ImagePin(**values)
        if not re.fullmatch(r"[\w./:-]+:[\w.-]+", pin.reference):
            raise _fault(path, f"image.{name}.reference", pin.reference, "repository:tag")
        if pin.digest and not re.fullmatch(r"sha256:[0-9a-f]{64}", pin.digest):
            raise _fault(path, f"image.{name}.digest", pin.digest, "sha256: and 64 hex digits, or empty")
        images[name] = pin
    return images


def _mirrors(path: Path, data: Mapping[str, Any]) -> dict[str, Mirror]:
    tables = _by_architecture(path, data, "mirror", ("location", "date"))
    return {name: Mirror(**values) for name, values in tables.items()}


def _packages(path: Path, data: Mapping[str, Any]) -> dict[str, str]:
    packages = _table(path, data, "packages")
    for name, version in packages.items():
        if not isinstance(version, str):
            raise _fault(path, f"packages.{name}", version, "a version as a string")
    return packages


def _compile_flydsl(path: Path, data: Mapping[str, Any]) -> tuple[str, ...]:
    table = _table(path, data, "compile")
    _check_known(path, "compile.", table, ("flydsl",))
    versions = table.get("flydsl", [])
    if not isinstance(versions, list) or not all(isinstance(one, str) for one in versions):
        raise _fault(path, "compile.flydsl", versions, "a list of versions as strings")
    return tuple(versions)


def _files(path: Path, data: Mapping[str, Any]) -> tuple[LockedFile, ...]:
    entries = []
    for name, value in _table(path, {"files": {}, **data}, "files").items():
        if not isinstance(value, dict) or value.get("action") not in ACTIONS:
            raise _fault(path, f'files."{name}"', value, f"action one of {', '.join(ACTIONS)}, and sha256")
        _check_known(path, f'files."{name}".', value, ("action", "sha256"))
        if not re.fullmatch(r"[0-9a-f]{64}", str(value.get("sha256"))):
            raise _fault(path, f'files."{name}".sha256', value.get("sha256"), "64 lower-case hex digits")
        entries.append(LockedFile(name, value["action"], value["sha256"]))
    return tuple(entries)


def write_lock(path: Path, files: Iterable[LockedFile]) -> None:
    """Replace the [files] section of a pin file; everything before it stays as it is."""
    text = path.read_text(encoding="utf-8")
    head = text.split(LOCK_NOTE, 1)[0].split(f"\n{LOCK_HEADER}", 1)[0].rstrip("\n")
    lines = [head, "", LOCK_NOTE, LOCK_HEADER]
    for entry in sorted(files, key=lambda one: one.path):
        lines.append(f'"{entry.path}" = {{ action = "{entry.action}", sha256 = "{entry.sha256}" }}')
    write_text_atomically(path, "\n".join(lines) + "\n")
