# SPDX-License-Identifier: Apache-2.0
"""Verbs for moving to another base: rebase, rebase-continue, rebase-abort."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rocm_overlay.errors import EXIT_OK, CheckFailed, OverlayError
from rocm_overlay.processes import interruptible
from rocm_overlay.project import Project

Subparsers = Any


def register(subparsers: Subparsers) -> None:
    """Add the verbs of this module."""
    rebase = subparsers.add_parser(
        "rebase", help="carry overlay and series over to another base, in one commit"
    )
    rebase.add_argument(
        "--to",
        required=True,
        help="a released version, an image's reference, oci-archive:FILE, or FOLDER[@COMMIT] of a checkout",
    )
    rebase.add_argument("--report", action="store_true", help="only report what it would take")
    rebase.set_defaults(run=_rebase)

    go_on = subparsers.add_parser("rebase-continue", help="take a rebase that waits up again")
    go_on.add_argument(
        "--accept", action="append", default=[], metavar="PATH", help="this row is right as it is; repeatable"
    )
    go_on.add_argument(
        "--drop", action="append", default=[], metavar="PATCH", help="leave it out; repeatable"
    )
    go_on.set_defaults(run=_continue)

    check = subparsers.add_parser("contracts", help="do the names that our files rely on exist, as recorded?")
    check.add_argument("--base", type=Path, help="the folder that holds vllm/ (default: build/base)")
    check.add_argument(
        "--import", dest="by_import", type=Path, metavar="TREE", help="also import them from this"
    )
    check.set_defaults(run=_contracts)

    abort = subparsers.add_parser("rebase-abort", help="undo a rebase that waits")
    abort.set_defaults(run=_abort)
    _register_export(subparsers)


def _register_export(subparsers: Subparsers) -> None:
    export = subparsers.add_parser("export-prs", help="the work as upstream pull requests: build/export")
    export.add_argument("--out", type=Path, help="another folder to make (default: build/export)")
    export.add_argument("--author", help='who signs off, as "NAME <EMAIL>" (default: a placeholder)')
    export.add_argument(
        "--check", action="store_true", help="also git am each, run its tests and upstream's hooks (minutes)"
    )
    export.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from rocm_overlay import export, export_checks, table
    from rocm_overlay.fetch import fetch_base
    from rocm_overlay.pin import Pin

    project = Project.find()
    base = fetch_base(project, Pin.load(project.pin_file).vllm)
    target = arguments.out or project.build / "export"
    if export.source_of(project)["changed"]:
        print("the checkout has changes that are in no commit: they are exported as well", file=sys.stderr)
    with interruptible(), export.held(project):
        exported = export.export(project, base, target, arguments.author or export.PLACEHOLDER)
        rows = [
            (one.folder, one.commit[:12], len(one.paths), ", ".join(one.pull.depends)) for one in exported
        ]
        print(table.render(("pull request", "commit", "files", "depends on"), rows))
        print(f"in {target}; branches pr/* in {project.build / export.REPOSITORY}", flush=True)
        if not arguments.check:
            return EXIT_OK
        results = export_checks.check_all(project, base, target, exported)
    print(table.render(("pull request", "check", "found"), [(r.name, r.check, r.found) for r in results]))
    if failed := [one for one in results if one.failed]:
        raise CheckFailed(f"{len(failed)} checks of the exported pull requests fail")
    return EXIT_OK


def _session(project: Project) -> Any:
    from rocm_overlay.rebase import Session
    from rocm_overlay.rebase_checks import checks_for

    return Session(project, checks_for(project), _find_pinned)


def _find_pinned(project: Project, sources: Any) -> Path | None:
    from rocm_overlay.fetch import fetch_base

    try:
        return fetch_base(project, sources.pin.vllm)
    except OverlayError as error:
        print(f"the pinned base cannot be had ({error.what}): going by the kept files", file=sys.stderr)
        return None


def _rebase(arguments: argparse.Namespace) -> int:
    from rocm_overlay.targets import find_target

    project = Project.find()
    if arguments.report:
        return _report(project, arguments.to)
    with interruptible():
        report = _session(project).start(lambda: find_target(project, arguments.to))
    print(report.markdown())
    return EXIT_OK


def _report(project: Project, to: str) -> int:
    from rocm_overlay.carry import Work, carry
    from rocm_overlay.kept import read_kept
    from rocm_overlay.plan import Sources
    from rocm_overlay.rebase_pulls import pull_findings
    from rocm_overlay.rebase_report import JSON_NAME, Report
    from rocm_overlay.targets import find_target

    sources = Sources.load(project)
    target = find_target(project, to)
    locked = sources.pin.locked()
    work = Work(
        sources,
        lambda path: read_kept(project.patches, locked[path]),
        Path(target.root),
        _find_pinned(project, sources),
    )
    report = Report(sources.pin.vllm, target, carry(work))
    report.findings += pull_findings(project, sources, Path(target.root))
    report.status = "conflicting" if report.carried.conflicts else "ready"
    report.write(project.build)
    print(report.markdown())
    print(f"for machines: {project.build / JSON_NAME}")
    if report.carried.conflicts:
        raise CheckFailed(
            f"{len(report.carried.conflicts)} places to decide on this base; nothing was changed",
            seen=f"vLLM {target.vllm.version} in {target.root}",
            fix=f"make rebase TO={to}, then decide each in build/rebase/conflicts",
        )
    return EXIT_OK


def _continue(arguments: argparse.Namespace) -> int:
    with interruptible():
        report = _session(Project.find()).go_on(arguments.accept, arguments.drop)
    print(report.markdown())
    return EXIT_OK


def _contracts(arguments: argparse.Namespace) -> int:
    from rocm_overlay import contract_checks, contracts, table
    from rocm_overlay.install import check_site
    from rocm_overlay.rebase_checks import checks_for

    project = Project.find()
    base = check_site(arguments.base or project.base, "--base, or: make setup")
    recorded = contracts.load(project.root / contracts.FOLDER)
    drifts = contracts.compare(recorded, base)
    rows = [(str(one.contract), one.what, "yes" if one.breaks else "") for one in drifts]
    broken = [one for one in drifts if one.breaks]
    if arguments.by_import:
        record = project.root / contracts.FOLDER / contracts.RECORDED
        found = contract_checks.check_by_import(
            project, record, arguments.by_import.resolve(), checks_for(project).python
        )
        rows += [(one.what, one.found, "yes" if one.stops else "") for one in found]
        broken += [one for one in found if one.stops]  # type: ignore[misc]
    if rows:
        print(table.render(("name", "found", "breaks us"), rows))
    if broken:
        raise CheckFailed(
            f"{len(broken)} contracts are broken by the vLLM in {base}",
            fix="correct the overlay files that use them, then make lock",
        )
    print(f"{len(recorded)} names of the base: none is broken in {base}")
    return EXIT_OK


def _abort(_: argparse.Namespace) -> int:
    _session(Project.find()).abort()
    print("the rebase is undone; the checkout is as it was")
    return EXIT_OK
