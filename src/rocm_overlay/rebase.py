# SPDX-License-Identifier: Apache-2.0
"""What another base would mean for the overlay and the series: a report that changes nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay import table
from rocm_overlay.errors import OverlayError
from rocm_overlay.fetch import fetch_version
from rocm_overlay.install import check_site
from rocm_overlay.patching import Outcome, apply_diff
from rocm_overlay.plan import Sources, find_drift, read_base
from rocm_overlay.project import Project
from rocm_overlay.series import Patch
from rocm_overlay.textio import decode

UNCHANGED = "unchanged"
VERSION = re.compile(r"\d+\.\d+(\.\d+)?((a|b|rc)\d+)?(\.post\d+)?")


@dataclass(frozen=True)
class FileState:
    """A file that we touch in another base: what we do to it, and what upstream did since the pin."""

    path: str
    action: str
    upstream: str


@dataclass(frozen=True)
class PatchState:
    """How a patch meets another base, one file of it."""

    name: str
    path: str
    outcome: str
    detail: str

    @property
    def clean(self) -> bool:
        """Whether it applies there as it is."""
        return self.outcome == Outcome.CLEAN.value


@dataclass(frozen=True)
class Report:
    """The files and patches of ours against another base."""

    files: tuple[FileState, ...]
    patches: tuple[PatchState, ...]

    @property
    def clean(self) -> bool:
        """Whether the base would be accepted as it is."""
        return all(one.upstream == UNCHANGED for one in self.files) and all(one.clean for one in self.patches)

    def render(self) -> str:
        """The two tables."""
        files = [(one.path, one.action, one.upstream) for one in self.files]
        patches = [(one.name, one.path, one.outcome, one.detail) for one in self.patches]
        return "\n\n".join(
            [
                table.render(("file", "what we do to it", "upstream since our pin"), files),
                table.render(("patch", "file", "outcome", "detail"), patches),
            ]
        )


def find_base(project: Project, to: str) -> Path:
    """The folder that holds the vllm/ of another base.

    Args:
        to: a folder that holds vllm/ (a checkout, a site folder of an image), or a released version.

    Raises:
        OverlayError: it is neither, or the version cannot be fetched.
    """
    if Path(to).is_dir():
        return check_site(Path(to))
    if VERSION.fullmatch(to):
        return fetch_version(to, project)
    raise OverlayError(
        "no such base",
        seen=to or "nothing",
        wanted="a folder that holds vllm/, or a released version such as 0.33.0",
        fix="make rebase TO=FOLDER, or TO=VERSION",
    )


def make_report(sources: Sources, root: Path) -> Report:
    """Compare every file we touch with the lock, and try every patch, on the base at ``root``."""
    drift = {one.path: one.state for one in find_drift(sources, root)}
    files = tuple(
        FileState(path, action, drift.get(path, UNCHANGED))
        for path, action in sorted(sources.touched.items())
    )
    texts: dict[str, str] = {}
    patches = tuple(state for patch in sources.series.patches for state in _try_patch(patch, root, texts))
    return Report(files, patches)


def _try_patch(patch: Patch, root: Path, texts: dict[str, str]) -> list[PatchState]:
    """The patch on what the patches before it left in ``texts``; its results go there too."""
    if patch.drop_when is not None:
        content = read_base(root, patch.drop_when.path)
        if content is not None and patch.drop_when.holds(decode(content, patch.drop_when.path)):
            detail = f"Drop-when holds: {patch.drop_when}"
            return [PatchState(patch.name, diff.path, Outcome.ALREADY.value, detail) for diff in patch.diffs]
    states = []
    for diff in patch.diffs:
        content = read_base(root, diff.path)
        if content is None:
            states.append(PatchState(patch.name, diff.path, Outcome.CONFLICT.value, "the file is gone"))
            continue
        result = apply_diff(texts.get(diff.path, decode(content, diff.path)), diff)
        detail = result.detail
        if result.outcome is Outcome.CLEAN:
            texts[diff.path] = result.text
            detail = f"{result.offset} lines off its place" if result.offset else ""
        states.append(PatchState(patch.name, diff.path, result.outcome.value, detail))
    if all(state.clean for state in states) and not patch.probe.holds(texts[patch.probe.path]):
        states.append(PatchState(patch.name, patch.probe.path, "no effect", f"probe: {patch.probe}"))
    return states
