# SPDX-License-Identifier: Apache-2.0
"""The overlay on an installed vllm package: laying it in place, its manifest, and verifying it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rocm_overlay import table
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.overlay import check_path
from rocm_overlay.plan import ADDED, PATCHED, REMOVED, REPLACED, Plan, Sources, make_plan, read_base
from rocm_overlay.transaction import (
    JOURNAL_DIR,
    Step,
    Transaction,
    Write,
    bytecode,
    exclusive,
    no_step,
    readable_faults,
    undo_interrupted,
)

MANIFEST_PATH = "vllm/_rocm_overlay.json"


@dataclass(frozen=True)
class Base:
    """What is under the overlay: the installed version, and the image when there is one."""

    vllm_version: str
    reference: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Fault:
    """A laid file that is not what the manifest says."""

    path: str
    state: str


def find_site() -> Path:
    """The folder that holds the installed vllm package, found without importing it.

    Raises:
        OverlayError: no vllm is installed for this Python.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise OverlayError(
            "no vllm package is installed for this Python",
            wanted="the pinned vLLM in site-packages or dist-packages",
            fix="run in the vLLM image, or give --site FOLDER",
        )
    return Path(next(iter(spec.submodule_search_locations))).parent


def check_site(site: Path, option: str = "--site") -> Path:
    """The folder itself when it holds a vllm package; ``option`` is what named it.

    Raises:
        OverlayError: it does not.
    """
    if not (site / "vllm" / "__init__.py").is_file():
        raise OverlayError(
            f"{site} holds no vllm package", wanted=f"{site}/vllm/__init__.py", fix=f"correct {option}"
        )
    return site


def installed_version(site: Path) -> str:
    """The version of the vllm package in ``site``, from its own _version.py; 'unknown' without one."""
    content = read_base(site, "vllm/_version.py") or b""
    match = re.search(r"^__version__\b.*?['\"]([^'\"]+)['\"]", content.decode("utf-8"), re.MULTILINE)
    return match[1] if match else "unknown"


def read_manifest(site: Path) -> dict[str, Any] | None:
    """The install manifest, None when the overlay was never laid.

    Raises:
        CheckFailed: the manifest is damaged.
    """
    content = read_base(site, MANIFEST_PATH)
    if content is None:
        return None
    try:
        manifest = json.loads(content)
        _check_form(manifest)
    except (ValueError, KeyError, TypeError, OverlayError) as error:
        raise CheckFailed(
            f"{MANIFEST_PATH} is damaged",
            seen=repr(error),
            wanted="the manifest that lay wrote",
            fix="reinstall the base package and lay again",
        ) from None
    return cast(dict[str, Any], manifest)


def _check_form(manifest: Any) -> None:
    """Raise unless the manifest has every field that its readers use, in the form they use it in."""
    for key in ("version", "overlay_hash", "series_hash"):
        if not isinstance(manifest[key], str):
            raise TypeError(f"{key} is no text")
    if not manifest["files"]:
        raise ValueError("no files")
    for entry in manifest["files"]:
        check_path(entry["path"])
        if entry["action"] not in (ADDED, REPLACED, REMOVED, PATCHED) or not isinstance(entry["sha256"], str):
            raise ValueError(f"entry {entry['path']}")
    for field in ("vllm_version", "reference", "digest"):
        if not isinstance(manifest["base"][field], str):
            raise TypeError(f"base.{field} is no text")
    for drift in manifest["drift_allowed"]:
        check_path(drift["path"])


def _manifest(sources: Sources, base: Base, plan: Plan) -> dict[str, Any]:
    files = [{"path": one.path, "action": one.action, "sha256": one.sha256} for one in plan.changes]
    stamp = {key: value for key, value in sources.stamp().items() if key != "vllm_version"}
    return {
        **stamp,
        "base": asdict(base),
        "files": files,
        "drift_allowed": [asdict(one) for one in plan.allowed],
    }


def find_faults(site: Path, manifest: dict[str, Any]) -> list[Fault]:
    """Every file of the manifest that is changed, missing or back, or shadowed by a compiled one."""
    faults = []
    for entry in manifest["files"]:
        path = entry["path"]
        content = read_base(site, path)
        if entry["action"] == REMOVED:
            if content is not None:
                faults.append(Fault(path, "removed by us, back again"))
        elif content is None:
            faults.append(Fault(path, "missing"))
        elif hashlib.sha256(content).hexdigest() != entry["sha256"]:
            faults.append(Fault(path, "changed"))
        faults += [
            Fault(one, "compiled, and never compared with its source") for one in _unchecked(site, path)
        ]
    return faults


def _unchecked(site: Path, path: str) -> list[str]:
    """Compiled files of a module that Python loads without a look at the source (PEP 552, flags 1)."""
    found = []
    for compiled in bytecode(site, path):
        with (site / compiled).open("rb") as stream:
            header = stream.read(8)
        if int.from_bytes(header[4:8], "little") & 0b11 == 0b01:
            found.append(compiled)
    return found


def verify(site: Path, sources: Sources | None = None) -> dict[str, Any]:
    """Check the laid files against the install manifest and return it.

    Args:
        site: the folder that holds vllm/.
        sources: when given, the manifest must also be of this overlay and series, and list each of
            its files: a manifest that names fewer files would otherwise pass.

    Raises:
        CheckFailed: the overlay is not laid, a lay was interrupted, a file is not as laid, or the
            manifest is of another overlay.
    """
    if (site / JOURNAL_DIR).exists():
        raise CheckFailed(
            f"a lay was interrupted in {site}",
            seen=JOURNAL_DIR,
            wanted="a package that is laid, or not",
            fix="rocm-overlay lay --installed undoes it and lays again",
        )
    manifest = _verify_files(site)
    if sources is not None:
        _check_same(manifest, sources)
    return manifest


def _verify_files(site: Path) -> dict[str, Any]:
    manifest = read_manifest(site)
    if manifest is None:
        raise CheckFailed(
            "the overlay is not laid",
            seen=f"no {MANIFEST_PATH} in {site}",
            wanted="a package that it was laid onto",
            fix="rocm-overlay lay --installed",
        )
    if faults := find_faults(site, manifest):
        rows = [(one.path, one.state) for one in faults]
        raise CheckFailed(
            f"{len(faults)} of {len(manifest['files'])} laid files are not as laid\n\n"
            f"{table.render(('file', 'state'), rows)}\n",
            wanted="each file as the install manifest has it",
            fix="pull the image again, or reinstall the base package and lay again",
        )
    return manifest


def lay(
    sources: Sources,
    site: Path,
    reference: str = "",
    digest: str = "",
    allow_drift: Collection[str] = (),
    step: Step = no_step,
) -> Plan | None:
    """Lay overlay and patches onto the installed package in ``site``, all or nothing.

    Args:
        sources: pin, overlay and series.
        site: the folder that holds vllm/.
        reference: the base image's reference, for the manifest.
        digest: its digest.
        allow_drift: paths whose drift is accepted; recorded in the manifest.
        step: fault injection, see Transaction.

    Returns:
        The plan that was carried out, or None when this very overlay was already laid and is intact.

    Raises:
        CheckFailed: drift, or another overlay is laid already.
        OverlayError: a patch does not apply, or the folder cannot be written.
    """
    with readable_faults(site), exclusive(site):
        undo_interrupted(site)
        if read_manifest(site) is not None:
            verify(site, sources)
            return None
        plan = make_plan(sources, site, allow_drift)
        manifest = _manifest(sources, Base(installed_version(site), reference, digest), plan)
        writes = [Write(one.path, one.content) for one in plan.changes]
        writes.append(Write(MANIFEST_PATH, (json.dumps(manifest, indent=1) + "\n").encode("utf-8")))
        Transaction(site, step).run(writes, check=lambda: _check_same(_verify_files(site), sources))
    return plan


def _check_same(manifest: dict[str, Any], sources: Sources) -> None:
    stamp = sources.stamp()
    keys = ("overlay_hash", "series_hash")
    listed = {entry["path"] for entry in manifest["files"]}
    if any(manifest[key] != stamp[key] for key in keys) or listed != set(sources.touched):
        raise CheckFailed(
            "another overlay is laid already",
            seen=", ".join(f"{key} {manifest[key][:12]}" for key in keys) + f", {len(listed)} files",
            wanted=", ".join(f"{key} {stamp[key][:12]}" for key in keys) + f", {len(sources.touched)} files",
            fix="reinstall the base package, then lay",
        )
