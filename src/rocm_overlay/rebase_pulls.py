# SPDX-License-Identifier: Apache-2.0
"""Pull requests of ours that a new base has, and what of the overlay they make needless."""

from __future__ import annotations

from pathlib import Path

from rocm_overlay.export_plan import FOLDER, NAME, load_plan, merged_pulls
from rocm_overlay.plan import Sources
from rocm_overlay.project import Project
from rocm_overlay.rebase_report import Finding


def pull_findings(project: Project, sources: Sources, root: Path) -> list[Finding]:
    """A row for each pull request that the base at ``root`` has, with what is proposed for removal.

    Args:
        project: whose manifest of pull requests counts; without one there is nothing to find.
        sources: its overlay and series as pinned.
        root: the folder that holds the new base's vllm/.
    """
    if not (project.root / FOLDER / NAME).is_file():
        return []
    rows = []
    for one in merged_pulls(load_plan(project.root, sources), sources, root):
        remove = [*one.same, *one.pull.patches]
        found = f"merged ({one.how}); remove from ours: {', '.join(remove) or 'nothing to the letter'}"
        if one.changed:
            found += f"; upstream has another form of {', '.join(one.changed)}: compare, then remove ours"
        rows.append(Finding("pull request", one.pull.name, found))
    return rows
