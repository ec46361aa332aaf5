# SPDX-License-Identifier: Apache-2.0
"""Unpacking of tar archives, with the same refusals on every Python that the tool runs on."""

from __future__ import annotations

import posixpath
import tarfile
from pathlib import Path

from rocm_overlay.errors import OverlayError


def extract_all(archive: tarfile.TarFile, folder: Path | str) -> None:
    """Unpack into ``folder``. Python 3.11.4 and later refuse unsafe members by a filter; before, files,
    folders and links that stay below ``folder`` are taken.

    Raises:
        OverlayError: a member is not one of those (before Python 3.11.4).
        tarfile.FilterError: the same of later Pythons.
    """
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return
    for member in archive.getmembers():
        if not _stays_below(member):
            raise OverlayError(
                "the archive has a member that is not unpacked",
                seen=member.name,
                wanted="files, folders and links with paths below the archive's own",
                fix="use an archive as it was published",
            )
        # As the filter does: no set-user bits, and its owner may write.
        member.mode = (member.mode & 0o755) | 0o600
    archive.extractall(folder)


def _stays_below(member: tarfile.TarInfo) -> bool:
    paths = [member.name]
    if member.issym():
        if posixpath.isabs(member.linkname):
            return False
        paths.append(posixpath.join(posixpath.dirname(member.name), member.linkname))
    elif not (member.isfile() or member.isdir()):
        return False
    return not any(posixpath.isabs(path) or posixpath.normpath(path).split("/")[0] == ".." for path in paths)
