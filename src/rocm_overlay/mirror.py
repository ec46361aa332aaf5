# SPDX-License-Identifier: Apache-2.0
"""Keeping the pinned images: their digests, copies of them, and the lines of base.toml for both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rocm_overlay import engine as engines
from rocm_overlay.engine import ARCHIVE, Engine, Shell
from rocm_overlay.errors import OverlayError
from rocm_overlay.image import image_pin, say
from rocm_overlay.pin import Pin
from rocm_overlay.project import Project
from rocm_overlay.textio import write_text_atomically


def resolve_digest(shell: Shell, reference: str) -> str:
    """The digest that the registry gives for a tag now, without pulling the image.

    Raises:
        OverlayError: no command that can ask is here, or the registry does not answer.
    """
    # skopeo wants a transport; with it, a name without a registry is completed as docker does.
    asks = (
        ["skopeo", "inspect", "--format", "{{.Digest}}", f"docker://{reference}"],
        ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", reference],
    )
    if shell.capture(["skopeo", "--version"]).status == 127:
        engines.install_packages(shell, ["skopeo"])
    seen = []
    for command in asks:
        answer = shell.capture(command)
        if answer.status == 0 and re.fullmatch(r"sha256:[0-9a-f]{64}", answer.output.strip()):
            return answer.output.strip()
        seen.append((answer.errors.strip().splitlines() or [f"exit status {answer.status}"])[-1])
    raise OverlayError(
        f"the digest of {reference} cannot be had",
        seen="; ".join(seen),
        wanted="a registry that answers, and skopeo or docker with buildx",
        fix="run it where the registry can be reached, or write the digest into base.toml",
    )


def pin_digest(project: Project, shell: Shell, architecture: str) -> str:
    """Write the digest of an architecture's pinned tag into base.toml and return it."""
    pinned = image_pin(Pin.load(project.pin_file), architecture)
    digest = resolve_digest(shell, pinned.reference)
    set_pin_values(project.pin_file, f"image.{architecture}", {"digest": digest})
    return digest


def mirror_base(
    project: Project,
    engine: Engine,
    architectures: Sequence[str],
    destination: str,
    now: datetime | None = None,
) -> str:
    """Copy the pinned base by digest to a registry or ``oci-archive:PATH``; record where and when.

    skopeo copies without unpacking, and to a registry without changing the digest; without it the
    engine pulls and pushes.

    Args:
        project: the checkout.
        engine: what copies where there is no skopeo.
        architectures: whose images are wanted; they must be the same one.
        destination: where to.
        now: the moment to record; by default this one.

    Returns:
        What was copied, by digest.

    Raises:
        OverlayError: no destination, the digest cannot be had, the architectures have different
            images, or the copy failed; base.toml is then as it was, but for a digest that was
            filled in.
    """
    check_destination(destination)
    shell = engine.shell
    for architecture in architectures:
        if not image_pin(Pin.load(project.pin_file), architecture).digest:
            say(f"{architecture} has no digest pinned: asking the registry")
            pin_digest(project, shell, architecture)
    pin = Pin.load(project.pin_file)
    sources = sorted({image_pin(pin, architecture).pull_reference for architecture in architectures})
    if len(sources) != 1:
        raise OverlayError(
            "one destination cannot hold the images of two architectures",
            seen=", ".join(sources),
            wanted="one image a call",
            fix="give --arch, and a destination for each",
        )
    source = sources[0]
    say(f"copying {source} to {destination}")
    for command in _copy_commands(shell, engine, source, destination):
        done = shell.stream(command)
        if done.status != 0:
            raise OverlayError(
                f"{source} could not be copied to {destination}",
                seen=(done.output.strip().splitlines() or [f"exit status {done.status}"])[-1],
                wanted="a registry that takes it, or a folder with room",
                fix=f"correct that, then run it again (failed: {' '.join(command)})",
            )
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    stamp = {"location": destination, "date": moment.strftime("%Y-%m-%d %H:%M UTC")}
    for architecture in architectures:
        set_pin_values(project.pin_file, f"mirror.{architecture}", stamp)
    return source


def check_destination(destination: str) -> None:
    """Refuse a mirror's destination that is empty or says no more than the transport."""
    if destination.removeprefix(ARCHIVE).strip():
        return
    raise OverlayError(
        "mirror-base is not told where to copy to",
        seen=destination or "no TO",
        wanted="a registry reference or an archive",
        fix=f"make mirror-base TO=REGISTRY/NAME:TAG, or make mirror-base TO={ARCHIVE}FILE",
    )


def _copy_commands(shell: Shell, engine: Engine, source: str, destination: str) -> list[list[str]]:
    if shell.capture(["skopeo", "--version"]).status == 0:
        target = destination if destination.startswith(ARCHIVE) else f"docker://{destination}"
        return [["skopeo", "copy", f"docker://{source}", target]]
    copies = engine.copy_commands(source, destination)
    if not engine.has_image(source) and engine.pull(source).status != 0:
        raise OverlayError(
            f"the base image {source} cannot be pulled",
            wanted="a registry that answers and still holds it",
            fix="run it where the registry can be reached",
        )
    return copies


def set_pin_values(path: Path, section: str, values: Mapping[str, str]) -> None:
    """Replace string values of one section of a pin file; every other line stays as it is.

    Raises:
        OverlayError: the section has no such key.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    missing = dict(values)
    inside = False
    for number, line in enumerate(lines):
        if line.startswith("["):
            inside = line.strip() == f"[{section}]"
        key = line.partition("=")[0].strip()
        if inside and key in missing:
            lines[number] = f'{key} = "{missing.pop(key)}"\n'
    if missing:
        raise OverlayError(
            f"{path.name}: [{section}] has no {', '.join(missing)}",
            wanted=f"a line for each in [{section}]",
            fix=f"add the line to {path.name}",
        )
    write_text_atomically(path, "".join(lines))
