# SPDX-License-Identifier: Apache-2.0
"""What a carried series changes in the project's own files: pin, lock, patches, kept bases, manifest."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from rocm_overlay.carry import Carried
from rocm_overlay.errors import OverlayError
from rocm_overlay.kept import FOLDER, keep
from rocm_overlay.mirror import set_pin_values
from rocm_overlay.overlay import MANIFEST_NAME
from rocm_overlay.pin import ARCHITECTURES, Pin, write_lock
from rocm_overlay.plan import Sources, make_lock, make_plan
from rocm_overlay.project import PIN_NAME, Project
from rocm_overlay.series import SERIES_NAME
from rocm_overlay.targets import Target, image_values
from rocm_overlay.textio import write_text_atomically
from rocm_overlay.transaction import Write

TABLE_BEGIN, TABLE_END = "<!-- series -->\n", "\n<!-- /series -->"


def carried_writes(project: Project, target: Target, carried: Carried) -> list[Write]:
    """Every file of the project that the rebase changes, after a full plan over the new base.

    Raises:
        OverlayError: what was carried does not make a plan: nothing is to be written then.
    """
    root = Path(target.root)
    with tempfile.TemporaryDirectory(prefix="rocm-overlay-carried-") as folder:
        trial = Project(Path(folder))
        shutil.copytree(project.overlay, trial.overlay)
        shutil.copytree(project.patches, trial.patches)
        shutil.copy(project.pin_file, trial.pin_file)
        _write_patches(trial, carried)
        for path in carried.dropped:
            (trial.overlay / path).unlink(missing_ok=True)
        _drop_entries(trial.overlay / MANIFEST_NAME, carried.dropped)
        _write_pin(trial, target)
        relock(trial, root)
        return _differences(project, trial)


def relock(project: Project, root: Path) -> None:
    """Lock, kept bases and the series' table anew, for the base at ``root``.

    Raises:
        OverlayError: overlay and series make no plan over it.
    """
    sources = Sources.load(project)
    entries = make_lock(sources, root)
    make_plan(replace(sources, pin=replace(sources.pin, files=tuple(entries))), root)
    keep(project.patches, {entry.path: entry for entry in entries}, root)
    write_lock(project.pin_file, entries)
    readme = project.patches / "README.md"
    if readme.is_file():
        text = readme.read_text(encoding="utf-8")
        write_text_atomically(readme, with_series_table(text, sources.series.markdown()))


def _write_patches(trial: Project, carried: Carried) -> None:
    for name, text in carried.patches.items():
        if text is None:
            (trial.patches / name).unlink()
        else:
            (trial.patches / name).write_bytes(text.encode("utf-8"))
    listing = trial.patches / SERIES_NAME
    gone = {name for name, text in carried.patches.items() if text is None}
    lines = listing.read_text(encoding="utf-8").splitlines()
    listing.write_text("\n".join(line for line in lines if line not in gone) + "\n", encoding="utf-8")


def with_series_table(text: str, table: str) -> str:
    """``text`` with the series' table between its two marks.

    Raises:
        OverlayError: the marks are not there.
    """
    head, begin, rest = text.partition(TABLE_BEGIN)
    _, end, tail = rest.partition(TABLE_END)
    if not begin or not end:
        raise OverlayError(
            "patches/README.md has no place for the table",
            wanted=f"{TABLE_BEGIN.strip()} and {TABLE_END.strip()}",
        )
    return f"{head}{begin}{table}{end}{tail}"


def _drop_entries(manifest: Path, paths: tuple[str, ...]) -> None:
    """Take the tables of these paths out of the manifest; every other line stays."""
    if not paths:
        return
    parts = re.split(r"(?m)^(?=\[\[)", manifest.read_text(encoding="utf-8"))
    kept = [part for part in parts if not any(f'path = "{path}"\n' in part for path in paths)]
    manifest.write_text("".join(kept), encoding="utf-8")


def _write_pin(trial: Project, target: Target) -> None:
    pin = Pin.load(trial.pin_file)
    set_pin_values(trial.pin_file, "vllm", vars(target.vllm))
    for architecture in ARCHITECTURES:
        values = image_values(target, pin.images[architecture].reference)
        if values is not None:
            set_pin_values(trial.pin_file, f"image.{architecture}", values)
            # A mirror holds the image that was pinned before.
            set_pin_values(trial.pin_file, f"mirror.{architecture}", {"location": "", "date": ""})


def _differences(project: Project, trial: Project) -> list[Write]:
    """What of the trial is not in the project yet, path by path; the kept bases first, the pin last."""
    names = {
        path.relative_to(base).as_posix()
        for base in (project.root, trial.root)
        for top in ("overlay", "patches", PIN_NAME)
        for path in ([base / top] if (base / top).is_file() else (base / top).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    writes = []
    for name in sorted(names, key=lambda one: (one == PIN_NAME, f"patches/{FOLDER}/" not in one, one)):
        new = (trial.root / name).read_bytes() if (trial.root / name).is_file() else None
        old = (project.root / name).read_bytes() if (project.root / name).is_file() else None
        if new != old:
            writes.append(Write(name, new))
    return writes
