# SPDX-License-Identifier: Apache-2.0
"""A pull request's body: what it claims, and the repository's own measured results that show it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rocm_overlay.errors import OverlayError
from rocm_overlay.export_plan import FOLDER, NAME, ExportPlan, PullRequest, Result
from rocm_overlay.project import Project

HEADINGS = {
    "purpose": "Purpose",
    "claims": "Claims",
    "validation": "Validation",
    "reproduce": "Commands to reproduce",
    "limits": "Limits",
    "unchanged": "What it does not change",
}


def make_body(project: Project, plan: ExportPlan, pull: PullRequest, paths: Sequence[str]) -> str:
    """The body in Markdown.

    Raises:
        OverlayError: a result that the manifest names is not in its document.
    """
    lines = [f"# {pull.title}", ""]
    for section, heading in HEADINGS.items():
        texts = list(pull.texts[section])
        if section == "reproduce":
            lines += [f"## {heading}", "", "```", *texts, *pull.run, "```", ""]
            continue
        if texts or section == "validation":
            bullets = texts if section == "purpose" else [f"- {text}" for text in texts]
            lines += [f"## {heading}", "", *bullets, ""]
        if section == "validation":
            for result in pull.results:
                lines += [*read_result(project, pull, result), ""]
    lines += ["## Files", "", *[f"- `{path}`" for path in paths], ""]
    if pull.depends:
        titles = {one.name: one.title for one in plan.pulls}
        lines += ["## Depends on", "", *[f"- {titles[name]} (`pr/{name}`)" for name in pull.depends], ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def read_result(project: Project, pull: PullRequest, result: Result) -> list[str]:
    """A fenced block or table below a heading of a document of ours, with where it is from.

    Raises:
        OverlayError: it is not there.
    """
    path = project.root / result.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    parts = re.split(rf"(?m)^#+ {re.escape(result.heading)}$", text)
    section = re.split(r"(?m)^#+ ", parts[1])[0] if len(parts) == 2 else ""
    blocks = re.findall(r"(?ms)^```.*?^```$|(?:^\|[^\n]*\n)+", section)
    if len(blocks) < result.block:
        raise OverlayError(
            f"{FOLDER}/{NAME}: {pull.name}: a result is not where it should be",
            seen=f"{len(blocks)} blocks below '{result.heading}' of {result.file}",
            wanted=f"block {result.block}",
        )
    return [f"From `{result.file}`, {result.heading}:", "", blocks[result.block - 1].rstrip("\n")]
