# SPDX-License-Identifier: Apache-2.0
"""build/tree: a copy of the pinned base's package with overlay and patches laid over it."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.install import MANIFEST_PATH, lay
from rocm_overlay.plan import Plan, Sources
from rocm_overlay.staging import staging_folder


def build_tree(sources: Sources, base: Path, target: Path, allow_drift: Collection[str] = ()) -> Plan:
    """Copy ``base/vllm`` to ``target/vllm`` and lay onto the copy; the old target goes when that worked.

    Args:
        sources: pin, overlay and series.
        base: the unpacked source; base/vllm is the package.
        target: the folder to make.
        allow_drift: paths whose drift is accepted.

    Raises:
        OverlayError: see install.lay; the old target is still there then.
    """
    _check_ours(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(target.parent, "tree") as staging:
        fresh = staging / "tree"
        shutil.copytree(base / "vllm", fresh / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
        write_metadata(base, fresh, sources.pin.vllm.version)
        plan = lay(sources, fresh, reference=sources.pin.vllm.sdist, allow_drift=allow_drift)
        assert plan is not None, "a fresh copy holds no manifest"
        if target.exists():
            shutil.rmtree(target)
        fresh.replace(target)
    return plan


def write_metadata(base: Path, site: Path, version: str) -> None:
    """Have a package be found like an install: vLLM asks for its version, and without one keeps no Triton.

    Args:
        base: the unpacked source; what it says of itself (PKG-INFO) is taken. A checkout's and an image's
            files say nothing.
        site: the folder that holds vllm/.
        version: the pinned version.
    """
    info = site / f"vllm-{version}.dist-info"
    info.mkdir()
    if (base / "PKG-INFO").is_file():
        shutil.copy(base / "PKG-INFO", info / "METADATA")
    else:
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8"
        )


def _check_ours(target: Path) -> None:
    """Raise unless the target may be replaced: not there, empty, or a tree that was laid before."""
    if not target.exists() and not target.is_symlink():
        return
    if target.is_dir() and (not any(target.iterdir()) or (target / MANIFEST_PATH).is_file()):
        return
    raise OverlayError(
        f"{target} is not a laid tree",
        seen="a file" if not target.is_dir() else "a folder with other things in it",
        wanted="a new or empty folder, or one that `rocm-overlay tree` made",
        fix="give another --out, or remove it yourself",
    )
