# SPDX-License-Identifier: Apache-2.0
"""patches/bases: the pinned content of every upstream file that we touch, for the three-way merge.

A base that is gone from its registry or index can then still be merged from. One compressed file a
content, named by the SHA-256 that the lock gives, so that what is read is what was locked.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Mapping
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.pin import LockedFile
from rocm_overlay.plan import read_base

FOLDER = "bases"
SUFFIX = ".xz"


def kept_path(patches: Path, sha256: str) -> Path:
    """Where the content with this hash is kept."""
    return patches / FOLDER / f"{sha256}{SUFFIX}"


def read_kept(patches: Path, entry: LockedFile) -> bytes:
    """The pinned content of a locked file.

    Raises:
        OverlayError: it is not kept, is damaged, or is another content.
    """
    path = kept_path(patches, entry.sha256)
    try:
        content = lzma.decompress(path.read_bytes())
    except FileNotFoundError:
        raise _fault(entry, "no file", path) from None
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise _fault(entry, error, path) from None
    found = hashlib.sha256(content).hexdigest()
    if found != entry.sha256:
        raise _fault(entry, f"sha256 {found}", path)
    return content


def _fault(entry: LockedFile, seen: object, path: Path) -> OverlayError:
    return OverlayError(
        f"the kept base of {entry.path} cannot be merged from",
        seen=seen,
        wanted=f"its content of sha256 {entry.sha256} in patches/{FOLDER}/{path.name}",
        fix="make lock, with the pinned base",
    )


def keep(patches: Path, entries: Mapping[str, LockedFile], root: Path) -> list[str]:
    """Keep the content of every locked file of the base at ``root``, and no other.

    Returns:
        The names of the kept files.

    Raises:
        OverlayError: a file of the base is not what its entry says.
    """
    contents = {}
    for path, entry in sorted(entries.items()):
        content = read_base(root, path) or b""
        found = hashlib.sha256(content).hexdigest()
        if found != entry.sha256:
            raise OverlayError(
                f"{path} of the base is not the locked one", seen=found, wanted=entry.sha256, fix="make lock"
            )
        contents[entry.sha256] = content
    folder = patches / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for sha256, content in contents.items():
        target = kept_path(patches, sha256)
        if not target.exists():
            staged = target.with_suffix(".part")
            staged.write_bytes(lzma.compress(content, preset=9))
            staged.replace(target)
    names = sorted(f"{sha256}{SUFFIX}" for sha256 in contents)
    for left in sorted(folder.iterdir()):
        if left.name not in names:
            left.unlink()
    return names


def kept_problems(patches: Path, entries: Mapping[str, LockedFile]) -> list[str]:
    """What is wrong with the kept files, a line each: missing, damaged, or of no locked file."""
    problems = []
    for entry in entries.values():
        try:
            read_kept(patches, entry)
        except OverlayError as error:
            problems.append(f"{error.what}: {error.seen}")
    wanted = {f"{entry.sha256}{SUFFIX}" for entry in entries.values()}
    present = {path.name for path in (patches / FOLDER).glob("*")}
    return problems + [f"patches/{FOLDER}/{name} is of no locked file" for name in sorted(present - wanted)]
