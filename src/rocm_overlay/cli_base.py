# SPDX-License-Identifier: Apache-2.0
"""Verbs for the base and the overlay: fetch, lock, tree, lay, verify, drift, stamp, patches."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rocm_overlay import contract_checks, contracts, install, table
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.fetch import fetch_base
from rocm_overlay.kept import keep
from rocm_overlay.pin import Pin, write_lock
from rocm_overlay.plan import REBASE_COMMAND, Plan, Sources, drift_table, find_drift, make_lock, make_plan
from rocm_overlay.project import Project
from rocm_overlay.series import load_series
from rocm_overlay.targets import find_target
from rocm_overlay.tree import build_tree

Subparsers = Any


def register(subparsers: Subparsers) -> None:
    """Add the verbs of this module."""
    fetch = subparsers.add_parser("fetch", help="fetch the pinned base and unpack it to build/base")
    fetch.add_argument(
        "--from",
        dest="given",
        metavar="FILE",
        help="take this archive, not the network's, or the image or checkout that the pin was made of",
    )
    fetch.set_defaults(run=_fetch)

    lock = subparsers.add_parser("lock", help="re-make the hash list of base.toml from the pinned base")
    lock.set_defaults(run=_lock)

    tree = subparsers.add_parser("tree", help="lay overlay and patches onto a copy: build/tree")
    tree.add_argument("--base", type=Path, help="another unpacked source (default: the pinned one)")
    tree.add_argument("--out", type=Path, help="another folder to make (default: build/tree)")
    _drift_option(tree)
    tree.set_defaults(run=_tree)

    lay = subparsers.add_parser("lay", help="lay overlay and patches onto an installed vllm package")
    lay.add_argument(
        "--installed", action="store_true", required=True, help="the package of this Python, in place"
    )
    lay.add_argument(
        "--site", type=Path, help="the folder that holds vllm/ (default: found on the import path)"
    )
    lay.add_argument("--base-reference", default="", help="the base image's reference, for the manifest")
    lay.add_argument("--base-digest", default="", help="its digest, for the manifest")
    _drift_option(lay)
    lay.set_defaults(run=_lay)

    verify = subparsers.add_parser("verify", help="is the overlay on the installed package intact?")
    verify.add_argument(
        "--site", type=Path, help="the folder that holds vllm/ (default: found on the import path)"
    )
    verify.add_argument("--json", action="store_true", help="print the install manifest")
    verify.set_defaults(run=_verify)

    drift = subparsers.add_parser("drift", help="which files that we touch differ from the lock?")
    drift.add_argument("--base", type=Path, help="the folder that holds vllm/ (default: build/base)")
    drift.set_defaults(run=_drift)

    stamp = subparsers.add_parser("stamp", help="print what identifies the distribution, as KEY=VALUE")
    stamp.set_defaults(run=_stamp)

    patches = subparsers.add_parser("patches", help="a table of the patch series")
    patches.add_argument("--markdown", action="store_true", help="as patches/README.md holds it")
    patches.set_defaults(run=_patches)


def _drift_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-drift",
        action="append",
        default=[],
        metavar="PATH",
        help="accept that this file differs from the lock; repeatable, recorded in the manifest",
    )


def _announce_drift(plan: Plan) -> None:
    if plan.allowed:
        print("!" * 78, file=sys.stderr)
        print("DRIFT ALLOWED: these files differ from the base that was verified", file=sys.stderr)
        print(drift_table(list(plan.allowed)), file=sys.stderr)
        print("!" * 78, file=sys.stderr)


def _fetch(arguments: argparse.Namespace) -> int:
    project = Project.find()
    pin = Pin.load(project.pin_file)
    given = Path(arguments.given) if arguments.given else None
    if given is not None and not given.is_file():
        given = project.cache / find_target(project, arguments.given).vllm.sdist
    base = fetch_base(project, pin.vllm, given)
    print(f"base: vLLM {pin.vllm.version}, sha256 {pin.vllm.sha256[:12]}, in {base}")
    return 0


def _lock(_: argparse.Namespace) -> int:
    project = Project.find()
    pin = Pin.load(project.pin_file)
    base = fetch_base(project, pin.vllm)
    sources = Sources.load(project)
    entries = make_lock(sources, base)
    # A lock over which the series does not apply is of no use: nothing is written then.
    make_plan(replace(sources, pin=replace(pin, files=tuple(entries))), base)
    # The contents first: a lock whose files are not kept cannot be merged from.
    keep(project.patches, {entry.path: entry for entry in entries}, base)
    write_lock(project.pin_file, entries)
    if (project.root / contracts.FOLDER).is_dir():
        count = contract_checks.write_current(project, base)
        print(f"{contracts.FOLDER}/{contracts.RECORDED}: {count} names of the base that our files rely on")
    print(
        table.render(
            ("file", "action", "sha256"), [(one.path, one.action, one.sha256[:12]) for one in entries]
        )
    )
    return 0


def _tree(arguments: argparse.Namespace) -> int:
    project = Project.find()
    sources = Sources.load(project)
    base = arguments.base or fetch_base(project, sources.pin.vllm)
    target = arguments.out or project.tree
    plan = build_tree(sources, install.check_site(base), target, arguments.allow_drift)
    _announce_drift(plan)
    print(plan.table())
    for note in plan.notes:
        print(f"note: {note}")
    print(f"laid tree: {target}")
    return 0


def _lay(arguments: argparse.Namespace) -> int:
    sources = Sources.load(Project.find())
    site = install.check_site(arguments.site or install.find_site())
    version = install.installed_version(site)
    plan = install.lay(
        sources, site, arguments.base_reference, arguments.base_digest, allow_drift=arguments.allow_drift
    )
    if plan is None:
        print("already laid and intact: nothing to do")
        return 0
    _announce_drift(plan)
    print(plan.table())
    for note in plan.notes:
        print(f"note: {note}")
    if version != sources.pin.vllm.version:
        count = len(sources.pin.files)
        print(
            f"base is vLLM {version}, not the pinned {sources.pin.vllm.version}: accepted, "
            f"{count - len(plan.allowed)} of the {count} locked files are unchanged in it"
        )
    print(f"laid onto vLLM {version} in {site}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    site = install.check_site(arguments.site or install.find_site())
    manifest = install.verify(site, _own_sources())
    if arguments.json:
        print(json.dumps(manifest, indent=1))
        return 0
    base = manifest["base"]
    rows = [
        ("vllm-openai-rocm", manifest["version"]),
        ("base vLLM", base["vllm_version"]),
        ("base image", base["reference"] or "not given"),
        ("base digest", base["digest"] or "not given"),
        ("overlay", manifest["overlay_hash"]),
        ("series", manifest["series_hash"]),
        ("drift allowed", ", ".join(one["path"] for one in manifest["drift_allowed"]) or "none"),
        ("files", f"{len(manifest['files'])} as laid"),
    ]
    print(table.render(("intact", ""), rows))
    return 0


def _own_sources() -> Sources | None:
    """What this checkout or image would lay, None where the tool stands alone."""
    try:
        project = Project.find()
    except OverlayError:
        return None
    return Sources.load(project)


def _drift(arguments: argparse.Namespace) -> int:
    project = Project.find()
    sources = Sources.load(project)
    base = install.check_site(arguments.base or fetch_base(project, sources.pin.vllm), "--base")
    found = find_drift(sources, base)
    if not found:
        print(f"no drift: {len(sources.touched)} files that we touch are as locked")
        return 0
    print(drift_table(found))
    raise CheckFailed(f"{len(found)} files drifted", fix=REBASE_COMMAND)


def _stamp(_: argparse.Namespace) -> int:
    for key, value in Sources.load(Project.find()).stamp().items():
        print(f"{key}={value}")
    return 0


def _patches(arguments: argparse.Namespace) -> int:
    series = load_series(Project.find().patches)
    print(series.markdown() if arguments.markdown else series.table())
    return 0
