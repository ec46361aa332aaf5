# SPDX-License-Identifier: Apache-2.0
"""The report of a rebase: one for machines (JSON) and one for people (Markdown), of the same rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocm_overlay.carry import Carried
from rocm_overlay.carry_files import UNCHANGED, End
from rocm_overlay.pin import VllmPin
from rocm_overlay.targets import Target
from rocm_overlay.textio import write_text_atomically

JSON_NAME, TEXT_NAME = "rebase-report.json", "rebase-report.md"
FORMAT = 1


@dataclass(frozen=True)
class Finding:
    """A row of a later check: what was looked at, what was found, and whether it stops the rebase."""

    check: str
    what: str
    found: str
    stops: bool = False


@dataclass
class Report:
    """All that a rebase found, up to where it came.

    Attributes:
        pinned: the base that it started from.
        target: the base that it goes to.
        carried: the files and patches.
        findings: the contract check's rows, the imports', the tests', the pull requests'.
        status: 'conflicting', 'checks failed', 'ready' or 'landed'.
    """

    pinned: VllmPin
    target: Target
    carried: Carried
    findings: list[Finding] = field(default_factory=list)
    status: str = "conflicting"

    def as_json(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        carried = self.carried
        return {
            "format": FORMAT,
            "status": self.status,
            "from": vars(self.pinned),
            "to": {key: value for key, value in self.target.as_json().items() if key != "root"},
            "files": [{**vars(row), "end": row.end.value} for row in carried.files],
            "patches": [{**vars(row), "end": row.end.value} for row in carried.rows],
            "dropped": sorted([*self.dropped_patches, *carried.dropped]),
            "conflicts": [
                {"owner": one.owner, "path": one.path, "reason": one.reason} for one in carried.conflicts
            ],
            "findings": [vars(one) for one in self.findings],
        }

    @property
    def dropped_patches(self) -> list[str]:
        """The patches whose work is upstream."""
        return [name for name, text in self.carried.patches.items() if text is None]

    def markdown(self) -> str:
        """The report for people."""
        carried, target = self.carried, self.target
        lines = [
            f"# Rebase of vLLM {self.pinned.version} to {target.vllm.version}: {self.status}",
            "",
            f"From {self.pinned.version} ({self.pinned.commit}) to {target.kind} `{target.name}`: version "
            f"{target.vllm.version}, commit {target.vllm.commit or 'unknown'}, archive {target.vllm.sdist}.",
            "",
            "## Files that we touch",
            "",
            *_table(
                ("file", "what we do to it", "upstream since the pin", "ends", "detail"),
                [
                    (row.path, row.action, row.upstream + (f" to {row.moved_to}" if row.moved_to else ""),
                     row.end.value, row.detail)
                    for row in carried.files
                ],
            ),
            "",
            "## Patches",
            "",
            *_table(
                ("patch", "file", "ends", "detail"),
                [(row.name, row.path, row.end.value, row.detail) for row in carried.rows],
            ),
        ]  # fmt: skip
        if self.findings:
            rows = [(one.check, one.what, one.found, "yes" if one.stops else "") for one in self.findings]
            lines += ["", "## Checks", "", *_table(("check", "what", "found", "stops"), rows)]
        if dropped := self.as_json()["dropped"]:
            lines += ["", "## Upstream now, dropped here", "", *[f"- {name}" for name in dropped]]
        if carried.conflicts:
            lines += ["", "## To decide", ""]
            lines += [f"- {one.owner}, {one.path}: {one.reason}" for one in carried.conflicts]
        return "\n".join(lines) + "\n"

    def summary(self) -> str:
        """The rebase's commit message."""
        carried, target = self.carried, self.target
        ends = [row.end for row in carried.rows]
        counts = ", ".join(f"{ends.count(end)} {end.value}" for end in End if end in ends)
        changed = [row for row in carried.files if row.upstream != UNCHANGED]
        lines = [
            f"Rebase to vLLM {target.vllm.version}",
            "",
            f"The pin moves from {self.pinned.version} ({self.pinned.commit})",
            f"to {target.kind} {target.name}, commit {target.vllm.commit or 'unknown'}.",
            f"Of the {len(carried.files)} files that we touch, upstream changed {len(changed)}:",
            *[f"- {row.path}: {row.upstream}, {row.end.value}" for row in changed],
            f"Patches by file: {counts or 'none'}.",
        ]
        lines += [f"- {row.name}: {row.end.value} ({row.detail})" for row in carried.rows if row.detail]
        if dropped := self.as_json()["dropped"]:
            lines += ["Dropped, since upstream has it:", *[f"- {name}" for name in dropped]]
        lines += [f"{one.check}: {one.what}: {one.found}" for one in self.findings]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write both forms into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / JSON_NAME, json.dumps(self.as_json(), indent=1) + "\n")
        write_text_atomically(folder / TEXT_NAME, self.markdown())


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    body = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return [f"| {' | '.join(headers)} |", "|" + "---|" * len(headers), *body]
